# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism by fleet, as far as attention sees it."""

from __future__ import annotations

import contextlib

import paddle

from ._refused import missing

__all__ = ["get_tp_group_and_world_size", "track_rng_state"]
__getattr__ = missing(__name__)


def get_tp_group_and_world_size(tp_group, enable_tp: bool = True):
    """(group, number of its ranks); (None, 1) where nothing is parallel. Without tp_group the group is
    fleet's own."""
    if not (enable_tp and paddle.distributed.is_initialized()):
        return None, 1
    if tp_group is not None:
        return tp_group, tp_group.nranks
    from paddle.distributed import fleet
    groups = fleet.get_hybrid_communicate_group()
    return groups.get_model_parallel_group(), groups.get_model_parallel_world_size()


@contextlib.contextmanager
def track_rng_state(enable: bool, **kwargs):
    """Random numbers inside come from a state of fleet's tracker, if enabled: name="local_seed"."""
    if not enable:
        yield
        return
    from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker
    with get_rng_state_tracker().rng_state(**kwargs):
        yield
