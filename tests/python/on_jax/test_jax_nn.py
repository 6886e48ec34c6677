# SPDX-License-Identifier: Apache-2.0
"""tessera.jax.nn where flax and jax.nn take more than one batch axis and a number."""
import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import jax_device  # noqa: E402
import tessera.jax as tj  # noqa: E402
from tessera.jax import nn  # noqa: E402


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def same(a, b):
    # Sums of up to 35 products of values up to 4, in orders that differ with the CPU's vectors: 2.3e-6 was seen.
    jax_device.same(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mask", [None, (5, 7), (1, 1, 5, 7), (3, 4, 5, 7), (2, 1, 1, 5, 7), (2, 3, 4, 5, 7)], ids=str)
def test_several_batch_axes(mask):
    """Those of flax.linen.MultiHeadDotProductAttention: [..., t, n, h], masks [..., n, t, s]."""
    q, k, v = normal(0, 2, 3, 5, 4, 8), normal(1, 2, 3, 7, 4, 8), normal(2, 2, 3, 7, 4, 8)
    mask = None if mask is None else normal(3, *mask) > -1
    o, lse = nn.dot_product_attention(q, k, v, mask=mask, return_residual=True)
    assert o.shape == q.shape and lse.shape == q.shape[:-1]
    wide = None if mask is None else jnp.broadcast_to(mask, (2, 3, 4, 5, 7))
    for i in range(2):
        same(o[i], jax.nn.dot_product_attention(q[i], k[i], v[i], mask=None if wide is None else wide[i]))
    bias = normal(4, 3, 4, 5, 7)
    same(nn.dot_product_attention(q, k, v, bias=bias)[1], jax.nn.dot_product_attention(q[1], k[1], v[1], bias=bias))


def test_flax_modules_with_several_batch_axes():
    linen = pytest.importorskip("flax.linen")
    x = normal(0, 2, 3, 5, 16)
    mask = linen.make_causal_mask(jnp.ones((2, 3, 5)))
    theirs, ours = (linen.MultiHeadDotProductAttention(num_heads=4, **more)
                    for more in ({}, {"attention_fn": nn.dot_product_attention}))
    parameters = theirs.init(jax.random.key(0), x)
    same(ours.apply(parameters, x, mask=mask), theirs.apply(parameters, x, mask=mask))


@pytest.mark.parametrize("scale", [0.3, np.float32(0.3), np.array(0.3), jnp.float32(0.3), jnp.array(0.3)])
def test_a_scale_is_a_scalar_of_any_kind(scale):
    q = normal(0, 2, 5, 4, 8)
    expected = jax.nn.dot_product_attention(q, q, q, scale=0.3)
    same(nn.dot_product_attention(q, q, q, scale=scale), expected)
    same(tj.attention(q, q, q, softmax_scale=scale), expected)
    same(jax.jit(lambda q: tj.attention(q, q, q, softmax_scale=scale))(q), expected)
    same(jax.jit(lambda q, scale: nn.dot_product_attention(q, q, q, scale=scale))(q, scale), expected)
    gradients = (jax.grad(lambda scale: (f(q, q, q, scale=scale) ** 2).sum())(0.3)
                 for f in (nn.dot_product_attention, jax.nn.dot_product_attention))
    np.testing.assert_allclose(*gradients, rtol=1e-4)


@pytest.mark.parametrize("scale", [-0.3, np.float32(-0.3), np.array(-0.3), jnp.float32(-0.3), -1])
def test_a_scale_may_be_negative(scale):
    q, k, v = normal(0, 2, 5, 4, 8), normal(1, 2, 7, 2, 8), normal(2, 2, 7, 2, 8)

    def loss(f):
        return lambda q, k, v: (f(q, k, v, scale=scale, is_causal=True) ** 2).sum()

    same(nn.dot_product_attention(q, k, v, scale=scale), jax.nn.dot_product_attention(q, k, v, scale=scale))
    for ours, theirs in zip(*(jax.grad(loss(f), (0, 1, 2))(q, k, v)
                              for f in (nn.dot_product_attention, jax.nn.dot_product_attention)), strict=True):
        same(ours, theirs)


@pytest.mark.parametrize("name, lengths", [("key_value_seq_lengths", [9, 3]), ("key_value_seq_lengths", [7, 100]),
                                           ("query_seq_lengths", [9, 3]), ("query_seq_lengths", [-2, 5])])
def test_lengths_are_compared_with_positions(name, lengths):
    q, k = normal(0, 2, 5, 4, 8), normal(1, 2, 7, 4, 8)
    lengths = jnp.array(lengths, jnp.int32)

    def run(f):
        return lambda lengths: f(q, k, k, **{name: lengths})

    same(run(nn.dot_product_attention)(lengths), run(jax.nn.dot_product_attention)(lengths))
    same(jax.jit(run(nn.dot_product_attention))(lengths), run(jax.nn.dot_product_attention)(lengths))


@pytest.mark.parametrize("words", [
    dict(bias=0.5), dict(bias=[0.1 * i for i in range(7)]), dict(bias=np.arange(35.).reshape(5, 7) / 9),
    dict(mask=[True, False] * 3 + [True]), dict(local_window_size=[2, 1]), dict(local_window_size=(np.int64(2), 0)),
    dict(key_value_seq_lengths=[4, 6])], ids=str)
def test_arguments_are_whatever_is_like_an_array(words):
    q, k = normal(0, 2, 5, 4, 8), normal(1, 2, 7, 4, 8)
    same(nn.dot_product_attention(q, k, k, **words), jax.nn.dot_product_attention(q, k, k, **words))


@pytest.mark.parametrize("window", [-1, (-1, 2), (2, -1)])
def test_a_window_that_moves_the_diagonal_is_refused(window):
    """jax.nn takes a side of -1 literally: keys up to i - 1. Elsewhere in tessera it is unbounded."""
    q = normal(0, 2, 5, 4, 8)
    with pytest.raises(tj.Refused, match=r"local_window_size=.*: a negative side .* mask="):
        nn.dot_product_attention(q, q, q, local_window_size=window)
