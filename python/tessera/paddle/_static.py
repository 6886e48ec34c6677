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
import math
import sys

import paddle
from paddle.jit import api as jit_api
from paddle.static import InputSpec

from .. import _lib
from .._call import _args, _prepared
from .._call._args import ArrayInfo
from .._call import Call
from .._call._description import Description, operands_of, results_of, returned
from . import _autograd, _tensors

Value = paddle.pir.Value
_numbers = itertools.count()


def attention(given: dict):
    """tessera.paddle.attention of a graph's values."""
    if not hasattr(paddle.static, "register_op"):
        raise _lib.Refused("tessera.attention: to_static(full_graph=True): needs Paddle 3.3 or newer, "
                           f"this is {paddle.__version__}; use full_graph=False")
    checker = _args.Arguments(_GraphTensors, "attention")
    if given.get("out") is not None:
        raise checker.error("out", given["out"], "is for eager calls; a graph has new outputs")
    hides_lse = _args.ask_for_lse(_GraphTensors, given)
    if "rng_state" in given:
        given["rng_state"] = _prepared.rng_array(_GraphTensors, "attention", given["rng_state"], given["q"])
    _refuse_to_be_saved()
    described = Description(_GraphTensors, "attention", given)
    operands = operands_of(described.sources, given)
    for (name, _), x in zip(described.sources, operands):
        if isinstance(x, paddle.Tensor) and not x.stop_gradient:
            raise checker.error(name, x, "wants a gradient but is no part of the graph; pass it to the "
                                "function, or let its layer own it")
    if all(extent >= 0 for tensor in described.arguments.problem.tensor if tensor.dtype
           for extent in tensor.extent):
        described.describe_outputs(given).prepare(_GraphTensors.device(None), 0)
    return returned(_attention(described.call, operands), hides_lse)


class _Values:
    """The values among operands, each once, which are the inputs of what a graph has; other operands are
    bound."""

    def __init__(self, operands):
        self.operands = operands
        self.places = [i for i, x in enumerate(operands) if isinstance(x, Value)]
        self.values, self.slots = _autograd.distinct([operands[i] for i in self.places], Value.is_same)

    def filled(self, tensors) -> list:
        """The operands, with tensors in the place of the values."""
        operands = list(self.operands)
        for i, slot in zip(self.places, self.slots):
            operands[i] = tensors[slot]
        return operands


def _attention(call: Call, operands) -> list:
    """The results of a Call, differentiable in the operands that want gradients."""
    wanted = tuple(i for i in call.differentiable
                   if isinstance(operands[i], Value) and not operands[i].stop_gradient)
    if not wanted:
        return _run(call, operands)
    _autograd.check_autograd(operands[call.places["q"].operand].dtype)
    from paddle.jit.dy2static.py_layer import StaticPyLayerContext
    context = StaticPyLayerContext()
    operands = list(operands)
    for n, i in enumerate(wanted):  # a value has one gradient: where q is k too, that is a copy
        if any(operands[i].is_same(operands[j]) for j in wanted[:n]):
            operands[i] = paddle.assign(operands[i])
    values = _Values(operands)

    def forward(*_):
        outputs = _run(call, values.operands)
        context.save_for_backward(*values.values, *outputs[:2])
        return tuple(outputs)

    def backward(do, dlse, *_):
        *saved, o, lse = context.saved_tensor()
        found = _run(call.backward(wanted, True), [do, o, lse, dlse, *values.filled(saved)])
        by_slot = {values.slots[values.places.index(i)]: gradient for i, gradient in zip(wanted, found)}
        return tuple(by_slot.get(slot) for slot in range(len(values.values)))

    return paddle.static.nn.static_pylayer(forward, values.values, backward)


def _run(call: Call, operands) -> list:
    """What a Call returns, by an operator of its own."""
    values = _Values(operands)

    def run(*tensors):
        with paddle.no_grad():
            return tuple(_autograd.run(call, values.filled(tensors)))

    def infer(*metas):
        """Nothing here may raise."""
        inputs = values.filled(metas)
        found = results_of(call, [x.shape for x in inputs], [_tensors.dtype_name(x.dtype) for x in inputs])
        found = tuple(paddle.static.MetaTensor(shape=list(shape), dtype=_tensors.dtype(dtype))
                      for shape, dtype in found)
        return found if len(found) > 1 else found[0]

    names = [result.tensors[0] for result in call.results]
    found = _operator(call.operation, values.values, names, run, infer)
    return list(found) if len(names) > 1 else [found]


def _operator(name: str, inputs, outputs, run, infer):
    """What a Python operator makes of the inputs. register_op reads names of parameters off the
    functions, which therefore have some."""
    names = [f"x{i}" for i in range(len(inputs))]
    text = f"lambda {', '.join(names)}: f({', '.join(names)})"
    named = [eval(text, {"f": function}) for function in (run, infer)]
    return paddle.static.register_op(
        named[0], name=f"tessera_{name}_{next(_numbers)}", infer_meta=named[1], input_names=names,
        output_names=list(outputs))(*inputs)


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
        return ArrayInfo(_tensors.dtype_name(x.dtype), tuple(x.shape), _contiguous(x.shape),
                         (_lib.CUDA, 0) if paddle.get_device().startswith("gpu") else (_lib.CPU, 0),
                         True)

    @staticmethod
    def device(_) -> _lib.Device:
        if paddle.get_device().startswith("gpu"):
            return _lib.Device(kind=_lib.CUDA, ordinal=int(paddle.get_device().partition(":")[2]))
        return _lib.CPU_DEVICE


class Specs(_GraphTensors):
    """The adapter for paddle.static.InputSpec, which has no values: for questions on Paddle's device."""
    noun = "Paddle tensor or InputSpec"

    @staticmethod
    def info(x) -> ArrayInfo | None:
        if not isinstance(x, InputSpec):
            return _tensors.info(x)
        return ArrayInfo(_tensors.dtype_name(x.dtype), tuple(x.shape), _contiguous(x.shape), "meta", True)

    @staticmethod
    def integers(words, like) -> InputSpec:
        return InputSpec([len(words)], "int64")


def _contiguous(shape) -> tuple[int, ...]:
    """Strides, with -1 taken as 1."""
    return tuple(math.prod(max(extent, 1) for extent in shape[axis + 1:]) for axis in range(len(shape)))
