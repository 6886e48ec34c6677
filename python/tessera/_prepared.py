# SPDX-License-Identifier: Apache-2.0
"""Calls of array libraries whose arrays are reached by address: NumPy, Paddle.

A call with shapes, dtypes and options that were seen before skips all of _args: the problem, its
workspace size and a template of the buffers are kept in a bounded table, and only addresses and
outputs are new. Values are validated by the C core on every call.

To what _args asks of an adapter, these calls add
    signature(x)                                 what of an argument decides the problem, hashable
    device(x), stream(x)                         tessera_device of an array; its CUDA stream
    pointer(x)                                   the address of an array's first element
    dtype(name)                                  the library's dtype of a name in _lib.DTYPES
    empty(operation, name, shape, dtype, like)   a new array where `like` is, or MemoryError
    workspace(operation, size, like)             (address, owner) of `size` bytes, for this call
    integers(words, like), int64(x)              int64 array of a few integers; x as one, without strides
    num_threads                                  what answers how many threads a call may use, or None:
                                                 set_num_threads decides
"""

from __future__ import annotations

import ctypes
import dataclasses

from . import _args, _interrupt, _keywords, _lib

_MAX_PREPARED = 512
_DATA = _lib.Buffers.data.offset // 8
_STREAM = _lib.Buffers.stream.offset // 8
_WORKSPACE = _lib.Buffers.workspace.offset // 8
_INTERRUPT = _lib.Buffers.interrupt.offset // 8
_Words = ctypes.c_uint64 * (ctypes.sizeof(_lib.Buffers) // 8)

_prepared: dict = {}
num_threads = 0  # of every call; 0: the library's default


def set_num_threads(n: int):
    global num_threads
    num_threads = n
    _prepared.clear()


class Prepared:
    """A problem that was accepted, and how to fill the buffers of a call."""

    def __init__(self, arguments: _args.Arguments, outputs, q):
        own = arguments.adapter.num_threads
        self.num_threads = num_threads if own is None else own()
        buffers = _lib.Buffers(struct_size=ctypes.sizeof(_lib.Buffers), num_threads=self.num_threads,
                               softmax_scale=arguments.softmax_scale, softcap=arguments.softcap,
                               dropout_p=arguments.dropout_p, sm_margin=arguments.sm_margin)
        self.arrays = arguments.adapter
        self.operation = arguments.operation
        self.problem = arguments.problem
        self.address = ctypes.addressof(self.problem)
        self.device = self.arrays.device(q)
        self.device_address = ctypes.addressof(self.device)
        self.template = bytes(buffers)
        self.outputs = outputs  # one per result: (word, name, shape, dtype), an argument, or None
        self.spelling = arguments.spelling
        self.sources = [(_DATA + s.index, s.name, s.part) for s in arguments.sources]
        self.workspace_bytes = 0
        self.differentiable = set()  # sets of inputs whose gradients were accepted as well
        self.on_cpu = self.device.kind == _lib.CPU
        self.is_long = self.on_cpu and _interrupt.is_long(self.problem)

    def prepare(self):
        information = _lib.Info(struct_size=ctypes.sizeof(_lib.Info))
        error = _lib.error_of_thread()
        code = _lib.prepare(self.address, self.device_address, self.num_threads,
                            ctypes.addressof(information), ctypes.addressof(error))
        _lib.check(code, error, self.operation, self.spelling)
        self.workspace_bytes = information.workspace_bytes

    def run(self, given: dict) -> list:
        arrays, q = self.arrays, given["q"]
        words, pointer = _Words.from_buffer_copy(self.template), arrays.pointer
        for word, name, part in self.sources:
            words[word] = pointer(given[name] if part is None else given[name][part])
        results = []
        for output in self.outputs:
            if type(output) is tuple:
                word, name, shape, dtype = output
                array = arrays.empty(self.operation, name, shape, dtype, q)
                words[word] = pointer(array)
                results.append(array)
            else:
                results.append(None if output is None else given[output])
        owner = None
        if self.workspace_bytes:
            words[_WORKSPACE], owner = arrays.workspace(self.operation, self.workspace_bytes, q)
            words[_WORKSPACE + 1] = self.workspace_bytes
        if not self.on_cpu:
            words[_STREAM] = arrays.stream(q)
        error = _lib.error_of_thread()
        arguments = (self.address, self.device_address, ctypes.addressof(words),
                     ctypes.addressof(error))
        if self.is_long:
            code = _interrupt.run(lambda: _lib.run(*arguments), words, _INTERRUPT)
        else:
            code = _lib.run(*arguments)
        del owner  # the workspace lives until here
        if code:
            _lib.raise_error(error, self.operation, self.spelling)
        return results


def call(arrays, operation: str, describe, given: dict) -> list:
    """The results of describe(arrays, operation, given), run on the arrays of `given`."""
    return prepared(arrays, operation, describe, given).run(given)


def prepared(arrays, operation: str, describe, given: dict) -> Prepared:
    """Whatever describe(arrays, operation, given) describes, once the library has accepted it."""
    get = given.get
    if "rng_state" in given:
        given["rng_state"] = rng_array(arrays, operation, given["rng_state"], given["q"])
    signature = arrays.signature
    try:
        threads = arrays.num_threads
        key = (arrays, operation, threads and threads(), *given, *map(signature, given.values()),
               get("seqlens_q") is get("seqlens_k"), get("cu_seqlens_q") is get("cu_seqlens_k"))
        found = _prepared.get(key)
    except TypeError:  # something unhashable: not kept, and perhaps illegal
        key = found = None
    if found is None:
        found = Prepared(*describe(arrays, operation, given), given["q"])
        found.prepare()
        if key is not None:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = found
    return found


# ---- outputs, and the inputs of the backward pass ----

def describe_inputs(arrays, operation: str, given: dict) -> _args.Arguments:
    """The forward pass of keywords with q, k and v, less its outputs."""
    _keywords.check_names(operation, given.keys() - {"q", "k", "v"}, _keywords.FORWARD)
    a = _args.Arguments(arrays, operation)
    _args.fill(a, given)
    return a


def describe_forward(arrays, operation: str, given: dict):
    """(Arguments, outputs of Prepared) of keywords with q, k and v."""
    a = describe_inputs(arrays, operation, given)
    adds = _args.accumulates(a, given)
    a.want("o", a.order_q, a.out_dtype)
    if adds:
        a.put("lse", "lse", given["lse"], a.order_rows, axes="b, hq, sq", output=True)
    elif a.return_lse:
        a.want("lse", a.order_rows)
    if a.return_max_logit:
        a.want("max_logit", (0,))
    if a.return_amax:
        a.want("amax_o", (None,))
    a.describe_wanted()
    outputs = [_given_out(a, given, adds) if given.get("out") is not None else _new_output(a, "o")]
    if a.return_lse:
        outputs.append("lse" if adds else _new_output(a, "lse"))
    return a, outputs + [_new_output(a, name) for name in ("max_logit", "amax_o") if name in a.wanted]


def _given_out(a: _args.Arguments, given: dict, adds: bool) -> str:
    """Puts `out` in the place of a new o, whose dtype it has."""
    dtype = a.new("o")[1]
    info = a.put("o", "out", given["out"], a.order_q, axes="b, sq, hq, dv", output=True)
    if info.dtype != dtype and (a.out_dtype or not adds):
        raise a.error("out.dtype", info.dtype, "must be " + (
            "out_dtype" if a.out_dtype else "q's dtype" if dtype == a.adapter.info(given["q"]).dtype
            else "that beside fp8 q") + f", {dtype}")
    return "out"


def describe_backward(arrays, operation: str, given: dict):
    """As describe_forward; given also maps do, o, lse and dlse, and names of gradients, to arrays or
    NEW."""
    a = _args.Arguments(arrays, operation, backward=True)
    _args.fill(a, given)
    for name, order, axes in (("do", a.order_q, "b, sq, hq, dv"), ("o", a.order_q, "b, sq, hq, dv"),
                              ("lse", a.order_rows, "b, hq, sq"), ("dlse", a.order_rows, "b, hq, sq")):
        if given.get(name) is NEW:
            a.want(name, order)
        elif name != "dlse" or given.get(name) is not None:
            a.put(name, name, given.get(name), order, axes=axes)
    for name in _args.GRADIENTS:
        if given.get(name) is not None:
            _gradient(a, name, given[name], given.get(name[1:]))
    amax = [f"amax_{name}" if a.return_amax and given.get(name) is not None else None
            for name in ("dq", "dk", "dv")]
    for name in filter(None, amax):
        a.want(name, (None,))
    a.describe_wanted()
    names = [name if given.get(name) is not None else None for name in _args.GRADIENTS] + amax
    return a, [_new_output(a, name) if name in a.wanted else name for name in names]


def _gradient(a: _args.Arguments, name: str, output, of):
    """Describes the output `name` of the backward pass, the gradient of `of`."""
    orders = {"dq": (a.order_q, "b, sq, hq, dqk"), "dk": (a.order_kv, a.axes_kv("dqk")),
              "dv": (a.order_kv, a.axes_kv("dv")), "dsink": ((0,), "hq")}
    pads = {"dbias": (4, "b, hq, sq, sk"), "dalibi_slopes": (2, "b, hq")}
    info = a.adapter.info(of)
    if output is NEW:
        if info is None:
            raise a.error("grads", name, f"{name[1:]} is not a given array, so it has no gradient; "
                          "leave it out")
        rank = len(info.shape)
        order = orders[name][0] if name in orders else \
            (None,) * (pads[name][0] - rank) + tuple(range(rank))
        if a.problem.flags & _lib.ACCUMULATE:
            raise a.error("accumulate", True, "adds to what the arrays of grads= hold; map names "
                          "to arrays")
        a.want(name, order, a.grad_dtype if name in ("dq", "dk", "dv") else None)
        return
    given = a.adapter.info(output)
    if info is not None and given is not None and given.shape != info.shape:
        raise a.error(f"{name}.shape", list(given.shape),
                      f"must be the shape of {name[1:]}, {list(info.shape)}")
    order, axes, pad = None, "", 0
    if name in orders:
        order, axes = orders[name]
    else:
        pad, axes = pads[name]
    a.put(name, name, output, order, axes=axes, pad=pad, output=True)


class _New:
    """Stands for an array that is contiguous and not there yet."""


NEW = _New()


def gradient_outputs(arrays, grads) -> dict:
    """The argument `grads`: gradient name -> array to write into, NEW, or None."""
    operation = "attention_backward"
    chosen = dict.fromkeys(_args.GRADIENTS)
    if isinstance(grads, dict):
        for name, array in grads.items():
            if name in chosen and arrays.info(array) is None:
                raise ValueError(f"tessera.{operation}: grads[{name!r}]={_args._text(array)}: must "
                                 f"be a {arrays.noun} to write into")
    elif not isinstance(grads, tuple):
        raise ValueError(f"tessera.{operation}: grads={_args._text(grads)}: must be a tuple of "
                         'names, such as ("dq", "dk", "dv"), or a dict of output arrays')
    for i, name in enumerate(grads):
        if not isinstance(name, str) or name not in chosen:
            raise ValueError(f"tessera.{operation}: grads[{i}]={_args._text(name)}: must be one of "
                             + ", ".join(_args.GRADIENTS))
        if chosen[name] is not None:
            raise ValueError(f"tessera.{operation}: grads[{i}]={_args._text(name)}: given twice")
        chosen[name] = grads[name] if isinstance(grads, dict) else NEW
    return chosen


def rng_array(arrays, operation: str, rng_state, like):
    """A list or tuple of (seed, offset[, first, stride]) as an int64 array; anything else unchanged."""
    if type(rng_state) not in (list, tuple):
        return rng_state
    return arrays.integers(_args.rng_words(_args.Arguments(arrays, operation), rng_state), like)


def _new_output(a: _args.Arguments, name: str):
    """An output of Prepared that is allocated for each call."""
    shape, dtype = a.new(name)
    return _DATA + _lib.INDEX[name], name, shape, a.adapter.dtype(dtype)
