# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Ulysses, which calls attention with all tokens of this rank's heads, but hands on what belongs to all
heads as the layer has it."""

from __future__ import annotations

import sys

import torch


def sinks(given: torch.Tensor, heads: int) -> torch.Tensor:
    """Those of this rank's `heads` where `given` has all heads: DeepSpeed deals heads out in the order of ranks. Sinks
    of another number stay as they are: attention says what is wrong with them."""
    if given.numel() == heads:
        return given
    state = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    try:
        rank, size = state.get_sequence_parallel_rank(), state.get_sequence_parallel_world_size()
    except (AttributeError, AssertionError):  # no DeepSpeed, or no Ulysses in it
        return given
    return given[rank * heads:(rank + 1) * heads] if given.numel() == size * heads else given
