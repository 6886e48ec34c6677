# SPDX-License-Identifier: Apache-2.0
"""The question that TE asks of its fused backend by numbers: FusedAttentionParams -> (backend, why not)."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch

from ..... import _lib
from ...._config import FusedConfig, NVTE_QKV_Layout
from ...._words import BIASES, LAYOUTS, MASKS, SOFTMAXES, DType, ScalingMode
from ....common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from ..._words import formats_of
from ...constants import TE_DType, TE_DType_To_Torch
from ...cpp_extensions._tables import FusedAttnBackend
from ...quantization import MXFP8, get_fp8_te_dtype
from ._choice import _selection

_FP8 = (DType.kFloat8E4M3, DType.kFloat8E5M2)


@dataclasses.dataclass(eq=True)
class FusedAttentionParams(FusedConfig):
    """A call of the fused backend by its sizes and TE's numbers."""
    num_pages_k: int = 0
    num_pages_v: int = 0
    page_size_k: int = 0
    page_size_v: int = 0
    max_pages_per_seq_k: int = 0
    max_pages_per_seq_v: int = 0
    bias_batch_size: int = 0
    bias_num_heads: int = 0
    bias_seqlen_q: int = 0
    bias_seqlen_kv: int = 0


@dataclasses.dataclass(frozen=True)
class FusedAttnSpec:
    """Dtypes, formats and layouts of the tensors of a fused call."""
    scaling_mode: ScalingMode
    qkv: DType
    o: DType
    do: DType
    dqkv: DType
    scale_inv_format: str | None
    qkv_layout: str
    o_format: str
    do_format: str
    dqkv_layout: str


def get_fused_attn_spec(recipe: Recipe | None, qkv_dtype: torch.dtype, qkv_layout: str, *, cs_o_in_f16: bool,
                        nominal_dtype: torch.dtype | None = None) -> FusedAttnSpec:
    """What TE would pass: without a recipe everything in qkv_dtype (of float8, in nominal_dtype, else bfloat16).
    Current scaling has gradients, and with cs_o_in_f16 o, in that; delayed scaling has everything in FP8."""
    q_format = formats_of(qkv_layout)[0]
    used = qkv_layout
    if recipe is not None:
        used = qkv_layout.removeprefix("paged_kv_")
        if recipe.mxfp8() and qkv_layout not in ("bshd_bshd_bshd", "sbhd_sbhd_sbhd"):
            used = "bhsd_bhsd_bhsd"
    if qkv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        qkv_dtype = nominal_dtype or torch.bfloat16
    wide = TE_DType[qkv_dtype]
    rest = used, q_format, q_format, qkv_layout
    delayed = ScalingMode.NVTE_DELAYED_TENSOR_SCALING
    if recipe is None:
        return FusedAttnSpec(delayed, wide, wide, wide, wide, None, *rest)
    forward, grad = (get_fp8_te_dtype(recipe, fprop_tensor=x) for x in (True, False))
    if recipe.mxfp8():
        return FusedAttnSpec(ScalingMode.NVTE_MXFP8_1D_SCALING, forward, wide, grad, wide, "bhsd", *rest)
    if recipe.float8_current_scaling():
        return FusedAttnSpec(delayed, forward, wide if cs_o_in_f16 else forward, grad, wide, None, *rest)
    return FusedAttnSpec(delayed, forward, forward, grad, grad, None, *rest)


def get_fused_attn_backend(params: FusedAttentionParams) -> tuple[FusedAttnBackend, str]:
    """(the sub-backend, "") where tessera's kernels have each pass that will run on the current CUDA device or,
    where there is none, on the CPU; else (No_Backend, every reason, one a line)."""
    try:
        asked = _asked(params)
        reasons = _selection._kernel_reasons(asked)
    except (ValueError, _lib.Refused) as error:
        reasons = [str(error)]
    if reasons:
        return FusedAttnBackend.No_Backend, "\n".join(reasons)
    return FusedAttnBackend.FP8 if asked.fp8 else FusedAttnBackend.F16_arbitrary_seqlen, ""


def _asked(p: FusedAttentionParams) -> _selection.AttentionParams:
    for name in ("batch_size", "num_attn_heads", "num_gqa_groups", "head_dim_qk", "head_dim_v", "max_seqlen_q",
                 "max_seqlen_kv"):
        if getattr(p, name) < 1:
            raise ValueError(f"FusedAttentionParams: {name}={getattr(p, name)}: must be at least 1")
    if p.qkv_layout == NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET:
        raise ValueError("FusedAttentionParams: qkv_layout=NVTE_QKV_Layout_NOT_SET: must be a layout")
    if p.scaling_mode == ScalingMode.NVTE_MXFP8_1D_SCALING:
        raise ValueError(f"FusedAttentionParams: scaling_mode=NVTE_MXFP8_1D_SCALING: {MXFP8}")
    if p.scaling_mode != ScalingMode.NVTE_DELAYED_TENSOR_SCALING:
        raise ValueError(f"FusedAttentionParams: scaling_mode={ScalingMode(p.scaling_mode).name}: attention has "
                         "NVTE_DELAYED_TENSOR_SCALING only, one scale a tensor")
    wide = next((tag for tag in (p.dqkv_dtype, p.o_dtype) if tag not in _FP8), DType.kBFloat16)
    fp8 = p.qkv_dtype in _FP8
    tag = wide if fp8 else p.qkv_dtype
    if tag not in TE_DType_To_Torch:
        raise ValueError(f"FusedAttentionParams: qkv_dtype={DType(tag).name}: must be kFloat16, kBFloat16, "
                         "kFloat32, or a kFloat8")
    bias = p.bias_batch_size, p.bias_num_heads, p.bias_seqlen_q, p.bias_seqlen_kv
    pages = SimpleNamespace(dtype=None, page_size=p.page_size_k, max_sequence_length=p.max_seqlen_kv)
    layout = LAYOUTS[p.qkv_layout]
    return _selection.AttentionParams(
        qkv_dtype=TE_DType_To_Torch[tag], qkv_layout=layout, batch_size=p.batch_size, num_heads=p.num_attn_heads,
        num_gqa_groups=p.num_gqa_groups, max_seqlen_q=p.max_seqlen_q, max_seqlen_kv=p.max_seqlen_kv,
        num_tokens_q=p.num_tokens_q, num_tokens_kv=p.num_tokens_kv, head_dim_qk=p.head_dim_qk,
        head_dim_v=p.head_dim_v, attn_mask_type=MASKS[p.attn_mask_type],
        window_size=(p.window_size_left, p.window_size_right), bottom_right_diagonal=p.bottom_right_diagonal,
        core_attention_bias_type=BIASES[p.bias_type], core_attention_bias_shape=bias if all(bias) else None,
        attention_dropout=p.dropout, deterministic=p.deterministic, is_training=p.is_training, fp8=fp8,
        fp8_meta={"recipe": _recipe(p)} if fp8 else None, softmax_type=SOFTMAXES[p.softmax_type],
        inference_params=pages if layout.startswith("paged") else None, return_max_logit=p.return_max_logit,
        cuda_graph=p.cuda_graph, softmax_scale=p.attn_scale)


def _recipe(p: FusedAttentionParams) -> Recipe:
    """Delayed scaling has its gradients in FP8, current scaling has not."""
    recipe = DelayedScaling if p.dqkv_dtype in _FP8 else Float8CurrentScaling
    return recipe(fp8_dpa=True, fp8_mha=p.o_dtype in _FP8)
