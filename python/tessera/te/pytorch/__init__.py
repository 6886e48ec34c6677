# SPDX-License-Identifier: Apache-2.0
"""transformer_engine.pytorch, as far as it is attention.

    attention = DotProductAttention(num_attention_heads=16, kv_channels=64, qkv_format="bshd")
    out = attention(query_layer, key_layer, value_layer, attn_mask_type="causal")
"""

from .._names import missing
from ..common import recipe
from . import (attention, constants, cpp_extensions, cpu_offload, distributed, fp8, graph, quantization,
               tensor, utils)
from .attention import (DotProductAttention, InferenceParams, MultiheadAttention,
                        RotaryPositionEmbedding, apply_rotary_pos_emb)
from .cpu_offload import get_cpu_offload_context
from .distributed import checkpoint
from .graph import make_graphed_callables
from .quantization import (autocast, fp8_autocast, get_default_recipe, is_fp8_available,
                           is_fp8_block_scaling_available, is_mxfp8_available, is_nvfp4_available)
from .tensor import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor, QuantizedTensor, Quantizer
from .transformer import TransformerLayer
from .utils import get_cudnn_version, get_device_compute_capability, is_bf16_available

__all__ = ["DotProductAttention", "Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor",
           "InferenceParams", "MultiheadAttention", "QuantizedTensor", "Quantizer", "RotaryPositionEmbedding",
           "TransformerLayer", "apply_rotary_pos_emb", "attention", "autocast", "checkpoint", "constants",
           "cpp_extensions", "cpu_offload", "distributed", "fp8", "fp8_autocast", "get_cpu_offload_context",
           "get_cudnn_version", "get_default_recipe", "get_device_compute_capability", "graph",
           "is_bf16_available", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available",
           "is_nvfp4_available", "make_graphed_callables", "quantization", "recipe", "tensor", "utils"]
__getattr__ = missing(__name__)
