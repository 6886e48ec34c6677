# SPDX-License-Identifier: Apache-2.0
"""Tensors between the ranks of a group: one collective, an uneven all-to-all of bytes.

    pending = exchange(group, outgoing, incoming)      # lists for each peer
    tensors = pending.wait()

A message is what one rank has for another, in one piece; every rank joins every exchange, with or
without something to say. Process groups bring NCCL and gloo; anything with rank, size, name and
all_to_all can stand for one (Group).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

_ALIGNMENT = 16  # bytes; a tensor of any dtype can begin there


class Group(Protocol):
    """The ranks that exchange. `all_to_all` returns (received, work): work.wait() makes the current
    stream, or the caller, wait until `received` is there. Both are uint8 vectors, in the order of
    ranks, and sizes are bytes for each rank."""
    rank: int
    size: int
    name: str

    def all_to_all(self, sent: torch.Tensor, sizes: list[int], received_sizes: list[int]): ...


class Processes:
    """A torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self.name = group, group.group_name
        self.rank, self.size = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)  # of all processes
        # A group bound to its GPU (init_process_group(device_id=)) has its communicator from the start: NCCL works on
        # the current stream then, and no stream has to wait for another. Other groups make theirs on first use.
        self._is_bound = getattr(group, "bound_device_id", None) is not None

    def all_to_all(self, sent, sizes, received_sizes):
        received = sent.new_empty(sum(received_sizes))
        work = dist.all_to_all_single(received, sent, received_sizes, sizes, group=self._group,
                                      async_op=not (self._is_bound and sent.is_cuda))
        return received, work

    def abort(self):
        """Ends what is under way; nothing can be sent afterwards."""
        self._group.abort()


class Alone:
    """A rank by itself."""
    rank, size, name = 0, 1, ""

    def all_to_all(self, sent, sizes, received_sizes):
        return sent, None


ALONE = Alone()
_groups: dict[str, Group] = {"": ALONE}


def register(group: Group) -> Group:
    """Makes a group known by its name, which is how operators know it."""
    _groups[group.name] = group
    return group


def by_name(name: str) -> Group:
    try:
        return _groups[name]
    except KeyError:
        return register(Processes(dist.distributed_c10d._resolve_process_group(name)))


class Topology(NamedTuple):
    """Ranks number outer.rank * inner.size + inner.rank; a flat group has one of the two alone."""
    inner: Group
    outer: Group

    @property
    def rank(self) -> int:
        return self.outer.rank * self.inner.size + self.inner.rank

    @property
    def size(self) -> int:
        return self.outer.size * self.inner.size

    def of_hop(self, name: str) -> Group:
        return self.inner if name == "inner" else self.outer

    def gather(self, data: bytes, device: torch.device, fixed: bool = False) -> list[bytes]:
        """The bytes of every rank, in order; `fixed` says that there are as many everywhere."""
        parts = _gather(self.inner, [data], device, fixed)
        return _gather(self.outer, parts, device, fixed)


def exchange(group: Group, outgoing: Sequence[Sequence[torch.Tensor]],
             incoming: Sequence[Sequence[tuple]], device: torch.device) -> Pending | Kept:
    """Sends the tensors outgoing[p] to each rank p, and receives those that incoming[p] describes
    as (shape, dtype). A rank's own tensors are not copied. No tensor may change until they are waited for."""
    own = list(outgoing[group.rank])
    if group.size == 1:
        return Kept([own])
    pieces = [[] if p == group.rank else list(tensors) for p, tensors in enumerate(outgoing)]
    incoming = [[] if p == group.rank else whats for p, whats in enumerate(incoming)]
    sizes = [sum(padded(_size(x.shape, x.dtype)) for x in tensors) for tensors in pieces]
    received_sizes = [sum(padded(_size(*what)) for what in whats) for whats in incoming]
    side = side_stream(device, group.name)
    if side is None:
        received, work = group.all_to_all(_joined(pieces, sum(sizes), device), sizes, received_sizes)
        return Pending(group.rank, own, received, work, incoming, received_sizes)
    current = torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        sent = _joined(pieces, sum(sizes), device)
        received, work = group.all_to_all(sent, sizes, received_sizes)
        if work is not None:
            work.wait()
    received.record_stream(current)
    return Pending(group.rank, own, received, _Event(side, current), incoming, received_sizes, pieces)


class Kept:
    """An exchange with nobody."""

    def __init__(self, tensors):
        self._tensors = tensors

    def wait(self):
        return self._tensors


class Pending:
    """An exchange under way. `read` is what a stream of its own reads, copies of views among it: the
    allocator would give it to the caller's next tensor, so that it stays until the caller's stream waits."""

    def __init__(self, rank, own, received, work, incoming, sizes, read=()):
        self._rank, self._own, self._read = rank, own, read
        self._received, self._work, self._incoming, self._sizes = received, work, incoming, sizes

    def wait(self) -> list[list[torch.Tensor]]:
        """The tensors from each rank."""
        if self._work is not None:
            self._work.wait()
        self._read = ()
        tensors = []
        for part, whats in zip(self._received.split(self._sizes), self._incoming):
            at, own = 0, []
            for shape, dtype in whats:
                size = _size(shape, dtype)
                own.append(part[at:at + size].view(dtype).view(shape))
                at += padded(size)
            tensors.append(own)
        tensors[self._rank] = self._own
        return tensors


class _Event:
    """The end of what is on the stream of exchanges, for the stream that asked."""

    def __init__(self, side, current):
        self._event, self._current = side.record_event(), current

    def wait(self):
        self._current.wait_event(self._event)


@functools.lru_cache(maxsize=64)
def _cuda_stream(device: torch.device, name: str):
    return torch.cuda.Stream(device, priority=-1)


def side_stream(device: torch.device, name: str):
    """One stream of exchanges for a device and group: the order of collectives is the calls'."""
    return _cuda_stream(device, name) if device.type == "cuda" else None


def _gather(group: Group, parts: list[bytes], device, fixed: bool) -> list[bytes]:
    """`parts` of every rank, which have equally many."""
    if group.size == 1:
        return parts
    own = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=device)
    lengths = [own] * group.size if fixed else to_all(group, own, [own.shape] * group.size)
    lengths = [x.tolist() for x in lengths]
    data = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).to(device)
    texts = to_all(group, data, [(sum(own),) for own in lengths])
    gathered = []
    for x, own in zip(texts, lengths):
        text, at = bytes(x.tolist()), 0
        for length in own:
            gathered.append(text[at:at + length])
            at += length
    return gathered


def to_all(group: Group, x: torch.Tensor, shapes) -> list[torch.Tensor]:
    """Every rank's x, of the shapes given."""
    found = exchange(group, [[x]] * group.size, [[(shape, x.dtype)] for shape in shapes], x.device)
    return [x for x, in found.wait()]


def _joined(pieces, size: int, device) -> torch.Tensor:
    """The messages one behind the other; what lies between two tensors is anything."""
    joined, at = torch.empty(size, dtype=torch.uint8, device=device), 0
    for x in (x for tensors in pieces for x in tensors):
        size = _size(x.shape, x.dtype)
        joined[at:at + size].view(x.dtype).view(x.shape).copy_(x)
        at += padded(size)
    return joined


def _size(shape, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def padded(size: int) -> int:
    """What so many bytes take of a message."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
