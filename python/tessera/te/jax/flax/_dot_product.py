# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention, and the two ways it computes."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from .... import backends
from ...._lib import Refused
from ..._logging import logger, switch
from .. import _context_parallel, _translate, _words
from .. import cpp_extensions as tex
from .._enums import (AttnBiasType, AttnMaskType, AttnSoftmaxType, CPStrategy, QKVLayout,
                      canonicalize_attn_mask_type)
from .._sequences import SequenceDescriptor
from .._words import error
from ..attention import fused_attn
from ..sharding import HEAD_AXES
from . import _unfused

_error = functools.partial(error, operation="DotProductAttention")
_STRATEGIES = {"DEFAULT": CPStrategy.DEFAULT, "ALL_GATHER": CPStrategy.ALL_GATHER,
               "ALLGATHER": CPStrategy.ALL_GATHER, "RING": CPStrategy.RING}


class _Attention(nn.Module):
    """A call with TE's enumerations, on qkv as fused_attn takes it. A learnable softmax offset is a
    parameter here, as in TE."""
    attention_dropout: float = 0.0
    attn_mask_type: AttnMaskType = AttnMaskType.CAUSAL_MASK
    attn_bias_type: AttnBiasType = AttnBiasType.NO_BIAS
    qkv_layout: QKVLayout = QKVLayout.BSHD_BSHD_BSHD
    scale_factor: float = 1.0
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT
    context_checkpoint_name: str = "context"
    softmax_type: AttnSoftmaxType = AttnSoftmaxType.VANILLA_SOFTMAX
    return_max_logit: bool = False

    def arguments(self, deterministic: bool) -> dict:
        return {"attn_bias_type": self.attn_bias_type, "attn_mask_type": self.attn_mask_type,
                "softmax_type": self.softmax_type, "qkv_layout": self.qkv_layout,
                "scaling_factor": self.scale_factor,
                "dropout_probability": self.attention_dropout, "is_training": not deterministic,
                "max_segments_per_seq": self.max_segments_per_seq,
                "window_size": self.window_size,
                "context_parallel_strategy": self.context_parallel_strategy,
                "context_parallel_causal_load_balanced":
                    self.context_parallel_causal_load_balanced,
                "context_parallel_axis": self.context_parallel_axis,
                "return_max_logit": self.return_max_logit}

    def offset(self, heads: int):
        if self.softmax_type != AttnSoftmaxType.LEARNABLE_SOFTMAX:
            return None
        init = nn.with_logical_partitioning(nn.initializers.zeros, (None, HEAD_AXES, None, None))
        return self.param("softmax_offset", init, (1, heads, 1, 1), jnp.float32)


class _FusedDotProductAttention(_Attention):
    """By libtessera."""

    @nn.compact
    def __call__(self, qkv, sequence_descriptor=None, bias=None, *, dropout_rng=None,
                 deterministic=False):
        if sequence_descriptor is None and not self.attn_mask_type.is_padding():
            sequence_descriptor = SequenceDescriptor()  # which is not read
        if self.is_initializing():  # parameters alone matter, and MaxText's query has one row, whatever the descriptor
            rows = jax.tree.leaves(qkv)[0].shape[0]
            sequence_descriptor = jax.tree.map(lambda x: x[:rows], sequence_descriptor)
        return fused_attn(qkv, bias, sequence_descriptor, dropout_rng,
                          softmax_offset=self.offset(qkv[0].shape[-2]),
                          context_checkpoint_name=self.context_checkpoint_name,
                          **self.arguments(deterministic))


class _UnfusedDotProductAttention(_Attention):
    """By XLA."""

    @nn.compact
    def __call__(self, qkv, sequence_descriptor=None, bias=None, *, dropout_rng=None,
                 deterministic=False):
        if self.return_max_logit:
            raise _error("return_max_logit", True, "needs libtessera; do not set NVTE_FUSED_ATTN=0")
        config = tex.attention.config_of(**self.arguments(deterministic))
        words = _translate.rng_words(dropout_rng, config.dropout_p)
        offset, axis = self.offset(qkv[0].shape[-2]), _context_parallel.axis_of(config.cp_axis)
        if axis is None:
            return _unfused.attention(config, qkv, bias, offset, sequence_descriptor, words)
        whole = _context_parallel.Whole(config, axis, qkv, bias, sequence_descriptor)
        return whole.split(_unfused.attention(config, whole.qkv, bias, offset, whole.sequences, words))


class DotProductAttention(nn.Module):
    """softmax(q kᵀ · scale_factor + bias, masked) v.

    query [b, s, h, d], key and value [b, s, hk, d]; of the packed qkv_layouts query is [b, s, 3, h,
    d], or key [b, s, 2, h, d], and the rest is not read. With transpose_batch_sequence the first
    two axes are [s, b]. `sequence_descriptor` is a SequenceDescriptor or a mask, True = hidden,
    which padding masks need; `deterministic` is without dropout. Returns [b, s, h, dv], with
    return_max_logit a pair with [h].

    NVTE_FUSED_ATTN=0 chooses XLA's path, which also runs, with a warning, what libtessera refuses.
    """
    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None        # by the bias: none, or post-scale
    dtype: jnp.dtype | None = None           # deprecated: that of the arrays
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False             # scores are fp32 either way
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None        # 1 / sqrt(head dim)
    transpose_batch_sequence: bool | None = None
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None
    score_mod_bprop: Callable | None = None
    return_max_logit: bool = False

    @nn.compact
    def __call__(self, query, key, value, sequence_descriptor=None, bias=None, *,
                 deterministic=False, mask=None, score_mod_tensors=None,
                 score_mod_bprop_tensors=None):
        _words.no_score_mod("DotProductAttention", score_mod=self.score_mod,
                            score_mod_bprop=self.score_mod_bprop,
                            score_mod_tensors=score_mod_tensors,
                            score_mod_bprop_tensors=score_mod_bprop_tensors)
        if mask is not None:
            if sequence_descriptor is not None:
                raise _error("mask", "an array", "must be None beside sequence_descriptor")
            warnings.warn("DotProductAttention: mask is deprecated; pass sequence_descriptor",
                          DeprecationWarning, stacklevel=2)
            sequence_descriptor = mask
        layout = self._layout()
        qkv = self._arrays(layout, query, key, value)
        call = self._call(layout, qkv, bias)
        dropout_rng = None
        if self.attention_dropout > 0 and not deterministic:
            dropout_rng = self.make_rng(self.dropout_rng_name)
        way = _UnfusedDotProductAttention
        if self._is_fused(call, qkv, bias, deterministic):
            way = _FusedDotProductAttention
        bias = None if bias is None else bias.astype(qkv[0].dtype)
        out = way(**call)(qkv, sequence_descriptor, bias, dropout_rng=dropout_rng,
                          deterministic=deterministic)
        if not self.transpose_batch_sequence:
            return out
        return jax.tree.map(lambda x: x.swapaxes(0, 1) if x.ndim == 4 else x, out)

    def _layout(self) -> QKVLayout:
        name = self.qkv_layout.upper()
        if name not in QKVLayout.__members__:
            raise _error("qkv_layout", repr(self.qkv_layout), "must be one of " +
                         ", ".join(layout.name.lower() for layout in QKVLayout))
        return QKVLayout[name]

    def _arrays(self, layout: QKVLayout, query, key, value) -> tuple:
        """Those of query, key and value that the layout reads, [b, s, ...]."""
        qkv = (query, key, value)[:1 if layout.is_qkvpacked() else 2 if layout.is_kvpacked() else 3]
        for name, x in zip(("query", "key", "value"), qkv):
            if x is None or x.dtype != query.dtype:
                raise _error(name, x if x is None else x.dtype, f"must be an array of query's "
                             f"dtype, {query.dtype}, for qkv_layout={self.qkv_layout!r}")
        if self.dtype is not None and jnp.dtype(self.dtype) != query.dtype:
            raise _error("dtype", jnp.dtype(self.dtype), f"must be that of the arrays, "
                         f"{query.dtype}, or None")
        return tuple(x.swapaxes(0, 1) for x in qkv) if self.transpose_batch_sequence else qkv

    def _call(self, layout: QKVLayout, qkv, bias) -> dict:
        """The fields of the module that computes."""
        bias_type = self.attn_bias_type or ("no_bias" if bias is None else "post_scale_bias")
        if bias_type.upper() not in AttnBiasType.__members__:
            raise _error("attn_bias_type", repr(bias_type), 'must be "no_bias", "pre_scale_bias" '
                         'or "post_scale_bias"')
        strategy = self.context_parallel_strategy.upper()
        if strategy not in _STRATEGIES:
            raise _error("context_parallel_strategy", repr(self.context_parallel_strategy),
                         "must be one of " + ", ".join(_STRATEGIES))
        scale = qkv[0].shape[-1] ** -0.5 if self.scale_factor is None else self.scale_factor
        return {"attention_dropout": self.attention_dropout,
                "attn_mask_type": canonicalize_attn_mask_type(self.attn_mask_type),
                "attn_bias_type": AttnBiasType[bias_type.upper()], "qkv_layout": layout,
                "scale_factor": float(scale), "window_size": self.window_size,
                "max_segments_per_seq": self.max_segments_per_seq,
                "context_parallel_causal_load_balanced":
                    self.context_parallel_causal_load_balanced,
                "context_parallel_axis": self.context_parallel_axis,
                "context_parallel_strategy": _STRATEGIES[strategy],
                "context_checkpoint_name": self.context_checkpoint_name,
                "softmax_type": AttnSoftmaxType.from_str(self.softmax_type),
                "return_max_logit": self.return_max_logit}

    def _is_fused(self, call: dict, qkv, bias, deterministic: bool) -> bool:
        """By the switch, and by what libtessera says. A path that materialises scores on a GPU for
        want of kernels in the build runs only when switched to."""
        if not switch("NVTE_FUSED_ATTN", 1):
            logger.debug("Disabling FusedAttention due to NVTE_FUSED_ATTN=0")
            return False
        helper = self._helper(call, qkv, bias, deterministic)
        if helper.is_fused_attn_kernel_available():
            return True
        reason = helper.why_not()[0]
        if self.return_max_logit or jax.default_backend() == "gpu" and \
                not any(name.startswith("cuda") for name in backends()):
            raise Refused(f"DotProductAttention: {reason}")
        size = 4 * math.prod((helper.batch_size, helper.q_num_heads, helper.q_max_seqlen,
                              helper.kv_max_seqlen))
        warnings.warn(f"DotProductAttention materialises the scores, {size} bytes, since "
                      f"FusedAttention is disabled due to {reason}", stacklevel=3)
        return False

    def _helper(self, call: dict, qkv, bias, deterministic: bool) -> tex.FusedAttnHelper:
        q, k, v = _translate.separate(qkv, call["qkv_layout"])
        dtype = qkv[0].dtype
        sizes = () if bias is None else bias.shape
        return tex.FusedAttnHelper(
            is_training=not deterministic, batch_size=q.shape[0], q_dtype=dtype, kv_dtype=dtype,
            **{name: call[name] for name in ("qkv_layout", "attn_bias_type", "attn_mask_type", "softmax_type")},
            dropout_probability=self.attention_dropout, q_num_heads=q.shape[2], kv_num_heads=k.shape[2],
            q_max_seqlen=q.shape[1], kv_max_seqlen=k.shape[1], head_dim_qk=q.shape[3], head_dim_v=v.shape[3],
            window_size=_words.window(self.window_size), return_max_logit=self.return_max_logit,
            max_segments_per_seq=self.max_segments_per_seq,
            **dict(zip(("bias_batch", "bias_heads", "bias_seqlen_q", "bias_seqlen_kv"), sizes)))
