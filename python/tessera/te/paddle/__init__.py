# SPDX-License-Identifier: Apache-2.0
"""The attention of transformer_engine.paddle, as it was in TE 1.7 to 1.13.

    attention = DotProductAttention(num_attention_heads=16, kv_channels=64, attn_mask_type="padding")
    out = attention(query_layer, key_layer, value_layer, attention_mask)
"""

from . import constants, cpp_extensions, distributed, layer, utils
from ._refused import missing
from .layer import DotProductAttention, MultiHeadAttention, RotaryPositionEmbedding
from .recompute import recompute

__all__ = ["DotProductAttention", "MultiHeadAttention", "RotaryPositionEmbedding", "recompute",
           "constants", "cpp_extensions", "distributed", "layer", "utils"]
__getattr__ = missing(__name__)
