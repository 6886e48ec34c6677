# SPDX-License-Identifier: Apache-2.0
"""DTensors in programs: modules of parallelize_module beside fully_shard, F.scaled_dot_product_attention under a patch,
and DTensors given to torch.ops.tessera. Each beside the same program on whole tensors."""
import pytest

torch = pytest.importorskip("torch")

import tessera.torch as tt  # noqa: E402
from cp_pool import Pool  # noqa: E402
from tessera._call import Call, Operand  # noqa: E402
from tessera.torch import _describe, _sharding  # noqa: E402
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")
B, S, H, D = 4, 6, 8, 8


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()


class Layer(torch.nn.Module):
    def __init__(self, hk, is_torchs):
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = (torch.nn.Linear(32, D * h) for h in (H, hk, hk))
        self.o, self.is_torchs = torch.nn.Linear(H * D, 32), is_torchs

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, D)) for linear in (self.q, self.k, self.v))
        if self.is_torchs:
            o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True,
                                               enable_gqa=True).transpose(1, 2)
        else:
            o = tt.attention(q, k, v, causal=True)
        return self.o(o.flatten(2))


def layers(rank, group, hk, is_torchs, compiled, fsdp):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if fsdp else \
        init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    whole, parts = Layer(hk, is_torchs), Layer(hk, is_torchs)
    columns = ColwiseParallel(use_local_output=False)
    keys = columns if hk >= mesh["tp"].size() else ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(parts, mesh["tp"], {"q": columns, "k": keys, "v": keys, "o": RowwiseParallel()})
    if fsdp:
        fully_shard(parts, mesh=mesh["dp"])
    torch._dynamo.reset()
    run = torch.compile(parts, backend="aot_eager", fullgraph=True) if compiled else parts
    x = torch.randn(B, S, 32, generator=torch.Generator().manual_seed(2))
    with tt.patch_sdpa():
        want, found = whole(x), run(x)
    torch.testing.assert_close(found, want)
    want.square().sum().backward()
    found.square().sum().backward()
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_torchs", [False, True], ids=["tessera", "patched"])
@pytest.mark.parametrize("hk, compiled, fsdp", [
    (8, False, False), (4, True, False), (2, False, False), (2, True, False), (4, False, True), (1, False, True)])
def test_layers(pool, hk, is_torchs, compiled, fsdp):
    pool.run(layers, 4, 1, hk, is_torchs, compiled, fsdp)


def text_of(tensors, keywords, outputs):
    names, _, options, flags = _describe.sort(*tensors[:3], keywords)
    return _describe.written(names, options, flags, outputs)


def operators(rank, group, hk, letters, compiled):
    """torch.ops.tessera.attention of q, k, v, bias and sink."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(shape, generator=generator) for shape in
             ((B, S, H, D), (B, S, hk, D), (B, S, hk, D), (1, H, S, S), (H,))]
    keywords = {"bias": whole[3], "sink": whole[4], "causal": True}
    call = text_of(whole, keywords, ["o", "lse", "max_logit"])
    at = [{"b": 0, "h": 2}] * 3 + [{"h": 1}, {"h": 0}]
    places = [[Shard(own[axis]) if axis in own and x.shape[own[axis]] > 1 else Replicate() for axis in letters]
              for own, x in zip(at, whole)]
    leaves = [x.clone().requires_grad_() for x in whole]
    spread = [distribute_tensor(x, mesh, on).requires_grad_() for x, on in zip(whole, places)]

    def run(*tensors):
        return torch.ops.tessera.attention(tensors, *call)
    torch._dynamo.reset()
    want, found = run(*leaves), (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(*spread)
    if hk % (2 ** letters.count("h")) == 0 or hk == 1:
        assert found[0].placements == tuple(places[0])
    for ours, theirs in zip(found, want):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    (want[0].square().sum() + want[1].sum()).backward()
    (found[0].full_tensor().square().sum() + found[1].full_tensor().sum()).backward()
    for ours, theirs in zip(spread, leaves):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("letters", ["bh", "hb", "hh", "b-", "-h", "--"])
@pytest.mark.parametrize("hk", [8, 2, 1])
def test_operators(pool, hk, letters):
    pool.run(operators, 4, 1, hk, letters, False)


def test_axes_that_strategies_share_out():
    call = Call.of("in=q,k,v,bias,alibi_slopes,k_scale format_q=thd format_kv=sbhd out=o,lse,max_logit")

    def axes(name, *shape):
        return _sharding._axes_of(call, Operand((name,)), shape)
    assert axes("q", 9, 4, 8) == {"h": 1} and axes("k", 5, 2, 4, 8) == {"b": 1, "h": 2}
    assert axes("bias", 2, 1, 5, 5) == {"b": 0} and axes("bias", 4, 5, 5) == {"h": 0}
    assert axes("alibi_slopes", 4) == axes("k_scale", 4) == {"h": 0}
    assert axes("k_scale", 2, 4) == axes("k_scale", 2, 4, 7) == {"b": 0, "h": 1} and axes("k_scale") == {}
    assert [_sharding._axes_of(call, Operand((name,)), None) for name in ("o", "lse", "max_logit", "amax_o")] == \
        [{"h": 1}, {"h": 0}, {"h": 0}, {}]


def test_operators_compiled(pool):
    pool.run(operators, 4, 1, 4, "bh", True)


def operators_of_parts(rank, group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(6)
    whole = [torch.randn(B, S, H, D, generator=generator) for _ in range(3)]

    def merged(q, k, v):
        halves = [tt.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 3), (3, 6))]
        return tt.merge(halves)[0]
    for place in (Shard(0), Shard(2)):
        leaves = [x.clone().requires_grad_() for x in whole]
        spread = [distribute_tensor(x, mesh, [place]).requires_grad_() for x in whole]
        found, want = merged(*spread), merged(*leaves)
        assert found.placements == (place,)
        torch.testing.assert_close(found.full_tensor(), want)
        want.square().sum().backward()
        found.full_tensor().square().sum().backward()
        torch.testing.assert_close(spread[1].grad.full_tensor(), leaves[1].grad, rtol=1e-4, atol=1e-5)
    # A mask that counts heads is computed by every rank alike.
    states = torch.tensor([3, 4])
    call = text_of(whole, {"dropout_p": 0.3, "rng_state": states}, ["o", "lse"])
    spread = [distribute_tensor(x, mesh, [Shard(2)]) for x in whole]
    found = torch.ops.tessera.attention([*spread, distribute_tensor(states, mesh)], *call)[0]
    torch.testing.assert_close(found.full_tensor(), tt.attention(*whole, dropout_p=0.3, rng_state=(3, 4)))
    with pytest.raises(RuntimeError, match="shards the sequence; use tessera.torch.context_parallel.attention"):
        torch.ops.tessera.attention([distribute_tensor(x, mesh, [Shard(1)]) for x in whole],
                                    *text_of(whole, {}, ["o", "lse"]))


def test_operators_of_parts(pool):
    pool.run(operators_of_parts, 2, 1)
