# SPDX-License-Identifier: Apache-2.0
"""Names of layouts, from the storage and strides of query, key and value."""

from __future__ import annotations

import math


from .... import _words


def get_qkv_format(qkv_layout: str = "bshd_bshd_bshd", inference_params=None):
    """(qkv_format, q_format, kv_format); with a KV cache q and kv may differ: "thd_2bshd"."""
    q_format, kv_format = _words.formats_of(qkv_layout)
    if inference_params is None:
        return q_format, q_format, q_format
    return q_format if q_format == kv_format else f"{q_format}_2{kv_format}", q_format, kv_format


def get_qkv_layout(q, k, v, qkv_format: str = "sbhd", inference_params=None):
    """(layout, q, k, v, q_format, kv_format): views of one buffer are recognised, everything else
    is three tensors. The tensors come back as they are, whatever their strides."""
    for name, x in (("query_layer", q), ("key_layer", k), ("value_layer", v)):
        if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
            raise _words.error(f"{name}.stride(-1)", x.stride(-1), "must be 1; call contiguous()")
    q_format, _, kv_format = qkv_format.partition("_2")
    kv_format = kv_format or q_format
    layout = _layout(q, k, v, q_format, kv_format)
    if getattr(inference_params, "is_paged", False):
        layout = f"paged_kv_{layout}"
    return layout, q, k, v, q_format, kv_format


def qkv_layout_needs_detection(*qkv) -> bool:
    """Whether one of the tensors may be a part of a buffer that holds others: it is not dense, and not all of
    its storage."""
    return any(x is not None and not x.is_contiguous() and
               x.untyped_storage().size() != x.numel() * x.element_size() for x in qkv)


def maybe_contiguous(tensor):
    """A dense copy of what is not dense along its last axis."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _layout(q, k, v, q_format, kv_format) -> str:
    tokens = q_format[:-2]
    if q_format == kv_format and not (k.is_contiguous() and v.is_contiguous()):
        for axis in ("3hd", "h3d"):
            if q.shape == k.shape == v.shape and _interleaved((q, k, v), axis[0] == "3"):
                return tokens + axis
        for axis in ("2hd", "h2d"):
            if k.shape == v.shape and _interleaved((k, v), axis[0] == "2"):
                return f"{q_format}_{tokens}{axis}"
    return f"{q_format}_{kv_format}_{kv_format}"


def _interleaved(views, before_heads: bool) -> bool:
    """Whether they are views [.., i, :, :] of [.., n, h, d], or [.., :, i, :] of [.., h, n, d]."""
    first, n = views[0], len(views)
    if any(x.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or
           x.stride() != first.stride() or x.dtype != first.dtype for x in views):
        return False
    *tokens, h, d = first.shape
    shape = (*tokens, n, h, d) if before_heads else (*tokens, h, n, d)
    strides = [math.prod(shape[i + 1:]) for i in range(len(shape))]
    step = strides.pop(-3 if before_heads else -2)
    apart = all(x.storage_offset() == first.storage_offset() + i * step
                for i, x in enumerate(views))
    return apart and all(have == want or extent == 1 for have, want, extent in
                         zip(first.stride(), strides, first.shape))
