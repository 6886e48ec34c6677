# SPDX-License-Identifier: Apache-2.0
"""TE-JAX's context parallelism: which mesh axis splits sequences, and what is said of it."""

from __future__ import annotations

from . import sharding
from ._words import later


def axis_of(context_parallel_axis: str = "") -> str | None:
    """The mesh axis over which sequences are split: the one that is named, or that of the mesh
    resource; None if one device holds them whole."""
    if not sharding.is_mesh_available():
        return None
    if context_parallel_axis:
        several = sharding.get_mesh_axis_size(context_parallel_axis) > 1
        return context_parallel_axis if several else None
    return sharding.get_active_resource_axis("cp_resource")


def refuse(strategy, axis: str, operation: str):
    """Until tessera.jax.context_parallel is there."""
    devices = sharding.get_mesh_axis_size(axis)
    raise later("context_parallel_axis", f"{axis!r} (context_parallel_strategy={strategy.name}, "
                f"{devices} devices)", "context parallelism", "split batch and heads instead, or "
                "merge the parts of each device with tessera.jax.merge", operation)
