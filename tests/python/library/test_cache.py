# SPDX-License-Identifier: Apache-2.0
"""rotate, rope_table and append_kv on NumPy arrays, against the formulas in fp64."""

import ml_dtypes
import numpy as np
import pytest

import tessera
from caches import problem
from test_api import permute

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16,
          "float64": np.float64}
HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-24}


def turned(x, cos, sin, positions, interleaved):
    """x fp64 [..., s, h, d] at positions [..., s]."""
    r = 2 * cos.shape[1]
    c, s = (table.astype(np.float64)[positions][..., None, :] for table in (cos, sin))
    pairs = (slice(0, r, 2), slice(1, r, 2)) if interleaved else (slice(0, r // 2), slice(r // 2, r))
    a, b = x[..., pairs[0]], x[..., pairs[1]]
    y = x.copy()
    y[..., pairs[0]], y[..., pairs[1]] = a * c - b * s, b * c + a * s
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d, r", [(8, 8), (40, 24), (576, 64), (300, 300), (3, 2)])
def test_rotate(dtype, interleaved, d, r):
    rng = np.random.default_rng(d)
    x = rng.standard_normal((2, 5, 3, d)).astype(DTYPES[dtype])
    cos, sin = tessera.rope_table(64, r)
    for positions, at in ((None, np.arange(5)[None] + np.zeros((2, 1), int)),
                          (np.array([7, 50]), np.arange(5)[None] + np.array([[7], [50]])),
                          (rng.integers(0, 64, (2, 5)).astype(np.int32), None)):
        expected = turned(x.astype(np.float64), cos, sin, positions if at is None else at, interleaved)
        for layout in ("bshd", "sbhd", "bhsd"):
            y = tessera.rotate(permute(x, layout), cos, sin, positions, interleaved=interleaved,
                               layout=layout)
            assert y.dtype == x.dtype
            error = np.abs(y.astype(np.float64) - permute(expected, layout))
            assert error.max() <= (1 + 2.0**-10) * HALF_ULP[dtype] * 2 * np.abs(expected).max()
            np.testing.assert_array_equal(y[..., r:], permute(x, layout)[..., r:])


def test_rotate_in_place_and_packed():
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((9, 3, 2, 16)).astype(np.float32)
    cos, sin = tessera.rope_table(32, 16)
    positions = np.array([0, 1, 2, 3, 0, 1, 0, 1, 31])
    before = qkv.copy()
    out = tessera.rotate(qkv[:, 1], cos, sin, positions, layout="thd", out=qkv[:, 1])
    assert out.base is qkv
    np.testing.assert_allclose(
        qkv[:, 1], turned(before[:, 1].astype(np.float64), cos, sin, positions, False), atol=1e-6)
    np.testing.assert_array_equal(qkv[:, [0, 2]], before[:, [0, 2]])


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 1, 64))
    cos, sin = tessera.rope_table(200, 64)
    scores = [(tessera.rotate(q, cos, sin, np.array([i + 17])) *
               tessera.rotate(k, cos, sin, np.array([i]))).sum() for i in (0, 5, 150)]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-5)


# The same formulas as transformers writes them are tested in test_torch_cache.py.
def test_table_at_far_positions():
    cos, sin = tessera.rope_table(2**20 + 1, 4, base=500000.0)
    exact = (2**20) * 500000.0 ** -np.array([0.0, 0.5])
    np.testing.assert_allclose(cos[-1], np.cos(exact), atol=1e-7)
    np.testing.assert_allclose(sin[-1], np.sin(exact), atol=1e-7)


@pytest.mark.parametrize("arguments, keywords, field", [
    ((-1, 8), {}, "max_pos=-1"), ((4, 7), {}, "r=7"), ((4, 0), {}, "r=0"), ((4.5, 8), {}, "max_pos=4.5"),
    ((4, 8), {"base": 0}, "base=0"), ((4, 8), {"scaling": "yarn"}, "scaling='yarn'"),
    ((4, 8), {"scaling": {"type": "cubic"}}, "scaling.*cubic"),
    ((4, 8), {"scaling": {"type": "linear"}}, "factor.*=None"),
    ((4, 8), {"scaling": {"type": "linear", "factor": -2}}, "factor.*=-2"),
    ((4, 8), {"scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "beta_fast.*=3"),
    ((4, 8), {"scaling": {"type": "longrope", "original_max_position_embeddings": 8,
                          "short_factor": [1.0]}}, "short_factor")])
def test_bad_tables(arguments, keywords, field):
    with pytest.raises(ValueError, match=f"tessera.rope_table: .*{field}"):
        tessera.rope_table(*arguments, **keywords)


@pytest.mark.parametrize("edit, field", [
    (lambda g: g.update(x=[1.0]), r"x=\[1.0\]"),
    (lambda g: g.update(x=g["x"][0]), "x.shape"),
    (lambda g: g.update(x=g["x"].astype(np.int32)), "x.dtype=int32"),
    (lambda g: g.update(cos=g["cos"].astype(np.float64)), "cos.dtype=fp64"),
    (lambda g: g.update(cos=g["cos"][:, :3]), "sin.shape"),
    (lambda g: g.update(x=g["x"][..., :6]), "cos.shape"),
    (lambda g: g.update(positions=np.array([0, 29])), r"positions: row 3 of sequence 1 is at 32"),
    (lambda g: g.update(positions=np.array([-1, 0])), r"positions: row 0 of sequence 0"),
    (lambda g: g.update(positions=np.array([2**63 - 1, 0])), r"positions: row 0 of sequence 0"),
    (lambda g: g.update(positions=np.zeros((2, 3), int)), "positions.shape"),
    (lambda g: g.update(positions=np.zeros(2)), "positions.dtype=fp64"),
    (lambda g: g.update(layout="thd"), "x.shape"),
    (lambda g: g.update(layout="bsh"), "layout='bsh'"),
    (lambda g: g.update(interleaved=1), "interleaved=1"),
    (lambda g: g.update(out=g["x"][:, ::-1]), "out.stride"),
    (lambda g: g.update(out=np.empty((2, 4, 1, 8), np.float16)), "out.dtype=fp16")])
def test_bad_rotations(edit, field):
    cos, sin = tessera.rope_table(32, 8)
    given = {"x": np.ones((2, 4, 1, 8), np.float32), "cos": cos, "sin": sin}
    edit(given)
    with pytest.raises(ValueError, match=f"tessera.rotate: .*{field}"):
        tessera.rotate(given.pop("x"), given.pop("cos"), given.pop("sin"), **given)


# ---- append_kv ----

def rows_of(given, cache, n, start, count):
    """The rows of positions start .. of sequence n."""
    if "page_table" not in given:
        return cache[n, start:start + count]
    page = cache.shape[1]
    at = np.arange(start, start + count)
    return cache[given["page_table"][n, at // page], at % page]


@pytest.mark.parametrize("page", [None, 1, 3, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_append(page, dtype):
    given = problem(page=page, dtype=DTYPES[dtype])
    assert tessera.append_kv(**given) is None
    for n, start in enumerate(given["seqlens_k"]):
        for name in "kv":
            np.testing.assert_array_equal(rows_of(given, given[f"{name}_cache"], n, start, 4),
                                          given[name][n])
    for name, d in (("k", 16), ("v", 8)):  # and nothing else
        assert np.isfinite(given[f"{name}_cache"].astype(np.float32)).sum() == 3 * 4 * 2 * d


def test_append_packed_in_other_layouts_and_for_one_cache():
    given, packed = problem(), problem(page=16)
    tessera.append_kv(**given)
    counts = [4, 0, 3]
    cu = np.cumsum([0, *counts]).astype(np.int32)
    for name in "kv":
        packed[name] = np.concatenate([packed[name][n, :count] for n, count in enumerate(counts)] +
                                      [np.full((2, *packed[name].shape[2:]), np.nan, np.float32)])
    tessera.append_kv(**packed, layout="thd", cu_seqlens=cu)
    for n, count in enumerate(counts):
        start = packed["seqlens_k"][n]
        np.testing.assert_array_equal(rows_of(packed, packed["k_cache"], n, start, count),
                                      given["k"][n, :count])
    assert np.isfinite(packed["k_cache"]).sum() == sum(counts) * 2 * 16
    for layout in ("sbhd", "bhsd"):
        other = problem()
        tessera.append_kv(**{**other, "k": permute(other["k"], layout), "v": permute(other["v"], layout)},
                          layout=layout)
        np.testing.assert_array_equal(other["v_cache"], given["v_cache"])
    mla = problem()
    tessera.append_kv(mla["k"], None, mla["k_cache"], None, mla["seqlens_k"])
    np.testing.assert_array_equal(mla["k_cache"], given["k_cache"])


@pytest.mark.parametrize("interleaved", [False, True])
def test_append_turns(interleaved):
    given = problem(dtype=np.float32)
    rng = np.random.default_rng(5)
    q = rng.standard_normal((3, 4, 4, 16)).astype(np.float32)
    rope = tessera.rope_table(64, 12)
    turned_q = tessera.append_kv(**given, q=q, rope=rope, interleaved=interleaved)
    np.testing.assert_array_equal(
        turned_q, tessera.rotate(q, *rope, given["seqlens_k"], interleaved=interleaved))
    k = tessera.rotate(given["k"], *rope, given["seqlens_k"], interleaved=interleaved)
    for n, start in enumerate(given["seqlens_k"]):
        np.testing.assert_array_equal(given["k_cache"][n, start:start + 4], k[n])
        np.testing.assert_array_equal(given["v_cache"][n, start:start + 4], given["v"][n])


def test_append_a_part_of_the_rows():
    given, whole = problem(), problem()
    rope = tessera.rope_table(64, 16)
    q = np.random.default_rng(2).standard_normal((3, 4, 4, 16)).astype(np.float32)
    counts = np.array([1, 0, 4], np.int32)
    for n, count in enumerate(counts):
        given["k"][n, count:] = given["v"][n, count:] = np.nan
    turned_q = tessera.append_kv(**given, seqlens_q=counts, q=q, rope=rope)
    whole_q = tessera.append_kv(**whole, q=q, rope=rope)
    for n, (count, start) in enumerate(zip(counts, given["seqlens_k"])):
        np.testing.assert_array_equal(turned_q[n, :count], whole_q[n, :count])
        assert not turned_q[n, count:].any()
        np.testing.assert_array_equal(given["k_cache"][n, start:start + count],
                                      whole["k_cache"][n, start:start + count])
    assert np.isfinite(given["v_cache"]).sum() == counts.sum() * 2 * 8
    with pytest.raises(ValueError, match=r"seqlens_q\[1\]=5: must be from 0 to 4"):
        tessera.append_kv(**problem(), seqlens_q=np.array([0, 5, 0]))


@pytest.mark.parametrize("cache, largest", [(ml_dtypes.float8_e4m3fn, 448), (ml_dtypes.float8_e5m2, 57344)])
def test_append_to_fp8(cache, largest):
    given = problem(cache=cache, dtype=ml_dtypes.bfloat16)
    given["k"][0, 0, 0, :3] = [3e38, -3e38, np.nan]
    given["k_scale"] = np.array([0.5, 0.01], np.float32)
    given["v_scale"] = np.random.default_rng(0).uniform(0.1, 2, (3, 2)).astype(np.float32)
    tessera.append_kv(**given)
    assert given["k_cache"][0, 0, 0, 0] == largest and given["k_cache"][0, 0, 0, 1] == -largest
    for name in "kv":
        scale = np.broadcast_to(given[f"{name}_scale"], (3, 2))[:, None, :, None].astype(np.float64)
        expected = np.clip(given[name].astype(np.float64) / scale, -largest, largest).astype(cache)
        for n, start in enumerate(given["seqlens_k"]):
            np.testing.assert_array_equal(given[f"{name}_cache"][n, start:start + 4].view(np.uint8) & 0x7F,
                                          expected[n].view(np.uint8) & 0x7F)


def test_append_and_attend():
    """Token by token through pages is attention over the whole."""
    rng = np.random.default_rng(3)
    b, s, hq, hk, d = 2, 11, 4, 2, 32
    q = rng.standard_normal((b, s, hq, d)).astype(np.float32)
    k, v = rng.standard_normal((2, b, s, hk, d)).astype(np.float32)
    rope = tessera.rope_table(s, d)
    whole = tessera.attention(tessera.rotate(q, *rope), tessera.rotate(k, *rope), v, causal=True,
                              align="top_left")
    table = rng.permutation(8).reshape(b, 4).astype(np.int32)
    k_pool, v_pool = np.full((2, 8, 3, hk, d), np.nan, np.float32)
    lengths = np.zeros(b, np.int64)
    for i in range(s):
        turned_q = tessera.append_kv(k[:, i:i + 1], v[:, i:i + 1], k_pool, v_pool, lengths,
                                     page_table=table, q=q[:, i:i + 1], rope=rope)
        lengths += 1
        o = tessera.attention(turned_q, k_pool, v_pool, seqlens_k=lengths, page_table=table)
        np.testing.assert_allclose(o[:, 0], whole[:, i], atol=2e-6)


@pytest.mark.parametrize("edit, field", [
    (lambda g: g.update(k=None), "k=None"),
    (lambda g: g.update(v=None), "v: not given beside v_cache"),
    (lambda g: g.update(v=g["v"].astype(np.float16)), "v.dtype=fp16"),
    (lambda g: g.update(k=g["k"].astype(np.float64)), "k.dtype=fp64"),
    (lambda g: g.update(k=g["k"][:, :, :1]), "shape"),
    (lambda g: g.update(seqlens_k=np.array([0, 17, 37])), r"seqlens_k\[2\]=37"),
    (lambda g: g.update(seqlens_k=np.array([0, -1, 3])), r"seqlens_k\[1\]=-1"),
    (lambda g: g.update(seqlens_k=np.array([0, 2**63 - 1, 3])), r"seqlens_k\[1\]="),
    (lambda g: g.update(seqlens_k=np.zeros(3)), "seqlens_k.dtype=fp64"),
    (lambda g: g.update(q=np.ones((3, 4, 4, 16), np.float32)), "q: is turned only"),
    (lambda g: g.update(rope=tessera.rope_table(39, 16)), r"rope\[0\].shape=\[39"),
    (lambda g: g.update(rope=tessera.rope_table(64, 18)), r"rope\[0\].shape"),
    (lambda g: g.update(rope=1), "rope=1"),
    (lambda g: g.update(k_scale=np.ones(2, np.float32)), "k_scale: must be given beside an fp8"),
    (lambda g: g.update(cu_seqlens=np.zeros(4, np.int32)), "cu_seqlens"),
    (lambda g: g.update(page_table=np.zeros((3, 2), np.int64)), "page_table.dtype=int64"),
    (lambda g: g.update(page_table=np.zeros((3, 2), np.int32)), r"ok|seqlens|page_table"),
    (lambda g: g.update(v_cache=g["k_cache"][..., :8]), "v_cache.data|k_cache.data"),
    (lambda g: g.update(k=g["k_cache"][:, :4]), "k_cache.data")])
def test_bad_appends_write_nothing(edit, field):
    given = problem()
    caches = given["k_cache"], given["v_cache"]
    edit(given)
    if "ok" in field:
        given["page_table"][1] = 3
    with pytest.raises(ValueError, match=f"tessera.append_kv: .*({field})"):
        tessera.append_kv(**given)
    assert all(np.isnan(cache).all() for cache in caches)


def test_an_fp8_cache_needs_scales():
    given = problem(cache=ml_dtypes.float8_e4m3fn)
    with pytest.raises(ValueError, match="k_scale: must be given beside an fp8 cache"):
        tessera.append_kv(**given)
    given.update(k_scale=np.array([1, 0], np.float32), v_scale=np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"k_scale\[0, 1\]=0: must be finite and above 0"):
        tessera.append_kv(**given)
