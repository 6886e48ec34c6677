# SPDX-License-Identifier: Apache-2.0
"""Jagged nested tensors as packed sequences: [b, j, h, d], or [b, h, j, d] for layout="bhsd", is a view
of a packed [t, h, d], and its offsets are cu_seqlens. Gradients go the way back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._call import _args
from . import _tensors

_LAYOUTS = {"bshd": 1, "bhsd": 2}  # -> the ragged axis
_OF_FORMAT = ("layout", "seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k",
              "cu_seqlens_q_padded", "cu_seqlens_k_padded", "page_table", "out")


class _Packed(NamedTuple):
    values: torch.Tensor      # [t, h, d]
    cu_seqlens: torch.Tensor  # [b + 1]
    padded: torch.Tensor | None


def is_nested(*tensors) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_nested for x in tensors)


def attention(function, q, k, v, keywords: dict):
    """function(q, k, v, **keywords), which is attention, of nested tensors: o is nested as q is; lse is
    packed, [hq, t]."""
    a = _args.Arguments(_tensors, "attention")
    layout = a.choice("layout", keywords.get("layout") or "bshd", tuple(_LAYOUTS))
    for name in _OF_FORMAT[1:]:
        if keywords.get(name) is not None:
            raise a.error(name, keywords[name], "nested tensors say their lengths themselves; leave "
                          "it out")
    ragged = _LAYOUTS[layout]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or not x.is_nested or x.layout is not torch.jagged or \
                x.dim() != 4 or x._ragged_idx != ragged:
            raise a.error(name, x, "q, k and v must all be nested tensors of layout torch.jagged, "
                          f"ragged in axis {ragged} of 4 for layout={layout!r}")
    if k.shape[ragged] != v.shape[ragged]:
        raise a.error("v", v, "must have the lengths of k: build both from one tensor of offsets")
    queries = _packed(q, ragged)
    keys = _packed(k, ragged) if k.shape[ragged] != q.shape[ragged] else queries
    values = [queries.values, *(_values(x, ragged) for x in (k, v))]
    given = {name: x for name, x in keywords.items() if name not in _OF_FORMAT}
    if not {"keep", "drop", "bias"}.isdisjoint(given):
        given = {"max_seqlen_q": _longest(queries), "max_seqlen_k": _longest(keys), **given}
    results = function(*values, layout="thd", cu_seqlens_q=queries.cu_seqlens,
                       cu_seqlens_k=keys.cu_seqlens, cu_seqlens_q_padded=queries.padded,
                       cu_seqlens_k_padded=keys.padded, **given)
    o, *more = results if isinstance(results, tuple) else (results,)
    nested = torch.nested.nested_tensor_from_jagged(o, q.offsets(), q.lengths())
    o = nested.transpose(1, 2) if ragged == 2 else nested
    return (o, *more) if more else o


def _values(x, ragged: int):
    values = x.values()
    return values if ragged == 1 else values.transpose(0, 1)


def _packed(x, ragged: int) -> _Packed:
    offsets, lengths = x.offsets(), x.lengths()
    if lengths is None:
        return _Packed(_values(x, ragged), offsets, None)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(offsets.dtype)
    return _Packed(_values(x, ragged), cu_seqlens, offsets)


def _longest(packed: _Packed) -> int:
    return int(packed.cu_seqlens.diff().max()) if len(packed.cu_seqlens) > 1 else 0
