# SPDX-License-Identifier: Apache-2.0
"""tessera.flash_attn.cute, FlashAttention 4's functions, beside tessera.torch.attention."""
import math

import pytest

torch = pytest.importorskip("torch")

import tessera.torch as tt  # noqa: E402
from dropins import normal  # noqa: E402
from tessera.flash_attn import cute  # noqa: E402
from tessera.flash_attn.cute import interface  # noqa: E402

HQ, HK, D, DV = 4, 2, 32, 16
same = torch.testing.assert_close


def qkv(sq=9, sk=20, b=2):
    return normal(b, sq, HQ, D), normal(b, sk, HK, D, seed=1), normal(b, sk, HK, DV, seed=2)


@pytest.mark.parametrize("theirs,ours", [
    ({}, {}), (dict(causal=True), dict(causal=True)), (dict(window_size=(4, None)), dict(window=(4, -1))),
    (dict(window_size=(4, 2), softcap=3.0), dict(window=(4, 2), softcap=3.0)),
    (dict(window_size=(-1, -1)), {}), (dict(causal=True, window_size=(5, None)), dict(window=(5, 0))),
    (dict(learnable_sink=torch.ones(HQ), softmax_scale=0.5), dict(sink=torch.ones(HQ), softmax_scale=0.5)),
    (dict(num_splits=3, pack_gqa=True, deterministic=True), dict(deterministic=True))], ids=str)
def test_padded(theirs, ours):
    q, k, v = qkv()
    o, lse = tt.attention(q, k, v, align="bottom_right", return_lse=True, **ours)
    got = cute.flash_attn_func(q, k, v, return_lse=True, **theirs)
    same(got[0], o)
    same(got[1], lse)
    out, nothing = cute.flash_attn_func(q, k, v, **theirs)
    assert nothing is None
    same(out, o)


def test_gradients_of_latent_attention():
    q, k, v = (x.requires_grad_() for x in qkv())
    k, v = k[:, :, :1], v[:, :, :1]
    qv = normal(2, 9, HQ, DV, seed=3).requires_grad_()
    o, lse = cute.flash_attn_func(q, k, v, qv=qv, causal=True, return_lse=True)
    scores = (torch.einsum("bihd,bjhd->bhij", q, k.expand(-1, -1, HQ, -1)) +
              torch.einsum("bihd,bjhd->bhij", qv, v.expand(-1, -1, HQ, -1))) / math.sqrt(D + DV)
    hidden = torch.ones(9, 20, dtype=torch.bool).triu(12)
    scores = scores.masked_fill(hidden, -torch.inf)
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.expand(-1, -1, HQ, -1))
    same(o, expected, atol=1e-5, rtol=1e-5)
    same(lse, scores.logsumexp(-1).transpose(1, 2), atol=1e-5, rtol=1e-5)
    do = normal(*o.shape, seed=5)
    for a, b in zip(torch.autograd.grad(o, (q, qv), do, retain_graph=True), torch.autograd.grad(expected, (q, qv), do)):
        same(a, b, atol=1e-5, rtol=1e-4)


LENGTHS_Q, LENGTHS_K = (3, 9, 1), (20, 11, 5)


def parts():
    q, k, v = qkv(b=3)
    return [cute.flash_attn_func(q[n:n + 1, :i], k[n:n + 1, :j], v[n:n + 1, :j], causal=True, return_lse=True)
            for n, (i, j) in enumerate(zip(LENGTHS_Q, LENGTHS_K))]


def starts(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def packed(x, lengths):
    return torch.cat([x[n, :length] for n, length in enumerate(lengths)])


@pytest.mark.parametrize("how", ["packed", "padded keys", "pages", "padded", "padded pages", "gaps"])
def test_lengths_of_their_own(how):
    q, k, v = qkv(b=3)
    used = {"seqused_k": torch.tensor(LENGTHS_K, dtype=torch.int32)}
    if how.startswith("padded") and how != "padded keys":
        where = dict(seqused_q=torch.tensor(LENGTHS_Q, dtype=torch.int32))
    elif how == "gaps":
        q = q.flatten(0, 1)
        where = dict(cu_seqlens_q=starts([9] * 3), seqused_q=torch.tensor(LENGTHS_Q), max_seqlen_q=9)
    else:
        q, where = packed(q, LENGTHS_Q), dict(cu_seqlens_q=starts(LENGTHS_Q), max_seqlen_q=torch.tensor(9))
    if how == "packed":
        k, v, used = packed(k, LENGTHS_K), packed(v, LENGTHS_K), dict(cu_seqlens_k=starts(LENGTHS_K), max_seqlen_k=20)
    elif how == "gaps":
        k, v, used = k.flatten(0, 1), v.flatten(0, 1), used | dict(cu_seqlens_k=starts([20] * 3), max_seqlen_k=20)
    elif "pages" in how:
        k, v = (x.reshape(15, 4, HK, -1) for x in (k, v))
        used["page_table"] = torch.arange(15, dtype=torch.int32).reshape(3, 5)
    o, lse = cute.flash_attn_varlen_func(q, k, v, **where, **used, causal=True, return_lse=True)
    for n, ((own, own_lse), i) in enumerate(zip(parts(), LENGTHS_Q)):
        if o.dim() == 4:
            same(o[n:n + 1, :i], own)
            same(lse[n:n + 1, :, :i], own_lse)
        else:
            first = 9 * n if how == "gaps" else sum(LENGTHS_Q[:n])
            same(o[first:first + i], own[0])
            same(lse[:, first:first + i], own_lse[0])


def test_parts_are_combined():
    q, k, v = qkv()
    whole, lse = cute.flash_attn_func(q, k, v, return_lse=True)
    found = [cute.flash_attn_func(q, x, y, return_lse=True) for x, y in zip(k.split(12, 1), v.split(12, 1))]
    out, rows = torch.stack([o for o, _ in found]), torch.stack([x.transpose(1, 2) for _, x in found])
    o, sums = cute.flash_attn_combine(out, rows)
    same(o, whole)
    same(sums, lse.transpose(1, 2))
    assert cute.flash_attn_combine(out, rows, return_lse=False)[1] is None
    assert cute.get_scheduler_metadata(1, 2, 3, 4, 5, 6) is None


@pytest.mark.parametrize("words,name", [
    (dict(score_mod=max), "score_mod"), (dict(mask_mod=max), "mask_mod"),
    (dict(gather_kv_indices=torch.zeros(1)), "gather_kv_indices"), (dict(window_size=(3, -1)), "window_size"),
    (dict(block_sparse_tensors=1), "block_sparse_tensors")])
def test_what_is_refused_says_so(words, name):
    with pytest.raises(tt.Refused, match=f"flash_attn_func: .*{name}"):
        interface.flash_attn_func(*qkv(), **words)
