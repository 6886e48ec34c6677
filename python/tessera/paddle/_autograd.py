# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention and merge, as PyLayers.

What the backward pass needs is saved by save_for_backward and nowhere else: recompute replaces
saved tensors by ones that it makes again. Outputs are saved detached, as a context that holds its
own output is never freed.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

import paddle
from paddle.autograd import PyLayer

from .. import _lib, _utilities
from .._call import Call, _args, _prepared
from .._call._description import NEW, returned
from . import _tensors


def attention(given: dict, wanted: tuple[str, ...]):
    """attention of keywords, differentiable in those that `wanted` names."""
    hides_lse = _args.ask_for_lse(_tensors, given)
    check_autograd(given["q"].dtype)
    prepared = _prepared.of_keywords(_tensors, "attention", given)
    operands = prepared.operands(given)
    places = tuple(prepared.call.places[name].operand for name in wanted)
    if places not in prepared.differentiable:  # or autograd would make an OSError of what is wrong
        rows = (NEW,) * 3
        _prepared.of_call(_tensors, prepared.call.backward(places, False), (*rows, *operands))
        prepared.differentiable.add(places)
    results = Attention.apply(_Applied(prepared, given, operands, places), *(operands[i] for i in places))
    return returned(results, hides_lse)


def check_autograd(q_dtype):
    """Raises what q's dtype has against a gradient."""
    dtype = _tensors.dtype_name(q_dtype)
    if _args.is_fp8(dtype):
        raise _args.no_autograd(dtype, "tessera.paddle", "paddle.no_grad()")


@dataclasses.dataclass(frozen=True)
class _Applied:
    """A call, and which of its operands want gradients."""
    prepared: _prepared.Prepared
    given: dict  # its keywords
    operands: tuple
    wanted: tuple[int, ...]


class Attention(PyLayer):
    """apply(applied, *tensors) -> (o, lse[, max_logit]), differentiable in `tensors`, which are the operands
    that want gradients."""

    @staticmethod
    def forward(ctx, applied: _Applied, *tensors):
        results = applied.prepared.run(applied.given)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.wanted = applied.prepared.call, applied.wanted
        tensors, ctx.slots = distinct(applied.operands, operator.is_)
        ctx.save_for_backward(*tensors, *(x.detach() for x in results[:2]))
        if len(results) == 3:
            ctx.mark_non_differentiable(results[2])
        return tuple(results)

    @staticmethod
    def backward(ctx, do, dlse, *_):
        refuse_second_derivative("attention")
        *tensors, o, lse = ctx.saved_tensor()
        found = gradients(ctx.call, ctx.wanted, [tensors[i] for i in ctx.slots], o, lse, do, dlse)
        return found[0] if len(found) == 1 else tuple(found)


def distinct(arrays, is_same) -> tuple[list, list[int]]:
    """Each array once, and where every one of them is there: one array given twice must stay one."""
    found, slots = [], []
    for x in arrays:
        slots.append(next((slot for slot, other in enumerate(found) if is_same(x, other)), len(found)))
        found += [x] * (slots[-1] == len(found))
    return found, slots


def gradients(call: Call, wanted: tuple[int, ...], operands, o, lse, do, dlse) -> list:
    """Those of the operands `wanted`."""
    rows = (paddle.zeros_like(o) if do is None else do, o, lse, dlse)[:3 if dlse is None else 4]
    return run(call.backward(wanted, dlse is not None), (*rows, *operands))


def run(call: Call, operands) -> list:
    """What a Call returns."""
    operands = [_dense(x) if i in _rows(call) else x for i, x in enumerate(operands)]
    return _prepared.of_call(_tensors, call, operands).run(operands)


@functools.lru_cache(maxsize=1024)
def _rows(call: Call) -> frozenset[int]:
    """The operands that come from autograd."""
    return frozenset(call.places[name].operand for name in ("do", "dlse") if name in call.places)


def _dense(x):
    """Autograd's gradients may have strides that no output of ours has."""
    return x if not x.shape or x.strides[-1] == 1 else x.contiguous()


def refuse_second_derivative(operation: str):
    if paddle.is_grad_enabled():  # inside a backward pass, exactly under create_graph=True
        raise _lib.Refused(f"tessera.{operation}: create_graph=True: second derivatives are not "
                           "available; leave it out, or use Paddle's operations")


class Merge(PyLayer):
    """apply(layout, out_dtype, o, lse, o, lse, ...) -> (o, lse)."""

    @staticmethod
    def forward(ctx, layout, out_dtype, *tensors):
        parts = list(zip(tensors[::2], tensors[1::2]))
        o, lse = _utilities.merged(_tensors, parts, layout, out_dtype)
        ctx.layout, ctx.wanted = layout, [not x.stop_gradient for x in tensors]
        ctx.save_for_backward(*tensors, o.detach(), lse.detach())
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        """With w = exp(lse_i - lse): do_i = w do, and dlse_i = w (dlse + <do, o_i - o>)."""
        refuse_second_derivative("merge")
        *tensors, o, lse = ctx.saved_tensor()
        results = []
        o, do = o.astype(lse.dtype), do.astype(lse.dtype)
        for part_o, part_lse in zip(tensors[::2], tensors[1::2]):
            weight = paddle.exp(part_lse - lse)
            weight = paddle.where(part_lse == -float("inf"), paddle.zeros_like(weight), weight)
            seen = _like_o(weight, ctx.layout) != 0  # a part that saw nothing is not read
            difference = paddle.where(seen, part_o.astype(lse.dtype) - o, paddle.zeros_like(o))
            inner = _like_lse((difference * do).sum(-1), ctx.layout)
            results += [(_like_o(weight, ctx.layout) * do).astype(part_o.dtype), weight * (dlse + inner)]
        return tuple(x if wanted else None for x, wanted in zip(results, ctx.wanted))


# lse's axes among o's without head_dim: lse is [b, h, s], packed [h, t].
_ROWS = {"bshd": (0, 2, 1), "sbhd": (2, 0, 1), "bhsd": (0, 1, 2), "thd": (1, 0)}
_BACK = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "bhsd": (0, 1, 2), "thd": (1, 0)}


def _like_o(x, layout):
    return x.transpose(_ROWS[layout]).unsqueeze(-1)


def _like_lse(x, layout):
    return x.transpose(_BACK[layout])
