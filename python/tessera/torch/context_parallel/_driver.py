# SPDX-License-Identifier: Apache-2.0
"""keys and ring, forward and backward: for each group of kv heads and each stage, keys arrive while
those before them are worked on; in the backward pass their gradients travel back to their owners,
who add them in fp32, in the order of ranks."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from ...context_parallel import schedule
from ...context_parallel.shards import Shards
from .. import _functions
from ..comm import Topology
from . import _local
from ._messages import Messages
from ._row_sums import Kind
from ._rows import Rows, Sum, sums_beside


class Step(NamedTuple):
    """A stage on a device."""
    hops: tuple  # of (group, [rows sent to each peer], [rows received], rows of the buffer)
    tables: tuple[_local.Tables, ...]


@functools.lru_cache(maxsize=256)
def steps(kind: str, shards_q: Shards, shards_k: Shards, band: schedule.Band, rank: int, inner: int,
          device: torch.device) -> tuple[Step, ...]:
    """The stages of a rank. Groups of hops are "all", "inner" and "outer"."""
    begins: dict[int, int] = {}
    for run in shards_q.runs[rank]:
        begins[run.sequence] = min(run.at, begins.get(run.sequence, run.at))
    made = []
    for stage in schedule.stages(kind, shards_q, shards_k, band, rank, inner):
        hops = []
        for hop in stage.hops:
            own = {"all": rank, "inner": rank % inner, "outer": rank // inner}[hop.group]
            route = hop.route(own)
            hops.append((hop.group, tuple(Rows(rows, device) for rows in route.send),
                         tuple(Rows(rows, device) for rows in route.receive),
                         sum(run.length for run in hop.wants[own])))
        made.append(Step(tuple(hops), tuple(_local.Tables(call, band, begins, device)
                                            for call in stage.calls)))
    return tuple(made)


@functools.lru_cache(maxsize=256)
def _rows_held(shards: Shards, rank: int, device: torch.device) -> Rows:
    rows = [np.arange(run.at, run.at + run.length) for run in shards.runs[rank]]
    return Rows(np.concatenate([*rows, np.zeros(0, np.int64)]), device)


@functools.lru_cache(maxsize=256)
def _moving(rank: int, send: tuple[Rows, ...], receive: tuple[Rows, ...], of, into) -> Messages:
    """The plan by which rows of tensors `of` these kinds come to be those of buffers."""
    plan = Messages(rank, len(send), of, into)
    for peer in range(len(send)):
        for i in range(len(of)):
            plan.send(peer, i, send[peer])
        for i in range(len(of)):
            plan.receive(peer, i, receive[peer])
    return plan


@functools.lru_cache(maxsize=256)
def _returning(rank: int, send: tuple[Rows, ...], receive: tuple[Rows, ...], about) -> Messages:
    """The plan by which sums of a buffer's rows go to the owners of its rows. about: of each, (shape of a row, dtype
    of a message, terms)."""
    plan = Messages(rank, len(send), [kind for _, _, terms in about for kind, _ in terms])
    for peer in range(len(send)):
        if peer == rank:
            continue
        first = 0
        for shape, dtype, terms in about:
            plan.send_sum(peer, [(first + i, spans) for i, (_, spans) in enumerate(terms)], receive[peer], shape, dtype)
            plan.read(peer, (send[peer].count, *shape), dtype)
            first += len(terms)
    return plan


class Driver:
    """What one exchange of keys needs beside a problem. `groups` is how many groups of kv heads."""

    def __init__(self, kind: str, shards_q: Shards, shards_k: Shards, band, topology: Topology,
                 groups: int, device: torch.device):
        self.topology, self.groups, self.is_ring, self.device = topology, groups, kind == "ring", device
        inner, rank = (topology.inner.size, topology.rank) if kind == "keys+keys" else \
            (1, topology.outer.rank)
        self.rows = _rows_held(shards_q, rank, device)
        self.steps = steps(kind, shards_q, shards_k, band, rank, inner, device)
        self._overlaps = len(self.steps) * groups > 1  # else nothing runs beside an exchange

    def forward(self, p: _local.Problem, max_logit: bool, kept=()):
        """(o [rows, hq, dv], lse [hq, rows], max_logit [hq] or None). Rows that no run holds are 0,
        their lse -inf. `kept` is where keys of all heads are to stay: k, v and their segment ids, as
        far as there are any, of the rows that the rank sees."""
        hq, dv = p.q.shape[1], p.v.shape[2]
        if not self.is_ring and self.groups == 1 and self._has_one_call(p):
            (_, _, part, step), keys = next(self._pipeline(p, into=kept))
            o, lse, peak = _local.forward(part, step.tables[0], *keys, part.sink, max_logit)
            return o.contiguous(), lse, peak
        dtype = torch.float32 if self.is_ring else p.q.dtype
        o = p.q.new_zeros(p.q.shape[0], hq, dv, dtype=dtype)
        lse = p.q.new_full((hq, p.q.shape[0]), -torch.inf, dtype=torch.float32)
        peak = p.q.new_full((hq,), -torch.inf, dtype=torch.float32) if max_logit else None
        if self.is_ring and p.sink is not None:  # a part like the others: o = 0, lse = sink
            logits = _sink_logits(p.sink, hq, lse.device)[:, None]
            self.rows.put(lse, logits.expand(hq, self.rows.count), 1)
        for (_, heads, part, step), keys in self._pipeline(p, into=kept):
            mine = slice(*heads[:2])
            for t in step.tables:
                found = self._attend(part, t, keys, max_logit, o[:, mine], lse[mine])
                if found is not None:
                    peak[mine] = torch.maximum(peak[mine], found)
        return o.to(p.q.dtype), lse, peak

    def backward(self, p: _local.Problem, do, o, lse, dlse, wanted, sums: dict, kept=()):
        """dq, dk, dv of the rank's rows. Gradients of whole arguments are added to `sums`. `kept` is
        what the forward pass left there."""
        if self.is_ring and "dsink" in wanted:
            wanted = [name for name in wanted if name != "dsink"]
            sums["dsink"].add_(self._dsink(p.sink, do, o, lse, dlse))
        groups = self._groups_of_heads(p)
        dqs = [Sum((p.q.shape[0], q1 - q0, p.q.shape[2]), p.q.device) for q0, q1, _, _ in groups]
        dks, dvs = ([Sum((x.shape[0], k1 - k0, x.shape[2]), x.device) for _, _, k0, k1 in groups] for x in (p.k, p.v))
        returning = None
        for (g, (q0, q1, _, _), part, step), (k, v, ids) in self._pipeline(p, kept=kept):
            own = _local.sums_of_heads(sums, q0, q1)
            buffers = [Sum(x.shape, x.device) for x in (k, v)]
            for t in step.tables:
                rows = [t.rows.take(x[:, q0:q1]) for x in (do, o)]
                rows += [x if x is None else t.rows.take(x[q0:q1], 1) for x in (lse, dlse)]
                _local.backward(part, t, k, v, ids, None if self.is_ring else part.sink, *rows, wanted,
                                own, self.is_ring, dqs[g], *buffers)
            if returning is not None:
                returning()
            returning = self._give_back(step, buffers, (p.k.dtype, p.v.dtype), [dks[g], dvs[g]])
        if returning is not None:
            returning()
        return tuple(sums_beside(parts, whole.dtype) for parts, whole in ((dqs, p.q), (dks, p.k), (dvs, p.v)))

    # ---- below: how ----

    def _groups_of_heads(self, p: _local.Problem) -> list[tuple[int, int, int, int]]:
        """(q, end of q, kv, end of kv) of each group's heads."""
        hk, per = p.k.shape[1], p.q.shape[1] // p.k.shape[1]
        ranges = [schedule.head_range(hk, g, self.groups) for g in range(self.groups)]
        return [(per * k0, per * k1, k0, k1) for k0, k1 in ranges]

    def _has_one_call(self, p: _local.Problem) -> bool:
        """Whether one call of attention computes all rows, as they lie there."""
        return len(self.steps) == 1 and len(self.steps[0].tables) == 1 and \
            self.steps[0].tables[0].rows.are_all(p.q)

    def _pipeline(self, p: _local.Problem, into=(), kept=()):
        """((group of heads, its heads, their problem, step), (k, v, ids of keys)) in order; the next are
        under way, unless all were kept."""
        items = [(g, heads, p.of_heads(*heads), step) for g, heads in enumerate(self._groups_of_heads(p))
                 for step in self.steps]
        if kept:
            yield from ((item, _keys_of(kept, item[1])) for item in items)
            return
        coming = self._fetch(items[0], into) if items else None
        for i, item in enumerate(items):
            keys = coming()
            coming = self._fetch(items[i + 1], into) if i + 1 < len(items) else None
            yield item, keys

    def _fetch(self, item, into):
        """Starts to bring the keys of an item; what it returns waits for them."""
        _, heads, part, step = item
        tensors = [part.k, part.v] + ([] if part.ids_k is None else [part.ids_k])
        last = [x for x in _keys_of(into, heads) if x is not None] if into else None
        finish = self._move(step.hops[0], tensors, last if len(step.hops) == 1 else None)

        def wait():
            found = finish()
            for hop in step.hops[1:]:
                found = self._move(hop, found, last)()
            return (*found, None) if part.ids_k is None else tuple(found)
        return wait

    def _move(self, hop, tensors, into):
        name, send, receive, count = hop
        group = self.topology.of_hop(name)
        if group.size == 1 and not into and send[0].is_slice and \
                send[0].count == count == tensors[0].shape[0]:
            return lambda: tensors
        buffers = into or [x.new_empty(count, *x.shape[1:]) for x in tensors]
        plan = _moving(group.rank, send, receive, tuple(map(Kind.of, tensors)), tuple(map(Kind.of, buffers)))
        pending = plan.start(group, tensors, buffers, self._overlaps)

        def finish():
            pending.wait()
            return buffers
        return finish

    def _give_back(self, step: Step, buffers: list[Sum], dtypes, totals: list[Sum]):
        """Starts to send gradients of the last hop's buffer to the owners of its rows; what it
        returns adds up what came, in the order of ranks."""
        def back(hop, buffers, totals):
            name, send, receive, _ = hop
            group = self.topology.of_hop(name)
            # A message is rounded to the inputs' dtype; sums are fp32.
            if any(rows.spans is None for rows in receive):
                for x in buffers:
                    x.total()
            sources = [values for x in buffers for values, _ in x.terms]
            about = tuple((x.shape[1:], dtype, tuple((Kind.of(values), spans) for values, spans in x.terms))
                          for x, dtype in zip(buffers, dtypes))
            plan = _returning(group.rank, send, receive, about)
            pending = plan.start(group, sources or [torch.empty(0, device=self.device)], (), self._overlaps)

            def finish():
                for p, found in enumerate(pending.wait()):
                    if p == group.rank:
                        for total, x in zip(totals, buffers):
                            total.add_sum(x, receive[p], send[p])
                        continue
                    for total, values in zip(totals, found):
                        total.add(values, send[p])
            return finish

        if len(step.hops) == 1:
            return back(step.hops[0], buffers, totals)
        outer, inner = step.hops
        middle = [Sum((outer[3], *x.shape[1:]), self.device) for x in buffers]
        finish = back(inner, buffers, middle)

        def both():
            finish()
            back(outer, middle, totals)()
        return both

    def _dsink(self, sink, do, o, lse, dlse):
        """sum over rows of P_sink (dlse - delta), with P_sink = exp(sink - lse)."""
        do, o = (self.rows.take(x).float() for x in (do, o))
        lse = self.rows.take(lse, 1)
        delta = (do * o).sum(-1).T
        weight = (_sink_logits(sink, len(lse), lse.device)[:, None] - lse).exp()
        row = -delta if dlse is None else self.rows.take(dlse, 1) - delta
        return (weight * row).sum(1)

    def _attend(self, part: _local.Problem, t: _local.Tables, keys, max_logit: bool, o, lse):
        """The rows of a call into o and lse; a ring's are merged with what is there, in the order of
        stages, so that arrival decides nothing. Returns max_logit, if it is wanted and there is one."""
        if self.is_ring and _local.adds_in_place(o.device):
            return _local.forward_into(part, t, *keys, max_logit, o, lse)
        is_there = t.rows.is_slice and not part.dense and not self.is_ring
        o_part, lse_part, peak = _local.forward(part, t, *keys, None if self.is_ring else part.sink,
                                                max_logit, t.rows.take(o) if is_there else None)
        if self.is_ring:
            before = t.rows.take(o).contiguous(), t.rows.take(lse, 1).contiguous()
            o_part, lse_part = _functions.merge([before, (o_part.float(), lse_part)], layout="thd")
        if not is_there:
            t.rows.put(o, o_part)
        t.rows.put(lse, lse_part, 1)
        return peak


def _keys_of(kept, heads):
    """k, v and segment ids of some heads of what was kept."""
    _, _, k0, k1 = heads
    k, v, *ids = kept
    return k[:, k0:k1], v[:, k0:k1], ids[0] if ids else None


def _sink_logits(sink, hq: int, device) -> torch.Tensor:
    return torch.zeros(hq, device=device) if isinstance(sink, str) else sink.float()
