# SPDX-License-Identifier: Apache-2.0
"""What the NumPy functions promise beyond numbers: shapes, dtypes, outputs, errors by name."""

import inspect
import ast
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import oracle
import signatures
import tessera
from tessera._call import _keywords

RNG = np.random.default_rng(1)


def qkv(b=2, sq=5, sk=7, hq=4, hk=2, dqk=8, dv=6, dtype=np.float32):
    return [RNG.standard_normal(s).astype(dtype)
            for s in ((b, sq, hq, dqk), (b, sk, hk, dqk), (b, sk, hk, dv))]


def permute(x, layout):
    return np.ascontiguousarray(x.transpose(oracle._PERMUTE[layout]))


# ---- shapes and results ----

def test_returns_in_order():
    q, k, v = qkv()
    o = tessera.attention(q, k, v)
    assert isinstance(o, np.ndarray) and o.shape == (2, 5, 4, 6)
    o1, lse = tessera.attention(q, k, v, return_lse=True)
    o2, max_logit = tessera.attention(q, k, v, return_max_logit=True)
    o3, lse3, max_logit3 = tessera.attention(q, k, v, return_lse=True, return_max_logit=True)
    assert lse.shape == (2, 4, 5) and max_logit.shape == (4,)
    for other in (o1, o2, o3):
        np.testing.assert_array_equal(o, other)
    np.testing.assert_array_equal(lse, lse3)
    np.testing.assert_array_equal(max_logit, max_logit3)


@pytest.mark.parametrize("layout_q", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("layout_k", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_layouts_agree_bitwise(layout_q, layout_k, dtype):
    q, k, v = qkv(3, 40, 70, 4, 2, 32, 24, dtype)
    kw = dict(causal=True, align="bottom_right", bias=RNG.standard_normal((40, 70)).astype(dtype))
    o, lse = tessera.attention(q, k, v, return_lse=True, **kw)
    do = RNG.standard_normal(o.shape).astype(dtype)
    names = ("dq", "dk", "dv", "dbias")
    g = tessera.attention_backward(do, q, k, v, o, lse, grads=names, **kw)
    pq, pk, pv = permute(q, layout_q), permute(k, layout_k), permute(v, layout_k)
    layout = layout_q if layout_q == layout_k else (layout_q, layout_k)
    po, plse = tessera.attention(pq, pk, pv, layout=layout, return_lse=True, **kw)
    np.testing.assert_array_equal(permute(o, layout_q), po)
    np.testing.assert_array_equal(lse, plse)
    pg = tessera.attention_backward(permute(do, layout_q), pq, pk, pv, po, plse, grads=names,
                                    layout=layout, **kw)
    for name, fmt in (("dq", layout_q), ("dk", layout_k), ("dv", layout_k)):
        np.testing.assert_array_equal(permute(getattr(g, name), fmt), getattr(pg, name))
    np.testing.assert_array_equal(g.dbias, pg.dbias)


def pack(x, lengths):
    return np.concatenate([x[n, :length] for n, length in enumerate(lengths)])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_packed_is_padded(dtype):
    lens = np.array([5, 0, 33, 64], np.int64)
    q, k, v = qkv(4, 64, 64, 4, 2, 16, 16, dtype)
    kw = dict(causal=True, sink=RNG.standard_normal(4).astype(np.float32))
    padded, lse = tessera.attention(q, k, v, seqlens_q=lens, seqlens_k=lens, return_lse=True, **kw)
    do = RNG.standard_normal(padded.shape).astype(dtype)
    g = tessera.attention_backward(do, q, k, v, padded, lse, seqlens_q=lens, seqlens_k=lens, **kw)
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    packed = dict(layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, **kw)
    tq, tk, tv = (pack(x, lens) for x in (q, k, v))
    o, tlse = tessera.attention(tq, tk, tv, return_lse=True, **packed)
    assert o.shape == (102, 4, 16) and tlse.shape == (4, 102)
    np.testing.assert_array_equal(o, pack(padded, lens))
    np.testing.assert_array_equal(tlse, np.concatenate([lse[n, :, :m] for n, m in
                                                        enumerate(lens)], 1))
    tg = tessera.attention_backward(pack(do, lens), tq, tk, tv, o, tlse, **packed)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(tg, name), pack(getattr(g, name), lens))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_threads_agree_bitwise(dtype):
    q, k, v = qkv(1, 150, 300, 2, 1, 40, 40, dtype)
    bias = RNG.standard_normal((1, 1, 150, 300)).astype(np.float32)
    kw = dict(window=(90, 30), align="bottom_right", bias=bias, dropout_p=0.2, rng_state=[7, 9])

    def everything():
        o, lse = tessera.attention(q, k, v, return_lse=True, **kw)
        do = np.ones_like(o)
        g = tessera.attention_backward(do, q, k, v, o, lse, grads=("dq", "dk", "dv", "dbias"), **kw)
        return o, lse, g.dq, g.dk, g.dv, g.dbias

    try:
        results = []
        for n in (1, 2, 3, None):
            tessera.set_num_threads(n)
            results.append(everything())
    finally:
        tessera.set_num_threads(None)
    for other in results[1:]:
        for a, b in zip(results[0], other):
            np.testing.assert_array_equal(a, b)


def test_calls_from_many_threads():
    inputs = [qkv(1, 20 + i, 30, 4, 2, 16, 16) for i in range(8)]
    expected = [tessera.attention(*x) for x in inputs]
    wrong = []

    def work(i):
        for _ in range(30):
            if not np.array_equal(tessera.attention(*inputs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_paged_is_plain():
    q, k, v = qkv(2, 3, 8, 4, 2, 16, 16)
    table = np.array([[3, 0], [2, 1]], np.int32)
    pool_k, pool_v = np.full((5, 4, 2, 16), np.nan, np.float32), np.full((4, 4, 2, 16), np.nan,
                                                                         np.float32)
    for n in range(2):
        for p in range(2):
            pool_k[table[n, p]], pool_v[table[n, p]] = k[n, 4 * p:4 * p + 4], v[n, 4 * p:4 * p + 4]
    lens = np.array([8, 8], np.int32)
    o = tessera.attention(q, pool_k, pool_v, page_table=table, seqlens_k=lens)
    np.testing.assert_allclose(o, tessera.attention(q, k, v), rtol=1e-6, atol=1e-6)
    both = tessera.attention(q, pool_k, pool_v, page_table=(table, table.copy()), seqlens_k=lens)
    np.testing.assert_array_equal(o, both)
    o, lse = tessera.attention(q, pool_k, pool_v, page_table=table, seqlens_k=lens, return_lse=True)
    g = tessera.attention_backward(np.ones_like(o), q, pool_k, pool_v, o, lse, page_table=table,
                                   seqlens_k=lens)
    assert g.dk.shape == pool_k.shape and g.dv.shape == pool_v.shape
    assert (g.dk[4] == 0).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_fp8_keys_with_scales(dtype, shape):
    q, k, v = qkv(2, 5, 40, 4, 2, 32, 32, ml_dtypes.bfloat16)
    k8, v8 = k.astype(dtype), v.astype(dtype)
    k_scale, v_scale = (RNG.uniform(0.5, 2, shape).astype(np.float32) for _ in range(2))
    per_head = lambda x, scale: x.astype(np.float32) * np.broadcast_to(scale, (2, 2))[:, None, :,
                                                                                      None]
    got = tessera.attention(q, k8, v8, k_scale=k_scale, v_scale=v_scale)
    truth = oracle.Oracle(q, per_head(k8, k_scale), per_head(v8, v_scale)).o
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(got.astype(np.float64), truth, atol=0.05)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sq", [1, 7, 40])
def test_batch_invariance(dtype, sq):
    """A sequence alone is the same sequence in a batch, for any number of threads."""
    q, k, v = qkv(4, sq, 300, 8, 2, 32, 32, dtype)
    lens = np.array([300, 17, 0, 129], np.int32)
    kw = dict(causal=True, align="bottom_right", batch_invariant=True, return_lse=True)
    together = tessera.attention(q, k, v, seqlens_k=lens, **kw)
    try:
        for threads in (1, 2):
            tessera.set_num_threads(threads)
            for n in range(4):
                one = slice(n, n + 1)
                alone = tessera.attention(q[one], k[one], v[one], seqlens_k=lens[one], **kw)
                for a, b in zip(together, alone):
                    np.testing.assert_array_equal(a[one], b)
    finally:
        tessera.set_num_threads(None)


# ---- outputs of the caller ----

def test_out_is_written_and_returned():
    q, k, v = qkv()
    expected = tessera.attention(q, k, v)
    wide = np.full((2, 5, 4, 9), 7, np.float32)
    out = wide[..., 1:7]
    assert tessera.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert (wide[..., 0] == 7).all() and (wide[..., 7:] == 7).all()
    o, lse = tessera.attention(q, k, v, out=out, return_lse=True)
    assert o is out and lse.shape == (2, 4, 5)


def test_gradients_into_an_interleaved_buffer():
    b, s, h, d = 2, 33, 4, 16
    buffer = RNG.standard_normal((b, s, 3, h, d)).astype(np.float32)
    q, k, v = (buffer[:, :, i] for i in range(3))
    o, lse = tessera.attention(q, k, v, causal=True, return_lse=True)
    do = np.ones_like(o)
    expected = tessera.attention_backward(do, q.copy(), k.copy(), v.copy(), o, lse, causal=True)
    into = np.full((b, s, 3, h, d), np.nan, np.float32)
    outputs = {"dq": into[:, :, 0], "dk": into[:, :, 1], "dv": into[:, :, 2]}
    g = tessera.attention_backward(do, q, k, v, o, lse, grads=outputs, causal=True)
    assert g.dq is outputs["dq"] and g.dk is outputs["dk"] and g.dv is outputs["dv"]
    assert g.dbias is None and g.dsink is None and g.dalibi_slopes is None
    for i, name in enumerate(("dq", "dk", "dv")):
        np.testing.assert_array_equal(into[:, :, i], getattr(expected, name))


def test_only_what_is_asked_for():
    q, k, v = qkv()
    o, lse = tessera.attention(q, k, v, return_lse=True)
    g = tessera.attention_backward(o, q, k, v, o, lse, grads=("dk",))
    assert g.dq is None and g.dv is None and g.dk.shape == k.shape
    whole = tessera.attention_backward(o, q, k, v, o, lse)
    np.testing.assert_array_equal(g.dk, whole.dk)


def test_gradient_shapes_follow_inputs():
    q, k, v = qkv(dtype=ml_dtypes.bfloat16)
    bias = RNG.standard_normal((4, 1, 7)).astype(np.float32)
    slopes = np.full((2, 4), 0.1, ml_dtypes.bfloat16)
    sink = np.zeros(4, np.float32)
    kw = dict(bias=bias, alibi_slopes=slopes, sink=sink, align="top_left")
    o, lse = tessera.attention(q, k, v, return_lse=True, **kw)
    assert o.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32
    g = tessera.attention_backward(o, q, k, v, o, lse, **kw,
                                   grads=("dq", "dk", "dv", "dbias", "dsink", "dalibi_slopes"))
    for name, of in (("dq", q), ("dk", k), ("dv", v), ("dbias", bias), ("dsink", sink),
                     ("dalibi_slopes", slopes)):
        got = getattr(g, name)
        assert got.shape == of.shape and got.dtype == of.dtype, name


def test_fp64_in_the_reference():
    q, k, v = qkv(dtype=np.float64)
    with pytest.raises(tessera.Refused, match="(?s)tessera.attention: .*cpu.*reference"):
        tessera.attention(q, k, v)
    o, lse = tessera.attention(q, k, v, backend="reference", return_lse=True)
    assert o.dtype == lse.dtype == np.float64
    truth = oracle.Oracle(q, k, v)
    np.testing.assert_allclose(o, truth.o, atol=1e-13)
    np.testing.assert_allclose(lse, truth.lse, atol=1e-13)


# ---- inputs that are unusual and legal ----

def test_read_only_and_expanded_inputs():
    q, k, v = qkv()
    expected = tessera.attention(q, k, v, bias=np.zeros((5, 7), np.float32))
    for x in (q, k, v):
        x.flags.writeable = False
    wide = np.broadcast_to(np.float32(0), (2, 4, 5, 7))
    np.testing.assert_array_equal(tessera.attention(q, k, v, bias=wide), expected)
    one = np.broadcast_to(k[:1], k.shape)
    np.testing.assert_array_equal(tessera.attention(q, one, v), tessera.attention(q, one.copy(), v))


@pytest.mark.parametrize("b, sq, sk", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
def test_empty(b, sq, sk):
    q, k, v = qkv(b, sq, sk)
    o, lse, max_logit = tessera.attention(q, k, v, return_lse=True, return_max_logit=True)
    assert o.shape == (b, sq, 4, 6) and not o.any()
    assert np.isneginf(lse).all() and lse.shape == (b, 4, sq)
    assert np.isneginf(max_logit).all()
    g = tessera.attention_backward(o, q, k, v, o, lse)
    assert g.dk.shape == k.shape and not g.dk.any() and not g.dq.any() and not g.dv.any()


def test_numpy_scalars_are_numbers():
    q, k, v = qkv()
    state = (np.int64(3), np.uint8(1))
    a = tessera.attention(q, k, v, softmax_scale=np.float32(0.5), window=[np.int32(3), np.int64(-1)],
                          causal=np.bool_(True), align="top_left", softcap=np.int8(20),
                          dropout_p=np.float16(0.5), rng_state=state)
    b = tessera.attention(q, k, v, softmax_scale=0.5, window=(3, 0), align="top_left", softcap=20.0,
                          dropout_p=0.5, rng_state=np.array([3, 1]))
    np.testing.assert_array_equal(a, b)
    c = tessera.attention(q, k, v, softmax_scale=ml_dtypes.bfloat16(0.5))
    np.testing.assert_array_equal(c, tessera.attention(q, k, v, softmax_scale=0.5))


def test_none_means_not_given():
    q, k, v = qkv()
    expected = tessera.attention(q, k, v)
    names = [name for name in inspect.signature(tessera.attention).parameters if name not in "qkv"]
    np.testing.assert_array_equal(tessera.attention(q, k, v, **dict.fromkeys(names)), expected)


def test_keep_and_drop_are_complements():
    q, k, v = qkv()
    keep = RNG.random((4, 5, 7)) < 0.5
    np.testing.assert_array_equal(tessera.attention(q, k, v, keep=keep),
                                  tessera.attention(q, k, v, drop=~keep))
    np.testing.assert_array_equal(tessera.attention(q, k, v, keep=np.array(True)),
                                  tessera.attention(q, k, v))


def test_one_array_for_both_lengths_needs_no_align():
    q, k, v = qkv(2, 7, 7)
    lens = np.array([3, 7], np.int32)
    a = tessera.attention(q, k, v, causal=True, seqlens_q=lens, seqlens_k=lens)
    b = tessera.attention(q, k, v, causal=True, seqlens_q=lens, seqlens_k=lens.copy(),
                          align="bottom_right")
    np.testing.assert_array_equal(a, b)
    for _ in range(2):  # the second call too, when the first has been remembered
        with pytest.raises(ValueError, match="align"):
            tessera.attention(q, k, v, causal=True, seqlens_q=lens, seqlens_k=lens.copy())


def test_remembered_calls_do_not_change_meaning():
    q, k, v = qkv(2, 7, 7)
    for _ in range(2):
        np.testing.assert_array_equal(tessera.attention(q, k, v, causal=True),
                                      tessera.attention(q, k, v, window=(-1, 0)))
        for wrong in (dict(causal=1), dict(window=(-1, 0.0)), dict(window=(-1, False)),
                      dict(dropout_p=False), dict(return_lse=1)):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                tessera.attention(q, k, v, **wrong)
        out = np.empty((2, 7, 4, 6), np.float32)
        tessera.attention(q, k, v, out=out)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="out.flags.writeable=False"):
            tessera.attention(q, k, v, out=out)


def test_scalars_of_one_shape_do_not_mix():
    q, k, v = qkv()
    for scale in (0.1, 0.7, 0.1):
        truth = oracle.Oracle(q, k, v, softmax_scale=scale)
        np.testing.assert_allclose(tessera.attention(q, k, v, softmax_scale=scale), truth.o,
                                   atol=1e-5)


# ---- the smaller functions ----

def test_merge_is_attention_over_the_union():
    q, k, v = qkv(2, 9, 40, 4, 2, 16, 16)
    whole, lse = tessera.attention(q, k, v, return_lse=True)
    cuts = [(0, 10), (10, 11), (11, 11), (11, 40)]
    parts = [tessera.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in cuts]
    o, merged = tessera.merge(parts)
    np.testing.assert_allclose(o, whole, atol=2e-6)
    np.testing.assert_allclose(merged, lse, atol=2e-6)
    parts[2][0][...] = np.nan  # lse is -inf there: not read
    again, _ = tessera.merge(parts)
    np.testing.assert_array_equal(o, again)
    alone, alone_lse = tessera.merge(parts[:1])
    np.testing.assert_allclose(alone, parts[0][0], atol=1e-6)
    np.testing.assert_allclose(alone_lse, parts[0][1], atol=1e-6)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("count", [32, 33, 320])
def test_merge_of_many_parts_rounds_once(count, dtype):
    rng = np.random.default_rng(count)
    parts = [(rng.standard_normal((1, 50, 2, 64)).astype(dtype), rng.standard_normal((1, 2, 50), np.float32))
             for _ in range(count)]
    weights = np.exp(np.stack([lse for _, lse in parts]).astype(np.float64)).swapaxes(2, 3)[..., None]
    exact = (weights * np.stack([o for o, _ in parts]).astype(np.float64)).sum(0) / weights.sum(0)
    least, found = (abs(o.astype(np.float64) - exact).mean() for o in (exact.astype(dtype), tessera.merge(parts)[0]))
    assert found <= 1.02 * least


def test_merge_in_other_layouts():
    q, k, v = qkv(2, 9, 40, 4, 2, 16, 16)
    parts = [tessera.attention(q, k[:, a:b], v[:, a:b], return_lse=True)
             for a, b in ((0, 7), (7, 40))]
    o, lse = tessera.merge(parts)
    for layout in ("sbhd", "bhsd"):
        po, plse = tessera.merge([(permute(o_, layout), l) for o_, l in parts], layout=layout)
        np.testing.assert_array_equal(po, permute(o, layout))
        np.testing.assert_array_equal(plse, lse)
    packed = [(o_.reshape(18, 4, 16), l.transpose(1, 0, 2).reshape(4, 18)) for o_, l in parts]
    to, tlse = tessera.merge(packed, layout="thd")
    np.testing.assert_array_equal(to, o.reshape(18, 4, 16))
    np.testing.assert_array_equal(tlse, lse.transpose(1, 0, 2).reshape(4, 18))


@pytest.mark.parametrize("state", [(5, 0), (-3, 1), (2**62 + 9, 2**40), (0, -1)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_dropout_mask(state, p):
    keep = tessera.dropout_mask(2, 3, 37, 50, p, state)
    assert keep.dtype == np.bool_ and keep.shape == (2, 3, 37, 50)
    for n in range(2):
        np.testing.assert_array_equal(
            keep[n], oracle.dropout_keep(n, 3, np.arange(37), np.arange(50), p, state))


def test_dropout_mask_of_a_part():
    """A block of sequences, heads, rows and keys has the bits of the whole."""
    whole = tessera.dropout_mask(3, 4, 60, 70, 0.4, (5, 1))
    starts = dict(q_start=np.array([3, 16], np.int32), k_start=np.array([37, 0]))
    part = tessera.dropout_mask(2, 2, 40, 33, 0.4, np.array([5, 1, 1 * 4 + 2, 4]), **starts)
    for n, (i, j) in enumerate(zip(*starts.values())):
        np.testing.assert_array_equal(part[n], whole[1 + n, 2:, i:i + 40, j:j + 33])


def test_dropout_of_a_part_of_the_heads():
    q, k, v = qkv(3, 20, 30, 4, 4, 8, 8)
    o = tessera.attention(q, k, v, dropout_p=0.3, rng_state=(5, 1))
    part = tessera.attention(*(x[1:, :, 2:] for x in (q, k, v)), dropout_p=0.3, rng_state=(5, 1, 6, 4))
    np.testing.assert_array_equal(part, o[1:, :, 2:])


def test_dropout_is_the_mask():
    q, k, v = qkv(2, 20, 30, 4, 2, 8, 8)
    kw = dict(dropout_p=0.3, rng_state=np.array([11, 4]))
    np.testing.assert_allclose(tessera.attention(q, k, v, **kw), oracle.Oracle(q, k, v, **kw).o,
                               atol=1e-5)


def test_alibi_slopes():
    np.testing.assert_allclose(tessera.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    twelve = tessera.alibi_slopes(12)
    assert twelve.dtype == np.float32 and twelve.shape == (12,)
    np.testing.assert_allclose(twelve[:8], tessera.alibi_slopes(8))
    np.testing.assert_allclose(twelve[8:], tessera.alibi_slopes(16)[::2][:4])
    assert tessera.alibi_slopes(1).tolist() == [2.0**-8]


def test_backends_and_version():
    assert [name for name in tessera.backends() if name in ("cpu", "reference")] == \
        ["cpu", "reference"]
    assert tessera.__version__.count(".") == 2
    assert issubclass(tessera.Refused, RuntimeError)


# ---- explain ----

def test_explain_tensors():
    q, k, v = qkv()
    why = tessera.explain(q, k, v, causal=True, align="top_left")
    assert why.backend == "cpu" and why.reasons["cpu"] == [] and why.workspace_bytes >= 0
    assert why.suggestion is None
    text = str(why)
    assert all(name in text for name in tessera.backends())
    assert tessera.explain(q, k, v, backward=True, grads=("dq",)).backend == "cpu"


def test_explain_text_round_trip():
    text = "fwd bf16 b=2 s=1024 h=16 d=128 causal"
    why = tessera.explain(text)
    again = tessera.explain(why.answer["case"])
    assert why.backend == again.backend == "cpu" and why.answer["case"] == again.answer["case"]
    import json
    assert json.loads(why.to_json())["backend"] == "cpu"


def test_explain_suggests_what_works():
    q, k, v = qkv(dtype=np.float64)
    why = tessera.explain(q, k, v)
    assert why.backend is None and why.suggestion and all(why.reasons.values())
    suggestion = why.answer["suggestion"]
    assert tessera.explain(suggestion["case"], device=suggestion["device"]).reasons[
        suggestion["backend"]] == [] or "backend=" in suggestion["text"]


@pytest.mark.parametrize("device", ["sm80", "sm90", "sm100"])
def test_explain_other_devices(device):
    why = tessera.explain("fwd bf16 b=2 s=1024 h=16 d=128 causal", device=device)
    assert why.answer["device"] == device and "cpu" in why.reasons


def test_explain_raises_what_attention_raises():
    q, k, v = qkv()
    for wrong in (dict(causal=True), dict(softmax_scale=float("nan")), dict(dropout_p=1.5,
                  rng_state=[0, 0]), dict(seqlens_k=np.array([1, 99])), dict(window=(-7, 0)),
                  dict(backend="nonsense")):
        with pytest.raises(ValueError) as raised:
            tessera.attention(q, k, v, **wrong)
        with pytest.raises(ValueError) as explained:
            tessera.explain(q, k, v, **wrong)
        assert str(raised.value).split(": ", 1)[1] == str(explained.value).split(": ", 1)[1]
    with pytest.raises(TypeError, match="colour"):
        tessera.explain(q, k, v, colour=1)
    with pytest.raises(ValueError, match="tessera.explain"):
        tessera.explain("fwd bf16 b=2 s=1024 h=16 d=128 causl")


# ---- the package ----

def test_signatures_name_every_keyword():
    for function, table in ((tessera.attention, _keywords.FORWARD),
                            (tessera.attention_backward, _keywords.BACKWARD)):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[-len(table):] == list(table)
        for name, row in table.items():
            assert parameters[name].default == row.default


@pytest.mark.parametrize("function", signatures.public_functions(tessera), ids=lambda function: function.__name__)
def test_docstrings_and_annotations_have_every_parameter(function):
    signatures.assert_described(function)
    with pytest.raises(TypeError, match="colour"):
        tessera.attention(*qkv(), colour=1)


def test_log_is_silent_unless_asked():
    code = """
import numpy as np, tessera
q = np.ones((1, 4, 2, 8), np.float32)
tessera.attention(q, q, q, causal=True)
"""
    import os
    quiet = {name: value for name, value in os.environ.items() if name != "TESSERA_LOG"}
    for topics, expected in (("", ""), ("dispatch", "tessera.dispatch: cpu runs fwd fp32")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              check=True, env=dict(quiet, TESSERA_LOG=topics))
        assert done.stdout == ""
        assert expected in done.stderr if expected else done.stderr == ""


def test_import_needs_numpy_alone_and_is_silent():
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in {"torch", "jax", "jaxlib", "paddle", "ml_dtypes", "rich", "matplotlib", "tqdm",
                   "scipy", "pandas"}:
            raise ImportError(f"blocked: {name}")
sys.meta_path.insert(0, Block())
import numpy as np, tessera
q = np.ones((1, 4, 2, 8), np.float32)
assert np.allclose(tessera.attention(q, q, q, causal=True), 1)
third = {m.split(".")[0] for m in sys.modules} - set(sys.stdlib_module_names)
print(sorted(m for m in third if not m.startswith("_")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    # Cython's belongs to NumPy, sitecustomize to the distribution (Debian's Python imports it).
    loaded = set(ast.literal_eval(done.stdout))
    assert loaded - {"cython_runtime", "sitecustomize"} == {"numpy", "tessera"}


@pytest.mark.parametrize("scale, cap", [(1e7, None), (1e30, None), (1e300, None), (1e-300, None),
                                        (None, 1e300), (None, 1e38), (None, 1e-38), (None, 1e-300),
                                        (1e30, 5.0), (1e300, 1e-300), (0.0, 1e300)])
def test_scalars_beyond_fp32(scale, cap):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, s, 2, 8)).astype(np.float32) for s in (6, 40, 40))
    scores = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k.astype(np.float64))
    x = scores * (8**-0.5 if scale is None else scale)
    with np.errstate(over="ignore"):
        x = cap * np.tanh(x / cap) if cap else x
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = np.einsum("bhij,bjhd->bihd", p, v.astype(np.float64))
    keywords = dict(softmax_scale=scale, softcap=cap)
    o, lse = tessera.attention(q, k, v, return_lse=True, **keywords)
    np.testing.assert_allclose(o, expected, atol=1e-5)
    if scale is None or cap:
        grads = tessera.attention_backward(np.ones_like(o), q, k, v, o=o, lse=lse, **keywords)
        assert all(np.isfinite(g).all() for g in (grads.dq, grads.dk, grads.dv))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_parts_are_added_up_in_place(dtype):
    """Parts of the keys, one after the other, into one o, lse, dq, dk and dv: fp32, from nothing."""
    q, k, v = qkv(sq=9, sk=40, dqk=16, dv=8, dtype=dtype)
    bias = RNG.standard_normal((4, 9, 40)).astype(np.float32)
    names = ("dq", "dk", "dv", "dbias")
    o, lse = tessera.attention(q, k, v, bias=bias, return_lse=True, out_dtype="float32")
    do = RNG.standard_normal(o.shape).astype(dtype)
    truth = tessera.attention_backward(do, q, k, v, o, lse, grads=names, bias=bias, grad_dtype="float32")
    got, rows = np.full(o.shape, np.nan, np.float32), np.full(lse.shape, -np.inf, np.float32)
    sums = dict(dq=np.zeros(q.shape, np.float32), dk=np.ones(k.shape, np.float32),
                dv=np.zeros(v.shape, np.float32), dbias=np.zeros(bias.shape, np.float32))
    for part in (slice(0, 23), slice(23, 24), slice(24, 40)):
        both = tessera.attention(q, k[:, part], v[:, part], bias=bias[..., part], out=got, lse=rows,
                                 accumulate=True, return_lse=True)
        assert both[0] is got and both[1] is rows
        tessera.attention_backward(
            do, q, k[:, part], v[:, part], o, lse, bias=bias[..., part], partial=True, accumulate=True,
            grads=dict(dq=sums["dq"], dk=sums["dk"][:, part], dv=sums["dv"][:, part],
                       dbias=sums["dbias"][..., part]))
    tolerance = 1e-5 if dtype == np.float32 else 4e-3
    np.testing.assert_allclose(rows, lse, atol=1e-4)
    np.testing.assert_allclose(got, o, atol=tolerance)
    for name in names:
        np.testing.assert_allclose(sums[name], getattr(truth, name) + (name == "dk"), atol=tolerance)


def test_what_sums_in_place_need():
    q, k, v = qkv(dv=8)
    o, lse = np.zeros_like(q), np.full((2, 4, 5), -np.inf, np.float32)
    grads = {"dq": np.zeros_like(q)}
    for call, match in (
            (lambda: tessera.attention(q, k, v, accumulate=True, lse=lse), "adds to what out= holds"),
            (lambda: tessera.attention(q, k, v, accumulate=True, out=o), "adds to what lse= holds"),
            (lambda: tessera.attention(q, k, v, lse=lse), "lse=ndarray: .*accumulate=True"),
            (lambda: tessera.attention(q, k, v, out=o, lse=lse[:, :, :4], accumulate=True), r"lse\.shape"),
            (lambda: tessera.attention(q, k, v, out=o, lse=lse.astype(float), accumulate=True), "lse.dtype"),
            (lambda: tessera.attention_backward(q, q, k, v, q, lse, accumulate=True), "map names to arrays"),
            (lambda: tessera.attention_backward(q, q, k, v, q, lse, lse=lse, grads=grads), "lse")):
        with pytest.raises((ValueError, TypeError), match=match):
            call()
    assert not o.any()
    answers = tessera.explain(q, k, v, out=o, lse=lse, accumulate=True, device="sm90").answer["backends"]
    why = {answer["name"]: str(answer["reasons"]) for answer in answers}
    assert "accumulate=True: the Hopper kernels do not have it; cuda_sm80 does" in why["cuda_sm90"]
    assert "accumulate=True" not in why["cuda_sm80"]


def test_align_is_a_diagonal_too():
    q, k, v = (RNG.standard_normal((2, n, 2, 16)).astype(np.float32) for n in (5, 9, 9))
    truth = tessera.attention(q, k, v, causal=True, align="top_left")
    np.testing.assert_array_equal(tessera.attention(q, k, v, causal=True, align=0), truth)
    np.testing.assert_array_equal(tessera.attention(q, k, v, align=3), tessera.attention(q, k, v))
    i, j = np.ogrid[:5, :9]
    for align in (3, -2, np.array([1, 2]), np.array([40, -40], np.int32)):
        shift = np.broadcast_to(align, 2).reshape(2, 1, 1, 1)
        for backend in (None, "reference"):
            np.testing.assert_allclose(
                tessera.attention(q, k, v, causal=True, align=align, backend=backend),
                tessera.attention(q, k, v, keep=j <= i + shift), atol=1e-6)
    with pytest.raises(ValueError, match="align=.*2\\^60"):
        tessera.attention(q, k, v, causal=True, align=2**62)
    with pytest.raises(ValueError, match="align.shape"):
        tessera.attention(q, k, v, causal=True, align=np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="align='middle'"):
        tessera.attention(q, k, v, causal=True, align="middle")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_block_of_a_sequence_is_that_of_the_whole(backend):
    """Rows and keys that begin in the middle: with their positions everything is as in the whole."""
    q, k, v = (RNG.standard_normal((2, 40, 4, 16)).astype(np.float32) for _ in range(3))
    kw = dict(window=(20, 3), align=2, alibi_slopes=tessera.alibi_slopes(4), dropout_p=0.3,
              rng_state=(3, 1), backend=backend)
    i0, j0 = 17, 13
    keep = np.zeros((1, 1, 40, 40), bool)
    keep[..., j0:] = True
    o = tessera.attention(q, k, v, keep=keep, **kw)
    starts = dict(q_start=np.full(2, i0), k_start=np.full(2, j0, np.int32))
    part = tessera.attention(q[:, i0:], k[:, j0:], v[:, j0:], **starts, **kw)
    np.testing.assert_allclose(part, o[:, i0:], atol=1e-5)


def test_dense_masks_of_packed_parts_count_positions():
    q, k, v = (RNG.standard_normal((30, 2, 16)).astype(np.float32) for _ in range(3))
    cu = np.array([0, 10, 30])
    keep = RNG.random((2, 1, 50, 25)) < 0.7
    kw = dict(layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=50, max_seqlen_k=25,
              q_start=np.array([40, 3]), k_start=np.array([0, 5]))
    o = tessera.attention(q, k, v, keep=keep, **kw)
    for n, (rows, keys) in enumerate(((slice(40, 50), slice(0, 10)), (slice(3, 23), slice(5, 25)))):
        at = slice(cu[n], cu[n + 1])
        own = tessera.attention(q[None, at], k[None, at], v[None, at], keep=keep[n:n + 1, :, rows, keys])
        np.testing.assert_allclose(o[at], own[0], atol=1e-6)
    for wrong, field in ((dict(q_start=np.array([41, 3])), "max_seqlen_q=50"),
                         (dict(k_start=np.array([0, -1])), "k_start.1.=-1"),
                         (dict(q_start=np.array([0, 2**61])), "q_start.1.=2305843009213693952")):
        with pytest.raises(ValueError, match=field):
            tessera.attention(q, k, v, keep=keep, **{**kw, **wrong})


def test_starts_need_align():
    q = np.ones((2, 8, 2, 16), np.float32)
    with pytest.raises(ValueError, match="align"):
        tessera.attention(q, q, q, causal=True, q_start=np.zeros(2, np.int64))


def test_sums_in_fp32_beside_16_bits():
    bf16 = ml_dtypes.bfloat16
    q, k, v, do = (RNG.standard_normal((2, 20, 4, 16)).astype(bf16) for _ in range(4))
    o, lse = tessera.attention(q, k, v, out_dtype="float32", return_lse=True)
    assert o.dtype == np.float32
    np.testing.assert_array_equal(o.astype(bf16), tessera.attention(q, k, v))
    g = tessera.attention_backward(do, q, k, v, o.astype(bf16), lse, grad_dtype=np.float32)
    rounded = tessera.attention_backward(do, q, k, v, o.astype(bf16), lse)
    for name in ("dq", "dk", "dv"):
        assert getattr(g, name).dtype == np.float32
        np.testing.assert_array_equal(getattr(g, name).astype(bf16), getattr(rounded, name))
    halves = [tessera.attention(q, k[:, half], v[:, half], return_lse=True)
              for half in (slice(0, 9), slice(9, 20))]
    merged, _ = tessera.merge(halves, out_dtype="float32")
    assert merged.dtype == np.float32
    np.testing.assert_allclose(merged, o, atol=0.02)
    np.testing.assert_array_equal(merged.astype(bf16), tessera.merge(halves)[0])
    with pytest.raises(ValueError, match="o.dtype=fp64"):
        tessera.merge(halves, out_dtype=np.float64)


def test_a_margin_of_multiprocessors_means_nothing_here():
    q = RNG.standard_normal((1, 8, 2, 16)).astype(np.float32)
    np.testing.assert_array_equal(tessera.attention(q, q, q, sm_margin=8), tessera.attention(q, q, q))
    with pytest.raises(ValueError, match="sm_margin=-1"):
        tessera.attention(q, q, q, sm_margin=-1)


def test_parts_of_a_union_have_gradients_that_add_up():
    """Two halves of the keys: the backward pass of each, with the union's o and lse."""
    q, do = (RNG.standard_normal((2, 6, 4, 16)).astype(np.float32) for _ in range(2))
    k, v = (RNG.standard_normal((2, 10, 2, 16)).astype(np.float32) for _ in range(2))
    halves = slice(0, 4), slice(4, 10)
    parts = [tessera.attention(q, k[:, half].copy(), v[:, half].copy(), return_lse=True)
             for half in halves]
    o, lse = tessera.merge(parts)
    whole = tessera.attention_backward(do, q, k, v, o, lse)
    gradients = [tessera.attention_backward(do, q, k[:, half].copy(), v[:, half].copy(), o, lse,
                                            partial=True) for half in halves]
    np.testing.assert_allclose(sum(g.dq for g in gradients), whole.dq, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([g.dk for g in gradients], 1), whole.dk, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([g.dv for g in gradients], 1), whole.dv, atol=1e-5)
    with pytest.raises(TypeError):
        tessera.attention(q, k, v, partial=True)
