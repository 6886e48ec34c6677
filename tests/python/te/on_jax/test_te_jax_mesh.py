# SPDX-License-Identifier: Apache-2.0
"""tessera.te.jax on a mesh of four devices, which a process has from its start or never: the tests
below run in one of their own."""

import contextlib
import functools
import itertools
import os
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import linen as nn  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import tessera.jax  # noqa: E402
from tessera.jax.context_parallel._ring import is_compiled  # noqa: E402
from tessera.te.jax import autocast, sharding  # noqa: E402
from tessera.te.jax import cpp_extensions as tex  # noqa: E402
from tessera.te.jax.attention import (  # noqa: E402
    AttnBiasType, AttnMaskType, AttnSoftmaxType, CPStrategy, QKVLayout, ReorderStrategy,
    SequenceDescriptor, fused_attn, inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing)
from tessera.te.jax.flax import (  # noqa: E402
    DotProductAttention, MultiHeadAttention, extend_logical_axis_rules)

DEVICES = 4
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
KEY = jax.random.key(1)
on_a_mesh = pytest.mark.skipif(jax.device_count() < DEVICES, reason="test_on_four_devices runs it")


@pytest.fixture(autouse=True)
def where_rings_are_compiled(request):
    if "[ring" in request.node.name and not is_compiled():
        pytest.skip("XLA's compiler for CPUs dies of a ring in this JAX")


@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="is what it starts")
def test_on_four_devices():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS":
                   f"--xla_force_host_platform_device_count={DEVICES} {os.environ.get('XLA_FLAGS', '')}"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:xdist", "-v", __file__],
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


def mesh(names=("dp", "tp")):
    return Mesh(np.array(jax.devices()[:DEVICES]).reshape(2, 2), names)


def resource(**names):
    return sharding.MeshResource(**{"dp_resource": "dp", "tp_resource": "tp", **names})


def collectives(compiled) -> list[str]:
    text = compiled.as_text()
    return [name for name in COLLECTIVES if f" {name}(" in text or f" {name}-start(" in text]


# ---- helpers ----

@on_a_mesh
def test_axes_of_the_resource():
    assert not sharding.is_mesh_available() and sharding.get_num_devices_in_mesh() == 1
    assert sharding.get_sharding_map_logic_axis_to_mesh_axis() == {}
    with jax.set_mesh(mesh()), sharding.global_shard_guard(resource()):
        axes = sharding.get_sharding_map_logic_axis_to_mesh_axis()
        assert axes[sharding.BATCH_AXES] == "dp" and axes[sharding.HEAD_AXES] == "tp"
        assert axes[sharding.W_TP_AXES] == "tp" and axes[sharding.SEQLEN_AXES] is None
        assert sharding.get_mesh_axis_size("tp") == 2 and sharding.get_num_devices_in_mesh() == 4
        assert sharding.dp_or_fsdp_axis_size() == 2 and sharding.tpsp_axis_size() == 1
        assert sharding.get_active_resource_axis("dp_resource") == "dp"
        assert sharding.get_active_resource_axis("cp_resource") is None
        with pytest.raises(ValueError, match="axis='pp': must be an axis of the mesh"):
            sharding.get_mesh_axis_size("pp")
        with sharding.global_shard_guard(resource(fsdp_resource="tp", tp_resource=None)):
            axes = sharding.get_sharding_map_logic_axis_to_mesh_axis()
            assert axes[sharding.BATCH_AXES] == "tp" and axes[sharding.HEAD_AXES] is None
        assert sharding.global_mesh_resource() == resource()
    with pytest.raises(ValueError, match="mesh_resource=None: is not set"):
        sharding.global_mesh_resource()
    both = sharding.MeshResource(tp_resource="tp", tpsp_resource="tpsp")
    with jax.set_mesh(mesh(("tp", "tpsp"))), sharding.global_shard_guard(both):
        with pytest.raises(ValueError, match="tp_resource, tpsp_resource"):
            sharding.global_mesh_resource()


@on_a_mesh
@pytest.mark.filterwarnings("ignore:.*mesh:DeprecationWarning")
def test_mesh_of_a_with_block():
    with mesh(), sharding.global_shard_guard(resource()):
        assert sharding.get_all_mesh_axes() == ("dp", "tp")
        split = jax.jit(lambda x: sharding.with_sharding_constraint_by_logical_axes(
            x, (sharding.BATCH_AXES,)))(jnp.zeros(4))
    assert split.sharding.spec == PartitionSpec("dp")


@on_a_mesh
def test_constraints_follow_the_resource():
    x = jnp.zeros((4, 6, 8))
    names = (sharding.BATCH_AXES, None, sharding.HEAD_AXES)
    assert sharding.with_sharding_constraint_by_logical_axes(x, names) is x

    def constrained(x):
        return sharding.with_sharding_constraint_by_logical_axes(x, names)
    with jax.set_mesh(mesh()), sharding.global_shard_guard(resource()):
        assert jax.jit(constrained)(x).sharding.spec == PartitionSpec("dp", None, "tp")
        inside = jax.shard_map(constrained, mesh=mesh(), in_specs=PartitionSpec("dp", None, "tp"),
                               out_specs=PartitionSpec("dp", None, "tp"))
        assert jax.jit(inside)(x).shape == x.shape  # axes that a shard_map took constrain nothing
        rules = extend_logical_axis_rules((("embed", "tp"),))
        assert ("embed", "tp") in rules and (sharding.BATCH_AXES, "dp") in rules
        with nn.logical_axis_rules(rules):
            assert jax.jit(constrained)(x).sharding.spec == PartitionSpec("dp", None, "tp")
        with pytest.raises(ValueError, match="rules=.*must be 'dp'"):
            extend_logical_axis_rules(((sharding.BATCH_AXES, "tp"),))


@on_a_mesh
def test_sums_over_devices():
    def reduced(x):
        return (sharding.all_reduce_sum_along_dp_fsdp(x, mesh()),
                sharding.all_reduce_max_along_all_axes_except_PP(x, mesh()))
    with jax.set_mesh(mesh()), sharding.global_shard_guard(resource()):
        run = jax.shard_map(reduced, mesh=mesh(), in_specs=PartitionSpec("dp", "tp"),
                            out_specs=(PartitionSpec(None, "tp"), PartitionSpec()))
        total, largest = run(jnp.arange(4.0).reshape(2, 2))
    assert total.tolist() == [[2, 4]] and largest.tolist() == [[3]]


@on_a_mesh
def test_autocast_carries_the_resource():
    with jax.set_mesh(mesh()), autocast(enabled=False, mesh_resource=resource()):
        assert sharding.global_mesh_resource() == resource()
    with pytest.raises(tessera.jax.Refused, match="enabled=True: tessera.te does not have FP8"):
        with autocast(enabled=True):
            pass


# ---- attention ----

@on_a_mesh
@pytest.mark.parametrize("layout", [QKVLayout.BS3HD, QKVLayout.BSHD_BS2HD,
                                    QKVLayout.BSHD_BSHD_BSHD])
def test_batch_and_heads_are_split_without_communication(layout):
    q, k, v = (jax.random.normal(key, (4, 12, 4, 8)) for key in jax.random.split(KEY, 3))
    qkv = (jnp.stack([q, k, v], 2),) if layout.is_qkvpacked() else \
        (q, jnp.stack([k, v], 2)) if layout.is_kvpacked() else (q, k, v)
    lengths = SequenceDescriptor.from_seqlens(jnp.asarray([12, 5, 9, 1], jnp.int32))

    def loss(qkv, lengths):
        out = fused_attn(qkv, None, lengths, KEY, AttnBiasType.NO_BIAS,
                         AttnMaskType.PADDING_CAUSAL_MASK, layout, AttnSoftmaxType.VANILLA_SOFTMAX,
                         0.3, 0.2, True)
        return out
    both = jax.jit(lambda qkv, lengths, d: (lambda out, pull: (out, pull(d)[0]))(
        *jax.vjp(lambda qkv: loss(qkv, lengths), qkv)))
    d = jax.random.normal(KEY, q.shape)
    expected = both(qkv, lengths, d)
    devices = mesh()
    with jax.set_mesh(devices), sharding.global_shard_guard(resource()):
        def placed(x):
            middle = (None,) * (x.ndim - 3)
            spec = PartitionSpec("dp", *middle, "tp", None) if x.ndim > 1 else PartitionSpec("dp")
            return jax.device_put(x, NamedSharding(devices, spec if x.size else PartitionSpec()))
        arguments = jax.tree.map(placed, (qkv, lengths, d))
        assert collectives(both.lower(*arguments).compile()) == []
        results = both(*arguments)
    for mine, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected)):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@on_a_mesh
def test_module_on_a_mesh():
    """Megatron's split: one sum over heads' devices behind the output projection, and no other."""
    x = jax.random.normal(KEY, (4, 12, 32))
    module = MultiHeadAttention(8, 4, enable_rotary_pos_emb=True)
    variables = nn.meta.unbox(module.init(KEY, x, x))
    expected, _ = module.apply(variables, x, x)
    devices = mesh()
    with jax.set_mesh(devices), sharding.global_shard_guard(resource()):
        specs = {"qkv": {"kernel": PartitionSpec(None, None, "tp")},
                 "out": {"kernel": PartitionSpec("tp", None)}}

        def placed(path, p):
            spec = specs.get(path[-2].key, {}).get(path[-1].key, PartitionSpec())
            return jax.device_put(p, NamedSharding(devices, spec))
        placed_variables = jax.tree.map_with_path(placed, variables)
        split = jax.device_put(x, NamedSharding(devices, PartitionSpec("dp")))
        run = jax.jit(lambda variables, x: module.apply(variables, x, x)[0])
        compiled = run.lower(placed_variables, split).compile()
        assert collectives(compiled) == ["all-reduce"]
        np.testing.assert_allclose(run(placed_variables, split), expected, atol=1e-5)


def split(named):
    """A mesh whose axis cp splits sequences, being named or the resource's."""
    resource = sharding.MeshResource(dp_resource="dp", cp_resource=None if named else "cp")
    stack = contextlib.ExitStack()
    stack.enter_context(jax.set_mesh(mesh(("dp", "cp"))))
    stack.enter_context(sharding.global_shard_guard(resource))
    return stack


PLAIN = dict(attn_bias_type=AttnBiasType.NO_BIAS, attn_mask_type=AttnMaskType.CAUSAL_MASK,
             qkv_layout=QKVLayout.BSHD_BSHD_BSHD, softmax_type=AttnSoftmaxType.VANILLA_SOFTMAX,
             scaling_factor=0.3, dropout_probability=0.0, is_training=True)
CP_CASES = {
    "balanced, dropout": dict(dropout_probability=0.4, context_parallel_causal_load_balanced=True),
    "window, learnable sink, largest logit": dict(
        window_size=(9, 0), softmax_type=AttnSoftmaxType.LEARNABLE_SOFTMAX, return_max_logit=True),
    "ring, balanced, dropout, learnable sink": dict(
        dropout_probability=0.4, softmax_type=AttnSoftmaxType.LEARNABLE_SOFTMAX,
        context_parallel_causal_load_balanced=True, context_parallel_strategy=CPStrategy.RING),
    "ring, window, largest logit": dict(
        window_size=(9, 0), return_max_logit=True, context_parallel_strategy=CPStrategy.RING),
    "packed, no mask": dict(qkv_layout=QKVLayout.BS3HD, attn_mask_type=AttnMaskType.NO_MASK,
                            softmax_type=AttnSoftmaxType.OFF_BY_ONE_SOFTMAX,
                            context_parallel_strategy=CPStrategy.ALL_GATHER),
}


@on_a_mesh
@pytest.mark.parametrize("name", CP_CASES)
def test_a_sequence_over_an_axis(name):
    """The results and gradients of one device, on the devices' order of tokens."""
    given = PLAIN | CP_CASES[name]
    balanced = given.get("context_parallel_causal_load_balanced")
    shape = (4, 24, 3, 4, 8) if given["qkv_layout"] == QKVLayout.BS3HD else (4, 24, 4, 8)
    qkv = tuple(jax.random.normal(jax.random.key(i), shape) for i in range(1 if len(shape) == 5 else 3))
    offset = jnp.arange(4.0).reshape(1, 4, 1, 1) if "sink" in name else None

    def loss(qkv, offset, there=lambda x: x, back=lambda x: x, **axis):
        results = fused_attn(tuple(map(there, qkv)), None, SequenceDescriptor(), jax.random.key(3),
                             softmax_offset=offset, **given, **axis)
        o, *peak = results if isinstance(results, tuple) else (results,)
        o = back(o)
        return (o * jax.random.normal(KEY, o.shape)).sum(), (o, *peak)
    wanted = (0,) if offset is None else (0, 1)
    expected = jax.jit(jax.grad(loss, wanted, has_aux=True))(qkv, offset)
    order = (ReorderStrategy.DualChunkSwap, 2, 1)
    moves = {} if not balanced else {"there": lambda x: reorder_causal_load_balancing(x, *order),
                                     "back": lambda x: inverse_reorder_causal_load_balancing(x, *order)}
    with split(named=bool(offset is None)):
        run = jax.grad(functools.partial(loss, **moves, context_parallel_axis="cp" if offset is None
                                         else ""), wanted, has_aux=True)
        found = jax.jit(run)(qkv, offset)
        program = jax.jit(run).lower(qkv, offset).as_text()
    assert ("stablehlo.collective_permute" in program) == name.startswith("ring")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 2e-5), found, expected)


def packed(order):
    """Ids of two rows of 24 tokens with gaps, and positions in their segments, in the devices' order."""
    lengths = [[(1, 7), (0, 2), (2, 9), (3, 4), (0, 2)], [(1, 1), (2, 13), (3, 10)]]
    ids = jnp.asarray([[n for n, length in row for _ in range(length)] for row in lengths], jnp.int32)
    at = jnp.asarray([[i for _, length in row for i in range(length)] for row in lengths], jnp.int32)
    return SequenceDescriptor.from_segment_ids_and_pos(order(ids), order(at))


HEADS_CASES = {
    "striped": dict(qkv_layout=QKVLayout.THD_THD_THD, attn_mask_type=AttnMaskType.PADDING_CAUSAL_MASK,
                    max_segments_per_seq=3, context_parallel_causal_load_balanced=True,
                    context_parallel_strategy=CPStrategy.RING),
    "stripes of 4, window, dropout": dict(
        qkv_layout=QKVLayout.THD_T2HD, attn_mask_type=AttnMaskType.PADDING_CAUSAL_MASK, max_segments_per_seq=3,
        stripe_size=4, window_size=(5, 0), dropout_probability=0.3, context_parallel_causal_load_balanced=True),
    "lengths": dict(attn_mask_type=AttnMaskType.PADDING_CAUSAL_MASK, context_parallel_causal_load_balanced=True),
    "bias, in order": dict(attn_bias_type=AttnBiasType.POST_SCALE_BIAS),
}


@on_a_mesh
@pytest.mark.parametrize("name", HEADS_CASES)
def test_a_sequence_over_an_axis_by_heads(name):
    """What TE's ring and its stripes take, and what it refuses, as on one device; and of primitives the same."""
    given = PLAIN | HEADS_CASES[name]
    layout, balanced = given["qkv_layout"], given.get("context_parallel_causal_load_balanced")
    order = (ReorderStrategy.Striped if layout.is_thd() else ReorderStrategy.DualChunkSwap, 2, 1,
             given.get("stripe_size"))

    def moved(x):
        return reorder_causal_load_balancing(x, *order) if balanced else x

    def back(x):
        return inverse_reorder_causal_load_balancing(x, *order) if balanced else x
    key = jax.random.split(KEY, 4)
    shapes = [(2, 24, 4, 8), (2, 24, 2, 2, 8)] if layout.is_kvpacked() else [(2, 24, 4, 8)] * 3
    qkv = tuple(map(jax.random.normal, key, shapes))
    bias = jax.random.normal(key[3], (1, 4, 24, 24)) if "bias" in name else None
    d = jax.random.normal(jax.random.key(8), (2, 24, 4, 8))

    def both(qkv, bias, move, back, primitive=False, **axis):
        sequences = packed(move) if layout.is_thd() else SequenceDescriptor.from_seqlens(jnp.asarray([24, 17]))
        if not primitive:
            out, pull = jax.vjp(lambda qkv, bias: back(fused_attn(
                tuple(map(move, qkv)), bias, sequences, KEY, **given, **axis)), qkv, bias)
            return out, *pull(d)
        config = tex.attention.config_of(**{"window_size": None, **given, **axis})
        operands = [*map(move, qkv), *[jnp.zeros(0)] * (3 - len(qkv)), jnp.zeros(0) if bias is None else bias,
                    jnp.zeros(0)]
        leaves = jax.tree.leaves(sequences)
        seed = jax.random.key_data(KEY)
        out, aux, words, _ = tex.attention.FusedRingAttnStripedFwdPrimitive.bind(
            *operands, seed, *leaves, config=config)
        grads = tex.attention.FusedRingAttnStripedBwdPrimitive.bind(
            *operands, aux, words, out, move(d), *leaves, config=config)
        return back(out), tuple(map(back, grads[:len(qkv)])), None if bias is None else grads[3]

    def unmoved(x):
        return x
    expected = jax.jit(functools.partial(both, move=unmoved, back=unmoved))(qkv, bias)
    with split(named=True):
        for primitive in (False, True):
            run = jax.jit(functools.partial(both, move=moved, back=back, primitive=primitive,
                                            context_parallel_axis="cp"))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 2e-5), run(qkv, bias), expected)


def rows_of(is_thd, is_padded, order, b, s):
    """Sequences of rows, in the devices' order, and which tokens are in one, [b, s]."""
    if not is_thd:
        lengths = jnp.asarray([s - 5 - 3 * row if is_padded else s for row in range(b)], jnp.int32)
        return SequenceDescriptor.from_seqlens(lengths), order(jnp.arange(s)[None] < lengths[:, None])
    ids, at = np.zeros((2, b, s), np.int32)
    for row in range(b):
        for n, (begin, end) in enumerate(itertools.pairwise((0, 9 + row, 22, s))):
            ids[row, begin:end - 2 * is_padded], at[row, begin:end] = n + 1, range(end - begin)
    ids, at = order(jnp.asarray(ids)), order(jnp.asarray(at))
    return SequenceDescriptor.from_segment_ids_and_pos(ids, at), ids > 0


@on_a_mesh
@pytest.mark.every(3)
@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("is_thd", [False, True], ids=["bshd", "thd"])
@pytest.mark.parametrize("strategy", [CPStrategy.RING, CPStrategy.ALL_GATHER])
@pytest.mark.parametrize("b, extents", [(2, (1, 1, 2)), (2, (2, 1, 2)), (2, (1, 2, 2)), (2, (1, 1, 4)), (1, (2, 1, 2))])
def test_meshes_with_axes_of_one_device(b, extents, strategy, is_thd, is_padded):
    """TE's meshes have all three axes always; the results and gradients of one device."""
    s, kinds = 32, AttnMaskType
    for is_causal in (False, True):
        size = extents[-1] if is_causal else 0
        masks = (kinds.PADDING_MASK, kinds.PADDING_CAUSAL_MASK) if is_thd or is_padded else \
            (kinds.NO_MASK, kinds.CAUSAL_MASK)
        given = PLAIN | dict(attn_mask_type=masks[is_causal], max_segments_per_seq=3 if is_thd else 1,
                             qkv_layout=QKVLayout.THD_THD_THD if is_thd else QKVLayout.BSHD_BSHD_BSHD)
        order = ReorderStrategy.Striped if is_thd else ReorderStrategy.DualChunkSwap, size, 1

        def moved(x):
            return reorder_causal_load_balancing(x, *order) if is_causal else x

        def back(x):
            return inverse_reorder_causal_load_balancing(x, *order) if is_causal else x

        def both(qkv, d, order, **axis):
            sequences, live = rows_of(is_thd, is_padded, order, b, s)

            def attend(qkv):
                return jnp.where(live[..., None, None], fused_attn(qkv, None, sequences, KEY, **given, **axis), 0)
            out, pull = jax.vjp(attend, qkv)
            return out, *pull(d)[0]
        arrays = [jax.random.normal(jax.random.key(i), (b, s, 4, 8)) for i in range(4)]
        expected = jax.jit(functools.partial(both, order=lambda x: x))(tuple(arrays[:3]), arrays[3])
        devices = Mesh(np.array(jax.devices()[:np.prod(extents)]).reshape(extents), ("dp", "tpsp", "cp"))
        names = sharding.MeshResource(dp_resource="dp", tpsp_resource="tpsp", cp_resource="cp")
        with jax.set_mesh(devices), sharding.global_shard_guard(names):
            spec = PartitionSpec("dp" if b > 1 else None, "cp", "tpsp")
            placed = [jax.device_put(moved(x), NamedSharding(devices, spec)) for x in arrays]
            run = functools.partial(both, order=moved, context_parallel_axis="cp", context_parallel_strategy=strategy,
                                    context_parallel_causal_load_balanced=is_causal)
            found = jax.jit(run)(tuple(placed[:3]), placed[3])
        for mine, other in zip(found, expected):
            np.testing.assert_allclose(back(mine), other, 1e-4, 2e-5)


@on_a_mesh
def test_what_a_split_sequence_cannot():
    q, k, v = (jax.random.normal(KEY, (4, 12, 4, 8)) for _ in range(3))
    lengths = SequenceDescriptor.from_seqlens(jnp.full((4,), 12))
    call = functools.partial(fused_attn, seed=None, context_parallel_axis="cp",
                             context_parallel_causal_load_balanced=True)
    said = r"context_parallel_axis='cp' \(context_parallel_strategy=DEFAULT, 2 devices\): .*"
    with split(named=True), pytest.raises(tessera.jax.Refused, match=said + "a bias or a mask has rows"):
        call((q, k, v), jnp.zeros((1, 1, 12, 12)), lengths,
             **PLAIN | dict(attn_bias_type=AttnBiasType.POST_SCALE_BIAS))
    with split(named=True), pytest.raises(tessera.jax.Refused, match=said + "heads=3 and num_gqa_groups=3 must be"):
        call((q[:, :, :3], k[:, :, :3], v[:, :, :3]), None, lengths,
             **PLAIN | dict(attn_mask_type=AttnMaskType.PADDING_MASK))
    with split(named=True), pytest.raises(ValueError, match="stripe_size=1: must be None for BSHD_BSHD_BSHD"):
        call((q, k, v), None, lengths, **PLAIN, stripe_size=1)
    with split(named=True), pytest.raises(ValueError, match="sequence length=10: must be a multiple of 4"):
        call((q[:, :10],) * 3, None, lengths, **PLAIN)


@on_a_mesh
def test_a_layer_over_an_axis(monkeypatch):
    q = jax.random.normal(KEY, (4, 12, 4, 8))
    layer = functools.partial(DotProductAttention, 8, 4)
    alone = layer().apply({}, q, q, q)
    with split(named=False):
        ring = layer(context_parallel_strategy="ring")
        np.testing.assert_allclose(jax.jit(ring.apply)({}, q, q, q), alone, 1e-4, 2e-5)
        monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
        balanced = layer(context_parallel_causal_load_balanced=True)
        order = (ReorderStrategy.DualChunkSwap, 2, 1)
        out = jax.jit(balanced.apply)({}, *[reorder_causal_load_balancing(q, *order)] * 3)
        np.testing.assert_allclose(inverse_reorder_causal_load_balancing(out, *order), alone, 1e-4, 2e-5)
    monkeypatch.undo()
    one = Mesh(np.array(jax.devices()[:1]), ("cp",))
    with jax.set_mesh(one), sharding.global_shard_guard(sharding.MeshResource(cp_resource="cp")):
        np.testing.assert_array_equal(layer(context_parallel_strategy="ring").apply({}, q, q, q), alone)
