# SPDX-License-Identifier: Apache-2.0
"""TE's words for masks, biases and kinds of attention, and its tags of dtypes."""

import paddle

from .. import _words
from .. import transformer_engine_paddle as tex
from ._refused import missing

TE_DType = {paddle.uint8: tex.DType.kByte, paddle.int32: tex.DType.kInt32,
            paddle.float32: tex.DType.kFloat32, paddle.float16: tex.DType.kFloat16,
            paddle.bfloat16: tex.DType.kBFloat16}

AttnMaskTypes = ("causal", "padding", "no_mask")
AttnTypes = ("self", "cross")
dist_group_type = paddle.distributed.collective.Group

AttnBiasType = dict(zip(_words.BIASES, tex.NVTE_Bias_Type))
AttnMaskType = dict(zip(_words.MASKS, tex.NVTE_Mask_Type))
FusedAttnBackend = {
    "F16_max512_seqlen": tex.NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen,
    "F16_arbitrary_seqlen": tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen,
    "No_Backend": tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend}

__getattr__ = missing(__name__)
