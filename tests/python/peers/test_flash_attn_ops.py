# SPDX-License-Identifier: Apache-2.0
"""torch.ops.flash_attn_3, which register_ops() registers, beside the interface above it: eager, compiled, faked."""
import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.flash_attn_interface as fa3  # noqa: E402
from dropins import close, normal  # noqa: E402

B, S, H, D = 2, 6, 4, 16
CU = torch.tensor([0, 4, 2 * S], dtype=torch.int32)
# What callers of the extension hold its schemas against (xformers' flash3, for one).
FWD = ("flash_attn_3::fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
       "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
       "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, "
       "int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
       "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
       "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, "
       "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0., "
       "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, "
       "int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)")
BWD = ("flash_attn_3::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
       "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, "
       "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, "
       "int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
       "int window_size_right=-1, float softcap=0., bool deterministic=False, int sm_margin=0) "
       "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)")
FIVE = " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"


@pytest.fixture
def ops():
    handle = fa3.register_ops()
    yield torch.ops.flash_attn_3
    handle.remove()


def tensors(packed=False):
    found = [normal(B, S, h, D, seed=i) for i, h in enumerate((H, 2, 2))]
    return [x.flatten(0, 1) if packed else x for x in found]


def test_they_come_by_a_call_alone_and_go():
    absent = [name for name in ("fwd", "bwd", "fwd_combine", "get_scheduler_metadata")
              if not hasattr(torch.ops.flash_attn_3, name)]
    assert len(absent) == 4
    handle = fa3.register_ops()
    assert all(hasattr(torch.ops.flash_attn_3, name) for name in absent)
    with pytest.raises(tessera.Refused, match="flash_attn_3.fwd: is registered already") as caught:
        fa3.register_ops()
    assert "\n" not in str(caught.value)
    handle.remove()
    handle.remove()
    assert not any(hasattr(torch.ops.flash_attn_3, name) for name in absent)


def test_another_extension_keeps_its_own():
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define("bwd(Tensor x) -> Tensor")
    try:
        with pytest.raises(tessera.Refused, match="flash_attn_3.bwd: is registered already, by FlashAttention-3's"):
            fa3.register_ops()
        assert not hasattr(torch.ops.flash_attn_3, "fwd")
    finally:
        library._destroy()


def test_schemas(ops):
    for operator, expected in ((ops.fwd, FWD), (ops.bwd, BWD)):
        assert operator.default._schema.is_backward_compatible_with(torch._C.parse_schema(expected))
        assert str(operator.default._schema) == str(torch._C.parse_schema(expected))


@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_both_passes(ops, packed, given):
    q, k, v = tensors(packed)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    words = dict(softmax_scale=0.2, causal=True, window_size=(3, 0), softcap=5.0, return_attn_probs=True)
    if packed:
        want, want_lse = fa3.flash_attn_varlen_func(*leaves, CU, CU, 8, 8, **words)
        place = dict(cu_seqlens_q=CU, cu_seqlens_k=CU, max_seqlen_q=8, max_seqlen_k=8)
    else:
        want, want_lse = fa3.flash_attn_func(*leaves, **words)
        place = {}
    same = dict(softmax_scale=0.2, is_causal=True, window_size_left=3, window_size_right=0, softcap=5.0, **place)
    out = torch.full_like(q, torch.nan) if given else None
    o, lse, *rest = ops.fwd(q, k, v, out=out, **same, num_splits=2)
    assert (o is out) == given and [x.numel() for x in rest] == [0, 0]
    assert torch.equal(o, want) and torch.equal(lse, want_lse)
    do = normal(*o.shape, seed=9)
    written = [torch.full_like(x, torch.nan) for x in (q, k, v)] if given else [None] * 3
    *found, delta, a, b, c, d = ops.bwd(do, q, k, v, o, lse, *written, **same)
    assert not given or all(x is y for x, y in zip(found, written))
    for x, y in zip(found, torch.autograd.grad((want * do).sum(), leaves)):
        close(x, y)
    close(delta, (do * o).sum(-1).transpose(-1, -2))
    assert [x.numel() for x in (a, b, c, d)] == [0, 0, 0, 0]


def decode(q, new, k_cache, v_cache, lengths, out):
    o, lse, _, _ = torch.ops.flash_attn_3.fwd(q, k_cache, v_cache, new, new, None, out, seqused_k=lengths,
                                              is_causal=True)
    return o * 2, lse


def test_a_cache_compiles(ops):
    """One graph, which writes the cache and out as the call does."""
    q, new, _ = (x[:, :2] for x in tensors())
    cache, lengths = [normal(B, 8, 2, D, seed=i) for i in (5, 6)], torch.tensor([3, 0], dtype=torch.int32)
    results, written = [], []
    for function in (decode, torch.compile(decode, fullgraph=True, backend="aot_eager")):
        mine = [*(x.clone() for x in cache), lengths, torch.full_like(q, torch.nan)]
        results.append(function(q, new, *mine))
        written.append([mine[0], mine[1], mine[3]])
    for kept in (results, written):
        assert all(map(torch.equal, *kept))
    assert torch.equal(written[0][0][0, 3:5], new[0]) and not written[0][2].isnan().any()
    want = fa3.flash_attn_with_kvcache(q, *(x.clone() for x in cache), new, new, cache_seqlens=lengths, causal=True)
    assert torch.equal(results[0][0], want * 2)


def test_gradients_compile(ops):
    def function(do, q, k, v, dq):
        o, lse, _, _ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=True)
        return torch.ops.flash_attn_3.bwd(do, q, k, v, o, lse, dq, is_causal=True)[1:3]
    q, k, v = tensors()
    do, both = normal(B, S, H, D, seed=9), [torch.empty_like(q) for _ in range(2)]
    plain = function(do, q, k, v, both[0])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(do, q, k, v, both[1])
    assert torch.equal(*both) and all(map(torch.equal, plain, compiled))


def test_fakes(ops):
    with torch._subclasses.FakeTensorMode():
        q, k = torch.empty(B, S, H, D, dtype=torch.bfloat16), torch.empty(B, 9, 2, D, dtype=torch.bfloat16)
        v = torch.empty(B, 9, 2, 8, dtype=torch.bfloat16)
        o, lse, _, _ = ops.fwd(q, k, v)
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((B, S, H, 8), q.dtype, (B, H, S), torch.float32)
        dq, dk, dv, *_ = ops.bwd(o, q, k, v, o, lse)
        assert [x.shape for x in (dq, dk, dv)] == [q.shape, k.shape, v.shape]
        out, rows = ops.fwd_combine(torch.empty(3, B, S, H, D), torch.empty(3, B, S, H), out_dtype=torch.float16)
        assert (out.shape, out.dtype, rows.shape) == ((B, S, H, D), torch.float16, (B, S, H))


def test_parts_and_the_plan(ops):
    parts, rows = normal(3, B, S, H, D), normal(3, B, S, H, seed=4)
    out = torch.full((B, S, H, D), torch.nan, dtype=torch.bfloat16)
    o, lse = ops.fwd_combine(parts, rows, out, torch.bfloat16)
    want, want_lse = fa3.flash_attn_combine(parts, rows, out_dtype=torch.bfloat16)
    assert o is out and torch.equal(o, want) and torch.equal(lse, want_lse)
    used = torch.tensor([3, 5], dtype=torch.int32)
    plan = ops.get_scheduler_metadata(B, 1, 64, H, 2, D, D, torch.bfloat16, used, None, None, None, None, None, 16, 0,
                                      True, -1, -1, 0, False, 1, None, 0)
    same = fa3.get_scheduler_metadata(B, 1, 64, H, 2, D, used, page_size=16, causal=True)
    assert plan.dtype == torch.int32 and torch.equal(plan, same)
    q, k, v = tensors()
    assert torch.equal(ops.fwd(q, k, v, scheduler_metadata=plan)[0], fa3.flash_attn_func(q, k, v))
    assert torch.equal(fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, scheduler_metadata=plan),
                       fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used))


# Lengths by hand from mha_fwd_get_scheduler_metadata of FlashAttention 3 on Hopper: 2 vectors of the batch rounded up
# to 4, one more unless local, one more if causal or local, and 1.
@pytest.mark.parametrize("batch, length, words", [
    (2, 4 * 3 + 1, {}), (4, 4 * 3 + 1, {}), (5, 8 * 3 + 1, {}), (5, 8 * 4 + 1, dict(causal=True)),
    (1, 4 * 3 + 1, dict(window_size=(3, 2))), (1, 4 * 4 + 1, dict(window_size=(-1, 0))),
    (1, 4 * 4 + 1, dict(window_size=(63, 0))),  # on the left it reaches each of 64 keys
    (1, 4 * 3 + 1, dict(window_size=(63, 9))), (1, 4 * 3 + 1, dict(causal=True, attention_chunk=8)),
    (1, 4 * 3 + 1, dict(max_seqlen_q=1, causal=True)), (1, 4 * 4 + 1, dict(max_seqlen_q=1, causal=True, headdim=128,
                                                                           page_size=64)),
    (1, 4 * 3 + 1, dict(max_seqlen_q=1, causal=True, headdim=64, page_size=64))], ids=str)
def test_a_plan_is_as_long_as_theirs(batch, length, words):
    words = dict(max_seqlen_q=9, max_seqlen_k=64, num_heads_q=H, num_heads_kv=2, headdim=D) | words
    used = torch.zeros(batch, dtype=torch.int32)
    plan = fa3.get_scheduler_metadata(batch, cache_seqlens=used, cache_leftpad=used,
                                      cu_seqlens_q=torch.zeros(batch + 1, dtype=torch.int32), **words)
    assert plan.shape == (length,) and plan.dtype == torch.int32 and plan.device == used.device and not plan.any()


@pytest.mark.parametrize("words, message", [
    (dict(num_heads_kv=3), "num_heads=4, num_heads_k=3"), (dict(num_heads_kv=0), "num_heads_k=0: must be 1 or more"),
    (dict(batch_size=3), r"cache_seqlens.dtype=torch.int32, cache_seqlens.shape=\[2\].*must be .*\[3\]"),
    (dict(cache_seqlens=torch.zeros(2, dtype=torch.int64)), "cache_seqlens.dtype=torch.int64"),
    (dict(cu_seqlens_q=torch.zeros(2, dtype=torch.int32)), r"cu_seqlens_q.shape=\[2\].*must be .*\[3\]"),
    (dict(cache_leftpad=torch.zeros(2)), "cache_leftpad.dtype=torch.float32"),
    (dict(qkv_dtype=torch.int8), "qkv_dtype=torch.int8"), (dict(max_seqlen_k=-1), "max_seqlen_k=-1: must be 0 or more"),
    (dict(page_size=0), "page_size=0"), (dict(headdim_v=0), "headdim_v=0")], ids=str)
def test_a_plan_of_nonsense(words, message):
    sensible = dict(batch_size=B, max_seqlen_q=1, max_seqlen_k=64, num_heads_q=H, num_heads_kv=2, headdim=D,
                    cache_seqlens=torch.zeros(B, dtype=torch.int32))
    fa3.get_scheduler_metadata(**sensible)
    with pytest.raises(ValueError, match=f"get_scheduler_metadata: .*{message}"):
        fa3.get_scheduler_metadata(**sensible | words)


def test_five_results_of_later_versions():
    handle = fa3.register_ops(bwd_results=5)
    try:
        bwd = torch.ops.flash_attn_3.bwd
        assert str(bwd.default._schema) == str(torch._C.parse_schema(BWD.partition(" -> ")[0] + FIVE))
        q, k, v = tensors()
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        want, lse = fa3.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
        do, written = normal(*want.shape, seed=9), [torch.full_like(x, torch.nan) for x in (q, k, v)]
        delta, *rest = bwd(do, q, k, v, want.detach(), lse.detach(), *written, is_causal=True)
        assert len(rest) == 4 and not any(x.numel() for x in rest)
        close(delta, (do * want).sum(-1).transpose(-1, -2))
        for x, y in zip(written, torch.autograd.grad((want * do).sum(), leaves)):
            close(x, y)
        with pytest.raises(ValueError, match="flash_attn_3.bwd: dq, dk and dv must be given"):
            bwd(do, q, k, v, want.detach(), lse.detach(), *written[:2], is_causal=True)
    finally:
        handle.remove()
    with pytest.raises(ValueError, match="bwd_results=6: must be 8 or 5"):
        fa3.register_ops(bwd_results=6)


def test_what_is_refused_has_a_name(ops):
    q, k, v = tensors()
    with pytest.raises(tessera.Refused, match="qv: is not built for fp8"):
        ops.fwd(q, k, v, q_v=q, v_descale=torch.ones(B, 2))
    with pytest.raises(tessera.Refused, match="sm_margin=2"):
        ops.bwd(q, q, k, v, q, normal(B, H, S), sm_margin=2)
