# SPDX-License-Identifier: Apache-2.0
"""Attention of PyTorch itself: its function, each of its fused kernels, FlexAttention, and matrix products."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import warnings

import numpy as np

from . import decode
from .workload import (Unsupported, Workload, dense_bias, dense_mask, first_line, is_plain_causal, plain, refuse,
                       require_numpy_dtypes)


def import_torch(w: Workload):
    """torch, with the workload's threads."""
    if importlib.util.find_spec("torch") is None:
        raise Unsupported("torch is not installed")
    import torch
    if w.threads:
        torch.set_num_threads(w.threads)
    return torch


def tensor(torch, x, device="cpu"):
    if device != "cpu":
        return tensor(torch, x).to(device)
    from .. import conformance  # whose library explain does without
    name = conformance.name_of(x.dtype)
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        bits = torch.from_numpy(np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}"))
        return bits.view(getattr(torch, name))
    return torch.from_numpy(np.require(x, requirements=["C", "W"]))


def timed(torch, w: Workload, forward, inputs, do):
    """forward, or beside `do` the backward pass alone: the graph of one forward pass, used again."""
    if do is None:
        def run():
            with torch.no_grad():
                return forward()
        return run
    for x in inputs:
        x.requires_grad_(True)
    o, do = forward(), tensor(torch, do, w.device)
    return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


def sdpa(w: Workload, kernel: str | None = None):
    """kernel: a member of SDPBackend, which then runs or refuses; None: the one that PyTorch picks."""
    torch = import_torch(w)
    if w.drawn is not None:
        return decode.sdpa(w, lambda: _choice(kernel))
    kw = w.keywords
    if kw.get("softcap"):
        raise Unsupported("scaled_dot_product_attention has no softcap")
    q, k, v, do = plain(w, "scaled_dot_product_attention")
    (b, hq, sq, _), sk = q.shape, k.shape[2]
    causal = is_plain_causal(kw, sq, sk)
    others = dict(kw, causal=None) if causal else kw
    mask = dense_mask(dataclasses.replace(w, keywords=others), b, hq, sq, sk)
    bias = dense_bias(w, sq, sk)
    if bias is not None and (mask is not None or causal):
        require_numpy_dtypes(w, "a mask beside a bias")
        if mask is None:
            mask = dense_mask(w, b, hq, sq, sk)
        causal = False
        bias = np.where(mask, bias, np.array(-np.inf, bias.dtype)).astype(q.dtype)
    tq, tk, tv = (tensor(torch, x, w.device) for x in (q, k, v))
    extra = bias if bias is not None else mask
    extra = None if extra is None else tensor(torch, extra, w.device)
    options = dict(attn_mask=extra, is_causal=causal, dropout_p=kw.get("dropout_p", 0.0),
                   scale=kw.get("softmax_scale"), enable_gqa=hq != k.shape[1])

    def forward():
        with _choice(kernel):
            return torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, **options)

    inputs = [tq, tk, tv] + ([extra] if kw.get("bias") is not None else [])
    return timed(torch, w, forward, inputs, do)


def _choice(kernel: str | None):
    if kernel is None:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel(getattr(SDPBackend, kernel))


def kernel_of_sdpa(name: str, kernel: str):
    """One of PyTorch's fused kernels, by its member of SDPBackend."""
    def peer(w: Workload):
        if w.device != "cuda":
            raise Unsupported(f"{name} needs a GPU, and NumPy arrays are on the CPU")
        if w.backward and w.keywords.get("dropout_p"):
            # PyTorch 2.11: an illegal memory access, and the process is lost.
            raise Unsupported(f"{name} with dropout faults when its gradients are replayed in a graph")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why each of the other kernels is not used
                call = sdpa(w, kernel)
                call()
            return call
        except RuntimeError as error:
            raise Unsupported(f"{name} cannot: {first_line(error)}") from error
    return peer


def _at(x, *indices):
    """An index for each axis of x, 0 where it is broadcast."""
    return tuple(i if n > 1 else 0 for i, n in zip(indices[-x.ndim:], x.shape))


def flex(w: Workload):
    torch = import_torch(w)
    kw = w.keywords
    refuse(w, ("key_ranges", "seqlens_q", "seqlens_k"), "FlexAttention: {} is not translated by this bench")
    if kw.get("dropout_p"):
        raise Unsupported("FlexAttention has no dropout")
    if w.backward and w.device == "cpu":
        raise Unsupported("FlexAttention on the CPU has no backward pass")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    q, k, v, do = plain(w, "FlexAttention")
    (b, hq, sq, _), sk = q.shape, k.shape[2]
    shift = sk - sq if kw.get("align") == "bottom_right" else 0
    left, right = kw.get("window") or (-1, -1)
    right = 0 if kw.get("causal") else right
    softcap, slopes, ids = kw.get("softcap"), kw.get("alibi_slopes"), kw.get("segment_ids")
    tq, tk, tv = (tensor(torch, x, w.device) for x in (q, k, v))
    slopes = None if slopes is None else tensor(torch, np.atleast_2d(slopes), w.device)
    ids = None if ids is None else [tensor(torch, x, w.device) for x in
                                    (ids if isinstance(ids, tuple) else (ids, ids))]
    bias, keep, drop = (None if kw.get(name) is None else tensor(torch, kw[name], w.device)
                        for name in ("bias", "keep", "drop"))

    def visible(n, h, i, j):
        seen = (i + shift - left <= j) if left >= 0 else (j >= 0)
        if right >= 0:
            seen = seen & (j <= i + shift + right)
        if keep is not None:
            seen = seen & keep[_at(keep, n, h, i, j)]
        if drop is not None:
            seen = seen & ~drop[_at(drop, n, h, i, j)]
        return seen if ids is None else seen & (ids[0][n, i] == ids[1][n, j])

    def score(x, n, h, i, j):
        if softcap:
            x = softcap * torch.tanh(x / softcap)
        if slopes is not None:
            x = x - slopes[n if slopes.shape[0] > 1 else 0, h] * (i + shift - j).abs()
        return x if bias is None else x + bias[_at(bias, n, h, i, j)]

    def of_more_than_one(axis):
        masks = [x for x in (keep, drop) if x is not None and x.ndim >= 4 - axis]
        return any(x.shape[axis - 4] > 1 for x in masks)

    block_mask = None
    if left >= 0 or right >= 0 or not (ids is keep is drop is None):
        block_mask = create_block_mask(
            visible, b if ids is not None or of_more_than_one(0) else None,
            hq if of_more_than_one(1) else None, sq, sk, device=w.device)
    torch.compiler.reset()  # else the eighth problem finds the compiler's cache full and runs unfused
    compiled = torch.compile(flex_attention)
    options = dict(score_mod=score if softcap or not (slopes is bias is None) else None,
                   block_mask=block_mask, scale=kw.get("softmax_scale"),
                   enable_gqa=hq != k.shape[1])

    def forward():
        return compiled(tq, tk, tv, **options)

    try:
        call = timed(torch, w, forward, [tq, tk, tv] + ([bias] if bias is not None else []), do)
        call()
        return call
    except Exception as error:  # the compiler's own errors are many; all mean "not here"
        raise Unsupported(f"FlexAttention does not compile this: {type(error).__name__}: "
                          f"{first_line(error)}") from error


def matmul(w: Workload):
    torch = import_torch(w)
    kw = w.keywords
    if kw.get("softcap") or kw.get("dropout_p"):
        raise Unsupported("the unfused computation has no softcap and no dropout here")
    q, k, v, do = plain(w, "the unfused computation")
    (b, hq, sq, dqk), (hk, sk) = q.shape, k.shape[1:3]
    scale = dqk**-0.5 if kw.get("softmax_scale") is None else kw["softmax_scale"]
    mask, bias = dense_mask(w, b, hq, sq, sk), dense_bias(w, sq, sk)
    tq, tk, tv = (tensor(torch, x, w.device) for x in (q, k, v))
    hidden = None if mask is None else tensor(torch, ~mask, w.device)
    bias = None if bias is None else tensor(torch, bias, w.device)

    def forward():
        rows = tq.reshape(b, hk, -1, dqk)
        x = (torch.matmul(rows, tk.transpose(2, 3)) * scale).reshape(b, hq, sq, sk)
        x = x if bias is None else x + bias
        x = x if hidden is None else x.masked_fill(hidden, -torch.inf)
        p = torch.softmax(x, -1).reshape(b, hk, -1, sk)
        return torch.matmul(p, tv).reshape(b, hq, sq, -1)

    inputs = [tq, tk, tv] + ([bias] if kw.get("bias") is not None else [])
    return timed(torch, w, forward, inputs, do)
