# SPDX-License-Identifier: Apache-2.0
"""A pool of processes that are ranks over gloo, or with TESSERA_TEST_DEVICE=cuda over NCCL with a GPU each:
one start-up for all tests."""

from __future__ import annotations

import datetime
import pickle
import queue
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._pytree import tree_map

from cp_ranks import DEVICE

SIZE = 4 if DEVICE == "cpu" else min(4, torch.cuda.device_count())
_PATIENCE = 10  # seconds for the others, once a rank has failed


def processes():
    """Where processes come from: on the CPU they are forks of one that has imported PyTorch and has no threads, as an
    import takes longer than most tests; CUDA does not outlive a fork."""
    if DEVICE != "cpu":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tessera.torch", "tessera.cli.conformance", "torch.distributed.tensor", "pytest"])
    return context


class Pool:
    """run(function, size, inner, *arguments): function(rank, group, *arguments) on the first `size`
    processes, of a group, or (inner, outer) where inner > 1. Functions are of a module; tensors among
    arguments lie on each rank's device, those of results on the host. Skips the test where there are
    not so many GPUs. AssertionError: what the first rank to fail says; the others, which may wait for
    it for ever, are then started anew."""

    def __init__(self, folder, timeout: float = 120):
        self._folder, self._timeout, self._starts = folder, timeout, 0
        self._start()

    def _start(self):
        context = processes()
        self._starts += 1
        self._results = context.Queue()
        self._jobs = [context.Queue() for _ in range(SIZE)]
        self._processes = [context.Process(target=_serve, daemon=True, args=(
            rank, f"{self._folder}/meet{self._starts}", self._timeout, self._jobs[rank], self._results))
            for rank in range(SIZE)]
        for process in self._processes:
            process.start()

    def run(self, function, size: int, inner: int, *arguments) -> list:
        if size > SIZE:
            pytest.skip(f"needs {size} GPUs, has {SIZE}")
        job = pickle.dumps((function, size, inner, tree_map(_on_host, arguments)))
        for jobs in self._jobs[:size]:
            jobs.put(job)
        found, failed, patience = {}, {}, 2 * self._timeout
        while len(found) + len(failed) < size:
            try:
                rank, ok, value = self._results.get(timeout=patience)
            except queue.Empty:
                break
            (found if ok else failed)[rank] = pickle.loads(value)
            patience = _PATIENCE if failed else patience
        silent = [rank for rank in range(size) if rank not in found and rank not in failed]
        if failed or silent:
            self._stop()
            self._start()
        said = "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        assert not failed and not silent, f"{said}\nranks without an answer: {silent}"
        return [found[rank] for rank in range(size)]

    def _stop(self):
        for process in self._processes:
            process.kill()
            process.join()

    def close(self):
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(5)
        self._stop()


def _on_host(x):
    """For another process: a pickled tensor of a GPU comes back on that GPU, which is not the reader's."""
    return x.cpu() if isinstance(x, torch.Tensor) else x


def _on_device(x):
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def _serve(rank: int, meeting: str, timeout: float, jobs, results):
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")  # of tensors that a test makes
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", init_method=f"file://{meeting}", rank=rank,
                            world_size=SIZE, timeout=datetime.timedelta(seconds=timeout))
    groups = {(size, 1): dist.new_group(range(size)) for size in range(1, SIZE + 1)}
    if SIZE == 4:
        inner = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        outer = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        groups[4, 2] = inner[rank // 2], outer[rank % 2]
    while (job := jobs.get()) is not None:
        try:
            function, size, inside, arguments = pickle.loads(job)
            value = function(rank, groups[size, inside], *tree_map(_on_device, arguments))
            answer = True, pickle.dumps(tree_map(_on_host, value))
        except BaseException:
            answer = False, pickle.dumps(traceback.format_exc())
        results.put((rank, *answer))
    dist.destroy_process_group()
