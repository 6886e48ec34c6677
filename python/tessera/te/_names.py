# SPDX-License-Identifier: Apache-2.0
"""What is said about TE's names that are not here."""

import dis
import importlib
import sys

_SPREAD = "call attn_forward_func_with_cp, or tessera.torch.context_parallel.attention"
_FP8 = "pass 16-bit tensors"
_SCORES = "call DotProductAttention(..)(.., score_mod=)"
_LINEAR = "it has softmax attention only, so take linear attention from transformer_engine"
_PACKAGE = "take it from flash_attn, or from tessera.flash_attn, which has its signature"
_KEPT = "FusedAttnFunc keeps what its backward pass needs to itself"
_MLA = "it is for MXFP8; a projection and apply_rotary_pos_emb would work in 16 bits"

# Where TE's names of FP8 are, for who looks elsewhere in tessera.te.pytorch.
_FOUND = {
    **dict.fromkeys(("autocast", "fp8_autocast", "fp8_model_init", "quantized_model_init", "FP8GlobalStateManager",
                     "DelayedScalingRecipeState"),
                    "quantization"),
    **dict.fromkeys(("Float8Tensor", "Float8Quantizer", "Float8CurrentScalingQuantizer"), "tensor"),
    **dict.fromkeys(("combine_and_quantize", "combine_and_dequantize"),
                    "attention.dot_product_attention.utils"),
    "FP8EmulationFunc": "attention.dot_product_attention.backends",
}

# TE's attention for PyTorch that tessera does not have yet, and what to use meanwhile.
LATER = {
    **dict.fromkeys(("AttnFuncWithCPAndKVP2P", "AttnFuncWithCPAndKVAllGather",
                     "AttnFuncWithCPAndQKVOA2A"), _SPREAD),
    **dict.fromkeys(("mxfp8_quantize_fast_path", "mxfp8_quantize_only", "mxfp8_transpose_swizzle",
                     "MXFP8Quantizer", *_FOUND), _FP8),
    "FusedAttentionWithScoreModFunc": _SCORES,
    **dict.fromkeys(("GatedDeltaNetAttention", "GatedDeltaNet2Attention", "GatedDeltaProductAttention"), _LINEAR),
    **dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func", "flash_attn_func_v4", "flash_attn_varlen_func_v4",
                     "flash_attn_cuda_bwd"), _PACKAGE),
    "FusedAttnBwdArgs": _KEPT,
    **dict.fromkeys(("FusedMLAQUpProjRopeQuant", "FusedMLAQUpProjFunction"), _MLA),
}


def missing(module: str, lazy=(), later=LATER):
    """A module's __getattr__: imports the submodules `lazy`, and says of TE's other names why they
    are not in it, of those in `later` what to use meanwhile. Raises AttributeError, and ImportError
    for `from ... import Name`, which would replace an AttributeError's text by its own."""
    def __getattr__(name: str):
        if name in lazy:
            return importlib.import_module(f"{module}.{name}")
        if name in _FOUND and module.startswith("tessera.te.pytorch"):
            why = f"is in tessera.te.pytorch.{_FOUND[name]}"
        elif name in later:
            why = f"tessera does not have this part of TE's attention yet; {later[name]}"
        else:
            why = "tessera has TE's attention only; import what is not attention from " \
                "transformer_engine"
        kind = ImportError if _imports(sys._getframe(1)) else AttributeError
        raise kind(f"{module}.{name}: {why}")
    return __getattr__


def _imports(frame) -> bool:
    """Whether `frame` stands at a `from ... import Name`."""
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]
