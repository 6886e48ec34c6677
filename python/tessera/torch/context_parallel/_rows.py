# SPDX-License-Identifier: Apache-2.0
"""Rows of a buffer [rows, ...], and tensors of any layout as such buffers."""

from __future__ import annotations

import numpy as np
import torch

from ..._call._args import ORDERS


class Rows:
    """Some rows, in an order: a slice where they are neighbours, so that taking them copies nothing."""

    def __init__(self, rows: np.ndarray, device: torch.device):
        self.count = len(rows)
        self.first = int(rows[0]) if self.count else 0
        self.is_slice = self.count == 0 or bool((np.diff(rows) == 1).all())
        self._index = None if self.is_slice else torch.from_numpy(rows).to(device)

    def are_all(self, x: torch.Tensor, dim: int = 0) -> bool:
        """Whether they are x's rows, as they lie there."""
        return self.is_slice and self.count == x.shape[dim]

    def take(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x.narrow(dim, self.first, self.count) if self.is_slice else \
            _bytes(x).index_select(dim, self._index).view(x.dtype)

    def put(self, x: torch.Tensor, values: torch.Tensor, dim: int = 0):
        """x[rows] = values"""
        if self.is_slice:
            x.narrow(dim, self.first, self.count).copy_(values)
        else:
            _bytes(x).index_copy_(dim, self._index, _bytes(values.to(x.dtype)))

    def add(self, x: torch.Tensor, values: torch.Tensor, dim: int = 0):
        """x[rows] += values"""
        if self.is_slice:
            x.narrow(dim, self.first, self.count).add_(values)
        else:
            x.index_add_(dim, self._index, values.to(x.dtype))


class Sum:
    """Rows [rows, ...] that terms are added to, in fp32. A single term of all rows is kept as it came, uncopied."""

    def __init__(self, shape, device: torch.device):
        self._shape, self._device = tuple(shape), device
        self._term = self._total = None

    def add(self, values: torch.Tensor, rows: Rows | None = None):
        """values [rows.count, ...] to rows; to all of them without."""
        is_whole = rows is None or rows.is_slice and rows.count == self._shape[0]
        if is_whole and self._term is None and self._total is None:
            self._term = values
        elif is_whole:
            self.total().add_(values)
        else:
            rows.add(self.total(), values)

    def total(self) -> torch.Tensor:
        """The sum so far, fp32, to be added to in place."""
        if self._total is None:
            self._total = torch.zeros(self._shape, dtype=torch.float32, device=self._device) \
                if self._term is None else self._term.to(torch.float32, copy=True)
            self._term = None
        return self._total

    def value(self) -> torch.Tensor:
        """The sum: fp32, or a single term in its own dtype."""
        return self.total() if self._term is None else self._term


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
