# SPDX-License-Identifier: Apache-2.0
"""All that TE had in this module."""

from .._refused import missing
from ._dot_product import DotProductAttention, repeat_kv
from ._fused import FusedAttnFunc, FusedAttnFuncPackedKV, FusedAttnFuncPackedQKV
from ._multi_head import MultiHeadAttention
from ._rotary import RotaryPositionEmbedding, apply_rotary_pos_emb, rotate_half

__all__ = ["DotProductAttention", "MultiHeadAttention", "RotaryPositionEmbedding", "FusedAttnFunc",
           "FusedAttnFuncPackedKV", "FusedAttnFuncPackedQKV", "apply_rotary_pos_emb", "repeat_kv",
           "rotate_half"]
__getattr__ = missing(__name__)
