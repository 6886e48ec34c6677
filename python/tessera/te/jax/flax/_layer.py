# SPDX-License-Identifier: Apache-2.0
"""TransformerLayer: attention and an MLP, each with a norm before it and a residual connection around it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import linen as nn

from .._words import error
from ..sharding import (BATCH_AXES, HIDDEN_AXES, HIDDEN_TP_AXES, SEQLEN_AXES, SEQLEN_TP_AXES,
                        with_sharding_constraint_by_logical_axes)
from ._feed_forward import FeedForward
from ._multi_head import MultiHeadAttention, _canonicalize_lora_scope
from ._positions import RelativePositionBiases
from ._projections import Norm

_NAME = "TransformerLayer"
# MultiHeadAttention's fields that have the same name here.
_SHARED = ("num_attention_heads", "num_gqa_groups", "attention_dropout", "dropout_rng_name", "layernorm_type",
           "layernorm_epsilon", "zero_centered_gamma", "use_bias", "bias_init", "enable_rotary_pos_emb",
           "rotary_pos_emb_windows", "rotary_pos_emb_group_method", "low_rank_adaptation_scope",
           "low_rank_adaptation_dim", "low_rank_adaptation_alpha", "dtype", "fuse_qkv_params",
           "transpose_batch_sequence", "enable_sequence_parallel", "scale_attn_logits", "scaled_query_init",
           "window_size", "softmax_type")


class TransformerLayerType(enum.Enum):
    """A decoder has attention to `encoded` between its own and its MLP."""
    ENCODER = "encoder"
    DECODER = "decoder"


class TransformerLayer(nn.Module):
    """inputs [b, s, hidden_size] -> the same: attention and an MLP, each after a norm and with a residual connection.

    Parameters have TE's names: relpos_bias, attention or self_attention and encoder_decoder_attention, mlp,
    output_layernorm. attention_mask and encoder_decoder_mask are SequenceDescriptors or masks, True = hidden, which
    padding masks need, and a decoder's attention to `encoded` is one; `decode` is MultiHeadAttention's, of decoders.
    """
    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()   # which share a mask
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Callable | None = None
    mlp_kernel_init: Callable | None = None
    mlp_activations: Sequence[str] = ("gelu",)
    mlp_activation_params: dict | None = None  # of clamped_silu and clamped_linear
    use_bias: bool = False
    bias_init: Callable = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False            # instead of the one before attention
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: nn.Module | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: jnp.dtype = jnp.float32            # of the parameters
    drop_path: float = 0.0                    # how many samples leave a branch out
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None
    score_mod_bprop: Callable | None = None

    def __post_init__(self):
        scaled = nn.initializers.variance_scaling
        if self.mha_kernel_init is None:
            self.mha_kernel_init = scaled(1.0, "fan_in", "normal", dtype=self.dtype)
        if self.mlp_kernel_init is None:
            self.mlp_kernel_init = scaled(1.0, "fan_in", "truncated_normal", dtype=self.dtype)
        if self.num_gqa_groups is None:
            self.num_gqa_groups = self.num_attention_heads
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs, encoded=None, attention_mask=None, encoder_decoder_mask=None, deterministic=False,
                 decode=False, max_decode_length=None, score_mod_tensors=None, score_mod_bprop_tensors=None):
        self._check(inputs, encoded, encoder_decoder_mask, decode)
        is_decoder = self.layer_type == TransformerLayerType.DECODER
        bias = self._relative_bias(inputs.shape[0 if self.transpose_batch_sequence else 1], decode, max_decode_length)
        inputs = self._constrained(inputs)
        x, normed = self._attention(
            "self_attention" if is_decoder else "attention", input_layernorm=not self.output_layernorm,
            attn_mask_type=self.self_attn_mask_type, attn_bias_type=self.self_attn_bias_type,
            score_mod=self.score_mod, score_mod_bprop=self.score_mod_bprop)(
                inputs, inputs, attention_mask, bias, deterministic=deterministic, decode=decode,
                score_mod_tensors=score_mod_tensors, score_mod_bprop_tensors=score_mod_bprop_tensors)
        x = self._added(x, inputs, normed, deterministic)
        if is_decoder:
            y, normed = self._attention("encoder_decoder_attention", attn_mask_type="padding",
                                        attn_bias_type="no_bias")(
                x, encoded, encoder_decoder_mask, deterministic=deterministic)
            x = self._added(y, x, normed, deterministic, may_be_left_out=False)
        y, normed = self._feed_forward()(x, deterministic)
        x = self._added(y, x, normed, deterministic)
        if self.output_layernorm:
            x = Norm(nn.initializers.zeros, norm=self.layernorm_type, epsilon=self.layernorm_epsilon,
                     zero_centered_gamma=self.zero_centered_gamma, dtype=self.dtype, name="output_layernorm")(x)
        return x

    def _check(self, inputs, encoded, encoder_decoder_mask, decode: bool):
        if inputs.ndim != 3 or inputs.shape[-1] != self.hidden_size:
            raise error("inputs.shape", tuple(inputs.shape),
                        f"must be [batch, sequence, hidden_size={self.hidden_size}]", _NAME)
        if self.hidden_size % self.num_attention_heads:
            raise error("hidden_size", self.hidden_size, "must be a multiple of num_attention_heads="
                        f"{self.num_attention_heads}", _NAME)
        if not isinstance(self.layer_type, TransformerLayerType):
            raise error("layer_type", repr(self.layer_type), "must be a TransformerLayerType", _NAME)
        if self.layer_type == TransformerLayerType.ENCODER:
            if decode:
                raise error("decode", decode, "must be False for an encoder; use layer_type="
                            "TransformerLayerType.DECODER, or MultiHeadAttention", _NAME)
            return
        for name, x in (("encoded", encoded), ("encoder_decoder_mask", encoder_decoder_mask)):
            if x is None:
                raise error(name, None, "must be given to a decoder, whose attention to `encoded` masks padding",
                            _NAME)

    def _relative_bias(self, length: int, decode: bool, max_decode_length):
        """[1, h, s, s], or None; a cache's steps take their row of it."""
        if not self.enable_relative_embedding:
            return None
        if decode and max_decode_length is None and length == 1:
            raise error("max_decode_length", None, "must be the cache's length, for the bias of "
                        "enable_relative_embedding=True", _NAME)
        module = self.relative_embedding
        if module is None:
            init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", dtype=self.dtype)
            module = RelativePositionBiases(32, 128, self.num_attention_heads, embedding_init=init, dtype=self.dtype,
                                            name="relpos_bias")
        if decode and max_decode_length:
            length = max_decode_length
        return module(length, length, self.layer_type == TransformerLayerType.ENCODER)

    def _attention(self, name: str, **fields) -> MultiHeadAttention:
        return MultiHeadAttention(
            head_dim=self.hidden_size // self.num_attention_heads, kernel_init=self.mha_kernel_init,
            float32_logits=self.float32_attention_logits,
            return_layernorm_output=self.apply_residual_connection_post_layernorm, name=name,
            **{field: getattr(self, field) for field in _SHARED}, **fields)

    def _feed_forward(self) -> FeedForward:
        return FeedForward(
            self.mlp_kernel_init, self.use_bias, self.bias_init, norm=self.layernorm_type,
            epsilon=self.layernorm_epsilon, zero_centered_gamma=self.zero_centered_gamma,
            enable_low_rank_adaptation=_canonicalize_lora_scope(self.low_rank_adaptation_scope).mlp,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha, input_axes=self._axes(False, HIDDEN_AXES),
            dtype=self.dtype, width=self.mlp_hidden_size, activations=tuple(self.mlp_activations),
            activation_params=self.mlp_activation_params, dropout_rate=self.intermediate_dropout,
            dropout_dims=tuple(self.intermediate_dropout_dims), dropout_rng_name=self.dropout_rng_name,
            inner_axes=self._axes(False, HIDDEN_TP_AXES), name="mlp")

    def _added(self, x, residual, normed, deterministic: bool, may_be_left_out=True):
        """x after dropout, plus the residual or what its norm gave."""
        x = nn.Dropout(self.hidden_dropout, tuple(self.hidden_dropout_dims), rng_collection=self.dropout_rng_name)(
            self._constrained(x), deterministic=deterministic)
        if may_be_left_out and self.drop_path > 0:
            others = (0, 2) if self.transpose_batch_sequence else (1, 2)
            x = nn.Dropout(self.drop_path, others, rng_collection=self.dropout_rng_name)(
                x, deterministic=deterministic)
        return x + self._constrained(normed if self.apply_residual_connection_post_layernorm else residual)

    def _constrained(self, x):
        return with_sharding_constraint_by_logical_axes(x, self._axes(self.enable_sequence_parallel, HIDDEN_AXES))

    def _axes(self, splits_sequence: bool, last: str) -> tuple[str, ...]:
        axes = (BATCH_AXES, SEQLEN_TP_AXES if splits_sequence else SEQLEN_AXES)
        return (*(axes[::-1] if self.transpose_batch_sequence else axes), last)
