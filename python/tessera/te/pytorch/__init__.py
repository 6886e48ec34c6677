# SPDX-License-Identifier: Apache-2.0
"""transformer_engine.pytorch, as far as it is attention.

    attention = DotProductAttention(num_attention_heads=16, kv_channels=64, qkv_format="bshd")
    out = attention(query_layer, key_layer, value_layer, attn_mask_type="causal")
"""

from .._names import missing
from . import attention, constants, cpp_extensions, cpu_offload, distributed, graph, utils
from .attention import (DotProductAttention, InferenceParams, MultiheadAttention,
                        RotaryPositionEmbedding, apply_rotary_pos_emb)
from .cpu_offload import get_cpu_offload_context
from .distributed import checkpoint
from .graph import make_graphed_callables
from .transformer import TransformerLayer
from .utils import get_cudnn_version, get_device_compute_capability, is_bf16_available

__all__ = ["DotProductAttention", "InferenceParams", "MultiheadAttention",
           "RotaryPositionEmbedding", "TransformerLayer", "apply_rotary_pos_emb", "attention",
           "checkpoint", "constants", "cpp_extensions", "cpu_offload", "distributed",
           "get_cpu_offload_context", "get_cudnn_version", "get_device_compute_capability", "graph",
           "is_bf16_available", "make_graphed_callables", "utils"]
__getattr__ = missing(__name__)
