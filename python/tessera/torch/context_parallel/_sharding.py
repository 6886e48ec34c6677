# SPDX-License-Identifier: Apache-2.0
"""Whole tensors to shards and back, positions of rows, and the merge of parts on several ranks."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ...context_parallel import Shards
from .. import _functions
from ..comm import Topology, by_name, exchange, to_all
from ._spec import names_of


def shard(x: torch.Tensor, shards: Shards, group, dim: int) -> torch.Tensor:
    """This rank's rows of x, which every rank has whole; padding of the layout is 0. Axis `dim` holds
    all sequences one after another, or one of several that are equally long. Differentiable: the
    gradient of x is this rank's share.

    >>> ids = shard(ids, shards, group, dim=1)
    """
    topology = _topology(group)
    rows, index = _places(shards, topology.rank, _is_packed(shards, x, dim, "shard"), x.device)
    part = x.index_select(dim, index)
    if len(rows) == part.shape[dim] == _extent(shards, topology.rank, x, dim):
        return part
    shape = list(x.shape)
    shape[dim] = _extent(shards, topology.rank, x, dim)
    return part.new_zeros(shape).index_copy(dim, rows, part)


def unshard(x: torch.Tensor, shards: Shards, group, dim: int) -> torch.Tensor:
    """The whole of what each rank has rows of, on every rank: the inverse of shard. Differentiable:
    a row's gradient is the sum of those that all ranks have for it."""
    topology = _topology(group)
    packed = x.shape[dim] == shards.extents[topology.rank]
    if not packed and not _is_even(shards):
        raise ValueError(f"tessera.context_parallel.unshard: x.shape[{dim}]={x.shape[dim]}: rank "
                         f"{topology.rank} holds {shards.extents[topology.rank]} tokens of {shards!r}")
    return _Unshard.apply(x, shards, topology, dim, packed)


def positions(shards: Shards, group, device=None) -> torch.Tensor:
    """Each of this rank's rows' position in its sequence, int64 [rows], for rotary embeddings; on PyTorch's default
    device unless `device` names another."""
    return torch.from_numpy(shards.positions(_topology(group).rank)).to(device or torch.get_default_device())


def merge(o: torch.Tensor, lse: torch.Tensor, group, *, layout: str = "bshd"
          ) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of all ranks, from each rank's (o, lse) for the same queries: the same
    bits on every rank. No gradient; a sink belongs to one rank only."""
    parts = [(o.detach().contiguous(), lse.detach().contiguous())]
    for one in _topology(group):
        if one.size > 1:
            mine = [x for part in parts for x in part]
            what = [(x.shape, x.dtype) for x in mine]
            found = exchange(one, [mine] * one.size, [what] * one.size, o.device).wait()
            parts = [tuple(xs[i:i + 2]) for xs in found for i in range(0, len(xs), 2)]
    return _functions.merge(parts, layout=layout)


# ---- below: how ----

class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shards, topology, dim, packed):
        ctx.about = shards, topology, dim, packed, x.shape[dim]
        rows, _ = _places(shards, topology.rank, packed, x.device)
        part = x.index_select(dim, rows)
        counts = [len(_places(shards, rank, packed, x.device)[0]) for rank in range(shards.size)]
        shape = list(part.shape)

        def shaped(count):
            return *shape[:dim], count, *shape[dim + 1:]
        total = sum(counts)
        whole = part.new_empty(shaped(total))
        for rank, found in enumerate(_all(topology, part, [shaped(count) for count in counts])):
            whole.index_copy_(dim, _places(shards, rank, packed, x.device)[1], found)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        shards, topology, dim, packed, extent = ctx.about
        total = gradient.float()
        parts = _all(topology, gradient.contiguous(), [gradient.shape] * topology.size)
        total = functools.reduce(torch.add, [part.float() for part in parts])
        rows, index = _places(shards, topology.rank, packed, gradient.device)
        shape = list(gradient.shape)
        shape[dim] = extent
        local = total.new_zeros(shape).index_copy(dim, rows, total.index_select(dim, index))
        return local.to(gradient.dtype), None, None, None, None


def _all(topology: Topology, x: torch.Tensor, shapes) -> list[torch.Tensor]:
    """Every rank's x, of the shapes given."""
    inner, outer = topology
    at = outer.rank * inner.size
    mine = to_all(inner, x, shapes[at:at + inner.size]) if inner.size > 1 else [x]
    if outer.size == 1:
        return mine
    found = exchange(outer, [mine] * outer.size,
                     [[(shape, x.dtype) for shape in shapes[o * inner.size:(o + 1) * inner.size]]
                      for o in range(outer.size)], x.device).wait()
    return [part for parts in found for part in parts]


def _topology(group) -> Topology:
    inner, outer = names_of(group)
    return Topology(by_name(inner), by_name(outer))


def _is_even(shards: Shards) -> bool:
    return len(set(shards.lengths)) == 1 and shards.in_order


def _is_packed(shards: Shards, x, dim: int, function: str) -> bool:
    if x.shape[dim] == sum(shards.lengths):
        return True
    if _is_even(shards) and x.shape[dim] == shards.lengths[0]:
        return False
    raise ValueError(f"tessera.context_parallel.{function}: x.shape[{dim}]={x.shape[dim]}: must be the "
                     f"{sum(shards.lengths)} tokens of {shards!r}, or the length of each where all "
                     "are equally long")


def _extent(shards: Shards, rank: int, x, dim: int) -> int:
    packed = x.shape[dim] == sum(shards.lengths)
    return shards.extents[rank] if packed else int(shards.extents_of_sequences(rank)[0])


def _places(shards: Shards, rank: int, packed: bool, device):
    """(rows of the rank's buffer that hold tokens, their places in the whole)."""
    index = shards.index(rank)
    if not packed:
        index = index[:int(shards.extents_of_sequences(rank)[0])]
    rows = np.flatnonzero(index >= 0)
    return torch.from_numpy(rows).to(device), torch.from_numpy(index[rows]).to(device)
