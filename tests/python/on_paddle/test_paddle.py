# SPDX-License-Identifier: Apache-2.0
"""tessera.paddle beside Paddle's own operations: gradients, and what goes together."""

import gc
import inspect
import resource
import threading
from pathlib import Path

import every_keyword
import numpy as np
import pytest
import signatures

paddle = pytest.importorskip("paddle")

import tessera  # noqa: E402
import tessera.paddle as tp  # noqa: E402
from tessera._call import _keywords  # noqa: E402
from tessera.paddle import _tensors  # noqa: E402
from tessera.cli.through.paddle import to_paddle  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


def tensors(*shapes, seed=2, dtype="float32"):
    paddle.seed(seed)
    found = [paddle.randn(shape).astype(dtype) for shape in shapes]
    for x in found:
        x.stop_gradient = False
    return found


def qkv(b=2, s=7, hq=4, hk=2, d=8, **more):
    return tensors([b, s, hq, d], [b, s, hk, d], [b, s, hk, d], **more)


def by_operations(q, k, v, hidden=None, bias=None, sink=None):
    """(o, lse) in Paddle's words; `hidden` broadcasts to [b, h, s, s]."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose([0, 2, 1, 3]) for x in (k, v))
    scores = paddle.matmul(q.transpose([0, 2, 1, 3]), k, transpose_y=True) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = paddle.where(hidden, paddle.full([], -1e9), scores)
    terms = scores
    if sink is not None:
        extra = sink.reshape([1, -1, 1, 1]).expand([*scores.shape[:3], 1])
        terms = paddle.concat([scores, extra], -1)
    lse = paddle.logsumexp(terms, -1)
    o = paddle.matmul(paddle.exp(scores - lse.unsqueeze(-1)), v)
    return o.transpose([0, 2, 1, 3]), lse


def close(x, y, atol=2e-5):
    assert list(x.shape) == list(y.shape) and x.dtype == y.dtype
    assert float((x.astype("float32") - y.astype("float32")).abs().max()) <= atol


CAUSAL = paddle.triu(paddle.ones([7, 7]), 1).astype("bool")


# ---- gradients ----

@pytest.mark.parametrize("through", ["o", "lse", "both"])
def test_gradients(through):
    q, k, v, bias, sink = inputs = [*qkv(), *tensors([1, 4, 7, 7], [4], seed=5)]
    results = []
    for o, lse in (tp.attention(q, k, v, causal=True, bias=bias, sink=sink, return_lse=True),
                   by_operations(q, k, v, CAUSAL, bias, sink)):
        weight = paddle.cos(paddle.arange(o.size, dtype="float32")).reshape(o.shape)
        roots = {"o": [o * weight], "lse": [lse * lse], "both": [o * weight, lse * lse]}[through]
        wanted = inputs if through != "lse" else [q, k, bias, sink]
        results.append([o, lse, *paddle.grad(sum(x.sum() for x in roots), wanted, allow_unused=False)]
                       if through != "lse" else
                       [o, lse, *paddle.grad(roots[0].sum() + 0 * v.sum(), inputs)])
    for x, y in zip(*results):
        close(x, y)


def test_alibi_slopes_have_gradients():
    q, k, v = qkv()
    slopes = tp.alibi_slopes(4)
    slopes.stop_gradient = False
    i = paddle.arange(7, dtype="float32")
    bias = -slopes.reshape([1, 4, 1, 1]) * (i.unsqueeze(1) - i).abs()
    ours = tp.attention(q, k, v, alibi_slopes=slopes)
    close(ours, by_operations(q, k, v, bias=bias)[0])
    inputs = [q, k, v, slopes]
    for x, y in zip(paddle.grad((ours ** 2).sum(), inputs),
                    paddle.grad((by_operations(q, k, v, bias=bias)[0] ** 2).sum(), inputs)):
        close(x, y)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", "qv", "bias"])
def test_only_what_wants_a_gradient_gets_one(wanted):
    q, k, v, bias = inputs = [*qkv(), *tensors([4, 7, 7], seed=5)]
    names = dict(zip(("q", "k", "v", "bias"), inputs))
    for name, x in names.items():
        x.stop_gradient = name not in ([wanted] if wanted == "bias" else list(wanted))
    o = tp.attention(q, k, v, bias=bias)
    (o * o).sum().backward()
    expected = by_operations(q, k, v, bias=bias)[0]
    wanting = [x for x in inputs if not x.stop_gradient]
    for x, y in zip(wanting, paddle.grad((expected * expected).sum(), wanting)):
        close(x.grad, y)
    assert all(x.grad is None for x in inputs if x.stop_gradient)


def test_no_grad_and_detached_outputs():
    q, k, v = qkv()
    with paddle.no_grad():
        assert tp.attention(q, k, v).stop_gradient
    assert not tp.attention(q, k, v).stop_gradient
    assert tp.attention(*(x.detach() for x in (q, k, v))).stop_gradient
    o, max_logit = tp.attention(q, k, v, return_max_logit=True)
    assert max_logit.stop_gradient and not o.stop_gradient


def test_merge_is_differentiable():
    q, k, v = qkv(s=8)
    parts = [tp.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 3), (3, 8))]
    hidden = paddle.ones([1, 1, 8, 8], "bool")
    parts.append(tp.attention(q, k, v, drop=hidden, return_lse=True))  # sees nothing
    o, lse = tp.merge(parts)
    whole = tp.attention(q, k, v, return_lse=True)
    close(o, whole[0])
    close(lse, whole[1])
    found = [paddle.grad((a ** 2).sum() + b.sin().sum(), [q, k, v]) for a, b in ((o, lse), whole)]
    for x, y in zip(*found):
        close(x, y)


def test_merge_in_fp32():
    parts = [tensors([2, 5, 4, 8], seed=seed, dtype="bfloat16") + tensors([2, 4, 5], seed=seed + 2) for seed in (1, 2)]
    o, lse = tp.merge(parts, out_dtype=paddle.float32)
    assert o.dtype == paddle.float32
    close(o, tp.merge([(o.astype("float32"), lse) for o, lse in parts])[0], 1e-6)
    found = paddle.grad(o.sum(), [x for part in parts for x in part])
    assert [x.dtype for x in found] == [paddle.bfloat16, paddle.float32] * 2
    with pytest.raises(ValueError, match="tessera.merge: o.dtype=fp16"):
        tp.merge(parts, out_dtype="float16")


def test_dropout_mask_of_a_part():
    """A block of sequences, heads, rows and keys has the bits of the whole."""
    whole = tp.dropout_mask(3, 4, 60, 70, 0.4, (5, 1))
    starts = paddle.to_tensor([3, 16], dtype="int32"), paddle.to_tensor([37, 0], dtype="int64")
    part = tp.dropout_mask(2, 2, 40, 33, 0.4, (5, 1, 1 * 4 + 2, 4), q_start=starts[0], k_start=starts[1])
    for n, (i, j) in enumerate(zip(*(x.tolist() for x in starts))):
        assert (part[n] == whole[1 + n, 2:, i:i + 40, j:j + 33]).all()


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
def test_merge_in_every_layout(layout):
    axes = {"bshd": [0, 1, 2, 3], "sbhd": [1, 0, 2, 3], "bhsd": [0, 2, 1, 3], "thd": None}[layout]
    q, k, v = qkv(b=1 if layout == "thd" else 2, hk=4)
    def form(x):
        return x[0] if layout == "thd" else x.transpose(axes)

    def run(a, b):
        more = {}
        if layout == "thd":
            more = dict(cu_seqlens_q=paddle.to_tensor([0, 7], dtype="int32"),
                        cu_seqlens_k=paddle.to_tensor([0, b - a], dtype="int32"))
        return tp.attention(form(q), form(k[:, a:b]), form(v[:, a:b]), layout=layout, return_lse=True,
                            **more)
    merged, whole = tp.merge([run(0, 3), run(3, 7)], layout=layout), run(0, 7)
    for x, y in zip(merged, whole):
        close(x, y)
    for x, y in zip(*(paddle.grad((o * o).sum() + lse.sum(), [q, k, v]) for o, lse in (merged, whole))):
        close(x, y)


def test_one_row_of_packed_sequences_is_thd():
    q, k, v = qkv(b=1, hk=4)
    cu = paddle.to_tensor([0, 3, 7], dtype="int32")
    kw = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)
    o, lse = tp.attention(q[0], k[0], v[0], layout="thd", **kw)
    row, row_lse = tp.attention(*(x.transpose([0, 2, 1, 3]) for x in (q, k, v)), layout="bhsd", **kw)
    close(row.transpose([0, 2, 1, 3])[0], o)
    close(row_lse[0], lse)
    for x, y in zip(*(paddle.grad((a * a).sum() + b.sum(), [q, k, v]) for a, b in ((row, row_lse), (o, lse)))):
        close(x, y)


def test_attention_backward_and_grads_into_slices():
    qkv_, = tensors([2, 7, 3, 4, 8])
    q, k, v = qkv_.detach().unbind(2)
    assert q.strides == [672, 96, 8, 1]  # a view
    o, lse = tp.attention(q, k, v, causal=True, return_lse=True)
    do = paddle.randn(o.shape)
    new = tp.attention_backward(do, q, k, v, o, lse, causal=True)
    into = paddle.zeros_like(qkv_)
    g = tp.attention_backward(do, q, k, v, o, lse, causal=True,
                              grads=dict(zip(("dq", "dk", "dv"), into.unbind(2))))
    for x, y, z in zip((new.dq, new.dk, new.dv), into.unbind(2), (g.dq, g.dk, g.dv)):
        assert bool((x == y).all()) and bool((x == z).all())
    assert new.dbias is None
    o = tp.attention(*qkv_.unbind(2), causal=True)
    close(paddle.grad(o, [qkv_], do)[0], into)


def test_out():
    q, k, v = (x.detach() for x in qkv())
    expected = tp.attention(q, k, v)
    buffer = paddle.zeros([2, 7, 3, 4, 8])
    o = tp.attention(q, k, v, out=buffer[:, :, 1])
    assert bool((buffer[:, :, 1] == expected).all()) and bool((o == expected).all())
    assert float(buffer[:, :, 0].abs().max()) == float(buffer[:, :, 2].abs().max()) == 0
    with pytest.raises(ValueError, match="out="):
        tp.attention(*qkv(), out=buffer[:, :, 1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype):
    q, k, v = qkv(dtype=dtype)
    wide = [x.detach().astype("float32") for x in (q, k, v)]
    o = tp.attention(q, k, v, causal=True)
    close(o.astype("float32"), by_operations(*wide, CAUSAL)[0], 2e-2)
    gradients = paddle.grad(o, [q, k, v], paddle.ones(o.shape).astype(dtype))
    assert all(g.dtype == q.dtype for g in gradients)


# ---- what goes together ----

@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_with_dropout_is_bitwise_the_same(reentrant):
    from paddle.distributed.fleet.utils import recompute

    def attend(q, k, v):
        return tp.attention(q * 1, k, v, dropout_p=0.3)

    results = []
    for call in (attend, lambda *x: recompute(attend, *x, use_reentrant=reentrant)):
        q, k, v = qkv()
        paddle.seed(9)
        o = call(q, k, v)
        o.square().sum().backward()
        results.append((o, q.grad, k.grad, v.grad))
    for x, y in zip(*results):
        assert bool((x == y).all())


def test_dropout_follows_paddles_generator():
    q, k, v = (x.detach() for x in qkv(s=32))
    paddle.seed(3)
    first, second = tp.attention(q, k, v, dropout_p=0.5), tp.attention(q, k, v, dropout_p=0.5)
    paddle.seed(3)
    assert bool((tp.attention(q, k, v, dropout_p=0.5) == first).all())
    assert bool((first != second).any())
    state = paddle.to_tensor([5, 6], dtype="int64")
    keep = tp.dropout_mask(2, 4, 32, 32, 0.5, state)
    assert keep.dtype == paddle.bool and 0.4 < float(keep.astype("float32").mean()) < 0.6
    assert np.array_equal(keep.numpy(), tessera.dropout_mask(2, 4, 32, 32, 0.5, (5, 6)))
    assert bool((tp.attention(q, k, v, dropout_p=0.5, rng_state=state) ==
                 tp.attention(q, k, v, dropout_p=0.5, rng_state=(5, 6))).all())


def test_autocast(monkeypatch):
    """amp has no effect on the CPU, so its answer is given here."""
    monkeypatch.setattr(_tensors, "autocast_dtype", lambda: "bfloat16")
    q, k, v, bias = [*qkv(), *tensors([4, 7, 7], seed=5)]
    o = tp.attention(q, k, v, bias=bias)
    assert o.dtype == paddle.bfloat16
    gradients = paddle.grad(o, [q, k, v, bias], paddle.ones(o.shape).astype("bfloat16"))
    assert all(g.dtype == paddle.float32 for g in gradients)


def test_threads():
    q, k, v = qkv(s=33)
    expected = tp.attention(q, k, v, causal=True)
    gradients = paddle.grad(expected.square().sum(), [q, k, v])
    wrong = []

    def work():
        for _ in range(20):
            own = [x.detach() for x in (q, k, v)]
            for x in own:
                x.stop_gradient = False
            o = tp.attention(*own, causal=True)
            o.square().sum().backward()
            same = [o, *(x.grad for x in own)]
            wrong.extend(i for i, (x, y) in enumerate(zip(same, [expected, *gradients]))
                         if not bool((x == y).all()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("lse", [False, True])
def test_contexts_are_freed(lse):
    """Without a backward pass too: a context that saved its own output would live for ever."""
    q, = tensors([1, 1024, 4, 64])

    def peak(n):
        for _ in range(n):
            tp.attention(q, q, q, window=(8, 0), align="top_left", return_lse=lse)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = peak(10)
    assert peak(100) - before < 20 << 10  # KiB; a leak is 100 MiB


def test_views_are_used_where_they_are():
    x, = tensors([3, 5, 4, 8])
    view = x.detach().transpose([1, 0, 2, 3])
    assert not view.is_contiguous()
    o = tp.attention(view, view, view, causal=True)
    assert bool((o == tp.attention(*(view.contiguous(),) * 3, causal=True)).all())
    sbhd = tp.attention(*(x.detach(),) * 3, layout="sbhd", causal=True)
    assert bool((sbhd.transpose([1, 0, 2, 3]) == o).all())


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8)])
def test_empty(shape):
    q, k, v = tensors(*(shape,) * 3)
    o, lse = tp.attention(q, k, v, return_lse=True)
    (o.sum() + lse.sum()).backward()
    assert o.shape == q.grad.shape == list(shape) and lse.shape == [shape[0], 2, shape[1]]
    q, = tensors([2, 3, 2, 8])
    k, v = tensors([2, 0, 2, 8], [2, 0, 2, 8])
    o = tp.attention(q, k, v)
    o.sum().backward()
    assert float(o.abs().sum()) == float(q.grad.abs().sum()) == 0 and k.grad.shape == [2, 0, 2, 8]


def test_pages_packed_and_pairs_agree_with_numpy():
    random = np.random.default_rng(0)
    q = random.standard_normal((2, 1, 4, 8), np.float32)
    pool = random.standard_normal((5, 4, 2, 8), np.float32)
    tables = np.array([[4, 1, 2], [0, 3, 0]], np.int32)
    lens = np.array([10, 6], np.int32)
    own = dict(page_table=tables, seqlens_k=lens, causal=True, align="bottom_right")
    theirs = {name: to_paddle(x) if isinstance(x, np.ndarray) else x for name, x in own.items()}
    expected = tessera.attention(q, pool, pool, **own)
    o = tp.attention(*(to_paddle(x) for x in (q, pool, pool)), **theirs)
    assert np.array_equal(o.numpy(), expected)
    ids = np.array([[0, 0, 1, 1, 2]], np.int32)
    x = random.standard_normal((1, 5, 2, 8), np.float32)
    expected = tessera.attention(x, x, x, segment_ids=(ids, ids[:, ::-1].copy()))
    t, i = to_paddle(x), to_paddle(ids)
    t.stop_gradient = False
    o = tp.attention(t, t, t, segment_ids=(i, i.flip(1)))
    o.sum().backward()
    assert np.array_equal(o.detach().numpy(), expected)


def test_one_length_tensor_for_both_sides_needs_no_align():
    q, k, v = qkv()
    lens = paddle.to_tensor([3, 7], dtype="int32")
    o = tp.attention(q, k, v, seqlens_q=lens, seqlens_k=lens, causal=True)
    o.sum().backward()  # the identity survives what autograd saves
    with pytest.raises(ValueError, match="align"):
        tp.attention(q, k, v, seqlens_q=lens, seqlens_k=lens.clone(), causal=True)


def test_explain():
    q, k, v = qkv()
    assert tp.explain(q, k, v, causal=True).backend == "cpu"
    assert tp.explain(q, k, v, backward=True, dropout_p=0.1).backend == "cpu"
    assert tp.explain("fwd bf16 b=1 s=64 h=2 d=64", device="sm90").reasons
    specs = [paddle.static.InputSpec(x.shape, x.dtype) for x in (q, k, v)]
    for given in ({}, {"causal": True, "dropout_p": 0.1}, {"backward": True}):
        assert tp.explain(*specs, **given).answer == tp.explain(q, k, v, **given).answer
    with pytest.raises(ValueError, match=r"q.shape=\[-1"):
        tp.explain(paddle.static.InputSpec([-1, 7, 4, 8], "float32"), *specs[1:])
    with pytest.raises(ValueError, match="q="):
        tp.attention(*specs)
    with pytest.raises(ValueError, match="k.shape"):
        tp.explain(q, k[..., :3], v)


def test_utilities_take_what_tesseras_do():
    signatures.assert_utilities_are_tesseras(tp)


@pytest.mark.parametrize("name, arguments, message", signatures.WRONG_UTILITIES)
def test_utilities_say_what_tesseras_do(name, arguments, message):
    signatures.assert_says(tp, name, arguments, message)


def test_signatures_name_every_keyword():
    for function, table in ((tp.attention, _keywords.FORWARD),
                            (tp.attention_backward, _keywords.BACKWARD)):
        parameters = inspect.signature(function).parameters
        assert set(table) <= set(parameters)
        for name in table:
            assert f"\n{name}=" in function.__doc__
    assert set(tessera.__all__) - set(tp.__all__) == {
        "backends", "set_num_threads", "Gradients", "Explanation", "__version__",
        "rotate", "rope_table", "append_kv"}  # of serving, which is NumPy's and PyTorch's


def test_deterministic_follows_the_flag(monkeypatch):
    if paddle.is_compiled_with_cuda():
        pytest.skip("the flag is read from Paddle")
    assert not _tensors.is_deterministic()
    monkeypatch.setenv("FLAGS_cudnn_deterministic", "1")
    assert _tensors.is_deterministic()


# ---- the example ----

def test_example_trains(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples/paddle")
    import train_gpt
    results = train_gpt.main(["--width", "32", "--heads", "2", "--layers", "2", "--context", "64",
                              "--batch", "2", "--steps", "12"])
    losses, others = results["tessera"][0], results["sdpa"][0]
    assert losses == pytest.approx(others, abs=2e-3) and losses[-1] < losses[0]


def test_example_starts_from_pytorchs_weights(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples/paddle")
    import train_gpt
    model = train_gpt.GPT(32, 2, 1, 16, train_gpt.tessera_attention)
    start = {name: np.random.default_rng(1).standard_normal(
        x.shape[::-1] if "norm" not in name and name not in ("token.weight", "position.weight")
        else x.shape).astype(np.float32) for name, x in model.state_dict().items()}
    model.load_torch(start)
    x = paddle.randn([3, 32])
    close(model.blocks[0].qkv(x), paddle.to_tensor(
        x.numpy() @ start["blocks.0.qkv.weight"].T + start["blocks.0.qkv.bias"]))


# ---- CUDA: wherever a build of Paddle has it ----

needs_cuda = pytest.mark.skipif(
    not paddle.is_compiled_with_cuda() or paddle.device.cuda.device_count() == 0 or
    not any(name.startswith("cuda") for name in tessera.backends()),
    reason="needs a CUDA build of Paddle and of tessera")


@needs_cuda
def test_cuda():
    q, k, v = (x.detach().cuda() for x in qkv(s=64, d=64, dtype="bfloat16"))
    for x in (q, k, v):
        x.stop_gradient = False
    with paddle.device.stream_guard(paddle.device.Stream()):
        o, lse = tp.attention(q, k, v, causal=True, return_lse=True, dropout_p=0.1, rng_state=(1, 2))
        gradients = paddle.grad(o.astype("float32").sum() + lse.sum(), [q, k, v])
    paddle.device.synchronize()
    on_cpu = [x.detach().cpu() for x in (q, k, v)]
    for x in on_cpu:
        x.stop_gradient = False
    expected, expected_lse = tp.attention(*on_cpu, causal=True, return_lse=True, dropout_p=0.1,
                                          rng_state=(1, 2))
    close(o.cpu(), expected, 2e-2)
    close(lse.cpu(), expected_lse, 1e-2)
    for x, y in zip(gradients, paddle.grad(expected.astype("float32").sum() + expected_lse.sum(),
                                           on_cpu)):
        close(x.cpu(), y, 5e-2)


@needs_cuda
def test_one_device():
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(ValueError, match="k.device"):
        tp.attention(q.cuda(), k.cpu(), v.cuda())
    with pytest.raises(ValueError, match="q.place"):
        tp.attention(q.pin_memory(), k, v)


def test_no_keyword_is_ignored(monkeypatch):
    def ones(shape, dtype):
        return paddle.ones(shape, dtype=dtype)
    assert every_keyword.ignored(monkeypatch, tp, ones) == []


def test_a_keyword_is_one_row(tmp_path):
    every_keyword.add_a_row(tmp_path, "tessera.paddle", "paddle")


def test_one_length_tensor_stays_one_where_saved_tensors_are_copied():
    """An offload's copies of a tensor that was saved twice would be two."""
    q, k, v = tensors(*[[2, 4, 2, 8]] * 3)
    lengths = paddle.to_tensor([4, 2], dtype="int32")
    pack, unpack = (lambda x: x.numpy()), paddle.to_tensor
    with paddle.autograd.saved_tensors_hooks(pack, unpack):
        o = tp.attention(q, k, v, causal=True, seqlens_q=lengths, seqlens_k=lengths)
    found = paddle.grad(o.sum(), [q, k, v])
    o = tp.attention(q, k, v, causal=True, seqlens_q=lengths, seqlens_k=lengths)
    for x, y in zip(found, paddle.grad(o.sum(), [q, k, v])):
        assert float((x - y).abs().max()) == 0
