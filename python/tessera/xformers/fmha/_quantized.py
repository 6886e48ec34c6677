# SPDX-License-Identifier: Apache-2.0
"""Keys and values in codes of 4 bits or fp8, as xformers 0.0.35 has them: xformers.ops.fmha.triton_splitk, and
`dequantize` in xformers.ops.fmha._triton.splitk_kernels.

4 bits: int32 [..., groups + d / 8] for d columns in 1, 2, 4 or 8 groups. First comes an int32 for each group, with an
fp16 scale in its low half and a shift in the high one; then 8 columns in each int32, the first in the lowest bits.
fp8: int32 [..., d / 4] of the bytes of 4 columns in e4m3, the first in the lowest. Beside it, int32 [b, s, h] or
[b, s, g, h] has scale and shift of each row.
A value is code · scale + shift. It is computed in float32 and rounded once, to query's dtype, where xformers rounds
product and sum to fp16 before.
"""

from __future__ import annotations

import torch

_GROUPS = (1, 2, 4, 8)


def decoded(name: str, query, key, value, scale_shift=None):
    """(key, value) in query's dtype, whole. scale_shift is that of fp8 keys and of fp8 values, None for 4 bits."""
    if not key.dtype == value.dtype == torch.int32 or key.shape != value.shape:
        raise ValueError(f"tessera.xformers.{name}: key.dtype={key.dtype}, value.dtype={value.dtype}, key.shape="
                         f"{list(key.shape)}, value.shape={list(value.shape)}: must both be torch.int32 and of one "
                         "shape, as keys in codes are")
    d, columns = query.shape[-1], key.shape[-1]
    shapes = f"tessera.xformers.{name}: query.shape={list(query.shape)}, key.shape={list(key.shape)}"
    if scale_shift is None:
        groups = columns - d // 8
        if groups not in _GROUPS or d % (8 * groups):
            raise ValueError(f"{shapes}: keys of 4 bits must have d / 8 int32, behind one for each of 1, 2, 4 or 8 "
                             "groups of 8 columns or a multiple of it")
        return [_of_4_bits(x, groups).to(query.dtype) for x in (key, value)]
    if d != 4 * columns:
        raise ValueError(f"{shapes}: keys of fp8 must have d / 4 int32")
    return [_of_fp8(x, _row_scales(name, which, x, scales)).to(query.dtype) for x, which, scales in
            zip((key, value), ("k", "v"), scale_shift)]


def _of_4_bits(x, groups: int):
    scale, shift = _halves(x[..., :groups])
    codes = x[..., groups:, None] >> torch.arange(0, 32, 4, dtype=torch.int32, device=x.device) & 15
    columns = codes.flatten(-2).unflatten(-1, (groups, -1))
    return (columns * scale[..., None] + shift[..., None]).flatten(-2)


def _of_fp8(x, scale_shift):
    scale, shift = _halves(scale_shift[..., None])
    return x.contiguous().view(torch.float8_e4m3fn).float() * scale + shift


def _halves(x):
    """The fp16 numbers in the low and in the high halves of int32, in float32."""
    return x.contiguous().view(torch.float16).float().unflatten(-1, (-1, 2)).unbind(-1)


def _row_scales(name: str, which: str, x, scales):
    """scales as [b, s, ...] of x's rows."""
    rows = (*x.shape[:2], *[1] * (5 - x.dim()), *x.shape[2:-1])  # [b, s, g, h]
    text = "None" if scales is None else f"{scales.dtype} {list(scales.shape)}"
    if scales is not None and scales.dim() == 3:
        scales = scales[:, :, None]
    if scales is None or scales.dtype != torch.int32 or scales.shape != rows:
        raise ValueError(f"tessera.xformers.{name}: {which}_fp8_scale_shift={text}: must be torch.int32 {list(rows)}, "
                         "or without the axis of groups")
    return scales.reshape(x.shape[:-1])
