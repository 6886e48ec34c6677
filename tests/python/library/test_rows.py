# SPDX-License-Identifier: Apache-2.0
"""One row of packed sequences: an array of a padded format and batch 1, beside cu_seqlens."""

import numpy as np
import pytest

import tessera

RNG = np.random.default_rng(1)


def qkv(b, sq, sk, hq, hk, d):
    return [RNG.standard_normal(shape).astype(np.float32) for shape in ((b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, d))]


ROWS = {"thd": lambda x: x[0], "bshd": lambda x: x, "sbhd": lambda x: x.swapaxes(0, 1),
        "bhsd": lambda x: x.swapaxes(1, 2)}


@pytest.mark.parametrize("layout", [("bshd", "bshd"), ("sbhd", "sbhd"), ("bhsd", "bhsd"), ("bshd", "bhsd"),
                                    ("thd", "sbhd"), ("bhsd", "thd")])
def test_one_row_of_packed_sequences_is_thd(layout):
    q, k, v = qkv(1, 12, 13, 4, 2, 8)
    of_q, of_k = (ROWS[form] for form in layout)
    kw = dict(cu_seqlens_q=np.array([0, 3, 3, 11], np.int32), cu_seqlens_k=np.array([0, 5, 9, 13], np.int32),
              causal=True, align="bottom_right")
    o, lse = tessera.attention(q[0], k[0], v[0], layout="thd", return_lse=True, **kw)
    do = RNG.standard_normal(o.shape).astype(np.float32)
    g = tessera.attention_backward(do, q[0], k[0], v[0], o, lse, layout="thd", **kw)
    inputs, kw["layout"] = (of_q(q), of_k(k), of_k(v)), layout
    row, row_lse = tessera.attention(*inputs, return_lse=True, **kw)
    np.testing.assert_array_equal(row, of_q(o[None]))
    assert row.shape == inputs[0].shape and row_lse.shape == (lse.shape if layout[0] == "thd" else (1, 4, 12))
    np.testing.assert_array_equal(row_lse.reshape(lse.shape), lse)
    into = np.empty_like(row)
    tessera.attention(*inputs, out=into, **kw)
    np.testing.assert_array_equal(into, row)
    gradients = tessera.attention_backward(of_q(do[None]), *inputs, row, row_lse, **kw)
    for name, form in (("dq", of_q), ("dk", of_k), ("dv", of_k)):
        np.testing.assert_array_equal(getattr(gradients, name), form(getattr(g, name)[None]))


def test_masks_of_one_row_of_packed_sequences():
    """What has an axis of rows has the batch of a padded format; what is told of sequences has theirs."""
    q, k, v = (x[0] for x in qkv(1, 9, 9, 4, 4, 8))
    cu = np.array([0, 4, 9], np.int32)
    ranges, ids = RNG.integers(0, 6, (1, 9, 2)).astype(np.int32), RNG.integers(0, 2, 9).astype(np.int32)
    kw = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5,
              bias=RNG.standard_normal((2, 4, 5, 5)).astype(np.float32))
    o = tessera.attention(q, k, v, layout="thd", key_ranges=ranges, segment_ids=ids, **kw)
    row = tessera.attention(q[None], k[None], v[None], key_ranges=ranges[None], segment_ids=ids[None], **kw)
    np.testing.assert_array_equal(row[0], o)


def test_packed_sequences_are_of_one_row():
    q, k, v = qkv(2, 9, 9, 4, 4, 8)
    cu = np.array([0, 4, 9], np.int32)
    with pytest.raises(ValueError, match='cu_seqlens_q.*pass seqlens_q, or layout="thd"'):
        tessera.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    with pytest.raises(ValueError, match=r"k.shape=\[1, 9, 3, 8\], read as \[9, 3, 8\]: "):
        tessera.attention(q[:1], k[:1, :, :3], v[:1, :, :3], cu_seqlens_q=cu, cu_seqlens_k=cu)
    with pytest.raises(ValueError, match="cu_seqlens_k=None"):
        tessera.attention(q[:1], k[0], v[0], layout=("bshd", "thd"), cu_seqlens_q=cu)
