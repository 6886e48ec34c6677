# SPDX-License-Identifier: Apache-2.0
"""What TE's users ask of a machine before they choose an attention, and how they draw its weights."""

from __future__ import annotations

import ctypes
import functools
import math
import os

import torch

from .._names import missing

__all__ = ["get_cudnn_version", "get_device_compute_capability", "init_method_normal", "is_bf16_available",
           "is_bf16_compatible", "scaled_init_method_normal"]
__getattr__ = missing(__name__)


def get_device_compute_capability(device=None) -> tuple[int, int]:
    """(major, minor) of a CUDA device; the CPU chooses as Hopper does, (9, 0)."""
    if not torch.cuda.is_available() or device is not None and torch.device(device).type == "cpu":
        return 9, 0
    return torch.cuda.get_device_capability(device)


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the cuDNN that the process has, else of the one inside PyTorch; (0, 0, 0) without
    one. Opens none: tessera does when its backend of that name first runs."""
    version = _loaded_cudnn() or torch.backends.cudnn.version() or 0
    size = 10000 if version >= 90000 else 1000
    return version // size, version % size // 100, version % 100


def _loaded_cudnn() -> int:
    """As cuDNN counts, 91900; 0 where none is loaded."""
    try:
        library = ctypes.CDLL("libcudnn.so.9", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return 0
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return library.cudnnGetVersion()


def is_bf16_available(return_reason: bool = False):
    """True; with return_reason (True, ""): tessera's kernels take bf16 wherever they run."""
    return (True, "") if return_reason else True


def is_bf16_compatible() -> bool:
    """is_bf16_available, by the name that TE's tests ask."""
    return is_bf16_available()


def init_method_normal(sigma: float):
    """A function that fills a tensor in place with numbers of N(0, sigma²) and returns it."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int):
    """init_method_normal of sigma / √(2 num_layers), for what adds to the residual of many layers."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))
