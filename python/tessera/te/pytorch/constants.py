# SPDX-License-Identifier: Apache-2.0
"""TE's words for masks, biases, layouts and kinds of attention, and its tags of dtypes."""

import torch

from .._names import missing
from .._tables import DType

AttnMaskTypes = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
                 "padding_causal_bottom_right", "arbitrary")
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
SoftmaxTypes = ("vanilla", "off-by-one", "learnable")
QKVFormats = ("sbhd", "bshd", "thd")
QKVLayouts = ("sb3hd", "sbh3d", "sbhd_sb2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd",
              "bs3hd", "bsh3d", "bshd_bs2hd", "bshd_bsh2d", "bshd_bshd_bshd",
              "t3hd", "th3d", "thd_t2hd", "thd_th2d", "thd_thd_thd",
              "sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd",
              "paged_kv_bshd_bshd_bshd", "paged_kv_bshd_sbhd_sbhd", "paged_kv_sbhd_bshd_bshd",
              "paged_kv_sbhd_sbhd_sbhd", "paged_kv_thd_bshd_bshd", "paged_kv_thd_sbhd_sbhd")

TE_DType = {torch.uint8: DType.kByte, torch.int32: DType.kInt32, torch.float32: DType.kFloat32,
            torch.float16: DType.kFloat16, torch.bfloat16: DType.kBFloat16,
            torch.float8_e4m3fn: DType.kFloat8E4M3, torch.float8_e5m2: DType.kFloat8E5M2}
TE_DType_To_Torch = {tag: dtype for dtype, tag in TE_DType.items()}

dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else None

__getattr__ = missing(__name__)
