# SPDX-License-Identifier: Apache-2.0
"""What TE's users ask of a machine before they choose an attention."""

from __future__ import annotations

import ctypes
import os

import torch

from .._names import missing

__all__ = ["get_cudnn_version", "get_device_compute_capability", "is_bf16_available"]
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
