# SPDX-License-Identifier: Apache-2.0
"""TE's flax.linen modules of attention."""

from .._words import missing
from . import transformer
from .transformer import (DotProductAttention, MultiHeadAttention, RelativePositionBiases,
                          TransformerLayer, TransformerLayerType, extend_logical_axis_rules)

__all__ = ["DotProductAttention", "MultiHeadAttention", "RelativePositionBiases",
           "TransformerLayer", "TransformerLayerType", "extend_logical_axis_rules", "transformer"]
__getattr__ = missing(__name__)
