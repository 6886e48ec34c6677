# SPDX-License-Identifier: Apache-2.0
"""DTensors of tensor and data parallelism beside the same call of whole tensors."""
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
    with pytest.raises(tt.Refused, match="hq=3, hk=3: must be multiples of the 2 ranks"):
        tt.attention(*spread(Shard(1), q[:, :3], q[:, :3], q[:, :3]), layout="bhsd")
    with pytest.raises(tt.Refused, match="dropout_p"):
        tt.attention(*spread(Shard(0), q, k, v), layout="bhsd", dropout_p=0.1)
    with pytest.raises(ValueError, match="k=Tensor: q, k and v must all be DTensors"):
        tt.attention(*spread(Shard(0), q), k, v, layout="bhsd")


def test_drop_in_and_refusals(pool):
    pool.run(drop_in_and_refusals, 4, 1)
