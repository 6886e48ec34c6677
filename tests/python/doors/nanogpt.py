# SPDX-License-Identifier: Apache-2.0
"""A script as nanoGPT's model.py and train.py are, which knows nothing of tessera: test_flash_impl.py runs it as it is
and with tessera in PyTorch's registry.

    python nanogpt.py [--autocast] [--compile]
"""
import sys
from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.nn import functional as F

VOCAB, BLOCK, LAYERS, HEADS, WIDTH, BATCH, STEPS = 64, 32, 2, 4, 64, 4, 6


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in self.c_attn(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalSelfAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        logits = self.lm_head(self.h(x))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def train(arguments):
    """The loss of every step."""
    torch.manual_seed(1337)
    device = torch.get_default_device()
    data = (torch.arange(4096) * 7 % 31 + torch.randint(0, 2, (4096,))) % VOCAB
    model = GPT().to(device)
    run = torch.compile(model) if "--compile" in arguments else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    autocast = torch.autocast(device.type, torch.bfloat16) if "--autocast" in arguments else nullcontext()
    losses = []
    for _ in range(STEPS):
        at = torch.randint(len(data) - BLOCK - 1, (BATCH,)).tolist()
        x, y = (torch.stack([data[i + shift:i + shift + BLOCK] for i in at]) for shift in (0, 1))
        with autocast:
            loss = run(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = train(sys.argv[1:])
    print(*(f"{loss:.6f}" for loss in losses))
