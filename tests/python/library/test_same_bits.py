# SPDX-License-Identifier: Apache-2.0
"""Which calls give the same bits as which, on the CPU: what docs/features/determinism.md says."""
import itertools

import ml_dtypes
import numpy as np
import pytest

import tessera

LENGTH = 700
DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
HEADS = [(4, 2, 64), (4, 4, 40), (8, 1, 128)]
# The last chunks have 1 to 32 rows of a head, which the CPU computes in three ways where it may choose.
CHUNKS = [1, 2, 5, 16, 17, 33, 64, 256]


class Sequence:
    """q, k and v of a sequence, and the whole of it under a causal mask."""

    def __init__(self, dtype, heads, seed=0, length=LENGTH):
        hq, hk, d = heads
        self.rng = np.random.default_rng(seed)
        self.q, self.k, self.v = (self.rng.standard_normal((length, h, d)).astype(DTYPES[dtype])
                                  for h in (hq, hk, hk))

    def whole(self, **keywords):
        return tessera.attention(self.q[None], self.k[None], self.v[None], causal=True, **keywords)[0]

    def pages(self, size):
        """(k, v, page_table [1, n]): pools whose other pages and tails are NaN."""
        length = len(self.k)
        n = -(-length // size)
        table = self.rng.permutation(n + 3)[:n].astype(np.int32)
        pools = [np.full((n + 3, size, *x.shape[1:]), np.nan, np.float32).astype(x.dtype)
                 for x in (self.k, self.v)]
        for pool, x in zip(pools, (self.k, self.v)):
            for i, page in enumerate(table):
                part = x[i * size:(i + 1) * size]
                pool[page, :len(part)] = part
        return *pools, table[None]

    def in_chunks(self, chunk, size, **keywords):
        """The prompt in calls of `chunk` queries over pages."""
        k, v, table = self.pages(size)
        ends = [min(begin + chunk, LENGTH) for begin in range(0, LENGTH, chunk)]
        parts = [tessera.attention(self.q[None, end - min(chunk, end - begin):end], k, v, causal=True,
                                   align="bottom_right", page_table=table, seqlens_k=np.array([end]), **keywords)[0]
                 for begin, end in zip(range(0, LENGTH, chunk), ends)]
        return np.concatenate(parts)


def equal(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype, heads", list(itertools.product(DTYPES, HEADS)))
@pytest.mark.parametrize("invariant", [False, True])
def test_neighbours_layouts_and_pages_change_no_bit(dtype, heads, invariant):
    one, before, after = (Sequence(dtype, heads, seed, n) for seed, n in ((0, LENGTH), (1, 5), (2, 300)))
    keywords = dict(batch_invariant=invariant)
    expected = one.whole(**keywords)

    cu = np.cumsum([0, 5, LENGTH, 300])
    packed = tessera.attention(*(np.concatenate([getattr(s, x) for s in (before, one, after)]) for x in "qkv"),
                               layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, align="bottom_right", causal=True,
                               **keywords)
    assert equal(packed[5:5 + LENGTH], expected)

    others = [Sequence(dtype, heads, seed) for seed in range(3, 6)]
    batch = tessera.attention(*(np.stack([getattr(s, x) for s in (*others, one)]) for x in "qkv"), causal=True,
                              **keywords)
    assert equal(batch[3], expected)

    for size in (1, 16, 100):
        k, v, table = one.pages(size)
        paged = tessera.attention(one.q[None], k, v, causal=True, align="bottom_right", page_table=table,
                                  seqlens_k=np.array([LENGTH]), **keywords)
        assert equal(paged[0], expected), size


@pytest.mark.parametrize("dtype, heads", list(itertools.product(DTYPES, HEADS)))
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_prompt_may_be_cut_anywhere_in_the_batch_invariant_form(dtype, heads, chunk):
    one = Sequence(dtype, heads)
    assert equal(one.in_chunks(chunk, 16, batch_invariant=True), one.whole(batch_invariant=True))


def test_the_form_is_the_plain_prefill():
    one = Sequence("fp32", (4, 2, 64))
    assert equal(one.whole(batch_invariant=True), one.whole())
    # Without it few queries are computed another way, which is what makes the test above one.
    assert not equal(one.in_chunks(1, 16), one.whole())


@pytest.mark.parametrize("window", [None, (2500, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_keys_and_few_queries(dtype, window):
    """So many keys that they are cut and merged: at the same places, whatever the queries are cut into. With the
    window, tiles of many queries begin a chunk earlier than the last query alone."""
    one = Sequence(dtype, (8, 2, 64), length=5000)
    k, v, table = one.pages(16)

    def last(n, **keywords):
        return tessera.attention(one.q[None, -n:], k, v, causal=window is None, window=window, align="bottom_right",
                                 page_table=table, seqlens_k=np.array([5000]), **keywords)[0, -1]
    keywords = dict(causal=True) if window is None else dict(window=window)
    whole = tessera.attention(one.q[None], one.k[None], one.v[None], batch_invariant=True, **keywords)[0, -1]
    assert all(equal(last(n, batch_invariant=True), whole) for n in (1, 3, 16, 17, 1500))
    assert not equal(last(1), whole)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads):
    one = Sequence("bf16", (4, 2, 64))
    expected = one.in_chunks(5, 16, batch_invariant=True)
    tessera.set_num_threads(threads)
    try:
        assert equal(one.in_chunks(5, 16, batch_invariant=True), expected)
    finally:
        tessera.set_num_threads(None)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("page", [1, 3, 4])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("mixed", [False, True])
def test_pages_that_the_band_hides_change_no_bit(mixed, rows, page, invariant):
    """Decode, chunks of a prompt and both in one call; the table's hidden entries are no page, or one of NaN."""
    rng = np.random.default_rng(rows)
    left, lengths = 3, np.array([57, 44, rows])
    queries = np.array([rows, 1, rows] if mixed else [rows] * 3)
    n = -(-57 // page)
    k, v = (rng.standard_normal((3 * n + 1, page, 2, 16)).astype(np.float32) for _ in range(2))
    k[-1] = v[-1] = np.nan
    table = rng.permutation(3 * n).astype(np.int32).reshape(3, n)
    q = rng.standard_normal((queries.sum(), 4, 16)).astype(np.float32)
    begins = np.arange(n) * page
    hidden = (begins >= lengths[:, None]) | (begins + page <= (lengths - queries - left)[:, None])
    assert hidden.any()

    def call(table):
        return tessera.attention(q, k, v, layout=("thd", "bshd"), cu_seqlens_q=np.append(0, queries.cumsum()),
                                 seqlens_k=lengths, window=(left, 0), align="bottom_right", page_table=table,
                                 batch_invariant=invariant)
    expected = call(table)
    assert np.isfinite(expected).all()
    for entry in (-1, 2**31 - 1, 3 * n):
        assert equal(call(np.where(hidden, np.int32(entry), table)), expected), entry


@pytest.mark.parametrize("longest", [2**31 - 1, 2**31, 2**31 + 5, 2**63 - 1])
@pytest.mark.parametrize("band", [{}, {"causal": True}, {"window": (3, 2), "align": "bottom_right"}])
def test_a_longest_sequence_beyond_32_bits_changes_no_bit(longest, band):
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((80, 2, 16)).astype(np.float32) for _ in range(4))
    ends = np.array([0, 30, 80], np.int32)

    def call(**keywords):
        keywords.update(band, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends)
        o, lse = tessera.attention(q, k, v, return_lse=True, **keywords)
        gradients = tessera.attention_backward(do, q, k, v, o, lse, **keywords)
        return o, lse, gradients.dq, gradients.dk, gradients.dv
    assert all(map(equal, call(max_seqlen_q=longest, max_seqlen_k=longest), call()))
