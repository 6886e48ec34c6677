# SPDX-License-Identifier: Apache-2.0
"""A pool of processes that are ranks over gloo, or with TESSERA_TEST_DEVICE=cuda over NCCL with a GPU each: one start-up
for all tests."""

from __future__ import annotations

import datetime
import pickle
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._pytree import tree_map

from cp_ranks import DEVICE

SIZE = 4 if DEVICE == "cpu" else min(4, torch.cuda.device_count())


class Pool:
    """run(function, size, inner, *arguments): function(rank, group, *arguments) on the first `size`
    processes, of a group, or (inner, outer) where inner > 1. Functions are of a module. Skips the test where there are not
    so many GPUs."""

    def __init__(self, folder, timeout: float = 120):
        context = mp.get_context("spawn")
        self._results = context.Queue()
        self._jobs = [context.Queue() for _ in range(SIZE)]
        self._processes = [context.Process(target=_serve, daemon=True, args=(
            rank, str(folder), timeout, self._jobs[rank], self._results)) for rank in range(SIZE)]
        for process in self._processes:
            process.start()
        self._timeout, self._number = timeout, 0

    def run(self, function, size: int, inner: int, *arguments) -> list:
        if size > SIZE:
            pytest.skip(f"needs {size} GPUs, has {SIZE}")
        self._number += 1
        for rank in range(size):
            self._jobs[rank].put(pickle.dumps((self._number, function, size, inner, arguments)))
        found = {}
        while len(found) < size:  # what an earlier job that failed left is passed over
            number, rank, answer = self._results.get(timeout=2 * self._timeout)
            if number == self._number:
                found[rank] = answer
        for rank in range(size):
            ok, value = pickle.loads(found[rank])
            assert ok, f"rank {rank}: {value}"
        return [pickle.loads(found[rank])[1] for rank in range(size)]

    def close(self):
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _on_host(x):
    """For a process that has no GPU of its own."""
    return x.cpu() if isinstance(x, torch.Tensor) else x


def _serve(rank: int, folder: str, timeout: float, jobs, results):
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")  # of tensors that a test makes
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=SIZE,
                            timeout=datetime.timedelta(seconds=timeout))
    groups = {(size, 1): dist.new_group(range(size)) for size in range(1, SIZE + 1)}
    if SIZE == 4:
        inner = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        outer = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        groups[4, 2] = inner[rank // 2], outer[rank % 2]
    while (job := jobs.get()) is not None:
        number, function, size, inside, arguments = pickle.loads(job)
        try:
            answer = True, tree_map(_on_host, function(rank, groups[size, inside], *arguments))
        except BaseException:
            answer = False, traceback.format_exc()
        results.put((number, rank, pickle.dumps(answer)))
    dist.destroy_process_group()
