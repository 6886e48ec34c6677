# SPDX-License-Identifier: Apache-2.0
"""tessera.jax on one device: gradients, transformations, seeds, what is refused and when. That each
feature is right is for the cases (check --through jax), meshes for test_jax_sharding."""
import shutil
import subprocess
import types
from pathlib import Path

import numpy as np
import pytest
import signatures

jax = pytest.importorskip("jax")
jnp = jax.numpy

import tessera  # noqa: E402
import tessera.jax as tj  # noqa: E402
from jax.sharding import AbstractMesh, Mesh  # noqa: E402
from jax_device import CPU, DEVICE, ON_CPU, same  # noqa: E402
from tessera import _lib  # noqa: E402
from tessera.jax import _call, _functions, _vmap, nn  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
N, B, S, H, D = 3, 2, 5, 4, 8
PADDED = {"bshd": (B, S, H, D), "sbhd": (S, B, H, D), "bhsd": (B, H, S, D)}


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def qkv(b=B, s=33, h=H, d=16, hk=None, dtype=jnp.float32):
    return (normal(0, b, s, h, d, dtype=dtype), *(normal(i, b, s, hk or h, d, dtype=dtype) for i in (1, 2)))


def compare(ours, theirs, **tolerance):
    tolerance = tolerance or dict(rtol=1e-4, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        np.asarray(a, np.float64), np.asarray(b, np.float64), **tolerance), ours, theirs)


@pytest.fixture
def on_cpu():
    """The CPU is JAX's device, on a machine with a GPU too."""
    with jax.default_device(CPU):
        yield


def calls_of(function, *arguments) -> int:
    return jax.jit(function).lower(*arguments).as_text().count("@tessera_attention")


# ---- values and gradients ----

FEATURES = {
    "plain": ({}, {}),
    "causal, grouped heads": ({"hk": 2}, {"causal": True}),
    "window": ({}, {"window": (7, 0)}),
    "bias": ({}, {"bias": normal(3, 1, H, 33, 33)}),
    "bias of keys": ({}, {"bias": normal(3, 33), "bias_at": "pre_scale"}),
    "sink": ({}, {"sink": normal(3, H), "causal": True}),
    "slopes": ({}, {"alibi_slopes": abs(normal(3, H)), "causal": True}),
    "softcap, scale": ({}, {"softcap": 5.0, "softmax_scale": 0.3}),
    "lengths": ({}, {"seqlens_q": jnp.array([33, 7]), "seqlens_k": jnp.array([20, 0])}),
    "dropout": ({}, {"dropout_p": 0.3, "rng_state": (2**40 + 3, -5)}),
    "bf16": ({"dtype": jnp.bfloat16}, {"causal": True}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_equals_numpy(name):
    """o, lse and every gradient, on the CPU to the bit: it is one library."""
    shapes, keywords = FEATURES[name]
    arrays = [np.asarray(x) for x in qkv(**shapes)]
    plain = {key: np.asarray(x) if isinstance(x, jax.Array) else x for key, x in keywords.items()}
    o, lse = tessera.attention(*arrays, **plain, return_lse=True)
    differentiable = [key for key in ("bias", "sink", "alibi_slopes") if key in keywords]
    do, dlse = np.asarray(normal(8, *o.shape, dtype=o.dtype)), np.asarray(normal(9, *lse.shape))
    grads = ("dq", "dk", "dv", *(f"d{key}" for key in differentiable))
    expected = tessera.attention_backward(do, *arrays, o, lse, dlse=dlse, grads=grads, **plain)

    def function(q, k, v, more):
        return tj.attention(q, k, v, **{**keywords, **more}, return_lse=True)
    arguments = (*map(jnp.asarray, arrays), {key: keywords[key] for key in differentiable})
    results, pullback = jax.vjp(function, *arguments)
    same(results, (o, lse))
    *gradients, more = jax.jit(pullback)((jnp.asarray(do), jnp.asarray(dlse)))
    same([*gradients, *more.values()], [getattr(expected, name) for name in grads])
    given = tj.attention_backward(do, *arrays, o, lse, dlse=dlse, grads=grads, **keywords)
    same([getattr(given, name) for name in grads], [getattr(expected, name) for name in grads])


def test_only_wanted_gradients_are_computed():
    q, k, v = qkv()
    text = jax.jit(jax.grad(lambda k: tj.attention(q, k, v).sum())).lower(k).as_text()
    backward = next(line for line in text.splitlines() if text.count("@tessera_attention") == 2 and
                    "@tessera_attention" in line and line.count("tensor<2x33x4x16xf32>") > 5)
    assert backward.split("->")[-1].count("tensor<2x33x4x16xf32>") == 1
    assert calls_of(lambda q: tj.attention(q, k, v, return_lse=True), q) == 1


def test_gradient_through_lse_alone():
    q, k, v = qkv()
    ours = jax.grad(lambda q, k: tj.attention(q, k, v, return_lse=True)[1].sum(), (0, 1))(q, k)
    theirs = jax.grad(lambda q, k: jax.nn.logsumexp(
        jnp.einsum("bihd,bjhd->bhij", q, k) / 4, axis=-1).sum(), (0, 1))(q, k)
    compare(ours, theirs)


def test_slices_are_read_and_written_in_place():
    packed = jnp.stack(qkv(), axis=2)  # [b, s, 3, h, d]

    def sliced(x):
        return (tj.attention(*(tj.Slice(x, 2, i) for i in range(3)), causal=True) ** 2).sum()

    def indexed(x):
        return (tj.attention(*(x[:, :, i] for i in range(3)), causal=True) ** 2).sum()
    same(jax.grad(sliced)(packed), jax.grad(indexed)(packed))
    text = jax.jit(jax.grad(sliced)).lower(packed).compile().as_text()
    assert not any(f" {op}(" in text for op in ("copy", "concatenate", "pad", "slice")), text

    slices = [tj.Slice(packed, 2, i) for i in range(3)]
    o, lse = tj.attention(*slices, return_lse=True)
    one, every = (tj.attention_backward(o, *slices, o, lse, grads=grads).dq
                  for grads in (("dq",), ("dq", "dk", "dv")))
    same(one, every)  # an array's gradient is whole, whatever of it was asked for
    assert tj.attention_backward(o, *slices, o, lse, grads=()) == tessera.Gradients()

    def partly(x):  # the third item is no part of it
        return tj.attention(tj.Slice(x, 2, 0), tj.Slice(x, 2, 1), tj.Slice(x, 2, 1)).sum()
    gradient = jax.grad(partly)(packed)
    same(gradient, jax.grad(lambda x: tj.attention(x[:, :, 0], x[:, :, 1], x[:, :, 1]).sum())(packed))
    assert not gradient[:, :, 2].any()


def test_merge_has_gradients():
    q, k, v = qkv()

    def merged(q, k, v, layout="bshd"):
        parts = [tj.attention(q, k[:, part], v[:, part], return_lse=True)
                 for part in (slice(0, 10), slice(10, None))]
        return tj.merge(parts)

    def loss(function):
        return lambda *x: sum((y * jnp.cos(y)).sum() for y in function(*x))
    whole = lambda q, k, v: tj.attention(q, k, v, return_lse=True)  # noqa: E731
    compare(merged(q, k, v), whole(q, k, v))
    compare(jax.grad(loss(merged), (0, 1, 2))(q, k, v), jax.grad(loss(whole), (0, 1, 2))(q, k, v))
    o, lse = whole(q, k, v)
    nothing = jnp.full_like(o, jnp.nan), jnp.full_like(lse, -jnp.inf)
    compare(tj.merge([nothing, (o, lse)]), (o, lse))
    gradient = jax.grad(lambda o, lse: tj.merge([nothing, (o, lse)])[0].sum(), (0, 1))(o, lse)
    compare(gradient, (jnp.ones_like(o), jnp.zeros_like(lse)))
    assert (tj.merge([nothing, nothing])[0] == 0).all()
    for layout, axes in (("sbhd", (1, 0, 2, 3)), ("bhsd", (0, 2, 1, 3))):
        parts = [(x.transpose(axes), y) for x, y in ((o, lse), (o * 2, lse + 1))]
        plain = tj.merge([(o, lse), (o * 2, lse + 1)])
        compare(tj.merge(parts, layout=layout), (plain[0].transpose(axes), plain[1]))


def test_utilities_take_what_tesseras_do():
    signatures.assert_utilities_are_tesseras(tj)


@pytest.mark.parametrize("name, arguments, message", signatures.WRONG_UTILITIES)
def test_utilities_say_what_tesseras_do(name, arguments, message):
    signatures.assert_says(tj, name, arguments, message)


def test_merge_in_fp32():
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv())
    parts = [tj.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 10), slice(10, None))]
    o, lse = tj.merge(parts, out_dtype=jnp.float32)
    assert o.dtype == jnp.float32
    compare((o, lse), tj.merge([(o.astype(jnp.float32), lse) for o, lse in parts]))
    assert tj.merge([(o, lse)], out_dtype="float16")[0].dtype == jnp.float16
    gradient = jax.grad(lambda o: tj.merge([(o, parts[0][1]), parts[1]], out_dtype="float32")[0].sum())(parts[0][0])
    assert gradient.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="tessera.merge: out_dtype=.?float16.?: must be bfloat16"):
        tj.merge(parts, out_dtype=jnp.float16)


# ---- transformations ----

def test_what_is_wanted_is_no_structure_of_the_residuals():
    """JAX keeps the residuals' structure of the last trace, whatever was perturbed in it."""
    q, k, _ = qkv()

    def loss(q, k):
        return (jax.checkpoint(lambda q, k: tj.attention(q, k, k))(q, k) ** 2).sum()
    both, one = jax.grad(loss, (0, 1)), jax.grad(loss, 1)
    before, alone, after = both(q, k), one(q, k), both(q, k)
    assert abs(before[0]).max() > 0.1
    same(before, after)
    same(alone, before[1])


def test_checkpoint_saves_by_name():
    q = qkv()[0]

    def calls(**options):
        return calls_of(jax.value_and_grad(jax.checkpoint(
            lambda q: tj.attention(q, q, q).sum(), **options)), q)
    assert calls() == 3
    saved = jax.checkpoint_policies.save_only_these_names("tessera_attention")
    assert calls(policy=saved) == 2


def test_scan_and_jacrev():
    q = qkv(s=9)[0]

    def layers(q):
        return jax.lax.scan(lambda x, _: (tj.attention(x, x, x), None), q, None, length=3)[0]

    def unrolled(q):
        for _ in range(3):
            q = tj.attention(q, q, q)
        return q
    compare(jax.grad(lambda q: layers(q).sum())(q), jax.grad(lambda q: unrolled(q).sum())(q))
    jacobian = jax.jacrev(lambda q: tj.attention(q, q, q)[0, 0, 0])(q)
    compare(jacobian[3], jax.grad(lambda q: tj.attention(q, q, q)[0, 0, 0, 3])(q))


def test_no_other_derivatives():
    q = qkv(s=5)[0]
    loss = lambda q: tj.attention(q, q, q).sum()  # noqa: E731
    with pytest.raises(tj.Refused, match="no derivative of its own"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)
    for forward in (lambda: jax.jvp(loss, (q,), (q,)), lambda: jax.jacfwd(loss)(q)):
        with pytest.raises(tj.Refused, match="tessera.attention: forward-mode.*use jax.grad"):
            forward()


OPTIONS = {
    "plain": {}, "own bias": {"bias": normal(3, N, B, H, S, S)}, "own bias of keys": {"bias": normal(3, N, S)},
    "own bias of heads": {"bias": normal(3, N, 1, H, S, 1)}, "own sink": {"sink": normal(3, N, H)},
    "own slopes": {"alibi_slopes": abs(normal(3, N, H))},
    "own lengths": {"seqlens_q": jnp.array([[5, 2]] * N), "seqlens_k": jnp.array([[1, 3], [0, 5], [4, 4]])},
    "own ranges": {"key_ranges": jax.random.randint(jax.random.key(4), (N, 1, 1, S, 2), 0, S + 1)},
    "own mask": {"keep": normal(5, N, B, 1, S, S) > 0},
    "own segments": {"segment_ids": jax.random.randint(jax.random.key(4), (N, B, S), 0, 2)},
}


@pytest.fixture
def no_loop(monkeypatch):
    monkeypatch.setattr(_vmap, "_one_by_one", lambda *_: pytest.fail("computed one by one"))


def each(function, *arguments):
    """What vmap means: `function` on one example after the other."""
    results = [function(*(jax.tree.map(lambda x: x[i], x) for x in arguments)) for i in range(N)]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *results)


@pytest.mark.every(2)
@pytest.mark.parametrize("layout", PADDED)
@pytest.mark.parametrize("options", OPTIONS)
def test_vmap_is_one_call(layout, options, no_loop):
    q, k, v = (normal(i, N, *PADDED[layout]) for i in range(3))
    own = OPTIONS[options]
    floats = {name: x for name, x in own.items() if x.dtype == jnp.float32}

    def function(q, k, v, own):
        return tj.attention(q, k, v, **own, layout=layout, causal=True, align="bottom_right", return_lse=True)

    def gradient(q, k, v, own, floats):
        def loss(q, k, v, floats):
            o, lse = function(q, k, v, {**own, **floats})
            return (o * jnp.cos(o)).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()
        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, floats)
    compare(jax.vmap(function)(q, k, v, own), each(function, q, k, v, own))
    compare(jax.vmap(gradient)(q, k, v, own, floats), each(gradient, q, k, v, own, floats))


def test_vmap_of_what_is_shared(no_loop):
    q, k, v = (normal(i, N, B, S, H, D) for i in range(3))
    bias = normal(3, 1, H, S, S)

    def gradient(q, bias):
        return jax.grad(lambda q, v, bias: (tj.attention(q, k[0], v, bias=bias) ** 2).sum(),
                        (0, 1, 2))(q, v[0], bias)
    compare(jax.vmap(gradient, (0, None))(q, bias), each(lambda q: gradient(q, bias), q))
    compare(jax.grad(lambda bias: (jax.vmap(lambda q: tj.attention(q, k[0], v[0], bias=bias))(q) ** 2).sum())(bias),
            sum(gradient(q[i], bias)[2] for i in range(N)))


def test_vmap_of_slices_packed_sequences_and_dropout():
    packed = normal(0, N, B, S, 3, H, D)
    gradient = jax.grad(lambda x: (tj.attention(*(tj.Slice(x, 2, i) for i in range(3))) ** 2).sum())
    compare(jax.vmap(gradient)(packed), each(gradient, packed))
    tokens, cu = normal(0, N, S, H, D), jnp.array([0, 2, S])

    def thd(x):
        return tj.attention(x, x, x, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    compare(jax.vmap(thd)(tokens), each(thd, tokens))

    def row(x):
        x = x[None].swapaxes(1, 2)
        o, lse = tj.attention(x, x, x, layout="bhsd", cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
        return o.swapaxes(1, 2)[0], lse[0]
    compare(row(tokens[0]), thd(tokens[0]))
    compare(jax.vmap(row)(tokens), each(thd, tokens))

    def total(function):
        return lambda x: (function(x)[0] ** 2).sum() + function(x)[1].sum()
    compare([jax.jit(jax.grad(total(row)))(tokens[0])], [jax.grad(total(thd))(tokens[0])])
    q, keys = normal(0, N, B, S, H, D), jax.random.split(jax.random.key(1), N)

    def dropped(q, key):
        return jax.grad(lambda q: (tj.attention(q, q, q, dropout_p=0.5, rng_state=key) ** 2).sum())(q)
    compare(jax.vmap(dropped)(q, keys), each(dropped, q, keys))


# ---- seeds ----

def test_seeds():
    q, k, v = qkv()
    key = jax.random.key(7)
    low, high = (int(word) for word in jax.random.key_data(key))
    seed = low | high << 32
    expected = tessera.attention(*map(np.asarray, (q, k, v)), dropout_p=0.3, rng_state=(seed, 0))
    for state in (key, jax.random.key_data(key), (seed, 0), np.array([seed, 0]), [seed, 0, 0, H],
                  jnp.array([low, high, 0, 0], jnp.uint32)):
        same(tj.attention(q, k, v, dropout_p=0.3, rng_state=state), expected)
        same(tj.dropout_mask(B, H, 33, 33, 0.3, state), tessera.dropout_mask(B, H, 33, 33, 0.3, (seed, 0)))
    same(jax.jit(lambda key: tj.attention(q, k, v, dropout_p=0.3, rng_state=key))(key), expected)
    start = np.array([3, 1000])
    same(tj.dropout_mask(B, H, 9, 9, 0.3, (1, 2, 3, 4), k_start=start),
         tessera.dropout_mask(B, H, 9, 9, 0.3, (1, 2, 3, 4), k_start=start))


# ---- programs ----

def test_export_with_symbolic_shapes(on_cpu):
    """For the CPU; on CUDA the workspace must be known."""
    b, s = jax.export.symbolic_shape("b, s")
    shape = jax.ShapeDtypeStruct((b, s, H, D), jnp.float32)

    def export(platform):
        return jax.export.export(
            jax.jit(lambda q, k, v: tj.attention(q, k, v, causal=True, align="top_left")), platforms=[platform],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("tessera_attention")])(shape, shape, shape)
    exported = export("cpu")
    for size in (1, 17):
        q, k, v = qkv(b=size, s=size + 3, d=D)
        same(exported.call(q, k, v), tj.attention(q, k, v, causal=True))
    with pytest.raises(tj.Refused, match="q.shape=symbolic: on CUDA the workspace must be known"):
        export("cuda")


def test_lowering_for_another_platform():
    """For the devices that the library was built for, with the workspace as one more result."""
    q = qkv(dtype=jnp.bfloat16, d=64)[0]
    traced = jax.jit(lambda q: tj.attention(q, q, q)).trace(q)
    if "cuda_sm90" in tessera.backends():
        assert "xui8>" in traced.lower(lowering_platforms=("cuda",)).as_text()
    else:
        with pytest.raises(tj.Refused, match="no CUDA backend"):
            traced.lower(lowering_platforms=("cuda",))
    with pytest.raises(tj.Refused, match="platform='tpu'"):
        traced.lower(lowering_platforms=("tpu",))


class Gpu:
    """A double of a CUDA device of JAX."""
    platform = "gpu"

    def __init__(self, ordinal, arch="9.0"):
        self.id = self.local_hardware_id = ordinal
        self.compute_capability = arch


GPUS = [Gpu(0), Gpu(1), Gpu(2), Gpu(3, "8.0")]
BYTES = [100, 300, 200, 700]  # of the workspace on each


@pytest.fixture
def gpus(monkeypatch):
    """GPUS are this process's; answers the (arch, ordinal)s of GPUs that the library was asked about."""
    asked, real = [], _lib.prepare

    def prepare(problem, device, num_threads, info, error):
        if _lib.Device.from_address(device).kind != _lib.CUDA:  # what every call is checked by
            return real(problem, device, num_threads, info, error)
        device = _lib.Device.from_address(device)
        asked.append((device.arch, device.ordinal))
        _lib.Info.from_address(info).workspace_bytes = BYTES[device.ordinal] + device.arch
        return _lib.OK

    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: GPUS)
    monkeypatch.setattr(_lib, "prepare", prepare)
    return asked


def test_workspace_of_every_device_here(gpus, on_cpu):
    """Lowering where no CUDA device is named: the largest of this process's devices."""
    q = qkv(dtype=jnp.bfloat16, d=64)[0]
    traced = jax.jit(lambda q: tj.attention(q, q, q)).trace(q)
    gpus.clear()
    assert "tensor<780xui8>" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert sorted(gpus) == [(80, 3), (90, 0), (90, 1), (90, 2)]


def assigned(*devices):
    return types.SimpleNamespace(device_assignment=devices)


def meshed(mesh):
    return types.SimpleNamespace(mesh=mesh)


EVERYWHERE = [(80, 3), (90, 0), (90, 1), (90, 2)]
CONTEXTS = {
    "one device": (assigned(GPUS[1]), [(90, 1)]),
    "two devices": (assigned(GPUS[2], GPUS[3]), [(80, 3), (90, 2)]),
    "inside shard_map": (meshed(Mesh(np.array(GPUS[1:3], object), "x")), [(90, 1), (90, 2)]),
    "an abstract mesh": (meshed(AbstractMesh((2,), ("x",))), EVERYWHERE),
    "nothing assigned": (types.SimpleNamespace(device_assignment=None), EVERYWHERE),
    "from the CPU": (assigned(jax.devices("cpu")[0]), EVERYWHERE),
    "one of another process": (assigned(GPUS[3], Gpu(1)), EVERYWHERE),
    "a topology that is not here": (assigned(Gpu(5, "10.0"), Gpu(6, "10.0")), [(100, 0)]),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_devices_of_a_program(gpus, context):
    """One that is elsewhere counts as those here of its architecture, if there are any."""
    del gpus
    axis_context, places = CONTEXTS[context]
    assert _call.places(_call.assigned(types.SimpleNamespace(axis_context=axis_context))) == places


def test_devices_without_cuda(monkeypatch):
    """All architectures that are known; a topology has its own."""
    def none(*_, **__):
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr(jax, "local_devices", none)
    assert _call.places(jax.devices("cpu")) == [(arch, 0) for arch in (80, 89, 90, 100, 120)]
    assert _call.places([Gpu(5)]) == [(90, 0)]


def test_explain_asks_the_devices_own_ordinal(gpus, monkeypatch):
    del gpus
    monkeypatch.setattr(jax, "devices", lambda *_: GPUS[2:])
    device = _functions._device(jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.float32))
    assert (device.kind, device.ordinal, device.arch) == (_lib.CUDA, 2, 90)


def test_donated_buffers():
    q, k, v = qkv()
    expected = tj.attention(q, k, v)
    donating = jax.jit(lambda q, k, v: tj.attention(q, k, v), donate_argnums=(0, 1, 2))
    same(donating(q + 0, k + 0, v + 0), expected)


def test_one_compilation_for_all_lengths():
    q = normal(0, 40, H, D)
    program = jax.jit(lambda q, cu: tj.attention(q, q, q, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu))
    for cuts in ([0, 10, 40], [0, 0, 3], [0, 39, 40]):
        cu = np.array(cuts, np.int32)
        expected = tessera.attention(*[np.asarray(q)] * 3, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu)
        same(program(q, jnp.asarray(cu)), expected)
    assert program._cache_size() == 1


def test_one_array_for_both_sides_of_lengths():
    """Equal lengths are known by identity, of NumPy's arrays too."""
    q = normal(0, 40, H, D)
    cu = np.array([0, 10, 40], np.int32)
    for same_array in (cu, jnp.asarray(cu)):
        tj.attention(q, q, q, layout="thd", cu_seqlens_q=same_array, cu_seqlens_k=same_array, causal=True)
    with pytest.raises(ValueError, match="align"):
        tj.attention(q, q, q, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu.copy(), causal=True)


def test_disable_jit():
    q, k, v = qkv()
    with jax.disable_jit():
        same(tj.attention(q, k, v), tessera.attention(*map(np.asarray, (q, k, v))))


# ---- what is wrong, and when it is said ----

ILLEGAL = {
    "causal": (dict(causal=3), r"causal=3: must be True or False"),
    "window": (dict(window=(0, -5)), r"window=\(0, -5\)"),
    "mask": (dict(keep=jnp.ones((5, 7), bool)), r"keep\.shape=\[5, 7\], read as \[1, 1, 5, 7\]"),
    "seed": (dict(dropout_p=0.1), r"rng_state=None"),
    "key": (dict(dropout_p=0.1, rng_state=jnp.zeros(3, jnp.uint32)), r"rng_state\.shape=\[3\]"),
    "probability": (dict(dropout_p=1.5, rng_state=(0, 0)), r"dropout_p=1\.5"),
    "softcap": (dict(softcap=-1.0), r"softcap=-1"),
    "bias": (dict(bias=[[1.0]]), r"bias"),
    "accumulate": (dict(accumulate=True), r"accumulate=True"),
    "slice": (dict(bias=tj.Slice(jnp.zeros((1, 1, 33, 33)), 0, 0)), r"only q, k and v may be slices"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_while_traced(name):
    keywords, match = ILLEGAL[name]
    q, k, v = qkv()
    for call in (tj.attention, tj.explain, jax.jit(lambda *x: tj.attention(*x, **keywords))):
        with pytest.raises(ValueError, match=match):
            call(q, k, v, **({} if call not in (tj.attention, tj.explain) else keywords))


def test_traced_options_are_named():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"softmax_scale=.*: is traced; must be a Python value"):
        jax.jit(lambda scale: tj.attention(q, k, v, softmax_scale=scale))(0.5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        tj.attention(q, k, v, out=q)
    with pytest.raises(ValueError, match="q=.*: must be a JAX array"):
        tj.attention(1.0, k, v)


def test_refused_before_anything_compiles():
    q = jnp.zeros((1, 4, 2, 8))
    backend, why = ("cuda_sm90", "must be a CUDA device") if ON_CPU else ("cpu", "must be the CPU")
    program = jax.jit(lambda q: tj.attention(q, q, q, backend=backend)).trace(q)
    with pytest.raises(tj.Refused, match=why):
        program.lower()
    half = q.astype(jnp.bfloat16)
    with pytest.raises(tj.Refused, match="no backend supports"):
        tj.attention(half, half, half, precision="fp8", page_table=jnp.zeros((1, 1), jnp.int32),
                     seqlens_k=jnp.full((1,), 4))


def test_wrong_lengths(on_cpu):
    """An eager call on the CPU looks at values first; a program says it when it runs."""
    q, k, v = qkv()
    lengths = jnp.array([99, 1])
    with pytest.raises(ValueError, match=r"seqlens_k\[0\]=99: must be between 0 and the extent, 33"):
        tj.attention(q, k, v, seqlens_k=lengths)
    program = jax.jit(lambda lengths: tj.attention(q, k, v, seqlens_k=lengths))
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT: tessera.attention: seqlens_k\[0\]=99"):
        jax.block_until_ready(program(lengths))


@pytest.mark.skipif(ON_CPU, reason="the CPU names them")
def test_wrong_lengths_on_a_gpu():
    """The host cannot read them for free: they reach no other sequence, and nothing outside the arrays."""
    q, k, v = qkv()
    expected = tj.attention(q, k, v, seqlens_k=jnp.array([33, 1]))
    for call in (tj.attention, jax.jit(tj.attention)):
        o = call(q, k, v, seqlens_k=jnp.array([99, 1]))
        same(o[1], expected[1])
        assert jnp.isfinite(o).all()


def test_lengths_that_are_still_computed(on_cpu):
    """An eager call on the CPU waits for the values that it looks at: not for q, which the backend waits for."""
    q, k, v = qkv()
    x = normal(4, 700, 700)

    @jax.jit
    def late(lengths):
        y = jax.lax.fori_loop(0, 4, lambda _, y: jnp.tanh(y @ x), x)
        return lengths + (0 * y[0, 0]).astype(jnp.int32), q + 0 * y[0, 0]
    right, wrong = jnp.array([33, 7]), jnp.array([34, 7])
    expected = tj.attention(q, k, v, seqlens_k=right)
    for _ in range(15):
        same(tj.attention(q, k, v, seqlens_k=late(right)[0]), expected)
        with pytest.raises(ValueError, match=r"seqlens_k\[0\]=34: must be between 0 and the extent, 33"):
            tj.attention(q, k, v, seqlens_k=late(wrong)[0])
        same(tj.attention(late(right)[1], k, v, seqlens_k=right), expected)
    with pytest.raises(ValueError, match=r"align\[0\]=.*: a diagonal must be"):
        with jax.enable_x64(True):
            tj.attention(q, k, v, causal=True, align=jnp.array([2**61, 0]))


def test_explain():
    q, k, v = qkv()
    assert tj.explain(q, k, v, causal=True).backend == {"cpu": "cpu", "cuda": "cuda_sm80"}[DEVICE]  # fp32
    why = tj.explain(*(jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (q, k, v)), backward=True,
                     device="sm90")
    assert why.answer["case"].startswith("bwd bf16 b=2 s=33 h=4 d=16")
    assert str(tj.explain("fwd fp32 b=1 s=8 h=2 d=16")) == str(tessera.explain("fwd fp32 b=1 s=8 h=2 d=16"))


def test_documented_like_the_others():
    import inspect
    ours, theirs = (inspect.signature(x.attention).parameters for x in (tj, tessera))
    assert set(theirs) - set(ours) == {"lse", "out"} and set(ours) <= set(theirs)


# ---- jax.nn, flax ----

@pytest.mark.parametrize("keywords", [
    {}, {"is_causal": True}, {"local_window_size": 3}, {"local_window_size": (4, 1), "is_causal": True},
    {"scale": 0.2, "bias": normal(3, 1, H, 33, 33)}, {"mask": normal(4, 33, 33) > -1},
    {"query_seq_lengths": jnp.array([33, 20]), "key_value_seq_lengths": jnp.array([9, 33])}],
    ids=lambda keywords: "+".join(keywords) or "plain")
def test_agrees_with_jax_nn(keywords):
    q, k, v = qkv(hk=2)
    ours = nn.dot_product_attention(q, k, v, **keywords, return_residual=True)
    theirs = jax.nn.dot_product_attention(q, k, v, **keywords, return_residual=True)
    if "query_seq_lengths" not in keywords:
        compare(ours, theirs)
    compare(ours[0], theirs[0])
    one = {name: x[:1] if name.endswith("lengths") else x for name, x in keywords.items()}
    compare(nn.dot_product_attention(q[0], k[0], v[0], **one), ours[0][0])


def test_flax_attention_fn():
    nnx = pytest.importorskip("flax.nnx")
    linen = pytest.importorskip("flax.linen")
    x = normal(0, B, S, 16)
    mask = linen.make_causal_mask(jnp.ones((B, S)))
    theirs = linen.MultiHeadDotProductAttention(num_heads=4)
    ours = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=nn.dot_product_attention)
    parameters = theirs.init(jax.random.key(0), x)
    compare(ours.apply(parameters, x, mask=mask), theirs.apply(parameters, x, mask=mask))
    modules = [nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **options) for options in
               ({}, {"attention_fn": nn.dot_product_attention})]
    compare(modules[1](x, mask=mask), modules[0](x, mask=mask))
    dropping = linen.MultiHeadDotProductAttention(
        num_heads=4, attention_fn=nn.dot_product_attention, dropout_rate=0.5, broadcast_dropout=False)
    dropped = dropping.apply(parameters, x, deterministic=False, rngs={"dropout": jax.random.key(1)})
    assert abs(dropped - ours.apply(parameters, x)).max() > 0.01
    with pytest.raises(tj.Refused, match="broadcast_dropout"):
        linen.MultiHeadDotProductAttention(
            num_heads=4, attention_fn=nn.dot_product_attention, dropout_rate=0.5).apply(
                parameters, x, deterministic=False, rngs={"dropout": jax.random.key(1)})


# ---- the binding ----

def test_interface_is_that_of_the_installed_jaxlib():
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-I", ROOT / "python" / "bindings", "-isystem",
         jax.ffi.include_dir(), ROOT / "tests" / "jax" / "abi_test.cc"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_interface_check_sees_a_difference(tmp_path):
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    (tmp_path / "jax").mkdir()
    header = (ROOT / "python/bindings/jax/xla_ffi_abi.h").read_text()
    (tmp_path / "jax" / "xla_ffi_abi.h").write_text(header.replace("kF16 = 10", "kF16 = 11"))
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-I", tmp_path, "-isystem", jax.ffi.include_dir(),
         ROOT / "tests" / "jax" / "abi_test.cc"], capture_output=True, text=True)
    assert done.returncode != 0 and "kF16" in done.stderr


def test_check_through_jax():
    from tessera.__main__ import main
    assert main(["check", "--cases", "smoke", "--through", "jax", "--device", DEVICE]) == 0


def test_sums_in_place_are_merged_instead():
    q = jnp.ones((1, 2, 1, 8))
    with pytest.raises(ValueError, match="attention: accumulate=True: .*tessera.jax.merge joins"):
        tessera.jax.attention(q, q, q, accumulate=True)
