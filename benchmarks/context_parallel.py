# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on the GPUs of one machine: what a group of n takes beside one GPU.

    python benchmarks/context_parallel.py [--quick] [--row PART ...] [--kernels] [--host] [--pretend N]

R = n t(n) / t(1) of our own kernels, forward and backward, causal, bf16, heads of 128: 1 would be that messages
cost nothing. t(1) is the whole problem on one GPU, t(n) the slowest rank's; medians of rounds by turns, in one run.
"torch" is PyTorch's own context_parallel round scaled_dot_product_attention, where it has the problem. Starts one
process on each of two GPUs or more. With --pretend N one GPU does what rank 0 of N would, and what others would
send is there at once: what is left of R is what a rank does beside attention, if messages are hidden.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import tessera.torch as tt
from tessera.torch import comm
from tessera.torch import context_parallel as cp

D = 128


class Row(NamedTuple):
    hq: int
    hk: int
    tokens: int
    goal: float
    window: int = 0
    documents: int = 0  # mean length of packed documents; 0 for one sequence
    exchanges: tuple[str, ...] = ("auto",)

    @property
    def name(self) -> str:
        words = [f"{self.hq}/{self.hk}", f"{self.tokens // 1024}k"]
        words += [f"window {self.window}"] if self.window else []
        return " ".join(words + ([f"documents of {self.documents}"] if self.documents else []))

    def lengths(self) -> list[int]:
        """The length of one sequence, or those of documents, which are drawn."""
        if not self.documents:
            return [self.tokens]
        draw, lengths = torch.Generator().manual_seed(0), []
        while (left := self.tokens - sum(lengths)) > 0:
            drawn = -self.documents * torch.rand((), generator=draw).log().item()
            lengths.append(min(left, max(16, int(drawn))))
        return lengths


ALL = ("heads", "keys", "ring")
ROWS = (Row(16, 16, 32768, 1.06, exchanges=ALL), Row(32, 8, 32768, 1.05, exchanges=ALL),
        Row(16, 16, 131072, 1.02), Row(32, 8, 131072, 1.01, exchanges=("auto", "ring")),
        Row(32, 8, 131072, 1.05, window=4096), Row(32, 8, 131072, 1.10, documents=8192))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds in place of seven")
    parser.add_argument("--row", action="append", default=[], metavar="PART", help="rows whose name has this part")
    parser.add_argument("--kernels", action="store_true", help="what each kernel of rank 0 takes in a call")
    parser.add_argument("--host", action="store_true", help="what a call costs the host, on a small problem")
    parser.add_argument("--pretend", type=int, metavar="N", help="rank 0 of N on one GPU, without the others")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), metavar="N", help="(default: all GPUs)")
    args = parser.parse_args(argv)
    if args.pretend:
        return run(args, Pretended(args.pretend))
    if args.ranks < 2 or args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {args.ranks}: {torch.cuda.device_count()} GPUs here; needs two or more, and no more "
                     "than there are")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (args, f"file://{folder}/meet"), args.ranks)


def of_rank(rank: int, args, meet: str):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=meet, rank=rank, world_size=args.ranks,
                            device_id=torch.device("cuda", rank))
    try:
        run(args, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


class Pretended:
    """Rank 0 of n, without the others: what they would send is random, and there at once."""
    rank, name = 0, "pretended"

    def __init__(self, n: int):
        self.size = n
        self._any = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16).view(torch.uint8)
        comm.register(self)

    def all_to_all(self, sent, sizes, received_sizes):
        size, few = sum(received_sizes), 1 << 16
        if size == sent.numel() < few:  # what ranks agree about before they compute
            return sent, None
        return self._any[:size], None


def run(args, group):
    here = "pretended on one" if isinstance(group, Pretended) else "x"
    say(f"{size_of(group)} {here} {torch.cuda.get_device_name()}, milliseconds forward + backward (forward)")
    for row in ROWS:
        if not args.row or any(part in row.name for part in args.row):
            measure(row, args, group)
    if args.host:
        host(group)


def size_of(group) -> int:
    return group.size if isinstance(group, Pretended) else dist.get_world_size()


def say(text: str):
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def meet():
    """All ranks, and nothing on the GPU."""
    if dist.is_initialized():
        dist.barrier()
    torch.cuda.synchronize()


def measure(row: Row, args, group):
    torch.manual_seed(0)
    n = size_of(group)
    words = dict(causal=True, window=(row.window, 0) if row.window else None, layout="thd")
    whole = [torch.randn(row.tokens, h, D, device="cuda", dtype=torch.bfloat16) for h in (row.hq, row.hk, row.hk)]
    lengths = row.lengths()
    cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().cuda()
    alone = dict(words, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
    calls = {"alone": (lambda *x: tt.attention(*x, **alone), whole)}
    shards = (cp.Shards.balanced if row.documents else cp.Shards.zigzag)(lengths, n)
    own = [cp.shard(x, shards, group, 0) for x in whole]
    for exchange in row.exchanges:
        calls[exchange] = (lambda *x, exchange=exchange: cp.attention(
            *x, shards=shards, group=group, exchange=exchange, **words), own)
    loops = {name: {"forward": forward(*call), "both": both(*call)} for name, call in calls.items()}
    took = {name: {which: [] for which in two} for name, two in loops.items()}
    for two in loops.values():
        for call in two.values():
            call()
    for _ in range(3 if args.quick else 7):
        for name, two in loops.items():
            for which, call in two.items():
                took[name][which].append(timed(call, 1 if row.tokens > 65536 else 4))
    ms = {name: {which: statistics.median(x) for which, x in two.items()} for name, two in took.items()}
    one = ms.pop("alone")
    say(f"{row.name}: one GPU {one['both']:.2f} ({one['forward']:.2f}); goal {row.goal}")
    for name, found in ms.items():
        say(f"  {name:8} {found['both']:8.2f} ({found['forward']:.2f})  R = {n * found['both'] / one['both']:.3f} "
            f"({n * found['forward'] / one['forward']:.3f})")
    if not row.window and not row.documents and dist.is_initialized():
        beside(row, args, whole, n, one["both"])
    if args.kernels:
        for name, two in loops.items():
            say(f"  kernels of {name}")
            for kernel, us, count in kernels(two["both"]):
                say(f"    {us:9.1f} us {count:4}  {kernel}")
    del loops, calls, whole, own
    torch.cuda.empty_cache()


def forward(call, inputs):
    def run():
        with torch.no_grad():
            call(*inputs)
    return run


def both(call, inputs):
    leaves = [x.detach().requires_grad_() for x in inputs]
    do = torch.randn_like(call(*inputs))

    def run():
        torch.autograd.grad(call(*leaves), leaves, do)
    return run


def timed(call, count: int) -> float:
    """Milliseconds of a call on the slowest rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    meet()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    took = torch.tensor(begin.elapsed_time(end) / count, device="cuda")
    if dist.is_initialized():
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def beside(row: Row, args, whole, n: int, one: float):
    """PyTorch's ring on the same problem."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    inputs = [x.transpose(0, 1)[None].contiguous() for x in whole]
    mesh = init_device_mesh("cuda", (n,), mesh_dim_names=("cp",))
    try:
        with context_parallel(mesh, buffers=inputs, buffer_seq_dims=[2] * 3):
            def call(*x):
                return F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=row.hq != row.hk)
            run = both(call, inputs)
            run()
            took = [timed(run, 1) for _ in range(3)]
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        say(f"  torch           - {str(error).splitlines()[0][:80]}")
        return
    ms = statistics.median(took)
    say(f"  torch    {ms:8.2f}         R = {n * ms / one:.3f}")


def kernels(call):
    """(name, microseconds, how often) of each kernel of a call on this rank, the longest first."""
    meet()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found = [(x.key[:90], x.device_time_total, x.count) for x in seen.key_averages() if x.device_time_total > 0]
    return sorted(found, key=lambda x: -x[1])[:18]


def host(group):
    """Microseconds of the host in a call of 256 tokens, nothing waited for."""
    shards = cp.Shards.zigzag([256], size_of(group))
    rows = shards.extents[0]
    inputs = [torch.randn(rows, 8, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    for exchange in ALL:
        def call(*x):
            return cp.attention(*x, shards=shards, group=group, exchange=exchange, layout="thd",
                                causal=True)
        for name, run in (("forward", forward(call, inputs)), ("both", both(call, inputs))):
            times = []
            for _ in range(20):
                meet()
                began = time.perf_counter()
                run()
                times.append(1e6 * (time.perf_counter() - began))
            say(f"host, {exchange}, {name}: {statistics.median(times):.0f} us")


if __name__ == "__main__":
    main()
