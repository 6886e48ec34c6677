# SPDX-License-Identifier: Apache-2.0
"""Copies and sums of rows between tensors, many of them by one launch (tessera_sum_rows). A Table says what becomes
what without the tensors' data, so that it is made once and kept.

    Spans   ((row, place, count), ...): rows row, row + 1, ... of a tensor are at the places place, place + 1, ... of an
            order, by which rows of tensors meet
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from typing import NamedTuple

import torch

from ... import _lib
from .. import _tensors

MAX_TERMS = 8  # TESSERA_MAX_TERMS
Spans = tuple[tuple[int, int, int], ...]
_SUM, _ROWS = struct.Struct("<qqqii"), struct.Struct("<iiiiqqq")
_NO_ROWS = _ROWS.pack(0, -1, 0, 0, 0, 0, 0)


class Kind(NamedTuple):
    """What a table is made for: all of a tensor but its data. [rows, heads, columns], [rows, heads] or [rows]."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> Kind:
        return cls(tuple(x.shape), x.stride(), x.dtype)

    @classmethod
    def dense(cls, shape, dtype: torch.dtype) -> Kind:
        strides = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
        return cls(tuple(shape), tuple(strides)[::-1], dtype)

    def of_heads(self, first: int, last: int) -> Kind:
        return self._replace(shape=(self.shape[0], last - first, *self.shape[2:]))


class Part(NamedTuple):
    """Rows [count, heads, columns] of the tensor of that number; offset and strides in bytes."""
    tensor: int
    dtype: torch.dtype
    offset: int
    row: int
    head: int
    heads: int
    columns: int

    @classmethod
    def of(cls, tensor: int, kind: Kind, first_head: int = 0, offset: int = 0) -> Part:
        """The rows of a tensor that begins `offset` bytes behind the data; kind.shape says which heads."""
        size = kind.dtype.itemsize
        shape, stride = (*kind.shape[1:], 1, 1)[:2], (*kind.stride[1:], 1, 1)[:2]
        if len(kind.shape) > 3 or stride[1] != 1 and shape[1] != 1 and 0 not in kind.shape:
            raise ValueError(f"rows of {kind}: must have three axes at most, and stride 1 in the last")
        return cls(tensor, kind.dtype, offset + first_head * stride[0] * size, kind.stride[0] * size, stride[0] * size,
                   *shape)


class Table:
    """Sums, run on so many tensors, whose data alone may differ from those that it was made for."""

    def __init__(self, tensors: int):
        self._tensors, self._sums, self._count = tensors, b"", 0
        self._numbers: list[torch.Tensor] = []  # of rows, behind the tensors of a call

    def add(self, count: int, to: Part, terms: list[Part], first: int = 0, firsts=(), numbers=()):
        """Rows first, ... of `to` become the sums of rows firsts[i], ... of terms[i]. `numbers`: of to's rows and of
        each term's, int64 [count] on the device, or None where they are neighbours."""
        if count == 0 or to.heads * to.columns == 0:
            return
        parts = [to, *terms]
        heads, columns = to.heads, to.columns
        if all(x.heads == 1 or x.head == x.columns * x.dtype.itemsize for x in parts):
            heads, columns = 1, heads * columns  # one behind the other everywhere
        self._sums += _SUM.pack(count, heads, columns, len(terms), 0)
        for x, row, index in zip(parts, (first, *(firsts or [0] * len(terms))), numbers or [None] * len(parts)):
            self._sums += _ROWS.pack(x.tensor, self._numbered(index), _code(x.dtype), 0, x.offset + row * x.row, x.row,
                                     x.head)
        self._sums += _NO_ROWS * (MAX_TERMS - len(terms))
        self._count += 1

    def add_spans(self, to: Part, spans_to: Spans, terms: list[tuple[Part, Spans]]):
        """Rows of `to` become the sums of the terms' rows at the same places, and 0 where no term has one."""
        for a, b, first, firsts in _refined(spans_to, tuple(spans for _, spans in terms)):
            self.add(b - a, to, [part for (part, _), row in zip(terms, firsts) if row is not None], first,
                     [row for row in firsts if row is not None])

    def _numbered(self, index) -> int:
        if index is None:
            return -1
        self._numbers.append(index)
        return self._tensors + len(self._numbers) - 1

    def run(self, tensors: list[torch.Tensor]):
        """Queued on the current stream of the tensors' device; on the CPU it is done."""
        if self._count == 0:
            return
        like, addresses = tensors[0], [x.data_ptr() for x in (*tensors, *self._numbers)]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        device, error = _tensors.device(like), _lib.error_of_thread()
        context = _lib.Buffers(struct_size=ctypes.sizeof(_lib.Buffers), num_threads=torch.get_num_threads(),
                               stream=_tensors.stream(like) if device.kind != _lib.CPU else 0)
        code = _lib.sum_rows(self._count, self._sums, len(pointers), pointers, ctypes.addressof(device),
                             ctypes.addressof(context), ctypes.addressof(error))
        _lib.check(code, error, "sum_rows")


def through(spans: Spans, more: Spans) -> Spans:
    """(row, place) where the places of `spans` are the rows of `more`."""
    found = []
    for row, middle, n in spans:
        for also, place, m in more:
            lo, hi = max(middle, also), min(middle + n, also + m)
            if lo < hi:
                found.append((row + lo - middle, place + lo - also, hi - lo))
    return tuple(found)


def inverse(spans: Spans) -> Spans:
    return tuple((place, row, count) for row, place, count in spans)


def depth(terms: list[Spans]) -> int:
    """The most terms that a place has."""
    ends = sorted((at, change) for spans in terms for _, place, count in spans if count
                  for at, change in ((place, 1), (place + count, -1)))
    return max(itertools.accumulate(change for _, change in ends), default=0)


# ---- below: how ----

def _refined(spans_to: Spans, spans_of_terms):
    """(place, end, row of `to`, row of each term or None) of the pieces in which neither `to` nor a term jumps."""
    for row, place, count in spans_to:
        cuts = {place, place + count}
        for spans in spans_of_terms:
            for _, at, n in spans:
                cuts.update(cut for cut in (at, at + n) if place < cut < place + count)
        for a, b in itertools.pairwise(sorted(cuts)):
            yield a, b, row + a - place, [next((first + a - at for first, at, n in spans if at <= a < at + n), None)
                                          for spans in spans_of_terms]


def _code(dtype: torch.dtype) -> int:
    return _lib.DTYPES[str(dtype).removeprefix("torch.")]
