# SPDX-License-Identifier: Apache-2.0
"""TE's words for masks, biases, layouts and kinds of attention, and its tags of dtypes."""

import enum

import torch

from .. import _words
from .._names import missing
from .._words import DType

AttnMaskTypes = (*_words.MASKS, "arbitrary")
AttnTypes = ("self", "cross")
AttnBiasTypes = _words.BIASES[1:3] + _words.BIASES[:1] + _words.BIASES[3:]  # in TE's order
SoftmaxTypes = _words.SOFTMAXES
QKVFormats = _words.FORMATS[:3]
QKVLayouts = _words.LAYOUTS[:-1]

TE_DType = {torch.uint8: DType.kByte, torch.int32: DType.kInt32, torch.float32: DType.kFloat32,
            torch.float16: DType.kFloat16, torch.bfloat16: DType.kBFloat16,
            torch.float8_e4m3fn: DType.kFloat8E4M3, torch.float8_e5m2: DType.kFloat8E5M2}
TE_DType_To_Torch = {tag: dtype for dtype, tag in TE_DType.items()}

class CPLoadBalancingStrategy(enum.Enum):
    """Which tokens of a sequence a rank of context parallelism holds: two chunks of equal length, or one."""
    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"


dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else None

__getattr__ = missing(__name__)
