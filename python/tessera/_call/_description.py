# SPDX-License-Identifier: Apache-2.0
"""What is asked for as a problem and a Call: of keywords, which is what users type, or of a Call and its
operands, which is what a framework hands on. Every front end describes its calls here, on its adapter for
_args; what it may add to that
    slice_of(x)           (array, axis, item) where x is an item of an array that others are items of
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from .. import _lib, _numpy
from . import FIELDS, FLAG, GRADIENTS, ROWS, Call, Operand, fields_of, gradient_of, number_of, _args, _keywords

WIDE = ("dq", "dk", "dv")  # may have another dtype than their inputs, and an amax
_PLACED = {tensor: (row, i) for row in _keywords.ALL.values() if isinstance(row, _keywords.Tensor)
           for i, tensor in enumerate(row.tensors)}
# What is no keyword's, beside those: the diagonals of align, and q, k and v.
_OWN = frozenset((*ROWS, *GRADIENTS, "q", "k", "v", "shift", "max_logit", "amax_o",
                  *(f"amax_{name}" for name in WIDE)))
_untaken = [name for name in _lib.TENSORS if name not in _PLACED and name not in _OWN]
if not {"keep_tail"}.issuperset(_untaken):  # which is of calls of the library's own alone
    raise ImportError(f"tessera: no keyword gives the tensors {_untaken}")


class _New:
    """Stands for an array that is not made so far."""


NEW = _New()


class Description:
    """A problem, its Call, and where their arrays are among what was given.

    `sources` has for each operand of the Call the keyword that gave it, and of a pair the part. `outputs`
    maps what comes back to the name in `given` of an array to write into, or None for a new one."""

    def __init__(self, arrays, operation: str, given: dict, backward: bool = False):
        """Describes keywords with q, k and v; for the backward pass also do, o, lse, dlse and names of
        gradients, all of which may be NEW."""
        a = self.arguments = _args.Arguments(arrays, operation, backward)
        if not backward:
            _keywords.check_names(operation, given.keys() - {"q", "k", "v"}, _keywords.FORWARD)
        _args.fill(a, given)
        if backward:
            self._put_rows(given)
        self._read = self._inputs(given)
        self.outputs, self._written = (self._gradients if backward else self._results)(given, self._read)

    @functools.cached_property
    def call(self) -> Call:
        """Made when somebody asks: calls on arrays that are reached by address never do."""
        a = self.arguments
        return Call(a.operation, tuple(map(str, self._read)), fields_of(a.problem, a), tuple(map(str, self._written)))

    @classmethod
    def of(cls, arrays, call: Call, operands, sizes=(), outputs=None) -> Description:
        """Describes a Call on operands, which may be NEW; `sizes` are its $0, $1, ..., `outputs` the caller's
        arrays to write into."""
        self = cls.__new__(cls)
        self.call, self.sources = call, [(i, None) for i in range(len(operands))]
        self.outputs = {} if outputs is not None else {result.tensors[0]: None for result in call.results}
        a = self.arguments = _args.Arguments(arrays, call.operation, call.is_backward)
        a.layout_q, a.layout_kv = call.layouts
        a.paged, a.problem.flags = call.is_paged, call.flags
        for name, value in call.values.items():
            if name != "pass" and FIELDS[name].kind != FLAG:
                a.set_field(name, number_of(name, value, sizes))
        at = {name: operands[place.operand] for name, place in call.places.items()}
        if len(at) != len(call.inputs):
            raise a.error("drop", at.get("mask"), "keep and drop are one mask with two polarities; give one")
        for name in sorted(at, key=lambda name: name not in "qkv"):
            _put(a, name, at[name])
        if a.problem.flags & _lib.ACCUMULATE and outputs is None:
            raise a.error("accumulate", True, "adds to what outputs hold: must come with out= and lse=, or "
                          "grads={name: array}")
        for i, result in enumerate(call.results):
            name, = result.tensors
            if name in GRADIENTS:
                a.grad_dtype = result.dtype or None
                _put_gradient(a, name, NEW if outputs is None else outputs[i], at.get(name[1:]))
            elif outputs is None or name == "o":
                a.out_dtype = (result.dtype or None) if name == "o" else a.out_dtype
                a.want(name, result.dtype or None)
            else:
                a.put_own(name, outputs[i], output=True)
        a.describe_wanted()
        if outputs is not None and "o" in call.places_of_results:
            _put_out(a, outputs[call.places_of_results["o"].operand], at["q"])
        a.spelling |= call.spelling
        a.sources = [_args.Source(_lib.INDEX[name], place.operand, None)
                     for name, place in call.places.items() if at[name] is not NEW]
        a.targets = []
        return self

    def _put_rows(self, given: dict):
        """Describes what the backward pass takes beside the inputs."""
        a = self.arguments
        for name in ROWS:
            if given.get(name) is NEW:  # in q's fp8 where a scale says that it is in some
                scaled = given.get(f"{name}_scale") is not None
                a.want(name, a.adapter.info(given["q"]).dtype if scaled else None)
            elif name != "dlse" or given.get(name) is not None:
                a.put_own(name, given.get(name))

    def _inputs(self, given: dict) -> list[Operand]:
        """The operands, in the order of tessera_index; slices of one array are one operand."""
        a = self.arguments
        slice_of = getattr(a.adapter, "slice_of", lambda x: None)
        items: dict[object, dict[int, str]] = {}  # operand -> item -> tensor
        axes, self.sources = [], []
        for index, name, part in sorted(a.sources):
            value = given[name] if part is None else given[name][part]
            array, axis, item = slice_of(value) or (index, -1, 0)
            key = array if axis < 0 else (id(array), axis)
            if key not in items:
                items[key] = {}
                axes.append(axis)
                self.sources.append((name, part))
            items[key][item] = _lib.TENSORS[index]
        return [Operand(tuple(own[i] for i in sorted(own)), axis) for own, axis in zip(items.values(), axes)]

    def _results(self, given: dict, _):
        """What the forward pass returns, and what it writes."""
        a = self.arguments
        adds = _args.accumulates(a, given)
        outputs: dict[str, str | None] = {"o": "out" if given.get("out") is not None else None}
        a.want("o", a.out_dtype)
        if adds:
            a.put_own("lse", given["lse"], output=True)
        for name, is_asked_for in (("lse", a.return_lse), ("max_logit", a.return_max_logit),
                                   ("amax_o", a.return_amax)):
            if is_asked_for:
                outputs[name] = "lse" if adds and name == "lse" else None
                if outputs[name] is None:
                    a.want(name)
        written = [Operand((name,), dtype=(a.out_dtype or "") * (name == "o")) for name in outputs]
        return outputs, written + [Operand(("lse",))] * (adds and "lse" not in outputs)

    def _gradients(self, given: dict, inputs: list[Operand]):
        """What the backward pass returns, and what it writes: a gradient of slices is one of their array."""
        a = self.arguments
        names = [name for name in GRADIENTS if given.get(name) is not None]
        outputs, written = {}, []
        for name in names:
            _put_gradient(a, name, given[name], given.get(name[1:]))
            outputs[name] = None if given[name] is NEW else name
            of = next((operand for operand in inputs if name[1:] in operand.tensors), Operand((name[1:],)))
            gradient = gradient_of(of, (a.grad_dtype or "") if name in WIDE else "")
            if gradient not in written:
                written.append(gradient)
        for name in names if a.return_amax else ():
            if name in WIDE:
                a.want(f"amax_{name}")
                outputs[f"amax_{name}"] = None
                written.append(Operand((f"amax_{name}",)))
        return outputs, written

    def describe_outputs(self, given: dict) -> Description:
        """Lets the library describe what comes back; extents must be known."""
        a = self.arguments
        a.describe_wanted()
        if self.outputs.get("o"):
            _put_out(a, given["out"], given["q"])
        return self

    # ---- what the library says ----

    def tensors_of(self, given) -> dict[int, object]:
        """The arrays of the call, by enum tessera_index; `given` are its keywords, or its operands."""
        return {source.index: given[source.name] if source.part is None else given[source.name][source.part]
                for source in (*self.arguments.sources, *self.arguments.targets)}

    def buffers(self, tensors: dict[int, object], num_threads: int = 0) -> _lib.Buffers:
        a = self.arguments
        buffers = _lib.Buffers(struct_size=ctypes.sizeof(_lib.Buffers), num_threads=num_threads,
                               softmax_scale=a.softmax_scale, softcap=a.softcap, dropout_p=a.dropout_p,
                               sm_margin=a.sm_margin)
        for index, x in tensors.items():
            buffers.data[index] = a.adapter.pointer(x)
        return buffers

    def prepare(self, device: _lib.Device, num_threads: int) -> int:
        """The workspace's bytes. Raises ValueError or Refused for what shapes and options say."""
        return prepare(self.arguments.problem, device, num_threads, self.arguments.operation, self.arguments.spelling)

    def validate(self, tensors: dict[int, object]):
        """Raises the ValueError of a call on the CPU, of the arrays of tensors_of()."""
        a = self.arguments
        validate(a.problem, self.buffers(tensors), a.wanted, a.operation, a.spelling)

    def validate_scalars(self):
        """The part of validate() that is left when arrays have no values: softmax_scale, softcap and
        dropout_p, beside a problem of one query and one key."""
        a = self.arguments
        q, k, v = np.zeros((3, 1, 1, 1, 1), np.float32)
        given = dict(q=q, k=k, v=v, dropout_p=a.dropout_p, softcap=a.softcap, rng_state=np.zeros(2, np.int64))
        if a.problem.flags & _lib.SOFTMAX_SCALE:
            given["softmax_scale"] = a.softmax_scale
        plain = Description(_numpy, a.operation, given).describe_outputs(given)
        plain.validate(plain.tensors_of(given))


def operands_of(sources, given: dict) -> tuple:
    """The arrays that go in, as a Call has them, of keywords; `sources` are those of Description."""
    return tuple([given[name] if part is None else given[name][part] for name, part in sources])


def returned(results, hides_lse: bool):
    """What users get of o, lse where it was computed, and whatever else they asked for."""
    results = (results[0], *results[2:]) if hides_lse else tuple(results)
    return results if len(results) > 1 else results[0]


def prepare(problem: _lib.Problem, device: _lib.Device, num_threads: int, operation: str, spelling) -> int:
    """The workspace's bytes."""
    information = _lib.Info(struct_size=ctypes.sizeof(_lib.Info))
    error = _lib.error_of_thread()
    code = _lib.prepare(ctypes.addressof(problem), ctypes.addressof(device), num_threads,
                        ctypes.addressof(information), ctypes.addressof(error))
    _lib.check(code, error, operation, spelling)
    return information.workspace_bytes


def validate(problem: _lib.Problem, buffers: _lib.Buffers, outputs, operation: str, spelling):
    """Raises the ValueError of a call on the CPU. Those of the outputs that are not there get addresses that
    nothing ever reads."""
    for number, name in enumerate(outputs, 1):
        if not buffers.data[_lib.INDEX[name]]:
            buffers.data[_lib.INDEX[name]] = number << 52
    error = _lib.error_of_thread()
    code = _lib.validate(ctypes.addressof(problem), _lib.CPU_ADDRESS, ctypes.addressof(buffers),
                         ctypes.addressof(error))
    _lib.check(code, error, operation, spelling)


# ---- what comes back, where extents may be symbolic, which cannot go into the library ----

def shape_of(call: Call, tensor: str, shapes) -> tuple:
    """The shape of a tensor, of those of the operands."""
    place = call.places[tensor]
    shape = tuple(shapes[place.operand])
    return shape if place.axis < 0 else (*shape[:place.axis], *shape[place.axis + 1:])


def results_of(call: Call, shapes, dtypes) -> list[tuple[tuple, str]]:
    """(shape, name of the dtype) of what comes back, for operands of some shapes and dtypes; what tessera_outputs says,
    which tests/python/library/test_outputs.py compares it with."""
    q, q_dtype = shape_of(call, "q", shapes), dtypes[call.places["q"].operand]
    beside_fp8 = dtypes[call.places["o"].operand] if "o" in call.places else ""
    beside_fp8 = beside_fp8 if beside_fp8.endswith("16") else "bfloat16"
    results = []
    for result, like in zip(call.results, call.likes):
        if isinstance(like, int):
            shape, dtype = tuple(shapes[like]), dtypes[like]
        elif like == "o":
            shape, dtype = (*q[:-1], shape_of(call, "v", shapes)[-1]), q_dtype
        else:
            shape, dtype = _args.statistic(like, q, q_dtype, call.layouts[0])
        results.append((shape, result.dtype or (beside_fp8 if dtype.startswith("float8") else dtype)))
    return results


# ---- one tensor ----

def _put(a: _args.Arguments, name: str, x):
    """Describes an operand, or one that is still to come."""
    if x is NEW:
        a.want(name)
    elif name in _PLACED:
        row, i = _PLACED[name]
        if name == "mask":
            row = _keywords.ALL["drop" if a.problem.flags & _lib.MASK_DROP else "keep"]
        row._put(a, i, x, None)
    else:
        a.put_own(name, x, "align" if name == "shift" else name)


def _put_out(a: _args.Arguments, out, q):
    """Puts the caller's `out` in the place of a new o, whose dtype it has."""
    dtype = a.new("o")[1]
    info = a.put_own("o", out, "out", output=True)
    adds = a.problem.flags & _lib.ACCUMULATE
    if info.dtype != dtype and (a.out_dtype or not adds):
        raise a.error("out.dtype", info.dtype, "must be " + (
            "out_dtype" if a.out_dtype else "q's dtype" if dtype == a.adapter.info(q).dtype
            else "that beside fp8 q") + f", {dtype}")


def _put_gradient(a: _args.Arguments, name: str, output, of):
    """Describes the gradient `name` of `of`: an array, or NEW."""
    info = a.adapter.info(of)
    if output is NEW:
        if info is None:
            raise a.error("grads", name, f"{name[1:]} is not a given array, so it has no gradient; "
                          "leave it out")
        if a.problem.flags & _lib.ACCUMULATE:
            raise a.error("accumulate", True, "adds to what the arrays of grads= hold; map names "
                          "to arrays")
        a.want(name, a.grad_dtype if name in WIDE else None, rank=len(info.shape))
        return
    given = a.adapter.info(output)
    if info is not None and given is not None and given.shape != info.shape:
        raise a.error(f"{name}.shape", list(given.shape),
                      f"must be the shape of {name[1:]}, {list(info.shape)}")
    a.put_own(name, output, output=True)
