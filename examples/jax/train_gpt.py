# SPDX-License-Identifier: Apache-2.0
# example (jax): the same GPT in flax, over data and tensor parallel devices
"""The byte-level GPT of examples/torch/train_gpt.py in flax: the same model, data and optimizer, so that
with the same weights the losses are PyTorch's. Data and tensor parallel over the devices there are.

    ./dev example jax/train_gpt
    ./dev example jax/train_gpt --attention tessera jax.nn --steps 50
    XLA_FLAGS=--xla_force_host_platform_device_count=4 ./dev example jax/train_gpt --mesh 2,2
    ./dev example jax/train_gpt --weights gpt.npz       (a PyTorch state_dict, by numpy.savez)
"""
import argparse
import math
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tessera.jax


def tessera_attention(q, k, v):
    return tessera.jax.attention(q, k, v, causal=True)


def jax_attention(q, k, v):
    """JAX's own, in XLA."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


ATTENTIONS = {"tessera": tessera_attention, "jax.nn": jax_attention}


class Block(nn.Module):
    heads: int
    attention: object

    @nn.compact
    def __call__(self, x):
        b, s, width = x.shape
        h = nn.LayerNorm(epsilon=1e-5, name="norm1")(x)
        qkv = nn.Dense(3 * width, name="qkv")(h).reshape(b, s, 3, self.heads, -1)
        o = self.attention(*(qkv[:, :, i] for i in range(3))).reshape(b, s, width)
        x = x + nn.Dense(width, name="proj")(o)
        h = nn.LayerNorm(epsilon=1e-5, name="norm2")(x)
        h = nn.gelu(nn.Dense(4 * width, name="up")(h), approximate=False)
        return x + nn.Dense(width, name="down")(h)


class GPT(nn.Module):
    width: int
    heads: int
    layers: int
    context: int
    attention: object

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, self.width, name="token")(tokens)
        x = x + nn.Embed(self.context, self.width, name="position")(jnp.arange(tokens.shape[1]))
        for i in range(self.layers):
            x = Block(self.heads, self.attention, name=f"block{i}")(x)
        return nn.Dense(256, use_bias=False, name="head")(nn.LayerNorm(epsilon=1e-5, name="norm")(x))


# ---- weights ----

def from_torch(state: dict) -> dict:
    """flax's parameters from those of examples/torch/train_gpt.py: names, and kernels transposed."""
    parameters = {}
    for name, value in state.items():
        *path, last = name.replace("mlp.0", "up").replace("mlp.2", "down").split(".")
        path = [f"block{path[1]}", *path[2:]] if path[0] == "blocks" else path
        if last == "weight":
            last = "embedding" if path[-1] in ("token", "position") else \
                "scale" if path[-1].startswith("norm") else "kernel"
        place = parameters
        for part in path:
            place = place.setdefault(part, {})
        place[last] = jnp.asarray(value.T if last == "kernel" else value)
    return {"params": parameters}


def initial(model, args) -> dict:
    """PyTorch's own where --weights names a file, else matrices of standard deviation 0.02."""
    if args.weights:
        return from_torch(dict(np.load(args.weights)))
    parameters = model.init(jax.random.key(0), jnp.zeros((1, args.context), jnp.int32))
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    return jax.tree.map(lambda x: 0.02 * jax.random.normal(next(keys), x.shape) if x.ndim == 2 else x,
                        parameters)


def sharding_of(path, x, mesh) -> NamedSharding:
    """Matrices into the heads and the hidden layer are split by columns, those out of them by rows."""
    name = path[-2].key if len(path) > 1 else ""
    spec = {"qkv": P(None, "model"), "up": P(None, "model"), "proj": P("model"), "down": P("model")}
    return NamedSharding(mesh, spec.get(name, P()) if x.ndim == 2 else P())


# ---- training ----

def standard_library() -> np.ndarray:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)


def starts_of(args, length) -> np.ndarray:
    """Where each row of each step begins: from a file that PyTorch's example could have drawn, or NumPy's."""
    if args.starts:
        return np.load(args.starts)
    return np.random.default_rng(1).integers(0, length - args.context - 1, (args.steps, args.batch))


def schedule(args):
    def rate(step):
        warm = jnp.minimum(1.0, (step + 1) / 10)
        return args.lr * warm * (0.55 + 0.45 * jnp.cos(math.pi * step / args.steps))
    return rate


def train(name, args, text):
    """Losses of every step, and median tokens per second."""
    mesh = jax.make_mesh(args.mesh, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model = GPT(args.width, args.heads, args.layers, args.context, ATTENTIONS[name])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0),
                            optax.adamw(schedule(args), b1=0.9, b2=0.95, weight_decay=0.01))
    parameters = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(x, sharding_of(path, x, mesh)), initial(model, args))
    state = jax.jit(optimizer.init)(parameters)
    rows = NamedSharding(mesh, P("data"))

    @jax.jit
    def step(parameters, state, tokens):
        def loss_of(parameters):
            logits = model.apply(parameters, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    losses, seconds = [], []
    for number, starts in enumerate(starts_of(args, len(text))):
        began = time.perf_counter()
        tokens = np.stack([text[start:start + args.context + 1] for start in starts]).astype(np.int32)
        parameters, state, loss = step(parameters, state, jax.device_put(tokens, rows))
        losses.append(float(loss))  # waits for the devices
        seconds.append(time.perf_counter() - began)
        if (number + 1) % max(args.steps // 5, 1) == 0:
            print(f"{name}: step {number + 1}/{args.steps}, loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    return losses, args.batch * args.context / statistics.median(seconds[-50:])


def parse(arguments=None):
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=["tessera", "jax.nn"])
    for name, on_gpu, on_cpu in (("width", 2048, 128), ("heads", 16, 4), ("layers", 8, 4),
                                 ("context", 8192, 256), ("batch", 1, 4), ("steps", 200, 150)):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu)
    parser.add_argument("--lr", type=float, default=3e-4 if gpu else 2e-3)
    parser.add_argument("--mesh", type=lambda text: tuple(map(int, text.split(","))),
                        default=(jax.device_count(), 1), metavar="DATA,MODEL",
                        help="devices that share a batch, and a layer (default: all, 1)")
    parser.add_argument("--weights", metavar="FILE", help="initial weights, PyTorch's, as .npz")
    parser.add_argument("--starts", metavar="FILE", help="where each row begins, [steps, batch], as .npy")
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
