# SPDX-License-Identifier: Apache-2.0
# example (torch): a vision transformer that knows nothing of tessera, through patch_sdpa()
"""A vision transformer whose code knows nothing of tessera, trained through tessera: patch_sdpa() sends
its F.scaled_dot_product_attention there. The task, telling stripes across, stripes down and checks
apart in noise, needs no download.

    ./dev example torch/vit                  (half a minute on a CPU)
    ./dev example torch/vit --steps 300 --device cuda --dtype bfloat16
"""
import argparse
import contextlib
import time

import torch
from torch import nn
from torch.nn import functional as F

import tessera.torch


class Attention(nn.Module):
    """As model zoos have it: one product for q, k and v, heads before the sequence, fused attention."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, size=32, patch=4, dim=64, depth=3, num_heads=4, num_classes=3):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def pictures(count: int, size: int, generator):
    """(images [count, 1, size, size], labels): stripes across, stripes down or checks, in noise."""
    with torch.device(generator.device):  # another may be the default
        labels = torch.randint(3, (count,), generator=generator)
        shift = torch.randint(4, (count, 2, 1, 1), generator=generator)
        y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        across, down = (y + shift[:, 0]) // 2 % 2, (x + shift[:, 1]) // 2 % 2
        images = torch.stack([across, down, across ^ down])[labels, torch.arange(count)]
        return (images + torch.randn(images.shape, generator=generator))[:, None], labels


def train(steps: int, device, dtype) -> tuple[list[float], float, float]:
    """(losses, accuracy on new pictures, seconds)."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = VisionTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    autocast = torch.autocast(torch.device(device).type, dtype) if dtype != torch.float32 else \
        contextlib.nullcontext()
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        images, labels = (x.to(device) for x in pictures(32, 32, generator))
        with autocast:
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    with torch.no_grad(), autocast:
        images, labels = (x.to(device) for x in pictures(300, 32, generator))
        accuracy = (model(images).argmax(-1) == labels).float().mean().item()
    return losses, accuracy, seconds


def main(argv=None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args(argv)
    curves = {}
    for name, patched in (("PyTorch", contextlib.nullcontext), ("tessera", tessera.torch.patch_sdpa)):
        with patched():
            curves[name], accuracy, seconds = train(args.steps, args.device, getattr(torch, args.dtype))
        print(f"{name:<8} loss {curves[name][0]:.3f} -> {curves[name][-1]:.3f}, "
              f"{accuracy:.0%} of new pictures right, {seconds:.1f} s")
    return curves


if __name__ == "__main__":
    main()
