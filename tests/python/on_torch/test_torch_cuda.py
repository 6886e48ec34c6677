# SPDX-License-Identifier: Apache-2.0
"""tessera.torch on a CUDA device: graphs, streams, no host synchronisation, what PyTorch computes."""
import argparse
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not any(x.startswith("cuda") for x in tessera.backends()),
    reason="needs a CUDA device and a build for it")


def qkv(b=2, s=192, h=4, d=64, dtype=torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(b, s, h, d, generator=g, device="cuda", dtype=dtype).requires_grad_()
            for _ in range(3)]


def warmed(function):
    """`function` has run on a side stream, as a capture wants it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)


def captured(function):
    warmed(function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph, outputs


@pytest.mark.parametrize("keywords", [dict(causal=True), dict(window=(40, 8), softcap=20.0), {}])
def test_agrees_with_pytorch(keywords):
    q, k, v = qkv()
    x = [t.detach().float().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    scores = x[0] @ x[1].mT / 8
    if "softcap" in keywords:
        scores = 20 * (scores / 20).tanh()
    i, j = torch.arange(192, device="cuda")[:, None], torch.arange(192, device="cuda")
    left, right = keywords.get("window", (1000, 0 if "causal" in keywords else 1000))
    hidden = (j < i - left) | (j > i + right)
    theirs = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ x[2]).transpose(1, 2)
    ours = tt.attention(q, k, v, **keywords)
    do = torch.randn_like(ours)
    torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=1e-2)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), do),
                    torch.autograd.grad(theirs, x, do.float())):
        torch.testing.assert_close(a.float(), b.transpose(1, 2), rtol=2e-2, atol=2e-2)


LATENT = "latent"  # a cache whose first 512 columns of 576 are v


def _decode_problem(lengths, cache, rows=1, d=128, hq=8, hk=2, page=16, pages=40):
    """A cache in pages with lengths on the device; and as k and v of each sequence, in fp32."""
    latent = cache == LATENT
    if latent:
        cache, d, hq, hk = torch.bfloat16, 576, 16, 1
    g = torch.Generator("cuda").manual_seed(1)
    b = len(lengths)
    q = torch.randn(b, rows, hq, d, generator=g, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b * pages, page, hk, d, generator=g, device="cuda").to(cache) for _ in range(2))
    v = k[..., :512] if latent else v
    table = torch.randperm(b * pages, generator=g, device="cuda").int().view(b, pages)
    keywords = dict(page_table=table, seqlens_k=torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    if cache == torch.float8_e4m3fn:
        keywords.update(k_scale=torch.full((hk,), 0.5, device="cuda"), v_scale=torch.full((hk,), 2.0, device="cuda"))

    def expected():
        scale_k, scale_v = (0.5, 2.0) if cache == torch.float8_e4m3fn else (1, 1)
        o = torch.zeros(b, rows, hq, v.shape[3], device="cuda")
        for n, length in enumerate(keywords["seqlens_k"].tolist()):
            if length == 0:
                continue
            keys, values = (x[table[n].long()].float().flatten(0, 1)[:length].repeat_interleave(hq // hk, 1) * scale
                            for x, scale in ((k, scale_k), (v, scale_v)))
            p = (torch.einsum("qhd,khd->hqk", q[n].float(), keys) / d**0.5).softmax(-1)
            o[n] = torch.einsum("hqk,khd->qhd", p, values)
        return o
    return q, k, v, keywords, expected


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, LATENT])
def test_a_graph_of_decoding_takes_other_lengths_and_gives_the_same_bits(cache, rows):
    q, k, v, keywords, expected = _decode_problem([640, 3, 0, 77, 512], cache, rows)
    graph, o = captured(lambda: tt.attention(q, k, v, **keywords))
    for lengths in ([640, 3, 0, 77, 512], [1, 640, 640, 0, 16], [0, 0, 0, 0, 0], [640] * 5, [0, 0, 640, 0, 0]):
        keywords["seqlens_k"].copy_(torch.tensor(lengths, device="cuda"))
        graph.replay()
        torch.testing.assert_close(o.float(), expected(), rtol=2e-2, atol=1e-2)
        first = o.clone()
        for _ in range(200):
            graph.replay()
        assert torch.equal(o, first)
        assert torch.equal(tt.attention(q, k, v, **keywords), first)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, LATENT])
def test_a_graph_of_packed_decoding_takes_fewer_tiles(cache):
    """What an earlier replay has left of tiles that are there no more must not reach o."""
    _, k, v, keywords, _ = _decode_problem([640, 640], cache)
    heads, d = (16, 576) if cache == LATENT else (8, 128)
    g = torch.Generator("cuda").manual_seed(3)
    q = torch.randn(24, heads, d, generator=g, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 9, 24], dtype=torch.int32, device="cuda")
    keywords.update(layout=("thd", "bshd"), cu_seqlens_q=cu, max_seqlen_q=16)
    graph, o = captured(lambda: tt.attention(q, k, v, **keywords))
    for ends in ([0, 9, 24], [0, 8, 24], [0, 0, 16], [0, 1, 2], [0, 8, 24]):
        cu.copy_(torch.tensor(ends, device="cuda"))
        for _ in range(20):
            o.fill_(torch.nan)
            graph.replay()
            first = o.clone()
            assert torch.equal(first[:ends[2]], tt.attention(q, k, v, **keywords)[:ends[2]])


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, LATENT])
def test_batch_invariant_decoding_of_one_sequence_and_of_many(cache):
    lengths = [int(x) for x in torch.randint(0, 641, (64,), generator=torch.Generator().manual_seed(2))]
    q, k, v, keywords, expected = _decode_problem(lengths, cache)
    together = tt.attention(q, k, v, batch_invariant=True, **keywords)
    torch.testing.assert_close(together.float(), expected(), rtol=2e-2, atol=1e-2)
    for n in (0, 31, 63):
        own = {name: x if "scale" in name else x[n:n + 1].contiguous() for name, x in keywords.items()}
        assert torch.equal(tt.attention(q[n:n + 1], k, v, batch_invariant=True, **own), together[n:n + 1])


def test_a_graph_replays_the_dropout_of_its_state():
    q, k, v = qkv()
    state = torch.tensor([5, 7], device="cuda")

    def step():
        o = tt.attention(q, k, v, causal=True, dropout_p=0.25, rng_state=state)
        return o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    graph, outputs = captured(step)
    graph.replay()
    first = [x.clone() for x in outputs]
    graph.replay()
    assert torch.equal(first[0], outputs[0])
    state += 1  # the graph reads the state when it runs
    graph.replay()
    assert not torch.equal(first[0], outputs[0])
    expected = step()
    assert torch.equal(outputs[0], expected[0])
    for a, b in zip(outputs[1:], expected[1:]):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_a_graph_draws_a_new_mask_each_time_and_its_backward_has_the_same():
    q, k, v = qkv(dtype=torch.float16)

    def step():
        o = tt.attention(q, k, v, dropout_p=0.5)
        return o, *torch.autograd.grad(o, (v,), torch.ones_like(o))
    graph, (o, dv) = captured(step)
    seen = []
    for _ in range(3):
        graph.replay()
        # o is linear in v, so <dv, v> = <do, o> only if both passes dropped the same entries
        lost = (dv.double() * v.double()).sum(1) - o.double().sum(1)
        assert lost.sum(-1).abs().max() < 0.05 * o.double().abs().sum((1, 3)).min()
        seen.append(o.clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_checkpointing_replays_dropout():
    q, k, v = qkv()
    grads = []
    for run in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        torch.manual_seed(3)
        o = run(lambda *x: tt.attention(*x, dropout_p=0.3, deterministic=True), q, k, v)
        grads.append((o, *torch.autograd.grad(o.float().sum(), (q, k, v))))
    for a, b in zip(*grads):
        assert torch.equal(a, b)


def test_dropout_is_the_same_on_both_devices():
    state = torch.tensor([11, 4])
    here = tt.dropout_mask(2, 3, 70, 90, 0.3, state)
    assert torch.equal(here, tt.dropout_mask(2, 3, 70, 90, 0.3, state.cuda()).cpu())


def test_the_host_never_waits():
    q, k, v = qkv()
    cu = torch.tensor([0, 100, 384], dtype=torch.int32, device="cuda")
    packed = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]

    def step():
        o = tt.attention(q, k, v, causal=True, dropout_p=0.1)
        p = tt.attention(*packed, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
        return torch.autograd.grad((o.sum() + p.sum()), (q, k, v, *packed))
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_current_stream_is_used():
    q, k, v = (x.detach() for x in qkv(s=2048))
    expected = tt.attention(q, k, v)
    stream = torch.cuda.Stream()
    late = torch.empty_like(q)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)  # attention must queue behind this
        o = tt.attention(late, k, v)
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


def test_compiles_with_graphs():
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in qkv())
    compiled = torch.compile(lambda q: tt.attention(q * 2, k, v, causal=True) + 1, fullgraph=True,
                             mode="reduce-overhead")
    for _ in range(3):
        got = compiled(q).clone()
    torch.testing.assert_close(got, tt.attention(q * 2, k, v, causal=True) + 1)


def test_sums_compile_with_graphs():
    """Tensors that are written, and the functionalized graph around them."""
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in qkv())
    o, lse = tt.attention(q, k, v, return_lse=True)

    def add(q, o, lse):
        return tt.attention(q, k, v, out=o, lse=lse, accumulate=True) * 2
    compiled = torch.compile(add, fullgraph=True, mode="reduce-overhead")
    mine, yours = ([torch.zeros_like(o), torch.full_like(lse, -torch.inf)] for _ in range(2))
    for _ in range(3):
        got, expected = compiled(q, *mine).clone(), add(q, *yours)
        torch.testing.assert_close([got, *mine], [expected, *yours])


def test_sdpa_s_gradients_of_gqa():
    q, k, v = qkv()
    k, v = (x.detach()[:, :, :2].contiguous().requires_grad_() for x in (k, v))
    ours = tt.attention(q, k, v, causal=True)
    theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)),
                                            is_causal=True, enable_gqa=True).transpose(1, 2)
    do = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), do),
                    torch.autograd.grad(theirs, (q, k, v), do)):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("given", ["causal", "attention_mask", "thd", "alibi", "dropout"])
def test_te_s_module_in_a_graph(given):
    """Captured, so nothing in it waits for the device or reads a value from it."""
    from tessera.te.pytorch import DotProductAttention
    module = DotProductAttention(4, 64, qkv_format="thd" if given == "thd" else "bshd",
                                 attention_dropout=0.2 * (given == "dropout")).cuda()
    cu = torch.tensor([0, 100, 384], dtype=torch.int32, device="cuda")
    keywords = {
        "attention_mask": dict(attn_mask_type="padding_causal", attention_mask=torch.arange(
            384, device="cuda").view(2, 1, 1, 192) % 192 > 100),
        "thd": dict(attn_mask_type="padding_causal", cu_seqlens_q=cu, cu_seqlens_kv=cu,
                    max_seqlen_q=284, max_seqlen_kv=284),
        "alibi": dict(core_attention_bias_type="alibi"),
    }.get(given, {})
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() if given == "thd" else x for x in qkv())

    def step():
        out = module(q, k, v, **keywords)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    graph, outputs = captured(step)
    graph.replay()
    if given != "dropout":
        for a, b in zip(outputs, step()):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert all(x.isfinite().all() and x.any() for x in outputs)


def test_out_and_vmap():
    q, k, v = (x.detach() for x in qkv())
    buffer = torch.zeros(*q.shape[:-1], 3, 64, device="cuda", dtype=q.dtype)
    graph, _ = captured(lambda: tt.attention(q, k, v, out=buffer[..., 1, :]))
    graph.replay()
    assert torch.equal(buffer[..., 1, :], tt.attention(q, k, v)) and not buffer[..., 0, :].any()
    sinks = torch.randn(2, 4, device="cuda")
    ours = torch.func.vmap(lambda q, sink: tt.attention(q, k, v, sink=sink))(
        torch.stack([q, k]), sinks)
    for a, b in zip(ours, (tt.attention(x, k, v, sink=s) for x, s in zip((q, k), sinks))):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", [
    "fwd e4m3 b=2 s=33 h=2 d=16 qscale=head amax", "fwd e5m2 b=1 s=65 hq=4 hk=2 d=64 causal poison",
    "bwd e4m3 b=2 s=40 h=2 d=32 o=e4m3 do=e5m2 grad=e5m2 amax poison", "fwd fp64 b=1 s=8 h=1 d=8",
    "fwd bf16 b=2 s=33 h=2 d=64 causal accumulate poison", "bwd fp16 b=2 s=65 hq=4 hk=2 d=64 causal accumulate poison",
    "fwd bf16 b=2 s=65 hq=4 hk=2 d=40 o=fp32 causal poison", "bwd bf16 b=2 s=129 d=64 grad=fp32 poison hq=4 hk=2"])
def test_runs_or_is_refused_as_through_c(case):
    from tessera.cli import check
    run = {through: check.runner(argparse.Namespace(through=through, device="cuda", backend=None, threads=None))
           for through in ("c", "torch")}
    (outcome, why, _), (through_c, because, _) = (check.judge(case, run[x]) for x in ("torch", "c"))
    assert outcome == through_c != "failed", (why, because)
    ours, theirs = (said[said.find("cuda_sm90:"):said.find("repro:")] for said in (why, because))
    assert ours == theirs  # every reason of every backend


# ---- caches ----

@pytest.mark.parametrize("page", [None, 1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("d", [128, 20])
def test_append_and_rotate_are_the_cpus(page, dtype, d):
    """What is copied is the CPU's bit for bit. What turns, a cos - b sin, is within its fp32 rounding, which a
    compiler may contract on either side, and rounds to its dtype from there."""
    fp8 = dtype == torch.float8_e4m3fn
    given, half = torch.float32 if dtype == torch.float32 else torch.bfloat16, d // 4
    scale = torch.tensor([0.5, 1.5] if fp8 else [1.0, 1.0])

    def call(device, wide, dtype, change=lambda x: x, sign=lambda x: x):
        g = torch.Generator().manual_seed(0)
        cos, sin = (f(torch.randn(128, half, generator=g)).to(device) for f in (change, sign))
        k, v, q = (change(torch.randn(4, 3, h, d, generator=g).to(given)).to(device, wide) for h in (2, 2, 8))
        pages = page and -(-100 // page)
        shape = (4, 100, 2, d) if page is None else (4 * pages + 1, page, 2, d)
        caches = [torch.zeros(shape, device=device).to(dtype) for _ in range(2)]
        lengths = torch.tensor([0, 7, 50, 97], device=device)
        more = {}
        if page is not None:
            more["page_table"] = torch.randperm(4 * pages, generator=g).view(4, pages).int().to(device)
        if dtype == torch.float8_e4m3fn:
            more["k_scale"] = more["v_scale"] = scale.to(device)
        turned = tt.append_kv(k, v, *caches, lengths, q=q, rope=(cos, sin), **more)
        return [x.cpu() for x in (turned, *caches, tt.rotate(q, cos, sin, lengths, interleaved=True))]

    exact = call("cpu", torch.float32, torch.float32)
    terms = zip(*(call("cpu", torch.float32, torch.float32, torch.abs, lambda x: sign * x.abs()) for sign in (1, -1)))
    for i, (ours, x, (plus, minus)) in enumerate(zip(call("cuda", given, dtype), exact, terms)):
        # |a cos| + |b sin|: with one of the signs, both of a pair's products have the same. Two products and a sum
        # are rounded on each side; a cache in fp8 is divided by its scale besides.
        error = torch.maximum(plus, minus).double() * (8 if fp8 else 4) * 2**-24
        if not fp8:
            error[..., 2 * half:] = 0
        if i in (1, 2):
            x, error = (t / scale[:, None].double() for t in (x, error if i == 1 or fp8 else error * 0))
        low, high = ((x.double() + sign * error).to(ours.dtype).double() for sign in (-1, 1))
        wrong = (ours.double() < low) | (ours.double() > high)
        assert not wrong.any(), (("q", "k_cache", "v_cache", "rotate")[i], ours[wrong], x[wrong])


_DROPPING = """
import torch
from tessera.torch import append_kv
k = torch.ones(2, 3, 1, 8, device="cuda")
cache, pool = torch.zeros(2, 8, 1, 8, device="cuda"), torch.zeros(4, 4, 1, 8, device="cuda")
starts = torch.tensor([1, 6], device="cuda")
append_kv(k, None, cache, None, starts)
append_kv(k, None, pool, None, starts - 1, page_table=torch.tensor([[0, 9], [1, 4]], dtype=torch.int32, device="cuda"))
append_kv(k, None, cache, None, starts - 1)
torch.cuda.synchronize()
assert cache.count_nonzero() == 8 * (4 + 3) and pool.count_nonzero() == 8 * 3
"""


def test_the_log_names_tokens_that_an_append_drops():
    run = subprocess.run([sys.executable, "-c", _DROPPING], env=dict(os.environ, TESSERA_LOG="checks"),
                         capture_output=True, text=True, check=True)
    lines = [line[line.index("append_kv: "):] for line in run.stderr.splitlines() if "append_kv: " in line]
    assert [line.split(":")[1].strip() for line in lines] == ["seqlens_k[1]=6", "page_table[1, 1]=4"]
    assert lines[0].endswith("(on the device: token 2 of sequence 1 is dropped)")
    assert lines[1].endswith("(on the device: tokens 0 to 2 of sequence 1 are dropped)")


def test_a_graph_appends_where_lengths_are_then():
    k = torch.randn(2, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.zeros(2, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")

    def step():
        tt.append_kv(k, None, cache, None, lengths)
        lengths.add_(1)

    graph, _ = captured(step)
    cache.zero_()
    lengths.copy_(torch.tensor([3, 7], dtype=torch.int32))
    graph.replay()
    graph.replay()  # sequence 1 has no place left: its token is dropped
    expected = torch.zeros_like(cache)
    expected[0, 3:5], expected[1, 7] = k[0, 0], k[1, 0]
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)


def test_te_offloads_on_a_stream_of_its_own():
    import tessera.te.pytorch as te
    layers = [te.DotProductAttention(4, 64, qkv_format="bshd") for _ in range(4)]
    x = torch.randn(4, 1024, 4, 64, device="cuda", dtype=torch.bfloat16)

    def run(context, sync):
        before = torch.cuda.memory_allocated()
        y = given = x.clone().requires_grad_()
        for layer in layers:
            with context:
                y = layer(y, y, y).unflatten(-1, (4, 64)) + y
            y = sync(y)
        held = torch.cuda.memory_allocated() - before
        return held, torch.autograd.grad(y.float().square().sum(), given)[0]
    held, expected = run(*te.get_cpu_offload_context())
    for _ in range(2):
        less, got = run(*te.get_cpu_offload_context(True, 3, 4))
        torch.testing.assert_close(got, expected)
        # Layers 0 to 2 save o and y each; all go but y of 0, which is the caller's. lse is small.
        assert less == held - 5 * x.nbytes


def test_te_graphs_keywords():
    import tessera.te.pytorch as te
    layer = te.DotProductAttention(4, 64, qkv_format="bshd")
    x = [t.detach().requires_grad_() for t in qkv()]
    # Leaves of its own: a graph that lives would keep their AccumulateGrad on the legacy stream.
    own = [t.detach().requires_grad_() for t in x]
    expected = layer(*own, attn_mask_type="no_mask")
    gradients = torch.autograd.grad(expected.float().sum(), own)
    graphed = te.make_graphed_callables(layer, tuple(x), sample_kwargs={"attn_mask_type": "no_mask"})
    out = graphed(*x, attn_mask_type="no_mask")
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(torch.autograd.grad(out.float().sum(), x), gradients):
        torch.testing.assert_close(ours, theirs)


# ---- very low scores (docs/semantics.md) ----

LOWEST = -2.0**24
ON_DEVICE = [name for name in tessera.backends() if name.startswith("cuda")]
LOW = [(torch.float32, torch.float32, None), (torch.bfloat16, torch.bfloat16, None),
       (torch.float16, torch.float16, None), (torch.float16, torch.float32, -1e9),
       (torch.bfloat16, torch.float32, -1e10), (torch.float32, torch.float32, -1e9),
       (torch.bfloat16, torch.bfloat16, -1e4)]


def low_bias(shape, hidden, dtype, value, device="cuda"):
    """Random, and `value` where hidden, or the dtype's minimum."""
    bias = torch.randn(shape, device=device).to(dtype)
    return bias.masked_fill(hidden, torch.finfo(dtype).min if value is None else value)


def with_low_scores(q, k, v, bias, sink=None, pre_scale=False):
    """(o, lse) in fp64, where a score at or below -2^24 is -inf and a row of nothing else is 0."""
    scores, scale = q.transpose(1, 2) @ k.permute(0, 2, 3, 1), q.shape[-1] ** -0.5
    x = (scores + bias) * scale if pre_scale else scores * scale + bias
    x = x.masked_fill(x <= LOWEST, -torch.inf)
    all_x = x if sink is None else torch.cat(
        [x, sink[:, None, None].expand(x.shape[0], -1, x.shape[2], 1)], -1)
    p = all_x.softmax(-1).nan_to_num(0)[..., :x.shape[-1]]
    return (p @ v.transpose(1, 2)).transpose(1, 2), all_x.detach().logsumexp(-1)


def check_low_scores(backend, dtype, s, d, bias, *, b=2, h=3, s_q=None, sink=None, device="cuda",
                     **keywords):
    """o, lse and every gradient are those of with_low_scores, and without NaN."""
    g = torch.Generator(device).manual_seed(1)
    given = [torch.randn(b, n, h, d, generator=g, device=device).to(dtype)
             for n in (s_q or s, s, s)] + [bias] + ([] if sink is None else [sink])
    leaves = [x.detach().clone().requires_grad_() for x in given]
    exact = [x.detach().double().requires_grad_() for x in given]
    pre_scale = keywords.get("bias_at") == "pre_scale"
    o, lse = tt.attention(*leaves[:3], bias=leaves[3], return_lse=True, backend=backend,
                          **({} if sink is None else {"sink": leaves[4]}), **keywords)
    theirs, their_lse = with_low_scores(*exact[:4], exact[4] if sink is not None else None,
                                        pre_scale)
    near = dict(rtol=1e-3, atol=1e-4) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(o.double(), theirs, **near)
    torch.testing.assert_close(lse.double(), their_lse, rtol=1e-4, atol=2e-2)
    do = torch.randn(o.shape, generator=g, device=device).to(dtype)
    for x, ours, right in zip(("dq", "dk", "dv", "dbias", "dsink"),
                              torch.autograd.grad(o, leaves, do),
                              torch.autograd.grad(theirs, exact, do.double())):
        far = dict(near, atol=3 * near["atol"] * max(1.0, float(right.abs().max())))
        torch.testing.assert_close(ours.double(), right, **far, msg=lambda m: f"{x}: {m}")


def skip_unless(backend, dtype):
    if backend == "cuda_sm90" and dtype == torch.float32:
        pytest.skip("cuda_sm90 has 16-bit elements")


@pytest.mark.parametrize("backend", ON_DEVICE)
@pytest.mark.parametrize("dtype,bias_dtype,value", LOW)
@pytest.mark.parametrize("d", [8, 64, 128, 256])
@pytest.mark.parametrize("bias_at", ["post_scale", "pre_scale"])
def test_a_bias_that_hides_whole_rows(backend, dtype, bias_dtype, value, d, bias_at):
    skip_unless(backend, dtype)
    hidden = torch.zeros(1, 1, 320, 1, dtype=torch.bool, device="cuda")
    hidden[:, :, 3::7] = hidden[:, :, 128:200] = True  # rows in tiles, and a tile of them
    bias = low_bias((1, 3, 320, 320), hidden, bias_dtype, value)
    check_low_scores(backend, dtype, 320, d, bias, bias_at=bias_at)


@pytest.mark.parametrize("backend", ON_DEVICE)
@pytest.mark.parametrize("dtype,bias_dtype,value", LOW)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("shape", [(1, 1, 1, 320), (2, 1, 1, 320), (1, 3, 320, 320)])
def test_a_bias_that_hides_the_last_keys(backend, dtype, bias_dtype, value, d, shape):
    skip_unless(backend, dtype)
    hidden = torch.arange(320, device="cuda") >= 320 - 129  # whole blocks of 64 and of 128, and one
    check_low_scores(backend, dtype, 320, d, low_bias(shape, hidden, bias_dtype, value))


@pytest.mark.parametrize("backend", ON_DEVICE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("s_q", [1, 5, 512])
def test_a_bias_that_hides_all_keys_of_a_split(backend, dtype, s_q):
    skip_unless(backend, dtype)
    hidden = torch.arange(512, device="cuda") >= 200
    check_low_scores(backend, dtype, 512, 64, b=1, h=12, s_q=s_q,
                     bias=low_bias((1, 1, s_q, 512), hidden, torch.float32, None))


@pytest.mark.parametrize("backend", ON_DEVICE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [[3e38, 1, -3e38], [3.4e38, -2e9, -1e4]])
def test_sinks_of_any_size_beside_hidden_rows(backend, dtype, sinks):
    skip_unless(backend, dtype)
    hidden = torch.zeros(1, 1, 320, 1, dtype=torch.bool, device="cuda")
    hidden[:, :, 3::7] = hidden[:, :, 128:200] = True
    bias = low_bias((1, 3, 320, 320), hidden, dtype, None)
    check_low_scores(backend, dtype, 320, 64, bias, sink=torch.tensor(sinks, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [64, 128])
def test_sdpa_takes_a_causal_mask_of_floats(dtype, d):
    q, k, v = (x.transpose(1, 2) for x in qkv(b=1, s=512, d=d, dtype=dtype))
    mask = torch.full((512, 512), torch.finfo(dtype).min, dtype=dtype, device="cuda").triu(1)
    ours = tt.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    do = torch.randn_like(ours)
    near = dict(rtol=1e-3, atol=1e-3) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(ours, theirs, **near)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), do),
                    torch.autograd.grad(theirs, (q, k, v), do)):
        torch.testing.assert_close(a, b, **near)


@pytest.mark.parametrize("count", [32, 40, 320])
def test_merge_of_many_parts_rounds_once(count):
    g = torch.Generator("cuda").manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
    parts = [(draw(1, 50, 2, 64).bfloat16(), draw(1, 2, 50)) for _ in range(count)]
    weights = torch.stack([lse for _, lse in parts]).double().softmax(0).transpose(2, 3)[..., None]
    exact = (weights * torch.stack([o for o, _ in parts]).double()).sum(0)
    error = lambda o: (o.double() - exact).abs().mean()  # noqa: E731
    assert error(tt.merge(parts)[0]) <= 1.02 * error(exact.bfloat16())


SECOND_DEVICE = """
import torch, tessera, tessera.torch as tt
x = lambda *shape: torch.randn(*shape, device="cuda:1")
q = x(2, 8, 2, 64)
o, lse = tt.attention(q, q, q, causal=True, return_lse=True)
tt.merge([(o, lse), (o, lse)])
tt.append_kv(x(2, 1, 2, 64), x(2, 1, 2, 64), x(2, 16, 2, 64), x(2, 16, 2, 64),
             torch.zeros(2, dtype=torch.int32, device="cuda:1"))
tt.dropout_mask(2, 2, 8, 8, 0.5, torch.tensor([1, 2], device="cuda:1"))
torch.cuda.synchronize(1)
assert torch.cuda.current_device() == 0
assert not torch._C._cuda_hasPrimaryContext(0), "a context on a device that nobody asked for"
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_calls_on_the_second_device_leave_the_first_alone():
    subprocess.run([sys.executable, "-c", SECOND_DEVICE], check=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sums_dtype", [torch.float32, None])
@pytest.mark.parametrize("sq,d", [(1, 64), (130, 64), (130, 40), (33, 160)])
def test_sums_in_place(dtype, sums_dtype, sq, d):
    """Parts of the keys added up where they are, in fp32 and in the inputs' dtype, are the whole."""
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (torch.randn(2, n, h, d, generator=g, device="cuda", dtype=dtype)
                   for n, h in ((sq, 4), (700, 2), (700, 2), (sq, 4)))
    sums_dtype = sums_dtype or dtype
    o, lse = tt.attention(q, k, v, return_lse=True, out_dtype=sums_dtype)
    assert o.dtype == sums_dtype
    truth = tt.attention_backward(do, q, k, v, o, lse, grad_dtype=sums_dtype)
    got, rows = torch.full_like(o, torch.nan), torch.full_like(lse, -torch.inf)
    sums = {name: torch.ones(x.shape, dtype=sums_dtype, device="cuda")
            for name, x in (("dq", q), ("dk", k), ("dv", v))}
    for part in (slice(0, 300), slice(300, 301), slice(301, 700)):
        tt.attention(q, k[:, part], v[:, part], out=got, lse=rows, accumulate=True)
        tt.attention_backward(do, q, k[:, part], v[:, part], o, lse, partial=True, accumulate=True, grads={
            "dq": sums["dq"], "dk": sums["dk"][:, part], "dv": sums["dv"][:, part]})
    near = dict(rtol=2e-2, atol=4e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows, lse, rtol=0, atol=1e-3)
    torch.testing.assert_close(got, o, **near)
    for name, x in sums.items():
        torch.testing.assert_close(x, getattr(truth, name) + 1, **near)


def test_what_travels_is_kept_until_it_was_read():
    """Context parallelism: a copy of a view is on its way while its memory is wanted for something else."""
    import cp_ranks
    from tessera.torch import comm
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(150, 3, 2, 4, device=device).unbind(1)[1]
    with torch.cuda.stream(comm._side_stream(device, cp_ranks.Echo.name)):
        torch.cuda._sleep(200_000_000)  # a peer that is late
    pending = comm.exchange(cp_ranks.Echo(), [[], [x]], [[], [(x.shape, x.dtype)]], device)
    others = [torch.zeros(x.shape, device=device) for _ in range(8)]
    assert torch.equal(pending.wait()[1][0], x) and not any(y.any() for y in others)
