# SPDX-License-Identifier: Apache-2.0
"""Tensors that store rounded numbers but behave like the tensors that they stand for, and the quantizers that
make them.

A QuantizedTensor has the dtype, shape and strides of the tensor that it stands for. Operations that
only move numbers move what is stored; all others see its value, `dequantize()`, and write back what
they change in place.
"""

from __future__ import annotations

import abc

import torch
from torch.utils import _pytree as pytree

from ..._names import missing

__all__ = ["QuantizedTensor", "Quantizer"]
__getattr__ = missing(__name__)

_aten = torch.ops.aten
# What moves numbers, or picks some: done to what is stored, the result is quantised alike.
_MOVES = frozenset({
    _aten.alias.default, _aten.as_strided.default, _aten.clone.default, _aten.detach.default,
    _aten.expand.default, _aten.permute.default, _aten.select.int, _aten.slice.Tensor,
    _aten.split.Tensor, _aten.split_with_sizes.default, _aten.squeeze.dim, _aten.squeeze.default,
    _aten.t.default, _aten.transpose.int, _aten.unbind.int, _aten.unsqueeze.default,
    _aten._unsafe_view.default, _aten.view.default})


class QuantizedTensor(torch.Tensor):
    """Subclasses hold what is stored in `_data`, know its value, and wrap what was moved."""

    @staticmethod
    def __new__(cls, shape, dtype: torch.dtype, *, data: torch.Tensor, requires_grad: bool = False, **_):
        if tuple(shape) != tuple(data.shape):
            raise ValueError(f"{cls.__name__}: shape={list(shape)}: must be that of data, "
                             f"{list(data.shape)}")
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(), dtype=dtype,
            layout=data.layout, device=data.device, requires_grad=requires_grad)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The value, a plain tensor of `dtype`, by default this tensor's. Gradients pass through."""
        return _Dequantize.apply(self, self.dtype if dtype is None else dtype)

    def quantize_(self, tensor: torch.Tensor) -> QuantizedTensor:
        """Stores `tensor` [the same shape] instead, by this tensor's quantizer."""
        return self._get_quantizer().update_quantized(tensor, self)

    @abc.abstractmethod
    def _value(self, dtype: torch.dtype) -> torch.Tensor:
        """The value, without autograd."""

    @abc.abstractmethod
    def _moved(self, data: torch.Tensor) -> QuantizedTensor:
        """A tensor like this one whose numbers are `data`."""

    @abc.abstractmethod
    def _get_quantizer(self) -> Quantizer:
        """What rounds numbers that are written into this tensor."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        source = args[0] if args else None
        if function in _MOVES and isinstance(source, QuantizedTensor):
            moved = function(source._data, *args[1:], **kwargs)
            return pytree.tree_map_only(torch.Tensor, source._moved, moved)
        if function is _aten._to_copy.default and kwargs.get("dtype") in (None, source.dtype):
            return source._moved(function(source._data, **{**kwargs, "dtype": None}))
        written = _written(function, args, kwargs)
        values = {id(x): x._value(x.dtype) for x in pytree.tree_leaves((args, kwargs))
                  if isinstance(x, QuantizedTensor)}

        def value(x):
            return values[id(x)]
        plain_args, plain_kwargs = pytree.tree_map_only(QuantizedTensor, value, (args, kwargs))
        result = function(*plain_args, **plain_kwargs)
        for x in written:
            x.quantize_(values[id(x)])
        return written[0] if written and result is values[id(written[0])] else result

    # Below __torch_dispatch__ nothing is left to do for functions.
    __torch_function__ = torch._C._disabled_torch_function_impl


def _written(function, args, kwargs) -> list:
    """The quantised tensors that `function` changes in place."""
    if not function._schema.is_mutable:
        return []
    named = dict(zip([argument.name for argument in function._schema.arguments], args)) | kwargs
    return [named[argument.name] for argument in function._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and
            isinstance(named.get(argument.name), QuantizedTensor)]


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dtype):
        ctx.dtype = tensor.dtype
        return tensor._value(dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


class Quantizer(abc.ABC):
    """Rounds tensors: quantizer(tensor) is a QuantizedTensor of the same dtype. rowwise_usage and
    columnwise_usage say which copies linear layers would want; there is one copy here."""

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None):
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def quantize(self, tensor: torch.Tensor, *, out: QuantizedTensor | None = None,
                 dtype: torch.dtype | None = None) -> QuantizedTensor:
        """`tensor` [any shape, floating] rounded: a new tensor of nominal `dtype`, or written into `out`.
        Gradients pass straight through the rounding."""
        if out is not None:
            return self.update_quantized(tensor, out)
        if isinstance(tensor, QuantizedTensor):
            tensor = tensor.dequantize()
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Quantize.apply(tensor, self, tensor.dtype if dtype is None else dtype)
        return self._quantized(tensor.detach(), tensor.dtype if dtype is None else dtype)

    __call__ = quantize

    @abc.abstractmethod
    def _quantized(self, tensor: torch.Tensor, dtype: torch.dtype) -> QuantizedTensor:
        """quantize() without autograd."""

    @abc.abstractmethod
    def update_quantized(self, src: torch.Tensor, dst: QuantizedTensor) -> QuantizedTensor:
        """Stores src in dst [the same shape], and returns dst."""


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, quantizer, dtype):
        ctx.dtype = tensor.dtype
        return quantizer._quantized(tensor.detach(), dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None, None
