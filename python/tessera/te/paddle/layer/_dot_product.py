# SPDX-License-Identifier: Apache-2.0
"""TE's core attention."""

from __future__ import annotations

import math
import warnings

import paddle
import paddle.nn.functional as F

from ....paddle import attention
from ... import _logging
from ... import transformer_engine_paddle as tex
from ..constants import AttnBiasType, AttnMaskType, AttnMaskTypes, AttnTypes, FusedAttnBackend, TE_DType
from ..utils import attention_mask_func

_FALLS_BACK = "Fused attention is not enabled, falling back to Paddle backend"


def repeat_kv(hidden_states: paddle.Tensor, n_rep: int) -> paddle.Tensor:
    """Keys or values [b, s, groups, d] as [b, s, groups * n_rep, d]."""
    return hidden_states if n_rep == 1 else hidden_states.repeat_interleave(n_rep, 2)


class DotProductAttention(paddle.nn.Layer):
    """softmax(q kᵀ / sqrt(kv_channels), masked) v, with dropout in training.

    num_attention_heads, kv_channels: heads of the query, and their dim. num_gqa_groups: heads of key
    and value, those of the query unless given; all are counts before tp_size ranks share them.
    attn_mask_type: "causal" (top-left; attention_mask is ignored), "padding" (attention_mask is read)
    or "no_mask". attention_type: "self" or "cross", which needs a mask. backend:
    "transformer_engine", tessera's kernels, or "paddle", Paddle's operations, which materialise the
    scores; the latter is also taken where NVTE_FUSED_ATTN is 0 when the layer is made, and where no
    kernel can. NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, read then too, makes gradients deterministic.
    """

    def __init__(self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int | None = None,
                 attention_dropout: float = 0.1, attn_mask_type: str = "causal",
                 attention_type: str = "self", tp_size: int = 1,
                 backend: str = "transformer_engine") -> None:
        super().__init__()
        for name, value, known in (("attn_mask_type", attn_mask_type, AttnMaskTypes),
                                   ("attention_type", attention_type, AttnTypes),
                                   ("backend", backend, ("transformer_engine", "paddle"))):
            if value not in known:
                raise ValueError(f"tessera.te.DotProductAttention: {name}={value!r}: must be one of "
                                 + ", ".join(known))
        self.attn_mask_type = attn_mask_type
        self.attention_dropout = attention_dropout
        self.attention_type = attention_type
        self.qkv_layout = "bshd_bshd_bshd"
        self.hidden_size_per_attention_head = kv_channels
        self.norm_factor = math.sqrt(kv_channels)
        self.tp_size = tp_size
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.num_gqa_groups_per_partition = self.num_gqa_groups // tp_size
        self.num_queries_per_key_value = num_attention_heads // self.num_gqa_groups
        self.deterministic = not _logging.switch("NVTE_ALLOW_NONDETERMINISTIC_ALGO", 1)
        self.use_fused_attention = bool(_logging.switch("NVTE_FUSED_ATTN", 1))
        self.backend = backend
        if not self.use_fused_attention and backend == "transformer_engine":
            warnings.warn(_FALLS_BACK)
            self.backend = "paddle"

    def forward(self, query_layer: paddle.Tensor, key_layer: paddle.Tensor,
                value_layer: paddle.Tensor, attention_mask: paddle.Tensor | None = None,
                core_attention_bias_type: str = "no_bias",
                core_attention_bias: paddle.Tensor | None = None,
                set_zero: bool = True) -> paddle.Tensor:
        """query_layer [b, sq, h, d], key_layer and value_layer [b, skv, groups, d] -> [b, sq, h, d].

        attention_mask: bool [b, 1, sq, skv] or what broadcasts to it, True = hidden.
        core_attention_bias_type: "no_bias", or "pre_scale_bias" or "post_scale_bias" with a
        core_attention_bias that broadcasts to [b, h, sq, skv]. set_zero has no effect: rows that see
        nothing are 0.
        """
        assert key_layer.shape == value_layer.shape, "Keys and values must have the same shape!"
        assert key_layer.shape[-2] == self.num_gqa_groups_per_partition, \
            f"Keys and values must have num_gqa_group = {self.num_gqa_groups} heads!"
        if core_attention_bias_type not in AttnBiasType:
            raise ValueError("tessera.te.DotProductAttention: core_attention_bias_type="
                             f"{core_attention_bias_type!r}: must be one of {', '.join(AttnBiasType)}")
        _logging.AttentionLogging.setup_logging()
        _logging.logger.debug("Running with config=%s", dict(
            q=list(query_layer.shape), kv=list(key_layer.shape), dtype=str(query_layer.dtype),
            attn_mask_type=self.attn_mask_type, attention_type=self.attention_type,
            bias=core_attention_bias_type, dropout=self.attention_dropout, training=self.training))
        arguments = (query_layer, key_layer, value_layer, attention_mask, core_attention_bias_type,
                     core_attention_bias)
        if self.backend == "transformer_engine":
            if self._has_fused(query_layer, key_layer, core_attention_bias_type):
                _logging.logger.info("Running with FusedAttention backend (tessera)")
                return self._te_forward(*arguments, set_zero)
            warnings.warn(_FALLS_BACK)
        _logging.logger.info("Running with Paddle backend")
        return self._pd_forward(*arguments)

    def _has_fused(self, q, k, bias_type: str) -> bool:
        dtype = TE_DType.get(q.dtype)
        self.fused_attention_backend = tex.get_fused_attn_backend(
            dtype, TE_DType.get(k.dtype), tex.get_nvte_qkv_layout(self.qkv_layout),
            AttnBiasType[bias_type], AttnMaskType[self.attn_mask_type], self.attention_dropout,
            q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3])
        return self.fused_attention_backend != FusedAttnBackend["No_Backend"]

    def _te_forward(self, query_layer, key_layer, value_layer, attention_mask=None,
                    core_attention_bias_type="no_bias", core_attention_bias=None, set_zero=True):
        """By tessera's kernels."""
        self._check(query_layer, key_layer, value_layer, attention_mask)
        keywords = dict(softmax_scale=1.0 / self.norm_factor,
                        dropout_p=self.attention_dropout if self.training else 0.0,
                        deterministic=self.deterministic or None,
                        **tex.scores(core_attention_bias_type, core_attention_bias, self.attn_mask_type))
        if self.attn_mask_type == "padding" and attention_mask is not None:
            keywords["drop"] = attention_mask
        return attention(query_layer, key_layer, value_layer, **keywords)

    def _pd_forward(self, query_layer, key_layer, value_layer, attention_mask=None,
                    core_attention_bias_type="no_bias", core_attention_bias=None):
        """By Paddle's operations, which have no 16-bit kernels on the CPU."""
        dtype = query_layer.dtype
        if query_layer.place.is_cpu_place():
            query_layer, key_layer, value_layer = (
                x.astype("float32") for x in (query_layer, key_layer, value_layer))
        k, v = (repeat_kv(x, self.num_queries_per_key_value) for x in (key_layer, value_layer))
        q, k, v = (x.transpose([0, 2, 1, 3]) for x in (query_layer, k, v))
        scale = 1.0 / self.norm_factor
        if core_attention_bias_type == "pre_scale_bias":
            scores = (paddle.matmul(q, k, transpose_y=True) + core_attention_bias.astype(q.dtype)) * scale
        else:
            scores = paddle.matmul(q * scale, k, transpose_y=True)
        if core_attention_bias_type == "post_scale_bias":
            scores = scores + core_attention_bias.astype(q.dtype)
        scores = scores.astype("float32")
        if self.attn_mask_type == "causal":
            attention_mask = paddle.triu(paddle.ones(scores.shape[2:]), 1).astype("bool")
        if attention_mask is not None:
            scores = attention_mask_func(scores, attention_mask)
        weights = F.softmax(scores, -1).astype(q.dtype)
        weights = F.dropout(weights, self.attention_dropout, training=self.training)
        return paddle.matmul(weights, v).transpose([0, 2, 1, 3]).astype(dtype)

    def _check(self, q, k, v, mask):
        assert len(q.shape) == len(k.shape) == len(v.shape) == 4, \
            f"q,k,v shape must be [b, s, h, d] for dot product {self.attention_type} attention"
        if self.attention_type == "cross":
            assert mask is not None, "attention_mask must be provided for cross attention"
