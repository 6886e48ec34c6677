# SPDX-License-Identifier: Apache-2.0
"""Which rows travel, and which calls of attention are made of them.

    keys    one stage: each rank receives the keys that its queries see
    ring    a stage for each peer, whose keys a rank receives; parts are merged by their lse
    heads   each rank receives its heads of all tokens of its group, and goes on with them as with
            the shards of that group

A hop moves rows between the ranks of one group; keys inside keys (two levels) are two hops a stage:
across nodes among ranks of one inner index, then inside, so that a row crosses a node's border once.
Everything is made from runs of positions, and knows no tensors.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

import numpy as np

from .shards import TILE, Run, Shards, merged

Runs = tuple[Run, ...]


class Band(NamedTuple):
    """Query i of sequence n sees keys i + shifts[n] - left to i + shifts[n] + right; -1 is
    unbounded."""
    left: int
    right: int
    shifts: tuple[int, ...]

    def seen(self, run: Run, length_k: int) -> tuple[int, int]:
        """The keys [lo, hi) that a run of queries sees, lo at a multiple of TILE."""
        shift = self.shifts[run.sequence]
        lo = 0 if self.left < 0 else run.start + shift - self.left
        hi = length_k if self.right < 0 else run.stop + shift + self.right
        lo = min(max(lo, 0), length_k) // TILE * TILE
        return lo, max(lo, min(hi, length_k))


class Route(NamedTuple):
    """What one rank of a group sends of its buffer, and where it puts what it receives: rows for
    each peer, int64, in an order that both ends share. Its own entries are a copy."""
    send: tuple[np.ndarray, ...]
    receive: tuple[np.ndarray, ...]


class Hop(NamedTuple):
    """Rows move inside a group: what each rank holds, and what it wants."""
    group: str  # "all", "inner" or "outer"
    holders: tuple[Runs, ...]
    wants: tuple[Runs, ...]

    def route(self, rank: int) -> Route:
        """What rank `rank` of the group does."""
        places = [_by_sequence(runs) for runs in self.holders]
        send = [_segments(want, places[rank])[0] for want in self.wants]
        receive = [_segments(self.wants[rank], place)[1] for place in places]
        return Route(tuple(send), tuple(receive))


class Call(NamedTuple):
    """Attention of one run of queries of every sequence over one run of keys: rows of the rank's q,
    and of the buffer of keys. Runs may be empty."""
    q: Runs
    k: Runs


class Stage(NamedTuple):
    hops: tuple[Hop, ...]
    calls: tuple[Call, ...]  # of the rank that asked

    @property
    def rows(self) -> Hop:
        """The last hop, whose wants are the buffer of keys."""
        return self.hops[-1]


def stages(exchange: str, shards_q: Shards, shards_k: Shards, band: Band, rank: int,
           inner: int = 1) -> tuple[Stage, ...]:
    """The stages of "keys", "ring" or "keys+keys" on a rank. Ranks number outer * inner + inner
    index."""
    if exchange == "ring":
        return tuple(_ring_stage(shards_q, shards_k, band, rank, step)
                     for step in range(shards_q.size))
    needs = [needed(shards_q, shards_k, band, r) for r in range(shards_q.size)]
    calls = _calls(shards_q, rank, lambda run: [band.seen(run, shards_k.lengths[run.sequence])],
                   needs[rank])
    if exchange == "keys":
        return Stage((Hop("all", shards_k.runs, tuple(needs)),), calls),
    return Stage(_two_hops(shards_k, needs, rank, inner), calls),


def heads_hop(shards: Shards, group: range) -> tuple[Hop, Runs]:
    """The hop after which each rank of `group` has all rows of the group, and where they lie."""
    node = node_shards(shards, len(group)).runs[group.start // len(group)]
    return Hop("inner", tuple(shards.runs[r] for r in group), (node,) * len(group)), node


def node_shards(shards: Shards, inner: int) -> Shards:
    """The shards among nodes of `inner` ranks each."""
    return shards.joined([range(at, at + inner) for at in range(0, shards.size, inner)])


def head_range(heads: int, part: int, parts: int) -> tuple[int, int]:
    """The heads of one of `parts` parts, which need not divide them."""
    return heads * part // parts, heads * (part + 1) // parts


def head_pieces(hq: int, hk: int, first: int, last: int) -> list[tuple[int, int, int, int]]:
    """(q, end of q, kv, end of kv) of at most three calls for q heads [first, last): one for each cut
    group of heads that share a kv head, and one for the whole groups between."""
    per = hq // hk
    cuts = sorted({first, last, *(cut for cut in (-(-first // per) * per, last // per * per)
                                  if first < cut < last)})
    return [(a, b, a // per, -(-b // per)) for a, b in zip(cuts, cuts[1:])]


@functools.lru_cache(maxsize=256)
def needed(shards_q: Shards, shards_k: Shards, band: Band, rank: int) -> Runs:
    """The keys that a rank's queries see, and where they lie in its buffer."""
    pieces = []
    for run in shards_q.runs[rank]:
        if run.length:
            lo, hi = band.seen(run, shards_k.lengths[run.sequence])
            if hi > lo:
                pieces.append(Run(run.sequence, lo, hi - lo, 0))
    return tuple(merged(sorted(pieces)))


# ---- below: how ----

def _ring_stage(shards_q, shards_k, band, rank, step) -> Stage:
    size = shards_q.size
    wants, mine = [], None
    for r in range(size):
        held = merged(sorted(run for run in shards_k.runs[(r - step) % size] if run.length))
        clipped = _Clipped(held, band, shards_k.lengths)
        pieces = sorted(Run(run.sequence, lo, hi - lo, 0) for run in shards_q.runs[r] if run.length
                        for lo, hi in clipped(run))
        wants.append(tuple(merged(pieces)))
        mine = clipped if r == rank else mine
    calls = _calls(shards_q, rank, mine, wants[rank])
    return Stage((Hop("all", shards_k.runs, tuple(wants)),),
                 tuple(call for call in calls if any(run.length for run in call.k)))


class _Clipped:
    """run of queries -> the pieces [lo, hi) of the keys held that it sees."""

    def __init__(self, held, band, lengths):
        self.held, self.band, self.lengths = _by_sequence(held), band, lengths

    def __call__(self, run: Run) -> list[tuple[int, int]]:
        lo, hi = self.band.seen(run, self.lengths[run.sequence])
        pieces = [(max(lo, k.start), min(hi, k.stop)) for k in self.held.get(run.sequence, ())]
        return [(a, b) for a, b in pieces if a < b]


def _calls(shards_q: Shards, rank: int, pieces_of, buffer: Runs) -> tuple[Call, ...]:
    """A call for each slot (the c-th runs of all sequences) and piece of keys."""
    slots: dict[tuple[int, int], list] = {}
    seen: dict[int, int] = {}
    at = _by_sequence(buffer)
    for run in shards_q.runs[rank]:
        if not run.length:
            continue
        slot = seen[run.sequence] = seen.get(run.sequence, -1) + 1
        for d, (lo, hi) in enumerate(pieces_of(run)):
            place = _place(at.get(run.sequence, ()), lo) if hi > lo else 0
            slots.setdefault((slot, d), []).append((run, Run(run.sequence, lo, hi - lo, place)))
    calls = []
    for pairs in (slots[key] for key in sorted(slots)):
        q = [Run(n, 0, 0, 0) for n in range(len(shards_q.lengths))]
        k = list(q)
        for run, keys in pairs:
            q[run.sequence], k[run.sequence] = run, keys
        calls.append(Call(tuple(q), tuple(k)))
    return tuple(calls)


def _two_hops(shards_k: Shards, needs, rank: int, inner: int) -> tuple[Hop, Hop]:
    node, index = divmod(rank, inner)
    nodes = range(shards_k.size // inner)

    def crossing(o, i):
        """What rank (o, i) fetches from ranks of its inner index for all of its node."""
        held = _by_sequence(merged(sorted(run for p in nodes for run in shards_k.runs[p * inner + i]
                                          if run.length)))
        wanted = merged(sorted(run for j in range(inner) for run in needs[o * inner + j]))
        return tuple(merged(sorted(
            Run(run.sequence, max(run.start, k.start), min(run.stop, k.stop) - max(run.start, k.start), 0)
            for run in wanted for k in held.get(run.sequence, ())
            if max(run.start, k.start) < min(run.stop, k.stop))))

    across = Hop("outer", tuple(shards_k.runs[o * inner + index] for o in nodes),
                 tuple(crossing(o, index) for o in nodes))
    inside = Hop("inner", tuple(crossing(node, j) for j in range(inner)),
                 tuple(needs[node * inner + j] for j in range(inner)))
    return across, inside


def _by_sequence(runs) -> dict[int, list[Run]]:
    """The runs of each sequence that are not empty, ascending."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        if run.length:
            found.setdefault(run.sequence, []).append(run)
    return found


def _place(runs, position: int) -> int:
    """The row of a position that `runs` hold."""
    run = runs[bisect.bisect_right([run.start for run in runs], position) - 1]
    return run.at + position - run.start


def _segments(want: Runs, held: dict[int, list[Run]]) -> tuple[np.ndarray, np.ndarray]:
    """(rows of the holder, rows of who wants them), in the order of `want`."""
    source, target = [], []
    for run in want:
        runs = held.get(run.sequence, ())
        first = max(bisect.bisect_right([k.start for k in runs], run.start) - 1, 0)
        for k in runs[first:]:
            lo, hi = max(run.start, k.start), min(run.stop, k.stop)
            if k.start >= run.stop:
                break
            if lo < hi:
                source.append(np.arange(lo, hi) + (k.at - k.start))
                target.append(np.arange(lo, hi) + (run.at - run.start))
    empty = np.zeros(0, np.int64)
    return (np.concatenate(source) if source else empty,
            np.concatenate(target) if target else empty)
