# SPDX-License-Identifier: Apache-2.0
"""tessera.flash_attn and tessera.flash_attn_interface beside attention written out, sequence by sequence."""
import inspect

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.flash_attn as fa2  # noqa: E402
import tessera.flash_attn_interface as fa3  # noqa: E402
from dropins import attend, close, distance, normal, same_gradients, shuffled, visible  # noqa: E402

B, SQ, SK, HQ, HK, D = 2, 5, 7, 4, 2, 16
BAND = [dict(), dict(causal=True), dict(window_size=(2, 1)), dict(causal=True, window_size=(2, 5)),
        dict(window_size=(-1, 0)), dict(window_size=(1, -1)), dict(softcap=3.0), dict(softcap=-1.0),
        dict(softmax_scale=0.3)]
LENS_Q, LENS_K = [3, 0, 5, 1], [4, 2, 5, 6]


def cumulative(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def expected(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, softmax_scale=None,
             alibi_slopes=None, extra=None):
    """(o, lse) of one sequence in flash_attn's words."""
    sq, sk = len(q), len(k)
    seen = visible(sq, sk, causal, *window_size)
    bias = None if alibi_slopes is None else \
        -alibi_slopes.double()[:, None, None] * distance(sq, sk, sk - sq).abs()
    return attend(q, k, v, seen if extra is None else seen & extra, softmax_scale, softcap, bias)


def batch(q, k, v, **keywords):
    results = [expected(*one, **keywords) for one in zip(q, k, v)]
    return tuple(torch.stack(x) for x in zip(*results))


def qkv(sq=SQ, sk=SK, b=B, dv=D, grad=False):
    return (normal(b, sq, HQ, D, grad=grad), normal(b, sk, HK, D, grad=grad, seed=1),
            normal(b, sk, HK, dv, grad=grad, seed=2))


@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
@pytest.mark.parametrize("keywords", BAND, ids=str)
def test_dense(module, keywords):
    inputs = qkv(grad=True)
    o, lse = batch(*inputs, **keywords)
    close(module.flash_attn_func(*inputs, **keywords), o)
    same_gradients(module.flash_attn_func(*inputs, deterministic=True, **keywords), o, inputs)
    out, rows, *rest = module.flash_attn_func(*inputs, return_attn_probs=True, **keywords)
    close(out, o)
    close(rows, lse)
    assert rest == ([None] if module is fa2 else [])


def test_alibi_is_from_the_bottom_right():
    inputs, slopes = qkv(), torch.tensor([0.5, 0.25, 0.1, 1.0])
    for causal in (False, True):
        close(fa2.flash_attn_func(*inputs, causal=causal, alibi_slopes=slopes),
              batch(*inputs, causal=causal, alibi_slopes=slopes)[0])
    o = fa2.flash_attn_func(*inputs, alibi_slopes=torch.stack([slopes, 2 * slopes]))
    close(o[1], expected(*(x[1] for x in inputs), alibi_slopes=2 * slopes)[0])


def test_packed_forms_are_the_plain_ones():
    qkv_ = normal(B, SQ, 3, HQ, D, grad=True)
    kv = normal(B, SK, 2, HK, D, grad=True)
    q = normal(B, SQ, HQ, D, grad=True)
    for module in (fa2, fa3):
        plain = fa2.flash_attn_func(*qkv_.unbind(2), causal=True)
        close(module.flash_attn_qkvpacked_func(qkv_, causal=True), plain)
        same_gradients(module.flash_attn_qkvpacked_func(qkv_, causal=True), plain, (qkv_,))
    close(fa2.flash_attn_kvpacked_func(q, kv, causal=True),
          fa2.flash_attn_func(q, *kv.unbind(2), causal=True))
    same_gradients(fa2.flash_attn_kvpacked_func(q, kv, window_size=(1, 1)),
                   fa2.flash_attn_func(q, *kv.unbind(2), window_size=(1, 1)), (q, kv))
    fused = torch.cat([q, normal(B, SQ, 2 * HK, D)], 2)
    split = fused.split([HQ, HK, HK], 2)
    close(fa3.flash_attn_qkvpacked_func(fused, num_heads_q=HQ), fa3.flash_attn_func(*split))
    with pytest.raises(ValueError, match="num_heads_q=None"):
        fa3.flash_attn_qkvpacked_func(fused)


def packed(lengths_q=LENS_Q, lengths_k=LENS_K):
    q, k, v = (normal(sum(n), h, D, grad=True, seed=i)
               for i, (n, h) in enumerate(((lengths_q, HQ), (lengths_k, HK), (lengths_k, HK))))
    return q, k, v, cumulative(lengths_q), cumulative(lengths_k)


def by_sequence(q, k, v, cu_q, cu_k, **keywords):
    parts = [expected(q[a:b], k[c:d], v[c:d], **keywords)
             for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:])]
    return torch.cat([o for o, _ in parts]), torch.cat([rows for _, rows in parts], 1)


@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
@pytest.mark.parametrize("keywords", BAND, ids=str)
def test_varlen(module, keywords):
    q, k, v, cu_q, cu_k = packed()
    arguments = q, k, v, cu_q, cu_k, max(LENS_Q), torch.tensor(max(LENS_K))
    o, lse = by_sequence(q, k, v, cu_q, cu_k, **keywords)
    close(module.flash_attn_varlen_func(*arguments, **keywords), o)
    same_gradients(module.flash_attn_varlen_func(*arguments, **keywords), o, (q, k, v))
    close(module.flash_attn_varlen_func(*arguments, return_attn_probs=True, **keywords)[1], lse)


def test_varlen_packed_forms():
    q, _, _, cu_q, cu_k = packed()
    qkv_ = normal(sum(LENS_Q), 3, HQ, D)
    kv = normal(sum(LENS_K), 2, HK, D)
    longest = max(LENS_Q), max(LENS_K)
    close(fa2.flash_attn_varlen_qkvpacked_func(qkv_, cu_q, longest[0], causal=True),
          fa2.flash_attn_varlen_func(*qkv_.unbind(1), cu_q, cu_q, longest[0], longest[0], causal=True))
    close(fa2.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, *longest, softcap=2.0),
          fa2.flash_attn_varlen_func(q, *kv.unbind(1), cu_q, cu_k, *longest, softcap=2.0))


def test_varlen_with_a_block_table():
    q, k, v, cu_q, cu_k = packed()
    pools, table = paged(k, v, LENS_K, page_size=3)
    close(fa2.flash_attn_varlen_func(q, *pools, cu_q, cu_k, 5, 6, causal=True, block_table=table),
          by_sequence(q, k, v, cu_q, cu_k, causal=True)[0])


def paged(k, v, lengths, page_size):
    """Pools of k and v [t, hk, d], shuffled pages, NaN where nothing is, and their table."""
    most = -(-max(lengths) // page_size)
    table = shuffled(most * len(lengths), 0).reshape(len(lengths), most)
    pools = [torch.full((most * len(lengths) + 1, page_size, *x.shape[1:]), torch.nan) for x in (k, v)]
    starts = cumulative(lengths)
    for n, (start, length) in enumerate(zip(starts, lengths)):
        for j in range(length):
            for pool, x in zip(pools, (k, v)):
                pool[table[n, j // page_size], j % page_size] = x[start + j].detach()
    return pools, table


def test_used_lengths_of_version_3():
    q, k, v, cu_q, cu_k = packed([4, 6], [5, 7])
    used_q, used_k = torch.tensor([3, 6], dtype=torch.int32), torch.tensor([5, 2], dtype=torch.int32)
    o = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 7, seqused_q=used_q, seqused_k=used_k,
                                   causal=True)
    for n in range(2):
        a, c = cu_q[n], cu_k[n]
        close(o[a:a + used_q[n]],
              expected(q[a:a + used_q[n]], k[c:c + used_k[n]], v[c:c + used_k[n]], causal=True)[0])
    assert not o[3].any()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_attention_chunk(chunk):
    def own(sq, sk):
        rows = (torch.arange(sq) + sk - sq).div(chunk, rounding_mode="floor")[:, None]
        return rows == torch.arange(sk).div(chunk, rounding_mode="floor")
    inputs = qkv()
    o, _ = batch(*inputs, causal=True, extra=own(SQ, SK))
    close(fa3.flash_attn_func(*inputs, causal=True, attention_chunk=chunk), o)
    q, k, v, cu_q, cu_k = packed()
    o = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, causal=True, attention_chunk=chunk)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        close(o[a:b], expected(q[a:b], k[c:d], v[c:d], causal=True, extra=own(b - a, d - c))[0])


# ---- the cache ----

def rotated(x, cos, sin, positions, interleaved):
    """x [n, h, d] turned, pair by pair."""
    x, r = x.double().clone(), 2 * cos.shape[1]
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + r // 2) for i in range(r // 2)]
    out = x.clone()
    for n, position in enumerate(positions):
        for i, (a, b) in enumerate(pairs):
            c, s = cos[position, i].double(), sin[position, i].double()
            out[n, :, a] = x[n, :, a] * c - x[n, :, b] * s
            out[n, :, b] = x[n, :, a] * s + x[n, :, b] * c
    return out.float()


def tables(rotary_dim, positions=32):
    angles = torch.arange(positions)[:, None] / 10 ** (torch.arange(rotary_dim // 2) / 4)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
@pytest.mark.parametrize("rotary_dim, interleaved", [(0, True), (D, True), (8, True), (8, False)])
@pytest.mark.parametrize("where", ["rows", "indexed", "pages"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_step_of_generation(module, rotary_dim, interleaved, where, causal):
    lengths, new, room = [3, 0, 6], 2, 9
    q, k, v = (normal(3, new, h, D, seed=i) for i, h in enumerate((HQ, HK, HK)))
    history = [[normal(n, HK, D, seed=20 + i) for n in lengths] for i in range(2)]
    keywords = dict(causal=causal, cache_seqlens=torch.tensor(lengths, dtype=torch.int32))
    cos, sin = tables(rotary_dim) if rotary_dim else (None, None)
    if rotary_dim:
        keywords.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    if where == "pages":
        caches, table = paged_history(history, lengths, room)
        keywords["block_table" if module is fa2 else "page_table"] = table
        read = [lambda n, c=c: c[table[n].long()].flatten(0, 1) for c in caches]
    else:
        rows = torch.tensor([0, 1, 2] if where == "rows" else [4, 0, 2], dtype=torch.int32)
        caches = [torch.full((5, room, HK, D), torch.nan) for _ in range(2)]
        for cache, past in zip(caches, history):
            for n, x in enumerate(past):
                cache[rows[n], :len(x)] = x
        if where == "indexed":
            keywords["cache_batch_idx"] = rows
        read = [lambda n, c=c: c[rows[n]] for c in caches]
    out, lse = module.flash_attn_with_kvcache(q, *caches, k, v, return_softmax_lse=True, **keywords)
    for n, length in enumerate(lengths):
        places = range(length, length + new)
        mine = rotated(k[n], cos, sin, places, interleaved) if rotary_dim else k[n]
        keys, values = torch.cat([history[0][n], mine]), torch.cat([history[1][n], v[n]])
        queries = rotated(q[n], cos, sin, places if causal else [length] * new, interleaved) \
            if rotary_dim else q[n]
        o, rows_ = expected(queries, keys, values, causal=causal)
        close(out[n], o)
        close(lse[n], rows_)
        close(read[0](n)[:length + new], keys)      # written in place
        close(read[1](n)[:length + new], values)
        assert read[0](n)[length + new:].isnan().all()


def paged_history(history, lengths, room, page_size=4):
    pages = -(-room // page_size)
    table = shuffled(pages * len(lengths), 1).reshape(len(lengths), pages)
    pools = [torch.full((pages * len(lengths), page_size, HK, D), torch.nan) for _ in range(2)]
    for pool, past in zip(pools, history):
        for n, x in enumerate(past):
            for j, row in enumerate(x):
                pool[table[n, j // page_size], j % page_size] = row
    return pools, table


def test_reading_a_cache():
    q, k, v = qkv(sk=9)
    close(fa2.flash_attn_with_kvcache(q, k, v), batch(q, k, v)[0])
    close(fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=6, causal=True, num_splits=4),
          batch(q, k[:, :6], v[:, :6], causal=True)[0])
    slopes = torch.tensor([0.5, 0.25, 0.1, 1.0])
    close(fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=6, alibi_slopes=slopes, softcap=2.0),
          batch(q, k[:, :6], v[:, :6], alibi_slopes=slopes, softcap=2.0)[0])


@pytest.mark.parametrize("window", [(-1, -1), (2, 0)])
def test_leftpad(window):
    q, k, v = qkv(sq=2, sk=9)
    left = torch.tensor([0, 3], dtype=torch.int32)
    k = torch.where(torch.arange(9)[None, :, None, None] < left[:, None, None, None], torch.nan, k)
    o = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=7, cache_leftpad=left, causal=True,
                                    window_size=window)
    for n, start in enumerate(left):
        close(o[n], expected(q[n], k[n, start:7], v[n, start:7], causal=True, window_size=window)[0])
    cos, sin = tables(D)
    new = normal(2, 2, HK, D, seed=30)
    o = fa2.flash_attn_with_kvcache(q, k, v, new, new, cos, sin, cache_seqlens=5, cache_leftpad=left,
                                    causal=True)
    for n, start in enumerate(left):
        places = range(5 - start, 7 - start)
        keys = torch.cat([k[n, start:5], rotated(new[n], cos, sin, places, True)])
        values = torch.cat([v[n, start:5], new[n]])
        close(o[n], expected(rotated(q[n], cos, sin, places, True), keys, values, causal=True)[0])


def test_packed_queries_and_keys_of_version_3():
    lengths, tokens = [3, 0, 6], [2, 1, 3]
    cu = cumulative(tokens)
    q, k, v = (normal(sum(tokens), h, D, seed=i) for i, h in enumerate((HQ, HK, HK)))
    caches = [normal(3, 12, HK, D, seed=40 + i) for i in range(2)]
    before = [x.clone() for x in caches]
    cos, sin = tables(8)
    first = torch.tensor([10, 11, 12], dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), causal=True,
        cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=3, rotary_cos=cos, rotary_sin=sin,
        rotary_seqlens=first, attention_chunk=4)
    for n, (length, count) in enumerate(zip(lengths, tokens)):
        mine = slice(cu[n], cu[n + 1])
        places = range(first[n], first[n] + count)
        keys = torch.cat([before[0][n, :length], rotated(k[mine], cos, sin, places, True)])
        values = torch.cat([before[1][n, :length], v[mine]])
        own = (torch.arange(length, length + count)[:, None] // 4) == torch.arange(length + count) // 4
        close(out[mine], expected(rotated(q[mine], cos, sin, places, True), keys, values, causal=True,
                                  extra=own)[0])
        close(caches[0][n, :length + count], keys)


@pytest.mark.parametrize("new", [torch.bfloat16, torch.float8_e4m3fn])
def test_an_fp8_cache_of_version_3(new):
    """16-bit keys are divided by the scale as they go in; fp8 ones are as the caller has made them."""
    q, k, v = (normal(2, 3, h, D, seed=i) for i, h in enumerate((HQ, HK, HK)))
    caches = [torch.zeros(2, 10, HK, D).to(torch.float8_e4m3fn) for _ in range(2)]
    scale = torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    out = fa3.flash_attn_with_kvcache(q.bfloat16(), *caches, k.to(new), v.to(new), causal=True, k_descale=scale,
                                      v_descale=scale, cache_seqlens=torch.tensor([0, 4], dtype=torch.int32))
    by = scale[:, None, :, None]
    for cache, x in zip(caches, (k, v)):
        x = x.to(new) if new != torch.bfloat16 else (x.bfloat16().float() / by).to(torch.float8_e4m3fn)
        for n, first in enumerate((0, 4)):
            assert torch.equal(cache[n, first:first + 3].float(), x[n].float())
    keys, values = ((cache.float() * by) for cache in caches)
    for n, end in enumerate((3, 7)):
        torch.testing.assert_close(out[n].double(), expected(q[n], keys[n, :end], values[n, :end], causal=True)[0],
                                   rtol=5e-2, atol=5e-2)


def test_a_cache_of_both_in_one_buffer():
    q, k, v = (normal(2, 2, h, D, seed=i) for i, h in enumerate((HQ, HK, HK)))
    kv = torch.zeros(2, 5, 2, HK, D)
    fa2.flash_attn_with_kvcache(q, kv[:, :, 0], kv[:, :, 1], k, v, cache_seqlens=3)
    assert torch.equal(kv[:, 3:, 0], k) and torch.equal(kv[:, 3:, 1], v) and not kv[:, :3].any()


def require_read_lengths():
    """Lengths on a GPU are read by kernels alone."""
    if torch.get_default_device().type == "cuda":
        pytest.skip("lengths on a GPU are not read by the host")


def test_nothing_is_written_where_there_is_no_room():
    require_read_lengths()
    q, k, v = qkv(sq=2, sk=4)
    new, kept = normal(2, 2, HK, D), k.clone()
    with pytest.raises(ValueError, match="cache_seqlens: .*position 4 .* room for 4"):
        fa2.flash_attn_with_kvcache(q, k, v, new, new,
                                    cache_seqlens=torch.tensor([0, 3], dtype=torch.int32))
    assert torch.equal(k, kept)


@pytest.mark.parametrize("module, word", [(fa2, "block_table"), (fa3, "page_table")])
@pytest.mark.parametrize("lengths", [13, -1, torch.tensor([13, 2], dtype=torch.int32), torch.tensor([2, -1])])
@pytest.mark.parametrize("paged", [True, False])
def test_lengths_beyond_a_cache_are_named(module, word, lengths, paged):
    """A RuntimeError, as the original's, that says which argument is too short."""
    if isinstance(lengths, torch.Tensor):
        require_read_lengths()
    table = {word: torch.arange(6, dtype=torch.int32).view(2, 3)} if paged else {}
    pool = normal(6, 4 if paged else 12, HK, D)
    q = normal(2, 1, HQ, D)
    with pytest.raises(RuntimeError, match=rf"cache_seqlens=(13|-1): .* 12, .*{word if paged else 'k_cache'}"):
        module.flash_attn_with_kvcache(q, pool, pool, cache_seqlens=lengths, **table)
    module.flash_attn_with_kvcache(q, pool, pool, cache_seqlens=12, **table)


def test_rows_of_a_page_table_by_index():
    """Version 3 reads page_table[cache_batch_idx], and writes new keys there."""
    table = torch.tensor([[0, 1], [2, 3], [5, 4]], dtype=torch.int32)
    rows, lengths = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([6, 3], dtype=torch.int32)
    q, new = normal(2, 1, HQ, D), normal(2, 1, HK, D, seed=7)
    pools = [[normal(6, 4, HK, D, seed=i) for i in (1, 2)] for _ in range(2)]
    o, expected = (fa3.flash_attn_with_kvcache(q, *mine, new, new, cache_seqlens=lengths, causal=True, **where)
                   for mine, where in zip(pools, (dict(page_table=table, cache_batch_idx=rows),
                                                  dict(page_table=table[rows.long()]))))
    assert torch.equal(o, expected)
    assert all(torch.equal(a, b) for a, b in zip(*pools))


@pytest.mark.parametrize("module", [fa2, fa3])
def test_rotary_tables_need_new_keys(module):
    """The original refuses them; turning q alone is a result that no caller of it has seen."""
    q, k, v = qkv(sk=9)
    cos, sin = tables(D)
    with pytest.raises(RuntimeError, match="rotary_cos: .*give k and v"):
        module.flash_attn_with_kvcache(q, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=6)


def test_a_cache_has_no_gradient():
    q, k, v = qkv(grad=True)
    assert not fa2.flash_attn_with_kvcache(q, k.detach(), v.detach()).requires_grad


@pytest.mark.parametrize("call, error, message", [
    (lambda q, k, v: fa3.flash_attn_func(q, k, v, qv=v), ValueError, r"qv.shape=\[2, 7, 2, 16\].*\[2, 5, 4, 16\]"),
    (lambda q, k, v: fa3.flash_attn_func(q, k, v, qv=q, k_descale=torch.ones(2, 2)), tessera.Refused, "qv: .*fp8"),
    (lambda q, k, v: fa3.flash_attn_func(q, k, v, k_descale=torch.ones(2, 2)), ValueError, "k_scale"),
    (lambda q, k, v: fa2.flash_attn_with_kvcache(q, k, v, k), ValueError, "give both"),
    (lambda q, k, v: fa2.flash_attn_with_kvcache(q, k, v, k, v), ValueError, "cache_seqlens"),
    (lambda q, k, v: fa2.flash_attn_with_kvcache(q, k, v, block_table=torch.zeros(2, 1).int(),
                                                 cache_batch_idx=torch.zeros(2).int()), ValueError,
     "cache_batch_idx"),
    (lambda q, k, v: fa2.flash_attn_with_kvcache(q, k[:1], v[:1]), ValueError, "k_cache.shape"),
    (lambda q, k, v: fa2.flash_attn_func(q, k[..., :3], v), ValueError, "k.shape"),
])
def test_what_is_illegal_or_refused_has_a_name(call, error, message):
    with pytest.raises(error, match=message):
        call(*qkv())


SIGNATURES = {
    (fa2, "flash_attn_func"): "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False",  # noqa: E501
    (fa2, "flash_attn_varlen_func"): "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None",  # noqa: E501
    (fa2, "flash_attn_with_kvcache"): "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",  # noqa: E501
    (fa3, "flash_attn_func"): "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",  # noqa: E501
    (fa3, "flash_attn_varlen_func"): "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",  # noqa: E501
}


@pytest.mark.parametrize("place", SIGNATURES, ids=lambda place: f"{place[0].__name__}.{place[1]}")
def test_signatures(place):
    assert str(inspect.signature(getattr(*place))) == f"({SIGNATURES[place]})"


def test_descales_multiply_fp8_keys_and_values():
    q, k, v = qkv()
    scale = torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    k8, v8 = (x.to(torch.float8_e4m3fn) for x in (k, v))
    try:
        o = fa3.flash_attn_func(q.bfloat16(), k8, v8, k_descale=scale, v_descale=scale)
    except tessera.Refused as refused:
        assert "e4m3" in str(refused) or "fp8" in str(refused)
        return
    wide = [x.float() * scale[:, None, :, None] for x in (k8, v8)]
    close(o, batch(q.bfloat16().float(), *wide)[0], 2e-2)
