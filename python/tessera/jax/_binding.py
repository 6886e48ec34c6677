# SPDX-License-Identifier: Apache-2.0
"""libtessera_jax: the targets of custom calls, and the problem that a call is, before there is one."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_void_p

import jax

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


_describe = _library.tessera_jax_describe
_describe.restype = c_int32
_describe.argtypes = (c_char_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p,
                      c_void_p)


def describe(call, operands, results, pointers=()) -> tuple[_lib.Problem, _lib.Buffers]:
    """The problem of a call on arrays like `operands` and `results`, of constant shapes, and its
    buffers: without data, unless operands' addresses are given."""
    problem, buffers = _lib.Problem(), _lib.Buffers()
    args, rets = _buffers(operands, pointers), _buffers(results)
    error = _lib.error_of_thread()
    if _describe(call.text.encode(), len(operands), args, len(results), rets, byref(problem),
                 byref(buffers), byref(error)) != _lib.OK:
        why = error.message.decode("utf-8", "replace").removeprefix("tessera: ")
        raise ValueError(f"tessera.{call.operation}: {why}")
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
