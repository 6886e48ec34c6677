# SPDX-License-Identifier: Apache-2.0
"""Attention written out in float64, beside which drop-ins are tested: one sequence [s, h, d] at a time."""
import math

import torch

SEED = 11


def normal(*shape, dtype=torch.float32, grad=False, seed=SEED):
    """The same numbers on every device: they are drawn on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=generator, device="cpu")
    return x.to(torch.get_default_device(), dtype).requires_grad_(grad)


def shuffled(n, seed=SEED):
    """0 … n - 1, int32, in an order that is the same on every device."""
    order = torch.randperm(n, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return order.to(torch.get_default_device(), torch.int32)


def distance(sq, sk, shift=0):
    """j - (i + shift), [sq, sk]."""
    return torch.arange(sk) - torch.arange(sq)[:, None] - shift


def visible(sq, sk, causal=False, left=-1, right=-1, bottom_right=True):
    apart = distance(sq, sk, sk - sq if bottom_right else 0)
    seen = torch.ones(sq, sk, dtype=torch.bool)
    if left >= 0:
        seen &= apart >= -left
    right = 0 if causal else right
    return seen & (apart <= right) if right >= 0 else seen


def attend(q, k, v, seen, scale=None, softcap=0.0, bias=None):
    """(o [sq, hq, dv], lse [hq, sq]) of one sequence."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    x = torch.einsum("qhd,khd->hqk", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    x = softcap * torch.tanh(x / softcap) if softcap > 0 else x
    x = x if bias is None else x + bias
    x = x.masked_fill(~seen, -torch.inf)
    lse = x.logsumexp(-1)
    p = torch.where(lse[..., None] == -torch.inf, 0.0, (x - lse[..., None]).exp())
    return torch.einsum("hqk,khd->qhd", p, v), lse


def close(a, b, tolerance=2e-5):
    torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance)


def same_gradients(ours, theirs, inputs, tolerance=1e-4):
    """Gradients of two outputs of the same inputs, for one cotangent."""
    cotangent = normal(*ours.shape, seed=5)
    mine = torch.autograd.grad(ours, inputs, cotangent.to(ours.dtype))
    other = torch.autograd.grad(theirs, inputs, cotangent.to(theirs.dtype))
    for a, b in zip(mine, other):
        close(a, b, tolerance)
