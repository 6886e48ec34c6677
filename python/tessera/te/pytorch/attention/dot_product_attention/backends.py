# SPDX-License-Identifier: Apache-2.0
"""The three backends of DotProductAttention. Each takes query, key and value and the keywords of
tessera.torch.attention, and returns out, or (out, max_logit); DotProductAttention chooses one.

FlashAttention and FusedAttention run tessera's kernels, the former also the public flash-attn
packages, for those who ask for one by name. UnfusedDotProductAttention is plain
PyTorch, on any device, and the only one that materialises the scores.
"""

from __future__ import annotations

import torch

from .....torch import attention
from ...._names import missing
from ...cpp_extensions._tables import FusedAttnBackend
from ...cpp_extensions.fused_attn import fused_attn_bwd, fused_attn_fwd
from . import _packages, _unfused

__getattr__ = missing(__name__)


class FlashAttention(torch.nn.Module):
    """package="flash_attn" or "flash_attn_interface" asks for a public package instead of tessera's
    kernels. It is imported when it runs."""

    def __init__(self, package: str | None = None):
        super().__init__()
        self.package = package

    def forward(self, query_layer, key_layer, value_layer, **keywords):
        if self.package is not None:
            return _packages.attention(self.package, query_layer, key_layer, value_layer, **keywords)
        return attention(query_layer, key_layer, value_layer, **keywords)


class FusedAttention(torch.nn.Module):
    def forward(self, query_layer, key_layer, value_layer,
                fused_attention_backend=FusedAttnBackend.F16_arbitrary_seqlen, **keywords):
        if fused_attention_backend == FusedAttnBackend.FP8:
            raise ValueError("FusedAttention: fused_attention_backend=FP8: tessera.te has no FP8 "
                             "attention yet; F16_arbitrary_seqlen would work")
        return attention(query_layer, key_layer, value_layer, **keywords)


class UnfusedDotProductAttention(torch.nn.Module):
    def forward(self, query_layer, key_layer, value_layer, **keywords):
        return _unfused.attention(query_layer, key_layer, value_layer, **keywords)


class FusedAttnFunc(torch.autograd.Function):
    """fused_attn_fwd with fused_attn_bwd as its gradient, for q, k, v, attn_bias and
    softmax_offset. Takes the arguments of TE's FusedAttnFunc.apply in TE's order."""

    @staticmethod
    def forward(ctx, is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv,
                cu_seqlens_q_padded, cu_seqlens_kv_padded, page_table_k, page_table_v, q, k, v,
                attn_bias, attn_scale, dropout_p, fast_zero_fill, qkv_layout, o_format,
                attn_bias_type, attn_mask_type, softmax_type, window_size, bottom_right_diagonal,
                rng_gen, fused_attention_backend, use_FAv2_bwd, fp8, fp8_meta, quantizers,
                deterministic, softmax_offset, fp8_output=False, layer_number=None,
                return_max_logit=False, cuda_graph=False):
        if fp8 or fp8_output:
            raise ValueError("FusedAttnFunc: fp8=True: tessera.te has no FP8 attention yet; "
                             "fp8=False would work")
        options = dict(attn_scale=attn_scale, fast_zero_fill=fast_zero_fill, qkv_layout=qkv_layout,
                       o_format=o_format, attn_bias_type=attn_bias_type,
                       attn_mask_type=attn_mask_type, softmax_type=softmax_type,
                       window_size=window_size, bottom_right_diagonal=bottom_right_diagonal,
                       cu_seqlens_q_padded=cu_seqlens_q_padded,
                       cu_seqlens_kv_padded=cu_seqlens_kv_padded, cuda_graph=cuda_graph)
        lengths = max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv
        out, aux, *max_logit = fused_attn_fwd(
            is_training, *lengths, q, k, v, q.dtype, fused_attention_backend, attn_bias,
            page_table_k=page_table_k, page_table_v=page_table_v, dropout=dropout_p,
            rng_gen=rng_gen, softmax_offset=softmax_offset, return_max_logit=return_max_logit,
            **options)
        ctx.save_for_backward(q, k, v, out, *aux)
        ctx.lengths, ctx.options, ctx.backend = lengths, options, fused_attention_backend
        ctx.more = dict(dropout=dropout_p if is_training else 0.0, deterministic=deterministic,
                        do_format=o_format, dqkv_layout=qkv_layout)
        if not return_max_logit:
            return out
        ctx.mark_non_differentiable(*max_logit)
        return out, *max_logit

    @staticmethod
    def backward(ctx, d_out, *_):
        q, k, v, out, *aux = ctx.saved_tensors
        dq, dk, dv, dbias, doffset = fused_attn_bwd(
            *ctx.lengths, q, k, v, out, d_out.contiguous(), d_out.dtype, aux, ctx.backend,
            **ctx.options, **ctx.more)
        return (*(None,) * 9, dq, dk, dv, dbias, *(None,) * 17, doffset, *(None,) * 4)
