# SPDX-License-Identifier: Apache-2.0
"""tessera.te.jax: fused_attn, functions without gradients, sizes, what is illegal or refused."""

import re
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import te_jax_cases  # noqa: E402
from jax_device import same  # noqa: E402

import tessera.jax  # noqa: E402
from tessera.te.jax import cpp_extensions as tex  # noqa: E402
from tessera.te.jax import transformer_engine_jax as te_jax  # noqa: E402
from tessera.te.jax.attention import (  # noqa: E402
    AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor, fused_attn,
    fused_attn_thd, is_fused_attn_kernel_available)

VANILLA, NO_BIAS = AttnSoftmaxType.VANILLA_SOFTMAX, AttnBiasType.NO_BIAS
CALL = (NO_BIAS, AttnMaskType.PADDING_CAUSAL_MASK, QKVLayout.BSHD_BSHD_BSHD, VANILLA, 0.25, 0.0,
        True)
IDS = np.array([[1, 1, 1, 0, 2, 2, 2, 2, 3, 0], [1, 1, 2, 2, 2, 0, 0, 0, 0, 0]], np.int32)
POS = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0], [0, 1, 0, 1, 2, 3, 4, 0, 0, 0]], np.int32)


def qkv(b=2, s=10, h=4, d=16, seed=0, sk=None):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(b, n, h, d)), jnp.float32)
                 for n in (s, sk or s, sk or s))


def lengths(*values):
    return SequenceDescriptor.from_seqlens(jnp.asarray(values, jnp.int32))


def call(**changes):
    names = ("attn_bias_type", "attn_mask_type", "qkv_layout", "softmax_type", "scaling_factor",
             "dropout_probability", "is_training")
    return {**dict(zip(names, CALL)), **changes}


# ---- descriptors ----

@pytest.mark.parametrize("ids, pos, places, said", [
    ([[1, 2, 1, 0]], [[0, 0, 0, 0]], 3, "must ascend in a row"),
    ([[2, 2, 1, 1]], [[0, 1, 0, 1]], 3, "must ascend in a row"),
    ([[1, 2, 3, 4]], [[0, 0, 0, 0]], 3, "max_segments_per_seq=3: segment_ids of q go up to 4"),
    ([[1, 1, 2, 2]], [[0, 1, 2, 3]], 3, "segment_pos of q.*must be 0 at the begin"),
    ([[1, 1, 2, 2, 2]], [[0, 1, 0, 1, 2]], 3, r"shape=\(1, 5\): must be \(1, 4\)")])
def test_ids_that_make_no_segments(ids, pos, places, said):
    q, k, v = qkv(1, 4)
    descriptor = SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(ids), jnp.asarray(pos))
    with pytest.raises(ValueError, match=said):
        fused_attn((q, k, v), None, descriptor, None, max_segments_per_seq=places,
                   **call(qkv_layout=QKVLayout.THD_THD_THD))


def test_positions_are_counted():
    ids = jnp.asarray(IDS)
    given = SequenceDescriptor.from_segment_ids_and_pos(ids, jnp.asarray(POS))
    counted = SequenceDescriptor.from_segment_ids_and_pos(ids, is_thd=True, is_segment_ids_reordered=False)
    inside = np.asarray(IDS) > 0
    for ours, theirs in zip(counted.segment_pos, given.segment_pos):
        assert np.array_equal(np.asarray(ours)[inside], np.asarray(theirs)[inside])
    q, k, v = qkv(*ids.shape)
    run = lambda d: fused_attn((q, k, v), None, d, None, max_segments_per_seq=4,  # noqa: E731
                               **call(qkv_layout=QKVLayout.THD_THD_THD,
                                      attn_mask_type=AttnMaskType.PADDING_CAUSAL_MASK))
    assert np.array_equal(run(given), run(counted))
    dense = SequenceDescriptor.from_segment_ids_and_pos(ids, is_thd=False)
    assert np.array_equal(dense.segment_pos[0][0], np.arange(ids.shape[1]))
    with pytest.raises(ValueError, match="segment_pos=None.*not reordered"):
        SequenceDescriptor.from_segment_ids_and_pos(ids, is_thd=True, is_segment_ids_reordered=True)


def test_descriptors_that_lack_something():
    with pytest.raises(ValueError, match="segment_pos=None: must be given"):
        SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(IDS))
    with pytest.raises(TypeError, match="seqlens=list: must be an array or a pair"):
        SequenceDescriptor.from_seqlens([1, 2])
    q, k, v = qkv()
    places = jnp.asarray([[2, 3], [1, 1]])
    descriptor = SequenceDescriptor.from_seqlens_and_offsets(places, jnp.asarray(
        [[0, 2, -1], [0, 1, -1]]))
    with pytest.raises(ValueError, match="max_segments_per_seq=1: seqlens of q has more.*give 2"):
        fused_attn((q, k, v), None, descriptor, None, **call(qkv_layout=QKVLayout.THD_THD_THD))
    descriptor = SequenceDescriptor.from_seqlens_and_offsets(places, jnp.asarray(
        [[0, -1, -1], [0, 1, -1]]))
    with pytest.raises(ValueError, match="seq_offsets of q=.*at least 0"):
        fused_attn((q, k, v), None, descriptor, None, max_segments_per_seq=2,
                   **call(qkv_layout=QKVLayout.THD_THD_THD))


def test_segment_empty_on_one_side_pairs_nothing_else():
    """Sequence 2 of the queries has no keys, and sequence 3 keeps its own."""
    q, k, v = qkv(1, 6)
    ids = jnp.asarray([[1, 1, 2, 2, 3, 3]]), jnp.asarray([[1, 1, 3, 3, 0, 0]])
    pos = jnp.asarray([[0, 1, 0, 1, 0, 1]]), jnp.asarray([[0, 1, 0, 1, 0, 0]])
    out = fused_attn((q, k, v), None, SequenceDescriptor.from_segment_ids_and_pos(ids, pos), None,
                     max_segments_per_seq=3, **call(
                         qkv_layout=QKVLayout.THD_THD_THD,
                         attn_mask_type=AttnMaskType.PADDING_MASK))
    for queries, keys in ((slice(0, 2), slice(0, 2)), (slice(4, 6), slice(2, 4))):
        alone = tessera.jax.attention(q[:, queries], k[:, keys], v[:, keys], softmax_scale=0.25)
        same(out[:, queries], alone, atol=1e-6)
    assert np.all(out[:, 2:4] == 0)


def test_one_compilation_for_all_lengths():
    q, k, v = qkv()
    traces = []

    @jax.jit
    def run(descriptor):
        traces.append(1)
        return fused_attn((q, k, v), None, descriptor, None, max_segments_per_seq=3,
                          **call(qkv_layout=QKVLayout.THD_THD_THD))
    first = run(SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(IDS), jnp.asarray(POS)))
    second = run(SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(IDS[::-1]),
                                                             jnp.asarray(POS[::-1])))
    assert len(traces) == 1 and not np.array_equal(first, second)


# ---- fused_attn ----

def test_mask_need_not_be_a_prefix():
    """Padding on the left, and packed segments: TransformerEngine takes both for lengths."""
    q, k, v = qkv(2, 10)
    segment = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]])
    pairs = (segment[:, :, None] == segment[:, None]) & (segment[:, :, None] != 0)
    with pytest.warns(DeprecationWarning, match="pass a SequenceDescriptor"):
        out = fused_attn((q, k, v), None, jnp.asarray(~pairs[:, None]), None, **call())
    expected = tessera.jax.attention(q, k, v, keep=jnp.asarray(pairs[:, None]), causal=True,
                                     align="top_left", softmax_scale=0.25)
    same(out, expected, atol=1e-6)


def test_thd_by_lengths_and_offsets():
    q, k, v = qkv()
    found, offsets = te_jax_cases._lengths_and_offsets(IDS)
    arguments = call(qkv_layout=QKVLayout.THD_THD_THD)
    del arguments["softmax_type"]
    with pytest.warns(DeprecationWarning, match="fused_attn_thd is deprecated"):
        out = fused_attn_thd((q, k, v), None, found, found, offsets, offsets, None,
                             max_segments_per_seq=3, **arguments)
    ids = SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(IDS), jnp.asarray(POS))
    expected = fused_attn((q, k, v), None, ids, None, max_segments_per_seq=3,
                          **call(qkv_layout=QKVLayout.THD_THD_THD))
    same(out, expected)


def test_largest_logit():
    q, k, v = qkv()
    out, largest = fused_attn((q, k, v), None, lengths(10, 7), None, return_max_logit=True,
                              **call())
    scores = np.einsum("bihd,bjhd->bhij", q, k) * 0.25
    inside = np.arange(10) < np.array([[10], [7]])
    inside = inside[:, None, None] & inside[:, None, :, None] & np.tril(np.ones((10, 10), bool))
    np.testing.assert_allclose(largest, np.where(inside, scores, -np.inf).max((0, 2, 3)), rtol=1e-5)
    assert out.shape == q.shape


@pytest.mark.parametrize("seed", [jax.random.key(7), jax.random.PRNGKey(7),
                                  jax.random.split(jax.random.PRNGKey(7), 4)])
def test_dropout_takes_keys(seed):
    q, k, v = qkv()
    out = fused_attn((q, k, v), None, lengths(10, 10), seed, **call(dropout_probability=0.3))
    data = seed if seed.dtype == jnp.uint32 else jax.random.key_data(seed)
    expected = tessera.jax.attention(q, k, v, causal=True, align="top_left", softmax_scale=0.25,
                                     dropout_p=0.3, rng_state=data.reshape(-1)[:2])
    same(out, expected, atol=1e-6)
    still = fused_attn((q, k, v), None, lengths(10, 10), seed,
                       **call(dropout_probability=0.3, is_training=False))
    assert not np.array_equal(out, still)


def test_only_wanted_gradients_are_computed():
    """A bias that is constant costs no dbias."""
    q, k, v = qkv()
    bias = jnp.zeros((1, 4, 10, 10))
    arguments = call(attn_bias_type=AttnBiasType.POST_SCALE_BIAS)

    def loss(q, bias):
        return fused_attn((q, k, v), bias, lengths(10, 7), None, **arguments).sum()
    of_q = str(jax.make_jaxpr(jax.grad(loss))(q, bias))
    of_both = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(q, bias))
    assert of_q.count("f32[1,4,10,10]") < of_both.count("f32[1,4,10,10]")
    same(jax.grad(loss)(q, bias), jax.grad(loss, (0, 1))(q, bias)[0])


def test_gradients_in_turn_under_jit_and_remat():
    """What is wanted differs between traces of one function."""
    q, k, v = qkv()

    @jax.checkpoint
    @jax.jit
    def loss(q, k):
        return (fused_attn((q, k, v), None, lengths(10, 7), None, **call()) ** 2).sum()
    both = jax.grad(loss, (0, 1))(q, k)
    same(jax.grad(loss, 1)(q, k), both[1])
    same(jax.grad(loss, 0)(q, k), both[0])
    same(jax.grad(loss, (0, 1))(q, k)[1], both[1])


def test_checkpoint_name_saves_the_forward_pass():
    q, k, v = qkv()

    def calls(policy):
        def loss(q):
            return fused_attn((q, k, v), None, lengths(10, 7), None,
                              context_checkpoint_name="kept", **call()).sum()
        both = jax.jit(jax.value_and_grad(jax.checkpoint(loss, policy=policy)))
        return both.lower(q).as_text().count("custom_call @tessera_attention")
    save = jax.checkpoint_policies.save_only_these_names
    assert (calls(save("kept")), calls(save("other"))) == (2, 3)


# ---- arguments ----

@pytest.mark.parametrize("changes, said", [
    (dict(attn_mask_type=AttnMaskType.CAUSAL_MASK, qkv_layout=QKVLayout.THD_THD_THD),
     "attn_mask_type=CAUSAL_MASK: THD_THD_THD needs a padding mask"),
    (dict(qkv_layout=QKVLayout.BS3HD), "qkv=3 arrays: must be a tuple of 1 for BS3HD"),
    (dict(attn_bias_type=AttnBiasType.POST_SCALE_BIAS), "bias=None: must be given"),
    (dict(softmax_type=AttnSoftmaxType.LEARNABLE_SOFTMAX), "softmax_offset=None: must be given"),
    (dict(softmax_offset=jnp.zeros((1, 4, 1, 1))), "softmax_offset=.*must be None with VANILLA"),
    (dict(softmax_type=AttnSoftmaxType.LEARNABLE_SOFTMAX, softmax_offset=jnp.zeros(4)),
     r"softmax_offset.shape=\(4,\): must be \[1, 4, 1, 1\]"),
    (dict(dropout_probability=0.1), "seed=None: must be given with dropout"),
    (dict(dropout_probability=1.5), r"dropout_probability=1.5: must be a Python number in \[0"),
    (dict(window_size=(1, 2, 3)), "window_size=.*must be a pair"),
    (dict(max_segments_per_seq=0), "max_segments_per_seq=0: must be a Python integer"),
    (dict(attn_mask_type="causal"), "attn_mask_type='causal': must be one of AttnMaskType")])
def test_arguments_that_contradict(changes, said):
    with pytest.raises(ValueError, match=said):
        fused_attn(qkv(), None, lengths(10, 7), None, **call(**changes))


def test_shapes_that_do_not_fit():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"qkv\[0\].shape=.*: must be \[b, s, 3, h, d\] for BS3HD"):
        fused_attn((q,), None, lengths(10, 7), None, **call(qkv_layout=QKVLayout.BS3HD))
    with pytest.raises(ValueError, match="key.shape=.*must have query's batch size, 2"):
        fused_attn((q, k[:1], v), None, lengths(10, 7), None, **call())
    with pytest.raises(ValueError, match=r"mask.shape=\(2, 1, 9, 10\): must be broadcastable"):
        with pytest.warns(DeprecationWarning):
            fused_attn((q, k, v), None, jnp.zeros((2, 1, 9, 10), bool), None, **call())
    with pytest.raises(ValueError, match=r"seqlens of q.shape=\(3,\): must be \(2,\)"):
        fused_attn((q, k, v), None, lengths(1, 2, 3), None, **call())


def test_refused_by_name():
    q, k, v = qkv()
    with pytest.raises(tessera.jax.Refused, match="score_mod=.*does not have score_mod yet"):
        fused_attn((q, k, v), None, lengths(10, 7), None, score_mod=lambda *x: x, **call())
    ids = SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(IDS), jnp.asarray(POS))
    with pytest.raises(tessera.jax.Refused, match="THD_THD_THD takes none"):
        fused_attn((q, k, v), jnp.zeros((1, 1, 10, 10)), ids, None, max_segments_per_seq=3, **call(
            qkv_layout=QKVLayout.THD_THD_THD, attn_bias_type=AttnBiasType.POST_SCALE_BIAS))


def test_names_that_are_not_here():
    with pytest.raises(ImportError, match="use flax.linen's, or TransformerLayer"):
        from tessera.te.jax.flax import LayerNormMLP  # noqa: F401
    with pytest.raises(AttributeError, match="tessera has TE's attention only"):
        _ = tex.gemm


# ---- cpp_extensions, transformer_engine_jax ----

@pytest.mark.parametrize("layout", [QKVLayout.BS3HD, QKVLayout.BSHD_BSHD_BSHD, QKVLayout.T3HD,
                                    QKVLayout.THD_T2HD])
def test_functions_without_gradients(layout):
    """They are what fused_attn and its gradient are made of, and what TE's primitives compute."""
    case = te_jax_cases.Case(layout, AttnMaskType.PADDING_CAUSAL_MASK, "self", "float32", (9, 0),
                             None, AttnSoftmaxType.LEARNABLE_SOFTMAX, 0.2, "ids")
    problem = te_jax_cases.Problem(case)
    arrays = problem.packed(problem.q, problem.k, problem.v)
    arguments, descriptor = problem.arguments(), problem.descriptor()
    out, aux, state, none_asked = tex.fused_attn_fwd(arrays, None, problem.offset, descriptor, problem.seed,
                                                     **arguments)
    assert none_asked.shape == (0,) and none_asked.dtype == out.dtype
    *_, max_logit = tex.fused_attn_fwd(arrays, None, problem.offset, descriptor, problem.seed, **arguments,
                                       return_max_logit=True)
    same(max_logit, fused_attn(arrays, None, descriptor, problem.seed, softmax_offset=problem.offset,
                               return_max_logit=True, **arguments)[1])
    grads, dbias, d_offset = tex.fused_attn_bwd(
        arrays, None, problem.offset, aux, state, out, problem.weights, descriptor, **arguments)
    expected, pull = jax.vjp(
        lambda arrays, offset: fused_attn(arrays, None, descriptor, problem.seed,
                                          softmax_offset=offset, **arguments),
        arrays, problem.offset)
    wanted = pull(problem.weights)
    b, s, h, d = out.shape
    assert aux.dtype == jnp.float32
    assert aux.shape == ((b * s, h, 1) if layout.is_thd() else (b, h, s, 1))
    assert state.tolist() == [*problem.seed[0].tolist(), 0, 0] and state.dtype == jnp.uint32
    same(out, expected)
    assert dbias is None
    for mine, other in zip((*grads, d_offset), (*wanted[0], wanted[1])):
        same(mine, other)

    config = tex.attention.config_of(**arguments)
    none = jnp.zeros(0, out.dtype)
    padded = (*arrays, *(none,) * (3 - len(arrays)))
    operands = (*padded, none, problem.offset, problem.seed, *jax.tree.leaves(descriptor))
    bound = tex.FusedAttnFwdPrimitive.outer_primitive.bind(*operands, config=config)
    same(list(bound[:2]), [out, aux])
    shapes = tex.FusedAttnFwdPrimitive.abstract(*operands, config=config)
    assert [x.shape for x in shapes] == [x.shape for x in bound]
    operands = (*padded, none, problem.offset, aux, state, out, problem.weights,
                *jax.tree.leaves(descriptor))
    bound = tex.FusedAttnBwdPrimitive.outer_primitive.bind(*operands, config=config)
    assert [x.shape for x in bound] == [x.shape for x in (*padded, none, problem.offset)]
    for mine, other in zip(bound, grads):
        same(mine, other)


def helper(**changes):
    given = dict(is_training=True, batch_size=2, q_dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16,
                 qkv_layout=QKVLayout.BSHD_BSHD_BSHD, attn_bias_type=NO_BIAS,
                 attn_mask_type=AttnMaskType.CAUSAL_MASK, softmax_type=VANILLA,
                 dropout_probability=0.0, q_num_heads=8, kv_num_heads=4, q_max_seqlen=64,
                 kv_max_seqlen=64, head_dim_qk=64, head_dim_v=64, window_size=(-1, -1))
    return tex.FusedAttnHelper(**{**given, **changes})


@pytest.mark.parametrize("changes", [
    {}, dict(qkv_layout=QKVLayout.T3HD, attn_mask_type=AttnMaskType.PADDING_CAUSAL_MASK),
    dict(attn_bias_type=AttnBiasType.PRE_SCALE_BIAS, window_size=(8, 0)),
    dict(softmax_type=AttnSoftmaxType.LEARNABLE_SOFTMAX, dropout_probability=0.1),
    dict(q_dtype="float32", kv_dtype="float32", head_dim_qk=40, head_dim_v=24)])
def test_kernel_is_available(changes):
    asked = helper(**changes)
    backend, message = asked.get_fused_attn_backend()
    assert (backend.name, message) == ("NVTE_F16_arbitrary_seqlen", "")
    assert is_fused_attn_kernel_available(*(getattr(asked, name) for name in (
        "is_training", "batch_size", "q_dtype", "kv_dtype", "qkv_layout", "attn_bias_type", "attn_mask_type",
        "softmax_type", "dropout_probability", "q_num_heads", "kv_num_heads", "q_max_seqlen",
        "kv_max_seqlen", "head_dim_qk", "head_dim_v", "window_size")))


@pytest.mark.parametrize("changes, said", [
    (dict(q_num_heads=6), "heads of q"), (dict(kv_dtype=jnp.float16), "kv_dtype=.*must be q_dtype"),
    (dict(qkv_layout=QKVLayout.T3HD, attn_bias_type=AttnBiasType.POST_SCALE_BIAS,
          attn_mask_type=AttnMaskType.PADDING_MASK), "T3HD takes no bias"),
    (dict(q_dtype=jnp.float64, kv_dtype=jnp.float64), "fp64")])
def test_kernel_is_not_available(changes, said, monkeypatch, caplog):
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
    asked = helper(**changes)
    with caplog.at_level("DEBUG", logger="DotProductAttention"), \
            jax.enable_x64("float64" in str(changes)):
        assert not asked.is_fused_attn_kernel_available()
        backend, message = asked.get_fused_attn_backend()
    assert backend == te_jax.NVTE_Fused_Attn_Backend.NVTE_No_Backend and re.search(said, message)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("Running fused attention backend selection with config=")
    assert any(line.startswith("Disabling FusedAttention due to ") for line in lines)
    assert lines[-1] == "No fused attention backend available; falling back to unfused attention."


def test_workspace_sizes():
    sizes = (2, 0, 64, 64, 8, 4, 0, 64, 64, 0.125, 0.0, te_jax.NVTE_Bias_Type.NVTE_NO_BIAS,
             te_jax.NVTE_Mask_Type.NVTE_CAUSAL_MASK, te_jax.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
             te_jax.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, te_jax.DType.kBFloat16, True)
    q, k, v = (jax.ShapeDtypeStruct((2, 64, h, 64), jnp.bfloat16) for h in (8, 4, 4))
    band = dict(causal=True, align="top_left")
    shape, dtype = te_jax.get_fused_attn_fwd_workspace_sizes(*sizes, 1, -1, -1, False)
    assert shape == [tessera.jax.explain(q, k, v, **band).workspace_bytes]
    assert dtype == te_jax.DType.kByte
    shape, _ = te_jax.get_fused_attn_bwd_workspace_sizes(*sizes, False, 1, -1, -1, False)
    assert shape == [tessera.jax.explain(q, k, v, backward=True, **band).workspace_bytes]


def test_what_the_machine_is():
    assert te_jax.get_device_compute_capability(0) >= 80
    assert te_jax.get_cudnn_version() == 0 or te_jax.get_cudnn_version() > 80000
    assert te_jax.FusedAttnForwardFFI == tex.FusedAttnFwdPrimitive.name == "tessera_attention"
    sizes = dict(qkv_dtype=te_jax.DType.kFloat16, attn_mask_type=te_jax.NVTE_Mask_Type.NVTE_CAUSAL_MASK,
                 batch_size=2, num_attn_heads=8, num_gqa_groups=8, head_dim_qk=64, head_dim_v=64, max_seqlen_q=64,
                 max_seqlen_kv=64)
    layout = te_jax.NVTE_QKV_Layout
    answer = te_jax.get_fused_attn_backend(tex.FusedAttnParams(qkv_layout=layout.NVTE_BSHD_BSHD_BSHD, **sizes))
    assert answer == (te_jax.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, "")
    for changes, said in ((dict(qkv_layout=layout.NVTE_BSHD_BSHD_BSHD, num_gqa_groups=3), "multiple"), ({}, "NOT_SET")):
        backend, message = te_jax.get_fused_attn_backend(tex.FusedAttnParams(**{**sizes, **changes}))
        assert backend == te_jax.NVTE_Fused_Attn_Backend.NVTE_No_Backend and said in message


def test_helpers_of_sequences():
    assert tex.attention.generate_cu_seqlen(jnp.array([3, -1, 2])).tolist() == [0, 3, 3, 5]
    adjust = tex.attention.adjust_cp_striped_window_size
    assert adjust(0, 0, 8, (15, 0)) == (1, 0) and adjust(0, 1, 8, (15, 0)) == (1, 0)
    assert adjust(7, 0, 8, (22, 0)) == (1, 0)
    with pytest.raises(TypeError):
        tex.FusedAttnHelper(True, 2)


def test_parsed_shapes():
    parse = tex.FusedAttnHelper.parse_qkv_aval
    struct = jax.ShapeDtypeStruct
    assert parse(struct((2, 8, 3, 4, 16), jnp.float32), None, None, QKVLayout.BS3HD) == \
        ([2], 8, 8, 4, 4, 16, 16)
    shapes = (2, 8, 4, 16), (2, 9, 2, 16), (2, 9, 2, 24)
    q, k, v = (struct(shape, jnp.float32) for shape in shapes)
    assert parse(q, k, v, QKVLayout.THD_THD_THD) == ([2], 8, 9, 4, 2, 16, 24)
