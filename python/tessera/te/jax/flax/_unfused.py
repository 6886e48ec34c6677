# SPDX-License-Identifier: Apache-2.0
"""A call in JAX's own operations, on any device and in any float dtype.

Materialises the scores, [b, h, sq, skv] in fp32 (fp64 for fp64). Dropout hides what tessera.jax
hides, bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .... import jax as tessera_jax
from ..._words import visible
from .. import _translate
from .._enums import AttnBiasType
from .._sequences import Segments, SequenceDescriptor, Tokens
from .._translate import Config
from ..sharding import BATCH_AXES, HEAD_AXES, with_sharding_constraint_by_logical_axes


def attention(config: Config, qkv, bias, softmax_offset, sequences, words):
    """What cpp_extensions.attention.forward returns first. A bias of THD is read by the place in
    the row, as TE does."""
    q, k, v = (_dense(x) for x in _translate.separate(qkv, config.qkv_layout))
    seen, tokens = _visible(config, q, k, sequences)
    if config.is_thd or config.attn_mask_type.is_padding():
        q, k, v = (_without_padding(x, side) for x, side in zip((q, k, v), (tokens[0], tokens[1], tokens[1])))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    b, sq, h, d = q.shape
    sk, hk = k.shape[1:3]
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q.reshape(b, sq, hk, h // hk, d), k,
                        preferred_element_type=wide).reshape(b, h, sq, sk)
    scores = checkpoint_name(scores, "logits")
    scores = with_sharding_constraint_by_logical_axes(scores, (BATCH_AXES, HEAD_AXES, None, None))
    if config.attn_bias_type == AttnBiasType.PRE_SCALE_BIAS:
        scores += bias
    scores *= config.scaling_factor
    if config.attn_bias_type == AttnBiasType.POST_SCALE_BIAS:
        scores += bias
    sink = _translate.sink_of(config, softmax_offset, h).get("sink")
    probabilities = _softmax(jnp.where(seen, scores, -jnp.inf), sink)
    if config.dropout_p:
        probabilities *= _kept(config, tokens, probabilities.shape, words)
    grouped = probabilities.astype(q.dtype).reshape(b, hk, h // hk, sq, sk)
    o = jnp.einsum("bhgqk,bkhd->bqhgd", grouped, v, preferred_element_type=wide)
    return o.reshape(b, sq, h, v.shape[-1]).astype(q.dtype)


def _dense(x):
    """A Slice as an array of its own."""
    return jax.lax.index_in_dim(x.array, x.index, x.axis, keepdims=False) \
        if isinstance(x, tessera_jax.Slice) else x


def _without_padding(x, tokens: Tokens):
    """Zeros for tokens of no sequence, since even a probability of 0 would spread their NaN."""
    return jnp.where((tokens.sequence >= 0)[:, :, None, None], x, 0)


def _visible(config: Config, q, k, sequences):
    """What each query sees, [b, 1 or h, sq, skv], and the tokens of both sides."""
    shown = True
    if config.attn_mask_type.is_padding() and not isinstance(sequences, SequenceDescriptor):
        given = _translate._padding(config, q, k, sequences)
        shown = ~given["drop"]
        sides = [Segments.one_each(given[name]) for name in ("seqlens_q", "seqlens_k")]
    else:
        sides = _translate.segments(config, q, k, sequences)
    tokens = [Tokens.of(side, x.shape[1]) for side, x in zip(sides, (q, k))]
    i, j = (x.position for x in tokens)
    if config.attn_mask_type.is_bottom_right():  # count from the end
        i, j = (x.position - x.length for x in tokens)
    distance = i[:, :, None] - j[:, None, :]
    seen = (tokens[0].sequence[:, :, None] == tokens[1].sequence[:, None, :]) & \
        (tokens[0].sequence >= 0)[:, :, None]
    seen &= visible(distance, config.attn_mask_type.is_causal(), config.window_size)
    return seen[:, None] & shown, tokens


def _softmax(scores, sink):
    """Rows that see nothing are zero; a sink joins the sum only."""
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    if sink is not None:
        sink = jnp.zeros((1, 1, 1), scores.dtype) if isinstance(sink, str) else \
            sink.astype(scores.dtype)[:, None, None]
        peak = jnp.maximum(peak, jax.lax.stop_gradient(sink))
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    weights = jnp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - peak)
    return weights / jnp.where(total == 0, 1, total)


def _kept(config: Config, tokens, shape, words):
    """The factor of each probability: tessera's mask counts places in sequences."""
    b, h, sq, sk = shape
    n = config.max_segments_per_seq if config.is_thd else 1
    keep = tessera_jax.dropout_mask(b * n, h, sq, sk, config.dropout_p, words)
    if config.is_thd:
        row = (n * jnp.arange(b)[:, None] + tokens[0].sequence)[:, :, None]
        keep = keep[row, :, tokens[0].position[:, :, None], tokens[1].position[:, None, :]]
        keep = jnp.moveaxis(keep, -1, 1)
    threshold = int(config.dropout_p * 65536 + 0.5)
    return keep * (65536 / (65536 - threshold))
