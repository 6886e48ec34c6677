#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What one call of tessera.te's DotProductAttention costs the host, beside tessera.torch.attention,
on a problem of 1 x 16 x 1 x 16 whose arithmetic is nothing.

    python benchmarks/te/host_cost.py [--device cuda] [--repeat 100]

Microseconds, the smallest of the repetitions, one thread; on a GPU nothing is waited for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import tessera.torch
from tessera.te.pytorch import DotProductAttention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torch_host_cost import fastest, repeated  # noqa: E402


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--calls", type=int, default=60)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"{'us a call on ' + args.device:<28}{'te':>8}{'torch':>8}{'ratio':>8}")
    for name, calls in measured(args.device).items():
        ours, theirs = (fastest(repeated(call), args) for call in calls)
        print(f"{name:<28}{ours:8.1f}{theirs:8.1f}{ours / theirs:8.2f}")


def measured(device: str) -> dict:
    """{name: (a call of tessera.te, one of tessera.torch)}."""
    def attention(q, k, v, **keywords):
        keywords = {"layout": "bshd", "causal": True, "align": "top_left", **keywords}
        return tessera.torch.attention(q, k, v, **keywords)

    def backward(run, inputs, do):
        return lambda: torch.autograd.grad(run(*inputs), inputs, do)

    module = DotProductAttention(1, 16, qkv_format="bshd")
    packed = DotProductAttention(1, 16, qkv_format="thd", attn_mask_type="padding_causal")
    x, do = (torch.randn(1, 16, 1, 16, device=device) for _ in range(2))
    shorter, leaves = x[:, :8], [x.clone().requires_grad_() for _ in range(3)]
    cu = torch.tensor([0, 7, 16], dtype=torch.int32, device=device)
    lengths = dict(max_seqlen_q=9, cu_seqlens_q=cu)
    return {
        "forward": (lambda: module(x, x, x), lambda: attention(x, x, x)),
        "forward and backward": (backward(module, leaves, do.flatten(-2)),
                                 backward(attention, leaves, do)),
        "packed": (lambda: packed(x[0], x[0], x[0], cu_seqlens_kv=cu, max_seqlen_kv=9, **lengths),
                   lambda: attention(x[0], x[0], x[0], layout="thd", cu_seqlens_k=cu,
                                     max_seqlen_k=9, **lengths)),
        "two shapes by turns": (
            lambda: (module(x, x, x), module(shorter, shorter, shorter)),
            lambda: (attention(x, x, x), attention(shorter, shorter, shorter))),
    }


if __name__ == "__main__":
    main()
