# SPDX-License-Identifier: Apache-2.0
"""tessera.torch in eager mode: autograd, agreement with PyTorch's own attention, strides, dropout,
what is refused. That each feature is right is for the cases (check --through torch)."""
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import signatures  # noqa: E402
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


def qkv(b=2, s=33, h=4, d=16, hk=None, dtype=torch.float32, grad=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (b, s, h, d), (b, s, hk or h, d), (b, s, hk or h, d)
    return [torch.randn(x, generator=g).to(dtype).requires_grad_(grad) for x in shapes]


def sdpa(q, k, v, **keywords):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **keywords).transpose(1, 2)


def assert_same(ours, theirs, **tolerance):
    tolerance = tolerance or dict(rtol=1e-4, atol=2e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("hk", [4, 2])
@pytest.mark.parametrize("mask", [False, True])
def test_agrees_with_sdpa(hk, mask):
    q, k, v = qkv(hk=hk)
    bias = torch.randn(2, 4, 33, 33, requires_grad=True) if mask else None
    ours = tt.attention(q, k, v, causal=not mask, bias=bias)
    theirs = sdpa(q, k, v, is_causal=not mask, attn_mask=bias, enable_gqa=True)
    leaves = [q, k, v] + ([bias] if mask else [])
    weight = torch.randn_like(ours)
    assert_same([ours], [theirs])
    assert_same(torch.autograd.grad(ours, leaves, weight), torch.autograd.grad(theirs, leaves, weight))


def test_agrees_with_flex_attention():
    from torch.nn.attention import flex_attention as flex
    q, k, v = qkv(b=1, s=128, grad=False)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    mask = flex.create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= 20), None, None, 128, 128,
                                  device="cpu")
    theirs, lse = flex.flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, return_lse=True,
        score_mod=lambda x, b, h, i, j: 30 * torch.tanh(x / 30) - slopes[h] * (i - j).abs())
    o, our_lse = tt.attention(q, k, v, window=(20, 0), softcap=30.0, alibi_slopes=slopes,
                              return_lse=True)
    assert_same([o, our_lse], [theirs.transpose(1, 2), lse])


def test_gradcheck_through_the_reference():
    q, k, v = qkv(b=1, s=5, h=2, d=3, dtype=torch.float64)
    bias = torch.randn(2, 5, 5, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, bias, sink, slopes):
        return tt.attention(q, k, v, bias=bias, sink=sink, alibi_slopes=slopes, causal=True,
                            softcap=2.0, return_lse=True, backend="reference")
    assert torch.autograd.gradcheck(function, (q, k, v, bias, sink, slopes))


def test_gradcheck_of_merge():
    q, k, v = qkv(b=1, s=6, h=2, d=3, dtype=torch.float64)
    for layout in ("bshd", "sbhd", "bhsd"):
        def function(q, k, v, layout=layout):
            order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}[layout]
            q, k, v = (x.permute(order) for x in (q, k, v))
            axis = order.index(1)
            parts = [tt.attention(q, *(x.narrow(axis, start, 3) for x in (k, v)), layout=layout,
                                  return_lse=True, backend="reference") for start in (0, 3)]
            return tt.merge(parts, layout=layout)
        assert torch.autograd.gradcheck(function, (q, k, v))


def test_merge_of_a_part_that_sees_nothing():
    q, k, v = qkv()
    o, lse = tt.attention(q, k, v, return_lse=True)
    hidden = torch.full_like(o, torch.nan), torch.full_like(lse, -torch.inf)
    merged = tt.merge([(o, lse), hidden])
    assert_same(merged, (o, lse))
    assert_same(torch.autograd.grad(merged[0].sum(), (q, k, v), retain_graph=True),
                torch.autograd.grad(o.sum(), (q, k, v)))


def test_gradients_only_for_what_asks():
    q, k, v = qkv()
    k.requires_grad_(False)
    o = tt.attention(q, k, v)
    dq, dv = torch.autograd.grad(o.sum(), (q, v))
    assert dq.shape == q.shape and dv.shape == v.shape
    assert not tt.attention(q.detach(), k, v.detach()).requires_grad
    with torch.no_grad():
        assert not tt.attention(q, k, v).requires_grad


def test_gradient_through_lse_alone_and_expanded_do():
    q, k, v = qkv()
    o, lse = tt.attention(q, k, v, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    assert_same([lse], [scores.logsumexp(-1)])
    ours = torch.autograd.grad(lse.sum(), (q, k), retain_graph=True)
    assert_same(ours, torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k)))
    expanded = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)  # do has strides of 0
    assert_same(expanded, torch.autograd.grad(o, (q, k, v), torch.ones_like(o), retain_graph=True))
    transposed = torch.ones(o.shape[::-1]).permute(3, 2, 1, 0)
    assert_same(expanded, torch.autograd.grad(o, (q, k, v), transposed))


def test_max_logit_has_no_gradient():
    q, k, v = qkv()
    o, lse, max_logit = tt.attention(q, k, v, return_lse=True, return_max_logit=True)
    assert max_logit.shape == (4,) and not max_logit.requires_grad and lse.requires_grad


def test_inputs_are_used_in_place():
    packed = torch.randn(2, 33, 3, 4, 16, requires_grad=True)
    q, k, v = packed.unbind(2)
    dense = [x.contiguous() for x in (q, k, v)]
    assert_same([tt.attention(q, k, v, causal=True)], [tt.attention(*dense, causal=True)],
                rtol=0, atol=0)
    grad, = torch.autograd.grad(tt.attention(q, k, v, causal=True).sum(), packed)
    each = torch.autograd.grad(tt.attention(*dense, causal=True).sum(), dense)
    assert_same(grad.unbind(2), each, rtol=0, atol=0)
    one = torch.randn(1, 33, 1, 16).expand(2, 33, 4, 16)
    assert_same([tt.attention(q, one, one)], [tt.attention(q, one.contiguous(), one.contiguous())],
                rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"k.stride"):
        tt.attention(q, torch.randn(2, 33, 16, 4).mT, v)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_out_is_written_in_place(layout):
    q, k, v = qkv(grad=False)
    if layout != "bshd":
        order = (1, 0, 2, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (x.permute(order).contiguous() for x in (q, k, v))
    expected = tt.attention(q, k, v, layout=layout, causal=True, return_lse=True,
                            return_max_logit=True)
    buffer = torch.full((*q.shape[:-1], 3, q.shape[-1]), 7.0)  # one of three, interleaved
    out = buffer[..., 1, :]
    version = out._version
    results = tt.attention(q, k, v, layout=layout, causal=True, out=out, return_lse=True,
                           return_max_logit=True)
    assert results[0] is out and out._version > version
    assert_same(results, expected, rtol=0, atol=0)
    assert (buffer[..., 0, :] == 7).all() and (buffer[..., 2, :] == 7).all()
    with torch.inference_mode():
        assert tt.attention(q, k, v, layout=layout, out=torch.empty_like(q)).shape == q.shape
    assert tt.explain(q, k, v, layout=layout, out=out).backend == "cpu"


def test_out_misuse():
    q, k, v = qkv(grad=False)
    for out, message in ((torch.empty(2, 33, 4, 15), r"out.shape"), (np.zeros(3), "out=ndarray"),
                         (torch.empty(2, 33, 4, 16, dtype=torch.float16), "out.dtype"),
                         (torch.empty(2, 33, 4, 16, device="meta"), "out.device='meta'"),
                         (torch.empty(1, 33, 4, 16).expand(2, -1, -1, -1), "out"), (q, "out")):
        with pytest.raises(ValueError, match=f"tessera.attention: .*{message}"):
            tt.attention(q, k, v, out=out)
        with pytest.raises(ValueError, match=f"tessera.explain: .*{message}"):
            tt.explain(q, k, v, out=out)
    out = torch.empty_like(q)
    for tensors in ((q.clone().requires_grad_(), k, v, out), (q, k, v, out.clone().requires_grad_())):
        with pytest.raises(tt.Refused, match="out=Tensor: .*no_grad"):
            tt.attention(*tensors[:3], out=tensors[3])
    with torch.no_grad():
        assert tt.attention(q.clone().requires_grad_(), k, v, out=out) is out
    with pytest.raises(tt.Refused, match="out=Tensor"):
        torch.func.vmap(lambda q: tt.attention(q, k, v, out=out))(torch.stack([q, q]))
    used = q.clone().requires_grad_()
    loss = used.square() * out  # saves out, which then changes
    with torch.no_grad():
        tt.attention(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_dropout_is_drawn_replayed_and_shown():
    q, k, v = qkv()
    torch.manual_seed(5)
    first = tt.attention(q, k, v, dropout_p=0.5)
    second = tt.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(first, tt.attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)
    state = torch.tensor([7, 9])
    keep = tt.dropout_mask(2, 4, 33, 33, 0.5, state)
    np.testing.assert_array_equal(keep.numpy(), tessera.dropout_mask(2, 4, 33, 33, 0.5, (7, 9)))
    starts = [torch.tensor([5, 0]), torch.tensor([1, 30], dtype=torch.int32)]
    part = tt.dropout_mask(2, 2, 9, 9, 0.5, (7, 9, 1, 4), q_start=starts[0], k_start=starts[1])
    np.testing.assert_array_equal(part.numpy(), tessera.dropout_mask(
        2, 2, 9, 9, 0.5, (7, 9, 1, 4), q_start=starts[0].numpy(), k_start=starts[1].numpy()))
    assert torch.equal(part[0], keep[0, 1:3, 5:14, 1:10])
    p = (torch.einsum("bihd,bjhd->bhij", q, k) / 4).softmax(-1) * keep * 2
    expected = torch.einsum("bhij,bjhd->bihd", p, v)
    for form in (state, (7, 9), [7, 9]):
        assert_same([tt.attention(q, k, v, dropout_p=0.5, rng_state=form)], [expected])


def test_dropout_of_a_part_of_the_heads():
    q, k, v = (x.requires_grad_() for x in qkv())
    whole = tt.attention(q, k, v, dropout_p=0.5, rng_state=(7, 9))
    part = tt.attention(*(x[1:, :, 2:] for x in (q, k, v)), dropout_p=0.5, rng_state=(7, 9, 6, 4))
    assert torch.equal(part, whole[1:, :, 2:])
    expected = torch.autograd.grad(whole[1:, :, 2:].sum(), (q, k, v))
    assert_same(torch.autograd.grad(part.sum(), (q, k, v)), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_positions(compiled):
    q, k, v = (x.requires_grad_() for x in qkv())
    tensors = dict(q_start=torch.tensor([5, 40]), k_start=torch.tensor([3, 16], dtype=torch.int32))
    function = torch.compile(tt.attention, fullgraph=True, backend="aot_eager") if compiled else tt.attention
    for align in (4, torch.tensor([3, -7]), "bottom_right"):
        o = function(q, k, v, causal=True, align=align, dropout_p=0.3, rng_state=torch.tensor([1, 2]), sm_margin=3,
                     **tensors)
        numpy = {name: x.detach().numpy() for name, x in dict(q=q, k=k, v=v, **tensors).items()}
        expected = tessera.attention(
            **numpy, causal=True, align=align.numpy() if isinstance(align, torch.Tensor) else align, dropout_p=0.3,
            rng_state=(1, 2))
        np.testing.assert_allclose(o.detach().numpy(), expected, atol=1e-6)
        (dq,) = torch.autograd.grad(o.sum(), q)
        assert dq.isfinite().all() and dq.abs().sum() > 0


def test_positions_under_vmap():
    q, k, v = qkv(grad=False)
    starts = torch.tensor([[5, 40], [0, 9], [33, 2]])
    run = lambda start: tt.attention(q, k, v, causal=True, align=1, k_start=start)  # noqa: E731
    assert_same([torch.func.vmap(run)(starts)], [torch.stack([run(start) for start in starts])])


def test_merge_in_fp32():
    parts = [(torch.randn(2, 5, 4, 8).bfloat16().requires_grad_(), torch.randn(2, 4, 5)) for _ in range(2)]
    o, _ = tt.merge(parts, out_dtype=torch.float32)
    assert o.dtype == torch.float32
    o.sum().backward()
    assert parts[0][0].grad.dtype == torch.bfloat16


def test_checkpointing_replays_dropout():
    q, k, v = qkv()

    def function(q, k, v):
        return tt.attention(q, k, v, dropout_p=0.3, causal=True)
    results = []
    for run in (function, lambda *x: checkpoint(function, *x, use_reentrant=False)):
        torch.manual_seed(1)
        results.append(torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v)))
    assert_same(*results, rtol=0, atol=0)


def test_autocast():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = tt.attention(q, k.bfloat16(), v, bias=torch.zeros(33, 33))
    assert o.dtype == torch.bfloat16
    assert torch.autograd.grad(o.sum(), q)[0].dtype == torch.float32


def test_deterministic_follows_the_framework(monkeypatch):
    flags = []
    operator = tt._ops.attention
    monkeypatch.setattr(tt._ops, "attention", lambda *x: (flags.append("deterministic=True" in x[2]), operator(*x))[1])
    q, k, v = qkv(grad=False)
    try:
        for on in (True, False):
            torch.use_deterministic_algorithms(on)
            tt.attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    tt.attention(q, k, v, deterministic=True)
    assert flags == [True, False, True]


def test_vmap_and_functional_gradients():
    q, k, v = (torch.stack([x, x + 1]) for x in qkv(grad=False))

    def loss(q, k, v, **keywords):
        return tt.attention(q, k, v, causal=True, **keywords).square().sum()
    for keywords in ({}, {"sink": torch.zeros(4)}):  # folded into the batch, and one by one
        def function(*x, keywords=keywords):
            return torch.func.grad(lambda *x: loss(*x, **keywords), argnums=(0, 1, 2))(*x)
        each = [function(*x) for x in zip(q, k, v)]
        assert_same(torch.func.vmap(function)(q, k, v), [torch.stack(x) for x in zip(*each)],
                    rtol=1e-6, atol=1e-6)
    shared = torch.func.vmap(lambda q: tt.attention(q, k[0], v[0], layout="sbhd"), 1, 1)
    assert_same([shared(q.movedim(0, 1))[:, 1]], [tt.attention(q[1], k[0], v[0], layout="sbhd")])


def test_batched_gradients_are_refused():
    q, k, v = qkv(b=1, s=4)
    with pytest.raises(tt.Refused, match="is_grads_batched=True.* torch.func.jacrev"):
        torch.autograd.grad(tt.attention(q, k, v), q, torch.ones(3, *q.shape), is_grads_batched=True)
    with pytest.raises(tt.Refused, match="vectorize=True"):
        torch.autograd.functional.jacobian(lambda q: tt.attention(q, k, v, return_lse=True)[1], q, vectorize=True)


def test_second_derivatives_are_refused():
    q, k, v = qkv(b=1, s=4)
    dq, = torch.autograd.grad(tt.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(tt.Refused, match="create_graph=True"):
        torch.autograd.grad(dq.sum(), q)


@pytest.mark.parametrize("change, message", [
    (dict(q=torch.zeros(33, 4, 16)), r"q.shape=\[33, 4, 16\]: must have the axes"),
    (dict(q=np.zeros((2, 33, 4, 16))), r"q=ndarray: must be a PyTorch tensor"),
    (dict(q=[1.0]), r"q=\[1.0\]: must be a PyTorch tensor"),
    (dict(k=torch.zeros(2, 33, 4, 15)), r"k.shape"),
    (dict(v=torch.zeros(2, 33, 4, 16, dtype=torch.int32)), r"v.dtype=int32"),
    (dict(q=torch.zeros(2, 33, 4, 16, device="meta")), r"k.device=.cpu.: .*q is on meta"),
    (dict(k=torch.zeros(2, 33, 4, 16, device="meta")), r"k.device='meta'"),
    (dict(q=torch.zeros(2, 33, 4, 16).to_sparse()), r"q.layout=torch.sparse_coo"),
    (dict(causal=1), r"causal=1: must be True or False"),
    (dict(causal=True, window=(3, 4)), r"window"),
    (dict(layout="bsdh"), r'layout=\'bsdh\': must be "bshd"'),
    (dict(window=(1.0, 0)), r"window\[0\]=1.0: must be an integer"),
    (dict(bias=torch.zeros(5, 33, 33)), r"bias.shape=\[5, 33, 33\], read as \[1, 5, 33, 33\]"),
    (dict(keep=torch.zeros(33, 33)), r"keep.dtype=fp32: must be bool"),
    (dict(dropout_p=1.5), r"dropout_p=1.5"),
    (dict(rng_state=torch.zeros(2)), r"rng_state.dtype=fp32: must be int64"),
    (dict(backend="fastest"), r'backend="fastest"'),
    (dict(cu_seqlens_q=torch.zeros(3, dtype=torch.int32)), r"cu_seqlens_q"),
    (dict(seqlens_k=torch.tensor([34, 1])), r"seqlens_k\[0\]=34"),
    (dict(return_lse=1), r"return_lse=1: must be True or False"),
])
def test_bad_input(change, message):
    arguments = dict(zip("qkv", qkv(grad=False)))
    for _ in range(2):  # the second call finds the options of the first
        with pytest.raises(ValueError, match=r"tessera.attention: .*" + message):
            tt.attention(**{**arguments, **change})


def test_refusals_carry_every_reason():
    q, k, v = qkv(dtype=torch.float64)
    with pytest.raises(tt.Refused) as refusal:
        tt.attention(q, k, v)
    for name in tessera.backends():
        assert name in str(refusal.value)
    why = tt.explain(q, k, v)
    assert why.backend is None and set(why.reasons) >= set(tessera.backends())
    assert tt.explain(*qkv(), causal=True).backend == "cpu"
    assert tt.explain(*qkv(), backward=True, grads=("dq",)).backend == "cpu"
    assert tt.explain("fwd bf16 b=2 s=64 h=4 d=64").backend == "cpu"
    with pytest.raises(ValueError, match=r"tessera.explain: k.shape"):
        tt.explain(q, k[..., :3], v)


@pytest.mark.parametrize("function", signatures.public_functions(tt), ids=lambda function: function.__name__)
def test_docstrings_and_annotations_have_every_parameter(function):
    signatures.assert_described(function)


def test_utilities_take_what_tesseras_do():
    signatures.assert_utilities_are_tesseras(tt)


@pytest.mark.parametrize("name, arguments, message", signatures.WRONG_UTILITIES)
def test_utilities_say_what_tesseras_do(name, arguments, message):
    signatures.assert_says(tt, name, arguments, message)


def test_two_of_one_mask_are_illegal_after_one_was_seen():
    q, k, v = qkv(grad=False)
    mask = torch.ones(33, 33, dtype=torch.bool)
    ids = torch.zeros(2, 33, dtype=torch.int32)
    for good, wrong in (({"drop": ~mask}, {"keep": mask, "drop": ~mask}),
                        ({"sink": "off_by_one"}, {"sink": "off_by_two"}),
                        ({"segment_ids": ids}, {"segment_ids": (ids, ids, ids)})):
        tt.attention(q, k, v, **good)
        with pytest.raises(ValueError, match="|".join(wrong)):
            tt.attention(q, k, v, **wrong)


def test_through_the_cases(capsys):
    from tessera.__main__ import main
    assert main(["check", "--through", "torch"]) == 0
    assert ", 0 failed" in capsys.readouterr().out


def test_example_trains_to_the_same_loss(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "torch")
    import train_gpt
    results = train_gpt.main([
        "--device=cpu", "--width=32", "--heads=2", "--layers=1", "--context=32", "--steps=12",
        f"--plot={tmp_path / 'curves.png'}"])
    ours, theirs = (results[name][0] for name in ("tessera", "sdpa"))
    assert ours == pytest.approx(theirs, rel=1e-3) and ours[-1] < ours[0]
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_host_cost_is_measured_beside_sdpa(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    import torch_host_cost
    threads = torch.get_num_threads()
    try:
        rows = torch_host_cost.main(["--calls=20", "--repeat=2"])
    finally:
        torch.set_num_threads(threads)
    assert all(ours > 0 for ours, _ in rows.values()) and rows["end to end"][1] > 0
    assert rows["inside the operator"][0] < rows["the operator, from Python"][0]
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows) and "SDPA" in printed


def test_backward_of_parts_on_raw_tensors():
    q, k, v, do = (torch.randn(2, n, 2, 16, generator=torch.Generator().manual_seed(n))
                   for n in (5, 9, 9, 5))
    q.requires_grad_()
    o, lse = tt.attention(q, k, v, return_lse=True)
    (truth,) = torch.autograd.grad(o, q, do)
    parts = [tt.attention_backward(do, q, k[:, part], v[:, part], o.detach(), lse.detach(),
                                   partial=True, grads=("dq",))
             for part in (slice(0, 4), slice(4, 9))]
    assert parts[0].dk is None
    torch.testing.assert_close(parts[0].dq + parts[1].dq, truth)
    with pytest.raises(TypeError, match="return_lse"):
        tt.attention_backward(do, q, k, v, o, lse, return_lse=True)
    with pytest.raises(ValueError, match="grads"):
        tt.attention_backward(do, q, k, v, o, lse, grads=("dx",))


@pytest.mark.parametrize("compiled", [False, True])
def test_results_in_fp32_beside_16_bits(compiled):
    q, k, v = (torch.randn(2, n, 2, 16).bfloat16() for n in (5, 9, 9))
    q.requires_grad_()

    def call(q, k, v):
        return tt.attention(q, k, v, causal=True, align="top_left", out_dtype=torch.float32)
    o = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(q, k, v)
    narrow, lse = tt.attention(q, k, v, causal=True, align="top_left", return_lse=True)
    assert o.dtype == torch.float32
    torch.testing.assert_close(o.bfloat16(), narrow)
    assert torch.autograd.grad(o.sum(), q)[0].dtype == torch.bfloat16
    g = tt.attention_backward(o.detach(), q, k, v, o.detach(), lse.detach(), causal=True, align="top_left",
                              grad_dtype="float32")
    assert {x.dtype for x in (g.dq, g.dk, g.dv)} == {torch.float32}
    with pytest.raises(ValueError, match="out_dtype='int8'|out_dtype=int8"):
        tt.attention(q, k, v, out_dtype="int8")


def test_sums_in_place():
    q, k, v, do = (torch.randn(2, n, 2, 16) for n in (5, 9, 9, 5))
    o, lse = tt.attention(q, k, v, return_lse=True)
    truth = tt.attention_backward(do, q, k, v, o, lse)
    got, rows = torch.full_like(o, torch.nan), torch.full_like(lse, -torch.inf)
    sums = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    version = got._version
    for part in (slice(0, 4), slice(4, 9)):
        assert tt.attention(q, k[:, part], v[:, part], out=got, lse=rows, accumulate=True) is got
        tt.attention_backward(do, q, k[:, part], v[:, part], o, lse, partial=True, accumulate=True, grads={
            "dq": sums["dq"], "dk": sums["dk"][:, part], "dv": sums["dv"][:, part]})
    assert got._version > version
    torch.testing.assert_close((got, rows), (o, lse))
    for name, x in sums.items():
        torch.testing.assert_close(x, getattr(truth, name))
    with pytest.raises(ValueError, match="accumulate=True: .*map names to arrays"):
        tt.attention_backward(do, q, k, v, o, lse, accumulate=True)
    with pytest.raises(tt.Refused, match="has no gradient"):
        tt.attention(q.requires_grad_(), k, v, out=got, lse=rows, accumulate=True)
    with torch.no_grad():
        def add(*x):
            return tt.attention(*x, out=got, lse=rows, accumulate=True)
        torch._dynamo.reset()
        call = torch.compile(add, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(call(q, k, v), o)
        torch.testing.assert_close(rows, lse + torch.log(torch.tensor(2.0)))
        with pytest.raises(tt.Refused, match="torch.func"):
            torch.func.vmap(add)(*(x[None] for x in (q, k, v)))


def test_what_no_backend_has_yet_is_refused():
    q = torch.randn(2, 6, 2, 16).bfloat16()
    with pytest.raises(tt.Refused, match="page_table"):
        tt.attention(q, q.clone(), q.clone(), precision="fp8", page_table=torch.zeros(2, 1, dtype=torch.int32),
                     seqlens_k=torch.tensor([6, 6]))


def test_an_integer_aligns():
    q = torch.randn(2, 6, 2, 16).bfloat16()
    torch.testing.assert_close(tt.attention(q, q, q, causal=True, align=0),
                               tt.attention(q, q, q, causal=True))


@pytest.mark.parametrize("keywords", [dict, lambda: dict(seqlens_k=torch.tensor([33, 7])), lambda: dict(
    out=torch.empty(2, 33, 4, 16)), lambda: dict(softmax_scale=0.25, bias=torch.zeros(33, 33))],
    ids=["plain", "lengths", "out", "bias"])
@pytest.mark.parametrize("call", [tt.attention, torch.compile(tt.attention, backend="eager")],
                         ids=["eager", "compiled"])
def test_an_unknown_keyword_is_a_type_error_whatever_was_called_before(call, keywords):
    tensors = qkv(grad=False)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"attention\(\) got an unexpected keyword argument 'bar'"):
            call(*tensors, bar=None, **keywords())
        call(*tensors, **keywords())
