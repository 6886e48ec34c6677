# SPDX-License-Identifier: Apache-2.0
"""tessera.torch of fp8 q, k, v and do on every device: the bits of the fp32 call at the values that they stand for."""
import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CUDA = pytest.mark.skipif(
    not torch.cuda.is_available() or not any(x.startswith("cuda") for x in tessera.backends()),
    reason="needs a CUDA device and a build for it")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])

B, SQ, SK, H, D = 2, 70, 300, 2, 32


def stored(device, *shape, dtype=E4M3, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def uniform(device, *shape, seed=0):
    return torch.empty(shape).uniform_(0.5, 2, generator=torch.Generator().manual_seed(seed)).to(device)


def qkv(device, sq=SQ, sk=SK, d=D, kv=E4M3):
    return [stored(device, B, s, H, d, dtype=dtype, seed=seed)
            for seed, (s, dtype) in enumerate([(sq, E4M3), (sk, kv), (sk, kv)])]


def at(x, scale, block):
    """The values of x [b, s, h, d] beside a scale [], [h], [b, h] or [b, h, blocks]."""
    if scale.dim() == 3:
        scale = scale.repeat_interleave(block, 2)[:, :, :x.shape[1]].transpose(1, 2)[..., None]
    elif scale.dim() > 0:
        scale = (scale if scale.dim() == 2 else scale[None])[:, None, :, None]
    return x.float() * scale


SCALES = pytest.mark.parametrize("q_shape,k_shape,blocks", [
    ((), (), None), ((H,), (H,), None), ((B, H), (H,), None), ((B, H, SQ), (B, H, 3), (1, 128)),
    ((B, H, 2), (B, H, 2), (64, 256))], ids=str)


@DEVICES
@SCALES
@pytest.mark.parametrize("kv", [E4M3, E5M2])
def test_both_passes_are_those_of_the_values(device, q_shape, k_shape, blocks, kv):
    q, k, v = qkv(device, kv=kv)
    do = stored(device, B, SQ, H, D, dtype=E5M2, seed=7)
    scales = dict(q_scale=uniform(device, *q_shape, seed=3), k_scale=uniform(device, *k_shape, seed=4),
                  v_scale=uniform(device, *k_shape, seed=5))
    if blocks:
        scales["scale_block"] = blocks
    do_scale = uniform(device, *q_shape, seed=6)
    nq, nk = blocks or (0, 0)
    values = at(q, scales["q_scale"], nq), at(k, scales["k_scale"], nk), at(v, scales["v_scale"], nk)
    options = dict(causal=True, align="bottom_right", softcap=20.0)

    o, lse = tt.attention(q, k, v, **scales, **options, out_dtype="float32", return_lse=True)
    expected, rows = tt.attention(*values, **options, return_lse=True)
    assert torch.equal(o, expected) and torch.equal(lse, rows)

    options["deterministic"] = True
    g = tt.attention_backward(do, q, k, v, o, lse, **scales, **options, do_scale=do_scale)
    truth = tt.attention_backward(at(do, do_scale, nq), *values, expected, rows, **options)
    for name in ("dq", "dk", "dv"):
        ours = getattr(g, name)
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, getattr(truth, name).bfloat16()), name


@DEVICES
@pytest.mark.parametrize("dtype,most", [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize("d", [32, 33])  # rows of four columns at a time, and of any
def test_results_in_fp8_saturate_and_amax_is_of_values(device, dtype, most, d):
    q, k, v = qkv(device, d=d)
    wide = tt.attention(q.float(), k.float(), v.float())
    # An fp32 row of 33 columns and its copy, which is padded, are read by kernels of their own.
    relative, absolute = (0.26, 2**-9) if d == 33 else (0, 0)
    for scale in (0.01, 1e-6):
        o, amax = tt.attention(q, k, v, out_dtype=dtype, o_scale=torch.full((1,), scale, device=device),
                               return_amax=True)
        expected = (wide / torch.tensor(scale, device=device)).clamp(-most, most).to(dtype)
        assert o.dtype == dtype
        torch.testing.assert_close(o.float(), expected.float(), rtol=relative, atol=absolute)
        torch.testing.assert_close(amax.reshape(()), wide.abs().max(), rtol=1e-5 if d == 33 else 0, atol=0)
    assert o.float().abs().max() == most


@DEVICES
def test_nan_stays_in_its_row_and_is_the_largest(device):
    q, k, v = qkv(device)
    clean = tt.attention(q, k, v, out_dtype=E4M3)
    q[1, 2, 0, 3] = torch.tensor(float("nan"), device=device).to(E4M3)
    o, amax = tt.attention(q, k, v, out_dtype=E4M3, return_amax=True)
    o, clean = o.float(), clean.float()
    assert o[1, 2, 0].isnan().all() and amax.isnan().all()
    o[1, 2, 0] = clean[1, 2, 0]
    assert torch.equal(o, clean)


@DEVICES
def test_blocks_of_packed_sequences_count_from_their_starts(device):
    lengths, longest = (150, 0, 129, 21), 150
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    q, k, v = (stored(device, sum(lengths), H, D, seed=seed) for seed in range(3))
    scales = [uniform(device, len(lengths), H, n, seed=n) for n in (longest, 2, 2)]
    keywords = dict(layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)
    o = tt.attention(q, k, v, q_scale=scales[0], k_scale=scales[1], v_scale=scales[2], scale_block=(1, 128),
                     out_dtype="float32", **keywords)
    rows = [torch.cat([at(x[None, begin:begin + n], scale[i:i + 1], block)[0]
                       for i, (begin, n) in enumerate(zip(cu.tolist(), lengths))])
            for x, scale, block in zip((q, k, v), scales, (1, 128, 128))]
    assert torch.equal(o, tt.attention(*rows, **keywords))


@DEVICES
def test_compiles_maps_and_is_explained(device):
    q, k, v = (stored(device, 3, 9, 2, 16, seed=seed) for seed in range(3))
    scale = uniform(device, 3, 2)
    o, amax = tt.attention(q, k, v, causal=True, q_scale=scale, return_amax=True)
    wide = tt.attention(q.float() * scale[:, None, :, None], k.float(), v.float(), causal=True)
    near = {} if device == "cpu" else dict(rtol=0.05, atol=0.06)  # GPUs may round P to E4M3
    torch.testing.assert_close(o, wide.bfloat16(), **near)

    def function(q, k, v, scale):
        o, lse, amax = tt.attention(q, k, v, causal=True, q_scale=scale, return_lse=True, return_amax=True)
        do = torch.ones_like(o)
        g = tt.attention_backward(do, q, k, v, o, lse, causal=True, q_scale=scale, return_amax=True, deterministic=True)
        return o, amax, g.dq, g.dk, g.dv, g.amax_dv
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead" if device == "cuda" else None)
    expected = function(q, k, v, scale)
    for _ in range(3):
        got = [x.clone() for x in compiled(q, k, v, scale)]
    for mine, yours in zip(got, expected):
        assert mine.dtype == yours.dtype and torch.equal(mine, yours)
    for returns in (False, True):  # of amax, one call for each example
        got = torch.func.vmap(lambda *x: tt.attention(*x[:3], causal=True, q_scale=x[3], return_amax=returns))(
            q[:, None], k[:, None], v[:, None], scale[:, None])
        assert torch.equal((got[0] if returns else got)[:, 0], o)
    assert got[1].max() == amax
    with pytest.raises(tt.Refused, match="has no autograd"):
        tt.attention(q, k, v, sink=torch.zeros(2, device=device, requires_grad=True))
    assert tt.explain(q, k, v, q_scale=scale, causal=True).backend in ("cpu", "cuda_sm80", "cuda_sm90")
    assert tt.explain(q, k, v, q_scale=scale, causal=True, backward=True).backend in ("cpu", "cuda_sm80")


def every_result(q, k, v, do, rows, blocks, one):
    """Both passes with scales of rows and blocks, results in fp8 and largest values."""
    scales = dict(q_scale=rows, k_scale=blocks, v_scale=blocks, scale_block=(1, 128), causal=True, align="top_left")
    o, lse, peak, amax = tt.attention(q, k, v, **scales, out_dtype=E4M3, o_scale=one, return_lse=True,
                                      return_max_logit=True, return_amax=True)
    g = tt.attention_backward(do, q, k, v, o, lse, **scales, do_scale=rows, o_scale=one, grad_dtype=E5M2, dq_scale=one,
                              dk_scale=one, dv_scale=one, return_amax=True, deterministic=True)
    return o, lse, peak, amax, g.dq, g.dk, g.dv, g.amax_dq, g.amax_dk, g.amax_dv


def every_argument(device):
    return (*qkv(device), stored(device, B, SQ, H, D, dtype=E5M2, seed=7), uniform(device, B, H, SQ, seed=3),
            uniform(device, B, H, 3, seed=4), torch.full((1,), 0.25, device=device))


def same(ours, theirs):
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.dtype == yours.dtype and mine.shape == yours.shape and torch.equal(mine.float(), yours.float())


@DEVICES
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_result_in_one_graph(device, dynamic):
    arguments = every_argument(device)
    torch._dynamo.reset()
    same(torch.compile(every_result, fullgraph=True, dynamic=dynamic)(*arguments), every_result(*arguments))


@DEVICES
def test_every_result_is_exported_and_mapped(device):
    arguments = every_argument(device)
    expected = every_result(*arguments)

    class Module(torch.nn.Module):
        def forward(self, *arguments):
            return every_result(*arguments)
    with torch.no_grad():
        same(torch.export.export(Module(), arguments).module()(*arguments), expected)
    *own, one = arguments
    mapped = torch.func.vmap(every_result, (0,) * 6 + (None,))(*(x[:, None] for x in own), one)
    for i in range(B):
        same([x[i] for x in mapped], every_result(*(x[i:i + 1] for x in own), one))


@DEVICES
def test_results_of_the_callers_in_one_graph(device):
    q, k, v, do, *_, one = every_argument(device)

    def function(q, k, v, do, one):
        o, lse, amax = tt.attention(q, k, v, out=torch.empty_like(q), out_dtype=E4M3, o_scale=one, return_lse=True,
                                    return_amax=True)
        g = tt.attention_backward(do, q, k, v, o, lse, grads={"dq": torch.empty_like(do)}, o_scale=one, grad_dtype=E5M2,
                                  dq_scale=one, return_amax=True, deterministic=True)
        return o, lse, amax, g.dq, g.amax_dq
    torch._dynamo.reset()
    same(torch.compile(function, fullgraph=True)(q, k, v, do, one), function(q, k, v, do, one))


def test_explain_takes_what_attention_takes():
    q, k, v, _, rows, blocks, one = every_argument("cpu")
    scales = dict(q_scale=rows, k_scale=blocks, v_scale=blocks, scale_block=(1, 128), o_scale=one, return_amax=True)
    forward = tt.explain(q, k, v, **scales, out_dtype=E4M3, return_lse=True, return_max_logit=True)
    assert forward.backend == "cpu" and " qscale=row" in forward.headline and " o=e4m3" in forward.headline
    scales.update(do_scale=rows, grad_dtype=E5M2, dq_scale=one, dk_scale=one, dv_scale=one)
    backward = tt.explain(q, k, v, backward=True, **scales)
    assert backward.backend == "cpu" and " grad=e5m2" in backward.headline and " o=e4m3" in backward.headline
    with pytest.raises(ValueError, match="o_scale"):
        tt.explain(q, k, v, **{**scales, "o_scale": torch.ones(3)}, backward=True)


@CUDA
def test_a_graph_reads_scales_when_it_runs():
    q, k, v = qkv("cuda")
    do = stored("cuda", B, SQ, H, D, dtype=E5M2, seed=7)
    scale = {name: torch.ones(1, device="cuda") for name in ("o_scale", "dq_scale")}
    q_scale, do_scale = (torch.ones(H, device="cuda") for _ in range(2))

    def step():
        o, lse, amax = tt.attention(q, k, v, q_scale=q_scale, out_dtype=E4M3, o_scale=scale["o_scale"],
                                    return_lse=True, return_amax=True)
        g = tt.attention_backward(do, q, k, v, o, lse, q_scale=q_scale, o_scale=scale["o_scale"],
                                  do_scale=do_scale, dq_scale=scale["dq_scale"], grads=("dq",), grad_dtype=E5M2,
                                  deterministic=True, return_amax=True)
        return o, lse, amax, g.dq, g.amax_dq
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    before = None
    for factor in (1, 0.5, 3):
        for x in (q_scale, do_scale, *scale.values()):
            x.fill_(factor)
        graph.replay()
        for ours, eager in zip(outputs, step()):
            assert torch.equal(ours.float(), eager.float())
        assert before is None or not torch.equal(before, outputs[1])
        before = outputs[1].clone()


# ---- precision="fp8" ----

def halves(device, grad=True):
    return [torch.randn(B, s, H, D, generator=torch.Generator().manual_seed(s + seed)).to(
        device, torch.bfloat16).requires_grad_(grad) for seed, s in enumerate((SQ, SK, SK))]


ROUNDED = dict(precision="fp8", causal=True, align="bottom_right")


@DEVICES
def test_autograd_is_that_of_the_rounded_pass(device):
    words = dict(ROUNDED, deterministic=True)
    q, k, v = halves(device)
    o, lse = tt.attention(q, k, v, return_lse=True, **words)
    do = torch.randn(o.shape).to(device, torch.bfloat16)
    got = torch.autograd.grad(o, (q, k, v), do)
    g = tt.attention_backward(do, q.detach(), k.detach(), v.detach(), o.detach(), lse.detach(), **words)
    for a, b in zip(got, (g.dq, g.dk, g.dv)):
        assert torch.equal(a, b)
    plain = torch.autograd.grad(tt.attention(q, k, v, causal=True, align="bottom_right"), (q, k, v), do)
    for a, b in zip(got, plain):
        assert not torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=0, atol=0.2 * b.abs().max().item())


@DEVICES
@pytest.mark.parametrize("smooth", ["none", "mean", None])
def test_a_rounded_pass_is_compiled_whole(device, smooth):
    def step(q, k, v):
        return tt.attention(q, k, v, smooth=smooth, deterministic=True, **ROUNDED)
    torch._dynamo.reset()
    q, k, v = halves(device)
    expected = step(q, k, v)
    grads = torch.autograd.grad(expected.sum(), (q, k, v))
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(got, expected)
    for a, b in zip(torch.autograd.grad(got.sum(), (q, k, v)), grads):
        assert torch.equal(a, b)


@DEVICES
def test_a_rounded_pass_is_mapped_and_explained(device):
    q, k, v = halves(device, grad=False)
    expected = tt.attention(q, k, v, **ROUNDED)
    mapped = torch.func.vmap(lambda *x: tt.attention(*(y[None] for y in x), **ROUNDED)[0])(q, k, v)
    assert torch.equal(mapped, expected)
    assert tt.explain(q, k, v, **ROUNDED).backend.startswith(device)


@CUDA
@pytest.mark.parametrize("words", [dict(), dict(softcap=5.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("smooth", ["none", "mean", None])
def test_a_gpu_rounds_as_the_cpu(words, smooth):
    """The same bytes and scales on both: what is left is the rounding of P, and how products are summed."""
    of_device = []
    for device in ("cpu", "cuda"):
        q, k, v = halves(device)
        o = tt.attention(q, k, v, smooth=smooth, **ROUNDED, **words)
        grads = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        of_device.append([x.detach().float().cpu() for x in (o, *grads)])
    for a, b in zip(*of_device):
        torch.testing.assert_close(a, b, rtol=0, atol=0.03 * b.abs().max().item())


@CUDA
def test_a_rounded_pass_in_a_graph():
    q, k, v = halves("cuda", grad=False)
    out = torch.empty_like(q)
    tt.attention(q, k, v, out=out, **ROUNDED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tt.attention(q, k, v, out=out, **ROUNDED)
    for x in (q, k, v):
        x.mul_(1.5)
    graph.replay()
    assert torch.equal(out, tt.attention(q, k, v, **ROUNDED))


@CUDA
def test_a_rounded_pass_at_any_address():
    aligned = halves("cuda", grad=False)
    odd = [torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in aligned]
    results = []
    for q, k, v in (aligned, odd):
        o, lse = tt.attention(q, k, v, return_lse=True, **ROUNDED)
        g = tt.attention_backward(odd[0], q, k, v, o, lse, **ROUNDED)
        results.append((o, lse, g.dq, g.dk, g.dv))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=0.01 * b.abs().max().item())
