# SPDX-License-Identifier: Apache-2.0
"""NumPy's adapter for _args, and the memory that NumPy calls need."""

from __future__ import annotations

import threading

import numpy as np

from . import _lib
from ._args import ArrayInfo

noun = "NumPy array"
_CPU = (_lib.CPU, 0)
_KEPT_WORKSPACE = 16 << 20  # bytes of workspace that a thread keeps between calls
_local = threading.local()


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
    return ArrayInfo(dtype.name, x.shape, strides, _CPU, x.flags.writeable, flaw)


def pointer(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def empty(operation: str, name: str, shape, dtype) -> np.ndarray:
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise MemoryError(f"tessera.{operation}: {name}.shape={list(shape)}: this output does not "
                          "fit in memory") from error


def workspace(operation: str, size: int):
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
