# SPDX-License-Identifier: Apache-2.0
"""Formulas of torch.utils.flop_counter for tessera's operators. As for PyTorch's own attention, every
pair of a query and a key of a sequence counts, masks aside: 2·(dqk + dv) operations forward, and
backward those of five products, the scores being computed once more."""

from __future__ import annotations

from ..._call._args import ORDERS
from ..._call import Call


def _pairs_and_sizes(inputs, text):
    """(pairs of a query and a key of every query head, dqk, dv)."""
    call = Call.of(text)
    at = {name: inputs[place.operand] for name, place in call.places.items()}
    q, k, v = at["q"], at["k"], at["v"]
    heads = q.shape[ORDERS[call.layouts[0]][2]]
    lengths = []
    for side, x, layout in zip("qk", (q, k), call.layouts):
        s = ORDERS[layout][1]
        if side == "k" and call.is_paged:
            lengths.append(at["page_table_k"].shape[1] * k.shape[1])
        elif f"cu_seqlens_{side}" in at:
            lengths.append(at[f"cu_seqlens_{side}"].diff())
        else:
            lengths.append(x.shape[s])
    batch = next((len(x) for x in lengths if not isinstance(x, int)), None)
    if batch is None:
        pairs = q.shape[ORDERS[call.layouts[0]][0]] * lengths[0] * lengths[1]
    else:
        pairs = int((lengths[0] * lengths[1]).sum())
    return heads * pairs, q.shape[-1], v.shape[-1]


def _forward(inputs, sizes, text, out_val=None, **_) -> int:
    pairs, dqk, dv = _pairs_and_sizes(inputs, text)
    return 2 * pairs * (dqk + dv)


def _backward(inputs, sizes, text, out_val=None, **_) -> int:
    pairs, dqk, dv = _pairs_and_sizes(inputs, text)
    return 2 * pairs * (3 * dqk + 2 * dv)


def _into(outputs, inputs, sizes, text, out_val=None, **_) -> int:
    return (_backward if Call.of(text).is_backward else _forward)(inputs, sizes, text)


def register(ops):
    """`ops` is torch.ops.tessera."""
    from torch.utils.flop_counter import register_flop_formula
    for operator, formula in ((ops.attention, _forward), (ops.attention_into, _into),
                              (ops.attention_backward, _backward)):
        register_flop_formula(operator, get_raw=True)(formula)
