# SPDX-License-Identifier: Apache-2.0
"""tessera.jax on a mesh of four virtual CPU devices: values, gradients, dropout's mask, and the number
of collectives in the compiled program. `./dev test jax` gives this file a process of its own."""
import collections
import logging
import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")
if jax.device_count() != 4:
    pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=4", allow_module_level=True)

import tessera.jax as tj  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P  # noqa: E402

jnp = jax.numpy
AUTO = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
B, S, H, D = 4, 12, 4, 8
BOTH = P("data", None, "model")
COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def qkv(hk=H):
    return normal(0, B, S, H, D), normal(1, B, S, hk, D), normal(2, B, S, hk, D)


def put(x, spec=P(), mesh=AUTO):
    return jax.device_put(x, NamedSharding(mesh, spec))


def collectives(function, *arguments) -> dict[str, int]:
    compiled = jax.jit(function).lower(*arguments).compile()
    return dict(collections.Counter(COLLECTIVE.findall(compiled.as_text())))


def compare(ours, theirs, exact=False):
    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_array_equal(a, b) if exact else np.testing.assert_allclose(a, b, 1e-4, 2e-5)
    jax.tree.map(one, ours, theirs)


def causal(q, k, v):
    return tj.attention(q, k, v, causal=True, return_lse=True)


def gradients(function, count=3):
    def loss(*x):
        return sum((y * normal(50 + i, *y.shape)).sum() for i, y in enumerate(function(*x)))
    return lambda *x: jax.grad(loss, tuple(range(count)))(*x)


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    jax.clear_caches()
    yield
    jax.config.update("jax_use_shardy_partitioner", before)
    jax.clear_caches()


SPLITS = {"batch": P("data"), "heads": P(None, None, "model"), "both": BOTH,
          "batch over all": P(("data", "model"))}


@pytest.mark.parametrize("hk", [4, 2])
@pytest.mark.parametrize("split", SPLITS)
def test_batch_and_heads_need_no_communication(split, hk, partitioner):
    arrays = qkv(hk)
    placed = [put(x, SPLITS[split]) for x in arrays]
    for function in (causal, gradients(causal)):
        assert collectives(function, *placed) == {}
        results = jax.jit(function)(*placed)
        compare(results, function(*arrays), exact=True)
    assert causal(*placed)[0].sharding.spec == SPLITS[split]


def test_one_kv_head_is_on_every_shard(partitioner):
    arrays = qkv(1)
    placed = [put(arrays[0], BOTH), *(put(x, P("data")) for x in arrays[1:])]
    assert collectives(causal, *placed) == {}
    assert collectives(gradients(causal), *placed) == {"all-reduce": 1}  # dk and dv, over heads
    compare(jax.jit(gradients(causal))(*placed), gradients(causal)(*arrays))


def test_gradients_that_sum_over_shards(partitioner):
    arrays = (*qkv(), normal(3, H), normal(4, 1, 1, S, S), abs(normal(5, H)))
    placed = [*(put(x, BOTH) for x in arrays[:3]), put(arrays[3], P("model")), *map(put, arrays[4:])]

    def function(q, k, v, sink, bias, slopes):
        return tj.attention(q, k, v, sink=sink, bias=bias, alibi_slopes=slopes, causal=True,
                            return_max_logit=True)
    compare(jax.jit(function)(*placed), function(*arrays))
    compare(jax.jit(gradients(function, 6))(*placed), gradients(function, 6)(*arrays))
    assert not {"all-gather", "all-to-all"} & set(collectives(function, *placed))


def test_what_goes_with_the_batch_and_the_heads():
    """Lengths, ranges, segments and masks are split like q; nothing is gathered."""
    q, k, v = qkv()
    lengths = jnp.array([12, 3, 0, 7])
    keywords = {"seqlens_q": lengths, "seqlens_k": lengths, "segment_ids": jnp.ones((B, S), jnp.int32),
                "keep": normal(6, B, H, S, S) > -1}
    specs = {"seqlens_q": P("data"), "segment_ids": P("data"), "keep": P("data", "model")}

    def function(q, k, v, keywords):
        return tj.attention(q, k, v, causal=True, align="top_left", **keywords)
    placed = {name: put(x, specs.get(name, P("data"))) for name, x in keywords.items()}
    arguments = [put(x, BOTH) for x in (q, k, v)]
    assert collectives(function, *arguments, placed) == {}
    compare(function(*arguments, placed), function(q, k, v, keywords), exact=True)


def test_heads_that_do_not_divide_stay_whole(caplog):
    arrays = qkv(2)
    placed = [put(arrays[0], P(None, None, ("data", "model"))), *map(put, arrays[1:])]
    with caplog.at_level(logging.INFO, "tessera.sharding"):
        compare(jax.jit(causal)(*placed), causal(*arrays), exact=True)
    assert "heads are whole on every shard" in caplog.text


def test_a_split_sequence_is_gathered_and_logged(caplog):
    arrays = qkv()
    placed = [put(arrays[0], P(None, "data")), *map(put, arrays[1:])]
    with caplog.at_level(logging.INFO, "tessera.sharding"):
        assert collectives(causal, *placed) == {"all-gather": 1}
    assert "q split along an axis that is neither batch nor heads: gathered" in caplog.text
    compare(jax.jit(causal)(*placed), causal(*arrays), exact=True)


def test_packed_sequences_split_their_heads():
    q, cu = normal(0, 40, H, D), jnp.array([0, 9, 40])

    def function(q):
        return tj.attention(q, q, q, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True,
                            return_lse=True)
    def row(q):
        return tj.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)
    for function, q, axes in ((function, q, (None, "model")), (row, q[None], (None, None, "model"))):
        placed = put(q, P(*axes))
        assert collectives(gradients(function, 1), placed) == {}
        compare(jax.jit(gradients(function, 1))(placed), gradients(function, 1)(q), exact=True)


# ---- dropout: the mask of one device, whatever the mesh ----

def dropped(q, k, v, key):
    return tj.attention(q, k, v, causal=True, dropout_p=0.4, rng_state=key, return_lse=True)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_dropout_is_that_of_one_device(split, mesh):
    arrays, key = qkv(), jax.random.key(5)
    placed = [put(x, SPLITS[split], mesh) for x in arrays]
    compare(jax.jit(dropped)(*placed, key), dropped(*arrays, key), exact=True)
    compare(jax.jit(gradients(dropped))(*placed, key), gradients(dropped)(*arrays, key), exact=True)


def test_dropout_of_a_part_of_a_larger_problem():
    """A caller's own (first, stride) is counted on."""
    arrays, state = qkv(), (7, 3, 2, 9)
    function = jax.jit(lambda *x: tj.attention(*x, dropout_p=0.4, rng_state=state))
    compare(function(*(put(x, BOTH) for x in arrays)), function(*arrays), exact=True)


# ---- shard_map, explicit axes ----

@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    arrays, sink = qkv(), normal(3, H)

    def function(q, k, v, sink):
        return (tj.attention(q, k, v, sink=sink, causal=True),)
    mapped = jax.shard_map(function, mesh=AUTO, in_specs=(BOTH, BOTH, BOTH, P("model")),
                           out_specs=(BOTH,), check_vma=check_vma)
    compare(mapped(*arrays, sink), function(*arrays, sink), exact=True)
    compare(jax.jit(gradients(mapped, 4))(*arrays, sink), gradients(function, 4)(*arrays, sink))
    vmapped = jax.vmap(mapped, in_axes=(0, 0, 0, None))
    compare(vmapped(*(jnp.stack([x, x + 1]) for x in arrays), sink)[0][0], mapped(*arrays, sink)[0])


def test_inside_shard_map_over_some_axes():
    arrays = qkv()
    mapped = jax.shard_map(causal, mesh=AUTO, in_specs=(P("data"),) * 3, out_specs=(P("data"),) * 2,
                           axis_names={"data"})
    placed = [put(x, BOTH) for x in arrays]
    assert collectives(mapped, *placed) == {}
    compare(jax.jit(mapped)(*placed), causal(*arrays), exact=True)
    compare(jax.jit(gradients(mapped))(*placed), gradients(causal)(*arrays), exact=True)


@pytest.mark.parametrize("in_context", [True, False])
def test_explicit_axes_keep_their_specs(in_context):
    arrays = qkv()
    placed = [put(x, BOTH, EXPLICIT) for x in arrays]
    with jax.set_mesh(EXPLICIT) if in_context else jax.set_mesh(jax.sharding.get_mesh()):
        o, lse = jax.jit(causal)(*placed)
        assert jax.typeof(o).sharding.spec == P("data", None, "model", None)
        assert jax.typeof(lse).sharding.spec == P("data", "model", None)
        results = jax.jit(gradients(causal))(*placed)
        assert all(jax.typeof(x).sharding.spec == P("data", None, "model", None) for x in results)
        assert collectives(gradients(causal), *placed) == {}
    compare((o, lse), causal(*arrays), exact=True)
    compare(results, gradients(causal)(*arrays), exact=True)


def test_explicit_axes_and_what_is_on_every_shard():
    arrays = (*qkv(1), normal(3, H))

    def function(q, k, v, sink):
        return tj.attention(q, k, v, sink=sink, causal=True, return_max_logit=True)
    placed = [put(arrays[0], BOTH, EXPLICIT), *(put(x, P(), EXPLICIT) for x in arrays[1:])]
    compare(jax.jit(function)(*placed), function(*arrays))
    compare(jax.jit(gradients(function, 4))(*placed), gradients(function, 4)(*arrays))
    o, lse = tj.attention(*arrays[:3], return_lse=True)
    do = normal(4, *o.shape)
    expected = tj.attention_backward(do, *arrays[:3], o, lse)
    split = [put(x, BOTH, EXPLICIT) for x in (do, arrays[0])]
    given = tj.attention_backward(split[0], split[1], *(put(x, P(), EXPLICIT) for x in arrays[1:3]),
                                  put(o, BOTH, EXPLICIT), put(lse, P("data", "model"), EXPLICIT))
    compare(given, expected)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("hk", [1, 2, 4])
def test_fp8_with_scales_and_largest_values(mesh, hk):
    """Scales are split like heads, amax is that of all shards, and gradients that are sums over heads are
    rounded once."""
    q, k, v, do = (x.astype(jnp.float8_e4m3fn) for x in (*qkv(hk), normal(7, B, S, H, D)))
    scale, kv_scale = (jnp.arange(1.0, 1 + B * h).reshape(B, h) / B / h for h in (H, hk))

    def forward(q, k, v, scale, kv_scale):
        return tj.attention(q, k, v, q_scale=scale, k_scale=kv_scale, v_scale=kv_scale, causal=True,
                            return_lse=True, return_amax=True)

    def backward(do, q, k, v, o, lse, scale, kv_scale):
        return tj.attention_backward(do, q, k, v, o, lse, q_scale=scale, k_scale=kv_scale, v_scale=kv_scale,
                                     do_scale=scale, causal=True, grad_dtype="float8_e5m2", return_amax=True)
    o, lse, amax = forward(q, k, v, scale, kv_scale)
    kv = BOTH if hk > 1 else P("data")
    q, k, v, do, scale, kv_scale, placed_o, placed_lse = (put(x, spec, mesh) for x, spec in (
        (q, BOTH), (k, kv), (v, kv), (do, BOTH), (scale, P("data", "model")), (kv_scale, P(*kv[:1], *kv[2:])),
        (o, BOTH), (lse, P("data", "model"))))
    compare(jax.jit(forward)(q, k, v, scale, kv_scale), (o, lse, amax), exact=True)
    arguments = do, q, k, v, placed_o, placed_lse, scale, kv_scale
    if mesh is EXPLICIT and hk == 1:
        with pytest.raises(ValueError, match="hk 1 where no gradient of k or v is in fp8"):
            backward(*arguments)
        return
    compare(jax.jit(backward)(*arguments), backward(*map(put, map(np.asarray, arguments))), exact=True)


def test_explicit_axes_that_would_need_communication():
    q, k, v = (put(x, P(), EXPLICIT) for x in qkv())
    with pytest.raises(ValueError, match=r"q\.sharding\.spec=.*only the batch and the heads may be split"):
        tj.attention(put(q, P(None, "data"), EXPLICIT), k, v)
    with pytest.raises(ValueError, match=r"k\.sharding\.spec=.*must be split as q is"):
        tj.attention(put(q, P("data"), EXPLICIT), put(k, P("model"), EXPLICIT), v)
    with pytest.raises(ValueError, match=r"hq=4 and hk=2 must be multiples"):
        tj.attention(put(q, P(None, None, ("data", "model")), EXPLICIT), k[:, :, :2], v[:, :, :2])


def test_random_problems_on_every_mesh():
    """jit, grad and a mesh: what one device computes."""
    rng = np.random.default_rng(0)
    for _ in range(12):
        hk = int(rng.choice([1, 2, 4]))
        arrays = qkv(hk)
        keywords = {}
        if rng.random() < 0.5:
            keywords["window"] = (int(rng.integers(0, 9)), 0)
        if rng.random() < 0.3:
            keywords["softcap"] = 3.0
        if rng.random() < 0.3:
            keywords["bias"] = normal(7, int(rng.choice([1, B])), int(rng.choice([1, H])), S, S)
        if rng.random() < 0.3:
            keywords |= {"dropout_p": 0.3, "rng_state": (1, 2)}
        spec = SPLITS[str(rng.choice(list(SPLITS)))]
        kv = spec if hk > 1 else P(*spec[:1])

        def function(q, k, v, keywords=keywords):
            return tj.attention(q, k, v, return_lse=True, **keywords)
        for mesh in (AUTO, EXPLICIT):
            placed = [put(arrays[0], spec, mesh), *(put(x, kv, mesh) for x in arrays[1:])]
            compare(jax.jit(gradients(function))(*placed), gradients(function)(*arrays))
