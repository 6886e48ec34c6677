# SPDX-License-Identifier: Apache-2.0
"""Two processes train data-parallel, over gloo, to the loss of one process with the whole batch."""
import os

import pytest

torch = pytest.importorskip("torch")

import tessera.torch as tt  # noqa: E402
from torch.nn import functional as F  # noqa: E402

STEPS, BATCH, LENGTH, WIDTH, HEADS, WORDS = 6, 4, 24, 32, 2, 17


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.sink = torch.nn.Parameter(torch.zeros(HEADS))
        self.project = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        o = tt.attention(q, k, v, causal=True, sink=self.sink)
        return self.project(x + o.flatten(2))


def batches():
    g = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (BATCH, LENGTH), generator=g) for _ in range(STEPS)]


def train(model, share) -> torch.Tensor:
    """The loss of each step. `share` takes this process's part of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for ids in batches():
        ids = share(ids)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def one_of_two(rank: int, folder: str):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                                         world_size=2)
    try:
        model = torch.nn.parallel.DistributedDataParallel(Model())
        losses = train(model, lambda ids: ids.chunk(2)[rank])
        torch.distributed.all_reduce(losses)
        torch.save((losses / 2, model.module.state_dict()), f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()
    # DistributedDataParallel keeps the group, and so gloo's threads, beyond its end. One of them that
    # still lets go of a tensor while Python finalizes ends the process by SIGABRT (pytorch#190489).
    os._exit(0)


@pytest.mark.skipif(not torch.distributed.is_available() or
                    not torch.distributed.is_gloo_available(), reason="PyTorch without gloo")
def test_two_processes_reach_the_loss_of_one(tmp_path):
    torch.multiprocessing.start_processes(one_of_two, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
    alone = Model()
    losses = train(alone, lambda ids: ids)
    assert losses[-1] < losses[0]
    for rank in (0, 1):
        shared, weights = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(shared, losses, rtol=1e-5, atol=1e-6)
        for name, parameter in alone.state_dict().items():
            torch.testing.assert_close(weights[name], parameter, rtol=1e-4, atol=1e-5)
