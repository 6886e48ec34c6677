# SPDX-License-Identifier: Apache-2.0
"""One call in TE-JAX's words -> the keywords of tessera.jax.attention.

    TE-JAX                                  tessera
    BS3HD, BSHD_BS2HD, ...                  Slices of the packed array
    THD: [b, s, h, d], segments in rows     thd: [b * s, h, d], cu_seqlens_*, cu_seqlens_*_padded
    padding with a descriptor               seqlens_q, seqlens_k
    padding with a mask (True = hidden)     drop, and seqlens_* of what it shows
    mask type, window                       causal, window, align
    bias types                              bias, bias_at
    softmax types, softmax_offset           sink
    seed                                    rng_state

Nothing here looks at a value on the device, but for what the host can see of eager calls.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ... import jax as tessera_jax
from ..._lib import Refused
from .. import _words as te_words
from . import _words
from ._enums import (AttnBiasType, AttnMaskType, AttnSoftmaxType, CPStrategy, QKVLayout)
from ._sequences import Segments, SequenceDescriptor
from ._words import error


@dataclasses.dataclass(frozen=True)
class Config:
    """What is static in a call."""
    attn_bias_type: AttnBiasType
    attn_mask_type: AttnMaskType
    softmax_type: AttnSoftmaxType
    qkv_layout: QKVLayout
    scaling_factor: float
    dropout_probability: float
    is_training: bool
    max_segments_per_seq: int = 1
    window_size: tuple[int, int] = (-1, -1)
    context_parallel_load_balanced: bool = False
    cp_axis: str = ""
    cp_strategy: CPStrategy = CPStrategy.DEFAULT
    stripe_size: int | None = None
    return_max_logit: bool = False
    deterministic: bool | None = None  # None is what XLA's flags say

    def __post_init__(self):
        put = object.__setattr__
        for name, kind in (("attn_bias_type", AttnBiasType), ("attn_mask_type", AttnMaskType),
                           ("softmax_type", AttnSoftmaxType), ("qkv_layout", QKVLayout),
                           ("cp_strategy", CPStrategy)):
            put(self, name, _words.enum_member(name, getattr(self, name), kind))
        put(self, "window_size", _words.window(self.window_size))
        put(self, "dropout_probability", _words.probability(self.dropout_probability))
        n = self.max_segments_per_seq
        if not isinstance(n, int) or n < 1:
            raise error("max_segments_per_seq", n, "must be a Python integer of at least 1")

    @property
    def dropout_p(self) -> float:
        return self.dropout_probability if self.is_training else 0.0

    @property
    def is_thd(self) -> bool:
        return self.qkv_layout.is_thd()

    def band(self) -> dict:
        return te_words.band(te_words.MASKS[self.attn_mask_type.value], *self.window_size)

    def bias(self, array) -> dict:
        return te_words.bias(te_words.BIASES[self.attn_bias_type.value], array)

    def sink(self, offset=None) -> dict:
        return te_words.sink(te_words.SOFTMAXES[self.softmax_type.value], offset)


def separate(qkv, layout: QKVLayout) -> list:
    """q, k and v, each an array [b, s, h, d] or a Slice of a packed one; checks their number and
    ranks."""
    packed = 1 if layout.is_qkvpacked() else 2 if layout.is_kvpacked() else 3
    if not isinstance(qkv, (tuple, list)) or len(qkv) != packed:
        raise error("qkv", f"{len(qkv)} arrays" if isinstance(qkv, (tuple, list)) else
                    type(qkv).__name__, f"must be a tuple of {packed} for {layout.name}")
    parts = {1: (3,), 2: (1, 2), 3: (1, 1, 1)}[packed]
    sides = []
    for i, (x, n) in enumerate(zip(qkv, parts)):
        if len(x.shape) != (4 if n == 1 else 5) or n > 1 and x.shape[2] != n:
            axes = "[b, s, h, d]" if n == 1 else f"[b, s, {n}, h, d]"
            raise error(f"qkv[{i}].shape", tuple(x.shape), f"must be {axes} for {layout.name}")
        sides += [x] if n == 1 else [tessera_jax.Slice(x, 2, j) for j in range(n)]
    b = sides[0].shape[0]
    for name, x in zip(("key", "value"), sides[1:]):
        if x.shape[0] != b:
            raise error(f"{name}.shape", tuple(x.shape), f"must have query's batch size, {b}")
    return sides


def arguments(config: Config, qkv, bias, softmax_offset, sequences, rng_words) -> dict:
    """Keywords of tessera.jax.attention, q, k and v among them. `sequences` is a
    SequenceDescriptor, a mask that hides where it is not 0, or None; rng_words are uint32 [4]."""
    q, k, v = separate(qkv, config.qkv_layout)
    given = {"layout": "bshd", "softmax_scale": config.scaling_factor, **config.band(),
             "deterministic": config.deterministic}
    if config.is_thd:
        given.update(_packed(config, q, k, sequences))
        q, k, v = _flat(q, k, v)
    elif config.attn_mask_type.is_padding():
        given.update(_padding(config, q, k, sequences))
    given.update(_scores(config, bias, softmax_offset, q.shape[-2]))
    if config.dropout_p:
        given.update(dropout_p=config.dropout_p, rng_state=rng_words)
    return {"q": q, "k": k, "v": v, **given}


def segments(config: Config, q, k, sequences) -> list[Segments]:
    """The segments of q and of kv that a descriptor, or None, says."""
    sides = []
    for side, x in enumerate((q, k)):
        b, s = x.shape[:2]
        if sequences is None or not config.is_thd and not config.attn_mask_type.is_padding():
            sides.append(Segments.one_each(jnp.full((b,), s, jnp.int32)))
        else:
            sides.append(sequences.segments(side, config.qkv_layout, b, s,
                                            config.max_segments_per_seq))
    return sides


# ---- sequences ----

def _packed(config: Config, q, k, sequences) -> dict:
    if not config.attn_mask_type.is_padding():
        raise error("attn_mask_type", config.attn_mask_type.name, f"{config.qkv_layout.name} needs "
                    "a padding mask: PADDING_MASK, PADDING_CAUSAL_MASK or "
                    "PADDING_CAUSAL_BOTTOM_RIGHT_MASK")
    if not isinstance(sequences, SequenceDescriptor):
        raise error("sequence_descriptor", type(sequences).__name__, "must be a "
                    f"SequenceDescriptor for {config.qkv_layout.name}")
    sides = segments(config, q, k, sequences)
    counts = [side.lengths.shape[1] for side in sides]
    if counts[0] != counts[1]:
        raise error("seqlens", counts, "q and kv must have as many places for sequences in a row")
    packed = {"layout": "thd"}
    for side, x, segment in zip("qk", (q, k), sides):
        cu_seqlens, starts = segment.cu_seqlens(x.shape[1])
        packed[f"cu_seqlens_{side}"], packed[f"cu_seqlens_{side}_padded"] = cu_seqlens, starts
        packed[f"max_seqlen_{side}"] = x.shape[1]
    return packed


def _padding(config: Config, q, k, sequences) -> dict:
    if isinstance(sequences, SequenceDescriptor):
        lengths = [side.lengths[:, 0] for side in segments(config, q, k, sequences)]
        return dict(zip(("seqlens_q", "seqlens_k"), lengths))
    if sequences is None:
        raise error("sequence_descriptor", None, f"{config.attn_mask_type.name} needs a "
                    "SequenceDescriptor, or a mask of what is hidden")
    b, sq, sk = q.shape[0], q.shape[1], k.shape[1]
    hidden = hidden_by(sequences, b, sq, sk)
    shown = jnp.broadcast_to(~hidden, (*hidden.shape[:2], sq, sk))
    rows, columns = jnp.any(shown, axis=(1, 3)), jnp.any(shown, axis=(1, 2))
    lengths = [jnp.broadcast_to(_end(seen), (b,)) for seen in (rows, columns)]
    return {"drop": hidden, **dict(zip(("seqlens_q", "seqlens_k"), lengths))}


def hidden_by(mask, b: int, sq: int, sk: int):
    """A mask, checked, as booleans. As in TE, axes of extent 1 may stand between the first and the last three: MaxText
    has one more of them."""
    shape = (b, None, sq, sk)
    if mask.ndim > 4 and set(mask.shape[1:-3]) == {1}:
        mask = mask.reshape(mask.shape[0], *mask.shape[-3:])
    if mask.ndim != 4 or any(n != 1 and full is not None and n != full
                             for n, full in zip(mask.shape, shape)):
        raise error("mask.shape", tuple(mask.shape), "must be broadcastable to [b, h, sq, skv] "
                    f"with b={b}, sq={sq}, skv={sk}")
    return mask != 0


def _end(seen):
    """One past the last True of [b, s]."""
    return jnp.max(jnp.where(seen, jnp.arange(1, seen.shape[1] + 1, dtype=jnp.int32), 0), axis=1,
                   initial=0)


# ---- packed arrays ----

def _flat(*sides):
    """[b * s, h, d] of each side; slices of one array stay slices of one array."""
    flat = {}
    for x in sides:
        array = x.array if isinstance(x, tessera_jax.Slice) else x
        if id(array) not in flat:
            flat[id(array)] = array.reshape(-1, *array.shape[2:])
        tokens = flat[id(array)]
        yield tokens if array is x else tessera_jax.Slice(tokens, x.axis - 1, x.index)


# ---- scores ----

def _scores(config: Config, bias, softmax_offset, heads: int) -> dict:
    scores = {}
    if config.attn_bias_type == AttnBiasType.NO_BIAS:
        if bias is not None:
            raise error("bias", f"an array {tuple(bias.shape)}", "must be None with "
                        "attn_bias_type=NO_BIAS")
    elif bias is None:
        raise error("bias", None, f"must be given with attn_bias_type={config.attn_bias_type.name}")
    elif config.is_thd:
        raise Refused(f"fused_attn: bias={config.attn_bias_type.name}: TE reads it by the place in "
                      "the row and tessera by that in the sequence; "
                      f"{config.qkv_layout.name} takes none")
    else:
        scores.update(config.bias(bias))
    return scores | sink_of(config, softmax_offset, heads)


def sink_of(config: Config, softmax_offset, heads: int) -> dict:
    """sink, "off_by_one" or [h], or nothing. An offset of OFF_BY_ONE has no gradient, as in TE."""
    kind = config.softmax_type
    if softmax_offset is None:
        if kind == AttnSoftmaxType.LEARNABLE_SOFTMAX:
            raise error("softmax_offset", None, "must be given with LEARNABLE_SOFTMAX, "
                        "[1, h, 1, 1]")
        return config.sink()
    if kind == AttnSoftmaxType.VANILLA_SOFTMAX:
        raise error("softmax_offset", f"an array {tuple(softmax_offset.shape)}", "must be None "
                    "with VANILLA_SOFTMAX")
    if softmax_offset.shape != (1, heads, 1, 1):
        raise error("softmax_offset.shape", tuple(softmax_offset.shape),
                    f"must be [1, {heads}, 1, 1]")
    sink = softmax_offset.reshape(heads).astype(jnp.float32)
    return config.sink(sink if kind == AttnSoftmaxType.LEARNABLE_SOFTMAX else jax.lax.stop_gradient(sink))


# ---- seeds ----

def rng_words(seed, dropout_p: float):
    """uint32 [4], the seed and the offset of the mask: the first two words of a seed of any shape,
    or of a JAX key, and 0."""
    if seed is None:
        if dropout_p:
            raise error("seed", None, "must be given with dropout: uint32 of two words or more, or "
                        "a JAX key")
        return jnp.zeros(4, jnp.uint32)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if not jnp.issubdtype(seed.dtype, jnp.integer) or seed.size < 2:
        raise error("seed", f"{seed.dtype}{list(seed.shape)}", "must be uint32 of two words or "
                    "more, or a JAX key")
    words = seed.reshape(-1)[:2].astype(jnp.uint32)
    return jnp.concatenate([words, jnp.zeros(2, jnp.uint32)])
