# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention, and names that TE 1 had here and TE 2 moved one level down."""

from ..._names import missing
from .dot_product_attention import DotProductAttention, _attention_backends
from .dot_product_attention.backends import (FlashAttention, FusedAttention, FusedAttnFunc,
                                             UnfusedDotProductAttention, _PrepareQKVForFA)
from .dot_product_attention.utils import (AttentionParams, check_set_window_size, get_alibi,
                                          get_attention_backend, get_cu_seqlens, get_qkv_layout)
from .inference import (InferenceParams, KVCacheManager, NonPagedKVCacheManager,
                        PagedKVCacheManager)
from .multi_head_attention import MultiheadAttention
from .rope import (RotaryPositionEmbedding, apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb)

__all__ = ["InferenceParams", "KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager",
           "MultiheadAttention", "RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb",
           "AttentionParams", "DotProductAttention", "FlashAttention", "FusedAttention",
           "FusedAttnFunc", "UnfusedDotProductAttention", "_PrepareQKVForFA",
           "_attention_backends", "check_set_window_size", "get_alibi", "get_attention_backend",
           "get_cu_seqlens", "get_qkv_layout"]
__getattr__ = missing(__name__)
