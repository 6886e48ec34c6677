# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention; and beside it what TE 1 had here and TE 2 moved one level down."""

from ..._names import missing
from .dot_product_attention import DotProductAttention, _attention_backends
from .dot_product_attention.backends import (FlashAttention, FusedAttention, FusedAttnFunc,
                                             UnfusedDotProductAttention)
from .dot_product_attention.utils import (AttentionParams, check_set_window_size, get_alibi,
                                          get_attention_backend, get_cu_seqlens, get_qkv_layout)

__all__ = ["AttentionParams", "DotProductAttention", "FlashAttention", "FusedAttention",
           "FusedAttnFunc", "UnfusedDotProductAttention", "_attention_backends",
           "check_set_window_size", "get_alibi", "get_attention_backend", "get_cu_seqlens",
           "get_qkv_layout"]
__getattr__ = missing(__name__)
