# SPDX-License-Identifier: Apache-2.0
"""tessera.jax of fp8 q, k, v and do: eager, jitted, mapped, exported and explained, what it has no gradient of.
That values are right is for the cases (check --through jax), meshes for test_jax_sharding."""
import functools

import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import tessera.jax as tj  # noqa: E402
from jax_device import DEVICE, same  # noqa: E402

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
B, S, H, D = 3, 70, 2, 16


def normal(seed, *shape, dtype=E4M3):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def qkv(dtype=E4M3):
    return [normal(seed, B, S, H, D, dtype=dtype) for seed in range(3)]


def uniform(seed, *shape):
    return jax.random.uniform(jax.random.key(seed), shape, minval=0.5, maxval=2)


def at(x, scale):
    """The values of x [b, s, h, d] beside a scale [b, h]."""
    return x.astype(jnp.float32) * scale[:, None, :, None]


def both(q, k, v, do, scale, o_scale):
    """Both passes, with all that fp8 has: results in fp8 with scales, and their largest values."""
    scales = dict(q_scale=scale, k_scale=scale, v_scale=scale, causal=True, deterministic=True)
    o, lse, amax = tj.attention(q, k, v, **scales, out_dtype=E4M3, o_scale=o_scale, return_lse=True, return_amax=True)
    g = tj.attention_backward(do, q, k, v, o, lse, **scales, do_scale=scale, o_scale=o_scale, grad_dtype=E5M2,
                              dq_scale=o_scale, dk_scale=o_scale, dv_scale=o_scale, return_amax=True)
    return o, lse, amax, g.dq, g.dk, g.dv, g.amax_dq, g.amax_dk, g.amax_dv


ARGUMENTS = *qkv(), normal(7, B, S, H, D, dtype=E5M2), uniform(3, B, H), jnp.full((1,), 0.25)


def test_results_are_those_of_the_values():
    q, k, v, do, scale, o_scale = ARGUMENTS
    results = both(*ARGUMENTS)
    assert [x.dtype for x in results] == [E4M3, jnp.float32, jnp.float32, E5M2, E5M2, E5M2] + [jnp.float32] * 3
    values = [at(x, scale) for x in (q, k, v)]
    o, lse = tj.attention(*values, causal=True, return_lse=True)
    same(results[0], (o / o_scale).astype(E4M3))
    same(results[1], lse)
    same(results[2], jnp.abs(o).max())
    rounded = results[0].astype(jnp.float32) * o_scale
    g = tj.attention_backward(at(do, scale), *values, rounded, lse, causal=True, deterministic=True)
    for gradient, amax, name in zip(results[3:6], results[6:], ("dq", "dk", "dv")):
        expected = getattr(g, name)
        same(gradient, (expected / o_scale).astype(E5M2))
        same(amax, jnp.abs(expected).max())


def test_a_program_computes_what_eager_calls_do():
    jax.tree.map(same, jax.jit(both)(*ARGUMENTS), both(*ARGUMENTS))


def test_rows_and_blocks_have_scales():
    q, k, v = qkv()
    rows, blocks = uniform(3, B, H, S), uniform(4, B, H, 1)
    call = functools.partial(tj.attention, scale_block=(1, 128), out_dtype="float32")
    for o in (call(q, k, v, q_scale=rows, k_scale=blocks), jax.jit(call)(q, k, v, q_scale=rows, k_scale=blocks)):
        wide = tj.attention(q.astype(jnp.float32) * rows.transpose(0, 2, 1)[..., None], at(k, blocks[:, :, 0]),
                            v.astype(jnp.float32))
        same(o, wide)


def test_slices_of_one_array():
    qkv = normal(0, B, S, 3, H, D)
    parts = [tj.Slice(qkv, 2, i) for i in range(3)]
    o, lse = tj.attention(*parts, return_lse=True)
    own = [qkv[:, :, i] for i in range(3)]
    same(o, tj.attention(*own, return_lse=True)[0])  # without lse another kernel may round otherwise
    do = jnp.ones_like(o)
    g, expected = (tj.attention_backward(do, *x, o, lse, return_amax=True, deterministic=True) for x in (parts, own))
    same(g.dq, jnp.stack([expected.dq, expected.dk, expected.dv], 2))
    same(g.amax_dv, expected.amax_dv)


def test_lse_is_summed_only_where_it_is_asked_for():
    for asked_for, results in ((False, "out=o"), (True, "out=o,lse")):
        program = jax.jit(functools.partial(tj.attention, return_lse=asked_for)).lower(*qkv()).as_text()
        assert f'{results}"' in program


def test_maps():
    """One call for all examples, and one for each where the largest values are asked for."""
    q, k, v, do, scale, o_scale = ARGUMENTS
    mapped = jax.jit(jax.vmap(both, (0, 0, 0, 0, 0, None)))(
        *(x[:, None] for x in (q, k, v, do, scale)), o_scale)
    for i in range(B):
        alone = both(*(x[i:i + 1] for x in (q, k, v, do, scale)), o_scale)
        for mine, yours in zip(mapped, alone):
            same(mine[i], yours)
    plain = functools.partial(tj.attention, causal=True)
    one = jax.vmap(lambda q, k, v, scale: plain(q, k, v, q_scale=scale))
    operands = (*(x[:, None] for x in (q, k, v)), scale[:, None])
    same(one(*operands)[:, 0], plain(q, k, v, q_scale=scale))
    assert jax.jit(one).lower(*operands).as_text().count("while") == 0


def test_is_exported():
    checks = [jax.export.DisabledSafetyCheck.custom_call("tessera_attention")]
    exported = jax.export.export(jax.jit(both), platforms=[DEVICE], disabled_checks=checks)(*ARGUMENTS)
    jax.tree.map(same, exported.call(*ARGUMENTS), both(*ARGUMENTS))
    pytest.importorskip("flatbuffers")  # which JAX stores programs with
    restored = jax.export.deserialize(exported.serialize())
    jax.tree.map(same, restored.call(*ARGUMENTS), both(*ARGUMENTS))


def test_has_no_autograd():
    q, k, v = qkv()
    why = r"q.dtype=float8_e4m3fn: has no autograd.*jax.lax.stop_gradient and tessera.jax.attention_backward"

    def loss(*arrays, **keywords):
        return tj.attention(*arrays, **keywords).astype(jnp.float32).sum()
    for transform in (lambda f: f, jax.jit, jax.checkpoint):
        with pytest.raises(tj.Refused, match=why):
            jax.grad(transform(loss), (0, 1, 2))(q, k, v)
    for name in ("q_scale", "v_scale"):
        with pytest.raises(tj.Refused, match=why):
            jax.grad(lambda scale: loss(q, k, v, **{name: scale}))(jnp.ones(H))
    stopped = jax.grad(lambda x: loss(*map(jax.lax.stop_gradient, (q, k, v))) * x)(1.0)
    same(stopped, loss(q, k, v))


@pytest.mark.parametrize("keywords,why", [
    (dict(q_scale=jnp.ones(H + 1)), "q_scale"), (dict(q_scale=jnp.ones(H, jnp.bfloat16)), "q_scale.dtype"),
    (dict(o_scale=jnp.ones(1)), "o_scale"), (dict(out_dtype=E4M3, return_amax=1), "return_amax"),
    (dict(out_dtype="float64"), "out_dtype|o.dtype"), (dict(q_scale=jnp.ones((B, H, S))), "scale_block|q_scale")])
def test_bad_input(keywords, why):
    with pytest.raises(ValueError, match=why):
        tj.attention(*qkv(), **keywords)
    with pytest.raises(ValueError, match=why):
        jax.jit(lambda q, k, v: tj.attention(q, k, v, **keywords))(*qkv())


def test_scales_and_amax_are_for_fp8():
    q, k, v = qkv(jnp.bfloat16)
    with pytest.raises(ValueError, match="q_scale"):
        tj.attention(q, k, v, q_scale=jnp.ones(H))
    with pytest.raises(ValueError, match="amax"):
        tj.attention(q, k, v, return_amax=True)


def test_is_explained():
    q, k, v, do, scale, o_scale = ARGUMENTS
    scales = dict(q_scale=scale, k_scale=scale, v_scale=scale)
    forward = tj.explain(q, k, v, **scales, out_dtype=E4M3, o_scale=o_scale, return_amax=True, device="cpu")
    assert forward.backend == "cpu" and " o=e4m3" in forward.headline
    for more, said in (({}, "bwd e4m3"), (dict(do_scale=scale, o_scale=o_scale), " o=e4m3")):
        backward = tj.explain(q, k, v, **scales, **more, backward=True, grad_dtype=E5M2, dq_scale=o_scale,
                              return_amax=True, device="cpu")
        assert backward.backend == "cpu" and said in backward.headline


def test_does_not_travel():
    from tessera.context_parallel import Shards
    from tessera.jax.context_parallel import sharded
    mesh = jax.make_mesh((1,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    with pytest.raises(tj.Refused, match="q.dtype=float8_e4m3fn: does not travel"):
        sharded(mesh, "cp", shards=Shards.zigzag([S] * B, size=1))(*qkv())


def test_products_in_fp8_and_their_gradients():
    q, k, v, do = (normal(seed, B, S, H, D, dtype=jnp.bfloat16) for seed in range(4))
    words = dict(precision="fp8", causal=True, deterministic=True)

    @jax.jit
    def both_passes(q, k, v, do):
        o, pull = jax.vjp(lambda *x: tj.attention(*x, **words), q, k, v)
        return o, *pull(do)
    got = both_passes(q, k, v, do)
    o, lse = tj.attention(q, k, v, return_lse=True, **words)
    g = tj.attention_backward(do, q, k, v, o, lse, **words)
    for a, b in zip(got, (o, g.dq, g.dk, g.dv)):
        same(a, b)
    plain = tj.attention(q, k, v, causal=True)
    assert (plain != o).any()
    assert jnp.abs(plain.astype(jnp.float32) - o.astype(jnp.float32)).max() < 0.5
    mapped = jax.vmap(lambda *x: tj.attention(*(y[None] for y in x), **words)[0])(q, k, v)
    same(mapped, o)
