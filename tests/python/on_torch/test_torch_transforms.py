# SPDX-License-Identifier: Apache-2.0
"""torch.func on tessera.torch: vmap in one call, per-example gradients, what has no rule."""
import pytest

torch = pytest.importorskip("torch")

import tessera.torch as tt  # noqa: E402
from tessera.torch._ops import _vmap  # noqa: E402

N, B, S, H, D = 3, 2, 5, 4, 8
PADDED = {"bshd": (B, S, H, D), "sbhd": (S, B, H, D), "bhsd": (B, H, S, D)}


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)


SORTED = torch.tensor([[0, 3], [1, 4]]).sort(-1).values.int()
# name -> (keyword, what one example has, whether it is each example's own)
OPTIONS = {
    "plain": {},
    "bias": {"bias": (normal(N, B, H, S, S), True)},
    "shared bias": {"bias": (normal(B, H, S, S), False)},
    "bias of keys": {"bias": (normal(N, S), True)},
    "bias of heads": {"bias": (normal(N, 1, H, S, 1), True), "bias_at": ("pre_scale", False)},
    "mask": {"keep": (integers(4, N, B, 1, S, S) > 0, True)},
    "shared mask": {"drop": (integers(4, S, S) == 0, False)},
    "ranges": {"key_ranges": (integers(S + 1, N, 1, 1, S, 2), True)},
    "shared ranges": {"key_ranges": (integers(S + 1, B, H, 1, 2), False)},
    "lengths": {"seqlens_q": (integers(S + 1, N, B), True), "seqlens_k": (integers(S + 1, B), False)},
    "segments": {"segment_ids": (integers(2, N, B, S), True)},
    "sink": {"sink": (normal(N, H), True)},
    "shared sink": {"sink": (normal(H), False)},
    "slopes": {"alibi_slopes": (normal(N, H), True)},
    "slopes of rows": {"alibi_slopes": (normal(B, H), False), "bias": (normal(N, 1, 1, S, S), True)},
    "band": {"causal": (True, False), "softcap": (5.0, False)},
}
LOOPED = {
    "dropout": {"dropout_p": (0.5, False), "rng_state": (torch.tensor([1, 2]), False)},
    "sink and lengths": {"sink": (normal(N, H), True), "seqlens_k": (integers(S + 1, N, B), True)},
}


def split(options):
    own = {name: x for name, (x, mine) in options.items() if mine}
    return own, {name: x for name, (x, mine) in options.items() if not mine}


def example(q, k, v, own, shared, **more):
    return tt.attention(q, k, v, **own, **shared, **more)


def each(function, *arguments):
    """What vmap means: `function` on one example after the other."""
    results = []
    for i in range(N):
        results.append(function(*(
            {name: x[i] for name, x in a.items()} if isinstance(a, dict) else
            a if dim is None else a.select(dim, i) for a, dim in arguments)))
    return [torch.stack(parts) for parts in zip(*results)]


def compare(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.fixture
def no_loop(monkeypatch):
    monkeypatch.setattr(_vmap, "_one_by_one", lambda *_: pytest.fail("computed one by one"))


@pytest.mark.parametrize("layout", PADDED)
@pytest.mark.parametrize("options", OPTIONS)
def test_one_call(layout, options, no_loop):
    own, shared = split(OPTIONS[options])
    q, k, v = (normal(N, *PADDED[layout]) + i for i in range(3))

    def function(q, k, v, own):
        return example(q, k, v, own, shared, layout=layout, return_lse=True)
    ours = torch.func.vmap(function)(q, k, v, own)
    compare(ours, each(function, (q, 0), (k, 0), (v, 0), (own, 0)))


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_of_each_example(options, no_loop):
    """Gradients of what is each example's own, and of what they share, are right."""
    own, shared = split({**OPTIONS[options], "align": ("bottom_right", False)})
    shape = PADDED["bshd"]
    q, k, v = normal(N, *shape), normal(N, *shape) + 1, normal(*shape)
    weight = normal(*shape)

    def gradient(q, k, v, own):
        more = {name: x for name, x in {**own, **shared}.items()
                if isinstance(x, torch.Tensor) and x.is_floating_point()}

        def loss(q, k, v, more):
            o, lse = example(q, k, v, {**own, **shared, **more}, {}, return_lse=True)
            return (o * weight).sum() + lse.masked_fill(lse == -torch.inf, 0).sin().sum()
        *qkv, grads = torch.func.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, more)
        return *qkv, *grads.values()
    ours = torch.func.vmap(gradient, in_dims=(0, 0, None, 0))(q, k, v, own)
    compare(ours, each(gradient, (q, 0), (k, 0), (v, None), (own, 0)))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, None, None), (-1, 1, 0), (None, 1, 1)])
def test_the_new_axis_may_be_anywhere(in_dims, no_loop):
    tensors = [normal(*PADDED["bshd"]) if dim is None else
               normal(N, *PADDED["bshd"]).movedim(0, dim) for dim in in_dims]
    tensors = [x.contiguous() if dim != -1 else x for x, dim in zip(tensors, in_dims)]

    def function(q, k, v):
        return tt.attention(q, k, v, causal=True, return_lse=True)
    compare(torch.func.vmap(function, in_dims)(*tensors), each(function, *zip(tensors, in_dims)))


def test_grouped_heads_and_max_logit(no_loop):
    q, k = normal(N, B, S, H, D), normal(N, B, S, 2, D)
    sink = normal(N, H)

    def function(q, k, sink):
        return tt.attention(q, k, k, sink=sink, return_max_logit=True)
    compare(torch.func.vmap(function)(q, k, sink), each(function, (q, 0), (k, 0), (sink, 0)))


@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("shape", [(2,), (B, 2), (1, 2), (B, 1), (1, 1), (1, 2, 1), (B, 1, 1)])
def test_scales_of_fp8_keys(shape, mine, no_loop):
    """Each example's own or shared: one a sequence, one a head, both, or one for all."""
    q, k = normal(N, B, S, H, D).bfloat16(), normal(B, S, 2, D).to(torch.float8_e4m3fn)
    scale = normal(N, *shape).abs() + 0.5

    def function(q, scale):
        blocks = (0, 128) if len(shape) == 3 else (0, 0)
        return tt.attention(q, k, k, k_scale=scale, scale_block=blocks, return_lse=True)
    arguments = (q, 0), (scale, 0) if mine else (scale[0], None)
    ours = torch.func.vmap(function, tuple(dim for _, dim in arguments))(*(x for x, _ in arguments))
    compare(ours, each(function, *arguments))


def test_packed_sequences(no_loop):
    q, cu = normal(N, 9, H, D), torch.tensor([0, 4, 9], dtype=torch.int32)
    bias, ranges = normal(N, 1, H, 5, 5), integers(6, N, H, 9, 2)

    def function(q, bias, ranges):
        return tt.attention(q, q, q, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5,
                            max_seqlen_k=5, bias=bias, key_ranges=ranges, return_lse=True)
    compare(torch.func.vmap(function)(q, bias, ranges),
            each(function, (q, 0), (bias, 0), (ranges, 0)))


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_one_row_of_packed_sequences(layout, no_loop):
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    q = {"bshd": lambda x: x, "sbhd": lambda x: x.transpose(1, 2), "bhsd": lambda x: x.transpose(2, 3)}[layout](
        normal(N, 1, 9, H, D))

    def function(q):
        def total(q):
            o, lse = tt.attention(q, q, q, layout=layout, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True,
                                  return_lse=True)
            return o.square().sum() + lse.sum(), (o, lse)
        gradient, results = torch.func.grad(total, has_aux=True)(q)
        return gradient, *results
    compare(torch.func.vmap(function)(q), each(function, (q, 0)))


def test_pages(no_loop):
    q, pool = normal(N, B, 1, H, D), normal(6, 4, 2, D)
    table, lengths = integers(6, N, B, 3), integers(13, N, B)

    def function(q, table, lengths):
        return tt.attention(q, pool, pool, page_table=table, seqlens_k=lengths, causal=True,
                            align="bottom_right", return_lse=True)
    compare(torch.func.vmap(function)(q, table, lengths),
            each(function, (q, 0), (table, 0), (lengths, 0)))


@pytest.mark.parametrize("options", LOOPED)
def test_the_rest_is_computed_one_by_one(options, monkeypatch):
    calls = []
    loop = _vmap._one_by_one
    monkeypatch.setattr(_vmap, "_one_by_one", lambda *a: (calls.append(1), loop(*a))[1])
    own, shared = split(LOOPED[options])
    q = normal(N, *PADDED["bshd"])

    def function(q, own):
        return example(q, q, q, own, shared, return_lse=True)
    compare(torch.func.vmap(function)(q, own), each(function, (q, 0), (own, 0)))
    assert calls == [1]


def test_nested():
    q = normal(2, N, *PADDED["bshd"])

    def function(q):
        return tt.attention(q, q + 1, q, causal=True)
    ours = torch.func.vmap(torch.func.vmap(function))(q)
    compare([ours], [torch.stack([torch.stack([function(x) for x in y]) for y in q])])


def test_vjp_and_jacrev():
    q = normal(1, 3, 1, 2)

    def function(q):
        return tt.attention(q, q, q).sum((0, 1, 2))
    rows = [torch.autograd.functional.jacobian(function, q)]
    compare([torch.func.jacrev(function)(q)], rows)
    o, pull = torch.func.vjp(function, q)
    compare([pull(torch.ones_like(o))[0]], [rows[0].sum(0)])


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap,
                                       lambda f: torch.func.vmap(torch.func.grad(f))],
                         ids=["grad", "vmap", "vmap of grad"])
def test_transforms_compile(transform):
    torch._dynamo.reset()
    transformed = transform(lambda q: tt.attention(q, q, q, causal=True).square().sum())
    q = normal(N, *PADDED["bshd"]) if transform is not torch.func.grad else normal(B, S, H, D)
    compiled = torch.compile(transformed, fullgraph=True, backend="aot_eager")
    compare([compiled(q)], [transformed(q)])


def test_the_operator_itself_has_a_gradient_at_every_level():
    q = normal(*PADDED["bshd"])

    def loss(x, k=q):
        o, _ = torch.ops.tessera.attention([x, k, x], [], "in=q,k,v out=o,lse")
        return o.square().sum()
    x = q.clone().requires_grad_()
    expected = torch.autograd.grad(loss(x), x)
    compare([torch.func.grad(loss)(q)], expected)
    each_k = torch.func.vmap(lambda k: torch.func.grad(loss)(q, k))(torch.stack([q, q + 1]))
    compare([each_k[0]], expected)


@pytest.mark.parametrize("transform", [
    lambda f, q: torch.func.jvp(f, (q,), (q,)), lambda f, q: torch.func.jacfwd(f)(q),
    lambda f, q: torch.func.hessian(lambda x: f(x).sum())(q)], ids=["jvp", "jacfwd", "hessian"])
def test_forward_mode_is_refused_by_name(transform):
    q = normal(1, 3, 1, 2)
    with pytest.raises(RuntimeError, match="tessera.attention: .*forward-mode.*torch.func.vjp"):
        transform(lambda x: tt.attention(x, x, x), q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(tt.Refused, match="forward-mode"):
            tt.attention(dual, q, q)
