# SPDX-License-Identifier: Apache-2.0
"""Attention on one rank: a Call of the schedule, forward and backward, on rows of q and a buffer of
keys. All sequences are one packed call; with a dense mask or bias, each is a call of its own, so
that the rows and columns of its part are a view."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import torch

from ..._call import _keywords
from ...context_parallel.schedule import Band, Call
from .. import _functions
from ._rows import Rows, Sum

# Keywords that Problem has a place for, and those that each of its calls takes as they are.
TENSORS = (*_keywords.DENSE, "key_ranges", "segment_ids", "alibi_slopes", "sink", "k_scale", "v_scale", "rng_state")
OPTIONS = tuple(name for name, row in _keywords.SHARED.items() if row.of_parts)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Some heads of a problem: q [rows, hq, dqk], k, v of one rank, and what else the whole problem
    has. Dense tensors are [b|1, hq|1, rows of a sequence|1, sk|1], ranges [hq|1, rows|1, 2|4], rng
    the four words of dropout."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dense: dict[str, torch.Tensor]
    ranges: torch.Tensor | None
    ids_q: torch.Tensor | None
    ids_k: torch.Tensor | None
    slopes: torch.Tensor | None           # [hq] or [b, hq]
    sink: torch.Tensor | str | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    rng: torch.Tensor | None
    options: dict                         # keywords that every call passes on

    def of_heads(self, q0: int, q1: int, k0: int, k1: int, **more) -> Problem:
        """q heads [q0, q1) with kv heads [k0, k1); `more` replaces what was exchanged already."""
        if not more and (q0, q1, k0, k1) == (0, self.q.shape[1], 0, self.k.shape[1]):
            return self
        rng = self.rng
        if rng is not None and q0:
            rng = rng + rng.new_tensor([0, 0, q0, 0])

        part = dict(
            dense={name: of_heads(x, 1, q0, q1) for name, x in self.dense.items()},
            ranges=of_heads(self.ranges, 0, q0, q1), slopes=of_heads(self.slopes, -1, q0, q1),
            sink=of_heads(self.sink, -1, q0, q1), k_scale=of_heads(self.k_scale, -1, k0, k1),
            v_scale=of_heads(self.v_scale, -1, k0, k1), rng=rng)
        for name, lo, hi in (("q", q0, q1), ("k", k0, k1), ("v", k0, k1)):
            if name not in more:
                part[name] = getattr(self, name)[:, lo:hi]
        return dataclasses.replace(self, **part, **more)


def of_heads(x, dim: int, first: int, last: int):
    """Heads [first, last) of what may have an axis of heads, or one of extent 1 that stands for all."""
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.shape[dim] == 1:
        return x
    return x.narrow(dim, first, last - first)


def sums_of_heads(sums: dict, q0: int, q1: int) -> dict:
    """Views of the gradients of whole arguments."""
    return {name: of_heads(x, 1 if name == "dbias" else -1, q0, q1) for name, x in sums.items()}


class Tables:
    """A Call on a device: rows, lengths and starts of each sequence."""

    def __init__(self, call: Call, band: Band, begins: dict[int, int], device: torch.device):
        """`begins` says where each sequence begins in the rank's buffer."""
        self.call, self.band, self.q_begins = call, band, begins
        rows = [np.arange(run.at, run.at + run.length) for run in call.q]
        self.rows = Rows(np.concatenate(rows) if rows else np.zeros(0, np.int64), device)
        held = [run for run in call.k if run.length]
        self.k_first = min((run.at for run in held), default=0)
        self.k_count = max((run.at + run.length for run in held), default=0) - self.k_first
        self.keys = Rows(np.arange(self.k_first, self.k_first + self.k_count), device)
        begins, end = [], 0
        for run in call.k:
            begins.append(run.at - self.k_first if run.length else end)
            end = begins[-1] + run.length
        lengths = np.cumsum([0, *(run.length for run in call.k)])

        def placed(values):
            return torch.tensor(np.asarray(values, np.int32), device=device)
        self.cu_q = placed(np.cumsum([0, *(run.length for run in call.q)]))
        self.cu_k = placed(lengths)
        has_gaps = [*begins, self.k_count] != lengths.tolist()
        self.k_begins = placed([*begins, self.k_count]) if has_gaps else None
        self.q_start = placed([run.start for run in call.q])
        self.k_start = placed([run.start for run in call.k])
        self.shift = placed(band.shifts) if len(set(band.shifts)) > 1 else (*band.shifts, 0)[0]
        # Sequences that have queries, in order, each with its rows in the call's q and o.
        begin = np.cumsum([0, *(run.length for run in call.q)]).tolist()
        self.sequences = [(n, begin[n], begin[n + 1]) for n, run in enumerate(call.q) if run.length]

    @property
    def window(self):
        return None if self.band.left < 0 and self.band.right < 0 else (self.band.left, self.band.right)


def forward(p: Problem, t: Tables, k, v, ids_k, sink, max_logit: bool, out=None):
    """(o [rows, hq, dv], lse [hq, rows], max_logit [hq] or None) of a call's rows. k, v and ids_k are
    the buffer of keys; `sink` is the problem's, or None where the sink is a part of its own; `out` is o, if it
    is there already and one call of attention writes it."""
    parts = []
    for q, k_, v_, keywords, _ in _calls(p, t, k, v, ids_k, sink):
        results = _functions.attention(q, k_, v_, **keywords, out=out, return_lse=True,
                                       return_max_logit=max_logit)
        parts.append(results if keywords["layout"] == "thd" else
                     (results[0][0], results[1][0], *results[2:]))
    if not parts:
        return (p.q.new_empty(0, p.q.shape[1], v.shape[2]),
                p.q.new_empty(p.q.shape[1], 0, dtype=torch.float32), None)
    if len(parts) == 1:
        o, lse, *peak = parts[0]
    else:
        o, lse = torch.cat([x[0] for x in parts]), torch.cat([x[1] for x in parts], 1)
        peak = [torch.stack([x[2] for x in parts]).amax(0)] if max_logit else []
    return o, lse, peak[0] if peak else None


def forward_into(p: Problem, t: Tables, k, v, ids_k, max_logit: bool, o, lse):
    """As forward, but adds the part to what o [rows of the rank, hq, dv], fp32, and lse [hq, rows of
    the rank] hold of its rows, and returns max_logit. Sinks are no part of it."""
    own, rows = t.rows.take(o), t.rows.take(lse, 1).contiguous()
    peaks = []
    for q, k_, v_, keywords, place in _calls(p, t, k, v, ids_k, None):
        at = slice(None) if place.packed else slice(*t.sequences[place.order][1:])
        into = own if place.packed else own[None, at]
        sums = rows if place.packed else rows[None, :, at].contiguous()
        found = _functions.attention(q, k_, v_, **keywords, out=into, lse=sums, accumulate=True,
                                     return_lse=True, return_max_logit=max_logit)
        if not place.packed:
            rows[:, at] = sums[0]
        peaks += found[2:]
    if not t.rows.is_slice:
        t.rows.put(o, own)
    t.rows.put(lse, rows, 1)
    return torch.stack(peaks).amax(0) if peaks else None


def backward(p: Problem, t: Tables, k, v, ids_k, sink, do, o, lse, dlse, wanted, sums,
             partial: bool, dq: Sum, dk: Sum, dv: Sum):
    """Adds a call's gradients to dq, of the rank's rows, to dk and dv, of the rows of the buffer of keys, and
    those of whole arguments to `sums`, by name. do, o, lse and dlse are of the call's rows."""
    calls = _calls(p, t, k, v, ids_k, sink)
    if not p.dense and not adds_in_place(do.device):
        (q, k, v, keywords, _), = calls
        found = _functions.attention_backward(do, q, k, v, o, lse, dlse, grads=("dq", "dk", "dv", *wanted),
                                              **keywords, partial=partial)
        for total, x, rows in ((dq, found.dq, t.rows), (dk, found.dk, t.keys), (dv, found.dv, t.keys)):
            total.add(x, rows)
        for name in wanted:
            sums[name].add_(getattr(found, name))
        return
    own_dq = t.rows.take(dq.total())
    dk, dv = (t.keys.take(x.total()) for x in (dk, dv))
    for q, k_, v_, keywords, place in calls:
        lo, hi = (0, t.rows.count) if place.packed else t.sequences[place.order][1:]
        rows = [x if x is None else x[lo:hi] if place.packed else x[None, lo:hi] for x in (do, o)]
        rows += [x if x is None else x[:, lo:hi] if place.packed else x[None, :, lo:hi]
                 for x in (lse, dlse)]
        into = [own_dq, dk, dv] if place.packed else [
            own_dq[None, lo:hi], dk[None, place.keys], dv[None, place.keys]]
        into = dict(zip(("dq", "dk", "dv"), into))
        whole = {name: sums[name][place.of(name, sums[name])] for name in wanted}
        _add_gradients(rows[0], (q, k_, v_, *rows[1:]), dict(keywords, partial=partial), into, whole)
    if not t.rows.is_slice:
        t.rows.put(dq.total(), own_dq)


def _add_gradients(do, inputs, keywords: dict, into: dict, whole: dict):
    """Adds the gradients of one call of attention to the tensors `into`, in its epilogue where a backend
    can, and to `whole`, fp32 whatever the inputs are."""
    if adds_in_place(do.device):
        own = {name: torch.zeros(keywords[name[1:]].shape, dtype=keywords[name[1:]].dtype,
                                 device=do.device) for name in whole}
        _functions.attention_backward(do, *inputs, grads={**into, **own}, accumulate=True, **keywords)
    else:
        found = _functions.attention_backward(do, *inputs, grads=(*into, *whole), **keywords)
        own = {name: getattr(found, name) for name in whole}
        for name, x in into.items():
            x.add_(getattr(found, name))
    for name, x in whole.items():
        x.add_(own[name])


def adds_in_place(device: torch.device) -> bool:
    """Whether every backend there has accumulate=True: cuda_sm90, the faster one, has not."""
    return device.type == "cpu"


class _Place(NamedTuple):
    """Where the tensors of one call of attention lie in those of the problem."""
    packed: bool
    order: int = 0
    sequence: int = 0
    rows: slice = slice(None)
    columns: slice = slice(None)
    keys: slice = slice(None)

    def of(self, name: str, x: torch.Tensor):
        if self.packed:
            return ...
        if name == "dalibi_slopes":
            return (slice(self.sequence, self.sequence + 1),) if x.dim() == 2 else ...
        return self.dense(x) if name == "dbias" else ...

    def dense(self, x: torch.Tensor):
        """The part of a dense tensor."""
        n = slice(self.sequence, self.sequence + 1) if x.shape[0] > 1 else slice(None)
        return (n, slice(None), self.rows if x.shape[2] > 1 else slice(None),
                self.columns if x.shape[3] > 1 else slice(None))


def _calls(p: Problem, t: Tables, k, v, ids_k, sink):
    """(q, k, v, keywords, place) of the calls of attention that a Call is."""
    k, v = k.narrow(0, t.k_first, t.k_count), v.narrow(0, t.k_first, t.k_count)
    ids_k = None if ids_k is None else ids_k.narrow(0, t.k_first, t.k_count)
    q = t.rows.take(p.q)
    ids_q = None if p.ids_q is None else t.rows.take(p.ids_q)
    ranges = p.ranges if p.ranges is None or p.ranges.shape[1] == 1 else t.rows.take(p.ranges, 1)
    shared = dict(p.options, window=t.window, sink=sink)
    if not p.dense:
        yield q, k, v, dict(
            shared, layout="thd", cu_seqlens_q=t.cu_q, cu_seqlens_k=t.cu_k,
            cu_seqlens_k_padded=t.k_begins, cu_seqlens_q_padded=None, q_start=t.q_start,
            k_start=t.k_start, align=t.shift, key_ranges=ranges, alibi_slopes=p.slopes,
            segment_ids=None if ids_q is None else (ids_q, ids_k), k_scale=p.k_scale,
            v_scale=p.v_scale, rng_state=p.rng), _Place(True)
        return
    for order, (n, lo, hi) in enumerate(t.sequences):
        qs, ks = t.call.q[n], t.call.k[n]
        first = ks.at - t.k_first if ks.length else 0
        keys = slice(first, first + ks.length)
        begin = qs.at - t.q_begins[n]
        place = _Place(False, order, n, slice(begin, begin + qs.length),
                       slice(ks.start, ks.stop), keys)
        rng = p.rng
        if rng is not None and n:
            rng = torch.cat([rng[:2], (rng[2] + n * rng[3])[None], rng[3:]])
        yield q[None, lo:hi], k[None, keys], v[None, keys], dict(
            shared, layout="bshd", q_start=t.q_start[n:n + 1], k_start=t.k_start[n:n + 1],
            align=t.band.shifts[n], key_ranges=_of_sequence(ranges, lo, hi),
            segment_ids=None if ids_q is None else (ids_q[None, lo:hi], ids_k[None, keys]),
            alibi_slopes=_of_row(p.slopes, n), k_scale=_of_row(p.k_scale, n),
            v_scale=_of_row(p.v_scale, n), rng_state=rng,
            **{name: x[place.dense(x)] for name, x in p.dense.items()}), place


def _of_sequence(ranges, lo: int, hi: int):
    """Ranges [hq|1, rows|1, n] of some rows, as [1, hq|1, rows|1, n]."""
    if ranges is None:
        return None
    return (ranges if ranges.shape[1] == 1 else ranges[:, lo:hi])[None]


def _of_row(x, n: int):
    """The row of a sequence in what may be [b, heads]."""
    return x[n:n + 1] if isinstance(x, torch.Tensor) and x.dim() == 2 else x
