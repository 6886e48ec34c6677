# SPDX-License-Identifier: Apache-2.0
"""Sharding strategies of the operators tessera::*, for programs that give DTensors to torch.ops.tessera itself.
tessera.torch.attention takes apart its DTensors before (_dtensor.py): it can give a rank the keys that its heads
read, and dropout the mask of the whole.

For each axis of the mesh an operator is computed on parts of the batch or of the heads, or on every rank alike."""

from __future__ import annotations

import itertools
import math

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import generate_redistribute_costs, register_op_strategy

from .. import _lib
from .._call import GRADIENTS, Call, _fold


def register():
    """Tells DTensor of the strategies."""
    operators = torch.ops.tessera
    each = [operators.attention.default, operators.attention_backward.default]
    register_op_strategy(each, RuntimeSchemaInfo(1, needs_pytree=True))(_of_attention)
    register_op_strategy(operators.merge.default, RuntimeSchemaInfo(2, needs_pytree=True))(_of_merge)


# ---- below: how ----

def _of_attention(schema) -> OpStrategy:
    call, inputs = Call.of(schema.args_schema[2]), schema.args_strategy
    at = {name: inputs[place.operand] for name, place in call.places.items() if place.axis < 0}
    axes = [_axes_of(call, operand, x.shape) for operand, x in zip(call.operands, inputs)]
    shapes = dict(zip(call.operands, axes))
    results = [shapes[call.operands[like]] if isinstance(like, int) else _axes_of(call, operand, None)
               for operand, like in zip(call.results, call.likes)]
    kinds = ["sum" if operand.tensors[0] in GRADIENTS else "max" for operand in call.results]
    q, layout, known = at.get("q"), call.layouts[0], ""
    if q is not None:
        _check_rows(q, layout)
        known = "b" * ("b" in layout and not call.is_packed and (call.is_paged or "b" in call.layouts[1])) + "h"
    if len(at) < len(call.places) or "dropout_p" in call.values:
        known = ""  # several tensors in one; a mask that counts heads
    sizes = {axis: [x.shape[own[axis]] for own, x in zip(axes, inputs) if axis in own] for axis in known}
    return _every(schema, known, sizes, axes, results, kinds)


def _of_merge(schema) -> OpStrategy:
    """Rows are each for itself: a part of any of o's axes but d will do."""
    inputs, layout = schema.args_strategy, tuple(_lib.FORMATS)[schema.args_schema[2]]
    of_o, of_lse = ({axis: i for i, axis in enumerate(text) if axis != "d"}
                    for text in (layout, "ht" if layout == "thd" else "bhs"))
    axes = [of_o if x.ndim == len(layout) else of_lse for x in inputs]
    sizes = {axis: [inputs[0].shape[i]] for axis, i in of_o.items()}
    return _every(schema, layout.replace("d", ""), sizes, axes, [of_o, of_lse], ["sum", "sum"])


def _axes_of(call: Call, operand, shape) -> dict[str, int]:
    """Where an operand or a result has the axes b and h, if there are several."""
    name, layout = operand.tensors[0], call.layouts[0]
    rank = {"o": len(layout), "lse": len(layout) - 1, "max_logit": 1}.get(name, 0) if shape is None else len(shape)
    letters = _fold.Axes(call.layouts, call.is_paged).letters(name, rank)
    return {axis: i for i, axis in enumerate(letters) if axis in ("b", "h") and (shape is None or shape[i] > 1)}


def _check_rows(q: OpStrategy, layout: str):
    for place in q.strategies[0].output_spec.placements:
        if place.is_shard() and layout[place.dim] in ("s", "t"):
            raise _lib.Refused(f"tessera.attention: q.placements={q.strategies[0].output_spec.placements}: shards the "
                               "sequence; use tessera.torch.context_parallel.attention, or redistribute to shards of "
                               "the batch or of the heads")


def _every(schema, known: str, sizes: dict, axes, results, kinds) -> OpStrategy:
    """What each axis of the mesh may do, and all of them together; `axes` and `results` say where inputs and outputs
    have an axis, `kinds` what parts of outputs without it add up to."""
    mesh, inputs = schema.get_mesh_from_args(), schema.args_strategy
    strategies = []
    for split in itertools.product(("", *known), repeat=mesh.ndim):
        ranks = {axis: math.prod([n for n, own in zip(mesh.shape, split) if own == axis]) for axis in known}
        if any(size % ranks[axis] for axis in set(split) - {""} for size in sizes[axis]):
            continue
        into = [DTensorSpec(mesh, tuple(Shard(own[axis]) if axis in own else Replicate() for axis in split),
                            tensor_meta=x.tensor_meta) for own, x in zip(axes, inputs)]
        out = [DTensorSpec(mesh, tuple(Replicate() if not axis else Shard(own[axis]) if axis in own else Partial(kind)
                                       for axis in split)) for own, kind in zip(results, kinds)]
        costs = [generate_redistribute_costs(x, spec) for x, spec in zip(inputs, into)]
        strategies.append(OpSpec(output_specs=tuple(out), input_specs=into, redistribute_cost=costs))
    return OpStrategy(strategies)
