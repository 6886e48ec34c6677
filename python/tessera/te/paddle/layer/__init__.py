# SPDX-License-Identifier: Apache-2.0
"""TE's layers, as far as they are attention."""

from .._refused import missing
from .attention import DotProductAttention, MultiHeadAttention, RotaryPositionEmbedding

__all__ = ["DotProductAttention", "MultiHeadAttention", "RotaryPositionEmbedding"]
__getattr__ = missing(__name__)
