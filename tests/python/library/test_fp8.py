# SPDX-License-Identifier: Apache-2.0
"""fp8 q, k, v and do: what follows exactly from value = stored * scale."""

import ml_dtypes
import numpy as np
import pytest

import tessera

E4M3, E5M2, BF16, F32 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16, np.float32
RNG = np.random.default_rng(5)
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def one(scale):
    return np.array(scale, F32)


def arrays(sq=5, sk=7, dtype=E4M3):
    return tuple(RNG.standard_normal((2, n, 2, 16)).astype(dtype) for n in (sq, sk, sk))


@BACKENDS
def test_one_key_gives_its_value(backend):
    q, k, v = arrays(sk=1)
    o = tessera.attention(q, k, v, v_scale=one(0.375), backend=backend)
    assert o.dtype == BF16
    np.testing.assert_array_equal(o.astype(F32), np.broadcast_to(v.astype(F32) * F32(0.375), o.shape))


@BACKENDS
def test_a_power_of_two_in_v_scale_scales_o_alone(backend):
    q, k, v = arrays()
    kw = dict(backend=backend, return_lse=True, q_scale=one(0.7), k_scale=np.array([0.5, 3], F32))
    o, lse = tessera.attention(q, k, v, v_scale=one(0.75), **kw)
    o8, lse8 = tessera.attention(q, k, v, v_scale=one(6), **kw)
    np.testing.assert_array_equal(o8, o * BF16(8))
    np.testing.assert_array_equal(lse8, lse)


@BACKENDS
def test_scales_of_rows_and_blocks_are_those_of_the_values(backend):
    q, k, v = arrays(sk=300)
    qs = RNG.uniform(0.5, 2, (2, 2, 5)).astype(F32)
    ks, vs = (RNG.uniform(0.5, 2, (2, 2, 3)).astype(F32) for _ in range(2))
    o = tessera.attention(q, k, v, q_scale=qs, k_scale=ks, v_scale=vs, scale_block=(1, 128),
                          out_dtype="float32", backend=backend)
    rows = [np.repeat(s, 128, axis=2)[:, :, :300].transpose(0, 2, 1)[..., None] for s in (ks, vs)]
    truth = tessera.attention(q.astype(F32) * qs.transpose(0, 2, 1)[..., None], k.astype(F32) * rows[0],
                              v.astype(F32) * rows[1])
    np.testing.assert_allclose(o, truth, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize("dtype,most", [(E4M3, 448), (E5M2, 57344)])
def test_outputs_saturate_and_amax_is_of_values(backend, dtype, most):
    q, k, v = arrays(sk=1)
    v[:] = 100
    v[0, 0, 0, :3] = np.array([0.5, -100, 3], F32)
    o, amax = tessera.attention(q, k, v, v_scale=one(4), out_dtype=dtype, o_scale=np.array([0.001], F32),
                                return_amax=True, backend=backend)
    assert o.dtype == dtype and amax.dtype == F32 and amax == 384  # 96 is nearest to 100
    assert abs(o.astype(F32)).max() == most
    assert o.astype(F32)[0, 0, 0, 1] == -most


@BACKENDS
def test_nan_stays_nan_in_its_row(backend):
    q, k, v = arrays()
    clean = tessera.attention(q, k, v, out_dtype=E4M3, backend=backend)
    q[1, 2, 0, 3] = np.nan
    o, amax = tessera.attention(q, k, v, out_dtype=E4M3, return_amax=True, backend=backend)
    o, clean = o.astype(F32), clean.astype(F32)
    assert np.isnan(o[1, 2, 0]).all() and np.isnan(amax)
    o[1, 2, 0] = clean[1, 2, 0]
    np.testing.assert_array_equal(o, clean)


@BACKENDS
def test_gradients_are_those_of_the_values(backend):
    q, k, v = arrays()
    do = RNG.standard_normal((2, 5, 2, 16)).astype(E5M2)
    o, lse = tessera.attention(q, k, v, return_lse=True, backend=backend)
    g = tessera.attention_backward(do, q, k, v, o, lse, do_scale=one(2), return_amax=True, backend=backend)
    f32 = [x.astype(F32) for x in (q, k, v, o)]
    truth = tessera.attention_backward(do.astype(F32) * 2, *f32, lse)
    for name in ("dq", "dk", "dv"):
        exact = getattr(truth, name)
        assert getattr(g, name).dtype == BF16
        np.testing.assert_allclose(getattr(g, name).astype(F32), exact, rtol=2**-8, atol=1e-5)
        np.testing.assert_allclose(getattr(g, f"amax_{name}"), abs(exact).max(), rtol=1e-5)
    some = tessera.attention_backward(do, q, k, v, o, lse, grads=("dv",), grad_dtype=E5M2,
                                      dv_scale=np.array([0.25], F32), do_scale=one(2), backend=backend)
    assert some.dq is None and some.dv.dtype == E5M2 and some.amax_dv is None
    np.testing.assert_allclose(some.dv.astype(F32) / 4, truth.dv, rtol=2**-2, atol=2**-16)


@pytest.mark.parametrize("scale", [0, -1, np.nan, np.inf])
def test_a_scale_is_finite_and_positive(scale):
    q, k, v = arrays()
    for name in ("q_scale", "k_scale"):
        with pytest.raises(ValueError, match=f"{name}=.*finite and > 0"):
            tessera.attention(q, k, v, **{name: one(scale)})


def test_what_is_illegal_and_what_is_refused():
    q, k, v = arrays()
    with pytest.raises(ValueError, match="o_scale.*fp8"):
        tessera.attention(q, k, v, o_scale=np.ones(1, F32))
    with pytest.raises(ValueError, match="bias.dtype"):
        tessera.attention(q, k, v, bias=np.zeros((5, 7), E4M3))
    with pytest.raises(ValueError, match="amax_o"):
        tessera.attention(*(x.astype(F32) for x in (q, k, v)), return_amax=True)
    with pytest.raises(tessera.Refused, match="page_table"):
        tessera.attention(q, k, v, page_table=np.zeros((2, 1), np.int32), seqlens_k=np.full(2, 7),
                          backend="cpu")


# ---- precision="fp8" ----

SMOOTH = ("none", "mean", "mean+hadamard")


def halves(sk=300, dtype=BF16, mean=0.0):
    """q, k, v, do [2, 40 or sk, 2, 64]; some channels of k have a mean."""
    q, k, v, do = (RNG.standard_normal((2, n, 2, 64)).astype(F32) for n in (40, sk, sk, 40))
    k[..., ::21] += mean
    return [x.astype(dtype) for x in (q, k, v, do)]


def both(q, k, v, do, **kw):
    o, lse = tessera.attention(q, k, v, return_lse=True, **kw)
    g = tessera.attention_backward(do, q, k, v, o, lse, **kw)
    return [x.astype(np.float64) for x in (o, lse, g.dq, g.dk, g.dv)]


def distances(got, exact):
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, exact)]


@BACKENDS
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_products_in_fp8_are_as_far_from_exact_as_fp8_is(backend, dtype):
    x = halves(dtype=dtype)
    exact = both(*(a.astype(F32) for a in x))
    for smooth in SMOOTH:
        for far, bound in zip(distances(both(*x, precision="fp8", smooth=smooth, backend=backend), exact),
                              (0.08, 0.01, 0.12, 0.12, 0.08)):
            assert 1e-5 < far < bound


@BACKENDS
def test_smoothing_is_nearer_where_channels_have_a_mean(backend):
    x = halves(mean=12)
    exact = both(*(a.astype(F32) for a in x))
    none, mean, both_of_them = (distances(both(*x, precision="fp8", smooth=smooth, backend=backend), exact)
                                for smooth in SMOOTH)
    for result in (0, 2):  # o, dq
        assert mean[result] < 0.7 * none[result]
        assert both_of_them[result] < 1.1 * mean[result]


@BACKENDS
def test_what_is_exact_in_fp8_stays(backend):
    """One key: the weight is 1, and v is among E4M3's values beside a power of two."""
    q, k, v, _ = halves(sk=1)
    v = (np.round(v.astype(F32) * 2) / 2).clip(-4, 4).astype(BF16)
    o = tessera.attention(q, k, v, precision="fp8", backend=backend)
    np.testing.assert_array_equal(o, np.broadcast_to(v, o.shape))


def test_a_sequence_does_not_hang_on_its_neighbours():
    q, k, v, _ = halves()
    lens = np.array([300, 130], np.int32)
    kw = dict(precision="fp8", return_lse=True)
    o, lse = tessera.attention(q, k, v, seqlens_k=lens, **kw)
    k[1, 130:], v[1, 130:] = np.nan, np.nan
    alone, lse_alone = tessera.attention(q[1:], k[1:, :130], v[1:, :130], **kw)
    np.testing.assert_array_equal(o[1:], alone)
    np.testing.assert_array_equal(lse[1:], lse_alone)
    np.testing.assert_array_equal(tessera.attention(q, k, v, seqlens_k=lens, **kw)[0], o)


def test_the_largest_value_and_an_fp32_result():
    q, k, v, _ = halves()
    o, amax = tessera.attention(q, k, v, precision="fp8", out_dtype="float32", return_amax=True)
    assert o.dtype == F32 and amax == np.abs(o).max()


@pytest.mark.parametrize("dtype,words,message", [
    (F32, dict(precision="fp8"), 'precision="fp8": rounds 16-bit'),
    (BF16, dict(smooth="mean"), 'smooth=.*belongs to precision="fp8"'),
    (BF16, dict(precision="fp4"), "precision='fp4'.*fp8"),
    (BF16, dict(precision="fp8", smooth="median"), "smooth='median'.*mean")])
def test_words_that_do_not_fit(dtype, words, message):
    q, k, v, _ = halves(dtype=dtype)
    with pytest.raises(ValueError, match=message):
        tessera.attention(q, k, v, **words)


def test_what_products_in_fp8_do_not_have_is_refused_by_name():
    q, k, v, _ = halves()
    table = np.zeros((2, 1), np.int32)
    with pytest.raises(tessera.Refused, match='page_table beside precision="fp8"'):
        tessera.attention(q, k, v, precision="fp8", page_table=table, seqlens_k=np.array([5, 5], np.int32))
    o, lse = tessera.attention(q, k, v, precision="fp8", return_lse=True)
    with pytest.raises(tessera.Refused, match='accumulate=True beside precision="fp8"'):
        tessera.attention(q, k, v, precision="fp8", accumulate=True, out=o, lse=lse)
