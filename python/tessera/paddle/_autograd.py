# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention and merge, as PyLayers.

What the backward pass needs is saved by save_for_backward and nowhere else: recompute replaces
saved tensors by ones that it makes again. Outputs are saved detached, as a context that holds its
own output is never freed.
"""

from __future__ import annotations

import paddle
from paddle.autograd import PyLayer

from .. import _args, _keywords, _lib, _prepared, _utilities
from . import _tensors


class Attention(PyLayer):
    """apply(call, *tensors): the results of `call`, differentiable in `tensors`, which are those of
    its arguments that want gradients."""

    @staticmethod
    def forward(ctx, call: Call, *tensors):
        want_lse = is_on(call.given, "return_lse")
        results = call.run()
        ctx.set_materialize_grads(False)
        ctx.names, ctx.options = call.wanted, {}
        ctx.places, saved = call.packed(ctx.options, o=results[0].detach(), lse=results[1].detach())
        ctx.save_for_backward(*saved)
        if len(results) == 3:
            ctx.mark_non_differentiable(results[2])
        if not want_lse:
            del results[1]
        ctx.has_lse = want_lse
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def backward(ctx, do, *others):
        refuse_second_derivative("attention")
        saved = ctx.saved_tensor()
        given = dict(ctx.options)
        for name, place in ctx.places.items():
            given[name] = tuple(saved[i] for i in place) if isinstance(place, tuple) else saved[place]
        return gradients(given, ctx.names, do, others[0] if ctx.has_lse else None)


class Call:
    """Arguments of attention, and the names of those that want gradients."""

    def __init__(self, given: dict, wanted: tuple[str, ...]):
        self.given, self.wanted = given, wanted

    def run(self) -> list:
        """o, lse[, max_logit]. Raises what the backward pass would raise, of which autograd would
        make an OSError."""
        given = {**self.given, "return_lse": True}
        forward = _prepared.prepared(_tensors, "attention", _prepared.describe_forward, given)
        if self.wanted not in forward.differentiable:
            backward = {**given, **dict.fromkeys(("do", "o", "lse"), _prepared.NEW),
                        **{f"d{name}": _prepared.NEW for name in self.wanted}}
            _prepared.prepared(_tensors, "attention_backward", _prepared.describe_backward, backward)
            forward.differentiable.add(self.wanted)
        return forward.run(given)

    def packed(self, options: dict, **results):
        """(name -> place in the list, or a tuple of them, list of tensors) of what the backward pass
        reads. Values that are no tensors go into `options`. One tensor given twice stays one."""
        places, saved, seen = {}, [], {}

        def place(tensor):
            if id(tensor) not in seen:
                seen[id(tensor)] = len(saved)
                saved.append(tensor)
            return seen[id(tensor)]

        for name, value in {**self.given, **results}.items():
            if isinstance(value, paddle.Tensor):
                places[name] = place(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], paddle.Tensor):
                places[name] = tuple(map(place, value))
            elif name in _keywords.BACKWARD:
                options[name] = value
        return places, saved


def is_on(given: dict, name: str) -> bool:
    """A switch that is overridden before the call would look at it."""
    value = given.get(name)
    if value is None or type(value) is bool:
        return bool(value)
    return _args.Arguments(_tensors, "attention").boolean(name, value)


def gradients(given: dict, names, do, dlse):
    """Those of the arguments `names`, in their order."""
    given["do"] = paddle.zeros_like(given["o"]) if do is None else _dense(do)
    given["dlse"] = None if dlse is None else _dense(dlse)
    given.update({name: None for name in _args.GRADIENTS}, **{f"d{name}": _prepared.NEW
                                                              for name in names})
    results = _prepared.call(_tensors, "attention_backward", _prepared.describe_backward, given)
    by_name = dict(zip(_args.GRADIENTS, results))
    found = tuple(by_name[f"d{name}"] for name in names)
    return found[0] if len(found) == 1 else found


def _dense(x):
    """Autograd's gradients may have strides that no output of ours has."""
    return x if not x.shape or x.strides[-1] == 1 else x.contiguous()


def refuse_second_derivative(operation: str):
    if paddle.is_grad_enabled():  # inside a backward pass, exactly under create_graph=True
        raise _lib.Refused(f"tessera.{operation}: create_graph=True: second derivatives are not "
                           "available; leave it out, or use Paddle's operations")


class Merge(PyLayer):
    """apply(layout, o, lse, o, lse, ...) -> (o, lse)."""

    @staticmethod
    def forward(ctx, layout, *tensors):
        parts = list(zip(tensors[::2], tensors[1::2]))
        o, lse = _utilities.merged(_tensors, parts, layout)
        ctx.layout, ctx.wanted = layout, [not x.stop_gradient for x in tensors]
        ctx.save_for_backward(*tensors, o.detach(), lse.detach())
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        """With w = exp(lse_i - lse): do_i = w do, and dlse_i = w (dlse + <do, o_i - o>)."""
        refuse_second_derivative("merge")
        *tensors, o, lse = ctx.saved_tensor()
        dtype, results = o.dtype, []
        o, do = o.astype(lse.dtype), do.astype(lse.dtype)
        for part_o, part_lse in zip(tensors[::2], tensors[1::2]):
            weight = paddle.exp(part_lse - lse)
            weight = paddle.where(part_lse == -float("inf"), paddle.zeros_like(weight), weight)
            seen = _like_o(weight, ctx.layout) != 0  # a part that saw nothing is not read
            difference = paddle.where(seen, part_o.astype(lse.dtype) - o, paddle.zeros_like(o))
            inner = _like_lse((difference * do).sum(-1), ctx.layout)
            results += [(_like_o(weight, ctx.layout) * do).astype(dtype), weight * (dlse + inner)]
        return tuple(x if wanted else None for x, wanted in zip(results, ctx.wanted))


# lse's axes among o's without head_dim: lse is [b, h, s], packed [h, t].
_ROWS = {"bshd": (0, 2, 1), "sbhd": (2, 0, 1), "bhsd": (0, 1, 2), "thd": (1, 0)}
_BACK = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "bhsd": (0, 1, 2), "thd": (1, 0)}


def _like_o(x, layout):
    return x.transpose(_ROWS[layout]).unsqueeze(-1)


def _like_lse(x, layout):
    return x.transpose(_BACK[layout])
