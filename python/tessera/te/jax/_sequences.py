# SPDX-License-Identifier: Apache-2.0
"""Which tokens of [b, s] are sequences: TE's descriptors, read.

Every description becomes Segments: `n` sequences in a row, some of them empty. Sequence m of the
queries sees sequence m of the keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._enums import AttnMaskType, QKVLayout
from ._words import error


class Segments(NamedTuple):
    """int32 [b, n] each; starts of empty sequences may be anything."""
    lengths: jax.Array
    starts: jax.Array

    @classmethod
    def one_each(cls, lengths) -> Segments:
        """A sequence at the begin of each row."""
        lengths = jnp.asarray(lengths).astype(jnp.int32)[:, None]
        return cls(lengths, jnp.zeros_like(lengths))

    @classmethod
    def of_ids(cls, ids, n: int) -> Segments:
        """How often each of the ids 1 .. n occurs in ids [b, s], and where first; 0 is padding."""
        b, s = ids.shape
        rows = jnp.arange(b)[:, None]
        place = jnp.where(ids > 0, ids - 1, n)  # n falls out
        lengths = jnp.zeros((b, n), jnp.int32).at[rows, place].add(1, mode="drop")
        tokens = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
        starts = jnp.full((b, n), s, jnp.int32).at[rows, place].min(tokens, mode="drop")
        return cls(lengths, starts)

    def cu_seqlens(self, s: int):
        """(cu_seqlens, cu_seqlens_padded) of the b * n sequences in [b * s] tokens. An empty one
        lies where the one before ends."""
        b, n = self.lengths.shape
        lengths = jnp.maximum(self.lengths, 0)
        starts = self.starts + s * jnp.arange(b, dtype=jnp.int32)[:, None]
        ends = jax.lax.cummax(jnp.where(lengths > 0, starts + lengths, 0).reshape(-1))
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
        starts = jnp.where(lengths > 0, starts, before.reshape(b, n)).reshape(-1)
        total = jnp.full(1, b * s, jnp.int32)
        cu_seqlens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths.reshape(-1))])
        return cu_seqlens.astype(jnp.int32), jnp.concatenate([starts, total])


class Tokens(NamedTuple):
    """What each token of [b, s] is: in which sequence (-1: in none), where in it, of what
    length."""
    sequence: jax.Array
    position: jax.Array
    length: jax.Array

    @classmethod
    def of(cls, segments: Segments, s: int) -> Tokens:
        lengths = jnp.maximum(segments.lengths, 0)[..., None]
        token = jnp.arange(s, dtype=jnp.int32)
        position = token - segments.starts[..., None]              # [b, n, s]
        inside = (position >= 0) & (position < lengths)
        number = jnp.arange(lengths.shape[1], dtype=jnp.int32)[:, None]
        return cls(jnp.sum(jnp.where(inside, number + 1, 0), 1) - 1,
                   jnp.sum(jnp.where(inside, position, 0), 1),
                   jnp.sum(jnp.where(inside, lengths, 0), 1))


def _counted(ids, is_thd: bool) -> jax.Array:
    """Positions of ids [b, s] in their segments, or in the row."""
    token = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    if not is_thd:
        return token
    begins = jnp.concatenate((jnp.ones_like(ids[..., :1], bool), ids[..., 1:] != ids[..., :-1]), -1)
    return token - jax.lax.cummax(jnp.where(begins, token, 0), axis=ids.ndim - 1)


@jax.tree_util.register_pytree_node_class
class SequenceDescriptor:
    """Where sequences lie in q and in k and v; a pytree of four pairs (q, kv).

    from_seqlens               one sequence in a row, BSHD
    from_seqlens_and_offsets   several in a row, THD
    from_segment_ids_and_pos   either

    An argument is one array for both sides, or a pair.
    """

    def __init__(self, seqlens=None, seq_offsets=None, segment_ids=None, segment_pos=None):
        none = jnp.zeros(0, jnp.int32)
        self.seqlens = (none, none) if seqlens is None else seqlens
        self.seq_offsets = (none, none) if seq_offsets is None else seq_offsets
        self.segment_ids = (none, none) if segment_ids is None else segment_ids
        self.segment_pos = (none, none) if segment_pos is None else segment_pos

    def tree_flatten(self):
        return (self.seqlens, self.seq_offsets, self.segment_ids, self.segment_pos), None

    @classmethod
    def tree_unflatten(cls, aux_data, children):
        return cls(*children)

    @classmethod
    def from_seqlens(cls, seqlens) -> SequenceDescriptor:
        """Lengths [b]."""
        return cls(seqlens=_pair("seqlens", seqlens))

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens, seq_offsets) -> SequenceDescriptor:
        """Lengths [b, n] and offsets in the row [b, n + 1], -1 (or 0) for lengths that are
        unused."""
        return cls(seqlens=_pair("seqlens", seqlens),
                   seq_offsets=_pair("seq_offsets", seq_offsets))

    @classmethod
    def from_segment_ids_and_pos(cls, segment_ids, segment_pos=None, *, is_thd: bool | None = None,
                                 is_segment_ids_reordered: bool = False) -> SequenceDescriptor:
        """Ids [b, s] from 1 on, ascending in a row, 0 for padding; positions in the segment [b,
        s]. With is_thd, which later versions of TE ask for, positions may be left out: they count from
        the begin of each segment (THD) or of the row, where ids are not reordered."""
        if segment_pos is None and (is_thd is None or is_segment_ids_reordered):
            raise error("segment_pos", None, "must be given, [batch, max_seqlen]: the position of "
                        "each token in its segment; is_thd=True or False would count it, of ids that are "
                        "not reordered", "SequenceDescriptor")
        if segment_pos is None:
            segment_pos = tuple(_counted(ids, is_thd) for ids in _pair("segment_ids", segment_ids))
        return cls(segment_ids=_pair("segment_ids", segment_ids),
                   segment_pos=_pair("segment_pos", segment_pos))

    @property
    def has_ids(self) -> bool:
        return self.segment_ids[0].size + self.segment_ids[1].size > 0

    def get_seqlens_and_offsets(self, attn_mask_type: AttnMaskType, qkv_layout: QKVLayout,
                                window_size=None, max_segments_per_seq: int = 1):
        """((q, kv) lengths, (q, kv) offsets) as TE hands them to cuDNN: of ids in BSHD lengths [b]
        and no offsets, in THD lengths [b, n] and offsets [b, n + 1], -1 where there is none."""
        if not self.has_ids:
            return self.seqlens, self.seq_offsets
        if not qkv_layout.is_thd():
            none = jnp.zeros(0, jnp.int32)
            count = _whole if not attn_mask_type.is_padding() else _tokens
            return tuple(map(count, self.segment_ids)), (none, none)
        sides = [Segments.of_ids(ids, max_segments_per_seq) for ids in self.segment_ids]
        return tuple(side.lengths for side in sides), tuple(_te_offsets(*side) for side in sides)

    def segments(self, side: int, qkv_layout: QKVLayout, b: int, s: int, n: int) -> Segments:
        """The segments of q (side 0) or kv (1), whose arrays are [b, s, ...] with up to n sequences in a row."""
        what = ("q", "kv")[side]
        if self.has_ids:
            ids = _checked(f"segment_ids of {what}", self.segment_ids[side], (b, s))
            if not qkv_layout.is_thd():
                return Segments.one_each(_tokens(ids))
            _check_ids(what, ids, self.segment_pos[side], n)
            return Segments.of_ids(ids, n)
        if not qkv_layout.is_thd():
            return Segments.one_each(_checked(f"seqlens of {what}", self.seqlens[side], (b,)))
        lengths, offsets = self.seqlens[side], self.seq_offsets[side]
        if lengths.ndim != 2 or lengths.shape[0] != b or offsets.ndim != 2 or \
                offsets.shape[0] != b or offsets.shape[1] < min(lengths.shape[1], n):
            raise error(f"seqlens, seq_offsets of {what}", (lengths.shape, offsets.shape),
                        f"must be [{b}, n] and [{b}, n + 1] for {qkv_layout.name}")
        _check_lengths(what, lengths, offsets, n)
        n = min(n, lengths.shape[1])
        return Segments(lengths[:, :n].astype(jnp.int32), offsets[:, :n].astype(jnp.int32))


# ---- reading descriptors ----

def _pair(name: str, value) -> tuple:
    if isinstance(value, tuple):
        if len(value) != 2:
            raise error(name, f"a tuple of {len(value)}", "must be an array or a pair (q, kv)",
                        "SequenceDescriptor")
        return value
    if not hasattr(value, "shape"):
        raise TypeError(f"SequenceDescriptor: {name}={type(value).__name__}: must be an array or a "
                        "pair (q, kv) of arrays")
    return value, value


def _checked(name: str, x, shape: tuple):
    if x.shape != shape:
        raise error(f"{name}.shape", tuple(x.shape), f"must be {shape}")
    return x


def _tokens(ids):
    return jnp.sum(ids != 0, axis=-1, dtype=jnp.int32)


def _whole(ids):
    return jnp.full(ids.shape[:-1], ids.shape[-1], jnp.int32)


def _te_offsets(lengths, starts):
    """TE's offsets: ascending, then -1."""
    sorted_starts = jnp.sort(jnp.where(lengths > 0, starts, jnp.iinfo(jnp.int32).max), axis=-1)
    found = jnp.arange(lengths.shape[1]) < jnp.sum(lengths > 0, -1, keepdims=True)
    offsets = jnp.where(found, sorted_starts, -1)
    return jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)


def _check_ids(what: str, ids, positions, n: int):
    """Values, where they are at hand."""
    ids, positions = _at_hand(ids), _at_hand(positions)
    if ids is None:
        return
    if ids.max(initial=0) > n:
        raise error("max_segments_per_seq", n, f"segment_ids of {what} go up to {ids.max()}; give "
                    "at least that")
    before = np.pad(ids[:, :-1], ((0, 0), (1, 0)))
    first = (ids != before) & (ids != 0)
    if np.any(first & (ids <= np.maximum.accumulate(before, axis=-1))):
        raise error(f"segment_ids of {what}", ids.tolist(), "must ascend in a row, and the tokens "
                    "of a segment must lie side by side")
    if positions is not None and np.any(np.where(first, positions, 0)):
        raise error(f"segment_pos of {what}", positions.tolist(), "must be 0 at the begin of each "
                    "segment; parts of segments belong to context parallelism")


def _check_lengths(what: str, lengths, offsets, n: int):
    """Values, where they are at hand."""
    lengths, offsets = _at_hand(lengths), _at_hand(offsets)
    if lengths is None or offsets is None:
        return
    if np.any(lengths[:, n:] > 0):
        last = int(np.max(np.nonzero(np.any(lengths > 0, axis=0))))
        raise error("max_segments_per_seq", n, f"seqlens of {what} has more sequences in a row; "
                    f"give {last + 1}")
    used = lengths[:, :n] > 0
    if np.any(used & (offsets[:, :used.shape[1]] < 0)):
        raise error(f"seq_offsets of {what}", offsets.tolist(), "must be at least 0 where the "
                    "length at the same place is not 0")


def _at_hand(x) -> np.ndarray | None:
    """x on the host, unless it is traced or lies on other hosts."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


# ---- masks ----

def run_length_fill_flattened(segment_ids_flattened):
    """run_length_fill of one row, [s]."""
    return run_length_fill(segment_ids_flattened[None])[0]


def run_length_fill(segment_ids):
    """For each token how many of its run of equal ids there are, 0 for padding:
    [1 1 2 2 2 0 3] -> [2 2 3 3 3 0 1], in the shape of segment_ids."""
    ids = segment_ids.reshape(-1, segment_ids.shape[-1])
    rows = jnp.arange(ids.shape[0])[:, None]
    run = jnp.cumsum(jnp.diff(ids, axis=-1, prepend=ids[:, :1]) != 0, axis=-1)
    counts = jnp.zeros(ids.shape, jnp.int32).at[rows, run].add(1)
    return jnp.where(ids == 0, 0, counts[rows, run]).reshape(segment_ids.shape)


def make_swa_mask(segment_pos_q, segment_pos_kv, window_size=None, dtype=jnp.float32,
                  segment_ids_q=None, segment_ids_kv=None):
    """[b, 1, sq, skv] of `dtype`, 1 where kv - left .. q + right are seen by positions [b, sq] and
    [b, skv]; None and negative numbers bound nothing. With segment ids positions count from the
    ends of their segments, and only the left bound applies, as TE's bottom-right masks have it."""
    left, right = (None, None) if window_size is None else \
        (None if n < 0 else n for n in window_size)
    q, kv = segment_pos_q, segment_pos_kv
    if segment_ids_q is not None and segment_ids_kv is not None:
        q, kv = q - run_length_fill(segment_ids_q), kv - run_length_fill(segment_ids_kv)
        right = None
    distance = q[..., :, None] - kv[..., None, :]
    seen = jnp.ones(distance.shape, jnp.bool_)
    if left is not None:
        seen &= distance <= left
    if right is not None:
        seen &= -distance <= right
    return seen[..., None, :, :].astype(dtype)
