# SPDX-License-Identifier: Apache-2.0
"""Attention on several processes, over gloo or NCCL: the cases of test_cp_ranks, and what PyTorch adds."""

import datetime
import os
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import cp_pool  # noqa: E402
import cp_ranks  # noqa: E402
import tessera.torch as tt  # noqa: E402
from cp_pool import Pool  # noqa: E402
from tessera.cli import conformance  # noqa: E402
from tessera.context_parallel import Shards  # noqa: E402
from tessera.torch import context_parallel as cp  # noqa: E402
from test_cp_ranks import draw  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()


def one_fails(rank, group, x):
    assert x.device == torch.ones(1).device, "arguments lie on the rank's device"
    if rank == 1:
        raise KeyError("what rank 1 says")
    dist.all_reduce(x, group=group)
    return x.tolist()


def test_the_pool_outlives_a_rank_that_fails_alone(pool, monkeypatch):
    monkeypatch.setattr(cp_pool, "_PATIENCE", 1)
    start = time.time()
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*what rank 1 says.*without an answer: \[0\]"):
        pool.run(one_fails, 2, 1, torch.ones(3))
    assert time.time() - start < 100, "by the group's time-out"
    assert pool.run(one_fails, 1, 1, torch.ones(3)) == [[1.0] * 3]


def part(rank, group, text, shards, exchange, groups):
    with conformance.Case(text) as case:
        return cp_ranks.part_of(cp_ranks.Whole(case), shards, rank, group, exchange,
                                groups_of_heads=groups)


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_random_problems(pool, seed):
    text, size, inner, shards, exchange, groups = draw(seed)
    parts = pool.run(part, size, inner, text, shards, exchange, groups)
    with conformance.Case(text) as case:
        found = cp_ranks.verdict(cp_ranks.Whole(case), shards, parts)
    assert found["passed"], f"{text} {shards} {exchange}: {found['failures']}"


LENGTHS = [300, 77]


def whole_inputs():
    torch.manual_seed(0)
    return [torch.randn(sum(LENGTHS), h, 16) for h in (6, 2, 2)]


def three_ways(rank, group, exchange, keywords):
    """o and gradients plainly, recomputed by a checkpoint, and compiled."""
    from torch.utils.checkpoint import checkpoint
    shards = Shards.zigzag(LENGTHS, dist.get_world_size(group))
    x = [cp.shard(t, shards, group, 0).requires_grad_() for t in whole_inputs()]

    def attend(q, k, v):
        return cp.attention(q, k, v, shards=shards, group=group, layout="thd", causal=True,
                            exchange=exchange, **keywords)
    torch._dynamo.reset()
    ways = (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False),
            torch.compile(attend, fullgraph=True, backend="aot_eager"))
    results = []
    for way in ways:
        torch.manual_seed(7 + rank)  # ranks draw different states; rank 0's must win
        o = way(*x)
        results.append((o.detach(), *torch.autograd.grad(o.square().sum(), x)))
    return [[torch.equal(a, b) for a, b in zip(results[0], other)] for other in results[1:]]


@pytest.mark.parametrize("exchange", ["keys", "heads", "ring"])
def test_checkpoint_and_compile(pool, exchange):
    for ways in pool.run(three_ways, 2, 1, exchange, {"softcap": 15.0, "sink": "off_by_one",
                                                      "save_gathered": exchange == "keys"}):
        assert all(map(all, ways)), ways


def inductor(rank, group):
    shards = Shards.zigzag([200], 2)
    q = torch.randn(1, shards.extents[rank], 4, 16)

    def layer(x):
        y = x * 2
        return cp.attention(y, y, y, shards=shards, group=group, causal=True).relu()
    torch._dynamo.reset()
    return (torch.compile(layer, fullgraph=True)(q) - layer(q)).abs().max().item()


def test_inductor(pool):
    assert max(pool.run(inductor, 2, 1)) < 1e-6


def through_dtensors(rank, group, length):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = DeviceMesh.from_group(group, cp_ranks.DEVICE)
    torch.manual_seed(0)
    plain = [torch.randn(2, length, h, 16, requires_grad=True) for h in (4, 2, 2)]
    spread = [distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in plain]
    o, lse = cp.attention(*spread, causal=True, return_lse=True)
    want, want_lse = tt.attention(*plain, causal=True, return_lse=True)
    torch.testing.assert_close(o.full_tensor(), want)
    torch.testing.assert_close(lse.full_tensor(), want_lse)
    o.backward(o.detach())
    want.backward(want.detach())
    for a, b in zip(spread, plain):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


@pytest.mark.parametrize("length", [40, 37, 2])
def test_dtensors(pool, length):
    pool.run(through_dtensors, 3, 1, length)


def of_a_mesh(rank, group):
    from torch.distributed.device_mesh import DeviceMesh
    mesh = DeviceMesh(cp_ranks.DEVICE, [[0, 1], [2, 3]], mesh_dim_names=("node", "gpu"))
    shards = Shards.zigzag(LENGTHS, 4)
    x = [y[torch.from_numpy(shards.index(rank))] for y in whole_inputs()]
    keywords = dict(shards=shards, layout="thd", causal=True)
    return torch.equal(cp.attention(*x, group=mesh, **keywords),
                       cp.attention(*x, group=group, **keywords))


def test_a_mesh_of_two_axes_is_two_levels(pool):
    assert all(pool.run(of_a_mesh, 4, 2))


def disagree(rank, group):
    shards = Shards.zigzag(LENGTHS, 2)
    x = [cp.shard(t, shards, group, 0) for t in whole_inputs()]
    texts = []
    shared = dict(shards=shards, group=group, layout="thd", softmax_scale=0.123)  # of no other test
    for keywords in ({"causal": rank == 0}, {"causal": True, "softcap": [3.0, 4.0][rank]},
                     {"causal": True, "window": [(5, 0), (5, 5)][rank]}):
        if cp_ranks.DEVICE == "cpu":  # on GPUs a call that was made before is not compared again
            cp.attention(*x, causal=True, **shared)
        try:
            cp.attention(*x, **shared, **keywords)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_disagreement_is_one_error_on_every_rank(pool):
    first, second = pool.run(disagree, 2, 1)
    assert first == second and len(first) == 3
    assert "rank 1 passes causal=False, rank 0 True" in first[0]
    assert "rank 1 passes softcap=4.0, rank 0 3.0" in first[1]
    assert "window=(5, 5)" in first[2]


def tokens_differ(rank, group):
    """A mean over tokens, weighted by them, trains as one device does."""
    shards = Shards.balanced([400, 30, 20], 2)
    torch.manual_seed(0)
    project = torch.nn.Linear(8, 3 * 8)
    x = torch.randn(450, 8)
    local = cp.shard(x, shards, group, 0)
    q, k, v = project(local).view(-1, 3, 2, 4).unbind(1)
    o = cp.attention(q, k, v, shards=shards, group=group, layout="thd", causal=True)
    loss = o.square().mean() * (shards.tokens(rank) / 450)
    loss.backward()
    grad = project.weight.grad
    dist.all_reduce(grad, group=group)
    project.weight.grad = None
    q, k, v = project(x).view(-1, 3, 2, 4).unbind(1)
    cu = torch.tensor([0, 400, 430, 450], dtype=torch.int32)
    tt.attention(q, k, v, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu,
                 causal=True).square().mean().backward()
    torch.testing.assert_close(grad, project.weight.grad)


def test_loss_weights(pool):
    pool.run(tokens_differ, 2, 1)


class Inner(torch.nn.Module):
    def forward(self, q, k, v, *, scale=None, is_causal=True, enable_gqa=False):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal,
                                                                enable_gqa=enable_gqa)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.inner = torch.nn.Linear(32, 64), torch.nn.Linear(32, 32), Inner()

    def forward(self, x, positions):
        heads = self.qkv(x).view(*x.shape[:2], 8, 8).transpose(1, 2)
        q, k, v = heads.split((4, 2, 2), 1)
        # x's device is named because Dynamo of PyTorch 2.11 forgets the default one.
        angle = positions[:, None] / 100.0 ** torch.arange(4, device=x.device)
        q, k = (torch.cat([y[..., :4] * angle.cos() - y[..., 4:] * angle.sin(),
                           y[..., 4:] * angle.cos() + y[..., :4] * angle.sin()], -1) for y in (q, k))
        return x + self.out(self.inner(q, k, v, scale=0.3, enable_gqa=True).transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids, labels, positions):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def styled(rank, group, size, compiled):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module
    torch.manual_seed(0)
    model = Model()
    mesh = DeviceMesh.from_group(group, cp_ranks.DEVICE)
    ids = torch.randint(50, (2, 301))
    ids, labels = ids[:, :-1], ids[:, 1:]  # shifted before they are cut
    whole = model(ids, labels, torch.arange(300))
    want = torch.autograd.grad(whole, [*model.parameters()])
    style = cp.ContextParallel(causal=True)
    parallelize_module(model, mesh, {"layers.*.inner": style})
    with pytest.raises(ValueError, match="shards=None"):
        model(ids, labels, torch.arange(300))
    style.shards = Shards.contiguous([300, 300], size)
    own = [cp.shard(x, style.shards, mesh, 1) for x in (ids, labels)]
    with pytest.raises(ValueError, match="attn_mask=.*is no keyword"):
        model.layers[0].inner(own[0], own[0], own[0], attn_mask=None)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    loss = run(*own, cp.positions(style.shards, mesh)[:own[0].shape[1]])
    grads = torch.autograd.grad(loss, [*model.parameters()])
    for x in (loss, *grads):
        dist.all_reduce(x.detach(), group=group)
    torch.testing.assert_close(loss, whole)
    for got, one in zip(grads, want):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size, compiled", [(2, True), (3, False)])
def test_a_style_makes_a_model_parallel(pool, size, compiled):
    pool.run(styled, size, 1, size, compiled)


def example(rank, group, words):
    import importlib
    import pathlib
    import sys
    sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "examples" / "torch"))
    long_context = importlib.import_module("long_context")
    return long_context.run(long_context.parse(words), group, torch.device(cp_ranks.DEVICE))


def test_the_example_trains_as_one_device_does(pool):
    words = "--width 32 --heads 4 --layers 2 --context 700 --steps 4 --kind balanced --exchange keys".split()
    first, *others = pool.run(example, 3, 1, words)
    (losses, _), (alone, _) = first["3 ranks"], first["alone"]
    assert all(other["3 ranks"][0] == losses for other in others)
    assert losses[-1] < losses[0] - 0.1
    torch.testing.assert_close(losses, alone, rtol=0, atol=2e-5)


def _dies(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=4))
    shards = Shards.zigzag([300], 2)
    x = [torch.randn(shards.extents[rank], 2, 8) for _ in range(3)]
    for step in range(2):
        if rank == 1 and step == 1:
            os._exit(0)
        start = time.time()
        try:
            cp.attention(*x, shards=shards, group=dist.group.WORLD, layout="thd", causal=True)
        except RuntimeError as error:
            with open(f"{folder}/said", "w") as file:
                file.write(f"{step} {time.time() - start:.0f} {error}")
    os._exit(0)


def test_a_killed_rank_raises_by_the_groups_time_out(tmp_path):
    context = cp_pool.processes()
    processes = [context.Process(target=_dies, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    step, seconds, *_ = (tmp_path / "said").read_text().split()
    assert step == "1" and int(seconds) <= 10
