# SPDX-License-Identifier: Apache-2.0
"""Where TE has its modules of attention, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._words import error, missing
from ..sharding import get_sharding_map_logic_axis_to_mesh_axis
from ._dot_product import (DotProductAttention, _FusedDotProductAttention,
                           _UnfusedDotProductAttention)
from ._layer import TransformerLayer, TransformerLayerType
from ._multi_head import LoRAScope, MultiHeadAttention
from ._positions import RelativePositionBiases, rotary_pos_emb

__all__ = ["DotProductAttention", "LoRAScope", "MultiHeadAttention", "RelativePositionBiases",
           "TransformerLayer", "TransformerLayerType", "_FusedDotProductAttention", "_UnfusedDotProductAttention",
           "extend_logical_axis_rules", "rotary_pos_emb"]
__getattr__ = missing(__name__)

# TE's names of types.
PRNGKey, DType, Array = Any, jnp.dtype, jnp.ndarray
Shape = tuple[int, ...]
PrecisionLike = None | str | jax.lax.Precision | tuple[str, str] | tuple[jax.lax.Precision, jax.lax.Precision]
Initializer = Callable[[PRNGKey, Shape, DType], Array]
LogicalRules = Sequence[tuple[str, str | None]]


def extend_logical_axis_rules(rules) -> tuple:
    """flax's rules, pairs of a logical and a mesh axis, with those of TE's *_AXES for the mesh and
    the resource that are set."""
    own = get_sharding_map_logic_axis_to_mesh_axis()
    for name, axis in rules:
        if name in own and own[name] != axis:
            raise error("rules", (name, axis), f"must be {own[name]!r}, as the mesh resource says",
                        "extend_logical_axis_rules")
    given = {name for name, _ in rules}
    return (*rules, *(rule for rule in own.items() if rule[0] not in given))
