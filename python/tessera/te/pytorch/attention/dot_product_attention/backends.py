# SPDX-License-Identifier: Apache-2.0
"""The three backends of DotProductAttention, which chooses one. Each can be called on its own too, by
TE's keywords, as TE documents:

    fused_attn = FusedAttention()
    out = fused_attn(query_layer=q, key_layer=k, value_layer=v, qkv_layout="bshd_bshd_bshd",
                     attn_mask_type="causal")                               # [b, s, h * dv]

or by those of tessera.torch.attention: out [b, s, h, dv].

FlashAttention and FusedAttention run tessera's kernels. If you name one, FlashAttention also runs a public
flash-attn package, and FusedAttention cuDNN. UnfusedDotProductAttention is plain PyTorch, on any device; only it
writes the scores to memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging

import torch

from .....torch import attention
from ...._logging import AttentionLogging, fused_logger
from ...._names import missing
from ... import _words
from ..._linear import FastSetattr
from ...cpp_extensions._tables import FusedAttnBackend
from ...cpp_extensions.fused_attn import fused_attn_bwd, fused_attn_fwd
from . import _direct, _unfused
from ._choice import _packages
from ._quantized._emulation import FP8EmulationFunc  # noqa: F401 - where TE has it
from ._inputs._sequences import _PrepareQKVForFA  # noqa: F401 - where TE has it
from .utils import _alibi_cache

__getattr__ = missing(__name__)


class _Backend(FastSetattr, torch.nn.Module):
    """What TE's keywords mean where forward does not say it. DotProductAttention says all."""

    PLACES: tuple[str, ...] = ()  # TE's words behind query_layer, key_layer and value_layer, by their places

    def __init__(self, softmax_scale=None, attention_dropout=0.0,
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

    def forward(self, query_layer, key_layer, value_layer, *placed, **words):
        """[.., h * dv] by TE's words, of which `placed` are the first of PLACES; [.., h, dv] by those of
        tessera.torch.attention, which are meant when none of TE's own is given. With return_max_logit a pair
        with [h]."""
        if placed:
            words = self._named(placed, words)
        if _direct.WORDS.isdisjoint(words):
            return self.function()(query_layer, key_layer, value_layer, **words)
        *tensors, keywords = _direct.translated(self, query_layer, key_layer, value_layer, **words)
        return _direct.merged(self.function()(*tensors, **keywords))

    def _named(self, placed, words: dict) -> dict:
        given = dict(zip(self.PLACES, placed))
        twice = given.keys() & words.keys()
        if twice or len(placed) > len(self.PLACES):
            also = f" and {min(twice)}=" if twice else ""
            raise TypeError(f"{type(self).__name__}: {len(placed) + 3} arguments by place{also}: takes query_layer, "
                            f"key_layer, value_layer, {', '.join(self.PLACES)}, each once")
        return {**given, **words}


def function_of(backend: torch.nn.Module):
    """What runs a backend by tessera's keywords: past its forward, which looks for TE's, unless
    somebody hooked it or put another module in its place."""
    if isinstance(backend, _Backend) and not (
            backend._forward_hooks or backend._forward_pre_hooks or
            backend._backward_hooks or backend._backward_pre_hooks):
        return backend.function()
    return backend


class FlashAttention(_Backend):
    """package="flash_attn", "flash_attn_interface" or "flash_attn.cute" runs a public package, of version 2, 3 or
    4, instead of tessera's kernels. It is imported when it runs. TESSERA_TE_ORDER=te runs the package that
    TransformerEngine would use, if it is installed and can run the call."""

    PLACES = ("attention_mask", "qkv_layout", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv",
              "attn_mask_type", "window_size", "softcap", "alibi_slopes", "cp_group", "cp_global_ranks", "cp_stream",
              "cp_comm_type", "fp8", "fp8_meta", "quantizers", "pad_between_seqs", "inference_params",
              "flash_attention_backend", "fp8_output", "num_splits", "cu_seqlens_q_padded", "cu_seqlens_kv_padded",
              "load_balancing_strategy")

    def __init__(self, softmax_scale=None, attention_dropout=0.0, attention_dropout_ctx=contextlib.nullcontext,
                 attention_type="self", layer_number=None, deterministic=False, *, package: str | None = None,
                 **options):
        super().__init__(softmax_scale, attention_dropout, attention_dropout_ctx, attention_type, layer_number,
                         deterministic, **options)
        self.package = package

    def function(self):
        if self.package is not None:
            return functools.partial(_packages.attention, self.package)
        if not torch.compiler.is_compiling() and _packages.keeps_te_order():
            return _packages.in_te_order
        return attention


class FusedAttention(_Backend):
    """package="cudnn" forces tessera's backend of that name, which runs cuDNN itself. It refuses calls that cuDNN
    cannot run here, such as the backward pass."""

    PLACES = ("qkv_layout", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded",
              "max_seqlen_q", "max_seqlen_kv", "attn_mask_type", "attention_mask", "window_size",
              "bottom_right_diagonal", "fused_attention_backend", "core_attention_bias_type", "core_attention_bias",
              "fast_zero_fill", "cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type", "fp8", "fp8_meta",
              "quantizers", "pad_between_seqs", "inference_params", "softmax_offset", "fp8_output", "score_mod",
              "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors", "packed_qkv", "packed_kv",
              "bf16_backward", "load_balancing_strategy")

    def __init__(self, *options, package: str | None = None, **more):
        if package not in (None, "cudnn"):
            raise ValueError(f'FusedAttention: package={package!r}: must be "cudnn", or None for tessera\'s kernels')
        super().__init__(*options, **more)
        self.package = package

    def forward(self, query_layer, key_layer, value_layer, *placed, **words):
        words = self._named(placed, words)
        backend = words.pop("fused_attention_backend", None)
        if backend is not None and FusedAttnBackend.cast(backend) == FusedAttnBackend.FP8:
            raise ValueError("FusedAttention: fused_attention_backend=FP8: DotProductAttention in an "
                             "autocast region runs in FP8; F16_arbitrary_seqlen would work")
        return super().forward(query_layer, key_layer, value_layer, **words)

    def function(self):
        logs = not torch.compiler.is_compiling() and fused_logger.isEnabledFor(logging.DEBUG)
        function = _logged if logs else attention
        return functools.partial(function, backend=self.package) if self.package else function


class UnfusedDotProductAttention(_Backend):
    PLACES = ("qkv_layout", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "attn_mask_type",
              "attention_mask", "window_size", "bottom_right_diagonal", "softcap", "core_attention_bias_type",
              "core_attention_bias", "alibi_slopes", "inference_params", "softmax_offset", "fp8", "fp8_meta",
              "quantizers", "fp8_output")
    _alibi_cache = _alibi_cache  # get_alibi's, for who looks where TE has it

    def __init__(self, softmax_scale=None, attention_type="self", attention_dropout=0.0,
                 attention_dropout_ctx=contextlib.nullcontext, layer_number=None, softmax_type="vanilla",
                 return_max_logit=False, *, deterministic=False):
        super().__init__(softmax_scale, attention_dropout, attention_dropout_ctx, attention_type, layer_number,
                         deterministic, softmax_type, return_max_logit)

    def forward(self, *tensors, **words):
        """As FlashAttention's. TE's own call has get_alibi's cache before query_layer; there is one for all."""
        begin = 1 if tensors and isinstance(tensors[0], dict) else 0
        return super().forward(*tensors[begin:], **words)

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


@dataclasses.dataclass(slots=True)
class FusedAttnFwdArgs:
    """What FusedAttnFunc takes beside the tensors that have gradients, which it replaces here. The names are
    fused_attn_fwd's; packed_qkv, packed_kv, use_FAv2_bwd and layer_number change nothing."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    attn_bias: torch.Tensor | None
    softmax_offset: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    cu_seqlens_q_padded: torch.Tensor | None
    cu_seqlens_kv_padded: torch.Tensor | None
    page_table_k: torch.Tensor | None
    page_table_v: torch.Tensor | None
    packed_qkv: torch.Tensor | None
    packed_kv: torch.Tensor | None
    is_training: bool
    max_seqlen_q: int
    max_seqlen_kv: int
    attn_scale: float
    dropout_p: float
    fast_zero_fill: bool
    qkv_layout: str
    attn_bias_type: str
    attn_mask_type: str
    softmax_type: str
    window_size: tuple[int, int] | None
    bottom_right_diagonal: bool | None
    fused_attention_backend: int
    deterministic: bool
    use_FAv2_bwd: bool
    return_max_logit: bool
    rng_gen: torch.Generator | None
    fp8: bool
    fp8_meta: dict | None
    quantizers: object | None
    fp8_output: bool
    bf16_backward: bool
    layer_number: int | None

    def options(self) -> dict:
        """The keywords of both passes."""
        o_format = _words.formats_of(self.qkv_layout)[0]
        names = ("attn_scale", "fast_zero_fill", "qkv_layout", "attn_bias_type", "attn_mask_type", "softmax_type",
                 "window_size", "bottom_right_diagonal", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        return {"o_format": o_format, **{name: getattr(self, name) for name in names}}


class FusedAttnFunc(torch.autograd.Function):
    """fused_attn_fwd with fused_attn_bwd as its gradient, for q, k, v, attn_bias and softmax_offset. Gives out and,
    where fwd_args.return_max_logit says so, max_logit [h]."""

    @staticmethod
    def forward(ctx, q, k, v, attn_bias, softmax_offset, fwd_args: FusedAttnFwdArgs):
        a = fwd_args
        if a.fp8 or a.fp8_output:
            raise ValueError("FusedAttnFunc: fp8=True: DotProductAttention in an autocast region runs in "
                             "FP8; fp8=False would work")
        if not AttentionLogging._is_logging_setup:
            AttentionLogging.setup_logging()
        fused_logger.debug("Running forward in %s", q.dtype)
        a.q, a.k, a.v, a.attn_bias, a.softmax_offset = q, k, v, attn_bias, softmax_offset
        options = a.options()
        lengths = a.max_seqlen_q, a.max_seqlen_kv, a.cu_seqlens_q, a.cu_seqlens_kv
        out, aux, *max_logit = fused_attn_fwd(
            a.is_training, *lengths, q, k, v, q.dtype, a.fused_attention_backend, attn_bias,
            page_table_k=a.page_table_k, page_table_v=a.page_table_v, dropout=a.dropout_p, rng_gen=a.rng_gen,
            softmax_offset=softmax_offset, return_max_logit=a.return_max_logit, **options)
        ctx.save_for_backward(q, k, v, out, *aux)
        ctx.lengths, ctx.options, ctx.backend = lengths, options, a.fused_attention_backend
        ctx.more = dict(dropout=a.dropout_p if a.is_training else 0.0, deterministic=a.deterministic,
                        do_format=options["o_format"], dqkv_layout=a.qkv_layout)
        if not a.return_max_logit:
            return out
        ctx.mark_non_differentiable(*max_logit)
        return out, *max_logit

    @staticmethod
    def backward(ctx, d_out, *_args):
        fused_logger.debug("Running backward in %s", d_out.dtype)
        q, k, v, out, *aux = ctx.saved_tensors
        dq, dk, dv, dbias, doffset = fused_attn_bwd(
            *ctx.lengths, q, k, v, out, d_out.contiguous(), d_out.dtype, aux, ctx.backend,
            **ctx.options, **ctx.more)
        return dq, dk, dv, dbias, doffset, None
