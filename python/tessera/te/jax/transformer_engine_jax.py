# SPDX-License-Identifier: Apache-2.0
"""TE's extension module `transformer_engine_jax`, as far as it is attention: NVTE_* numbers, what
machines can, sizes of workspaces, and names of custom calls."""

from __future__ import annotations

import importlib.metadata

import jax

from .._config import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_Softmax_Type
from .._words import DType
from . import attention, cpp_extensions
from ._numbers import (FusedAttnBackwardFFI, FusedAttnForwardFFI, NVTE_Fused_Attn_Backend, NVTE_QKV_Format,
                       NVTE_QKV_Layout, nvte_get_qkv_format)
from ._words import missing

__all__ = ["DType", "FusedAttnBackwardFFI", "FusedAttnForwardFFI", "NVTE_Bias_Type",
           "NVTE_Fused_Attn_Backend", "NVTE_Mask_Type", "NVTE_QKV_Format", "NVTE_QKV_Layout",
           "NVTE_Softmax_Type", "get_cudnn_version", "get_device_compute_capability",
           "get_fused_attn_backend", "get_fused_attn_bwd_workspace_sizes",
           "get_fused_attn_fwd_workspace_sizes", "nvte_get_qkv_format"]
__getattr__ = missing(__name__)

def get_device_compute_capability(gpu_id: int = 0) -> int:
    """90 for sm90; the CPU chooses as Hopper does, 90."""
    device = jax.local_devices()[gpu_id if jax.default_backend() == "gpu" else 0]
    return int(getattr(device, "compute_capability", "9.0").replace(".", ""))


def get_cudnn_version() -> int:
    """91002 for the 9.10.2 that pip installed beside JAX, 0 without one. tessera uses none."""
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            major, minor, patch = importlib.metadata.version(name).split(".")[:3]
        except importlib.metadata.PackageNotFoundError:
            continue
        return 10000 * int(major) + 100 * int(minor) + int(patch)
    return 0


def get_fused_attn_backend(params) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """(NVTE_F16_arbitrary_seqlen, "") for a cpp_extensions.FusedAttnParams that libtessera has a backend for on JAX's
    device, else (NVTE_No_Backend, why not). A batch of THD counts segments, as TE's does."""
    p = params
    if p.qkv_layout == NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "qkv_layout=NVTE_QKV_Layout_NOT_SET: must be a layout"
    bias = {name: getattr(p, given) or None for name, given in (
        ("bias_batch", "bias_batch_size"), ("bias_heads", "bias_num_heads"), ("bias_seqlen_q", "bias_seqlen_q"),
        ("bias_seqlen_kv", "bias_seqlen_kv"))}
    helper = _helper(
        p.is_training, p.qkv_dtype, p.qkv_dtype, p.qkv_layout, p.bias_type, p.attn_mask_type, p.softmax_type,
        p.dropout, p.num_attn_heads, p.num_gqa_groups, p.max_seqlen_q, p.max_seqlen_kv, p.head_dim_qk, p.head_dim_v,
        (p.window_size_left, p.window_size_right), return_max_logit=p.return_max_logit, batch_size=p.batch_size,
        bottom_right_diagonal=p.bottom_right_diagonal, attn_scale=p.attn_scale, **bias)
    return helper.get_fused_attn_backend(p.deterministic)


def get_fused_attn_fwd_workspace_sizes(input_batch, bias_batch, q_max_seqlen, kv_max_seqlen,
                                       attn_heads, num_gqa_groups, bias_heads, qk_head_dim,
                                       v_head_dim, scaling_factor, dropout_probability, bias_type,
                                       mask_type, softmax_type, qkv_layout, dtype, is_training,
                                       max_segments_per_seq, window_size_left, window_size_right,
                                       *options):
    """([bytes], DType.kByte) of the forward pass's workspace on JAX's device. TE's versions end
    with return_max_logit, bottom_right_diagonal, or neither, which change no workspace."""
    helper = _helper(is_training, dtype, dtype, qkv_layout, bias_type, mask_type, softmax_type,
                     dropout_probability, attn_heads, num_gqa_groups, q_max_seqlen, kv_max_seqlen,
                     qk_head_dim, v_head_dim, (window_size_left, window_size_right),
                     batch_size=input_batch, bias_batch=bias_batch, bias_heads=bias_heads,
                     max_segments_per_seq=max_segments_per_seq)
    return [helper.workspace_bytes(backward=False)], DType.kByte


def get_fused_attn_bwd_workspace_sizes(input_batch, bias_batch, q_max_seqlen, kv_max_seqlen,
                                       attn_heads, num_gqa_groups, bias_heads, qk_head_dim,
                                       v_head_dim, scaling_factor, dropout_probability, bias_type,
                                       mask_type, softmax_type, qkv_layout, dtype, is_training,
                                       deterministic, max_segments_per_seq, window_size_left,
                                       window_size_right, *options):
    """([bytes], DType.kByte) of the backward pass's workspace on JAX's device."""
    helper = _helper(is_training, dtype, dtype, qkv_layout, bias_type, mask_type, softmax_type,
                     dropout_probability, attn_heads, num_gqa_groups, q_max_seqlen, kv_max_seqlen,
                     qk_head_dim, v_head_dim, (window_size_left, window_size_right),
                     batch_size=input_batch, bias_batch=bias_batch, bias_heads=bias_heads,
                     max_segments_per_seq=max_segments_per_seq)
    return [helper.workspace_bytes(backward=True, deterministic=deterministic)], DType.kByte


_DTYPES = {DType.kFloat32: "float32", DType.kFloat16: "float16", DType.kBFloat16: "bfloat16"}


_SIZES = ("dropout_probability", "q_num_heads", "kv_num_heads", "q_max_seqlen", "kv_max_seqlen", "head_dim_qk",
          "head_dim_v", "window_size")


def _helper(is_training, q_dtype, kv_dtype, qkv_layout, bias_type, mask_type, softmax_type, *sizes, **more):
    q_dtype, kv_dtype = (_DTYPES.get(x, x) if isinstance(x, int) else x for x in (q_dtype, kv_dtype))
    return cpp_extensions.FusedAttnHelper(
        is_training=is_training, q_dtype=q_dtype, kv_dtype=kv_dtype, qkv_layout=attention.QKVLayout(qkv_layout),
        attn_bias_type=attention.AttnBiasType(bias_type), attn_mask_type=attention.AttnMaskType(mask_type),
        softmax_type=attention.AttnSoftmaxType(softmax_type), **dict(zip(_SIZES, sizes, strict=True)), **more)
