# SPDX-License-Identifier: Apache-2.0
"""NumPy's adapter for _args and _prepared."""

from __future__ import annotations

import ctypes
import functools
import threading

import numpy as np

from . import _lib
from ._call._args import ArrayInfo

noun, num_threads = "NumPy array", None
array_type = np.ndarray
_CPU = (_lib.CPU, 0)
_KEPT_WORKSPACE = 16 << 20  # bytes of workspace that a thread keeps between calls
_local = threading.local()


@functools.lru_cache(maxsize=64)
def _name(dtype: np.dtype) -> str:
    """dtype.name, which NumPy makes anew each time, in 5 us."""
    return dtype.name


def info(x) -> ArrayInfo | None:
    if not isinstance(x, np.ndarray):
        return None
    dtype, size = x.dtype, x.dtype.itemsize
    flaw = ""
    if isinstance(x, np.ma.MaskedArray):
        flaw = "mask=...: masked arrays are not read; pass the data, and the mask as keep= or drop="
    elif not dtype.isnative:
        flaw = f"dtype={dtype.str!r}: must be of native byte order; astype(dtype.newbyteorder('='))"
    elif size and any(stride % size for stride in x.strides):
        flaw = f"strides={list(x.strides)}: must be multiples of the {size}-byte element"
    strides = tuple(stride // size for stride in x.strides) if size else x.strides
    return ArrayInfo(_name(dtype), x.shape, strides, _CPU, x.flags.writeable, flaw)


# NumPy's __array_struct__ protocol: a capsule around a C PyArrayInterface. It costs a third of
# x.ctypes.data, which counts where a call takes a few microseconds.
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object,
                                                                        ctypes.c_char_p)
_word_at = ctypes.c_uint64.from_address


class _ArrayInterface(ctypes.Structure):
    _fields_ = [("two", ctypes.c_int), ("nd", ctypes.c_int), ("typekind", ctypes.c_char),
                ("itemsize", ctypes.c_int), ("flags", ctypes.c_int), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("data", ctypes.c_void_p)]


_DATA_OFFSET = _ArrayInterface.data.offset


def pointer(x: np.ndarray) -> int:
    capsule = x.__array_struct__
    return _word_at(_capsule_pointer(capsule, None) + _DATA_OFFSET).value


def dtype(name: str) -> np.dtype:
    """The dtype of a name in _lib.DTYPES; bf16 and fp8 come from ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes
        return np.dtype(getattr(ml_dtypes, name))


def signature(x):
    """1, 1.0 and True are three."""
    if type(x) is np.ndarray:
        return x.shape, x.strides, x.dtype, x.flags.writeable
    if type(x) is tuple:
        return tuple(map(signature, x))
    return type(x), x


def device(_) -> _lib.Device:
    return _lib.CPU_DEVICE


def int64(x) -> np.ndarray:
    return np.ascontiguousarray(x, np.int64)


def integers(words, _) -> np.ndarray:
    return np.array(words, np.int64)


def empty(operation: str, name: str, shape, dtype, like=None) -> np.ndarray:
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise MemoryError(f"tessera.{operation}: {name}.shape={list(shape)}: this output does not "
                          "fit in memory") from error


def workspace(operation: str, size: int, like=None):
    """(address, owner) of `size` bytes, 64-byte aligned, for this thread's current call."""
    try:
        capacity, address, owner = _local.workspace
    except AttributeError:
        capacity, address, owner = 0, 0, None
    if size <= capacity:
        return address, owner
    owner = empty(operation, "workspace", (size + 63,), np.uint8)
    address = -(-pointer(owner) // 64) * 64
    if size <= _KEPT_WORKSPACE:
        _local.workspace = size, address, owner
    return address, owner
