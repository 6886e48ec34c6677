# SPDX-License-Identifier: Apache-2.0
"""TE's NVTE_* numbers, and a fused call by them: what the questions of PyTorch and JAX have in common."""

from __future__ import annotations

import dataclasses

from ._words import BIASES, FORMATS, LAYOUTS, MASKS, SOFTMAXES, DType, ScalingMode, numbers

NVTE_QKV_Layout = numbers("NVTE_QKV_Layout", LAYOUTS, unset=True)
NVTE_QKV_Format = numbers("NVTE_QKV_Format", FORMATS, unset=True)
NVTE_Bias_Type = numbers("NVTE_Bias_Type", BIASES)
NVTE_Mask_Type = numbers("NVTE_Mask_Type", MASKS, suffix="_MASK")
NVTE_Softmax_Type = numbers("NVTE_Softmax_Type", SOFTMAXES, suffix="_SOFTMAX")

_FORMAT_UNSET, _LAYOUT_UNSET = NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET, NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET


@dataclasses.dataclass
class FusedConfig:
    """In the order of the C layer, whose sizes of pages and of the bias follow."""
    is_training: bool = True
    deterministic: bool = False
    cuda_graph: bool = False
    return_max_logit: bool = False
    attn_mask_type: NVTE_Mask_Type = NVTE_Mask_Type.NVTE_NO_MASK
    bias_type: NVTE_Bias_Type = NVTE_Bias_Type.NVTE_NO_BIAS
    window_size_left: int = -1
    window_size_right: int = -1
    bottom_right_diagonal: bool = True
    softmax_type: NVTE_Softmax_Type = NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    scaling_mode: ScalingMode = ScalingMode.NVTE_DELAYED_TENSOR_SCALING
    dropout: float = 0.0
    attn_scale: float = 1.0
    qkv_dtype: DType = DType.kBFloat16
    o_dtype: DType = DType.kBFloat16
    do_dtype: DType = DType.kBFloat16
    dqkv_dtype: DType = DType.kBFloat16
    qkv_layout: NVTE_QKV_Layout = _LAYOUT_UNSET
    o_format: NVTE_QKV_Format = _FORMAT_UNSET
    do_format: NVTE_QKV_Format = _FORMAT_UNSET
    dqkv_layout: NVTE_QKV_Layout = _LAYOUT_UNSET
    qkv_scale_inv_format: NVTE_QKV_Format = _FORMAT_UNSET
    do_scale_inv_format: NVTE_QKV_Format = _FORMAT_UNSET
    batch_size: int = 0
    num_attn_heads: int = 0
    num_gqa_groups: int = 0
    head_dim_qk: int = 0
    head_dim_v: int = 0
    max_seqlen_q: int = 0
    max_seqlen_kv: int = 0
    num_tokens_q: int = 0
    num_tokens_kv: int = 0
