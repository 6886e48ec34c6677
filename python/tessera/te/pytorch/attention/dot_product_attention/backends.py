# SPDX-License-Identifier: Apache-2.0
"""The three backends of DotProductAttention, which chooses one. Each can be called on its own too, by
TE's keywords, as TE documents:

    fused_attn = FusedAttention()
    out = fused_attn(query_layer=q, key_layer=k, value_layer=v, qkv_layout="bshd_bshd_bshd",
                     attn_mask_type="causal")                               # [b, s, h * dv]

or by those of tessera.torch.attention: out [b, s, h, dv].

FlashAttention and FusedAttention run tessera's kernels, and for those who ask for one by name, the former
also the public flash-attn packages, the latter cuDNN. UnfusedDotProductAttention is plain PyTorch, on any
device, and the only one that materialises the scores.
"""

from __future__ import annotations

import contextlib
import functools
import logging

import torch

from .....torch import attention
from ...._logging import AttentionLogging, fused_logger
from ...._names import missing
from ... import _words
from ...cpp_extensions._tables import FusedAttnBackend
from ...cpp_extensions.fused_attn import fused_attn_bwd, fused_attn_fwd
from . import _direct, _unfused
from ._choice import _packages
from ._quantized._emulation import FP8EmulationFunc  # noqa: F401 - where TE has it
from ._inputs._sequences import _PrepareQKVForFA  # noqa: F401 - where TE has it
from .utils import _alibi_cache

__getattr__ = missing(__name__)


class _Backend(torch.nn.Module):
    """What TE's keywords mean where forward does not say it. DotProductAttention says all."""

    def __init__(self, softmax_scale=None, *, attention_dropout=0.0,
                 attention_dropout_ctx=contextlib.nullcontext, attention_type="self",
                 layer_number=None, deterministic=False, softmax_type="vanilla",
                 return_max_logit=False):
        super().__init__()
        self.softmax_scale = softmax_scale
        self.attention_dropout = _words.dropout(attention_dropout)
        self.attention_dropout_ctx = attention_dropout_ctx
        self.attention_type, self.layer_number = attention_type, layer_number
        self.deterministic = deterministic
        self.softmax_type = _words.softmax_type(softmax_type)
        self.return_max_logit = return_max_logit

    def forward(self, query_layer, key_layer, value_layer, **words):
        """[.., h * dv] by TE's keywords; [.., h, dv] by those of tessera.torch.attention, which are
        meant when none of TE's own is given. With return_max_logit a pair with [h]."""
        if _direct.WORDS.isdisjoint(words):
            return self.function()(query_layer, key_layer, value_layer, **words)
        *tensors, keywords = _direct.translated(self, query_layer, key_layer, value_layer, **words)
        return _direct.merged(self.function()(*tensors, **keywords))


def function_of(backend: torch.nn.Module):
    """What runs a backend by tessera's keywords: past its forward, which looks for TE's, unless
    somebody hooked it or put another module in its place."""
    if isinstance(backend, _Backend) and not (
            backend._forward_hooks or backend._forward_pre_hooks or
            backend._backward_hooks or backend._backward_pre_hooks):
        return backend.function()
    return backend


class FlashAttention(_Backend):
    """package="flash_attn", "flash_attn_interface" or "flash_attn.cute" asks for a public package, of
    version 2, 3 or 4, instead of tessera's kernels. It is imported when it runs. TESSERA_TE_ORDER=te
    asks for the one that TransformerEngine would take, where it is installed and has what a call needs."""

    def __init__(self, package: str | None = None, **options):
        if not isinstance(package, (str, type(None))):  # TE's first argument
            options.setdefault("softmax_scale", package)
            package = None
        super().__init__(**options)
        self.package = package

    def function(self):
        if self.package is not None:
            return functools.partial(_packages.attention, self.package)
        if not torch.compiler.is_compiling() and _packages.keeps_te_order():
            return _packages.in_te_order
        return attention


class FusedAttention(_Backend):
    """package="cudnn" forces tessera's backend of that name, which is cuDNN itself, and refuses what it does not
    take: the backward pass among others."""

    def __init__(self, softmax_scale=None, *, package: str | None = None, **options):
        if package not in (None, "cudnn"):
            raise ValueError(f'FusedAttention: package={package!r}: must be "cudnn", or None for tessera\'s kernels')
        super().__init__(softmax_scale, **options)
        self.package = package

    def forward(self, query_layer, key_layer, value_layer, fused_attention_backend=None, **words):
        if fused_attention_backend is not None and \
                FusedAttnBackend.cast(fused_attention_backend) == FusedAttnBackend.FP8:
            raise ValueError("FusedAttention: fused_attention_backend=FP8: DotProductAttention in an "
                             "autocast region runs in FP8; F16_arbitrary_seqlen would work")
        return super().forward(query_layer, key_layer, value_layer, **words)

    def function(self):
        logs = not torch.compiler.is_compiling() and fused_logger.isEnabledFor(logging.DEBUG)
        function = _logged if logs else attention
        return functools.partial(function, backend=self.package) if self.package else function


class UnfusedDotProductAttention(_Backend):
    _alibi_cache = _alibi_cache  # get_alibi's, for who looks where TE has it

    def function(self):
        return _unfused.attention


def _logged(q, k, v, **keywords):
    """attention, saying that its forward pass runs, and of its backward pass when it begins."""
    fused_logger.debug("Running forward in %s", q.dtype)
    result = attention(q, k, v, **keywords)
    out = result[0] if isinstance(result, tuple) else result
    if out.requires_grad:
        out.register_hook(lambda grad: fused_logger.debug("Running backward in %s", grad.dtype))
    return result


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
            raise ValueError("FusedAttnFunc: fp8=True: DotProductAttention in an autocast region runs in "
                             "FP8; fp8=False would work")
        if not AttentionLogging._is_logging_setup:
            AttentionLogging.setup_logging()
        fused_logger.debug("Running forward in %s", q.dtype)
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
        fused_logger.debug("Running backward in %s", d_out.dtype)
        q, k, v, out, *aux = ctx.saved_tensors
        dq, dk, dv, dbias, doffset = fused_attn_bwd(
            *ctx.lengths, q, k, v, out, d_out.contiguous(), d_out.dtype, aux, ctx.backend,
            **ctx.options, **ctx.more)
        return (*(None,) * 9, dq, dk, dv, dbias, *(None,) * 17, doffset, *(None,) * 4)
