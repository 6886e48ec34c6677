# SPDX-License-Identifier: Apache-2.0
"""tessera.te.jax.flax: libtessera's path and XLA's are one function, parameters have TE's names, a
cache continues what it began."""

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import te_jax_cases  # noqa: E402
from flax import linen as nn  # noqa: E402
from jax_device import same  # noqa: E402

import tessera.jax  # noqa: E402
from tessera.te.jax.attention import AttnSoftmaxType, SequenceDescriptor  # noqa: E402
from tessera.te.jax.flax import (  # noqa: E402
    DotProductAttention, MultiHeadAttention, RelativePositionBiases)
from tessera.te.jax.flax.transformer import rotary_pos_emb  # noqa: E402

KEY = jax.random.key(3)
FUSED, UNFUSED = "_FusedDotProductAttention_0", "_UnfusedDotProductAttention_0"


def arrays(b=2, s=12, h=4, d=8, hk=None, dv=None):
    shapes = (b, s, h, d), (b, s, hk or h, d), (b, s, hk or h, dv or d)
    return [jax.random.normal(key, shape) for key, shape in zip(jax.random.split(KEY, 3), shapes)]


# ---- both paths ----

@pytest.mark.every(2)
@pytest.mark.parametrize("case", te_jax_cases.cases(24, seed=1), ids=str)
def test_both_paths_are_one_function(case, monkeypatch):
    """Forward and backward, with the same dropout."""
    if case.described == "mask" and not case.mask.is_padding():
        case = case._replace(described="seqlens")
    case = case._replace(dtype="float32")
    problem = te_jax_cases.Problem(case)
    softmax = {AttnSoftmaxType.VANILLA_SOFTMAX: "vanilla", AttnSoftmaxType.LEARNABLE_SOFTMAX:
               "learnable", AttnSoftmaxType.OFF_BY_ONE_SOFTMAX: "off_by_one"}[case.softmax]
    given = problem.arguments()
    module = DotProductAttention(
        problem.sizes.dqk, problem.sizes.hq, problem.sizes.hk, attention_dropout=case.dropout,
        attn_mask_type=case.mask.name.lower().replace("_mask", "").replace("no", "no_mask"),
        attn_bias_type=given["attn_bias_type"].name.lower(), qkv_layout=case.layout.name.lower(),
        scale_factor=given["scaling_factor"], window_size=case.window, softmax_type=softmax,
        max_segments_per_seq=given["max_segments_per_seq"])
    descriptor = problem.descriptor()

    def run(q, k, v, bias, offset):
        name = FUSED if fused else UNFUSED
        params = {} if offset is None else {"params": {name: {"softmax_offset": offset}}}
        qkv = problem.packed(q, k, v)
        return module.apply(params, *qkv, *(None,) * (3 - len(qkv)), descriptor, bias,
                            rngs={"dropout": KEY})
    results = []
    for fused in (True, False):
        monkeypatch.setenv("NVTE_FUSED_ATTN", str(int(fused)))
        run_both = te_jax_cases.gradients(
            run, (problem.q, problem.k, problem.v, problem.bias, problem.offset))
        results.append(run_both(problem.weights))
    for name, (mine, other) in {"out": [x[0] for x in results], **{
            name: [x[1][name] for x in results] for name in results[0][1]}}.items():
        np.testing.assert_allclose(mine, other, atol=2e-5, err_msg=name)


def test_switch_chooses_the_path(monkeypatch):
    q, k, v = arrays()
    module = DotProductAttention(8, 4)

    def calls():
        return str(jax.make_jaxpr(lambda: module.apply({}, q, k, v))()).count("tessera_attention")
    assert calls() > 0
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert calls() == 0


@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "thd_thd_thd", "thd_t2hd"])
@pytest.mark.parametrize("path", ["0", "1"])
def test_padding_may_hold_anything(path, layout, monkeypatch):
    """NaN behind a sequence changes no output and no gradient, also where a query sees all of its sequence."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", path)
    lengths = jnp.array([7, 0], jnp.int32)
    descriptor = SequenceDescriptor.from_seqlens(lengths) if layout.startswith("bshd") else \
        SequenceDescriptor.from_seqlens_and_offsets(lengths[:, None], jnp.array([[0, -1], [-1, -1]]))
    module = DotProductAttention(8, 4, attn_mask_type="padding", qkv_layout=layout)
    outside = (jnp.arange(12) >= lengths[:, None])[:, :, None, None]

    def run(q, k, v):
        qkv = (q, jnp.stack((k, v), 2), None) if layout == "thd_t2hd" else (q, k, v)
        out = module.apply({}, *qkv, descriptor)
        return jnp.sum(out * jnp.cos(jnp.arange(8.0))), out

    results = []
    for fill in (0, jnp.nan):
        qkv = [jnp.where(outside, fill, x) for x in arrays()]
        gradients, out = jax.grad(run, argnums=(0, 1, 2), has_aux=True)(*qkv)
        results.append((out, *gradients))
    for clean, poisoned in zip(*results):
        assert np.array_equal(clean, poisoned) and clean.any()


def test_what_libtessera_refuses_runs_with_a_warning():
    """A bias of packed segments."""
    q, k, v = arrays(s=10)
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0, 0]] * 2)
    pos = jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 0, 0, 0]] * 2)
    bias = jax.random.normal(KEY, (1, 4, 10, 10))
    module = DotProductAttention(8, 4, qkv_layout="thd_thd_thd", max_segments_per_seq=2,
                                 attn_mask_type="padding_causal")
    with pytest.warns(UserWarning, match="materialises the scores, 3200 bytes, since "
                      "FusedAttention is disabled due to .*THD_THD_THD takes no bias"):
        out = module.apply({}, q, k, v,
                           SequenceDescriptor.from_segment_ids_and_pos(ids, pos), bias)
    keep = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids != 0)[:, None, :, None]
    expected = tessera.jax.attention(q, k, v, bias=bias, keep=keep, causal=True, align="top_left")
    same(out, expected, atol=1e-6)


def test_sequence_first():
    q, k, v = arrays(hk=2)
    expected = DotProductAttention(8, 4, 2).apply({}, q, k, v)
    turned = DotProductAttention(8, 4, 2, transpose_batch_sequence=True)
    out = turned.apply({}, *(x.swapaxes(0, 1) for x in (q, k, v)))
    same(out.swapaxes(0, 1), expected)


def test_largest_logit(monkeypatch):
    q, k, v = arrays()
    module = DotProductAttention(8, 4, attn_mask_type="no_mask", return_max_logit=True)
    out, largest = module.apply({}, q, k, v)
    scores = np.einsum("bihd,bjhd->bhij", q, k) * 8 ** -0.5
    np.testing.assert_allclose(largest, scores.max((0, 2, 3)), rtol=1e-5)
    assert out.shape == q.shape
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with pytest.raises(ValueError, match="return_max_logit=True: needs libtessera"):
        module.apply({}, q, k, v)


@pytest.mark.parametrize("fields, said", [
    (dict(qkv_layout="sbhd"), "qkv_layout='sbhd': must be one of bs3hd"),
    (dict(attn_bias_type="alibi"), "attn_bias_type='alibi': must be"),
    (dict(context_parallel_strategy="tree"), "context_parallel_strategy='tree': must be one"),
    (dict(dtype=jnp.bfloat16), "dtype=bfloat16: must be that of the arrays, float32"),
    (dict(attn_mask_type="padding"), "sequence_descriptor=None: PADDING_MASK needs"),
    (dict(softmax_type="hard"), "softmax_type='hard'")])
def test_fields_that_do_not_fit(fields, said):
    with pytest.raises(ValueError, match=said):
        with pytest.MonkeyPatch.context() as context:
            context.setattr("warnings.warn", lambda *_, **__: None)
            DotProductAttention(8, 4, **fields).apply({}, *arrays())


def test_score_mod_is_refused():
    for module in (DotProductAttention(8, 4, score_mod=max),
                   MultiHeadAttention(8, 4, score_mod_bprop=max)):
        with pytest.raises(tessera.jax.Refused, match="score_mod.*max.*not have score_mod yet"):
            module.init(KEY, *arrays()[:3 if isinstance(module, DotProductAttention) else 2])


# ---- MultiHeadAttention ----

def hidden(b=2, s=16, n=32):
    return jax.random.normal(KEY, (b, s, n))


def shapes_of(variables):
    flat = jax.tree.leaves_with_path(nn.meta.unbox(variables["params"]))
    return {"/".join(key.key for key in path): x.shape for path, x in flat}


NORM = {"scale": (32,), "ln_bias": (32,)}


@pytest.mark.parametrize("fields, cross, expected", [
    ({}, False, {"qkv": {"kernel": (32, 3, 32), **NORM}}),
    (dict(num_gqa_groups=2, use_bias=True), False, {
        "query": {"kernel": (32, 32), "bias": (32,), **NORM},
        "kv": {"kernel": (32, 2, 16), "bias": (2, 16)}, "out": {"bias": (32,)}}),
    (dict(layernorm_type="rmsnorm"), True, {"query": {"kernel": (32, 32), "scale": (32,)},
                                            "kv": {"kernel": (32, 2, 32)}}),
    (dict(fuse_qkv_params=False, input_layernorm=False), False, {
        "query": {"kernel": (32, 32)}, "key": {"kernel": (32, 32)}, "value": {"kernel": (32, 32)}}),
    (dict(low_rank_adaptation_scope="exclude_output_proj", low_rank_adaptation_dim=4), False, {
        "qkv": {"kernel": (32, 3, 32), **NORM, "lora_a_kernel": (32, 3, 4),
                "lora_b_kernel": (3, 4, 32)}}),
    (dict(softmax_type="learnable"), False, {
        "qkv": {"kernel": (32, 3, 32), **NORM},
        f"DotProductAttention_0/{FUSED}": {"softmax_offset": (1, 4, 1, 1)}})])
def test_parameters_have_their_names(fields, cross, expected):
    x = hidden()
    variables = MultiHeadAttention(8, 4, **fields).init(KEY, x, hidden(s=9) if cross else x)
    expected.setdefault("out", {})["kernel"] = (32, 32)
    assert shapes_of(variables) == {f"{module}/{name}": shape for module, names in expected.items()
                                    for name, shape in names.items()}


def test_is_what_its_parts_are():
    """Projections, attention and output by hand."""
    x = hidden()
    module = MultiHeadAttention(8, 4, 2, use_bias=True, scale_attn_logits=True,
                                zero_centered_gamma=True, return_layernorm_output=True,
                                bias_init=nn.initializers.normal())
    variables = nn.meta.unbox(module.init(KEY, x, x))
    out, normed = module.apply(variables, x, x)
    p = variables["params"]
    mean, deviation = x.mean(-1, keepdims=True), jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(normed, (x - mean) / deviation * (1 + p["query"]["scale"]) +
                               p["query"]["ln_bias"], atol=1e-5)
    q = (normed @ p["query"]["kernel"] + p["query"]["bias"]).reshape(2, 16, 4, 8)
    kv = jnp.einsum("bsn,ncm->bscm", normed, p["kv"]["kernel"]) + p["kv"]["bias"]
    kv = kv.reshape(2, 16, 2, 2, 8)
    o = tessera.jax.attention(q, kv[:, :, 0], kv[:, :, 1], causal=True)
    expected = o.reshape(2, 16, 32) @ p["out"]["kernel"] + p["out"]["bias"]
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_low_rank_adaptation_adds():
    x = hidden()
    module = MultiHeadAttention(8, 4, low_rank_adaptation_scope="all", low_rank_adaptation_dim=4,
                                low_rank_adaptation_alpha=2.0, input_layernorm=False)
    variables = nn.meta.unbox(module.init(KEY, x, x))
    plain = MultiHeadAttention(8, 4, input_layernorm=False)
    same(module.apply(variables, x, x)[0], plain.apply(variables, x, x)[0], rtol=1e-7)
    p = variables["params"]["qkv"]
    p["lora_b_kernel"] = jax.random.normal(KEY, p["lora_b_kernel"].shape)
    merged = jax.tree.map(lambda x: x, variables)
    merged["params"]["qkv"]["kernel"] = p["kernel"] + 0.5 * jnp.einsum(
        "ncr,crm->ncm", p["lora_a_kernel"], p["lora_b_kernel"])
    np.testing.assert_allclose(module.apply(variables, x, x)[0], plain.apply(merged, x, x)[0],
                               atol=1e-4)


@pytest.mark.parametrize("fields", [
    dict(enable_rotary_pos_emb=True, num_gqa_groups=2), dict(window_size=(5, 0)),
    dict(transpose_batch_sequence=True, fuse_qkv_params=False), dict(attn_mask_type="no_mask")])
def test_cache_continues(fields):
    """Token by token as all at once; without a causal mask, as a causal one."""
    x = hidden()
    axis = 0 if fields.get("transpose_batch_sequence") else 1
    x = x.swapaxes(0, 1) if axis == 0 else x
    module = MultiHeadAttention(8, 4, scale_attn_logits=True, **fields)
    variables = module.init(KEY, x, x, decode=True)
    params = {"params": variables["params"]}
    whole, _ = module.clone(attn_mask_type="causal").apply(params, x, x)
    cache, steps = variables["cache"], []

    @jax.jit
    def step(cache, token):
        (out, _), changed = module.apply({**params, "cache": cache}, token, token, decode=True,
                                         mutable=["cache"])
        return out, changed["cache"]
    for i in range(x.shape[axis]):
        out, cache = step(cache, jax.lax.dynamic_slice_in_dim(x, i, 1, axis))
        steps.append(out)
    np.testing.assert_allclose(jnp.concatenate(steps, axis), whole, atol=1e-5)
    assert set(cache) == {"cached_key", "cached_value", "cache_index"}
    assert cache["cache_index"] == 16
    with pytest.raises(ValueError, match="must be one token of each of the cache's 2 sequences"):
        module.apply({**params, "cache": cache}, x, x, decode=True, mutable=["cache"])


def test_cache_heeds_masks_and_biases():
    x = hidden(s=6)
    module = MultiHeadAttention(8, 4, attn_mask_type="padding")
    variables = module.init(KEY, x, x, jnp.zeros((2, 1, 6, 6), bool), decode=True)
    params, cache = {"params": variables["params"]}, variables["cache"]
    hidden_keys = jnp.zeros((2, 1, 1, 6), bool).at[0, :, :, 0].set(True)  # of the first sequence
    bias = jax.random.normal(KEY, (1, 4, 6, 6))
    later = jnp.triu(jnp.ones((6, 6), bool), 1)
    with pytest.warns(DeprecationWarning):
        whole, _ = module.apply(params, x, x, hidden_keys | later, bias)
        for i in range(6):
            token = x[:, i:i + 1]
            (out, _), changed = module.apply({**params, "cache": cache}, token, token, hidden_keys,
                                             bias, decode=True, mutable=["cache"])
            cache = changed["cache"]
            np.testing.assert_allclose(out, whole[:, i:i + 1], atol=1e-5)


def test_model_learns():
    """To copy what stood two tokens before."""
    tokens = jax.random.randint(KEY, (8, 24), 0, 16)
    x = jax.nn.one_hot(tokens, 32)
    module = MultiHeadAttention(16, 2, enable_rotary_pos_emb=True, attention_dropout=0.1)
    params = module.init({"params": KEY, "dropout": KEY}, x, x)

    def loss(params, key):
        out, _ = module.apply(params, x, x, rngs={"dropout": key})
        wrong = -jax.nn.log_softmax(out[:, 2:])
        return jnp.take_along_axis(wrong, tokens[:, :-2, None], axis=-1).mean()

    @jax.jit
    def train(params, key):
        value, grads = jax.value_and_grad(loss)(params, key)
        return value, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    values = []
    for i in range(150):
        value, params = train(params, jax.random.fold_in(KEY, i))
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]


def test_renamed_fields():
    with pytest.warns(DeprecationWarning, match="num_heads is deprecated; pass num_attention"):
        assert MultiHeadAttention(8, 4, num_heads=2).num_attention_heads == 2
    with pytest.raises(ValueError, match="output_layernorm=True: is gone"):
        MultiHeadAttention(8, 4, output_layernorm=True)
    with pytest.raises(ValueError, match="low_rank_adaptation_scope='some': must be one of none"):
        MultiHeadAttention(8, 4, low_rank_adaptation_scope="some").init(KEY, hidden(), hidden())


# ---- positions ----

@pytest.mark.parametrize("method", ["consecutive", "alternate"])
@pytest.mark.parametrize("turned", [False, True])
def test_rotary_embedding_turns_pairs(method, turned):
    x = jax.random.normal(KEY, (2, 9, 3, 8))
    out = rotary_pos_emb(x.swapaxes(0, 1) if turned else x, (2, 500), turned, method, start=4)
    out = np.asarray(out.swapaxes(0, 1) if turned else out)
    pairs = (slice(0, None, 2), slice(1, None, 2)) if method == "consecutive" else \
        (slice(0, 4), slice(4, 8))
    z = np.asarray(x)[..., pairs[0]] + 1j * np.asarray(x)[..., pairs[1]]
    times = 2 * (500 / 2) ** (np.arange(4) / 4)
    z = z * np.exp(1j * (4 + np.arange(9))[:, None, None] / times)
    np.testing.assert_allclose(out[..., pairs[0]], z.real, atol=1e-5)
    np.testing.assert_allclose(out[..., pairs[1]], z.imag, atol=1e-5)


def test_relative_biases_share_buckets():
    module = RelativePositionBiases(num_buckets=8, max_distance=16, num_attention_heads=2)
    variables = nn.meta.unbox(module.init(KEY, 4, 4))
    table = variables["params"]["rel_embedding"]
    bias = module.apply(variables, 20, 20)
    assert bias.shape == (1, 2, 20, 20)
    # A side has 4 buckets: distances 0 and 1 have one each, 2 .. 15 share two by logarithms, and
    # distances from 16 on the last.
    before = [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    np.testing.assert_array_equal(bias[0, :, 19, ::-1], table[:, before])
    np.testing.assert_array_equal(bias[0, :, 0, 1:3], table[:, [5, 6]])
    one_way = module.apply(variables, 20, 20, bidirectional=False)
    np.testing.assert_array_equal(one_way[0, :, 0], np.repeat(table[:, :1], 20, 1))


def test_relative_biases_reach_attention():
    x = hidden(s=12)
    bias = RelativePositionBiases(8, 16, 4)
    attention = MultiHeadAttention(8, 4)
    table, params = bias.init(KEY, 12, 12), attention.init(KEY, x, x)

    def loss(table):
        return (attention.apply(params, x, x, None, bias.apply(table, 12, 12))[0] ** 2).sum()
    grad = jax.tree.leaves(jax.grad(loss)(table))[0]
    assert np.abs(grad).max() > 0 and np.isfinite(grad).all()
