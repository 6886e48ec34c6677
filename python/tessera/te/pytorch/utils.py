# SPDX-License-Identifier: Apache-2.0
"""What TE's users ask of a machine before they choose an attention."""

from __future__ import annotations

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
    """(major, minor, patch) of PyTorch's cuDNN, (0, 0, 0) without one. tessera uses none."""
    version = torch.backends.cudnn.version() or 0
    size = 10000 if version >= 90000 else 1000
    return version // size, version % size // 100, version % 100


def is_bf16_available(return_reason: bool = False):
    """True; with return_reason (True, ""): tessera's kernels take bf16 wherever they run."""
    return (True, "") if return_reason else True
