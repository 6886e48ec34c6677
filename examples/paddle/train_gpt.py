# SPDX-License-Identifier: Apache-2.0
# example (paddle): the same GPT in Paddle, from PyTorch's weights if you like
"""Train a small byte-level GPT on the sources of Python's standard library, with tessera's attention in
Paddle and with Paddle's own: the model, data and optimizer of examples/torch/train_gpt.py.

    ./dev example paddle/train_gpt --steps 60                 (a minute on a CPU)

From PyTorch's initial weights and batches the losses are PyTorch's:

    ./dev example torch/train_gpt --steps 60 --export start.npz
    ./dev example paddle/train_gpt --steps 60 --start-from start.npz
"""
import argparse
import math
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

import tessera.paddle


def tessera_attention(q, k, v):
    return tessera.paddle.attention(q, k, v, causal=True)


def sdpa_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTIONS = {"tessera": tessera_attention, "sdpa": sdpa_attention}


class Block(nn.Layer):
    def __init__(self, width, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        # [b, s, 3, h, d]: q, k and v stay interleaved slices of one buffer.
        q, k, v = self.qkv(self.norm1(x)).reshape([0, 0, 3, self.heads, -1]).unbind(2)
        x = x + self.proj(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Layer):
    def __init__(self, width, heads, layers, context, attention):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias_attr=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.initializer.Normal(std=0.02)(parameter)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[:tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def load_torch(self, weights):
        """Weights by PyTorch's names, whose linear layers hold theirs [out, in]."""
        linear = {f"{name}.weight" for name, layer in self.named_sublayers()
                  if isinstance(layer, nn.Linear)}
        self.set_state_dict({name: weights[name].T if name in linear else weights[name]
                             for name in self.state_dict()})


def standard_library() -> np.ndarray:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)


def train(name, args, text):
    """Losses of every step, and median tokens per second."""
    paddle.seed(0)
    model = GPT(args.width, args.heads, args.layers, args.context, ATTENTIONS[name])
    starts = np.random.default_rng(1).integers(len(text) - args.context - 1, size=(args.steps, args.batch))
    if args.start_from:
        start = np.load(args.start_from)
        model.load_torch(start)
        starts = start["starts"]
    rate = paddle.optimizer.lr.LambdaDecay(args.lr, lambda step: min(1.0, (step + 1) / 10) * (
        0.55 + 0.45 * math.cos(math.pi * step / args.steps)))
    optimizer = paddle.optimizer.AdamW(rate, beta1=0.9, beta2=0.95, parameters=model.parameters(),
                                       grad_clip=nn.ClipGradByGlobalNorm(1.0))
    losses, seconds = [], []
    for step in range(args.steps):
        began = time.perf_counter()
        tokens = np.stack([text[i:i + args.context + 1] for i in starts[step]]).astype(np.int64)
        logits = model(paddle.to_tensor(tokens[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), paddle.to_tensor(tokens[:, 1:].reshape(-1)))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        rate.step()
        losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
        if (step + 1) % max(args.steps // 5, 1) == 0:
            print(f"{name}: step {step + 1}/{args.steps}, loss {losses[-1]:.4f}", file=sys.stderr)
    return losses, args.batch * args.context / statistics.median(seconds[-50:])


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=["tessera", "sdpa"],
                        metavar="NAME", help="any of %(choices)s")
    for name, default in (("width", 128), ("heads", 4), ("layers", 4), ("context", 256), ("batch", 4),
                          ("steps", 150)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--start-from", metavar="FILE.npz",
                        help="what examples/torch/train_gpt.py --export wrote, of a model of this shape")
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    text = standard_library()
    results = {name: train(name, args, text) for name in args.attention}
    print(f"{'attention':10} {'final loss':>10} {'tokens/s':>10}")
    for name, (losses, rate) in results.items():
        print(f"{name:10} {statistics.mean(losses[-10:]):10.4f} {rate:10.0f}")
    return results


if __name__ == "__main__":
    main()
