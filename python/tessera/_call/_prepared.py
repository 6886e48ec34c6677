# SPDX-License-Identifier: Apache-2.0
"""Calls of array libraries whose arrays are reached by address: NumPy, Paddle.

A call with shapes, dtypes and options that were seen before skips all of _args: the problem, its
workspace size and a template of the buffers are kept in a bounded table, and only addresses and
outputs are new. Values are validated by the C core on every call.

To what _args asks of an adapter, these calls add
    array_type                                   the class of its arrays
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

from .. import _interrupt, _lib
from . import GRADIENTS, Call, _args
from ._description import NEW, Description, operands_of

_MAX_PREPARED = 512
_DATA = _lib.Buffers.data.offset // 8
_STREAM = _lib.Buffers.stream.offset // 8
_WORKSPACE = _lib.Buffers.workspace.offset // 8
_INTERRUPT = _lib.Buffers.interrupt.offset // 8
_Words = ctypes.c_uint64 * (ctypes.sizeof(_lib.Buffers) // 8)

_kept: dict = {}
num_threads = 0  # of every call; 0: the library's default


def set_num_threads(n: int):
    global num_threads
    num_threads = n
    _kept.clear()


def threads_of(arrays) -> int:
    """How many threads a call on these arrays may use; 0: the library's default."""
    own = arrays.num_threads
    return num_threads if own is None else own()


class Prepared:
    """A call that was accepted, and how to fill the buffers of one like it."""

    def __init__(self, described: Description, device: _lib.Device):
        a = described.arguments
        arrays = self.arrays = a.adapter
        threads = threads_of(arrays)
        self.described, self.problem, self.spelling = described, a.problem, a.spelling
        self.operation = a.operation
        self.address = ctypes.addressof(self.problem)
        self.device = device
        self.device_address = ctypes.addressof(device)
        self.template = bytes(described.buffers({}, threads))
        # For each result where its address goes, its name, shape and dtype; or the argument that it is.
        self.outputs = [given or _new_output(a, name) for name, given in described.outputs.items()]
        self.results = tuple(described.outputs)
        self.inputs = described.sources
        self.q = next(source.name for source in a.sources if source.index == 0)
        self.sources = [(_DATA + s.index, s.name, s.part) for s in (*a.sources, *a.targets)]
        self.differentiable = set()  # sets of operands whose gradients were accepted as well
        self.on_cpu = device.kind == _lib.CPU
        self.is_long = self.on_cpu and _interrupt.is_long(self.problem)
        self.workspace_bytes = described.prepare(device, threads)

    @property
    def call(self) -> Call:
        return self.described.call

    def operands(self, given: dict) -> tuple:
        """The arrays that go in, as the Call has them."""
        return operands_of(self.inputs, given)

    def run(self, given) -> list:
        """The results of the call on the arrays of `given`: keywords, or operands in their order."""
        arrays, q = self.arrays, given[self.q]
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
                results.append(given[output])
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


def of_keywords(arrays, operation: str, given: dict, backward: bool = False) -> Prepared:
    """The call of the keywords `given`, once the library has accepted it."""
    get = given.get
    if "rng_state" in given:
        given["rng_state"] = rng_array(arrays, operation, given["rng_state"], given["q"])
    signature = arrays.signature
    try:
        threads = arrays.num_threads
        key = (arrays, operation, threads and threads(), *given, *map(signature, given.values()),
               get("seqlens_q") is get("seqlens_k"), get("cu_seqlens_q") is get("cu_seqlens_k"))
        found = _kept.get(key)
    except TypeError:  # something unhashable: not kept, and perhaps illegal
        key = found = None
    if found is None:
        described = Description(arrays, operation, given, backward).describe_outputs(given)
        found = _keep(key, Prepared(described, arrays.device(given["q"])))
    return found


def of_call(arrays, call: Call, operands) -> Prepared:
    """A Call on arrays like `operands`, NEW for those that are still to come."""
    threads = arrays.num_threads
    key = (arrays, call, threads and threads(), *map(arrays.signature, operands))
    return _kept.get(key) or _keep(key, Prepared(
        Description.of(arrays, call, operands), arrays.device(operands[call.places["q"].operand])))


def _keep(key, found: Prepared) -> Prepared:
    if key is not None:
        if len(_kept) >= _MAX_PREPARED:
            _kept.clear()
        _kept[key] = found
    return found


def gradient_outputs(arrays, grads) -> dict:
    """The argument `grads`: gradient name -> array to write into, NEW, or None."""
    operation = "attention_backward"
    chosen = dict.fromkeys(GRADIENTS)
    if isinstance(grads, dict):
        for name, array in grads.items():
            if name in chosen and not isinstance(array, arrays.array_type):
                raise ValueError(f"tessera.{operation}: grads[{name!r}]={_args._text(array)}: must "
                                 f"be a {arrays.noun} to write into")
    elif not isinstance(grads, tuple):
        raise ValueError(f"tessera.{operation}: grads={_args._text(grads)}: must be a tuple of "
                         'names, such as ("dq", "dk", "dv"), or a dict of output arrays')
    for i, name in enumerate(grads):
        if not isinstance(name, str) or name not in chosen:
            raise ValueError(f"tessera.{operation}: grads[{i}]={_args._text(name)}: must be one of "
                             + ", ".join(GRADIENTS))
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
