# SPDX-License-Identifier: Apache-2.0
"""transformer_engine.pytorch, as far as it is attention.

    attention = DotProductAttention(num_attention_heads=16, kv_channels=64, qkv_format="bshd")
    out = attention(query_layer, key_layer, value_layer, attn_mask_type="causal")
"""

from .._names import missing
from . import attention, constants, cpp_extensions, distributed, utils
from .attention import (DotProductAttention, InferenceParams, MultiheadAttention,
                        RotaryPositionEmbedding, apply_rotary_pos_emb)
from .transformer import TransformerLayer
from .utils import get_cudnn_version, get_device_compute_capability, is_bf16_available

__all__ = ["DotProductAttention", "InferenceParams", "MultiheadAttention",
           "RotaryPositionEmbedding", "TransformerLayer", "apply_rotary_pos_emb", "attention", "constants", "cpp_extensions", "distributed",
           "get_cudnn_version", "get_device_compute_capability", "is_bf16_available", "utils"]
__getattr__ = missing(__name__)
