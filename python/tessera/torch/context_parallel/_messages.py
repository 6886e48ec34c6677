# SPDX-License-Identifier: Apache-2.0
"""What a rank sends and receives in one exchange, planned once: rows of its tensors go into messages by one launch, and
what comes goes into others by another, both on the stream of exchanges."""

from __future__ import annotations

import math

import torch

from .. import comm
from ._row_sums import Kind, Part, Spans, Table, inverse
from ._rows import Rows

_SENT = _RECEIVED = 0  # the tensor of messages, before those of a call


class Messages:
    """The plan of an exchange among `size` ranks, without data. Rows go from `sources`, which are `of` these kinds,
    into `targets`, `into` these: send and receive say which, peer after peer, for each in the same order on both
    ends."""

    def __init__(self, rank: int, size: int, of: list[Kind], into: list[Kind] = ()):
        self.rank, self._of, self._into = rank, list(of), list(into)
        self.sizes, self.received_sizes = [0] * size, [0] * size  # bytes
        self._pack, self._unpack = Table(1 + len(self._of)), Table(1 + len(self._of) + len(self._into))
        self._own: list[tuple[Part, Rows]] = []
        self._read: list[tuple[int, int, Kind]] = []  # (peer, offset, what) of what stays where it came

    def send(self, peer: int, source: int, rows: Rows, heads: tuple[int, int] | None = None, is_read: bool = False):
        """Rows of a source, of all heads or of [first, last), to a peer. The rank's own go where its next receive says,
        and into a message only if they are to be read from it."""
        first, last = heads or (0, 0)
        kind = self._of[source].of_heads(first, last) if heads else self._of[source]
        part = Part.of(1 + source, kind, first)
        if peer == self.rank and not is_read:
            self._own.append((part, rows))
            return
        to = self._next(self.sizes, peer, Kind.dense((rows.count, *kind.shape[1:]), kind.dtype), _SENT)
        _add(self._pack, rows.count, to, None, part, rows)

    def send_sum(self, peer: int, terms: list[tuple[int, Spans]], rows: Rows, shape, dtype: torch.dtype):
        """Some rows of a sum to a peer, rounded once: terms are (source, where its rows are in the sum). Where rows
        have no spans, the sum is one source."""
        to = self._next(self.sizes, peer, Kind.dense((rows.count, *shape), dtype), _SENT)
        parts = [Part.of(1 + source, self._of[source]) for source, _ in terms]
        if rows.spans is None:
            self._pack.add(rows.count, to, parts, numbers=(None, rows.numbers))
        else:
            self._pack.add_spans(to, inverse(rows.spans), [(part, spans) for part, (_, spans) in zip(parts, terms)])

    def receive(self, peer: int, target: int, rows: Rows, heads: tuple[int, int] | None = None):
        """Rows of a peer become rows of a target, in all heads or in [first, last)."""
        first, last = heads or (0, 0)
        kind = self._into[target].of_heads(first, last) if heads else self._into[target]
        to = Part.of(1 + len(self._of) + target, kind, first)
        if peer == self.rank:
            part, own = self._own.pop(0)
            _add(self._unpack, rows.count, to, rows, part, own)
            return
        what = Kind.dense((rows.count, *kind.shape[1:]), kind.dtype)
        _add(self._unpack, rows.count, to, rows, self._next(self.received_sizes, peer, what, _RECEIVED), None)

    def read(self, peer: int, shape, dtype: torch.dtype):
        """Rows of a peer that stay where they came: Pending.wait returns them."""
        kind = Kind.dense(shape, dtype)
        self._read.append((peer, self._next(self.received_sizes, peer, kind, _RECEIVED).offset, kind))

    def start(self, group: comm.Group, sources: list[torch.Tensor], targets: list[torch.Tensor] = (),
              overlaps: bool = True) -> Pending:
        """Begins the exchange. No source may change, and no target be used, before it is waited for. Without
        `overlaps` it is on the current stream, where it costs the host less: for what nothing runs beside."""
        device = sources[0].device
        side = comm.side_stream(device, group.name) if overlaps else None
        if side is None:
            received, work = self._sent(group, sources)
            return Pending(self, sources, targets, received, work)
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            received, work = self._sent(group, sources)
            if work is not None:
                work.wait()
            self._unpack.run([received, *sources, *targets])
            event = side.record_event()
        if self._read:
            received.record_stream(current)
        return Pending(self, sources, targets, received, event, current)

    def _sent(self, group, sources):
        sent = torch.empty(sum(self.sizes), dtype=torch.uint8, device=sources[0].device)
        if group.size == 1:
            return sent, None
        self._pack.run([sent, *sources])
        return group.all_to_all(sent, self.sizes, self.received_sizes)

    def _next(self, sizes: list[int], peer: int, kind: Kind, tensor: int) -> Part:
        """The next place in the messages of peers, which are one behind the other."""
        part = Part.of(tensor, kind, offset=sum(sizes))
        sizes[peer] += comm.padded(math.prod(kind.shape) * kind.dtype.itemsize)
        return part


class Pending:
    """An exchange under way. It keeps all that another stream reads and writes: the allocator would give it to the
    caller's next tensor."""

    def __init__(self, plan: Messages, sources, targets, received, work, current=None):
        self._plan, self._sources, self._targets = plan, sources, targets
        self._received, self._work, self._current = received, work, current

    def wait(self) -> list[list[torch.Tensor]]:
        """What the plan reads of each peer; targets hold what it says then."""
        if self._current is not None:
            self._current.wait_event(self._work)
        else:
            if self._work is not None:
                self._work.wait()
            self._plan._unpack.run([self._received, *self._sources, *self._targets])
        found = [[] for _ in self._plan.sizes]
        for peer, offset, kind in self._plan._read:
            of_dtype = self._received.view(kind.dtype)
            found[peer].append(of_dtype.as_strided(kind.shape, kind.stride, offset // kind.dtype.itemsize))
        self._sources = self._targets = ()
        return found


def _add(table: Table, count: int, to: Part, rows_to: Rows | None, part: Part, rows: Rows | None):
    """A copy of `count` rows; None: they are neighbours, from the first on."""
    neighbours = ((0, 0, count),)
    if all(x is None or x.spans is not None for x in (rows_to, rows)):
        table.add_spans(to, neighbours if rows_to is None else rows_to.spans,
                        [(part, neighbours if rows is None else rows.spans)])
    else:
        table.add(count, to, [part], numbers=[None if x is None else x.numbers for x in (rows_to, rows)])
