# SPDX-License-Identifier: Apache-2.0
"""_tensors for calls that reach tensors by their address, past the dispatcher: where no gradient is wanted, on the
CPU, and on a GPU what no operator has: fp8 q and all that goes with it, and sums in place."""

import torch

from .. import _numpy
from ._tensors import device, dtype, info, noun, pointer, signature

__all__ = ["device", "dtype", "empty", "info", "noun", "num_threads", "pointer", "raw_fp8", "signature", "stream",
           "workspace"]

raw_fp8, num_threads = True, torch.get_num_threads


def empty(operation: str, name: str, shape, dtype: torch.dtype, like) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def workspace(operation: str, size: int, like):
    if like.device.type == "cpu":
        return _numpy.workspace(operation, size)
    owner = torch.empty(size, dtype=torch.uint8, device=like.device)  # another's only in the stream's order
    return owner.data_ptr(), owner


def stream(x) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream
