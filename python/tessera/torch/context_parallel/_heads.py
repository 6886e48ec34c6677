# SPDX-License-Identifier: Apache-2.0
"""heads: every rank of a group receives its heads of all rows of the group, works on them as one rank
does, and sends back what belongs to the others' rows; in parts of its kv heads, of which one travels
while another is worked on."""

from __future__ import annotations

import dataclasses
import functools

import torch

from ...context_parallel import schedule
from ...context_parallel.shards import Shards
from ..comm import Group
from . import _local
from ._messages import Messages
from ._row_sums import Kind
from ._rows import Rows, beside


@functools.lru_cache(maxsize=256)
def _routes(shards: Shards, first: int, size: int, rank: int, device: torch.device):
    """(rows of mine that all want, [rows that each peer's become], rows of the group)."""
    hop, node = schedule.heads_hop(shards, range(first, first + size))
    route = hop.route(rank)
    return (Rows(route.send[rank], device), [Rows(rows, device) for rows in route.receive],
            sum(run.length for run in node))


class Exchange:
    """Heads of the rows of a group, and back: part `part` of `parts` of every rank's kv heads, with
    the q heads that read them. `first` is the group's first rank in the shards."""

    def __init__(self, group: Group, shards_q: Shards, shards_k: Shards, first: int, hq: int, hk: int,
                 device: torch.device, part: int = 0, parts: int = 1):
        self.group, self.hq, self.hk = group, hq, hk
        self.overlaps = parts > 1  # else nothing runs beside an exchange
        self.q = _routes(shards_q, first, group.size, group.rank, device)
        self.k = _routes(shards_k, first, group.size, group.rank, device)
        self.shares_kv_heads = any(schedule.head_range(hq, peer, group.size)[0] % (hq // hk)
                                   for peer in range(group.size))
        self.ranges = []  # of each peer: its q heads, and the kv heads that they read
        for peer in range(group.size):
            q0, q1 = schedule.head_range(hq, peer, group.size)
            per = hq // hk
            k0, k1 = q0 // per, -(-q1 // per) if q1 > q0 else q0 // per
            a, b = schedule.head_range(k1 - k0, part, parts)
            q0, q1 = max(q0, per * (k0 + a)), min(q1, per * (k0 + b))
            self.ranges.append((q0, max(q0, q1), k0 + a, k0 + b))

    @property
    def mine(self) -> tuple[int, int, int, int]:
        return self.ranges[self.group.rank]

    def pieces(self):
        """(q heads, kv heads) of my calls, as (from, to, from, to) of the whole problem."""
        q0, q1, _, _ = self.mine
        return schedule.head_pieces(self.hq, self.hk, q0, q1) if q1 > q0 else []

    def gather(self, of_q, of_k, rows_q=(), rows_k=()):
        """Starts to bring tensors [rows, heads, ...] of q's and of k's heads, and tensors [rows, ...]
        without heads, of all rows of the group and my heads; what it returns waits for four lists."""
        given = [list(xs) for xs in (of_q, of_k, rows_q, rows_k)]
        sources = [x for xs in given for x in xs]
        plan, into = _gathering(self, tuple(tuple(Kind.of(x) for x in xs) for xs in given))
        targets = [x.new_empty(kind.shape) for x, kind in zip(sources, into)]
        pending = plan.start(self.group, sources, targets, self.overlaps)

        def finish():
            pending.wait()
            found = iter(targets)
            return [[next(found) for _ in xs] for xs in given]
        return finish

    def give_back(self, of_q, of_k, into_q, into_k):
        """Starts to send results of my heads and all rows to the rows' owners; what it returns waits until
        those of q's heads are in into_q [rows, hq, ...], and those of k's in into_k; where two ranks have
        parts of one kv head, it adds them, in the order of ranks."""
        plan = _giving(self, *(tuple(Kind.of(x) for x in xs) for xs in (of_q, of_k, into_q, into_k)))
        targets = [*into_q] if self.shares_kv_heads else [*into_q, *into_k]
        pending = plan.start(self.group, [*of_q, *of_k], targets, self.overlaps)

        def finish():
            for (_, _, k0, k1), values in zip(self.ranges, pending.wait()):
                for x, value in zip(into_k, values):
                    self.k[0].add(x[:, k0:k1], value)
        return finish


@functools.lru_cache(maxsize=256)
def _gathering(exchange: Exchange, kinds) -> tuple[Messages, list[Kind]]:
    """The plan of Exchange.gather for tensors of q's heads, of k's heads, of q's rows and of k's, and what it makes."""
    rank, (q0, q1, k0, k1) = exchange.group.rank, exchange.mine
    sides = [exchange.q, exchange.k, exchange.q, exchange.k]
    own_heads = [(q0, q1), (k0, k1), None, None]
    items = [(kind, side, heads, which) for which, (xs, side, heads) in enumerate(zip(kinds, sides, own_heads))
             for kind in xs]
    into = [Kind.dense((side[2], *((heads[1] - heads[0], *kind.shape[2:]) if heads else kind.shape[1:])), kind.dtype)
            for kind, side, heads, _ in items]
    plan = Messages(rank, exchange.group.size, [item[0] for item in items], into)
    for peer, ranges in enumerate(exchange.ranges):
        heads_of_peer = [ranges[:2], ranges[2:], None, None]
        for i, (_, side, _, which) in enumerate(items):
            plan.send(peer, i, side[0], heads_of_peer[which])
        for i, (_, side, _, _) in enumerate(items):
            plan.receive(peer, i, side[1][peer])
    return plan, into


@functools.lru_cache(maxsize=256)
def _giving(exchange: Exchange, of_q, of_k, into_q, into_k) -> Messages:
    """The plan of Exchange.give_back."""
    rank = exchange.group.rank
    targets = into_q if exchange.shares_kv_heads else (*into_q, *into_k)
    sides = [exchange.q] * len(of_q) + [exchange.k] * len(of_k)
    plan = Messages(rank, exchange.group.size, [*of_q, *of_k], targets)
    for peer, (q0, q1, k0, k1) in enumerate(exchange.ranges):
        for i, side in enumerate(sides):
            plan.send(peer, i, side[1][peer], is_read=i >= len(targets))
        for i, side in enumerate(sides):
            heads = (q0, q1) if i < len(of_q) else (k0, k1)
            if i < len(targets):
                plan.receive(peer, i, side[0], heads)
            else:
                kind = of_k[i - len(of_q)]
                plan.read(peer, (side[0].count, heads[1] - heads[0], *kind.shape[2:]), kind.dtype)
    return plan


def pipeline(exchanges: list[Exchange], p: _local.Problem, more=()):
    """(exchange, problems of its calls on all rows of the group, `more` of them) in order; the next are
    under way. `more` are tensors [rows, hq, ...]."""
    coming = _gathered(exchanges[0], p, more)
    for i, one in enumerate(exchanges):
        found = coming()
        coming = _gathered(exchanges[i + 1], p, more) if i + 1 < len(exchanges) else None
        yield one, *found


def _gathered(exchange_: Exchange, p: _local.Problem, more):
    """Starts to bring what pipeline yields of an exchange."""
    finish = exchange_.gather(
        (p.q, *more), (p.k, p.v),
        rows_q=[x for x in (p.ids_q, _rows_first(p)) if x is not None],
        rows_k=[] if p.ids_k is None else [p.ids_k])

    def wait():
        (q, *rest), (k, v), rows_q, rows_k = finish()
        ids, whole = {}, p
        if p.ids_q is not None:
            ids["ids_q"], ids["ids_k"] = rows_q.pop(0), rows_k[0]
        if rows_q:
            whole = dataclasses.replace(whole, ranges=rows_q[0].movedim(0, 1))
        first_q, _, first_k, _ = exchange_.mine
        parts = []
        for q0, q1, k0, k1 in exchange_.pieces():
            part = whole.of_heads(q0, q1, k0, k1, q=q[:, q0 - first_q:q1 - first_q],
                                  k=k[:, k0 - first_k:k1 - first_k],
                                  v=v[:, k0 - first_k:k1 - first_k], **ids)
            parts.append(((q0, q1, k0, k1), part))
        return parts, rest
    return wait


def _rows_first(p: _local.Problem):
    """Ranges as [rows, hq|1, n]. One for all rows becomes one for each: a rank with a single row could
    not be told from it."""
    if p.ranges is None:
        return None
    return p.ranges.expand(-1, p.q.shape[0], -1).movedim(1, 0)


def forward(exchanges: list[Exchange], driver, p: _local.Problem, max_logit: bool):
    """As Driver.forward."""
    hq, count = exchanges[0].hq, exchanges[0].q[2]
    whole = _of_rows(p.q, exchanges[0].q[0], hq, p.v.shape[2])
    lses = p.q.new_full((p.q.shape[0], hq), -torch.inf, dtype=torch.float32)
    peak = p.q.new_full((hq,), -torch.inf, dtype=torch.float32) if max_logit else None
    returning = None
    for one, parts, _ in pipeline(exchanges, p):
        os, lse_parts = [p.q.new_empty(count, 0, p.v.shape[2])], [lses.new_empty(count, 0)]
        for (a, b, _, _), part in parts:
            o, lse, found = driver.forward(part, max_logit)
            os.append(o)
            lse_parts.append(lse.T)
            if max_logit:
                peak[a:b] = found
        o, lse = beside(os), beside(lse_parts)
        if returning is not None:
            returning()
        returning = one.give_back((o, lse), (), (whole, lses), ())
    returning()
    return whole, lses.T.contiguous(), peak


def backward(exchanges: list[Exchange], driver, p: _local.Problem, do, o, lse, dlse, wanted, sums):
    """As Driver.backward."""
    rows = [do, o, lse.T] + ([] if dlse is None else [dlse.T])
    one = exchanges[0]
    whole = _of_rows(p.q, one.q[0], *p.q.shape[1:])
    totals = [x.new_zeros(x.shape, dtype=torch.float32) if one.shares_kv_heads else _of_rows(x, one.k[0], *x.shape[1:])
              for x in (p.k, p.v)]
    returning = None
    for one, parts, (do, o, lse, *dlses) in pipeline(exchanges, p, rows):
        q0 = one.mine[0]
        dqs = [p.q.new_empty(one.q[2], 0, p.q.shape[2])]
        dks, dvs = ([x.new_empty(one.k[2], 0, x.shape[2])] for x in (p.k, p.v))
        for (a, b, _, _), part in parts:  # no two have a kv head in common
            own = slice(a - q0, b - q0)
            dq, dk, dv = driver.backward(part, do[:, own], o[:, own], lse[:, own].T.contiguous(),
                                         dlses[0][:, own].T.contiguous() if dlses else None, wanted,
                                         _local.sums_of_heads(sums, a, b))
            for pieces, x in zip((dqs, dks, dvs), (dq, dk, dv)):
                pieces.append(x)
        dq, dk, dv = (beside(pieces) for pieces in (dqs, dks, dvs))
        if returning is not None:
            returning()
        returning = one.give_back((dq,), (dk, dv), (whole,), totals)
    returning()
    return whole, *(total.to(x.dtype) for total, x in zip(totals, (p.k, p.v)))


def _of_rows(x: torch.Tensor, rows: Rows, *shape: int) -> torch.Tensor:
    """A tensor [rows of x, *shape] for values of `rows`; 0 elsewhere."""
    return (x.new_empty if rows.are_all(x) else x.new_zeros)(x.shape[0], *shape)
