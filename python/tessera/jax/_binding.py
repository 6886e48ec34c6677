# SPDX-License-Identifier: Apache-2.0
"""libtessera_jax: the targets of custom calls, and the problem that a call is, before there is one."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p

import jax
import numpy as np

from .. import _lib

ATTENTION, DROPOUT_MASK = "tessera_attention", "tessera_dropout_mask"
_library = _lib.load("libtessera_jax.so")
for _target in (ATTENTION, DROPOUT_MASK):
    for _platform in ("cpu", "CUDA"):
        _handler = getattr(_library, f"tessera_jax_{_target[8:]}_{_platform.lower()}")
        jax.ffi.register_ffi_target(_target, jax.ffi.pycapsule(_handler), platform=_platform)

# dtype name -> XLA's number of it
_TYPES = {"bool": 1, "int32": 4, "int64": 5, "uint8": 6, "uint32": 8, "float16": 10, "float32": 11,
          "float64": 12, "bfloat16": 16, "float8_e5m2": 19, "float8_e4m3fn": 20}


class _Buffer(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("dtype", c_int32),
                ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))]


class _Static(ctypes.Structure):
    _fields_ = [("words", c_void_p), ("scalars", c_void_p), ("backend", c_char_p),
                ("backend_size", c_int64), ("inputs", c_void_p), ("num_inputs", c_int64),
                ("outputs", c_void_p), ("num_outputs", c_int64)]


_describe = _library.tessera_jax_describe
_describe.restype = c_int32
_describe.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)


def attributes(spec) -> dict[str, np.ndarray | str]:
    """What the handler of a call is told, beside its buffers; binding.cc says how it reads."""
    return {"backend": spec.backend, "inputs": np.array(spec.inputs, np.int64).reshape(-1),
            "outputs": np.array(spec.outputs, np.int64).reshape(-1),
            "scalars": np.array(spec.scalars, np.float64), "words": np.array(spec.words, np.int64)}


def describe(spec, operands, results, pointers=()) -> tuple[_lib.Problem, _lib.Buffers]:
    """The problem of a call on arrays like `operands` and `results`, of constant shapes, and its
    buffers: without data, unless operands' addresses are given."""
    told = attributes(spec)
    backend = told["backend"].encode()
    static = _Static(told["words"].ctypes.data, told["scalars"].ctypes.data, backend, len(backend),
                     told["inputs"].ctypes.data, len(spec.inputs), told["outputs"].ctypes.data,
                     len(spec.outputs))
    problem, buffers = _lib.Problem(), _lib.Buffers()
    args, rets = _buffers(operands, pointers), _buffers(results)
    if _describe(byref(static), len(operands), args, len(results), rets, byref(problem),
                 byref(buffers)) != _lib.OK:
        raise ValueError(f"tessera.{spec.operation}: an argument has a dtype or a number of axes that "
                         "is never legal")
    return problem, buffers


def _buffers(arrays, pointers=()):
    """An array of pointers to descriptions, which it keeps alive."""
    table = (POINTER(_Buffer) * len(arrays))()
    for i, x in enumerate(arrays):
        dims = (c_int64 * len(x.shape))(*x.shape)
        table[i] = ctypes.pointer(_Buffer(
            ctypes.sizeof(_Buffer), None, _TYPES.get(x.dtype.name, 0),
            pointers[i] if pointers else None, len(x.shape), dims))
    return table
