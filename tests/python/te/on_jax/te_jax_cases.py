# SPDX-License-Identifier: Apache-2.0
"""Calls of TE-JAX's fused_attn, drawn from what TE's own tests vary, and attention written out."""

import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax_device  # noqa: F401  (products in fp32)
import numpy as np

import tessera.jax
from tessera.te.jax.attention import (AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout,
                                      SequenceDescriptor, fused_attn)

PLACES = 3  # for segments in a row, one more than there are


class Sizes(NamedTuple):
    b: int
    sq: int
    sk: int
    hq: int
    hk: int
    dqk: int
    dv: int


SIZES = {"self": Sizes(2, 33, 33, 4, 4, 16, 16), "cross": Sizes(2, 24, 40, 4, 4, 16, 16),
         "longer_q": Sizes(2, 40, 24, 2, 2, 32, 32), "gqa": Sizes(2, 33, 33, 4, 2, 16, 16),
         "mla": Sizes(1, 20, 28, 4, 1, 24, 16)}
BIASES = {None: None, "1HSS": (0, 1), "B1SS": (1, 0), "BHSS": (1, 1), "11SS": (0, 0)}
AXES = {
    "layout": tuple(QKVLayout), "mask": tuple(AttnMaskType), "sizes": tuple(SIZES),
    "dtype": ("bfloat16", "float16", "float32"), "window": (None, (7, 0), (5, 3), (-1, 4)),
    "bias": (None, "1HSS", "B1SS", "BHSS", "11SS", "pre"), "softmax": tuple(AttnSoftmaxType),
    "dropout": (0.0, 0.2), "described": ("mask", "seqlens", "ids")}


class Case(NamedTuple):
    layout: QKVLayout
    mask: AttnMaskType
    sizes: str
    dtype: str
    window: tuple | None
    bias: str | None
    softmax: AttnSoftmaxType
    dropout: float
    described: str

    def __str__(self):
        words = [getattr(x, "name", str(x)) for x in self]
        return "-".join(words).replace(" ", "")


def is_legal(case: Case) -> bool:
    layout, sizes = case.layout, SIZES[case.sizes]
    if layout.is_thd() and (not case.mask.is_padding() or case.bias or case.described == "mask"):
        return False
    if layout.is_qkvpacked() and case.sizes != "self" or \
            layout.is_kvpacked() and sizes.dqk != sizes.dv:
        return False
    return not (case.window and case.window[1] and case.mask.is_causal())


def cases(number: int, seed: int = 0) -> list[Case]:
    """As many of each layout, and of each mask that goes with it; the same ones each time."""
    draw = random.Random(seed)
    drawn = []
    for layout in QKVLayout:
        masks = [mask for mask in AttnMaskType if mask.is_padding() or not layout.is_thd()]
        for place in range(number // len(QKVLayout)):
            mask = masks[place % len(masks)]
            while not is_legal(case := Case(layout, mask, *(
                    draw.choice(values) for values in list(AXES.values())[2:]))) or case in drawn:
                pass
            drawn.append(case)
    return drawn


class Problem:
    """The arrays of a case, what each query sees, and TE's description of the sequences."""

    def __init__(self, case: Case):
        self.case, self.sizes = case, SIZES[case.sizes]
        n = self.sizes
        rng = np.random.default_rng(list(str(case).encode()))
        dtype = jnp.dtype(case.dtype)

        def array(*shape):
            return jnp.asarray(rng.uniform(-1, 1, shape), dtype)
        self.q = array(n.b, n.sq, n.hq, n.dqk)
        self.k, self.v = array(n.b, n.sk, n.hk, n.dqk), array(n.b, n.sk, n.hk, n.dv)
        self.weights = array(n.b, n.sq, n.hq, n.dv)
        self.bias = self.offset = None
        if case.bias:
            b, h = BIASES["BHSS" if case.bias == "pre" else case.bias]
            self.bias = array(n.b if b else 1, n.hq if h else 1, n.sq, n.sk)
        if case.softmax == AttnSoftmaxType.LEARNABLE_SOFTMAX:
            self.offset = jnp.asarray(rng.uniform(-1, 1, (1, n.hq, 1, 1)), jnp.float32)
        self.seed = jnp.asarray(rng.integers(0, 2**32, (4, 2)), jnp.uint32)
        segments = _packed if case.layout.is_thd() else _padded
        self.ids_q, self.pos_q, self.len_q = segments(rng, n.b, n.sq, case.mask)
        one = case.layout.is_qkvpacked()
        self.ids_k, self.pos_k, self.len_k = (self.ids_q, self.pos_q, self.len_q) if one else \
            segments(rng, n.b, n.sk, case.mask)
        self.seen = self._seen()
        self.keep = self._keep()

    def _seen(self) -> np.ndarray:
        """[b, 1, sq, sk], as TE defines its masks."""
        q, k = self.pos_q[:, :, None], self.pos_k[:, None, :]
        if self.case.mask.is_bottom_right():
            q, k = q - self.len_q[:, :, None], k - self.len_k[:, None, :]
        seen = (self.ids_q[:, :, None] == self.ids_k[:, None, :]) & (self.ids_q[:, :, None] != 0)
        if self.case.mask.is_causal():
            seen &= q >= k
        left, right = self.case.window or (-1, -1)
        seen &= (left < 0) | (k >= q - left)
        if not self.case.mask.is_causal():
            seen &= (right < 0) | (k <= q + right)
        return seen[:, None]

    def _keep(self):
        """The factor of each probability, [b, h, sq, sk]: that of its place in its sequence."""
        n, p = self.sizes, self.case.dropout
        if not p:
            return 1.0
        places = PLACES if self.case.layout.is_thd() else 1
        words = [int(x) for x in self.seed.reshape(-1)[:2]]
        state = jnp.asarray([*words, 0, 0], jnp.uint32)
        mask = np.asarray(tessera.jax.dropout_mask(n.b * places, n.hq, n.sq, n.sk, p, state))
        sequence = np.arange(n.b)[:, None] * places + np.maximum(self.ids_q - 1, 0)
        mask = mask[sequence[:, :, None], :, self.pos_q[:, :, None], self.pos_k[:, None, :]]
        threshold = int(p * 65536 + 0.5)
        return np.moveaxis(mask, -1, 1) * (65536 / (65536 - threshold))

    def descriptor(self):
        if self.case.described == "mask":
            n = self.sizes
            inside = (self.ids_q[:, :, None] == self.ids_k[:, None, :]) & \
                (self.ids_q[:, :, None] != 0)
            return jnp.asarray(~inside.reshape(n.b, 1, n.sq, n.sk))
        sides = (self.ids_q, self.pos_q), (self.ids_k, self.pos_k)
        if self.case.described == "ids":
            return SequenceDescriptor.from_segment_ids_and_pos(
                *(tuple(map(jnp.asarray, pair)) for pair in zip(*sides)))
        if not self.case.layout.is_thd():
            return SequenceDescriptor.from_seqlens(
                tuple(jnp.asarray((ids != 0).sum(-1), jnp.int32) for ids, _ in sides))
        lengths, offsets = zip(*(_lengths_and_offsets(ids) for ids, _ in sides))
        return SequenceDescriptor.from_seqlens_and_offsets(lengths, offsets)

    def arguments(self) -> dict:
        case = self.case
        bias_type = AttnBiasType.NO_BIAS if case.bias is None else \
            AttnBiasType.PRE_SCALE_BIAS if case.bias == "pre" else AttnBiasType.POST_SCALE_BIAS
        return dict(attn_bias_type=bias_type, attn_mask_type=case.mask, qkv_layout=case.layout,
                    softmax_type=case.softmax, scaling_factor=self.sizes.dqk ** -0.5,
                    dropout_probability=case.dropout, is_training=True, window_size=case.window,
                    max_segments_per_seq=PLACES if case.layout.is_thd() else 1)

    def packed(self, q, k, v) -> tuple:
        if self.case.layout.is_qkvpacked():
            return (jnp.stack([q, k, v], 2),)
        return (q, jnp.stack([k, v], 2)) if self.case.layout.is_kvpacked() else (q, k, v)

    def fused(self, q, k, v, bias, offset, descriptor):
        return fused_attn(self.packed(q, k, v), bias, descriptor,
                          self.seed if self.case.dropout else None, softmax_offset=offset,
                          **self.arguments())

    def written_out(self, q, k, v, bias, offset):
        """In fp32."""
        n, case = self.sizes, self.case
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.repeat(x, n.hq // n.hk, 2) for x in (k, v))
        x = jnp.einsum("bihd,bjhd->bhij", q, k)
        bias = 0 if bias is None else bias.astype(jnp.float32)
        scale = n.dqk ** -0.5
        x = (x + bias) * scale if case.bias == "pre" else x * scale + bias
        weights = jnp.where(self.seen, jnp.exp(x), 0)  # of scores near 0, which need no maximum
        sink = {AttnSoftmaxType.VANILLA_SOFTMAX: 0, AttnSoftmaxType.OFF_BY_ONE_SOFTMAX: 1}
        total = weights.sum(-1, keepdims=True) + \
            (jnp.exp(offset) if offset is not None else sink[case.softmax])
        p = weights / jnp.where(total == 0, 1, total) * self.keep
        return jnp.einsum("bhij,bjhd->bihd", p, v)


def _padded(rng, b, s, mask):
    """One sequence in each row, of 1 .. s tokens if there is padding."""
    lengths = rng.integers(1, s + 1, (b, 1)) if mask.is_padding() else np.full((b, 1), s)
    pos = np.broadcast_to(np.arange(s), (b, s))
    return (pos < lengths).astype(np.int32), pos.astype(np.int32), np.broadcast_to(lengths, (b, s))


def _packed(rng, b, s, mask):
    """Two sequences in each row, the second perhaps empty, with padding after each."""
    ids, pos, lengths = (np.zeros((b, s), np.int32) for _ in range(3))
    for row in range(b):
        at = 0
        for number in range(PLACES - 1):
            room = rng.integers(1, s // 2 + 1)
            length = rng.integers(1 if number == 0 else 0, room + 1)
            ids[row, at:at + length] = number + 1
            pos[row, at:at + room] = np.arange(room)
            lengths[row, at:at + length] = length
            at += room
    return ids, pos, lengths


def _lengths_and_offsets(ids):
    """TE's: a place for each token of the row, -1 where none is used."""
    b, s = ids.shape
    lengths, offsets = np.full((b, s), -1, np.int32), np.full((b, s + 1), -1, np.int32)
    for row in range(b):
        for number in range(1, ids[row].max() + 1):
            tokens = np.flatnonzero(ids[row] == number)
            if len(tokens):
                lengths[row, number - 1], offsets[row, number - 1] = len(tokens), tokens[0]
    return jnp.asarray(lengths), jnp.asarray(offsets)


def gradients(function, arrays):
    """(out, gradients of the arrays that are there) of one program."""
    there = [i for i, x in enumerate(arrays) if x is not None]

    def loss(weights, *given):
        every = list(arrays)
        for i, x in zip(there, given):
            every[i] = x
        out = function(*every)
        return (out.astype(jnp.float32) * weights).sum(), out
    run = jax.jit(jax.value_and_grad(loss, argnums=range(1, len(there) + 1), has_aux=True))

    def call(weights):
        (_, out), grads = run(weights, *(arrays[i] for i in there))
        return out, dict(zip((("q", "k", "v", "bias", "offset")[i] for i in there), grads))
    return call
