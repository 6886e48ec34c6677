# SPDX-License-Identifier: Apache-2.0
"""Formulas of torch.utils.flop_counter for tessera's operators. As for PyTorch's own attention, every
pair of a query and a key of a sequence counts, masks aside: 2·(dqk + dv) operations forward, and
backward those of five products, the scores being computed once more."""

from __future__ import annotations

from torch.utils.flop_counter import register_flop_formula

from .. import _lib
from .._args import ORDERS
from . import _describe

_FORMATS = tuple(_lib.FORMATS)
_FORMAT_Q, _FORMAT_KV = (_describe.SCALARS.index(name) for name in ("format_q", "format_kv"))


def _pairs_and_sizes(arguments):
    """(pairs of a query and a key of every query head, dqk, dv)."""
    inputs, values, _ = _describe.unpack(arguments)
    at = dict(zip(_describe.INPUTS, inputs))
    q, k, v = inputs[:3]
    layouts = _FORMATS[values[_FORMAT_Q]], _FORMATS[values[_FORMAT_KV]]
    heads = q.shape[ORDERS[layouts[0]][2]]
    lengths = []
    for side, x, layout in (("q", q, layouts[0]), ("k", k, layouts[1])):
        b, s, _, _ = ORDERS[layout]
        if side == "k" and at["page_table_k"] is not None:
            lengths.append(at["page_table_k"].shape[1] * k.shape[1])
        elif b is None:
            lengths.append(at[f"cu_seqlens_{side}"].diff())
        else:
            lengths.append(x.shape[s])
    batch = next((len(x) for x in lengths if not isinstance(x, int)), None)
    if batch is None:
        pairs = q.shape[ORDERS[layouts[0]][0]] * lengths[0] * lengths[1]
    else:
        pairs = int((lengths[0] * lengths[1]).sum())
    return heads * pairs, q.shape[-1], v.shape[-1]


def _forward(*arguments, out_val=None, **_) -> int:
    pairs, dqk, dv = _pairs_and_sizes(arguments)
    return 2 * pairs * (dqk + dv)


def _forward_out(out, *arguments, out_val=None, **_) -> int:
    return _forward(*arguments)


def _backward(do, o, lse, dlse, grads, *arguments, out_val=None, **_) -> int:
    pairs, dqk, dv = _pairs_and_sizes(arguments)
    return 2 * pairs * (3 * dqk + 2 * dv)


def register(ops):
    """`ops` is torch.ops.tessera."""
    for operator, formula in ((ops.attention, _forward), (ops.attention_out, _forward_out),
                              (ops.attention_backward, _backward)):
        register_flop_formula(operator, get_raw=True)(formula)
