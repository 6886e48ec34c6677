# SPDX-License-Identifier: Apache-2.0
"""Rows and the tables that say where they lie.

XLA wants the same extents on every device. A device's buffer is as large as the largest rank needs:

    thd     [t, ...]        the rank's buffer of Shards, then slack
    padded  [b, s, ...]     for bshd and its permutations: of each sequence its rows, then slack

Here both are rows, [t, ...] or [b * s, ...]. Slack is never read, so that it may hold anything.
"""

from __future__ import annotations

import collections
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...context_parallel import Shards

OPERATION = "tessera.context_parallel.attention"


def error(field: str, value, rule: str, operation: str = OPERATION) -> ValueError:
    return ValueError(f"{operation}: {field}={value}: {rule}")


class Rows:
    """The rows of all ranks under `shards`; int32 tables in host memory."""

    def __init__(self, shards: Shards, is_packed: bool):
        self.shards, self.is_packed = shards, is_packed
        self.tokens = sum(shards.lengths)
        begins = None
        if not is_packed:
            begins = [shards.cu_seqlens(rank) for rank in range(shards.size)]
        # The axis of rows on one device: t, or s of [b, s]. XLA exchanges no empty arrays.
        self.extent = max(1, *shards.extents) if is_packed else max(
            1, *(int(n) for cu in begins for n in np.diff(cu)))
        self.count = self.extent * (1 if is_packed else len(shards.lengths))
        # places[rank]: of each row of its buffer in Shards, the row here.
        self.places = [np.arange(shards.extents[rank]) if is_packed else
                       self._padded(begins[rank]) for rank in range(shards.size)]
        # index[rank, row]: its place among all tokens, sequence after sequence; of slack `tokens`.
        self.index = np.full((shards.size, self.count), self.tokens, np.int32)
        for rank, places in enumerate(self.places):
            index = shards.index(rank)
            self.index[rank, places[index >= 0]] = index[index >= 0]
        # where[token]: its row among those of all ranks.
        self.where = inverse(self.index.reshape(-1), self.tokens)

    def _padded(self, cu) -> np.ndarray:
        counts = np.diff(cu)
        sequence = np.repeat(np.arange(len(counts)), counts)
        return sequence * self.extent + np.arange(len(sequence)) - np.repeat(cu[:-1], counts)


@functools.lru_cache(maxsize=256)
def rows_of(shards: Shards, is_packed: bool) -> Rows:
    """ValueError for padded rows of shards that do not store sequence after sequence."""
    return Rows(shards, is_packed)


def inverse(index: np.ndarray, count: int) -> np.ndarray:
    """[count]: where in `index` each of 0 .. count - 1 is; len(index) for what is not there."""
    found = np.full(count + 1, len(index), np.int32)
    found[index] = np.arange(len(index))
    return found[:count]


# ---- runs ----

class Slot(NamedTuple):
    """The calls of all ranks for the c-th run of every sequence; slot tables are [ranks, ...]."""
    rows: np.ndarray      # [ranks, n]: the row of the device, `count` past a rank's last
    cu: np.ndarray        # [ranks, b + 1]: the runs' lengths, added up
    start: np.ndarray     # [ranks, b]: the runs' first positions

    @property
    def extent(self) -> int:
        return self.rows.shape[1]

    @property
    def lengths(self) -> np.ndarray:
        """[ranks, b]"""
        return np.diff(self.cu)

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))


@functools.lru_cache(maxsize=256)
def _slots_of(shards: Shards, is_packed: bool) -> tuple[Slot, ...]:
    rows, size, b = rows_of(shards, is_packed), shards.size, len(shards.lengths)
    slots: list[list[dict]] = [[{} for _ in range(size)]]
    for rank, runs in enumerate(shards.runs):
        seen = collections.Counter()
        for run in (run for run in runs if run.length):
            if seen[run.sequence] == len(slots):
                slots.append([{} for _ in range(size)])
            slots[seen[run.sequence]][rank][run.sequence] = run
            seen[run.sequence] += 1
    tables = []
    for ranks in slots:
        n = max(sum(run.length for run in own.values()) for own in ranks)
        slot = Slot(np.full((size, n), rows.count, np.int32), np.zeros((size, b + 1), np.int32),
                     np.zeros((size, b), np.int32))
        for rank, own in enumerate(ranks):
            for sequence, run in own.items():
                slot.cu[rank, sequence + 1], slot.start[rank, sequence] = run.length, run.start
            np.cumsum(slot.cu[rank], out=slot.cu[rank])
            for sequence, run in own.items():
                at = slot.cu[rank, sequence]
                slot.rows[rank, at:at + run.length] = rows.places[rank][run.at:run.at + run.length]
        tables.append(slot)
    return tuple(tables)


def slots_of(rows: Rows) -> tuple[Slot, ...]:
    """At least one, which may be empty."""
    return _slots_of(rows.shards, rows.is_packed)


def slot_places(rows: Rows, axis) -> tuple[jax.Array, jax.Array]:
    """This device's rows, slot after slot, and the inverse: by which `taken` puts its buffer in the order of
    slots, and back."""
    ordered = np.concatenate([slot.rows for slot in slots_of(rows)], axis=1)
    back = np.stack([inverse(own, rows.count) for own in ordered])
    return mine(axis, ordered), mine(axis, back)


def mine(axis, table: np.ndarray) -> jax.Array:
    """This device's row of a table with one for each rank."""
    return jnp.asarray(table)[jax.lax.axis_index(axis)]


# ---- moving rows ----

@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def taken(x, there, back, fill=0):
    """Rows `there` of x, `fill` where that is past its end. `back` is the inverse, by which gradients
    are taken as values are: no row of x is there twice."""
    return _look_up(x, there, fill)


def _taken_forward(x, there, back, fill):
    return taken(x, there, back, fill), back


def _taken_backward(_, back, gradient):
    return _look_up(gradient, back, 0), None, None


taken.defvjp(_taken_forward, _taken_backward)


def _look_up(x, there, fill):
    if x.shape[0] == 0:  # of which jnp.take takes nothing
        x = jnp.full((1, *x.shape[1:]), fill, x.dtype)
    return jnp.take(x, there, axis=0, mode="fill", fill_value=fill)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def whole(x, axis, rows: Rows, copies: int):
    """`copies` times the rows of all ranks as whole sequences, [tokens, ...]. Their gradients are added
    up in fp32, over copies and ranks, and rounded once."""
    every = jax.lax.all_gather(x, axis, tiled=True)
    return [jnp.take(every, rows.where, axis=0, mode="clip")] * copies


def _whole_forward(x, axis, rows, copies):
    return whole(x, axis, rows, copies), jnp.zeros(0, x.dtype)


def _whole_backward(axis, rows, copies, like, gradients):
    exact = jnp.promote_types(like.dtype, jnp.float32)
    total = functools.reduce(jnp.add, (x.astype(exact) for x in gradients))
    every = _look_up(total, rows.index.reshape(-1), 0)
    return jax.lax.psum_scatter(every, axis, tiled=True).astype(like.dtype),


whole.defvjp(_whole_forward, _whole_backward)


# ---- whole arrays in the order of shards ----

def shard(x: jax.Array, shards: Shards, *, packed: bool = False) -> jax.Array:
    """Whole sequences in the order in which the ranks' buffers hold them, differentiable: what is split
    evenly over a mesh axis gives every rank its rows.

    x is [b, s, ...] with s at least the longest sequence, or packed [tokens, ...], sequence after
    sequence; so is the result, with each rank's extent times shards.size for s or tokens. Slack is 0.
    ValueError: another extent.

    >>> ids, labels = (shard(x, shards) for x in (ids, labels))     # labels are shifted before
    """
    rows = rows_of(shards, packed)
    if packed:
        _check_leading("shard", x, (rows.tokens,))
        return taken(x, rows.index.reshape(-1), rows.where)
    _check_batch("shard", x, shards, max(shards.lengths, default=0))
    there = np.append(_tokens(shards, x.shape[1]), len(x) * x.shape[1])[rows.index].reshape(-1)
    flat = taken(x.reshape(-1, *x.shape[2:]), there, inverse(there, len(x) * x.shape[1]))
    parts = flat.reshape(shards.size, len(shards.lengths), rows.extent, *x.shape[2:])
    return jnp.moveaxis(parts, 0, 1).reshape(len(shards.lengths), -1, *x.shape[2:])


def unshard(x: jax.Array, shards: Shards, *, packed: bool = False) -> jax.Array:
    """What shard was given, from its result: [b, longest, ...], 0 behind shorter sequences, or packed
    [tokens, ...]; differentiable.

    >>> o = unshard(o, shards)
    """
    rows = rows_of(shards, packed)
    if packed:
        _check_leading("unshard", x, (shards.size * rows.count,))
        return taken(x, rows.where, rows.index.reshape(-1))
    b, longest = len(shards.lengths), max(shards.lengths, default=0)
    _check_leading("unshard", x, (b, shards.size * rows.extent))
    parts = x.reshape(b, shards.size, rows.extent, *x.shape[2:])
    flat = jnp.moveaxis(parts, 1, 0).reshape(-1, *x.shape[2:])
    there = np.full(b * longest, len(flat), np.int32)
    there[_tokens(shards, longest)] = rows.where
    return taken(flat, there, inverse(there, len(flat))).reshape(b, longest, *x.shape[2:])


def positions(shards: Shards, *, packed: bool = False) -> jax.Array:
    """Each row's position in its sequence, int32 [b, s] or packed [t] in the order of shard, for rotary
    embeddings; 0 for slack.

    >>> angles = table[positions(shards)]
    """
    own = np.concatenate([np.zeros(0, np.int32), *(np.arange(n) for n in shards.lengths)])
    if packed:
        return shard(jnp.asarray(own, jnp.int32), shards, packed=True)
    longest = np.arange(max(shards.lengths, default=0), dtype=np.int32)
    return shard(jnp.tile(longest, (len(shards.lengths), 1)), shards)


def _tokens(shards: Shards, extent: int) -> np.ndarray:
    """The row in [b * extent] of each token, sequence after sequence."""
    return np.concatenate([np.zeros(0, np.int32), *(
        n * extent + np.arange(length) for n, length in enumerate(shards.lengths))]).astype(np.int32)


def _check_leading(name: str, x, extents: tuple):
    if tuple(x.shape[:len(extents)]) != extents:
        raise error("x.shape", list(x.shape), f"must begin with {list(extents)} under shards",
                    f"tessera.context_parallel.{name}")


def _check_batch(name: str, x, shards: Shards, longest: int):
    b = len(shards.lengths)
    if x.ndim < 2 or x.shape[0] != b or x.shape[1] < longest:
        raise error("x.shape", list(x.shape), f"must begin with {b} sequences of at least {longest} "
                    f"tokens, as {shards!r} has", f"tessera.context_parallel.{name}")
