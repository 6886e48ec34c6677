# SPDX-License-Identifier: Apache-2.0
"""Paddle's adapter for _args and _prepared: eager tensors by their addresses."""

from __future__ import annotations

import os

import paddle
from paddle import _C_ops

from .. import _lib, _numpy
from .._call._args import ArrayInfo

noun, num_threads = "Paddle tensor", None
array_type = paddle.Tensor
_CPU = (_lib.CPU, 0)
# A build without devices has every tensor on the CPU, and asking costs a microsecond a tensor.
_HAS_DEVICES = paddle.is_compiled_with_cuda() or paddle.is_compiled_with_xpu() or \
    bool(paddle.device.get_all_custom_device_type())


def info(x) -> ArrayInfo | None:
    if not isinstance(x, paddle.Tensor):
        return None
    dtype, shape = dtype_name(x.dtype), tuple(x.shape)
    flaw = ""
    if x.is_dist():
        flaw = "is_dist()=True: must be a local tensor; call tessera in paddle.distributed.local_map"
    elif not x.is_dense():
        flaw = "is_dense()=False: must be dense; use to_dense()"
    if flaw:
        return ArrayInfo(dtype, shape, (0,) * len(shape), _CPU, True, flaw)
    where = _where(x)
    if isinstance(where, str):
        flaw = f"place={where}: must be on the CPU or on a CUDA device"
    return ArrayInfo(dtype, shape, tuple(x.strides), where, True, flaw)


def dtype_name(dtype) -> str:
    return str(dtype)[len("paddle."):]


def _where(x) -> tuple[int, int] | str:
    """(kind, ordinal) of tessera_device, or a place that tessera does not know."""
    place = x.place
    if not _HAS_DEVICES or place.is_cpu_place():
        return _CPU
    return (_lib.CUDA, place.gpu_device_id()) if place.is_gpu_place() else str(place)


def signature(x):
    """1, 1.0 and True are three."""
    if isinstance(x, paddle.Tensor):  # dtypes are singletons, whose hash is slow
        return (id(x.dtype), tuple(x.shape), tuple(x.strides), x.is_dist(),
                _where(x) if _HAS_DEVICES else None)
    if type(x) is tuple:
        return tuple(map(signature, x))
    return type(x), x


def device(x) -> _lib.Device:
    kind, ordinal = _where(x)
    return _lib.CPU_DEVICE if kind == _lib.CPU else _lib.Device(kind=kind, ordinal=ordinal)


def stream(x) -> int:
    return int(paddle.device.current_stream(x.place).stream_base.cuda_stream)


pointer = paddle.Tensor.data_ptr  # 0 for an empty tensor


def int64(x) -> paddle.Tensor:
    return x.astype("int64").contiguous()


def dtype(name: str):
    return getattr(paddle, name)


def empty(operation: str, name: str, shape, dtype, like) -> paddle.Tensor:
    try:  # paddle.empty costs 15 us more
        return _C_ops.empty(list(shape), dtype, like.place)
    except MemoryError as error:
        raise MemoryError(f"tessera.{operation}: {name}.shape={list(shape)}: this output does not "
                          "fit in memory") from error


def workspace(operation: str, size: int, like):
    if _where(like) == _CPU:
        return _numpy.workspace(operation, size)
    owner = empty(operation, "workspace", (size,), paddle.uint8, like)
    return owner.data_ptr(), owner


def integers(words, like) -> paddle.Tensor:
    place = like.place if isinstance(like, paddle.Tensor) else None
    return paddle.to_tensor(words, dtype="int64", place=place)


def random_words(like) -> paddle.Tensor:
    """(seed, offset) from Paddle's generator. randint takes no bounds beyond int32."""
    words = paddle.randint(-2**31, 2**31 - 1, [2], "int64")
    return words.to(like.place) if _HAS_DEVICES and isinstance(like, paddle.Tensor) else words


def autocast_dtype() -> str | None:
    """What amp.auto_cast casts to, where it is on."""
    if hasattr(paddle.amp, "is_autocast_enabled"):
        return paddle.amp.get_autocast_dtype() if paddle.amp.is_autocast_enabled() else None
    tracer = paddle.base.framework._dygraph_tracer()  # before Paddle 3.3
    off = tracer is None or tracer._amp_level == paddle.base.core.AmpLevel.O0
    return None if off else tracer._amp_dtype


def is_deterministic() -> bool:
    """FLAGS_cudnn_deterministic, which a build without CUDA knows from the environment alone."""
    flag = "FLAGS_cudnn_deterministic"
    if paddle.is_compiled_with_cuda():
        return bool(paddle.get_flags(flag)[flag])
    return os.environ.get(flag, "").lower() in ("1", "true")
