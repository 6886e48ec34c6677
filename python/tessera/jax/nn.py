# SPDX-License-Identifier: Apache-2.0
"""jax.nn.dot_product_attention, by tessera: the same names, and those that flax's modules hand to their
attention_fn."""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp
import numpy as np

from .. import _lib
from ._functions import attention


def dot_product_attention(
        query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None,
        mask: jax.Array | None = None, *, scale: float | None = None, is_causal: bool = False,
        query_seq_lengths: jax.Array | None = None, key_value_seq_lengths: jax.Array | None = None,
        local_window_size: int | tuple[int, int] | None = None, implementation: None = None,
        return_residual: bool = False, dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0, broadcast_dropout: bool = False, deterministic: bool = False,
        dtype=None, precision=None, module=None) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention with the arguments of jax.nn.dot_product_attention, and with those that flax passes.

    query is [b, t, n, h], key and value [b, s, k, h], and n is a multiple of k. b may be missing or, as in flax, be
    several axes. bias and mask (True = visible) broadcast to [b, n, t, s]. scale is a number or a scalar array; None is
    1/sqrt(h). is_causal and local_window_size, which is (left, right) or one number for both, count from the top left.
    Lengths are int32 [b]. Returns the output; with return_residual (output, lse), where lse [b, t, n] has key's dtype
    and no gradient. A row that sees no key is 0; jax.nn gives it the mean of all values.

    From flax: unless deterministic, dropout_rate drops each weight on its own, by dropout_rng. query, key and value are
    cast to dtype. Refused: broadcast_dropout with dropout, module (sow_weights), a precision, and a negative side of
    local_window_size. ValueError: an implementation other than None, and all that tessera.jax.attention calls one.
    """
    _refuse(dropout_rate and not deterministic and broadcast_dropout, "broadcast_dropout=True: weights "
            "are dropped one by one; pass broadcast_dropout=False")
    _refuse(module is not None, "module=...: the weights to sow never exist; use flax's own attention_fn")
    _refuse(precision is not None, f"precision={precision!r}: sums are float32 always; leave it None")
    if implementation is not None:
        raise ValueError(f"tessera.dot_product_attention: implementation={implementation!r}: must be "
                         "None; other implementations are jax.nn's")
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    bias = bias if bias is None else jnp.asarray(bias)
    shape = query.shape
    query, key, value = (_one_batch_axis(x, 3) for x in (query, key, value))
    bias, mask = (_one_batch_axis(x, 3, shape[:-3]) for x in (bias, mask))
    if isinstance(scale, jax.core.Tracer):  # a value that only the run will know is a factor of query
        query, scale = (query.astype(jnp.float32) * scale).astype(query.dtype), 1.0
    elif isinstance(scale, (jax.Array, np.ndarray)) and scale.ndim == 0:
        scale = float(scale)
    if isinstance(scale, numbers.Real) and scale < 0:
        query, scale = -query, -scale
    query_seq_lengths, key_value_seq_lengths = (
        x if x is None else jnp.clip(jnp.asarray(x), 0, extent)  # jax.nn only compares them with positions
        for x, extent in ((query_seq_lengths, query.shape[1]), (key_value_seq_lengths, key.shape[1])))
    left, right = (-1, -1) if local_window_size is None else np.broadcast_to(local_window_size, 2).tolist()
    _refuse(local_window_size is not None and min(left, right) < 0, f"local_window_size={local_window_size}: a "
            "negative side moves the diagonal; give mask=, or for an unbounded side the number of keys")
    if bias is not None and bias.dtype not in (query.dtype, jnp.float32):
        bias = bias.astype(jnp.float32)
    if mask is not None:
        mask = jnp.asarray(mask, bool)  # flax makes masks of floats
    dropout = {} if deterministic or not dropout_rate else \
        {"dropout_p": dropout_rate, "rng_state": dropout_rng}
    o, lse = attention(
        query, key, value, softmax_scale=scale, causal=is_causal, align="top_left",
        window=None if local_window_size is None else (left, 0 if is_causal else right), bias=bias,
        keep=mask, seqlens_q=query_seq_lengths, seqlens_k=key_value_seq_lengths, return_lse=True,
        **dropout)
    o = o.reshape(*shape[:-1], o.shape[-1])
    if not return_residual:
        return o
    lse = jnp.moveaxis(jax.lax.stop_gradient(lse), 1, 2).astype(key.dtype)
    return o, lse.reshape(shape[:-1])


def _one_batch_axis(x, rank: int, batch: tuple[int, ...] | None = None):
    """x [..., and `rank` more] with one axis for those of the batch; a mask or bias is broadcast to `batch`, where that
    has several axes, and otherwise left as it is."""
    if x is None or batch is not None and len(batch) < 2:
        return x
    if batch is not None:
        x = jnp.asarray(x)
        x = x[(None,) * (rank - x.ndim)] if x.ndim < rank else x
        x = jnp.broadcast_to(x, (*batch, *x.shape[-rank:]))
    return x.reshape(-1, *x.shape[-rank:])


def _refuse(condition, why: str):
    if condition:
        raise _lib.Refused(f"tessera.dot_product_attention: {why}")
