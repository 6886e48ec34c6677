# SPDX-License-Identifier: Apache-2.0
"""flash_attn's arguments as keywords of tessera.torch.attention. The diagonal is always bottom-right; a
negative window side is unbounded, and causal overrides its right side."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import is_fake

from .._lib import Refused
from ..torch import attention, merge


def unpacked(operation: str, name: str, x, axes: str):
    """The tensors that lie beside each other in one, along that of its axes which is a number."""
    names = axes.split(", ")
    axis = next(i for i, text in enumerate(names) if text.isdecimal())
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"tessera.{operation}: {name}={type(x).__name__}: must be a PyTorch tensor of shape [{axes}]")
    if x.dim() != len(names) or x.shape[axis] != int(names[axis]):
        raise ValueError(f"tessera.{operation}: {name}.shape={list(x.shape)}: must be [{axes}]; "
                         f"{name}.movedim(FROM, {axis}) moves an axis there")
    return x.unbind(axis)


def band(causal: bool, window_size) -> dict:
    """The visible band."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"tessera.flash_attn: window_size={window_size!r}: must be a pair (left, right) of integers, "
                         "-1 for no bound")
    left, right = (max(int(side), -1) for side in window_size)
    keywords = {"align": "bottom_right"}
    if causal:
        keywords["causal"], right = True, 0
    if left >= 0 or right > 0 or right == 0 and not causal:
        keywords["window"] = left, right
    return keywords


def score(softmax_scale, softcap, alibi_slopes=None) -> dict:
    """What shapes a score; a softcap of 0 or less is off."""
    return {"softmax_scale": softmax_scale, "softcap": softcap if softcap > 0 else 0.0,
            "alibi_slopes": alibi_slopes}


def with_qv(q, k, v, qv):
    """(q, k, v) whose scores are q kᵀ + qv vᵀ. v's columns come first, where a kernel that finds v in k reads them
    once. Nothing of k and v is copied where v's columns lie before k's already."""
    dv = v.shape[-1]
    if _is_before(v, k):
        k = v.as_strided((*v.shape[:-1], dv + k.shape[-1]), v.stride())
    else:
        k = torch.cat([v, k], -1)
    return torch.cat([qv, q], -1), k, k[..., :dv]


def _is_before(v, k) -> bool:
    """Whether v and k are neighbouring columns of one tensor without a gradient, of values that are there."""
    if torch.compiler.is_compiling() or any(x.requires_grad or is_fake(x) for x in (v, k)):
        return False
    return v.shape[:-1] == k.shape[:-1] and v.stride() == k.stride() and v.stride(-1) == 1 and v.dtype == k.dtype and \
        v.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() and \
        k.storage_offset() == v.storage_offset() + v.shape[-1]


def lengths(max_seqlen_q, max_seqlen_k) -> dict:
    """Bounds of packed lengths, where they are known without asking a device."""
    given = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return {name: None if isinstance(value, torch.Tensor) or value is None else int(value)
            for name, value in given.items()}


def packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=None, used_k=None) -> dict:
    """Where packed sequences lie, with block_table their keys in pages; used_k [b] is how much of each is used."""
    where = {"layout": "thd", "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
             **lengths(max_seqlen_q, max_seqlen_k)}
    if block_table is not None:
        del where["max_seqlen_k"], where["cu_seqlens_k"]
        where.update(seqlens_k=cu_seqlens_k.diff() if used_k is None else used_k, page_table=block_table)
    elif used_k is not None:
        where.update(cu_seqlens_k=cumulative(used_k).to(cu_seqlens_k.dtype), cu_seqlens_k_padded=cu_seqlens_k)
    return where


def deterministic(on: bool) -> bool | None:
    """False leaves it to torch.use_deterministic_algorithms."""
    return True if on else None


def chunk_ranges(attention_chunk: int, positions, shape) -> dict:
    """Queries at `positions` see keys of their own chunk: key_ranges of `shape`."""
    if not attention_chunk:
        return {}
    start = positions.div(attention_chunk, rounding_mode="floor") * attention_chunk
    ranges = torch.stack([start, start + attention_chunk], -1).clamp_(min=0)
    return {"key_ranges": ranges.to(torch.int32).reshape(shape)}


def sequence_of(cu_seqlens, tokens: int):
    """The sequence of each of `tokens` packed tokens, int64; tokens after the last get the last."""
    places = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    found = torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True)
    return found.clamp_(max=max(len(cu_seqlens) - 2, 0)), places


def cumulative(lengths_):
    """cu_seqlens of lengths [b]."""
    return torch.nn.functional.pad(lengths_.cumsum(0), (1, 0)).to(torch.int32)


def combined(out_partial, lse_partial, out=None, out_dtype=None):
    """(out [b, s, h, d], lse [b, s, h]) over the union of parts: out_partial [parts, b, s, h, d] and lse_partial
    [parts, b, s, h], or packed [parts, t, h, d] and [parts, t, h]. out is written where it is given."""
    dtype = out_dtype or (out_partial if out is None else out).dtype
    layout = "thd" if out_partial.dim() == 4 else "bshd"
    rows = lse_partial.transpose(-1, -2).contiguous()
    o, lse = merge(list(zip(out_partial, rows, strict=True)), layout=layout, out_dtype=dtype)
    return o if out is None else out.copy_(o), lse.transpose(-1, -2)


__all__ = ["attention", "combined", "unpacked", "band", "score", "with_qv", "lengths", "packed", "deterministic",
           "chunk_ranges", "sequence_of", "cumulative", "Refused"]
