# SPDX-License-Identifier: Apache-2.0
# example (torch): training on packed documents whose tokens lie on several processes
"""Train the byte-level GPT of train_gpt.py on packed documents, the files of Python's standard library, whose
tokens lie on several ranks; and on one device, to the same losses.

    ./dev example torch/long_context                  (2 processes on a CPU: half a minute)
    ./dev example torch/long_context --ranks 4 --kind zigzag --exchange ring --steps 10
    torchrun --nproc-per-node 8 examples/torch/long_context.py --context 131072 --alone 0

What makes a training script context parallel is marked with numbers in this file:

  1. A batch is a row of documents; Shards say which positions of which document lie on which rank. They are
     host integers, made once a batch, alike on every rank.
  2. Inputs and labels are cut by the same Shards. Labels are shifted before: a rank's last token is not
     followed by its next one.
  3. Positions are those in the document, not in the rank's buffer.
  4. Attention is told the Shards and the group. Everything else of the model works on a rank's own tokens.
  5. Ranks hold different numbers of tokens. A rank's loss is its sum over all tokens of the batch, so that
     losses and gradients add up to one device's.
"""
import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tessera.torch
from tessera.torch import context_parallel as cp

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train_gpt import GPT, progress  # noqa: E402

KINDS = {"balanced": cp.Shards.balanced, "zigzag": cp.Shards.zigzag, "contiguous": cp.Shards.contiguous}


class PackedGPT(GPT):
    """GPT of one row of documents: tokens and positions [1, t] -> logits [1, t, 256]."""

    def forward(self, tokens, positions):
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


class Ranks:
    """The tokens of a batch on the ranks of a group."""

    def __init__(self, group, kind: str, exchange: str):
        self.group, self.kind, self.exchange, self.shards = group, kind, exchange, None

    def cut(self, lengths, *tensors):
        """This rank's part of tensors [1, t], and its positions [1, t of the rank]."""
        self.shards = KINDS[self.kind](lengths, dist.get_world_size(self.group))          # 1
        own = [cp.shard(x, self.shards, self.group, dim=1) for x in tensors]              # 2
        return *own, cp.positions(self.shards, self.group, own[0].device)[None]           # 3

    def attention(self, q, k, v):
        return cp.attention(q[0], k[0], v[0], layout="thd", causal=True, shards=self.shards,
                            group=self.group, exchange=self.exchange)[None]               # 4

    def add(self, loss, parameters):
        """The sum over ranks of a loss, and of gradients."""
        for x in (loss, *(p.grad for p in parameters)):                                   # 5
            dist.all_reduce(x, group=self.group)


class Alone:
    """The whole batch on one device."""

    def cut(self, lengths, *tensors):
        self.cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(tensors[0].device)
        return *tensors, torch.cat([torch.arange(n) for n in lengths])[None].to(tensors[0].device)

    def attention(self, q, k, v):
        return tessera.torch.attention(q[0], k[0], v[0], layout="thd", cu_seqlens_q=self.cu,
                                       cu_seqlens_k=self.cu, causal=True)[None]

    def add(self, loss, parameters):
        pass


def documents() -> list[torch.Tensor]:
    """The files of the standard library, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return [torch.frombuffer(bytearray(f.read_bytes()), dtype=torch.uint8) for f in files
            if f.stat().st_size > 1]


def batches(args):
    """(lengths, tokens [1, t], labels [1, t]) of each step: t is the context, the last document is cut."""
    texts, draw = documents(), torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        rows, room = [], args.context
        while room > 0:
            text = texts[torch.randint(len(texts), (), generator=draw)][:room + 1].long()
            rows.append(text)
            room -= len(text) - 1
        yield ([len(x) - 1 for x in rows], torch.cat([x[:-1] for x in rows])[None],
               torch.cat([x[1:] for x in rows])[None])


def train(args, where, device, name: str) -> tuple[list[float], float]:
    """Losses of every step, and the median of tokens per second; `where` is Ranks or Alone."""
    torch.manual_seed(0)
    model = PackedGPT(args.width, args.heads, args.layers, args.context, where.attention).to(device)
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95))
    losses, seconds = [], []
    for step, (lengths, *rows) in enumerate(batches(args)):
        began = time.perf_counter()
        tokens, labels, positions = where.cut(lengths, *(x.to(device) for x in rows))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens, positions)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / sum(lengths)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        where.add(loss, parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        if name:
            progress(name, step + 1, args.steps, losses[-1])
    return losses, args.context / statistics.median(seconds)


def run(args, group, device) -> dict:
    """Losses and tokens per second on the group, and on one device where that is asked for."""
    first = dist.get_rank(group) == 0
    ranks = Ranks(group, args.kind, args.exchange)
    name = f"{dist.get_world_size(group)} ranks"
    results = {name: train(args, ranks, device, name if first else "")}
    if first:
        print(f"tokens of the last batch on each rank, {ranks.shards!r}: {list(ranks.shards.extents)}")
    if first and args.alone:
        results["alone"] = train(args, Alone(), device, "alone")
    dist.barrier(group)
    return results


def of_rank(rank: int, args, size: int, meet: str):
    """A rank's program, on a CUDA device of its own where this machine has as many."""
    here = int(os.environ.get("LOCAL_RANK", rank))
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", size))
    device = torch.device("cuda", here) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group("nccl" if cuda else "gloo", init_method=meet, rank=rank, world_size=size)
    try:
        results = run(args, dist.group.WORLD, device)
        if rank == 0:
            report(results)
    finally:
        dist.destroy_process_group()


def report(results: dict):
    print(f"{'':10} {'first loss':>10} {'final loss':>10} {'tokens/s':>10}")
    for name, (losses, rate) in results.items():
        print(f"{name:10} {losses[0]:10.4f} {losses[-1]:10.4f} {rate:10.0f}")
    if len(results) > 1:
        pairs = zip(*(losses for losses, _ in results.values()))
        print(f"largest difference of a step's loss: {max(abs(a - b) for a, b in pairs):.2e}")


def parse(arguments=None):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, metavar="N", default=torch.cuda.device_count() if cuda else 2,
                        help="processes to start (default %(default)s); under torchrun, which has started "
                        "them, no matter")
    parser.add_argument("--kind", choices=KINDS, default="balanced", help="what lies where: long documents cut in "
                        "pairs of chunks and short ones whole, all cut in pairs, or all in one chunk a rank")
    parser.add_argument("--exchange", choices=["auto", "heads", "keys", "ring"], default="auto",
                        help="what travels (docs/context_parallel.md)")
    parser.add_argument("--alone", type=int, choices=[0, 1], default=1,
                        help="train on one device as well, and compare: 0 where a batch does not fit one")
    for name, gpu, cpu in (("width", 2048, 128), ("heads", 16, 4), ("layers", 8, 2), ("context", 32768, 2048),
                           ("steps", 100, 20)):
        parser.add_argument(f"--{name}", type=int, default=gpu if cuda else cpu, help="(default %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4 if cuda else 2e-3, help="(default %(default)s)")
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    if "RANK" in os.environ:  # torchrun
        return of_rank(int(os.environ["RANK"]), args, int(os.environ["WORLD_SIZE"]), "env://")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (args, args.ranks, f"file://{folder}/meet"), args.ranks)


if __name__ == "__main__":
    main()
