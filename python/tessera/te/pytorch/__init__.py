# SPDX-License-Identifier: Apache-2.0
"""The attention of transformer_engine.pytorch.

    attention = DotProductAttention(num_attention_heads=16, kv_channels=64, qkv_format="bshd")
    out = attention(query_layer, key_layer, value_layer, attn_mask_type="causal")
"""

from .._names import missing
from ..common import recipe
from . import (attention, constants, cpp_extensions, cpu_offload, distributed, fp8, graph, module,
               quantization, tensor, utils)
from .attention import (DotProductAttention, InferenceParams, MultiheadAttention,
                        RotaryPositionEmbedding, apply_rotary_pos_emb)
from .constants import CPLoadBalancingStrategy, DType
from .cpu_offload import ManualOffloadSynchronizer, get_cpu_offload_context, mark_not_offload
from .distributed import CudaRNGStatesTracker, checkpoint
from .graph import make_graphed_callables
from .quantization import (autocast, fp8_autocast, fp8_model_init, get_default_recipe, is_fp8_available,
                           is_fp8_block_scaling_available, is_mxfp8_available, is_nvfp4_available,
                           quantized_model_init)
from .quantized_tensor import (QuantizedTensor, Quantizer, prepare_for_saving, restore_from_func_ctx,
                               restore_from_saved)
from .tensor import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from .transformer import TransformerLayer
from .utils import get_cudnn_version, get_device_compute_capability, is_bf16_available

__all__ = ["CPLoadBalancingStrategy", "CudaRNGStatesTracker", "DType", "DotProductAttention",
           "Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor", "InferenceParams",
           "ManualOffloadSynchronizer", "MultiheadAttention", "QuantizedTensor", "Quantizer",
           "RotaryPositionEmbedding", "TransformerLayer", "apply_rotary_pos_emb", "attention", "autocast",
           "checkpoint", "constants", "cpp_extensions", "cpu_offload", "distributed", "fp8", "fp8_autocast",
           "fp8_model_init", "get_cpu_offload_context", "get_cudnn_version", "get_default_recipe",
           "get_device_compute_capability", "graph", "is_bf16_available", "is_fp8_available",
           "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available", "make_graphed_callables",
           "mark_not_offload", "module", "prepare_for_saving", "quantization", "quantized_model_init", "recipe",
           "restore_from_func_ctx", "restore_from_saved", "tensor", "utils"]
__getattr__ = missing(__name__)
