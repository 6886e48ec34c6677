# SPDX-License-Identifier: Apache-2.0
"""TE's words for masks, biases and kinds of attention."""

import torch

from .._names import missing

AttnMaskTypes = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
                 "padding_causal_bottom_right", "arbitrary")
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
SoftmaxTypes = ("vanilla", "off-by-one", "learnable")
QKVFormats = ("sbhd", "bshd", "thd")

dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else None

__getattr__ = missing(__name__)
