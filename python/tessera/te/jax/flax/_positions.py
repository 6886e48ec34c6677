# SPDX-License-Identifier: Apache-2.0
"""What tells a query where a key is: rotary embeddings, and T5's relative biases."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from .._words import error


def rotary_pos_emb(x, windows: tuple[int, int], transpose_batch_sequence: bool,
                   group_method: str = "consecutive", start=0):
    """x [b, s, ..., h, d], or [s, b, ...], with pairs of coordinates rotated by position / t, where
    t goes from windows[0] to windows[1] by powers. Pairs are (2i, 2i + 1) if "consecutive", (i, i +
    d/2) if "alternate". `start` is the position of the first row. Computes in fp32; returns x's
    dtype."""
    method = group_method.lower().strip().replace("-", "").replace("_", "")
    if method not in ("consecutive", "alternate"):
        raise error("group_method", repr(group_method), 'must be "consecutive" or "alternate"',
                    "rotary_pos_emb")
    d = x.shape[-1]
    low, high = windows
    times = low * (high / low) ** (2 * np.arange(d // 2, dtype=np.float32) / d)
    axis = 0 if transpose_batch_sequence else 1
    positions = start + jnp.arange(x.shape[axis], dtype=jnp.float32)
    angle = (positions[:, None] / times).reshape(
        *(x.shape[axis] if i == axis else 1 for i in range(x.ndim - 1)), d // 2)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    wide = x.astype(jnp.float32)
    if method == "alternate":
        a, b = jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = wide[..., ::2], wide[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    return rotated.astype(x.dtype)


class RelativePositionBiases(nn.Module):
    """T5's bias of scores: one learned number for each head and each bucket of distances, of which
    the nearer half have one distance each and the others grow as logarithms up to max_distance."""
    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Callable = nn.linear.default_embed_init
    embedding_axes: tuple[str, ...] = ("heads", "relpos_buckets")
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True):
        """[1, num_attention_heads, q_seqlen, k_seqlen]; unless bidirectional, later keys share the
        bucket of distance 0."""
        distance = np.arange(q_seqlen)[:, None] - np.arange(k_seqlen)
        buckets, first = self.num_buckets, 0
        if bidirectional:
            buckets //= 2
            first = np.where(distance < 0, buckets, 0)
            distance = np.abs(distance)
        distance = np.maximum(distance, 0)
        exact = buckets // 2
        far = np.maximum(distance, 1).astype(np.float32) / exact + np.finfo(np.float32).eps
        far = np.log(far) / np.log(self.max_distance / exact) * (buckets - exact)
        bucket = np.where(distance < exact, distance,
                          np.minimum(exact + far.astype(np.int32), buckets - 1))
        table = self.param("rel_embedding",
                           nn.with_logical_partitioning(self.embedding_init, self.embedding_axes),
                           (self.num_attention_heads, self.num_buckets), self.dtype)
        return jnp.take(table, first + bucket, axis=1)[None]
