# SPDX-License-Identifier: Apache-2.0
"""Which positions of which sequence lie on which rank."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

TILE = 128  # positions; our cuts lie at multiples of it: full tiles, one device's order of sums


class Run(NamedTuple):
    """Neighbouring positions [start, start + length) of a sequence, in rows [at, at + length) of a
    rank's buffer."""
    sequence: int
    start: int
    length: int
    at: int

    @property
    def stop(self) -> int:
        return self.start + self.length


class Shards:
    """Where each position of a batch of sequences lies: immutable, hashable, of host integers.

    A rank's buffer holds runs, in storage order; those of one sequence ascend. Lengths need not be
    divisible by anything, and a rank may hold nothing. `text` says it all, and parse() reads it.

    >>> shards = Shards.zigzag([4096, 1000], size=4)
    >>> shards.tokens(0), shards.positions(0), shards.cu_seqlens(0)
    """

    size: int                           # ranks
    lengths: tuple[int, ...]            # tokens of each sequence
    runs: tuple[tuple[Run, ...], ...]   # of each rank
    extents: tuple[int, ...]            # rows of each rank's buffer
    text: str

    # ---- constructors ----

    @staticmethod
    def zigzag(lengths: Sequence[int], size: int, *, align: int = TILE) -> Shards:
        """Rank r holds chunks r and 2 size - 1 - r of the 2 size chunks of every sequence: equal work
        under a causal mask. Cuts lie at multiples of `align`."""
        lengths, size = _lengths("zigzag", lengths), _positive("zigzag", "size", size)
        return Shards.parse(f"zigzag/{size}/{_positive('zigzag', 'align', align)}/{_join(lengths)}")

    @staticmethod
    def contiguous(lengths: Sequence[int], size: int) -> Shards:
        """Rank r holds chunk r of the size chunks of every sequence: equal work where there is no
        mask, or a window in every layer."""
        lengths, size = _lengths("contiguous", lengths), _positive("contiguous", "size", size)
        return Shards.parse(f"contiguous/{size}/{_join(lengths)}")

    @staticmethod
    def balanced(lengths: Sequence[int], size: int, *, causal: bool = True,
                 window: tuple[int, int] | None = None) -> Shards:
        """For packed documents: those of more than half a rank's share of the work are cut as
        zigzag does, the others stay whole, longest first, on the rank with least work whose tokens
        stay within 2 % of the mean. Work is visible tiles under the mask that is named here."""
        lengths, size = _lengths("balanced", lengths), _positive("balanced", "size", size)
        left, right = (-1, -1) if window is None else (int(side) for side in window)
        right = 0 if causal else right
        return Shards.parse(f"balanced/{size}/{left},{right}/{_join(lengths)}")

    @staticmethod
    def striped(lengths: Sequence[int], size: int, stripe: int = 1) -> Shards:
        """Chunks of `stripe` tokens are dealt to the ranks in turn."""
        lengths, size = _lengths("striped", lengths), _positive("striped", "size", size)
        return Shards.parse(
            f"striped/{size}/{_positive('striped', 'stripe', stripe)}/{_join(lengths)}")

    @staticmethod
    def of(runs: Iterable[Iterable[tuple[int, int, int]]]) -> Shards:
        """Anything: runs[rank] = [(sequence, start, length), ...] in storage order. Every position
        must lie on one rank, and a sequence's runs on a rank must ascend; a run may be empty, which
        is how a sequence without tokens is said."""
        ranks = "|".join(",".join(":".join(str(_integer("of", "runs", x)) for x in run) for run in rank)
                         for rank in runs)
        return Shards.parse(f"of/{ranks}")

    @staticmethod
    def te(cu_seqlens_padded: Sequence[int], size: int,
           cu_seqlens: Sequence[int] | None = None) -> Shards:
        """TransformerEngine's layout: two chunks of equal extent of every padded sequence, as zigzag
        deals them; the padding stays in the buffers. cu_seqlens has the true lengths."""
        size = _positive("te", "size", size)
        padded, lengths = _stored("te", cu_seqlens_padded, cu_seqlens)
        for extent in padded:
            if extent % (2 * size):
                raise _error("te", "cu_seqlens_padded", extent,
                             f"each extent must be a multiple of 2 * size = {2 * size}; pad to it, or "
                             "use Shards.zigzag, which needs no padding")
        return Shards.parse(f"te/{size}/{_join(padded)}/{_join(lengths)}")

    @staticmethod
    def cut(cu_seqlens_padded: Sequence[int], size: int,
            cu_seqlens: Sequence[int] | None = None) -> Shards:
        """A packed buffer, padding included, cut into `size` pieces of equal extent. cu_seqlens has the
        true lengths."""
        size = _positive("cut", "size", size)
        padded, lengths = _stored("cut", cu_seqlens_padded, cu_seqlens)
        if sum(padded) % size:
            raise _error("cut", "cu_seqlens_padded", sum(padded), f"the last must be a multiple of size = {size}; "
                         "pad the last sequence to it")
        return Shards.parse(f"cut/{size}/{_join(padded)}/{_join(lengths)}")

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Shards:
        """The shards of which `text` is the text."""
        return Shards._new(text, *_KINDS[text.partition("/")[0]](*text.split("/")[1:]))

    @staticmethod
    def _new(text: str, lengths, runs, extents=None) -> Shards:
        shards = object.__new__(Shards)
        shards.text, shards.lengths = text, tuple(lengths)
        shards.runs, shards.size = tuple(map(tuple, runs)), len(runs)
        shards.extents = tuple(extents) if extents is not None else tuple(
            sum(run.length for run in rank) for rank in shards.runs)
        _check_cover(shards)
        shards._hash = hash((shards.lengths, shards.runs, shards.extents))
        return shards

    # ---- questions ----

    def tokens(self, rank: int) -> int:
        """How many tokens a rank holds; they are its weight in a mean over tokens."""
        return sum(run.length for run in self.runs[rank])

    def positions(self, rank: int) -> np.ndarray:
        """Each row's position in its sequence, int64 [extents[rank]]; 0 for padding."""
        return self._rows(rank, lambda run: np.arange(run.start, run.stop), 0)

    def sequence_ids(self, rank: int) -> np.ndarray:
        """Each row's sequence, int64 [extents[rank]]; -1 for padding."""
        return self._rows(rank, lambda run: run.sequence, -1)

    def index(self, rank: int) -> np.ndarray:
        """Each row's place among all tokens, packed sequence after sequence, int64 [extents[rank]];
        -1 for padding."""
        begins = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        return self._rows(rank, lambda run: begins[run.sequence] + np.arange(run.start, run.stop), -1)

    def cu_seqlens(self, rank: int) -> np.ndarray:
        """Where each sequence begins in a rank's buffer, and the end: int64 [sequences + 1].
        ValueError where a sequence is not in one piece, in order."""
        if not self.in_order:
            raise _error("cu_seqlens", "rank", rank, "its buffer is not sequence after sequence")
        begins = np.full(len(self.lengths) + 1, self.extents[rank], np.int64)
        for run in reversed(self.runs[rank]):
            begins[run.sequence] = run.at
        if self.text.startswith("te/"):
            begins[:-1] = np.cumsum([0, *self._te_extents()])[:-1]
            return begins
        return np.minimum.accumulate(begins[::-1])[::-1]

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether every rank stores sequence after sequence."""
        return all(a.sequence <= b.sequence for rank in self.runs for a, b in zip(rank, rank[1:]))

    @functools.cached_property
    def is_fine(self) -> bool:
        """Whether runs are shorter than a tile on average, though sequences are not."""
        lengths = [run.length for rank in self.runs for run in rank if run.length]
        whole = [length for length in self.lengths if length]
        return bool(lengths) and np.mean(lengths) < TILE <= np.mean(whole)

    def joined(self, groups: Sequence[Sequence[int]]) -> Shards:
        """Shards among groups of ranks: what a group's ranks hold, in order, each piece once."""
        empty = [(n, 0, 0) for n, length in enumerate(self.lengths) if not length]
        runs = []
        for group in groups:
            pieces = sorted(run for rank in group for run in self.runs[rank] if run.length)
            whole = [tuple(run[:3]) for run in merged(pieces)]
            runs.append(sorted(whole + (empty if not runs else [])))
        return Shards.of(runs)

    def extents_of_sequences(self, rank: int) -> np.ndarray:
        """Rows of a rank's buffer that belong to each sequence, padding included."""
        return np.diff(self.cu_seqlens(rank))

    def _te_extents(self):
        _, size, padded, _ = self.text.split("/")
        return [extent // int(size) for extent in _split(padded)]

    def _rows(self, rank: int, values, padding: int) -> np.ndarray:
        rows = np.full(self.extents[rank], padding, np.int64)
        for run in self.runs[rank]:
            rows[run.at:run.at + run.length] = values(run)
        return rows

    def __eq__(self, other) -> bool:
        return self is other or isinstance(other, Shards) and self._hash == other._hash and \
            (self.lengths, self.runs, self.extents) == (other.lengths, other.runs, other.extents)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        kind, _, rest = self.text.partition("/")
        lengths = list(self.lengths) if len(self.lengths) <= 4 else f"<{len(self.lengths)} lengths>"
        return f"Shards.{kind}({lengths}, size={self.size})"

    def __reduce__(self):
        return Shards.parse, (self.text,)


def merged(runs: Iterable[Run]) -> list[Run]:
    """Sorted runs, with those that touch or overlap made one, in a buffer of their own."""
    whole: list[list[int]] = []
    for run in runs:
        if whole and whole[-1][0] == run.sequence and run.start <= whole[-1][2]:
            whole[-1][2] = max(whole[-1][2], run.stop)
        else:
            whole.append([run.sequence, run.start, run.stop])
    placed, at = [], 0
    for sequence, start, stop in whole:
        placed.append(Run(sequence, start, stop - start, at))
        at += stop - start
    return placed


def visible_tiles(length: int, left: int, right: int) -> int:
    """Tiles of a self-attention of `length` positions that hold a visible pair."""
    rows = np.arange(0, length, TILE, dtype=np.int64)
    ends = np.minimum(rows + TILE, length)
    first = np.zeros_like(rows) if left < 0 else np.maximum(rows - left, 0)
    last = np.full_like(rows, length) if right < 0 else np.minimum(ends + right, length)
    return int((-(-last // TILE) - first // TILE).sum())


# ---- kinds: their text -> (lengths, runs[, extents]) ----

def _zigzag(size, align, lengths):
    size, align, lengths = int(size), int(align), _split(lengths)
    cuts = [_cuts(length, 2 * size, align) for length in lengths]
    return lengths, [_placed((n, c[chunk], c[chunk + 1] - c[chunk]) for n, c in enumerate(cuts)
                             for chunk in (rank, 2 * size - 1 - rank)) for rank in range(size)]


def _contiguous(size, lengths):
    size, lengths = int(size), _split(lengths)
    cuts = [_cuts(length, size, TILE) for length in lengths]
    return lengths, [_placed((n, c[rank], c[rank + 1] - c[rank]) for n, c in enumerate(cuts))
                     for rank in range(size)]


def _balanced(size, window, lengths):
    size, (left, right), lengths = int(size), _split(window), _split(lengths)
    work = [visible_tiles(length, left, right) for length in lengths]
    share, mean = sum(work) / size, sum(lengths) / size
    pieces: list[list] = [[] for _ in range(size)]
    loads, tokens = np.zeros(size), np.zeros(size, np.int64)
    small = []
    for n, length in enumerate(lengths):
        if 2 * work[n] <= share:
            small.append(n)
            continue
        cuts = _cuts(length, 2 * size, TILE)
        for rank in range(size):
            for chunk in (rank, 2 * size - 1 - rank):
                pieces[rank].append((n, cuts[chunk], cuts[chunk + 1] - cuts[chunk]))
                tokens[rank] += cuts[chunk + 1] - cuts[chunk]
        loads += work[n] / size
    for n in sorted(small, key=lambda n: (-lengths[n], n)):
        fits = tokens + lengths[n] <= 1.02 * mean
        rank = int(np.where(fits, loads, np.inf).argmin()) if fits.any() else int(tokens.argmin())
        pieces[rank].append((n, 0, lengths[n]))
        loads[rank] += work[n]
        tokens[rank] += lengths[n]
    return lengths, [_placed(sorted(rank)) for rank in pieces]


def _striped(size, stripe, lengths):
    size, stripe, lengths = int(size), int(stripe), _split(lengths)
    return lengths, [_placed((n, start, min(stripe, length - start))
                             for n, length in enumerate(lengths)
                             for start in range(rank * stripe, length, size * stripe))
                     for rank in range(size)]


def _of(ranks):
    runs = [[tuple(map(int, run.split(":"))) for run in rank.split(",") if run]
            for rank in ranks.split("|")]
    if not all(len(run) == 3 for rank in runs for run in rank):
        raise _error("of", "runs", ranks, "each run must be (sequence, start, length)")
    lengths = [0] * (1 + max((n for rank in runs for n, _, _ in rank), default=-1))
    for rank in runs:
        for n, start, length in rank:
            if n < 0 or start < 0 or length < 0:
                raise _error("of", "runs", (n, start, length), "must not be negative")
            lengths[n] = max(lengths[n], start + length)
    return lengths, [_placed(rank) for rank in runs]


def _te(size, padded, lengths):
    size, padded, lengths = int(size), _split(padded), _split(lengths)
    runs, extents = [], []
    for rank in range(size):
        rows, at = [], 0
        for n, (extent, length) in enumerate(zip(padded, lengths)):
            chunk = extent // (2 * size)
            for c in (rank, 2 * size - 1 - rank):
                rows.append(Run(n, min(c * chunk, length), min(max(length - c * chunk, 0), chunk), at))
                at += chunk
        runs.append(rows)
        extents.append(at)
    return lengths, runs, extents


def _cut(size, padded, lengths):
    size, padded, lengths = int(size), _split(padded), _split(lengths)
    stored = np.cumsum([0, *padded]).tolist()
    own = stored[-1] // size
    runs = []
    for begin in range(0, own * size, own) if own else [0] * size:
        rows = []
        for first, length in zip(stored, lengths):
            at = min(max(first, begin), begin + own)
            start = min(at - first, length) if first < begin + own else 0
            rows.append(Run(len(rows), start, max(min(first + length, begin + own) - at, 0), at - begin))
        runs.append(rows)
    return lengths, runs, [own] * size


_KINDS = {"zigzag": _zigzag, "contiguous": _contiguous, "balanced": _balanced, "striped": _striped,
          "of": _of, "te": _te, "cut": _cut}


def _cuts(length: int, chunks: int, align: int) -> list[int]:
    tiles = -(-length // align)
    return [min(length, align * (tiles * c // chunks)) for c in range(chunks)] + [length]


def _placed(pieces) -> list[Run]:
    """(sequence, start, length) one after another in a buffer."""
    runs, at = [], 0
    for sequence, start, length in pieces:
        runs.append(Run(sequence, start, length, at))
        at += length
    return runs


def _check_cover(shards: Shards):
    """Every position lies on one rank, and a sequence's runs on a rank ascend."""
    kind = shards.text.partition("/")[0]
    held: list[list] = [[] for _ in shards.lengths]
    for rank, runs in enumerate(shards.runs):
        ends: dict[int, int] = {}
        for run in runs:
            if run.start < ends.get(run.sequence, 0):
                raise _error(kind, "runs", tuple(run[:3]), f"runs of sequence {run.sequence} on rank "
                             f"{rank} must ascend and not overlap")
            ends[run.sequence] = run.stop
            if run.length:
                held[run.sequence].append((run.start, run.stop, rank))
    for n, pieces in enumerate(held):
        end = 0
        for start, stop, rank in sorted(pieces):
            if start != end:
                what = "is missing" if start > end else "lies on two ranks"
                raise _error(kind, "runs", f"position {min(start, end)} of sequence {n}",
                             f"{what}; each position must lie on one rank")
            end = stop


# ---- values ----

def _error(function: str, field: str, value, rule: str) -> ValueError:
    return ValueError(f"tessera.context_parallel.Shards.{function}: {field}={value}: {rule}")


def _integer(function: str, field: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _error(function, field, type(value).__name__, "must be a host integer")
    return int(value)


def _positive(function: str, field: str, value) -> int:
    value = _integer(function, field, value)
    if value < 1:
        raise _error(function, field, value, "must be at least 1")
    return value


def _lengths(function: str, lengths) -> tuple[int, ...]:
    if hasattr(lengths, "tolist"):
        lengths = lengths.tolist()
    if not isinstance(lengths, Iterable):
        raise _error(function, "lengths", lengths, "must be a list of host integers, one a sequence")
    lengths = tuple(_integer(function, "lengths", length) for length in lengths)
    if lengths and min(lengths) < 0:
        raise _error(function, "lengths", min(lengths), "must not be negative")
    return lengths


def _stored(function: str, cu_seqlens_padded, cu_seqlens) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents and lengths of a packed batch's sequences."""
    padded = _lengths(function, np.diff(_lengths(function, cu_seqlens_padded)))
    lengths = padded if cu_seqlens is None else \
        _lengths(function, np.diff(_lengths(function, cu_seqlens)))
    if len(lengths) != len(padded):
        raise _error(function, "cu_seqlens", len(lengths) + 1,
                     f"must have as many entries as cu_seqlens_padded, {len(padded) + 1}")
    for length, extent in zip(lengths, padded):
        if length > extent:
            raise _error(function, "cu_seqlens", length, f"must not exceed its extent, {extent}")
    return padded, lengths


def _join(values) -> str:
    return ",".join(map(str, values))


def _split(text: str) -> list[int]:
    return [int(value) for value in text.split(",") if value]
