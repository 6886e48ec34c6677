# SPDX-License-Identifier: Apache-2.0
"""jax.nn.dot_product_attention as a peer of bench: XLA's own computation, or cuDNN's kernels."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys

import numpy as np

from .workload import Unsupported, Workload, dense_bias, dense_mask, first_line, is_plain_causal, plain, refuse


def peer(w: Workload, implementation: str):
    """implementation: "xla" or "cudnn", as jax.nn spells it."""
    name = f"jax-{implementation}"
    if implementation == "cudnn" and w.device != "cuda":
        raise Unsupported(f"{name} needs a GPU, and NumPy arrays are on the CPU")
    jax = _import_jax(w, name)
    kw = w.keywords
    refuse(w, ("softcap", "dropout_p"), "jax.nn.dot_product_attention has no {}")
    q, k, v, do = (None if x is None else x.swapaxes(1, 2) for x in plain(w, name))
    (b, sq, hq, _), sk = q.shape, k.shape[1]
    causal = is_plain_causal(kw, sq, sk)
    others = dict(kw, causal=None) if causal else kw
    mask = dense_mask(dataclasses.replace(w, keywords=others), b, hq, sq, sk)
    bias = dense_bias(w, sq, sk)
    device = jax.devices("cuda" if w.device == "cuda" else "cpu")[0]
    q, k, v, do, mask, bias = (None if x is None else jax.device_put(np.ascontiguousarray(x), device)
                               for x in (q, k, v, do, mask, bias))
    options = dict(is_causal=causal, scale=kw.get("softmax_scale"), implementation=implementation)

    def forward(q, k, v, bias):
        return jax.nn.dot_product_attention(q, k, v, bias, mask, **options)
    try:
        program, arguments = jax.jit(forward), (q, k, v, bias)
        if w.backward:
            pullback = jax.jit(lambda *x: jax.vjp(forward, *x)[1])(*arguments)
            program, arguments = jax.jit(lambda pullback, do: pullback(do)), (pullback, do)
        jax.block_until_ready(program(*arguments))
    except Exception as error:  # its own errors are many; all mean "not here"
        raise Unsupported(f"{name} cannot: {first_line(error)}") from error
    if w.device == "cpu":
        return lambda: jax.block_until_ready(program(*arguments))

    def queue():
        return program(*arguments)
    queue.wait = jax.block_until_ready  # a stream of JAX's own, in no graph of ours
    return queue


def _import_jax(w: Workload, name: str):
    """jax, with the workload's threads: JAX takes them from NPROC when it starts."""
    if importlib.util.find_spec("jax") is None:
        raise Unsupported("jax is not installed")
    threads = str(w.threads or os.cpu_count())
    if "jax" not in sys.modules:
        os.environ.setdefault("NPROC", threads)
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is on the GPU too
    elif w.device == "cpu" and os.environ.get("NPROC", threads) != threads:
        raise Unsupported(f"{name} has started with NPROC={os.environ['NPROC']} threads")
    import jax
    return jax
