# SPDX-License-Identifier: Apache-2.0
"""Query, key and value from one buffer, or from two."""

from __future__ import annotations

import torch

from .... import _words


def separate(query, key, value, qkv, kv, interleave_dim, qkv_format: str):
    """(q, k, v, layout): views, and TE's name of the layout, None when nobody declared one."""
    if qkv is None and kv is None:
        for name, x in (("query_layer", query), ("key_layer", key), ("value_layer", value)):
            if not isinstance(x, torch.Tensor):
                raise _words.error(name, type(x).__name__, "must be a torch.Tensor; three are "
                                   "required unless packed in qkv_layer, or kv_layer beside a query")
        return query, key, value, None
    if interleave_dim not in (-3, -2):
        raise _words.error("qkv_interleave_dim", interleave_dim, "qkv_interleave_dim must be -3, "
                           "for [.., 3, h, d], or -2, for [.., h, 3, d]")
    if qkv is not None and kv is not None:
        raise _words.error("kv_layer", type(kv).__name__, "qkv_layer and kv_layer are mutually "
                           "exclusive; give one of them")
    packed, name, parts = (qkv, "qkv_layer", 3) if qkv is not None else (kv, "kv_layer", 2)
    others = {"query_layer": query} if parts == 3 else {}
    for other, x in {**others, "key_layer": key, "value_layer": value}.items():
        if x is not None:
            raise _words.error(other, type(x).__name__, f"must be None when {name} is provided, of "
                               "which it is a part")
    if parts == 2 and not isinstance(query, torch.Tensor):
        raise _words.error("query_layer", type(query).__name__,
                           "query_layer is required when kv_layer is given")
    if not isinstance(packed, torch.Tensor):
        raise _words.error(name, type(packed).__name__, "must be a torch.Tensor")
    if packed.dim() != len(qkv_format) + 1 or packed.shape[interleave_dim] != parts:
        raise _words.error(f"{name}.shape", list(packed.shape), f"must have {len(qkv_format) + 1} "
                           f"axes, and must have size {parts} at dim {interleave_dim}")
    if packed.stride(-1) != 1:
        raise _words.error(f"{name}.stride()", packed.stride(), "must have stride 1 in its last "
                           "axis; call contiguous()")
    tokens, rest = qkv_format[:-2], "hd"
    axis = f"{parts}{rest}" if interleave_dim == -3 else f"h{parts}d"
    views = packed.unbind(interleave_dim)
    if parts == 3:
        return *views, tokens + axis
    return query, *views, f"{qkv_format}_{tokens}{axis}"
