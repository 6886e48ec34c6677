# SPDX-License-Identifier: Apache-2.0
"""_tensors for calls that reach tensors by their address, past the dispatcher: on the CPU, where no gradient is
wanted. They take fp8 q and all that goes with it, which no operator has."""

from ._tensors import device, dtype, empty, info, noun, num_threads, pointer, signature, workspace

__all__ = ["device", "dtype", "empty", "info", "noun", "num_threads", "pointer", "raw_fp8", "signature", "workspace"]

raw_fp8 = True
