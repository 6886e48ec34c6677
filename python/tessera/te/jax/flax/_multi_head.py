# SPDX-License-Identifier: Apache-2.0
"""MultiHeadAttention: projections, rotary embeddings, attention and a decoding cache."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from .. import _words
from .._enums import QKVLayout, canonicalize_attn_mask_type
from .._sequences import SequenceDescriptor
from .._words import error
from ..sharding import (BATCH_AXES, HEAD_AXES, HIDDEN_AXES, HIDDEN_TP_AXES, JOINED_AXES,
                        SEQLEN_AXES, SEQLEN_TP_AXES, W_FSDP_AXES, W_JOINED_AXES, W_NO_SHARD_AXES,
                        W_TP_AXES, with_sharding_constraint_by_logical_axes)
from ._dot_product import DotProductAttention
from ._positions import rotary_pos_emb
from ._projections import Projection

_NAME = "MultiHeadAttention"
_RENAMED = {"num_heads": "num_attention_heads", "dropout_rate": "attention_dropout",
            "fuse_qkv": "fuse_qkv_params",
            "apply_residual_connection_post_layernorm": "return_layernorm_output"}


@dataclasses.dataclass
class LoRAScope:
    """Which projections get a low-rank adaptation."""
    qkv_proj: bool = False
    output_proj: bool = False
    mlp: bool = False


def _canonicalize_lora_scope(scope: str | None) -> LoRAScope:
    parts = ("qkv_proj", "output_proj", "mlp")
    scopes = {"none": (), "all": parts, **{part: (part,) for part in parts},
              **{f"exclude_{part}": set(parts) - {part} for part in parts}}
    name = "none" if scope is None else scope.lower()
    if name not in scopes:
        raise error("low_rank_adaptation_scope", repr(scope), f"must be one of {', '.join(scopes)}",
                    _NAME)
    return LoRAScope(**{part: True for part in scopes[name]})


class MultiHeadAttention(nn.Module):
    """Attention of inputs_q to inputs_kv, [b, s, hidden] each, with projections around it.

    Returns the output like inputs_q, and what the norm of inputs_q gave, or None (TE's pair). The
    same array in both places is self-attention. Parameters have TE's names: qkv, or query and kv,
    or query, key and value, and out. `mask` is a SequenceDescriptor or a mask, True = hidden;
    `decode` takes and fills the cache, one token at a time once it is there; `deterministic` is
    without dropout.
    """
    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Callable | None = None
    use_bias: bool = False
    bias_init: Callable = nn.initializers.zeros
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: jnp.dtype = jnp.float32           # of the parameters
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool | None = None
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False          # by 1 / sqrt(head_dim)
    scaled_query_init: bool = True           # the query's kernel begins scaled by it
    float32_logits: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None
    score_mod_bprop: Callable | None = None
    num_heads: int | None = None             # deprecated from here on
    dropout_rate: float | None = None
    output_layernorm: bool | None = None
    apply_residual_connection_post_layernorm: bool | None = None
    fuse_qkv: bool | None = None

    def __post_init__(self):
        if self.output_layernorm is not None:
            raise error("output_layernorm", self.output_layernorm, "is gone; input_layernorm says "
                        "whether to normalise", _NAME)
        for old, new in _RENAMED.items():
            if getattr(self, old) is not None:
                warnings.warn(f"{_NAME}: {old} is deprecated; pass {new}", DeprecationWarning,
                              stacklevel=2)
                setattr(self, new, getattr(self, old))
                setattr(self, old, None)
        if self.kernel_init is None:
            self.kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal",
                                                                dtype=self.dtype)
        if self.num_gqa_groups is None:
            self.num_gqa_groups = self.num_attention_heads
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs_q, inputs_kv, mask=None, bias=None, *, decode=False,
                 deterministic=False, score_mod_tensors=None, score_mod_bprop_tensors=None):
        _words.no_score_mod(_NAME, score_mod=self.score_mod, score_mod_bprop=self.score_mod_bprop,
                            score_mod_tensors=score_mod_tensors,
                            score_mod_bprop_tensors=score_mod_bprop_tensors)
        if inputs_q.dtype != inputs_kv.dtype:
            raise error("inputs_kv.dtype", inputs_kv.dtype, f"must be inputs_q's, {inputs_q.dtype}",
                        _NAME)
        layout, arrays, normed = self._projected(inputs_q, inputs_kv)
        mask_type = self.attn_mask_type
        if self.enable_rotary_pos_emb or decode:
            layout, arrays = QKVLayout.BSHD_BSHD_BSHD, _separate(arrays)
        is_step = decode and self.has_variable("cache", "cached_key")
        if self.enable_rotary_pos_emb:
            start = self.get_variable("cache", "cache_index") if is_step else 0
            arrays = (*(self._rotated(x, start) for x in arrays[:2]), arrays[2])
        if decode:
            arrays, mask, bias = self._cached(arrays, mask, bias)
        if is_step:
            causal = canonicalize_attn_mask_type(mask_type).is_causal()
            mask_type = "padding_causal_bottom_right" if causal else "padding"
        arrays = tuple(self._constrained(x) for x in arrays)
        out = DotProductAttention(
            head_dim=self.head_dim, num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups, attn_mask_type=mask_type,
            attn_bias_type=self.attn_bias_type, attention_dropout=self.attention_dropout,
            dropout_rng_name=self.dropout_rng_name, float32_logits=self.float32_logits,
            qkv_layout=layout.name.lower(), softmax_type=self.softmax_type,
            scale_factor=self.head_dim ** -0.5 if self.scale_attn_logits else 1.0,
            transpose_batch_sequence=self.transpose_batch_sequence, window_size=self.window_size,
        )(*arrays, *(None,) * (3 - len(arrays)), mask, bias, deterministic=deterministic)
        out = out.reshape(*out.shape[:2], -1)
        out = with_sharding_constraint_by_logical_axes(out, (*self._axes(), HIDDEN_TP_AXES))
        out, _ = self._projection("out", (inputs_q.shape[-1],), self.kernel_init,
                                  lora=self._lora.output_proj)(out)
        return checkpoint_name(out, "out_proj"), normed

    # ---- projections ----

    @property
    def _lora(self) -> LoRAScope:
        return _canonicalize_lora_scope(self.low_rank_adaptation_scope)

    def _projected(self, inputs_q, inputs_kv):
        """(layout, arrays of it with heads apart, what the norm gave or None)."""
        is_self = inputs_q is inputs_kv
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        inputs_q = with_sharding_constraint_by_logical_axes(
            inputs_q, (*self._axes(self.enable_sequence_parallel), HIDDEN_AXES))
        if self.fuse_qkv_params and is_self and heads == groups:
            qkv, normed = self._project("qkv", (3, heads), self._fused_init, True)(inputs_q)
            return QKVLayout.BS3HD, (checkpoint_name(qkv, "combined_qkv_proj"),), \
                normed if self.return_layernorm_output else None
        query, normed = self._project("query", (heads,), self._query_init, True)(inputs_q)
        inputs_kv = normed if is_self else inputs_kv
        # TE returns what self-attention needs and split projections compute, asked for or not.
        returned = self.return_layernorm_output or is_self or not self.fuse_qkv_params
        normed = normed if returned else None
        if self.fuse_qkv_params:
            kv, _ = self._project("kv", (2, groups), self._fused_init)(inputs_kv)
            return QKVLayout.BSHD_BS2HD, (query, checkpoint_name(kv, "combined_kv_proj")), normed
        key, _ = self._project("key", (groups,), self.kernel_init)(inputs_kv)
        value, _ = self._project("value", (groups,), self.kernel_init)(inputs_kv)
        names = ("query_proj", "key_proj", "value_proj")
        return QKVLayout.BSHD_BSHD_BSHD, \
            tuple(map(checkpoint_name, (query, key, value), names)), normed

    def _project(self, name: str, features: tuple, init, normed=False):
        """A projection to [..., *features, head_dim], of which the last two are one in the
        kernel."""
        *several, heads = features
        projection = self._projection(name, (*several, heads * self.head_dim), init, normed,
                                      self._lora.qkv_proj)

        def project(x):
            y, norm = projection(x)
            return y.reshape(*y.shape[:2], *features, self.head_dim), norm
        return project

    def _projection(self, name, features, init, normed=False, lora=False) -> Projection:
        joined = (W_JOINED_AXES,) * (len(features) - 1)
        inner, outer = (W_TP_AXES, W_FSDP_AXES) if name == "out" else (W_FSDP_AXES, W_TP_AXES)
        return Projection(
            init, self.use_bias, self.bias_init, features=features, kernel_axes=(inner, *joined, outer),
            bias_axes=(*joined, W_NO_SHARD_AXES if name == "out" else W_TP_AXES),
            norm=self.layernorm_type if normed and self.input_layernorm else None,
            epsilon=self.layernorm_epsilon, zero_centered_gamma=self.zero_centered_gamma,
            enable_low_rank_adaptation=lora, low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            input_axes=(*self._axes(), HIDDEN_AXES), dtype=self.dtype, name=name)

    def _query_init(self, *arguments):
        scale = self.head_dim ** -0.5 if self.scaled_query_init else 1.0
        return self.kernel_init(*arguments) * jnp.asarray(scale, self.dtype)

    def _fused_init(self, key, shape, dtype):
        """[hidden, 3 or 2, width]: each part as if it were alone."""
        inits = (self._query_init, self.kernel_init, self.kernel_init)[-shape[1]:]
        parts = [init(part, (shape[0], shape[2]), dtype)
                 for init, part in zip(inits, jax.random.split(key, shape[1]))]
        return jnp.stack(parts, axis=1)

    # ---- positions, cache, shards ----

    def _rotated(self, x, start):
        return rotary_pos_emb(x, self.rotary_pos_emb_windows, bool(self.transpose_batch_sequence),
                              self.rotary_pos_emb_group_method, start)

    def _cached(self, arrays, mask, bias):
        """What a step attends to: the cache with the step's token in it. The first call makes the
        cache, as long as its keys."""
        query, key, value = arrays
        is_step = self.has_variable("cache", "cached_key")
        if is_step and isinstance(mask, SequenceDescriptor):
            raise error("mask", "a SequenceDescriptor", "must be a mask, or None, with "
                        "decode=True; the cache knows its length", _NAME)
        cached_key = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        cached_value = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
        if not is_step:
            return arrays, mask, bias
        axis = 0 if self.transpose_batch_sequence else 1
        shape = cached_key.value.shape
        if query.shape[axis] != 1 or query.shape[1 - axis] != shape[1 - axis]:
            raise error("inputs_q.shape[:2]", tuple(query.shape[:2]), "must be one token of each "
                        f"of the cache's {shape[1 - axis]} sequences", _NAME)
        now = index.value
        for cache, x in ((cached_key, key), (cached_value, value)):
            cache.value = jax.lax.dynamic_update_slice_in_dim(cache.value, x, now, axis)
        index.value = now + 1
        if bias is not None:
            bias = jax.lax.dynamic_slice_in_dim(bias, now, 1, axis=2)
        if mask is None:
            lengths = jnp.full((2, shape[1 - axis]), now + 1).at[0].set(1)
            mask = SequenceDescriptor.from_seqlens(tuple(lengths))
        else:
            mask = (mask != 0) | (jnp.arange(shape[axis]) > now)
        return (query, cached_key.value, cached_value.value), mask, bias

    def _axes(self, splits_sequence=False) -> tuple[str, str]:
        axes = (BATCH_AXES, SEQLEN_TP_AXES if splits_sequence else SEQLEN_AXES)
        return axes[::-1] if self.transpose_batch_sequence else axes

    def _constrained(self, x):
        joined = (JOINED_AXES,) * (x.ndim - 4)
        return with_sharding_constraint_by_logical_axes(
            x, (*self._axes(), *joined, HEAD_AXES, HIDDEN_AXES))


def _separate(arrays) -> tuple:
    """q, k and v of packed arrays [b, s, 3 or 2, h, d]."""
    *leading, packed = arrays
    if packed.ndim == 4:
        return tuple(arrays)
    return *leading, *(packed[:, :, i] for i in range(packed.shape[2]))
