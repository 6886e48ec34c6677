# SPDX-License-Identifier: Apache-2.0
"""The attentions that the model can run on: tessera's, and the unfused one in NumPy, written twice.

Unfused means that the scores of every query with every key stand in memory at once. It works in
any precision: in fp64 it is the judge of the others. All take and give packed sentences.
"""

import itertools
import threading
import time
import tracemalloc

import numpy as np

import tessera

from .model import HEAD_DIM, HEADS, Attention


def tessera_packed(**options):
    """tessera on the packed sentences as they are. options: as of tessera.attention."""

    def forward(q, k, v, cu_seqlens):
        return tessera.attention(q, k, v, return_lse=True, **_thd(cu_seqlens), **options)

    def backward(do, q, k, v, o, lse, cu_seqlens):
        g = tessera.attention_backward(do, q, k, v, o, lse, **_thd(cu_seqlens), **options)
        return g.dq, g.dk, g.dv

    return Attention(forward, backward)


def tessera_backend(cu_seqlens):
    """Name of the backend that runs the model's attention on these sentences."""
    q = np.empty((int(cu_seqlens[-1]), HEADS, HEAD_DIM), np.float32)
    return tessera.explain(q, q, q, **_thd(cu_seqlens)).backend


def _thd(cu_seqlens):
    return {"layout": "thd", "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}


def unfused_each():
    """One sentence after the other. Saves the probabilities for the backward pass."""

    def forward(q, k, v, cu_seqlens):
        o, saved = np.empty_like(q), []
        for rows in _sentences(cu_seqlens):
            p = softmax(_heads(q[rows]) @ _heads(k[rows]).swapaxes(1, 2), q.shape[2])
            o[rows] = _tokens(p @ _heads(v[rows]))
            saved.append(p)
        return o, saved

    def backward(do, q, k, v, o, saved, cu_seqlens):
        dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
        scale = q.dtype.type(q.shape[2] ** -0.5)
        for rows, p in zip(_sentences(cu_seqlens), saved):
            dp = _heads(do[rows]) @ _heads(v[rows]).swapaxes(1, 2)
            ds = p * (dp - (dp * p).sum(axis=2, keepdims=True)) * scale
            dq[rows] = _tokens(ds @ _heads(k[rows]))
            dk[rows] = _tokens(ds.swapaxes(1, 2) @ _heads(q[rows]))
            dv[rows] = _tokens(p.swapaxes(1, 2) @ _heads(do[rows]))
        return dq, dk, dv

    return Attention(forward, backward)


def unfused_padded():
    """All sentences at once, padded to the longest: what most frameworks' CPU paths do. Forward."""

    def forward(q, k, v, cu_seqlens):
        lengths = np.diff(cu_seqlens)
        real = np.arange(lengths.max()) < lengths[:, None]  # [sentences, longest]

        def padded(x):  # [tokens, heads, head_dim] -> [sentences, heads, longest, head_dim]
            y = np.zeros((*real.shape, *x.shape[1:]), x.dtype)
            y[real] = x
            return y.swapaxes(1, 2)

        scores = padded(q) @ padded(k).swapaxes(2, 3)
        np.copyto(scores, -np.inf, where=~real[:, None, None, :])
        return (softmax(scores, q.shape[2]) @ padded(v)).swapaxes(1, 2)[real], None

    return Attention(forward, None)


def padded_bytes(heads, cu_seqlens):
    """Bytes of the fp32 scores of unfused_padded."""
    lengths = np.diff(cu_seqlens).astype(np.int64)
    return int(len(lengths) * heads * lengths.max() ** 2 * 4)


def softmax(scores, head_dim):
    """Softmax of scores / sqrt(head_dim) along the last axis, in place, to spare a copy."""
    scores *= scores.dtype.type(head_dim**-0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


SECONDS = 1.0  # that measure repeats a model, at most


class Stopwatch:
    """An attention that counts the seconds and the peak bytes of the one that it wraps."""

    def __init__(self, attention):
        self._inner = attention
        self.attention = Attention(self._forward, attention.backward)
        self.seconds = 0.0
        self.peak_bytes = 0  # outputs and scratch of one call, inputs excluded

    def _forward(self, *args):
        begin = time.perf_counter()
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
        result = self._inner.forward(*args)
        if tracemalloc.is_tracing():
            peak = tracemalloc.get_traced_memory()[1] - before
            self.peak_bytes = max(self.peak_bytes, peak)
        self.seconds += time.perf_counter() - begin
        return result


def measure(model, batch):
    """Best (seconds of the model, of its attention) of some forward passes, and peak bytes."""
    inner = model.attention
    try:
        times, first = [], time.perf_counter()
        while not times or (len(times) < 5 and time.perf_counter() - first < SECONDS):
            watch = Stopwatch(inner)
            model.attention = watch.attention
            begin = time.perf_counter()
            model.embed(batch)
            times.append((time.perf_counter() - begin, watch.seconds))
        return *min(times), _peak_bytes(model, batch, watch)
    finally:
        model.attention = inner


def _peak_bytes(model, batch, watch):
    # In a thread of its own: tessera keeps a small workspace for each thread between calls, which
    # tracemalloc would not see again. Apart from the timing, which it slows.
    tracemalloc.start()
    try:
        thread = threading.Thread(target=model.embed, args=(batch,))
        thread.start()
        thread.join()
    finally:
        tracemalloc.stop()
    return watch.peak_bytes


def _sentences(cu_seqlens):
    return (slice(begin, end) for begin, end in itertools.pairwise(cu_seqlens))


def _heads(x):
    return x.swapaxes(0, 1)  # [tokens, heads, head_dim] -> [heads, tokens, head_dim]


def _tokens(x):
    return x.swapaxes(0, 1)
