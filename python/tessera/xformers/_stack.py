# SPDX-License-Identifier: Apache-2.0
"""xformers.ops' unbind and stack: pieces of one tensor without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unbind(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """torch.unbind."""
    return x.unbind(dim)


def get_stack_strides(tensors: Sequence[torch.Tensor], dim: int) -> tuple[int, ...] | None:
    """Strides of torch.stack(tensors, dim) where the tensors lie in one storage as its pieces, otherwise None."""
    first, *others = tensors
    if not others or dim > first.dim():
        return None
    step = others[0].storage_offset() - first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for i, x in enumerate(others, 1):
        if (x.shape, x.stride(), x.storage_offset(), x.untyped_storage().data_ptr()) != \
                (first.shape, first.stride(), first.storage_offset() + i * step, storage):
            return None
    return *first.stride()[:dim], step, *first.stride()[dim:]


def stack_or_none(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
    """torch.stack as a view, or None where it would copy. Gradients reach the tensors."""
    strides = get_stack_strides(tensors, dim)
    return None if strides is None else _Stack.apply(dim, strides, *tensors)


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dim, strides, *tensors):
        ctx.dim = dim
        first = tensors[0]
        shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])
        return first.as_strided(shape, strides)

    @staticmethod
    def backward(ctx, grad):
        return None, None, *grad.unbind(ctx.dim)
