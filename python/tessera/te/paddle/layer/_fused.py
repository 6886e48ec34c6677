# SPDX-License-Identifier: Apache-2.0
"""TE's fused attention under autograd, by TE's order of arguments."""

from __future__ import annotations

from paddle.autograd import PyLayer

from ....paddle._autograd import refuse_second_derivative
from .. import cpp_extensions


class FusedAttnFuncPackedQKV(PyLayer):
    """qkv is [b, s, 3, h, d]."""

    @staticmethod
    def forward(ctx, qkv, cu_seqlens, attn_bias, max_seqlen, attn_scale, qkv_dtype, dropout_p,
                set_zero, qkv_layout, attn_bias_type, attn_mask_type, is_training,
                fused_attention_backend):
        return _forward(ctx, cpp_extensions.fused_attn_fwd_qkvpacked, (qkv,), (cu_seqlens,),
                        attn_bias, (max_seqlen,), attn_scale, qkv_dtype, dropout_p, set_zero,
                        qkv_layout, attn_bias_type, attn_mask_type, is_training,
                        fused_attention_backend)

    @staticmethod
    def backward(ctx, d_out):
        return _backward(ctx, cpp_extensions.fused_attn_bwd_qkvpacked, d_out)


class FusedAttnFuncPackedKV(PyLayer):
    """q is [b, sq, h, d], kv [b, skv, 2, hk, d]."""

    @staticmethod
    def forward(ctx, q, kv, cu_seqlens_q, cu_seqlens_kv, attn_bias, max_seqlen_q, max_seqlen_kv,
                attn_scale, qkv_dtype, dropout_p, set_zero, qkv_layout, attn_bias_type,
                attn_mask_type, is_training, fused_attention_backend):
        return _forward(ctx, cpp_extensions.fused_attn_fwd_kvpacked, (q, kv),
                        (cu_seqlens_q, cu_seqlens_kv), attn_bias, (max_seqlen_q, max_seqlen_kv),
                        attn_scale, qkv_dtype, dropout_p, set_zero, qkv_layout, attn_bias_type,
                        attn_mask_type, is_training, fused_attention_backend)

    @staticmethod
    def backward(ctx, d_out):
        return _backward(ctx, cpp_extensions.fused_attn_bwd_kvpacked, d_out)


class FusedAttnFunc(PyLayer):
    """q is [b, sq, h, d], k and v [b, skv, hk, d]."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_kv, attn_bias, max_seqlen_q, max_seqlen_kv,
                attn_scale, qkv_dtype, dropout_p, set_zero, qkv_layout, attn_bias_type,
                attn_mask_type, is_training, fused_attention_backend):
        return _forward(ctx, cpp_extensions.fused_attn_fwd, (q, k, v),
                        (cu_seqlens_q, cu_seqlens_kv), attn_bias, (max_seqlen_q, max_seqlen_kv),
                        attn_scale, qkv_dtype, dropout_p, set_zero, qkv_layout, attn_bias_type,
                        attn_mask_type, is_training, fused_attention_backend)

    @staticmethod
    def backward(ctx, d_out):
        return _backward(ctx, cpp_extensions.fused_attn_bwd, d_out)


def _forward(ctx, run, tensors, cu_seqlens, bias, lengths, scale, dtype, dropout, set_zero, layout,
             bias_type, mask_type, is_training, backend):
    out, softmax_aux, rng_state = run(*tensors, *cu_seqlens, True, *lengths, dtype, backend, bias,
                                      scale, dropout if is_training else 0.0, set_zero, layout,
                                      bias_type, mask_type)
    ctx.rest = (backend, *lengths, dtype, scale, dropout if is_training else 0.0, set_zero, layout,
                bias_type, mask_type)
    ctx.counts = len(tensors), len(cu_seqlens)
    ctx.wanted = [not x.stop_gradient for x in tensors]
    ctx.bias_wanted = bias is not None and not bias.stop_gradient
    # Detached: a context that holds its own output is never freed.
    ctx.save_for_backward(*tensors, *cu_seqlens, rng_state, out.detach(), softmax_aux,
                          *([] if bias is None else [bias]))
    return out


def _backward(ctx, run, d_out):
    """A gradient, or None, for each tensor that forward was given."""
    refuse_second_derivative("te")
    saved = ctx.saved_tensor()
    n = sum(ctx.counts)
    inputs, (rng_state, out, softmax_aux, *bias) = saved[:n], saved[n:]
    *grads, dbias = run(*inputs, rng_state, out, d_out, softmax_aux, *ctx.rest,
                        Bias=bias[0] if bias else None)
    grads = [grad if wanted else None for grad, wanted in zip(grads, ctx.wanted)]
    grads += [None] * ctx.counts[1]
    return tuple(grads + [dbias if ctx.bias_wanted else None] * bool(bias))
