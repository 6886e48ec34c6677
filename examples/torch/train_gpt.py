# SPDX-License-Identifier: Apache-2.0
# example (torch matplotlib): a small GPT: losses, speed and memory beside PyTorch's attention
"""Train a small byte-level GPT on the sources of Python's standard library, which every machine has,
with tessera's attention and with PyTorch's: the loss curves in one plot, tokens per second and
memory of each.

    ./dev example torch/train_gpt                    (within three minutes on a CPU)
    ./dev example torch/train_gpt --attention tessera cudnn flex --steps 500
"""
import argparse
import functools
import math
import resource
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tessera.torch


def tessera_attention(q, k, v):
    return tessera.torch.attention(q, k, v, causal=True)


def bf16_attention(q, k, v, **more):
    """In 16 bits, whatever the model computes in."""
    half = (x.bfloat16() for x in (q, k, v))
    return tessera.torch.attention(*half, causal=True, **more).to(q.dtype)


def fp8_attention(q, k, v):
    """q, k and v of 16 bits, rounded to fp8 inside (docs/fp8.md)."""
    return bf16_attention(q, k, v, precision="fp8")


def sdpa_attention(q, k, v):
    """PyTorch's own choice."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def cudnn_attention(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa_attention(q, k, v)


compiled_flex = torch.compile(flex_attention)


@functools.cache
def causal_blocks(length, device):
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)


def flex_attention_causal(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return compiled_flex(q, k, v, block_mask=causal_blocks(q.shape[2], q.device)).transpose(1, 2)


ATTENTIONS = {"tessera": tessera_attention, "bf16": bf16_attention, "fp8": fp8_attention, "sdpa": sdpa_attention,
              "cudnn": cudnn_attention, "flex": flex_attention_causal}


class Block(nn.Module):
    def __init__(self, width, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        # [b, s, 3, h, d]: q, k and v stay interleaved slices of one buffer.
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.proj(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width, heads, layers, context, attention):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[:tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def standard_library() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def train(name, args, text):
    """Losses of every step, median tokens per second, and bytes of memory at the peak."""
    device, cuda = args.device, args.device == "cuda"
    torch.manual_seed(0)
    model = GPT(args.width, args.heads, args.layers, args.context, ATTENTIONS[name]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    starts = torch.randint(len(text) - args.context - 1, (args.steps, args.batch),
                           generator=torch.Generator().manual_seed(1))
    if args.export:
        np.savez(args.export, starts=starts, **{name: x.cpu() for name, x in model.state_dict().items()})
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for step in range(args.steps):
        began = time.perf_counter()
        warm = min(1.0, (step + 1) / 10)
        optimizer.param_groups[0]["lr"] = \
            args.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        rows = [text[start:start + args.context + 1] for start in starts[step]]
        tokens = torch.stack(rows).long().to(device)
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - began)
        progress(name, step + 1, args.steps, losses[-1])
    rate = args.batch * args.context / statistics.median(seconds[-50:])
    peak = torch.cuda.max_memory_allocated() if cuda else \
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return losses, rate, peak


def progress(name, done, total, loss):
    if sys.stderr.isatty():
        filled = 30 * done // total
        end = "\n" if done == total else ""
        print(f"\r{name:8}{'█' * filled}{'░' * (30 - filled)} {done}/{total}  loss {loss:.3f}",
              end=end, file=sys.stderr, flush=True)
    elif done % max(total // 5, 1) == 0:
        print(f"{name}: step {done}/{total}, loss {loss:.3f}", file=sys.stderr, flush=True)


def plot(path, curves):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for (name, losses), style in zip(curves.items(), ("-", "--", "-.", ":")):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name, linewidth=1.6)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A byte-level GPT, the attention of each")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def parse(arguments=None):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=["tessera", "sdpa"],
                        metavar="NAME", help="any of %(choices)s; bf16 and fp8 are tessera's, and fp8 wants "
                        "a CPU so far; cudnn and flex need a GPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    on_gpu = parser.parse_known_args(arguments)[0].device == "cuda"
    for name, gpu, cpu in (("width", 2048, 128), ("heads", 16, 4), ("layers", 8, 4),
                           ("context", 8192, 256), ("batch", 1, 4), ("steps", 200, 150)):
        parser.add_argument(f"--{name}", type=int, default=gpu if on_gpu else cpu)
    parser.add_argument("--lr", type=float, default=3e-4 if on_gpu else 2e-3)
    parser.add_argument("--plot", metavar="FILE", default="train_gpt.png")
    parser.add_argument("--export", metavar="FILE.npz", help="write the initial weights and where the "
                        "batches start, from which examples/paddle/train_gpt.py trains too")
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    text = standard_library()
    results = {name: train(name, args, text) for name in args.attention}
    print(f"{'attention':10} {'final loss':>10} {'tokens/s':>10} {'peak MiB':>9}")
    for name, (losses, rate, peak) in results.items():
        print(f"{name:10} {statistics.mean(losses[-10:]):10.4f} {rate:10.0f} {peak / 2**20:9.0f}")
    if args.device == "cpu" and len(results) > 1:
        print("peak is of the process: a later one can only show what it adds to the first")
    plot(args.plot, {name: losses for name, (losses, _, _) in results.items()})
    print(f"loss curves: {args.plot}")
    return results


if __name__ == "__main__":
    main()
