# SPDX-License-Identifier: Apache-2.0
"""TE's words for masks, biases and kinds of attention, and its tags of dtypes."""

import paddle

from .. import transformer_engine_paddle as tex
from ._refused import missing

TE_DType = {paddle.uint8: tex.DType.kByte, paddle.int32: tex.DType.kInt32,
            paddle.float32: tex.DType.kFloat32, paddle.float16: tex.DType.kFloat16,
            paddle.bfloat16: tex.DType.kBFloat16}

AttnMaskTypes = ("causal", "padding", "no_mask")
AttnTypes = ("self", "cross")
dist_group_type = paddle.distributed.collective.Group

AttnBiasType = {"no_bias": tex.NVTE_Bias_Type.NVTE_NO_BIAS,
                "pre_scale_bias": tex.NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS,
                "post_scale_bias": tex.NVTE_Bias_Type.NVTE_POST_SCALE_BIAS}
AttnMaskType = {"no_mask": tex.NVTE_Mask_Type.NVTE_NO_MASK,
                "padding": tex.NVTE_Mask_Type.NVTE_PADDING_MASK,
                "causal": tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK}
FusedAttnBackend = {
    "F16_max512_seqlen": tex.NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen,
    "F16_arbitrary_seqlen": tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen,
    "No_Backend": tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend}

__getattr__ = missing(__name__)
