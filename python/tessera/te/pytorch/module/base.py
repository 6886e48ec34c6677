# SPDX-License-Identifier: Apache-2.0
"""The class by which programs know TE's modules with FP8 state, and the gradient that stands for one in main_grad."""

from __future__ import annotations

import functools

import torch

from ..._names import missing
from .._linear import device_of
from ..attention.dot_product_attention._quantized._fp8_state import Float8Module as TransformerEngineBaseModule

__all__ = ["TransformerEngineBaseModule", "get_dummy_wgrad"]
__getattr__ = missing(__name__)


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """A tensor that all callers of this shape and dtype share, on the current CUDA device or, without one, on the
    CPU: the .grad of a parameter whose gradient was added to its main_grad. Nobody reads its values, which `zero`
    sets to 0."""
    device = device_of("cuda")
    shared = _shared(tuple(shape), dtype, device if device.type == "cpu" else
                     torch.device("cuda", torch.cuda.current_device()))
    return (shared.zero_() if zero else shared).detach()


@functools.cache
def _shared(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
