# SPDX-License-Identifier: Apache-2.0
"""Rows of a buffer [rows, ...], and tensors of any layout as such buffers."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..._call._args import ORDERS
from ._row_sums import MAX_TERMS, Kind, Part, Spans, Table, depth, inverse, through


class Rows:
    """Some rows, in an order: a slice where they are neighbours, so that taking them copies nothing; or a few slices,
    which are copied faster than row by row."""
    _MOST_SLICES = 8

    def __init__(self, rows: np.ndarray, device: torch.device):
        self.count, self._rows, self._device = len(rows), rows, device
        self.first = int(rows[0]) if self.count else 0
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        self.is_slice = len(cuts) == 0
        begins, ends = [0, *cuts.tolist()], [*cuts.tolist(), self.count]
        # (first row, where in the order, how many) of each slice; None where there are too many
        self.spans = tuple((int(rows[begin]) if self.count else 0, begin, end - begin)
                           for begin, end in zip(begins, ends)) if len(cuts) < self._MOST_SLICES else None

    @functools.cached_property
    def numbers(self) -> torch.Tensor:
        """int64 [count], on the device."""
        return torch.from_numpy(self._rows).to(self._device)

    def are_all(self, x: torch.Tensor, dim: int = 0) -> bool:
        """Whether they are x's rows, as they lie there."""
        return self.is_slice and self.count == x.shape[dim]

    def take(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if self.is_slice:
            return x.narrow(dim, self.first, self.count)
        whole = in_words(x) if dim < x.dim() - 1 else x
        if self.spans:
            return torch.cat([whole.narrow(dim, first, count) for first, _, count in self.spans], dim).view(x.dtype)
        return _bytes(whole).index_select(dim, self.numbers).view(x.dtype)

    def put(self, x: torch.Tensor, values: torch.Tensor, dim: int = 0):
        """x[rows] = values"""
        if x.dtype == values.dtype and dim < x.dim() - 1:
            x, values = in_words(x, values)
        if self.is_slice:
            x.narrow(dim, self.first, self.count).copy_(values)
        elif self.spans:
            for first, at, count in self.spans:
                x.narrow(dim, first, count).copy_(values.narrow(dim, at, count))
        else:
            _bytes(x).index_copy_(dim, self.numbers, _bytes(values.to(x.dtype)))

    def add(self, x: torch.Tensor, values: torch.Tensor, dim: int = 0):
        """x[rows] += values"""
        if self.is_slice:
            x.narrow(dim, self.first, self.count).add_(values)
        elif self.spans:
            for first, at, count in self.spans:
                x.narrow(dim, first, count).add_(values.narrow(dim, at, count))
        else:
            x.index_add_(dim, self.numbers, values.to(x.dtype))


class Sum:
    """Rows [rows, ...] that terms are added to, in order, in fp32. Terms are kept uncopied until the sum is asked for,
    and are rounded to its dtype once, by one launch."""

    def __init__(self, shape, device: torch.device):
        self.shape, self.device = tuple(shape), device
        self.terms: list[tuple[torch.Tensor, Spans]] = []  # (values, (row of values, row of the sum, count))
        self._is_total = False  # whether the first term is a total of its own

    def add(self, values: torch.Tensor, rows: Rows):
        """values [rows.count, ...] to rows."""
        if rows.spans is not None:
            self.add_spans(values, inverse(rows.spans))
        else:
            rows.add(self.total(), values)

    def add_spans(self, values: torch.Tensor, spans: Spans):
        """Rows of values to those at whose places they are."""
        if depth([known for _, known in self.terms] + [spans]) > MAX_TERMS:
            self.total()
        self.terms.append((values, spans))

    def add_sum(self, other: Sum, rows: Rows, to: Rows):
        """Some rows of another sum, as exact as it is, to rows of this one."""
        if rows.spans is None or to.spans is None:
            self.add(rows.take(other.total()), to)
            return
        for values, spans in other.terms:
            self.add_spans(values, through(through(spans, rows.spans), inverse(to.spans)))

    def total(self) -> torch.Tensor:
        """The sum so far, fp32, to be added to in place."""
        if not (self._is_total and len(self.terms) == 1):
            total = torch.empty(self.shape, dtype=torch.float32, device=self.device)
            self.into(total)
            self.terms, self._is_total = [(total, ((0, 0, self.shape[0]),))], True
        return self.terms[0][0]

    def value(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum, rounded once; it may be a term."""
        if len(self.terms) == 1:
            values, spans = self.terms[0]
            if spans == ((0, 0, self.shape[0]),) and values.dtype == dtype and values.shape == self.shape:
                return values
        value = torch.empty(self.shape, dtype=dtype, device=self.device)
        self.into(value)
        return value

    def into(self, out: torch.Tensor):
        """Writes the sum, rounded once."""
        table = _summing(Kind.of(out), tuple((Kind.of(values), spans) for values, spans in self.terms))
        table.run([out, *(values for values, _ in self.terms)])


@functools.lru_cache(maxsize=256)
def _summing(out: Kind, terms: tuple[tuple[Kind, Spans], ...]) -> Table:
    table, rows = Table(1 + len(terms)), out.shape[0]
    table.add_spans(Part.of(0, out), ((0, 0, rows),), [(Part.of(i + 1, kind), spans)
                                                       for i, (kind, spans) in enumerate(terms)])
    return table


def beside(parts: list[torch.Tensor]) -> torch.Tensor:
    """Heads [rows, h, ...] beside each other. A part without heads is left out, and one alone is not copied."""
    some = [x for x in parts if x.shape[1]] or parts[:1]
    return some[0] if len(some) == 1 else torch.cat(some, 1)


def sums_beside(parts: list[Sum], dtype: torch.dtype) -> torch.Tensor:
    """The same of sums, each rounded once."""
    some = [x for x in parts if x.shape[1]] or parts[:1]
    if len(some) == 1:
        return some[0].value(dtype)
    rows, _, *rest = some[0].shape
    whole, at = torch.empty((rows, sum(x.shape[1] for x in some), *rest), dtype=dtype, device=some[0].device), 0
    for x in some:
        x.into(whole[:, at:at + x.shape[1]])
        at += x.shape[1]
    return whole


def in_words(*tensors: torch.Tensor):
    """The tensors, of one dtype, as views of elements of 8 bytes where all can be, whatever they hold: PyTorch copies
    strided elements of 2 bytes at a third of the speed."""
    size = tensors[0].element_size()
    per = 8 // size
    can = size < 8 and all(x.dim() and x.stride(-1) == 1 and all(
        n % per == 0 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])) for x in tensors)
    views = tuple(x.view(torch.int64) for x in tensors) if can else tensors
    return views if len(views) > 1 else views[0]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes, which can be moved by index."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x


def to_rows(x: torch.Tensor, layout: str) -> torch.Tensor:
    """q, k, v or o in `layout` -> [rows, h, d], sequence after sequence; a view if it can be."""
    if layout == "thd":
        return x
    b, s, h, d = ORDERS[layout]
    return x.permute(b, s, h, d).flatten(0, 1)


def from_rows(x: torch.Tensor, layout: str, sequences: int) -> torch.Tensor:
    """The inverse of to_rows."""
    if layout == "thd":
        return x
    x = torch.unflatten(x, 0, (sequences, -1))  # the method has no graph in PyTorch 2.11 beside a default device
    return {"bshd": x, "sbhd": x.transpose(0, 1), "bhsd": x.transpose(1, 2)}[layout]


def lse_from_rows(lse: torch.Tensor, layout: str, sequences: int) -> torch.Tensor:
    """[hq, rows] -> [b, hq, s], packed [hq, rows]."""
    return lse if layout == "thd" else torch.unflatten(lse, 1, (sequences, -1)).transpose(0, 1)


def ids_to_rows(ids: torch.Tensor, layout: str) -> torch.Tensor:
    """Segment ids [b, s], packed [rows] -> [rows]."""
    return ids if layout == "thd" else ids.flatten()


def ranges_to_rows(ranges: torch.Tensor, layout: str, sequences: int, extent: int) -> torch.Tensor:
    """Key ranges [b|1, hq|1, s|1, n], packed [hq|1, rows|1, n] -> [hq|1, rows|1, n]."""
    if layout == "thd":
        return ranges
    b, h, s, n = ranges.shape
    if b == 1 and s == 1:
        return ranges[0]
    return ranges.expand(sequences, h, extent, n).transpose(0, 1).flatten(1, 2)
