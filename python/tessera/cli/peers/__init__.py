# SPDX-License-Identifier: Apache-2.0
"""Other ways to compute a case, for bench: each peer turns a Workload into a function to time, or
raises Unsupported with the reason. What a peer needs is imported when it is asked for."""

from __future__ import annotations

import functools
from typing import Callable

from . import decode, fa3, flash_attn_4, jax_nn, other_build, paddle_sdpa, pytorch, unfused
from .workload import Unsupported, Workload, first_line, require_numpy_dtypes

__all__ = ["BUILD", "FA3", "PEERS", "Unsupported", "Workload", "first_line", "prepare"]

# Peers that are files: what stands before their path.
BUILD, FA3 = "build:", "fa3:"

PEERS = {"torch": pytorch.sdpa, "flex": pytorch.flex, "matmul": pytorch.matmul, "numpy": unfused.peer,
         "cudnn": pytorch.kernel_of_sdpa("cudnn", "CUDNN_ATTENTION"),
         "flash-attn-2": pytorch.kernel_of_sdpa("flash-attn-2", "FLASH_ATTENTION"),
         "efficient": pytorch.kernel_of_sdpa("efficient", "EFFICIENT_ATTENTION"),
         "flashinfer": decode.flashinfer, "flash": decode.flash,
         "flash-attn-4": flash_attn_4.peer, "paddle": paddle_sdpa.peer,
         "jax-xla": functools.partial(jax_nn.peer, implementation="xla"),
         "jax-cudnn": functools.partial(jax_nn.peer, implementation="cudnn")}
OF_DRAWN = {"torch", "cudnn", "flash-attn-2", "efficient", "flashinfer", "flash"}
OF_BITS = set(PEERS) - {"numpy", "paddle", "jax-xla", "jax-cudnn"}  # PyTorch takes bits of bf16 and fp8 as they are


def prepare(name: str, workload: Workload) -> Callable[[], object]:
    """name: of PEERS, or build:PATH, another build of libtessera, or fa3:PATH, FlashAttention-3."""
    if workload.drawn is not None and name not in OF_DRAWN:
        raise Unsupported(f"{name}: takes data of the host, and a grid has none")
    if name.startswith(BUILD):
        return other_build.Build(name[len(BUILD):]).peer(workload)
    if name.startswith(FA3):
        return fa3.Library(name[len(FA3):]).peer(workload)
    if name not in PEERS:
        raise Unsupported(f"no peer of this name; there are {', '.join(PEERS)}")
    if name not in OF_BITS:
        require_numpy_dtypes(workload, name)
    return PEERS[name](workload)
