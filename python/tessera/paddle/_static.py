# SPDX-License-Identifier: Apache-2.0
"""Calls in a static graph, as paddle.jit.to_static(full_graph=True) builds it.

The two passes are Python operators (paddle.static.register_op, from Paddle 3.3), which make the
eager call when the graph runs. An operator's inputs have fixed names, so there is one for each call
in a graph; what is no part of the graph is bound to it. Everything that can be said of a call
before it runs is said before its operator is built: an exception in infer_meta would end the
process.
"""

from __future__ import annotations

import itertools
import sys

import paddle
from paddle.jit import api as jit_api

from .. import _args, _keywords, _lib, _prepared
from .._args import ArrayInfo
from . import _autograd, _tensors

Value = paddle.pir.Value
_numbers = itertools.count()


def attention(given: dict):
    """tessera.paddle.attention of a graph's values."""
    if not hasattr(paddle.static, "register_op"):
        raise _lib.Refused("tessera.attention: to_static(full_graph=True): needs Paddle 3.3 or newer, "
                           f"this is {paddle.__version__}; use full_graph=False")
    if given.get("out") is not None:
        raise _args.Arguments(_GraphTensors, "attention").error(
            "out", given["out"], "is for eager calls; a graph has new outputs")
    if isinstance(given.get("rng_state"), list):
        given["rng_state"] = tuple(given["rng_state"])
    want_lse = _autograd.is_on(given, "return_lse")
    _refuse_to_be_saved()
    call = _Call(given)
    call.check()
    wanted = [name for name, value in call.values.items()
              if name in _keywords.DIFFERENTIABLE and not value.stop_gradient]
    outputs = _with_gradients(call, wanted) if wanted else call.forward()
    o, lse, *max_logit = outputs
    results = (o,) + (lse,) * want_lse + tuple(max_logit)
    return results[0] if len(results) == 1 else results


class _Call:
    """Arguments of attention: `values` by name, "segment_ids.0" for a part of a pair, and those that
    are constants of the graph."""

    def __init__(self, given: dict):
        self.given, self.values, self.constants = given, {}, {}
        for name, value in given.items():
            parts = {name: value}
            if isinstance(value, tuple) and any(isinstance(part, Value) for part in value):
                parts = {f"{name}.{i}": part for i, part in enumerate(value)}
            for own, part in parts.items():
                if isinstance(part, Value):  # a PyLayer counts an input that comes twice once
                    twice = any(part.is_same(other) for other in self.values.values())
                    self.values[own] = paddle.assign(part) if twice else part
                else:
                    self.constants[own] = part
                if isinstance(part, paddle.Tensor) and not part.stop_gradient:
                    raise _args.Arguments(_GraphTensors, "attention").error(
                        own, part, "wants a gradient but is no part of the graph; pass it to the "
                        "function, or let its layer own it")

    def check(self):
        """Raises the ValueError or Refused that shapes and options deserve."""
        call = _GraphTensors, "attention", {**self.given, "return_lse": True}
        tensors = _prepared.describe_inputs(*call).problem.tensor
        if all(extent >= 0 for tensor in tensors if tensor.dtype for extent in tensor.extent):
            _prepared.Prepared(*_prepared.describe_forward(*call), None).prepare()

    def forward(self):
        """(o, lse[, max_logit])."""
        names = ["o", "lse"] + ["max_logit"] * bool(self.given.get("return_max_logit"))

        def run(*tensors):
            with paddle.no_grad():
                return tuple(_prepared.call(_tensors, "attention", _prepared.describe_forward,
                                            {**self._arguments(tensors), "return_lse": True}))

        def infer(*metas):
            """Shapes as in _prepared; nothing here may raise."""
            at = dict(zip(self.values, metas))
            q, v = at["q"], at["v"]
            rows = paddle.float64 if q.dtype == paddle.float64 else paddle.float32
            layout = self.given.get("layout") or "bshd"
            b, s, h, _ = _args.ORDERS[layout if isinstance(layout, str) else layout[0]]
            lse = [q.shape[h], q.shape[s]] if b is None else [q.shape[b], q.shape[h], q.shape[s]]
            found = [([*q.shape[:-1], v.shape[-1]], q.dtype), (lse, rows), ([q.shape[h]], rows)]
            return tuple(paddle.static.MetaTensor(shape=shape, dtype=dtype)
                         for shape, dtype in found[:len(names)])

        return _operator("attention", tuple(self.values), names, run, infer)(*self.values.values())

    def backward(self, wanted, saved, do, dlse):
        """Gradients of `wanted`; `saved` are the values, o and lse."""
        names = (*self.values, "o", "lse", "do", "dlse")

        def run(*tensors):
            at = dict(zip(names, tensors))
            given = self._arguments(tensors)
            with paddle.no_grad():
                found = _autograd.gradients({**given, "o": at["o"], "lse": at["lse"]}, wanted,
                                            at["do"], at["dlse"])
            return found if len(wanted) > 1 else (found,)

        def infer(*metas):
            at = dict(zip(names, metas))
            found = tuple(paddle.static.MetaTensor(shape=list(at[name].shape), dtype=at[name].dtype)
                          for name in wanted)
            return found if len(wanted) > 1 else found[0]

        results = _operator("attention_backward", names, [f"d{name}" for name in wanted], run,
                            infer)(*saved, do, dlse)
        return results if len(wanted) > 1 else [results]

    def _arguments(self, tensors) -> dict:
        given, pairs = dict(self.constants), {}
        for name, value in {**self.constants, **dict(zip(self.values, tensors))}.items():
            whole, _, part = name.partition(".")
            if part:
                given.pop(name, None)
                pairs.setdefault(whole, {})[part] = value
            else:
                given[name] = value
        given.update({name: (parts["0"], parts["1"]) for name, parts in pairs.items()})
        for kind in ("seqlens", "cu_seqlens"):  # one array for both sides stays one
            if self.given.get(f"{kind}_q") is not None and \
                    self.given[f"{kind}_q"] is self.given.get(f"{kind}_k"):
                given[f"{kind}_k"] = given[f"{kind}_q"]
        return given


def _with_gradients(call: _Call, wanted):
    from paddle.jit.dy2static.py_layer import StaticPyLayerContext
    context = StaticPyLayerContext()

    def forward(*_):
        outputs = call.forward()
        context.save_for_backward(*call.values.values(), *outputs[:2])
        return tuple(outputs)

    def backward(do, dlse, *_):
        found = dict(zip(wanted, call.backward(wanted, context.saved_tensor(), do, dlse)))
        return tuple(found.get(name) for name in call.values)

    return paddle.static.nn.static_pylayer(forward, list(call.values.values()), backward)


def _operator(name: str, inputs, outputs, run, infer):
    """A Python operator. register_op reads names of parameters off the functions, which therefore
    have some."""
    names = [f"x{i}" for i in range(len(inputs))]
    text = f"lambda {', '.join(names)}: f({', '.join(names)})"
    named = [eval(text, {"f": function}) for function in (run, infer)]
    return paddle.static.register_op(
        named[0], name=f"tessera_{name}_{next(_numbers)}", infer_meta=named[1], input_names=names,
        output_names=list(outputs))


def _refuse_to_be_saved():
    """Paddle stores no Python operators, and says "Unknown Attr" of them."""
    frame = sys._getframe()
    while frame:
        if frame.f_code.co_name == "save" and frame.f_globals.get("__name__") == "paddle.jit.api":
            raise _not_saved()
        frame = frame.f_back
    jit_api._register_save_pre_hook(_before_save)


def _before_save(layer, *_):
    """Refuses to save a graph that was made already and holds tessera's operators."""
    members = [layer, *(getattr(layer, name, None) for name in dir(type(layer)))]
    for member in members:
        cache = getattr(member, "program_cache", None) if isinstance(member, jit_api.StaticFunction) \
            else None
        for program in cache.concrete_programs() if cache else ():
            if "py_op.tessera_" in str(program.main_program):
                raise _not_saved()


def _not_saved() -> _lib.Refused:
    return _lib.Refused("tessera.attention: paddle.jit.save: a saved graph cannot hold tessera's "
                        "operators, which are Python's; save the state_dict, and serve through "
                        "Python or tessera's C library")


class _GraphTensors:
    """The adapter for values of a graph, taken as contiguous; -1 is an extent of any size."""
    noun, num_threads = "Paddle tensor", None
    dtype = staticmethod(_tensors.dtype)
    integers = staticmethod(_tensors.integers)

    @staticmethod
    def info(x) -> ArrayInfo | None:
        if not isinstance(x, Value):
            return _tensors.info(x)
        shape, strides, step = tuple(x.shape), [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= max(extent, 1)
        return ArrayInfo(_tensors.dtype_name(x.dtype), shape, tuple(strides[::-1]),
                         (_lib.CUDA, 0) if paddle.get_device().startswith("gpu") else (_lib.CPU, 0),
                         True)

    @staticmethod
    def device(_) -> _lib.Device:
        if paddle.get_device().startswith("gpu"):
            return _lib.Device(kind=_lib.CUDA, ordinal=int(paddle.get_device().partition(":")[2]))
        return _lib.CPU_DEVICE
