# SPDX-License-Identifier: Apache-2.0
# example (torch): a door: a GPT as nanoGPT's, on tessera through PyTorch's registry of flash attention
"""Train a GPT as nanoGPT's, whose code knows nothing of tessera, with PyTorch's attention, with tessera in PyTorch's
registry, and with PyTorch's again: the losses are the same, and a profile says how often tessera ran.

    ./dev example doors/torch_registry                      (seconds on a CPU)
    ./dev example doors/torch_registry --device cuda        (in bf16, as PyTorch's fused attention takes no fp32 there)
"""
import argparse

import torch
from torch import nn
from torch.nn import functional as F

import tessera.torch  # noqa: F401  registers the name "tessera"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 3 * 64)), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)  # 4 heads of 16
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def train(device, steps=6):
    """The loss of every step, and the calls of tessera's operators."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64), Block(), Block(), nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = (torch.arange(4 * 33) * 7 % 31).view(4, 33).to(device)
    losses = []
    with torch.profiler.profile() as profile:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(f"{loss.item():.4f}")
    return losses, sum(event.count for event in profile.key_averages() if event.key.startswith("tessera::"))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args(argv).device
    for name in ("PyTorch", "tessera", "PyTorch again"):
        if name == "tessera":
            torch.nn.attention.activate_flash_attention_impl("tessera")
        losses, calls = train(device)
        if name == "tessera":
            torch.nn.attention.restore_flash_attention_impl()
        print(f"{name:13}  losses {' '.join(losses)}  calls of tessera {calls}")


if __name__ == "__main__":
    main()
