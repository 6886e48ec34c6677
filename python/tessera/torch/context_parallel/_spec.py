# SPDX-License-Identifier: Apache-2.0
"""What an operator is told beside tensors and options: one text, the same on every rank."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...context_parallel import cost
from ...context_parallel.schedule import Band
from ...context_parallel.shards import Shards
from .. import comm


KEYWORDS = ("layout", "causal", "window", "align")  # that the text, and the order of rows, say


class Spec(NamedTuple):
    exchange: str
    groups: int            # of kv heads
    band: Band
    shards_q: Shards
    shards_k: Shards
    draws: bool            # rank 0's state of dropout is everyone's
    saves: bool            # keys that were fetched are kept for the backward pass

    @property
    def by_heads(self) -> bool:
        return self.exchange.startswith("heads")

    @property
    def text(self) -> str:
        band = self.band
        return ";".join((self.exchange, str(self.groups), f"{band.left},{band.right}",
                         ",".join(map(str, band.shifts)), self.shards_q.text, self.shards_k.text,
                         str(int(self.draws)), str(int(self.saves))))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Spec:
        exchange, groups, window, shifts, shards_q, shards_k, draws, saves = text.split(";")
        left, right = map(int, window.split(","))
        band = Band(left, right, tuple(int(x) for x in shifts.split(",") if x))
        return Spec(exchange, int(groups), band, Shards.parse(shards_q), Shards.parse(shards_k),
                    draws == "1", saves == "1")


def names_of(group) -> tuple[str, str]:
    """Names of the inner and of the outer group; a flat group is the outer one. torch.compile traces
    through it."""
    if isinstance(group, (tuple, list)) and len(group) == 2:
        return _name(group[0]), _name(group[1])
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        return _name(group.get_group(1)), _name(group.get_group(0))
    return "", _name(group)


def _name(group) -> str:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"tessera.context_parallel: group.ndim={group.ndim}: must be a mesh of "
                             "one axis, or of two, (outer, inner)")
        return group.get_group(0).group_name
    if isinstance(group, torch.distributed.ProcessGroup):
        return group.group_name
    if group is None:
        raise ValueError("tessera.context_parallel: group=None: must be a ProcessGroup, a DeviceMesh "
                         "or (inner, outer)")
    return comm.register(group).name


def topology_of(inner: str, outer: str, exchange: str) -> comm.Topology:
    """Who is inside and who across: heads on a flat group are inside."""
    inner, outer = comm.by_name(inner), comm.by_name(outer)
    if exchange == "heads":
        return comm.Topology(outer, comm.ALONE)
    return comm.Topology(inner, outer)


@functools.lru_cache(maxsize=1024)
def spec_text(q_text: str, k_text: str, inner: int, how: tuple, causal: bool, window, align,
              heads: tuple, itemsize: int, has_rows: bool, draws: bool) -> str:
    """The text for a call; `how` is (exchange, groups of heads, save_gathered, max_bytes). ValueError
    for what can never run."""
    exchange, groups, save_gathered, max_bytes = how
    shards_q, shards_k = Shards.parse(q_text), Shards.parse(k_text)
    band = cost.band_of(causal, window, _shifts(align, shards_q, shards_k), len(shards_q.lengths))
    hq, hk, dqk, dv = heads
    if inner > 1 and exchange in _TWO_LEVEL:
        exchange = _TWO_LEVEL[exchange]
    chosen = cost.plan(shards_q, shards_k=shards_k, hq=hq, hk=hk, dqk=dqk, dv=dv, itemsize=itemsize,
                       causal=causal, window=window, shifts=band.shifts, inner=inner,
                       exchange=exchange, groups=groups, has_rows=has_rows, max_bytes=max_bytes,
                       save_gathered=save_gathered)
    saves = save_gathered and chosen.exchange in ("keys", "keys+keys") and shards_k.size > 1
    return Spec(chosen.exchange, chosen.groups, band, shards_q, shards_k, draws, saves).text


_TWO_LEVEL = {"heads": "heads+keys", "ring": "heads+ring", "keys": "keys+keys"}


def _shifts(align, shards_q: Shards, shards_k: Shards):
    """The diagonal: one integer, or one for each sequence."""
    if align == "bottom_right":
        return tuple(k - q for q, k in zip(shards_q.lengths, shards_k.lengths))
    return 0 if align is None or align == "top_left" else align
