# SPDX-License-Identifier: Apache-2.0
# example (jax): documents of many lengths in one buffer, said in three ways
"""Documents of many lengths in one buffer, without padding and without a mask of s x s: three ways to say
it, one result. The lengths are data: one program serves all of them.

    ./dev example jax/packed
"""
import jax
import jax.numpy as jnp
import numpy as np

import tessera.jax

TOKENS, HEADS, HEAD_DIM, MAX_DOCUMENTS = 512, 4, 32, 16


@jax.jit
def by_lengths(q, k, v, cu_seqlens):
    """thd: where each document begins; unused entries repeat the end."""
    return tessera.jax.attention(q, k, v, layout="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
                                 causal=True)


@jax.jit
def by_segments(q, k, v, segment_ids):
    """bshd: the number of each token's document, as MaxText's batches have it; 0 is padding."""
    o = tessera.jax.attention(q[None], k[None], v[None], segment_ids=segment_ids[None], causal=True)[0]
    return jnp.where((segment_ids > 0)[:, None, None], o, 0)


@jax.jit
def by_ranges(q, k, v, starts):
    """bshd: the first key that each token may see."""
    ranges = jnp.stack([starts, jnp.full_like(starts, TOKENS)], axis=-1)[None, None]
    return tessera.jax.attention(q[None], k[None], v[None], key_ranges=ranges, causal=True)[0]


def documents(rng):
    """Lengths of documents that fill most of the buffer."""
    lengths = []
    while len(lengths) < MAX_DOCUMENTS and (n := int(rng.integers(10, 80))) + sum(lengths) <= TOKENS:
        lengths.append(n)
    return lengths


def main():
    rng = np.random.default_rng(0)
    q, k, v = (jax.random.normal(jax.random.key(i), (TOKENS, HEADS, HEAD_DIM)) for i in range(3))
    worst = 0.0
    for _ in range(3):
        lengths = documents(rng)
        cu = np.full(MAX_DOCUMENTS + 1, sum(lengths), np.int32)
        cu[:len(lengths) + 1] = np.cumsum([0, *lengths])
        segments, starts = np.zeros((2, TOKENS), np.int32)
        for n, length in enumerate(lengths):
            segments[cu[n]:cu[n + 1]], starts[cu[n]:cu[n + 1]] = n + 1, cu[n]
        starts[cu[-1]:] = np.arange(cu[-1], TOKENS) + 1  # padding sees nothing
        packed = by_lengths(q, k, v, cu)
        for other in (by_segments(q, k, v, segments), by_ranges(q, k, v, starts)):
            worst = max(worst, float(abs(packed - other).max()))
        print(f"{len(lengths)} documents of {sum(lengths)} tokens: the largest difference is {worst:.1e}")
    programs = [function._cache_size() for function in (by_lengths, by_segments, by_ranges)]
    print(f"programs compiled: {sum(programs)}")
    return worst, programs


if __name__ == "__main__":
    main()
