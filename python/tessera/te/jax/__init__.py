# SPDX-License-Identifier: Apache-2.0
"""The attention of transformer_engine.jax.

    out = attention.fused_attn((q, k, v), None, SequenceDescriptor.from_seqlens(lengths), seed, ...)
    module = flax.DotProductAttention(head_dim=64, num_attention_heads=16)      # needs flax

`transformer_engine_jax` has what TE's extension module of this name has.
"""

from . import attention, cpp_extensions, quantize, sharding, transformer_engine_jax
from ._words import missing
from .quantize import NVTE_FP8_COLLECTION_NAME, update_collections
from .sharding import MeshResource, autocast, fp8_autocast

__all__ = ["MeshResource", "NVTE_FP8_COLLECTION_NAME", "attention", "autocast", "cpp_extensions", "fp8_autocast",
           "quantize", "sharding", "transformer_engine_jax", "update_collections"]
__getattr__ = missing(__name__, lazy=("flax",))
