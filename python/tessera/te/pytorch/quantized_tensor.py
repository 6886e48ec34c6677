# SPDX-License-Identifier: Apache-2.0
"""QuantizedTensor and Quantizer where TE 2.10 and later have them, and how an autograd function saves tensors:

    tensors, ctx.tensor_objects = prepare_for_saving(q, k, v)
    ctx.save_for_backward(*tensors)
    ...
    q, k, v = restore_from_func_ctx(ctx)

Every QuantizedTensor is a torch.Tensor here and is saved as it is, so the objects beside them are Nones.
"""

from __future__ import annotations

import torch

from .._names import missing
from .tensor.quantized_tensor import QuantizedTensor, Quantizer

__all__ = ["QuantizedTensor", "Quantizer", "prepare_for_saving", "restore_from_func_ctx", "restore_from_saved"]
__getattr__ = missing(__name__)


def prepare_for_saving(*tensors: torch.Tensor | None) -> tuple[list, list]:
    """(what save_for_backward takes, what goes with each)."""
    return list(tensors), [None] * len(tensors)


def restore_from_saved(tensors: list, saved_tensors, return_saved_tensors: bool = False):
    """The first of saved_tensors, one for each of `tensors`, which are prepare_for_saving's second list; with
    return_saved_tensors a pair with the rest."""
    count = len(tensors)
    found = list(saved_tensors[:count])
    return (found, list(saved_tensors[count:])) if return_saved_tensors else found


def restore_from_func_ctx(ctx, return_saved_tensors: bool = False):
    """restore_from_saved of what ctx.tensor_objects and ctx.save_for_backward were given. AttributeError without."""
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError("restore_from_func_ctx: ctx.tensor_objects: must be prepare_for_saving's second list")
    found = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return found
