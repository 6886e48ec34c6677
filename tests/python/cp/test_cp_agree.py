# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not compare every call, as on GPUs, where one of them parts ways: over gloo, with exchanges that a
rank's program does not wait for, as it does not for what is on a stream."""

import datetime
import itertools
import os
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import cp_pool  # noqa: E402
from tessera.context_parallel import Shards  # noqa: E402
from tessera.torch import comm  # noqa: E402
from tessera.torch import context_parallel as cp  # noqa: E402
from tessera.torch.context_parallel import _check  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")
SIZE, LENGTHS, LIMIT = 3, [300, 77], 40


class Streamed(comm.Processes):
    """Its exchanges end, for the program, after two seconds at most, whatever was received."""

    def all_to_all(self, sent, sizes, received_sizes):
        received, self._work = super().all_to_all(sent, sizes, received_sizes)
        return received, self

    def wait(self):
        end = time.time() + 2
        while not self._work.is_completed() and time.time() < end:
            time.sleep(0.0005)


def same(rank, attend, keep):
    """One rank's call is new by the extent of its mask, and means what the others' does."""
    plain = attend(keep=keep[..., :max(LENGTHS)])
    assert all(torch.equal(plain, attend(keep=keep[..., :max(LENGTHS) + rank // 2 * step])) for step in range(3))
    return "the same"


def new(rank, attend, keep):
    attend(softcap=3.0)
    return told(lambda: attend(softcap=4.0 if rank == 1 else 3.0), lambda: attend(softcap=3.0))


def known(rank, attend, keep):
    for softcap in (3.0, 4.0):
        attend(softcap=softcap)
    return told(lambda: attend(softcap=4.0 if rank == 1 else 3.0), lambda: attend(softcap=3.0))


def known_before_new(rank, attend, keep):
    """Ranks that agree about all that comes later are told none the less."""
    for softcap in (3.0, 4.0):
        attend(softcap=softcap)
    softcaps = itertools.count(5)
    return told(lambda: attend(softcap=4.0 if rank == 1 else 3.0), lambda: attend(softcap=float(next(softcaps))))


def refused(rank, attend, keep):
    attend()
    return told(lambda: attend(sink=torch.zeros(5)) if rank == 1 else attend(), attend)


def refused_before(rank, attend, keep):
    attend()
    return told(lambda: attend(seqlens_q=keep) if rank == 1 else attend(), attend)


def all_new(rank, attend, keep):
    """Where every rank asks, all can go on afterwards."""
    said = told(lambda: attend(softcap=3.0 + rank))
    attend()
    return said


def backward(rank, attend, keep):
    attend(softcap=3.0)
    o = attend(softcap=4.0, causal=False, grad=True)
    return told(lambda: attend(softcap=4.0 if rank == 1 else 3.0), o.sum().backward)


def told(first, *more) -> str:
    """The error of the first call or, soon after, of those that follow."""
    end = time.time() + LIMIT
    call = first
    while time.time() < end:
        try:
            call()
        except ValueError as error:
            return str(error)
        time.sleep(0.05)
        call = more[0] if more else first
    return "nothing"


def rank_of(rank, folder, function, inner):
    """A process: what function() says of this rank's calls goes into a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=SIZE + inner // 2,
                            timeout=datetime.timedelta(seconds=LIMIT))
    _check._compares_always = lambda device: False
    if inner > 1:
        pairs = [[dist.new_group(ranks) for ranks in pair] for pair in (([0, 1], [2, 3]), ([0, 2], [1, 3]))]
        group = pairs[0][rank // 2], pairs[1][rank % 2]
    else:
        group = dist.group.WORLD
    for one in group if inner > 1 else (group,):
        comm.register(Streamed(one))
    size = dist.get_world_size()
    shards = Shards.zigzag(LENGTHS, size)
    torch.manual_seed(0)
    x = [cp.shard(torch.randn(sum(LENGTHS), h, 16), shards, group, 0) for h in (6, 2, 2)]
    keep = torch.rand(2, 1, 1, max(LENGTHS) + 10) < 0.7

    def attend(causal=True, grad=False, **keywords):
        return cp.attention(*(y.clone().requires_grad_(grad) for y in x), shards=shards, group=group, layout="thd",
                            causal=causal, **keywords)
    text = globals()[function](rank, attend, keep)
    with open(f"{folder}/said{rank}", "w") as file:
        file.write(text)
    store = dist.distributed_c10d._get_default_store()
    store.add("done", 1)
    while store.add("done", 0) < size:  # gloo would tell the others of a rank that is gone
        time.sleep(0.05)
    os._exit(0)


SAID = {"same": "the same", "new": "softcap=4.0: rank 1 passes softcap=4.0, rank 0 3.0",
        "known": "softcap=4.0: rank 1 passes softcap=4.0, rank 0 3.0",
        "known_before_new": "softcap=4.0: rank 1 passes softcap=4.0, rank 0 3.0",
        "refused": "sink.shape", "refused_before": "seqlens_q=...: lengths and starts are in shards",
        "all_new": "softcap=4.0: rank 1 passes softcap=4.0, rank 0 3.0",
        "backward": "softcap=4.0: rank 1 passes softcap=4.0, rank 0 3.0"}


@pytest.mark.parametrize("function, inner", [*((name, 1) for name in SAID), ("same", 2), ("new", 2), ("known", 2)])
def test_every_rank_is_told(tmp_path, function, inner):
    context = cp_pool.processes()
    processes = [context.Process(target=rank_of, args=(rank, str(tmp_path), function, inner))
                 for rank in range(SIZE + inner // 2)]
    for process in processes:
        process.start()
    end = time.time() + LIMIT
    for process in processes:
        process.join(max(0, end - time.time()))
    hung = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for process in processes:
        process.kill()
    assert not hung
    said = {(tmp_path / f"said{rank}").read_text() for rank in range(len(processes))}
    assert len(said) == 1 and SAID[function] in said.pop()
