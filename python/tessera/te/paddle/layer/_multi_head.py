# SPDX-License-Identifier: Apache-2.0
"""TE's multi-head attention: projections around DotProductAttention."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F

from ..constants import AttnTypes
from ..distributed import get_tp_group_and_world_size, track_rng_state
from ..recompute import recompute
from ..utils import divide
from ._dot_product import DotProductAttention
from ._rotary import apply_rotary_pos_emb


class MultiHeadAttention(paddle.nn.Layer):
    """Attention of hidden states, with the projections of query, key, value and output, and on wish a
    normalisation of the input.

    Arguments are TE's. Weights are [out, in] with backend="transformer_engine" and [in, out] with
    "paddle", as TE stores them; under fleet with set_parallel_mode they are Paddle's
    ColumnParallelLinear and RowParallelLinear. sequence_parallel of several ranks and
    fuse_wgrad_accumulation are refused.
    """

    def __init__(self, hidden_size: int, num_attention_heads: int, attention_dropout: float = 0.1,
                 layernorm_epsilon: float = 1e-5, weight_attr=None, bias_attr=None,
                 max_sequence_length: int | None = None, attn_mask_type: str = "causal",
                 params_dtype=None, return_layernorm_output: bool = False,
                 input_layernorm: bool = False, attention_type: str = "self",
                 normalization: str = "LayerNorm", zero_centered_gamma: bool = False,
                 set_parallel_mode: bool = False, sequence_parallel: bool = False, tp_group=None,
                 num_gqa_groups: int | None = None, fuse_wgrad_accumulation: bool = False,
                 rng_state_name: str = "local_seed", backend: str = "transformer_engine") -> None:
        super().__init__()
        assert attention_type in AttnTypes, f"attention_type {attention_type} not supported"
        self.input_layernorm, self.attention_type = input_layernorm, attention_type
        self.return_layernorm_output = return_layernorm_output
        self.params_dtype = paddle.get_default_dtype() if params_dtype is None else params_dtype
        self.max_sequence_length = max_sequence_length
        self.weight_attr, self.bias_attr = weight_attr, bias_attr
        self.attn_mask_type, self.backend = attn_mask_type, backend
        self.tp_group, self.tp_size = get_tp_group_and_world_size(tp_group, set_parallel_mode)
        self.tensor_parallel = self.tp_size > 1
        self.sequence_parallel = self.tensor_parallel and sequence_parallel
        for name, on in (("sequence_parallel", self.sequence_parallel),
                         ("fuse_wgrad_accumulation", fuse_wgrad_accumulation)):
            if on:
                raise _error(name, True, "is not available; leave it out")
        self.set_parallel_mode, self.rng_state_name = set_parallel_mode, rng_state_name
        self.num_attention_heads = num_attention_heads
        self.hidden_size_per_attention_head = divide(hidden_size, num_attention_heads)
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.num_attention_heads_per_partition = divide(num_attention_heads, self.tp_size)
        assert num_attention_heads % self.num_gqa_groups == 0, \
            "The number of attention heads must be divisible by the number of GQA groups!"
        assert self.num_gqa_groups % self.tp_size == 0, \
            "The number of GQA groups must be divisible by tensor parallel size!"
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        self.hidden_size_kv = self.hidden_size_per_attention_head * self.num_gqa_groups

        norm = (normalization, layernorm_epsilon, zero_centered_gamma) if input_layernorm else None
        name = "layernorm_qkv" if input_layernorm else "qkv"
        width = hidden_size + 2 * self.hidden_size_kv
        if attention_type == "cross":
            name, width = "layernorm_query" if input_layernorm else "query_layer", hidden_size
            self.key_value = self._projection(hidden_size, 2 * self.hidden_size_kv, "column")
        setattr(self, name, self._projection(hidden_size, width, "column", norm))
        self._first = name
        self.core_attention = DotProductAttention(
            num_attention_heads, self.hidden_size_per_attention_head, self.num_gqa_groups,
            attention_dropout, attn_mask_type=attn_mask_type, attention_type=attention_type,
            tp_size=self.tp_size, backend=backend)
        self.proj = self._projection(hidden_size, hidden_size, "row")

    def forward(self, hidden_states: paddle.Tensor, attention_mask: paddle.Tensor | None = None,
                encoder_output: paddle.Tensor | None = None, rotary_pos_emb=None,
                core_attention_bias_type: str = "no_bias",
                core_attention_bias: paddle.Tensor | None = None, set_zero: bool = True,
                recompute_core_attention: bool = False, is_first_microbatch: bool | None = None):
        """hidden_states [b, s, hidden], or [b * s, hidden] with max_sequence_length -> the same shape;
        with input_layernorm and return_layernorm_output (it, the normalised input).

        encoder_output [b, skv, hidden] gives the keys of cross attention. rotary_pos_emb is (cos, sin)
        of RotaryPositionEmbedding. recompute_core_attention computes core_attention again in the
        backward pass. is_first_microbatch has no effect without FP8.
        """
        if self.attn_mask_type != "causal" and attention_mask is not None:
            assert attention_mask.dtype == paddle.bool, "Attention mask must be a boolean tensor"
        rank = len(hidden_states.shape)
        if rank not in (2, 3):
            raise ValueError(f"hidden_states should have 2 or 3 dimensions, got {rank}.")
        assert rank == 3 or self.max_sequence_length is not None, "max_sequence_length must be provided"
        length = hidden_states.shape[1] if rank == 3 else self.max_sequence_length
        projected = getattr(self, self._first)(hidden_states)
        projected, normalised = projected if self.input_layernorm else (projected, None)
        q, k, v = self._heads(projected, encoder_output, length)
        if rotary_pos_emb is not None:
            q, k = apply_rotary_pos_emb(q, k, *rotary_pos_emb)
        arguments = (q, k, v, attention_mask, core_attention_bias_type, core_attention_bias, set_zero)
        with track_rng_state(self.tensor_parallel, name=self.rng_state_name):
            if recompute_core_attention:
                context = recompute(self.core_attention, *arguments, use_reentrant=False)
            else:
                context = self.core_attention(*arguments)
        output = self.proj(context.reshape([*hidden_states.shape[:-1], -1]))
        return (output, normalised) if self.input_layernorm and self.return_layernorm_output else output

    def _heads(self, projected, encoder_output, length: int):
        """q [b, s, h, d], k and v [b, skv, groups, d]."""
        groups, d = self.num_gqa_groups_per_partition, self.hidden_size_per_attention_head
        if self.attention_type == "cross":
            q = projected.reshape([-1, length, self.num_attention_heads_per_partition, d])
            k, v = self.key_value(encoder_output).reshape([0, 0, 2 * groups, d]).chunk(2, 2)
            return q, k, v
        # TE's order of features: h / groups queries of each group, one key, one value.
        queries = self.num_attention_heads_per_partition // groups
        mixed = projected.reshape([-1, length, queries + 2, groups, d])
        q = mixed[:, :, :queries].reshape([0, 0, -1, d])
        return q, mixed[:, :, queries], mixed[:, :, queries + 1]

    def _projection(self, in_features: int, out_features: int, mode: str, norm=None):
        transposed = self.backend == "transformer_engine"
        if self.tensor_parallel:
            linear = _parallel(in_features, out_features, mode, self)
        else:
            linear = _Linear(in_features, out_features, self.weight_attr, self.bias_attr,
                             self.params_dtype, transposed)
        return linear if norm is None else _NormLinear(in_features, linear, *norm, self.params_dtype)


class _Linear(paddle.nn.Layer):
    """x W + b, its weight stored as TE's backend of that name does."""

    def __init__(self, in_features, out_features, weight_attr, bias_attr, dtype, transposed: bool):
        super().__init__()
        self.transposed = transposed
        shape = [out_features, in_features] if transposed else [in_features, out_features]
        self.weight = self.create_parameter(shape, weight_attr, dtype)
        self.bias = None if bias_attr is False else \
            self.create_parameter([out_features], bias_attr, dtype, is_bias=True)

    def forward(self, x):
        return F.linear(x, self.weight.T if self.transposed else self.weight, self.bias)


class _NormLinear(paddle.nn.Layer):
    """(linear(norm(x)), norm(x)), by TE's names: ln_weight, ln_bias, and those of the linear."""

    def __init__(self, width, linear, normalization, epsilon, zero_centered_gamma, dtype):
        super().__init__()
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise _error("normalization", normalization, "must be LayerNorm or RMSNorm")
        self.normalization, self.epsilon = normalization, epsilon
        self.zero_centered_gamma = zero_centered_gamma
        begin = paddle.nn.initializer.Constant(0.0 if zero_centered_gamma else 1.0)
        self.ln_weight = self.create_parameter([width], dtype=dtype, default_initializer=begin)
        self.ln_bias = None if normalization == "RMSNorm" else \
            self.create_parameter([width], dtype=dtype, is_bias=True)
        self.weight, self.bias = linear.weight, linear.bias
        self.__dict__["linear"] = linear  # no sublayer: its parameters are this one's

    def forward(self, x):
        gamma = self.ln_weight + 1 if self.zero_centered_gamma else self.ln_weight
        if self.normalization == "LayerNorm":
            normalised = F.layer_norm(x, x.shape[-1:], gamma, self.ln_bias, self.epsilon)
        else:
            wide = x.astype("float32")
            scale = paddle.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
            normalised = (wide * scale).astype(x.dtype) * gamma
        return self.linear(normalised), normalised


def _parallel(in_features, out_features, mode: str, layer: MultiHeadAttention):
    from paddle.distributed.fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear
    common = dict(weight_attr=layer.weight_attr, has_bias=layer.bias_attr is not False,
                  mp_group=layer.tp_group)
    if mode == "column":
        return ColumnParallelLinear(in_features, out_features, gather_output=False, **common)
    return RowParallelLinear(in_features, out_features, input_is_parallel=True, **common)


def _error(name, value, rule) -> ValueError:
    return ValueError(f"tessera.te.MultiHeadAttention: {name}={value!r}: {rule}")
