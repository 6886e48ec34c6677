# SPDX-License-Identifier: Apache-2.0
"""flash_attn.layers.rotary by tessera.torch.rotate. x is [b, s, h, d], or packed [t, h, d] with cu_seqlens, and
is rotated by its positions; cos and sin are [positions, rotary_dim / 2]. seqlen_offsets, an integer or [b], is
the first position."""

from __future__ import annotations

import torch

from ...torch import rotate
from .. import _translate as to


def rotate_half(x, interleaved=False):
    """(x1, x2) -> (-x2, x1), where x1 and x2 are the halves of the last axis, or its even and odd elements."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """apply_rotary_emb by PyTorch's operators, with tables [s, rotary_dim / 2] or [b, s, rotary_dim / 2]."""
    n = 2 * cos.shape[-1]
    cos, sin = ((t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)).unsqueeze(-2)
                for t in (cos, sin))
    return torch.cat([x[..., :n] * cos + rotate_half(x[..., :n], interleaved) * sin, x[..., n:]], -1)


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None,
                     max_seqlen=None):
    """x with the first rotary_dim elements of each head rotated; inplace writes into x too. max_seqlen has no
    effect."""
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    if inplace:
        return _written(x, [(..., cos, sin)], positions, interleaved, cu_seqlens)
    return _turned(x, cos, sin, positions, interleaved, cu_seqlens)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0,
                          num_heads_q=None):
    """Rotates q and k of qkv in place, and returns qkv: [b, s, 3, h, d], or [b, s, hq + 2 hk, d] with
    num_heads_q=hq. cos_k and sin_k are tables for k, if they differ from those for q."""
    if qkv.dim() == 5:
        q, k = (..., 0, slice(None), slice(None)), (..., 1, slice(None), slice(None))
    elif num_heads_q is None or (qkv.shape[2] - num_heads_q) % 2:
        raise ValueError(f"tessera.apply_rotary_emb_qkv_: num_heads_q={num_heads_q}: must be given with qkv "
                         "[b, s, hq + 2 hk, d]")
    else:
        end = (qkv.shape[2] + num_heads_q) // 2
        q, k = (..., slice(num_heads_q), slice(None)), (..., slice(num_heads_q, end), slice(None))
    tables_k = (cos, sin) if cos_k is None else (cos_k, sin_k)
    return _written(qkv, [(q, cos, sin), (k, *tables_k)], _positions(qkv, seqlen_offsets, None), interleaved)


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotates k of kv [b, s, 2, h, d] in place, and returns kv."""
    k = (..., 0, slice(None), slice(None))
    return _written(kv, [(k, cos, sin)], _positions(kv, seqlen_offsets, None), interleaved)


class RotaryEmbedding(torch.nn.Module):
    """A module that makes tables of base^(-2 i / dim) and rotates by them. scale_base gives tables of XPos, which
    grow for q and shrink for k."""

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", 1.0 / self.base ** (even / dim), persistent=False)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """Rotates in place: qkv as apply_rotary_emb_qkv_ takes it, or q [b, s, h, d] with kv [b, s, 2, hk, d]. If
        seqlen_offset is a tensor, max_seqlen bounds the positions."""
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        tables, tables_k = (self._cos_cached, self._sin_cached), (self._cos_k_cached, self._sin_k_cached)
        more = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *tables, *tables_k, num_heads_q=num_heads_q, **more)
        return (apply_rotary_emb(qkv, *tables, inplace=True, **more),
                apply_rotary_emb_kv_(kv, *(tables if self.scale is None else tables_k), **more))

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        """Tables of `seqlen` positions, computed in float32 whatever the module was cast to."""
        kept = self._cos_cached
        if kept is not None and seqlen <= self._seq_len_cached and kept.device == device and kept.dtype == dtype and \
                not (self.training and kept.is_inference()):
            return
        self._seq_len_cached = seqlen
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        exact = self.inv_freq.dtype == torch.float32
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq if exact else 1.0 / self.base ** (even / self.dim))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale = self.scale.to(device) ** ((positions - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)


def _positions(x, offsets, cu_seqlens):
    """What rotate takes: None from 0 on, [b] of first positions, or [t]."""
    if cu_seqlens is None:
        if isinstance(offsets, torch.Tensor):
            return offsets
        return torch.full((x.shape[0],), offsets, dtype=torch.int64, device=x.device) if offsets else None
    sequence, places = to.sequence_of(cu_seqlens, x.shape[0])
    return places - cu_seqlens[sequence] + (offsets[sequence] if isinstance(offsets, torch.Tensor) else offsets)


def _turned(x, cos, sin, positions, interleaved, cu_seqlens=None, out=None):
    return rotate(x, cos.float(), sin.float(), positions, interleaved=interleaved, out=out,
                  layout="bshd" if cu_seqlens is None else "thd")


def _written(whole, parts, positions, interleaved, cu_seqlens=None):
    """`whole` with its parts, (where, cos, sin), turned in place. A leaf that wants a gradient is written too, as the
    original does, but what is returned is another tensor: autograd has no leaf that changed."""
    if not (torch.is_grad_enabled() and whole.requires_grad):
        for where, *tables in parts:
            _turned(whole[where], *tables, positions, interleaved, cu_seqlens, out=whole[where])
        return whole
    result = whole.clone() if whole.is_leaf else whole
    for where, *tables in parts:
        part = result[where]
        part.copy_(_turned(part, *tables, positions, interleaved, cu_seqlens))
    if result is not whole:
        with torch.no_grad():
            whole.copy_(result)
    return result
