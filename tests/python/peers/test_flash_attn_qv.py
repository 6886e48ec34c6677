# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3's qv, the part of q that attends to v, beside softmax((q kᵀ + qv vᵀ) scale) v in float64."""
import math

import pytest

torch = pytest.importorskip("torch")

import tessera.flash_attn_interface as fa3  # noqa: E402
from dropins import close, normal, same_gradients, shuffled, visible  # noqa: E402
from tessera.flash_attn import _translate  # noqa: E402

B, SQ, SK, HQ, HK, D, DV = 2, 5, 9, 4, 2, 8, 16


def tensors(sq=SQ, sk=SK, grad=False):
    """q, k, v and qv."""
    return [normal(B, s, h, d, seed=i, grad=grad)
            for i, (s, h, d) in enumerate(((sq, HQ, D), (sk, HK, D), (sk, HK, DV), (sq, HQ, DV)))]


def expected(q, k, v, qv, seen, scale=1 / math.sqrt(D + DV), softcap=0.0):
    """(o [sq, hq, dv], lse [hq, sq]) of one sequence."""
    k, v = (x.double().repeat_interleave(HQ // HK, 1) for x in (k, v))
    x = (torch.einsum("qhd,khd->hqk", q.double(), k) + torch.einsum("qhd,khd->hqk", qv.double(), v)) * scale
    x = (softcap * torch.tanh(x / softcap) if softcap else x).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", x.softmax(-1).nan_to_num(), v), x.logsumexp(-1)


def batch(*inputs, causal=False, window_size=(-1, -1), **words):
    results = [expected(*one, visible(SQ, SK, causal, *window_size), **words) for one in zip(*inputs)]
    return [torch.stack(x) for x in zip(*results)]


@pytest.mark.parametrize("words, score", [
    ({}, {}), (dict(causal=True), {}), (dict(window_size=(2, 1), softcap=3.0), dict(softcap=3.0)),
    (dict(softmax_scale=0.3), dict(scale=0.3))], ids=str)
def test_dense(words, score):
    q, k, v, qv = inputs = tensors(grad=True)
    o, lse = batch(*inputs, **{name: x for name, x in words.items() if name in ("causal", "window_size")}, **score)
    out, rows = fa3.flash_attn_func(q, k, v, qv=qv, return_attn_probs=True, **words)
    close(out, o)
    close(rows, lse)
    same_gradients(out, o, inputs)


def test_packed():
    q, k, v, qv = inputs = tensors(grad=True)
    cu_q, cu_k = (torch.arange(B + 1, dtype=torch.int32) * n for n in (SQ, SK))
    o, lse = batch(*inputs, causal=True)
    out, rows = fa3.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, SQ, SK, causal=True,
                                           qv=qv.flatten(0, 1), return_attn_probs=True)
    close(out.unflatten(0, (B, SQ)), o)
    close(rows.unflatten(1, (B, SQ)).transpose(0, 1), lse)
    same_gradients(out.unflatten(0, (B, SQ)), o, inputs)


@pytest.mark.parametrize("joined", [True, False], ids=["columns of one cache", "two caches"])
@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
def test_a_cache(pages, joined):
    """New keys are turned and written, q is turned and qv is not; what no sequence has may be anything."""
    q, _, _, qv = tensors(sq=1)
    new_k, new_v = normal(B, 1, HK, D, seed=5), normal(B, 1, HK, DV, seed=6)
    lengths, room, page = [6, 2], 8, 4
    angles = torch.arange(room)[:, None] / 10 ** torch.arange(D // 2)
    cos, sin = angles.cos(), angles.sin()
    shape = (B * room // page, page) if pages else (B, room)
    cache = torch.full((*shape, HK, DV + D), torch.nan)
    v_cache, k_cache = cache.split([DV, D], -1)
    if not joined:
        v_cache, k_cache = v_cache.clone(), k_cache.clone()
    table = shuffled(B * room // page).view(B, -1) if pages else None
    history = [[normal(n, HK, d, seed=n) for n in lengths] for d in (D, DV)]
    for x, parts in zip((k_cache, v_cache), history):
        for n, part in enumerate(parts):
            for j, row in enumerate(part):
                x[(table[n, j // page], j % page) if pages else (n, j)] = row
    out, lse = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, new_k, new_v, qv, cos, sin, torch.tensor(lengths, dtype=torch.int32), page_table=table,
        causal=True, rotary_interleaved=False, return_softmax_lse=True)
    for n, length in enumerate(lengths):
        def turned(x, c=cos[length], s=sin[length]):
            a, b = x.chunk(2, -1)
            return torch.cat([a * c - b * s, b * c + a * s], -1)
        keys, values = (torch.cat([parts[n], mine]) for parts, mine in
                        zip(history, (turned(new_k[n]), new_v[n])))
        o, rows = expected(turned(q[n]), keys, values, qv[n], visible(1, length + 1))
        close(out[n], o)
        close(lse[n], rows)
        close(v_cache[(table[n, length // page], length % page) if pages else (n, length)], new_v[n, 0])


def test_columns_of_one_cache_are_not_copied():
    q, _, _, qv = tensors()
    v, k = normal(B, SK, HK, DV + D).split([DV, D], -1)
    _, joined, values = _translate.with_qv(q, k, v, qv)
    assert joined.data_ptr() == values.data_ptr() == v.data_ptr() and torch.equal(joined, torch.cat([v, k], -1))
    for other_k, other_v in ((k.clone(), v), (v[..., :D], v), (k, v[..., D:])):
        _, joined, values = _translate.with_qv(q, other_k, other_v, qv)
        assert torch.equal(joined, torch.cat([other_v, other_k], -1)) and torch.equal(values, other_v)


def test_the_operator_does_not_count_qv_in_its_scale():
    """FlashAttention's extension takes 1/√d without softmax_scale; the functions above it pass 1/√(d + dv)."""
    q, k, v, qv = inputs = tensors()
    handle = fa3.register_ops()
    try:
        for scale in (None, 0.3):
            o, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, q_v=qv, softmax_scale=scale, is_causal=True)
            want, rows = batch(*inputs, causal=True, scale=scale or 1 / math.sqrt(D))
            close(o, want)
            close(lse, rows)
        used = torch.tensor([7, 4], dtype=torch.int32)
        o, *_ = torch.ops.flash_attn_3.fwd(q, k, v, q_v=qv, seqused_k=used, leftpad_k=torch.zeros_like(used))
        for n, length in enumerate(used.tolist()):
            close(o[n], expected(q[n], k[n, :length], v[n, :length], qv[n], visible(SQ, length),
                                 1 / math.sqrt(D))[0])
    finally:
        handle.remove()


def test_it_compiles():
    q, k, v, qv = tensors(grad=True)

    def function(q, k, v, qv):
        return fa3.flash_attn_func(q, k, v, qv=qv, causal=True)
    o = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v, qv)
    close(o, function(q, k, v, qv))
    same_gradients(o, function(q, k, v, qv), (q, k, v, qv))
