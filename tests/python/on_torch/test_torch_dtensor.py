# SPDX-License-Identifier: Apache-2.0
"""DTensors of tensor and data parallelism beside the same call of whole tensors: tessera.torch.attention. The
operators and programs around them are test_torch_dtensor_programs'."""
import pytest

torch = pytest.importorskip("torch")

import tessera.torch as tt  # noqa: E402
from cp_pool import Pool  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")
B, S, H, D = 4, 6, 4, 8
CASES = {  # layout, hk, keywords
    "plain": ("bshd", 4, {}), "causal": ("bhsd", 4, {"causal": True}), "gqa": ("sbhd", 2, {}),
    "one kv head": ("bshd", 1, {"causal": True}),
    "bias": ("bshd", 4, {"bias": (B, H, S, S)}), "bias of all": ("bshd", 4, {"bias": (1, 1, S, S)}),
    "sink, slopes": ("bhsd", 2, {"sink": (H,), "alibi_slopes": (B, H), "causal": True}),
    "lengths": ("bshd", 4, {"seqlens_k": torch.tensor([3, 6, 1, 5], dtype=torch.int32)}),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()


def tensors(layout, hk, given):
    generator = torch.Generator().manual_seed(3)
    sizes = {"b": B, "s": S, "d": D}
    shapes = [[{**sizes, "h": h}[axis] for axis in layout] for h in (H, hk, hk)]
    qkv = [torch.randn(shape, generator=generator) for shape in shapes]
    return qkv, {name: torch.rand(x, generator=generator) if isinstance(x, tuple) else x
                 for name, x in given.items()}


def placed(mesh, layout, axes, replicated_kv):
    from torch.distributed.tensor import Replicate, Shard
    q = [Shard(layout.index(axis)) if axis else Replicate() for axis in axes]
    return q, [Replicate()] * len(axes) if replicated_kv else q


def compare(rank, group, name, axes, compiled):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    layout, hk, given = CASES[name]
    mesh = init_device_mesh("cpu", (2, 2))
    whole, more = tensors(layout, hk, given)
    on_q, on_kv = placed(mesh, layout, axes, hk == 1)
    names = [n for n, x in more.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    leaves = [[x.clone().requires_grad_() for x in (*whole, *(more[n] for n in names))] for _ in range(2)]
    spread = [distribute_tensor(x.detach(), mesh, places).requires_grad_()
              for x, places in zip(leaves[1], (on_q, on_kv, on_kv))]
    options = [dict(more, **dict(zip(names, one[3:])), layout=layout, return_lse=True, return_max_logit=True)
               for one in leaves]
    run = torch.compile(tt.attention, backend="aot_eager") if compiled else tt.attention
    want, found = tt.attention(*leaves[0][:3], **options[0]), run(*spread, **options[1])
    assert found[0].placements == tuple(on_q)
    for ours, theirs in zip(found, want):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    (want[0].square().sum() + want[1].sum()).backward()
    (found[0].square().sum() + found[1].sum()).redistribute(placements=[Replicate()] * len(axes)).to_local().backward()
    for ours, theirs in zip((*spread, *leaves[1][3:]), leaves[0]):
        gradient = ours.grad if type(ours.grad) is torch.Tensor else ours.grad.full_tensor()
        torch.testing.assert_close(gradient, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [("b", ""), ("", "h"), ("", ""), ("b", "h")], ids="".join)
@pytest.mark.parametrize("name", CASES)
def test_as_the_whole(pool, name, axes):
    pool.run(compare, 4, 1, name, axes, False)


@pytest.mark.parametrize("name", ["causal", "gqa", "bias"])
def test_compiled(pool, name):
    pool.run(compare, 4, 1, name, ("b", "h"), True)


def few_keys(rank, group, hq, hk, sharded, compiled):
    """Ranks whose heads of q are no whole groups, or that are more than the heads of k."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(2, S, h, D, generator=generator) for h in (hq, hk, hk)]
    for axes in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", axes)
        on_q, on_kv = [Shard(2)] * len(axes), [Shard(2) if sharded else Replicate()] * len(axes)
        leaves = [x.clone().requires_grad_() for x in whole]
        spread = [distribute_tensor(x, mesh, places).requires_grad_() for x, places in zip(whole, (on_q, on_kv, on_kv))]
        torch._dynamo.reset()
        run = torch.compile(tt.attention, backend="aot_eager", fullgraph=True) if compiled else tt.attention
        want, found = tt.attention(*leaves, causal=True), run(*spread, causal=True)
        assert found.placements == tuple(on_q)
        torch.testing.assert_close(found.full_tensor(), want)
        want.square().sum().backward()
        found.full_tensor().square().sum().backward()
        for ours, theirs in zip(spread, leaves):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole keys", "cut keys"])
@pytest.mark.parametrize("hq, hk", [(8, 2), (12, 3), (12, 6), (7, 7), (14, 7), (7, 1)])
def test_few_heads_of_keys(pool, hq, hk, sharded):
    pool.run(few_keys, 4, 1, hq, hk, sharded, False)


def test_few_heads_of_keys_compiled(pool):
    pool.run(few_keys, 4, 1, 8, 2, False, True)


def dropped(rank, group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, 2))
    whole, _ = tensors("bshd", 2, {})
    for state in ((5, 6), (5, 6, 100, 9), torch.tensor([7, 8])):
        def run(*x):
            return tt.attention(*x, dropout_p=0.3, rng_state=state)
        want = run(*whole)
        for places in ([Shard(0), Shard(2)], [Shard(2), Replicate()], [Shard(0), Shard(0)]):
            spread = [distribute_tensor(x, mesh, places) for x in whole]
            torch.testing.assert_close(run(*spread).full_tensor(), want)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: tt.attention(*x, dropout_p=0.3, rng_state=(5, 6)), backend="aot_eager",
                             fullgraph=True)
    spread = [distribute_tensor(x, mesh, [Shard(0), Shard(2)]).requires_grad_() for x in whole]
    torch.testing.assert_close(compiled(*spread).full_tensor(), tt.attention(*whole, dropout_p=0.3, rng_state=(5, 6)))
    with pytest.raises(Exception, match="rng_state=None: torch.compile draws none for DTensors; draw it before"):
        torch.compile(lambda *x: tt.attention(*x, dropout_p=0.3), backend="aot_eager", fullgraph=True)(*spread)
    torch.manual_seed(rank)  # a drawn state is that of one rank
    spread = [distribute_tensor(x, mesh, [Shard(0), Replicate()]) for x in whole]
    ours = tt.attention(*spread, dropout_p=0.3)
    kept = ours.redistribute(placements=[Replicate(), Replicate()]).to_local()
    others = kept.clone()
    torch.distributed.broadcast(others, 0)
    assert torch.equal(kept, others) and not torch.allclose(kept, tt.attention(*whole))


def test_dropout_is_that_of_the_whole(pool):
    pool.run(dropped, 4, 1)


def paged(rank, group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, 2))
    (q, k, v), _ = tensors("bshd", 2, {})
    pools = [x.reshape(B * 3, 2, 2, D) for x in (k, v)]
    keywords = {"page_table": torch.arange(12, dtype=torch.int32).flip(0).reshape(B, 3), "causal": True,
                "seqlens_k": torch.tensor([6, 3, 1, 6], dtype=torch.int32), "align": "bottom_right"}
    want = tt.attention(q, *pools, **keywords)
    for places in ([Shard(0), Shard(2)], [Shard(2), Shard(2)], [Replicate(), Shard(0)]):
        on_pool = [place if place == Shard(2) else Replicate() for place in places]
        found = tt.attention(distribute_tensor(q, mesh, places), *[distribute_tensor(x, mesh, on_pool) for x in pools],
                             **keywords)
        assert found.placements == tuple(places)
        torch.testing.assert_close(found.full_tensor(), want)


def test_pages(pool):
    pool.run(paged, 4, 1)


def drop_in_and_refusals(rank, group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, 2))
    (q, k, v), _ = tensors("bhsd", 2, {})

    def spread(place, *xs):
        return [distribute_tensor(x, mesh, [Replicate(), place]) for x in xs]
    o = tt.scaled_dot_product_attention(*spread(Shard(1), q, k, v), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(o.full_tensor(), tt.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                                 enable_gqa=True))
    assert o.placements == (Replicate(), Shard(1))
    # k and v that come placed otherwise are brought to where q is.
    o = tt.attention(*spread(Shard(1), q), *spread(Replicate(), k, v), layout="bhsd")
    torch.testing.assert_close(o.full_tensor(), tt.attention(q, k, v, layout="bhsd"))
    for place, text in ((Shard(2), "context_parallel.attention"), (Shard(3), "elements of a head")):
        with pytest.raises(tt.Refused, match=text):
            tt.attention(*spread(place, q, k, v), layout="bhsd")
    with pytest.raises(tt.Refused, match="leaves one of 2 ranks without a head"):
        tt.attention(*[distribute_tensor(x[:, :3], mesh, [Shard(1), Shard(1)]) for x in (q, q, q)], layout="bhsd")
    with pytest.raises(tt.Refused, match="out=DTensor"):
        tt.attention(*spread(Shard(0), q, k, v), layout="bhsd", out=spread(Shard(0), q)[0])
    with pytest.raises(ValueError, match="k=Tensor: q, k and v must all be DTensors"):
        tt.attention(*spread(Shard(0), q), k, v, layout="bhsd")
    with pytest.raises(ValueError, match="q=Tensor: q, k and v must all be DTensors"):
        tt.attention(q, *spread(Shard(0), k, v), layout="bhsd")
    parts = spread(Shard(1), q, k, v)
    with pytest.raises(tt.Refused, match="explain: q=DTensor"):
        tt.explain(*parts, layout="bhsd")
    o, lse = tt.attention(*parts, layout="bhsd", return_lse=True)
    with pytest.raises(tt.Refused, match="attention_backward: q=DTensor.*by autograd"):
        tt.attention_backward(o, *parts, o, lse, layout="bhsd")


def test_drop_in_and_refusals(pool):
    pool.run(drop_in_and_refusals, 4, 1)
