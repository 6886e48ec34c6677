# SPDX-License-Identifier: Apache-2.0
"""PyTorch's adapter for _args, _utilities, _description and _explain. Extents may be symbolic: a problem is
described by their hints, the values of the call being traced, without a guard on them."""

from __future__ import annotations

import torch

from .. import _lib
from .._call._args import ArrayInfo

noun, array_type, num_threads = "PyTorch tensor", torch.Tensor, torch.get_num_threads


def info(x) -> ArrayInfo | None:
    if not isinstance(x, torch.Tensor):
        return None
    dtype = dtype_name(x)
    flaw = ""
    if x.layout is not torch.strided or x.is_nested:
        flaw = f"layout={x.layout}: must be strided; use to_dense(), or layout=\"thd\" for lengths"
        return ArrayInfo(dtype, tuple(x.shape), (0,) * x.dim(), str(x.device), True, flaw)
    if x.device.type not in ("cpu", "cuda", "meta"):
        flaw = f"device={str(x.device)!r}: must be on the CPU or on a CUDA device"
    elif x.is_conj() or x.is_neg():
        flaw = "is_neg()=True: must hold its values as they are; use resolve_neg()"
    return ArrayInfo(dtype, hints(x.shape), hints(x.stride()), str(x.device), True, flaw)


class NoHint(Exception):
    """An extent is known only when the graph runs."""


def hints(values) -> tuple[int, ...]:
    return tuple(map(hint, values))


def hint(value):
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    if not value.node.has_hint():
        raise NoHint
    return value.node.hint


def dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def dtype_name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast makes of x, if it is on for x's device. PyTorch has none for meta and fails when asked."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def pointer(x: torch.Tensor) -> int:
    return x.data_ptr()


def are_first_columns(x, of) -> bool:
    """Whether x is the first columns of another tensor, as v is of a latent cache."""
    return (isinstance(x, torch.Tensor) and isinstance(of, torch.Tensor) and x.device.type != "meta"
            and not torch._subclasses.fake_tensor.is_fake(x) and x.shape[:-1] == of.shape[:-1]
            and x.stride() == of.stride() and x.shape[-1:] < of.shape[-1:] and x.dtype == of.dtype
            and x.data_ptr() == of.data_ptr())


def is_exporting() -> bool:
    """Whether torch.export traces the call: PyTorch 2.11's torch.compiler.is_exporting is true of every traced one."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


def device(tensor) -> _lib.Device:
    if tensor.device.type in ("cpu", "meta"):  # shapes on meta are asked of the CPU's backends
        return _lib.CPU_DEVICE
    return _lib.Device(kind=_lib.CUDA, ordinal=tensor.device.index or 0)


def stream(x: torch.Tensor) -> int:
    # What torch.cuda.current_stream(x.device).cuda_stream is, without a Stream: 1 us beside 10.
    return torch._C._cuda_getCurrentRawStream(x.device.index)


def empty(operation: str, name: str, shape, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def int64(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64).contiguous()


def empty_o(q, v, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """A new o: of layout "bhsd" in memory as q is, like PyTorch's own attention, so that
    o.transpose(1, 2).reshape(b, s, h * dv) copies nothing; of others, whose axes those are, row-major."""
    shape = (*q.shape[:-1], v.shape[-1])
    if layout != "bhsd":
        return q.new_empty(shape, dtype=dtype)
    like = q if q.shape[-1] == v.shape[-1] else q[..., :1].expand(shape)
    return torch.empty_like(like, dtype=dtype)


def empty_gradient(x, name: str, dtype: torch.dtype | None) -> torch.Tensor:
    """A new gradient of x: dq, dk and dv in memory as x is."""
    kept = name in ("dq", "dk", "dv")
    return torch.empty_like(x, dtype=dtype if kept else None, memory_format=torch.preserve_format if kept
                            else torch.contiguous_format)
