# SPDX-License-Identifier: Apache-2.0
"""Packed and padded sequences in memory of every allocator of PyTorch and of JAX's own: low addresses, where tensor
maps with lengths need room below a tensor. Each allocator in a process of its own, which runs this file.

    python tests/python/on_torch/test_allocators.py torch|jax"""
import importlib.util
import os
import subprocess
import sys

import pytest

import tessera

CUDA = any(name.startswith("cuda") for name in tessera.backends())
TORCH_ALLOCATORS = ("backend:native", "expandable_segments:True", "backend:cudaMallocAsync")


# ---- what a process runs ----

def close(found, expected, name):
    """Both in fp32, as NumPy arrays: to 3 % of the largest value."""
    worst = abs(found - expected).max() / abs(expected).max()
    assert worst < 0.03, f"{name}: {worst:.3f} of the largest value"


# Query and key heads, head dim, lengths, whether they are packed.
TORCH_CALLS = (
    (32, 8, 128, (3000, 5000), True),
    (4, 4, 256, (150,), True),
    (6, 6, 64, (2048, 700), False),
    (9, 3, 192, (257, 100), True),
)


def check_torch():
    import torch

    import tessera.torch as tt

    for hq, hk, d, lengths, packed in TORCH_CALLS:
        torch.manual_seed(0)
        new = dict(device="cuda", dtype=torch.bfloat16)
        shape = (sum(lengths),) if packed else (len(lengths), max(lengths))
        q, k, v, do = (torch.randn(*shape, h, d, **new) for h in (hq, hk, hk, hq))
        for x in (q, k, v):
            x.requires_grad_()
        if packed:
            starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
            cu = torch.tensor(starts, dtype=torch.int32, device="cuda")
            keywords = dict(layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu)
            places = [slice(a, b) for a, b in zip(starts, starts[1:])]
        else:
            seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
            keywords = dict(seqlens_q=seqlens, seqlens_k=seqlens)
            places = [(n, slice(length)) for n, length in enumerate(lengths)]
        o = tt.attention(q, k, v, causal=True, **keywords)
        ours = (o, *torch.autograd.grad(o, (q, k, v), do))
        for place in places:
            x = [t.detach()[place].float().requires_grad_() for t in (q, k, v)]
            theirs = torch.cat([
                torch.nn.functional.scaled_dot_product_attention(
                    *(t[None, :, h // (hq // len(t[0])) if len(t[0]) < hq else h] for t in x), is_causal=True)
                for h in range(hq)]).transpose(0, 1)
            theirs = (theirs, *torch.autograd.grad(theirs, x, do[place].float()))
            for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs):
                close(a.detach()[place].float().cpu().numpy(), b.detach().cpu().numpy(), f"{name} of {hq}/{hk} x {d}")
        print(f"{hq}/{hk} heads of {d}, lengths {lengths}: q at {q.data_ptr():#x}")


def check_jax():
    import jax
    import numpy as np

    import tessera.jax as tj

    jnp = jax.numpy
    lengths = jnp.array([2048, 700], jnp.int32)
    q, k, v, do = (jax.random.normal(jax.random.key(i), (2, 2048, 6, 64), jnp.bfloat16) for i in range(4))

    def theirs(q, k, v):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        exists = jnp.arange(2048) < lengths[:, None]
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) / 8
        weights = jax.nn.softmax(jnp.where(exists[:, None, None], scores, -jnp.inf))
        return jnp.einsum("bhij,bjhd->bihd", weights, v) * exists[..., None, None]

    def gradients(function):
        o, pull = jax.vjp(function, q, k, v)
        return o, *pull(do.astype(o.dtype))

    ours = gradients(jax.jit(lambda q, k, v: tj.attention(q, k, v, seqlens_q=lengths, seqlens_k=lengths)))
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, gradients(theirs)):
        close(np.asarray(a, np.float32), np.asarray(b, np.float32), name)
    print(f"[2, 2048, 6, 64] with lengths: q at {q.unsafe_buffer_pointer():#x}")


# ---- the processes ----

def run(framework, **environment):
    done = subprocess.run([sys.executable, __file__, framework], env={**os.environ, **environment},
                          capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("allocator", TORCH_ALLOCATORS)
def test_torch(allocator):
    torch = pytest.importorskip("torch")
    if not CUDA or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device and a build for it")
    run("torch", PYTORCH_ALLOC_CONF=allocator, PYTORCH_CUDA_ALLOC_CONF=allocator)  # the newer name, and the older


def test_jax():
    if not CUDA or not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        pytest.skip("needs a CUDA device, a build for it and JAX with CUDA")
    run("jax", JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_PREALLOCATE="true")


if __name__ == "__main__":
    {"torch": check_torch, "jax": check_jax}[sys.argv[1]]()
