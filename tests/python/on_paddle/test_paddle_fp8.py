# SPDX-License-Identifier: Apache-2.0
"""tessera.paddle of fp8 q, k, v and do: eager, in a static graph and explained, what it has no gradient of. That
values are right is for the cases (check --through paddle)."""
import pytest

paddle = pytest.importorskip("paddle")

import tessera.paddle as tp  # noqa: E402

E4M3, E5M2 = paddle.float8_e4m3fn, paddle.float8_e5m2
B, S, H, D = 3, 70, 2, 16


def stored(seed, *shape, dtype=E4M3):
    paddle.seed(seed)
    return paddle.randn(shape or (B, S, H, D)).astype(dtype)


def qkv():
    return [stored(seed) for seed in range(3)]


def uniform(seed, *shape):
    paddle.seed(seed)
    return paddle.uniform(shape, min=0.5, max=2.0)


def at(x, scale):
    """The values of x [b, s, h, d] beside a scale [b, h]."""
    return x.astype("float32") * scale[:, None, :, None]


def equal(a, b):
    assert a.dtype == b.dtype
    return bool((a.astype("float32") == b.astype("float32")).all())


def test_results_are_those_of_the_values():
    (q, k, v), do, scale = qkv(), stored(7, dtype=E5M2), uniform(3, B, H)
    o_scale = paddle.full([1], 0.25)
    scales = dict(q_scale=scale, k_scale=scale, v_scale=scale, causal=True)
    o, lse, amax = tp.attention(q, k, v, **scales, out_dtype=E4M3, o_scale=o_scale, return_lse=True, return_amax=True)
    values = [at(x, scale) for x in (q, k, v)]
    wide, rows = tp.attention(*values, causal=True, return_lse=True)
    assert equal(o, (wide / o_scale).astype(E4M3)) and equal(lse, rows) and equal(amax, wide.abs().max())
    g = tp.attention_backward(do, q, k, v, o, lse, **scales, do_scale=scale, o_scale=o_scale, grad_dtype=E5M2,
                              dq_scale=o_scale, dk_scale=o_scale, dv_scale=o_scale, return_amax=True)
    truth = tp.attention_backward(at(do, scale), *values, o.astype("float32") * o_scale, rows, causal=True)
    for name in ("dq", "dk", "dv"):
        expected = getattr(truth, name)
        assert equal(getattr(g, name), (expected / o_scale).astype(E5M2)), name
        assert equal(getattr(g, f"amax_{name}"), expected.abs().max()), name


def test_results_of_the_callers():
    q, k, v = qkv()
    o = paddle.empty([B, S, H, D], E4M3)
    returned, amax = tp.attention(q, k, v, out_dtype=E4M3, out=o, return_amax=True)
    assert returned is o and equal(o, tp.attention(q, k, v, out_dtype=E4M3))
    wide, lse = tp.attention(q, k, v, return_lse=True)
    dk = paddle.empty([B, S, H, D], E5M2)
    g = tp.attention_backward(wide, q, k, v, wide, lse, grads={"dk": dk}, grad_dtype=E5M2, return_amax=True)
    expected = tp.attention_backward(wide, q, k, v, wide, lse, grads=("dk",), grad_dtype=E5M2, return_amax=True)
    assert g.dk is dk and equal(dk, expected.dk) and equal(g.amax_dk, expected.amax_dk)


@pytest.mark.parametrize("more", [{}, {"return_lse": True}, {"return_amax": True},
                                  {"return_lse": True, "return_amax": True}], ids=str)
def test_a_graph_computes_what_eager_calls_do(more):
    if not hasattr(paddle.static, "register_op"):
        pytest.skip("needs Paddle 3.3")
    arrays, scale = qkv(), uniform(3, B, H)

    def function(q, k, v, scale):
        return tp.attention(q, k, v, q_scale=scale, causal=True, **more)
    results = paddle.jit.to_static(function, full_graph=True)(*arrays, scale)
    expected = function(*arrays, scale)
    if not more:
        results, expected = [results], [expected]
    for ours, theirs in zip(results, expected, strict=True):
        assert equal(ours, theirs) and ours.shape == theirs.shape


def test_has_no_autograd():
    q, k, v = qkv()
    why = "q.dtype=float8_e4m3fn: has no autograd.*paddle.no_grad.* and tessera.paddle.attention_backward"
    sink = paddle.zeros([H])
    sink.stop_gradient = False
    with pytest.raises(tp.Refused, match=why):
        tp.attention(q, k, v, sink=sink)
    k.stop_gradient = False
    with pytest.raises(tp.Refused, match=why):
        tp.attention(q, k, v)
    with paddle.no_grad():
        assert tp.attention(q, k, v).dtype == paddle.bfloat16


def test_bad_input():
    q, k, v = qkv()
    for keywords, why in ((dict(q_scale=paddle.ones([H + 1])), "q_scale"), (dict(o_scale=paddle.ones([1])), "o_scale"),
                          (dict(q_scale=paddle.ones([H]).astype("bfloat16")), "q_scale.dtype"),
                          (dict(q_scale=paddle.full([H], -1.0)), "q_scale")):
        with pytest.raises(ValueError, match=why):
            tp.attention(q, k, v, **keywords)
    with pytest.raises(ValueError, match="amax"):
        tp.attention(*(x.astype("bfloat16") for x in (q, k, v)), return_amax=True)


def test_is_explained():
    q, k, v = qkv()
    scale = uniform(3, B, H)
    for keywords in (dict(out_dtype=E4M3, return_amax=True), dict(backward=True, grad_dtype=E5M2, return_amax=True),
                     dict(backward=True, do_scale=scale, o_scale=paddle.ones([1]))):
        explained = tp.explain(q, k, v, q_scale=uniform(3, B, H), device="cpu", **keywords)
        assert explained.backend == "cpu" and "e4m3" in explained.answer["case"]


def test_products_in_fp8_and_their_gradients():
    q, k, v, do = (stored(seed, dtype="bfloat16") for seed in range(4))
    for x in (q, k, v):
        x.stop_gradient = False
    words = dict(precision="fp8", causal=True)
    o, lse = tp.attention(q, k, v, return_lse=True, **words)
    got = paddle.grad(o, [q, k, v], do)
    g = tp.attention_backward(do, q.detach(), k.detach(), v.detach(), o.detach(), lse.detach(), **words)
    for a, b in zip(got, (g.dq, g.dk, g.dv)):
        assert equal(a, b)
    assert not equal(o, tp.attention(q, k, v, causal=True))
