# SPDX-License-Identifier: Apache-2.0
"""TE's words for masks, biases, layouts and kinds of attention, and its tags of dtypes."""

import enum
from types import SimpleNamespace

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


# Slots of an FP8 module's scales, of which attention has those named META_* in cpp_extensions.fused_attn.
FP8FwdTensorIdx = SimpleNamespace(GEMM1_INPUT=0, GEMM1_WEIGHT=1, GEMM1_OUTPUT=2, GEMM2_INPUT=3, GEMM2_WEIGHT=4,
                                  GEMM2_OUTPUT=5, GEMM3_OUTPUT=8)
FP8BwdTensorIdx = SimpleNamespace(GRAD_OUTPUT1=0, GRAD_INPUT1=1, GRAD_OUTPUT2=2, GRAD_INPUT2=3, GRAD_OUTPUT3=4,
                                  GRAD_INPUT3=5)
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)
MXFP8_BLOCK_SCALING_SIZE, NVFP4_BLOCK_SCALING_SIZE = 32, 16

dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else None

__getattr__ = missing(__name__)
