# SPDX-License-Identifier: Apache-2.0
"""Rows of a buffer [rows, ...], and tensors of any layout as such buffers."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from ..._call._args import ORDERS
from ..comm import in_words


class Rows:
    """Some rows, in an order: a slice where they are neighbours, so that taking them copies nothing; or a few slices,
    which are copied faster than row by row."""
    _MOST_SLICES = 8

    def __init__(self, rows: np.ndarray, device: torch.device):
        self.count = len(rows)
        self.first = int(rows[0]) if self.count else 0
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        self.is_slice = len(cuts) == 0
        begins, ends = [0, *cuts.tolist()], [*cuts.tolist(), self.count]
        self._slices = [(int(rows[begin]), begin, end - begin) for begin, end in zip(begins, ends)] \
            if 0 < len(cuts) < self._MOST_SLICES else None  # first row, where in the order, how many
        self._index = None if self.is_slice or self._slices else torch.from_numpy(rows).to(device)
        slices = self._slices or ([(self.first, 0, self.count)] if self.is_slice else None)
        self.spans = None if slices is None else [(first, first + count) for first, _, count in slices]

    def are_all(self, x: torch.Tensor, dim: int = 0) -> bool:
        """Whether they are x's rows, as they lie there."""
        return self.is_slice and self.count == x.shape[dim]

    def take(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if self.is_slice:
            return x.narrow(dim, self.first, self.count)
        whole = in_words(x) if dim < x.dim() - 1 else x
        if self._slices:
            return torch.cat([whole.narrow(dim, first, count) for first, _, count in self._slices], dim).view(x.dtype)
        return _bytes(whole).index_select(dim, self._index).view(x.dtype)

    def put(self, x: torch.Tensor, values: torch.Tensor, dim: int = 0):
        """x[rows] = values"""
        if x.dtype == values.dtype and dim < x.dim() - 1:
            x, values = in_words(x, values)
        if self.is_slice:
            x.narrow(dim, self.first, self.count).copy_(values)
        elif self._slices:
            for first, at, count in self._slices:
                x.narrow(dim, first, count).copy_(values.narrow(dim, at, count))
        else:
            _bytes(x).index_copy_(dim, self._index, _bytes(values.to(x.dtype)))

    def add(self, x: torch.Tensor, values: torch.Tensor, dim: int = 0):
        """x[rows] += values"""
        if self.is_slice:
            x.narrow(dim, self.first, self.count).add_(values)
        elif self._slices:
            for first, at, count in self._slices:
                x.narrow(dim, first, count).add_(values.narrow(dim, at, count))
        else:
            x.index_add_(dim, self._index, values.to(x.dtype))


class Sum:
    """Rows [rows, ...] that terms are added to: in fp32, unless no row has more than two terms, whose sum is rounded
    once either way. Terms are kept uncopied until the sum is asked for, once, and may be overwritten by it."""

    def __init__(self, shape, device: torch.device):
        self._shape, self._device = tuple(shape), device
        self._terms: list[tuple[torch.Tensor, Rows]] = []
        self._total = None

    def add(self, values: torch.Tensor, rows: Rows):
        """values [rows.count, ...] to rows."""
        if self._total is None and rows.spans is not None:
            self._terms.append((values, rows))
        else:
            rows.add(self.total(), values)

    def total(self) -> torch.Tensor:
        """The sum so far, fp32, to be added to in place."""
        if self._total is None:
            self._total = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
            for values, rows in self._terms:
                rows.add(self._total, values)
            self._terms = []
        return self._total

    def value(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum, rounded to dtype once; without, as exact as it is: fp32, or the terms' dtype."""
        dtypes, depth = {values.dtype for values, _ in self._terms}, self._depth()
        if len(dtypes) == 1 and (depth == 1 or depth == 2 and dtype in dtypes):
            self._total = self._of_terms(*dtypes, depth)
            self._terms = []
        total = self.total()
        return total if dtype is None else total.to(dtype)

    def _of_terms(self, dtype: torch.dtype, depth: int) -> torch.Tensor:
        whole = [i for i, (_, rows) in enumerate(self._terms) if rows.is_slice and rows.count == self._shape[0]]
        if whole:
            total = self._terms.pop(whole[0])[0]
        else:
            covered = sum(rows.count for _, rows in self._terms)
            make = torch.empty if depth == 1 and covered == self._shape[0] else torch.zeros
            total = make(self._shape, dtype=dtype, device=self._device)
        for values, rows in self._terms:
            (rows.add if whole or depth == 2 else rows.put)(total, values)
        return total

    def _depth(self) -> int:
        """The most terms that a row has."""
        ends = sorted((at, change) for _, rows in self._terms for span in rows.spans if span[0] < span[1]
                      for at, change in zip(span, (1, -1)))
        return max(itertools.accumulate(change for _, change in ends), default=0)


def beside(parts: list[torch.Tensor]) -> torch.Tensor:
    """Heads [rows, h, ...] beside each other. A part without heads is left out, and one alone is not copied."""
    some = [x for x in parts if x.shape[1]] or parts[:1]
    return some[0] if len(some) == 1 else torch.cat(some, 1)


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
