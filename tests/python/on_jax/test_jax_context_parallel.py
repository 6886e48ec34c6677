# SPDX-License-Identifier: Apache-2.0
"""tessera.jax.context_parallel on a mesh of four virtual CPU devices, against one device: values,
gradients, dropout's mask, slack full of NaN, what is refused. `./dev test jax` gives this file and
test_jax_sharding.py a process of their own."""
import collections
import re
from typing import NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")
if jax.device_count() != 4:
    pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=4", allow_module_level=True)

import tessera  # noqa: E402
import tessera.jax as tj  # noqa: E402
from jax.sharding import AxisType, PartitionSpec as P  # noqa: E402
from tessera.jax.context_parallel import (  # noqa: E402
    Shards, _attention, attention, positions, shard, sharded, unshard)
from tessera.jax.context_parallel._ring import is_compiled  # noqa: E402

jnp = jax.numpy
MESH = jax.make_mesh((4,), ("cp",), axis_types=(AxisType.Auto,))
RAGGED = (384, 129, 127, 1, 0)
D = 16
ORDERS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


class Case(NamedTuple):
    shards: Shards
    exchange: str
    keywords: dict
    layout: str = "thd"
    heads: tuple = (8, 4)
    shards_k: Shards | None = None
    dtype: str = "float32"
    sink: bool = False
    slopes: tuple = ()        # the shape of alibi_slopes


DROPOUT = {"dropout_p": 0.3, "rng_state": (3, 4)}
CROSS = (200, 512, 0, 3, 129)
CASES = {
    "keys, zigzag, dropout, sink": Case(
        Shards.zigzag(RAGGED, 4), "keys", {"causal": True, **DROPOUT}, "bshd", sink=True),
    "heads, zigzag, dropout, sink, slopes": Case(
        Shards.zigzag(RAGGED, 4), "heads", {"causal": True, **DROPOUT}, "bshd", sink=True, slopes=(8,)),
    "keys, contiguous, window, softcap": Case(
        Shards.contiguous(RAGGED, 4), "keys", {"window": (100, 20), "softcap": 2.0}, "bhsd"),
    "keys, balanced, slopes, one kv head": Case(
        Shards.balanced(RAGGED, 4), "auto", {"causal": True}, heads=(4, 1), slopes=(5, 4)),
    "keys, zigzag, causal": Case(
        Shards.zigzag(RAGGED, 4), "keys", {"causal": True, "window": (200, 0)}, slopes=(8,)),
    "keys, zigzag, no mask": Case(Shards.zigzag((512, 130), 4), "keys", {"softmax_scale": 0.3}),
    "heads, balanced, slopes of each sequence": Case(
        Shards.balanced(RAGGED, 4), "heads", {"causal": True, "window": (90, 0)}, slopes=(5, 8)),
    "heads, stripes": Case(
        Shards.striped((300, 77), 4), "auto", {"causal": True, "sink": "off_by_one"}, "sbhd"),
    "keys of other lengths": Case(
        Shards.zigzag(RAGGED, 4), "keys", {"causal": True, "align": "bottom_right", **DROPOUT},
        shards_k=Shards.contiguous(CROSS, 4)),
    "heads, keys of other lengths, given diagonals": Case(
        Shards.contiguous(RAGGED, 4), "heads", {"causal": True, "align": (3, -5, 0, 1, 40)},
        shards_k=Shards.zigzag(CROSS, 4)),
    "keys, padding in the shards, any cuts": Case(
        Shards.te((0, 80, 400), 4, (0, 77, 377)), "keys", {"causal": True}, "bshd"),
    "keys, any order, bfloat16": Case(
        Shards.of([[(1, 0, 128), (0, 128, 72)], [(0, 0, 128)], [], [(1, 128, 20)]]), "keys",
        {"window": (-1, 60), **DROPOUT}, dtype="bfloat16"),
    "ring, zigzag, dropout, sink, slopes": Case(
        Shards.zigzag(RAGGED, 4), "ring", {"causal": True, **DROPOUT}, "bshd", sink=True, slopes=(8,)),
    "ring, contiguous, window, softcap": Case(
        Shards.contiguous(RAGGED, 4), "ring", {"window": (100, 20), "softcap": 2.0}, "bhsd"),
    "ring, balanced, slopes of each sequence, one kv head": Case(
        Shards.balanced(RAGGED, 4), "ring", {"causal": True, "window": (90, 0)}, heads=(4, 1), slopes=(5, 4)),
    "ring, no mask": Case(Shards.zigzag((512, 130), 4), "ring", {"softmax_scale": 0.3}, "sbhd"),
    "ring, off by one": Case(Shards.zigzag((700,), 4), "ring", {"causal": True, "sink": "off_by_one"}),
    "ring, keys of other lengths": Case(
        Shards.zigzag(RAGGED, 4), "ring", {"causal": True, "align": (3, -5, 0, 1, 40), **DROPOUT},
        shards_k=Shards.contiguous(CROSS, 4), sink=True),
    "ring, padding in the shards, any cuts": Case(
        Shards.te((0, 80, 400), 4, (0, 77, 377)), "ring", {"causal": True}, "bshd"),
    "ring, any order, bfloat16": Case(
        Shards.of([[(1, 0, 128), (0, 128, 72)], [(0, 0, 128)], [], [(1, 128, 20)]]), "ring",
        {"window": (-1, 60), **DROPOUT}, dtype="bfloat16"),
    "ring, no tokens": Case(Shards.zigzag((0, 0), 4), "ring", {"causal": True}, sink=True),
    "keys, no tokens": Case(Shards.zigzag((0, 0), 4), "keys", {"causal": True}),
}


def random_ring(seed: int) -> Case:
    """Shards, a mask, features and a layout, of those that a ring takes."""
    rng = np.random.default_rng(seed)
    some = [bool(x) for x in rng.integers(2, size=6)]
    lengths, lengths_k = (tuple(int(x) for x in rng.integers(0, 400, 3)) for _ in range(2))
    kinds = Shards.zigzag, Shards.contiguous, Shards.balanced
    kind, kind_k = (kinds[i] for i in rng.integers(3, size=2))
    keywords = {"causal": some[0], **(DROPOUT if some[1] else {}), **({"softcap": 3.0} if some[2] else {})}
    window = rng.integers(-1, 300, 2).tolist()
    keywords |= {"window": (window[0], 0 if some[0] else window[1])} if some[3] else {}
    is_cross = some[4]
    if is_cross:
        keywords["align"] = tuple(int(x) for x in rng.integers(-100, 300, 3))
    hk = int(rng.choice([1, 2, 4]))
    return Case(kind(lengths, 4), "ring", keywords, str(rng.choice(["thd", *ORDERS])), (4, hk),
                kind_k(lengths_k, 4) if is_cross else None, sink=some[5], slopes=[(), (4,), (3, 4)][rng.integers(3)])


CASES |= {f"ring, random {seed}": random_ring(seed) for seed in range(8)}


def normal(seed, shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def cumulated(lengths):
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def on_one_device(case: Case):
    """(q, k, v, arrays) of packed whole sequences -> o, lse."""
    lengths = case.shards.lengths, (case.shards_k or case.shards).lengths
    cu_q, cu_k = map(cumulated, lengths)
    keywords = {"align": "top_left", **case.keywords}
    if isinstance(keywords["align"], tuple):
        keywords["align"] = jnp.asarray(keywords["align"], jnp.int32)

    def function(q, k, v, arrays):
        return tj.attention(q, k, v, layout="thd", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True,
                            **keywords, **arrays)
    return function


class Mesh:
    """The same on the mesh, with NaN in all slack, of arrays and of cotangents."""

    def __init__(self, case: Case):
        self.case, self.packed = case, case.layout == "thd"
        self.function = sharded(MESH, "cp", shards=case.shards, shards_k=case.shards_k,
                                exchange=case.exchange, layout=case.layout, return_lse=True,
                                **case.keywords)

    def put(self, x, shards):
        """Packed [tokens, ...] -> the function's argument, with NaN in its slack."""
        ones = self._whole(jnp.ones(len(x)), shards)
        slack = shard(ones, shards, packed=self.packed) == 0
        x = shard(self._whole(x, shards), shards, packed=self.packed)
        x = jnp.where(slack.reshape(slack.shape + (1,) * (x.ndim - slack.ndim)), jnp.nan, x)
        return x if self.packed else x.transpose(ORDERS[self.case.layout])

    def get(self, x, shards, slack=0):
        """Packed [tokens, ...], and whether all slack is as it must be."""
        x = x if self.packed else x.transpose(ORDERS[self.case.layout])
        is_clean = jnp.sum(x != slack) == jnp.sum(unshard(x, shards, packed=self.packed)[
            ... if self.packed else self._index(shards)] != slack)
        x = unshard(x, shards, packed=self.packed)
        return (x if self.packed else x[self._index(shards)]), is_clean

    def put_lse(self, x):
        """[hq, tokens] -> [hq, t] or [b, hq, s]"""
        x = self.put_rows(jnp.moveaxis(x, 0, -1))
        return jnp.moveaxis(x, -1, -2)

    def put_rows(self, x):
        ones = self._whole(jnp.ones(len(x)), self.case.shards)
        slack = shard(ones, self.case.shards, packed=self.packed) == 0
        x = shard(self._whole(x, self.case.shards), self.case.shards, packed=self.packed)
        return jnp.where(slack[..., None], jnp.nan, x)

    def get_lse(self, x):
        x = unshard(jnp.moveaxis(x, -1, -2), self.case.shards, packed=self.packed)
        return jnp.moveaxis(x if self.packed else x[self._index(self.case.shards)], -1, 0)

    def _whole(self, x, shards):
        if self.packed:
            return x
        b, longest = len(shards.lengths), max(shards.lengths)
        return jnp.full((b, longest, *x.shape[1:]), 7, x.dtype).at[self._index(shards)].set(x)

    def _index(self, shards):
        return tuple(np.concatenate(x) for x in zip(*(
            (np.full(length, n), np.arange(length)) for n, length in enumerate(shards.lengths))))

    def results(self, q, k, v, arrays, do, dlse):
        shards, keys = self.case.shards, self.case.shards_k or self.case.shards
        given = self.put(q, shards), self.put(k, keys), self.put(v, keys), arrays
        (o, lse), pull = jax.vjp(lambda q, k, v, arrays: self.function(q, k, v, **arrays), *given)
        dq, dk, dv, rest = pull((self.put(do, shards), self.put_lse(dlse)))
        found = [self.get(x, one) for x, one in ((o, shards), (dq, shards), (dk, keys), (dv, keys))]
        (o, *clean), *grads = found[0], *found[1:]
        clean += [x[1] for x in grads]
        return o, self.get_lse(lse), [x[0] for x in grads], rest, clean


@pytest.fixture(autouse=True)
def where_rings_are_compiled(request):
    if "ring" in request.node.name and not is_compiled():
        pytest.skip("XLA's compiler for CPUs dies of a ring in this JAX")


@pytest.mark.parametrize("name", CASES)
def test_the_answer_of_one_device(name):
    case = CASES[name]
    hq, hk = case.heads
    tq, tk = sum(case.shards.lengths), sum((case.shards_k or case.shards).lengths)
    q, k, v = (normal(i, (t, h, D), case.dtype) for i, t, h in ((0, tq, hq), (1, tk, hk), (2, tk, hk)))
    do, dlse = normal(3, (tq, hq, D), case.dtype), normal(4, (hq, tq))
    arrays = {"sink": normal(5, hq)} if case.sink else {}
    arrays |= {"alibi_slopes": abs(normal(6, case.slopes)) / 8} if case.slopes else {}

    def expected(q, k, v, arrays, do, dlse):
        (o, lse), pull = jax.vjp(on_one_device(case), q, k, v, arrays)
        *grads, rest = pull((do, dlse))
        return o, lse, grads, rest
    theirs = jax.jit(expected)(q, k, v, arrays, do, dlse)
    *ours, clean = jax.jit(Mesh(case).results)(q, k, v, arrays, do, dlse)
    assert all(clean), "slack of o and of gradients must be 0"
    compare(tuple(ours), theirs, 1e-4 if case.dtype == "float32" else 2e-2)
    cuts = {run.start % 128 for rank in case.shards.runs for run in rank if run.length}
    is_heads = "heads" in name
    # One device's order of sums, which a ring has not; the CPU decodes up to 16 rows.
    if case.exchange != "ring" and (is_heads or cuts <= {0}):
        rows = np.concatenate([case.shards.index(rank)[run.at:run.at + run.length]
                               for rank in range(4) for run in case.shards.runs[rank]
                               if is_heads or run.length > 16] or [np.zeros(0, int)])
        np.testing.assert_array_equal(np.asarray(ours[0])[rows], np.asarray(theirs[0])[rows])
        np.testing.assert_array_equal(np.asarray(ours[1])[:, rows], np.asarray(theirs[1])[:, rows])


def compare(ours, theirs, tolerance=1e-4):
    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, tolerance, tolerance / 5)
    jax.tree.map(one, ours, theirs)


def collectives(function, *arguments) -> dict[str, int]:
    compiled = jax.jit(function).lower(*arguments).compile()
    return dict(collections.Counter(COLLECTIVE.findall(compiled.as_text())))


@pytest.mark.parametrize("exchange, expected, backward", [
    ("keys", {"all-gather": 2}, {"all-gather": 2, "reduce-scatter": 2}),
    ("heads", {"all-to-all": 4}, {"all-to-all": 8})])
def test_what_is_exchanged(exchange, expected, backward):
    """k and v are gathered and their gradients scattered; or q, k, v and o change sides, and back."""
    x = on_mesh(512)
    function = sharded(MESH, "cp", shards=Shards.zigzag((512,), 4), exchange=exchange, causal=True)
    assert collectives(function, x, x, x) == expected
    assert collectives(both_passes(function), x, x, x) == backward


def on_mesh(tokens):
    return jax.ShapeDtypeStruct((1, tokens, 4, D), jnp.float32, sharding=jax.sharding.NamedSharding(
        MESH, P(None, "cp")))


def both_passes(function):
    def both(*x):
        o, pull = jax.vjp(function, *x)
        return o, pull(2 * o)
    return both


@pytest.mark.parametrize("kind, keywords, hops", [
    (Shards.contiguous, {"causal": True, "window": (100, 0)}, (1, 2)),  # of the rank before; and home
    (Shards.contiguous, {"window": (0, 1)}, (1, 2)),                    # of the rank after
    (Shards.contiguous, {"window": (100, 100)}, (2, 3)),                # of both, not of the one between
    (Shards.contiguous, {"window": (0, 0)}, (0, 0)),
    (Shards.contiguous, {}, (3, 4)), (Shards.zigzag, {"causal": True}, (3, 4))])
def test_the_hops_of_a_ring(kind, keywords, hops):
    """Those of k and v in each pass, and of dk and dv, before the CPU's compiler, which knows no barriers,
    lets the backward pass use what the forward pass received. Nothing else travels."""
    x = on_mesh(1024)
    function = sharded(MESH, "cp", shards=kind((1024,), 4), exchange="ring", **keywords)
    found = [jax.jit(one).lower(x, x, x).as_text().count("stablehlo.collective_permute")
             for one in (function, both_passes(function))]
    assert found == [2 * hops[0], 4 * hops[0] + 2 * hops[1]]
    assert set(collectives(both_passes(function), x, x, x)) <= {"collective-permute"}


def test_a_ring_is_one_step_ahead():
    """What travels in a step waits for the calls before that step, which bounds the keys that a device holds,
    and for none of its own, which XLA may hide it behind. Only dk and dv go home after the last call."""
    x = on_mesh(512)
    function = sharded(MESH, "cp", shards=Shards.contiguous((512,), 4), exchange="ring")
    hops, calls = [], []

    def follow(jaxpr, given):
        """The calls that each result of a jaxpr depends on."""
        known = dict(zip(jaxpr.invars, given))
        for equation in jaxpr.eqns:
            inputs = [known.get(x, frozenset()) for x in equation.invars if not hasattr(x, "val")]
            all_of = frozenset().union(*inputs)
            inner = [x for x in equation.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
            if equation.params.get("name") in ("_attention_of", "gradients_of"):
                calls.append(equation)
                results = [all_of | {len(calls)}] * len(equation.outvars)
            elif inner and len(getattr(inner[0], "jaxpr", inner[0]).invars) == len(equation.invars):
                own = [frozenset() if hasattr(x, "val") else known.get(x, frozenset()) for x in equation.invars]
                results = follow(getattr(inner[0], "jaxpr", inner[0]), own)
            else:
                results = [all_of] * len(equation.outvars)
            if equation.primitive.name == "ppermute":
                hops.append(len(all_of))
            known.update(zip(equation.outvars, results))
        return [known.get(x, frozenset()) if not hasattr(x, "val") else frozenset() for x in jaxpr.outvars]
    jaxpr = jax.make_jaxpr(both_passes(function))(x, x, x).jaxpr
    follow(jaxpr, [frozenset()] * 3)
    assert len(calls) == 8
    forward, k_and_v, gradients = [0, 0, 1, 1, 2, 2], [0, 0, 5, 5, 6, 6], [5, 5, 6, 6, 7, 7, 8, 8]
    assert hops[:6] == forward and sorted(hops[6:]) == sorted(k_and_v + gradients)


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_ring_holds_the_keys_of_one_rank(is_backward):
    """Beside its own, and those under way: its memory is below that of whole keys, of which there are
    copies, and in fp32 dk and dv of all."""
    def needs(exchange):
        function = sharded(MESH, "cp", shards=Shards.contiguous((4096,), 4), exchange=exchange)
        function = both_passes(function) if is_backward else function
        x = on_mesh(4096)
        return jax.jit(function).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
    assert needs("ring") < needs("keys")


@pytest.mark.parametrize("exchange, keywords, has_starts", [
    ("keys", {"causal": True}, False), ("keys", {}, False), ("heads", {"causal": True, **DROPOUT}, False),
    ("keys", {"causal": True, **DROPOUT}, True), ("keys", {"window": (9, 9)}, False),
    ("ring", {"causal": True}, False), ("ring", {}, False), ("ring", {"causal": True, **DROPOUT}, True)])
def test_what_gpus_take(exchange, keywords, has_starts):
    """Starts are among the reasons only where a kernel counts more than the diagonal from them: cuda_sm90 leaves
    dropout to cuda_sm80. A build without CUDA says so, and is asked what one with it would say."""
    shards = Shards.zigzag((512, 130), 4)
    x = jax.ShapeDtypeStruct((4 * max(shards.extents), 4, 64), jnp.bfloat16)
    function = sharded(MESH, "cp", shards=shards, exchange=exchange, layout="thd", **keywords)

    try:
        jax.jit(function).trace(x, x, x).lower(lowering_platforms=("cuda",))
        reasons = ""
    except tj.Refused as refusal:
        case = re.search('explain "(.*?)"', str(refusal))[1]
        reasons = str(tessera.explain(case, device="sm90"))
    assert ("the Hopper kernels do not have it" in reasons) == has_starts, reasons


@pytest.mark.parametrize("exchange", ["keys", "ring"])
def test_inside_a_shard_map_with_a_batch_axis(exchange):
    """Another axis holds sequences of its own; max_logit is that of all heads' keys."""
    mesh = jax.make_mesh((2, 2), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
    shards = Shards.zigzag((300,), 2)
    q, k, v = (normal(i, (2, 300, 4, D)) for i in range(3))
    there = jax.vmap(lambda x: shard(x[None], shards)[0])

    def one(q, k, v):
        return attention(q, k, v, axis_name="cp", shards=shards, causal=True, exchange=exchange,
                         return_max_logit=True)
    mapped = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("dp", "cp"),
                                   out_specs=(P("dp", "cp"), P("dp"))))
    o, peak = mapped(*map(there, (q, k, v)))
    o = jax.vmap(lambda x: unshard(x[None], shards)[0])(o)
    theirs, their_peak = jax.jit(lambda *x: tj.attention(*x, causal=True, return_max_logit=True))(q, k, v)
    np.testing.assert_allclose(o, theirs, *(0, 0) if exchange == "keys" else (1e-5, 1e-6))
    np.testing.assert_allclose(peak.reshape(2, 4).max(0), their_peak, 1e-6)


def test_a_ring_of_two_rounds_as_one_device_does():
    """In bfloat16, against float32: parts are rounded, their sums are not. Here the gradient of o alone is
    asked for, of q, k and v, through a checkpoint."""
    mesh = jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    shards = Shards.zigzag((900,), 2)
    x = [normal(i, (1, 900, h, D), "bfloat16") for i, h in enumerate((4, 2, 2, 4))]
    ring = sharded(mesh, "cp", shards=shards, exchange="ring", causal=True)

    def results(attend, q, k, v, do):
        o, pull = jax.vjp(jax.checkpoint(attend), q, k, v)
        return o, *pull(do)

    def ours(*x):
        return [unshard(y, shards) for y in results(ring, *(shard(y, shards) for y in x))]

    def theirs(*x):
        return results(lambda *x: tj.attention(*x, causal=True), *x)
    exact = jax.jit(theirs)(*(y.astype(jnp.float32) for y in x))
    for own, one, true in zip(jax.jit(ours)(*x), jax.jit(theirs)(*x), exact):
        assert own.dtype == jnp.bfloat16
        own, one = (float(jnp.mean(jnp.abs(y.astype(jnp.float32) - true))) for y in (own, one))
        assert 0 < own < 1.5 * one


def test_what_no_compiler_takes_is_refused(monkeypatch):
    monkeypatch.setattr(_attention, "is_compiled", lambda: False)
    function = sharded(MESH, "cp", shards=Shards.zigzag((512,), 4), exchange="ring")
    with pytest.raises(tessera.Refused, match="exchange='ring': XLA's compiler .* dies of a ring in JAX .*"):
        function(*(normal(i, (1, 512, 4, D)) for i in range(3)))


def test_heads_know_max_logit_of_all():
    shards = Shards.contiguous((512,), 4)
    q, k, v = (normal(i, (1, 512, 4, D)) for i in range(3))
    function = sharded(MESH, "cp", shards=shards, exchange="heads", return_max_logit=True)
    _, peak = jax.jit(function)(q, k, v)
    np.testing.assert_allclose(peak, tj.attention(q, k, v, return_max_logit=True)[1], 1e-6)


def test_shard_and_positions():
    """shard and unshard are inverses; positions are shard's of 0, 1, 2, ..."""
    shards = Shards.striped((5, 0, 9), 4, 2)
    x = jnp.where(jnp.arange(9) < jnp.array([5, 0, 9])[:, None], 1.0 + jnp.arange(27).reshape(3, 9), 0)
    split = shard(x, shards)
    assert split.shape == (3, 4 * 3) and split[2].tolist() == [19, 20, 27, 21, 22, 0, 23, 24, 0, 25, 26, 0]
    np.testing.assert_array_equal(unshard(split, shards), x)
    np.testing.assert_array_equal(unshard(shard(jnp.arange(14.0), shards, packed=True), shards,
                                          packed=True), jnp.arange(14.0))
    assert positions(shards)[2].tolist() == [0, 1, 8, 2, 3, 0, 4, 5, 0, 6, 7, 0]
    assert positions(shards, packed=True)[:5].tolist() == [0, 1, 0, 1, 8]
    np.testing.assert_array_equal(jax.grad(lambda x: (shard(x, shards) * split).sum())(x), x)


SHARDS = Shards.zigzag((1000, 20), 4)
FINE = Shards.striped((300, 20), 4)


@pytest.mark.parametrize("given, error, message", [
    (dict(shape=(2, 99, 4, D)), ValueError, r"q\.shape=\[2, 99, 4, 16\]: must have b, s = 2, 256"),
    (dict(shape=(3, 256, 4, D)), ValueError, r"q\.shape=\[3, .*must have b, s = 2, 256"),
    (dict(layout="thd"), ValueError, r"q\.shape=.*must have the axes of layout='thd'"),
    (dict(layout="tdh"), ValueError, "layout='tdh': must be one of bshd"),
    (dict(shards=Shards.zigzag((1000, 20), 2)), ValueError, "must have the 2 devices of Shards.zigzag"),
    (dict(shards="zigzag"), ValueError, "shards=str: must be tessera.context_parallel.Shards"),
    (dict(shards_k=Shards.zigzag((300,), 4)), ValueError, "shards_k=.*as many sequences"),
    (dict(axis_name="tp"), ValueError, "axis_name='tp': must be an axis of the shard_map"),
    (dict(shape=(2, 256, 6, D), exchange="heads"), ValueError, "hq=6 must be a multiple of k's heads, 4"),
    (dict(shape=(2, 256, 2, D), shape_k=(2, 256, 2, D), exchange="heads"), ValueError,
     "exchange='heads': hq=2 and hk=2 must be multiples of 4 devices"),
    (dict(exchange="ring", sink=jnp.zeros(3)), ValueError, r"sink=float32\[3\]: must be \[hq\] = \[4\]"),
    (dict(exchange="ring", sink="two"), ValueError, "sink='two': must be \"off_by_one\""),
    (dict(exchange="ring", causal=True, window=(1, 1)), ValueError, "window"),
    (dict(exchange="ring", dropout_p=0.5), ValueError, "rng_state"),
    (dict(exchange="all"), ValueError, "exchange='all': must be one of auto, heads, keys, ring"),
    (dict(seqlens_q=1), ValueError, "seqlens_q=.*lengths and starts are in shards"),
    (dict(bias=1), tj.Refused, "bias=.*does not go with shards on a mesh yet"),
    (dict(nonsense=1), TypeError, "nonsense"),
    (dict(align=(1, 2, 3)), ValueError, r"align=\(1, 2, 3\): must be"),
    (dict(align="diagonal"), ValueError, "align='diagonal': must be"),
    (dict(shards_k=Shards.zigzag((1000, 30), 4), causal=True), ValueError, "align=None: must be given"),
    (dict(causal=True, window=(1, 1)), ValueError, "window"),
    (dict(window=3), ValueError, "window=3: must be a pair"),
    (dict(dropout_p=0.5), ValueError, "rng_state"),
])
def test_what_is_refused(given, error, message):
    """As the program is traced; nothing is computed."""
    given = dict(given)
    shape = given.pop("shape", (2, 256, 4, D))
    shapes = shape, *(given.pop("shape_k", (2, 256, 4, D)),) * 2
    call = {"axis_name": "cp", "shards": SHARDS, **given}
    arrays = [jax.ShapeDtypeStruct((s[0], 4 * s[1], *s[2:]), jnp.float32) for s in shapes]
    mapped = jax.shard_map(lambda *x: attention(*x, **call), mesh=MESH, in_specs=P(None, "cp"),
                           out_specs=P(None, "cp"))
    with pytest.raises(error, match=message):
        jax.eval_shape(mapped, *arrays)


def test_what_is_refused_elsewhere():
    x = jnp.zeros((2, 12, 3))
    with pytest.raises(ValueError, match="tessera.context_parallel.shard: x.shape=.*2 sequences of at"):
        shard(x, SHARDS)
    with pytest.raises(ValueError, match=r"unshard: x.shape=.*must begin with \[2, 1024\]"):
        unshard(x, SHARDS)
    with pytest.raises(ValueError, match=r"shard: x.shape=.*must begin with \[1020\]"):
        shard(x, SHARDS, packed=True)
    with pytest.raises(ValueError, match="sharded: bias=.*must be given to sharded"):
        sharded(MESH, "cp", shards=SHARDS)(x, x, x, bias=x)
    fine = [jax.ShapeDtypeStruct((2, 4 * 75, 3, D), jnp.float32)] * 3
    with pytest.raises(tj.Refused, match="cuts a sequence into 75 runs a rank.*use Shards.zigzag"):
        jax.eval_shape(sharded(MESH, "cp", shards=FINE, causal=True), *fine)
    with pytest.raises(tj.Refused, match="into 5625 pairs of runs.*use Shards.zigzag"):
        jax.eval_shape(sharded(MESH, "cp", shards=FINE, causal=True, exchange="ring"), *fine)
