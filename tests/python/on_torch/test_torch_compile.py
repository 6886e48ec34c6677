# SPDX-License-Identifier: Apache-2.0
"""tessera.torch under opcheck and torch.compile."""
import pytest

torch = pytest.importorskip("torch")

import tessera.torch as tt  # noqa: E402
from tessera._call import Call  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


def qkv(s, d=8, dtype=torch.float32):
    return [torch.randn(2, s, 2, d, dtype=dtype, requires_grad=True) for _ in range(3)]


def test_opcheck():
    q, k, v = qkv(7)
    bias, sink = torch.randn(7, 7, requires_grad=True), torch.randn(2, requires_grad=True)
    forward = "in=q,k,v,bias,sink align=given shift=$0 causal=True out=o,lse,max_logit"
    tensors = [q, k, v, bias, sink]
    torch.library.opcheck(tt._ops.attention, (tensors, [2], forward))
    tensors = [x.detach() for x in tensors]
    o, lse, peak = tt._ops.attention(tensors, [2], forward)
    backward = Call.of(forward).backward((0, 1, 2, 3, 4), False).text
    torch.library.opcheck(tt._ops.attention_backward, ([torch.ones_like(o), o, lse, *tensors], [2], backward))
    torch.library.opcheck(tt._ops.attention_into_op, ([torch.empty_like(x) for x in (o, lse, peak)], tensors, [2],
                                                      forward))
    parts = [o.requires_grad_()] * 2, [lse.requires_grad_()] * 2
    torch.library.opcheck(tt._ops.merge, (*parts, 0))
    torch.library.opcheck(tt._ops.dropout_mask, (torch.tensor([1, 2]), 2, 2, 7, 7, 0.5))


@pytest.mark.parametrize("keywords", [
    dict(causal=True, return_lse=True), dict(window=(4, 4), align="top_left", softcap=20.0),
    dict(sink="off_by_one", softmax_scale=0.3), dict(layout="sbhd"), dict(dropout_p=0.2)])
def test_compiled_equals_eager_at_every_length_without_recompiling(keywords):
    def function(q, k, v):
        results = tt.attention(q, k, v, **keywords)
        results = results if isinstance(results, tuple) else (results,)
        return sum(x.sin().sum() for x in results)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for s in (5, 6, 7, 16, 17, 31, 32, 64, 100, 255):
        arguments = qkv(s)
        results = []
        for run in (compiled, function):
            torch.manual_seed(s)
            with torch.compiler.set_stance("default" if s == 5 else "fail_on_recompile"):
                loss = run(*arguments)
            results.append((loss, *torch.autograd.grad(loss, arguments)))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend, checkpointed", [("aot_eager", False), ("aot_eager", True),
                                                   ("inductor", False)])
def test_what_is_computed_again_drops_the_same(backend, checkpointed):
    """At a budget of 0 the backward pass computes everything again, from the inputs alone."""
    def function(q, k, v):
        return 2 * tt.attention(q.sin(), k.cos(), v, dropout_p=0.3)


    def run(q, k, v):
        return checkpoint(function, q, k, v, use_reentrant=False) if checkpointed else function(q, k, v)
    q, k, v = qkv(16)
    do = torch.randn(q.shape)
    seen = []
    for budget in (0.0, 1.0):
        torch._dynamo.reset()
        torch.manual_seed(3)
        # Caches do not know budgets.
        with torch._functorch.config.patch(activation_memory_budget=budget), \
                torch.compiler.config.patch(force_disable_caches=True):
            compiled = torch.compile(run, fullgraph=True, backend=backend)
            for _ in range(2):
                o = compiled(q, k, v)
                dv, = torch.autograd.grad(o, v, do)
                # o is linear in v, so <dv, v> = <do, o> only if both passes dropped the same entries
                torch.testing.assert_close((dv * v).sum(), (do * o).sum(), rtol=1e-4, atol=1e-3)
                seen.append(o.detach())
    assert not torch.equal(seen[0], seen[1])
    for i in (2, 3):
        torch.testing.assert_close(seen[i], seen[i % 2])


def test_packed_sequences_compile_with_a_changing_max_seqlen():
    def function(q, k, v, cu, longest):
        return tt.attention(q, k, v, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True,
                            max_seqlen_q=longest, max_seqlen_k=longest)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for longest in (4, 9, 11, 30):
        cu = torch.tensor([0, 3, 3 + longest], dtype=torch.int32)
        x = torch.randn(3 + longest, 2, 8)
        with torch.compiler.set_stance("default" if longest == 4 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(x, x, x, cu, longest),
                                       function(x, x, x, cu, longest))


def test_out_under_compile():
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in qkv(16))

    def function(q, out):
        tt.attention(q.sin(), k, v, causal=True, out=out[..., 0])
        return out.cos()
    a, b = (torch.zeros(*q.shape[:-1], 2, q.shape[-1]).movedim(-2, -1) for _ in range(2))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, a), function(q, b))
    torch.testing.assert_close(a, b)
    assert a[..., 0].any() and not a[..., 1].any()


def test_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: tt.attention(q * 2, k, v.sin(), causal=True).cos(),
                             fullgraph=True)
    q, k, v = qkv(33)
    torch.testing.assert_close(compiled(q, k, v),
                               tt.attention(q * 2, k, v.sin(), causal=True).cos())
    torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))


@pytest.mark.parametrize("dtype, keywords, message", [
    (torch.float64, {}, "no backend supports this problem"),
    (torch.float32, {"softcap": -1.0}, "softcap=-1"),
    (torch.float32, {"bias": torch.zeros(3, 9)}, r"bias.shape"),
])
def test_refused_at_trace_time(dtype, keywords, message):
    torch._dynamo.reset()
    traced = torch.compile(lambda *x: tt.attention(*x, **keywords), fullgraph=True,
                           backend="aot_eager")
    with pytest.raises(Exception, match=message), torch._subclasses.fake_tensor.FakeTensorMode() as m:
        tt.attention(*(m.from_tensor(x.detach()) for x in qkv(8, dtype=dtype)),
                     **{name: m.from_tensor(x) if isinstance(x, torch.Tensor) else x
                        for name, x in keywords.items()})
    with pytest.raises(Exception, match=message):
        traced(*qkv(8, dtype=dtype))
