# SPDX-License-Identifier: Apache-2.0
"""What each exchange costs, and which one to use. A model: messages take latency + bytes / bandwidth,
attention takes its visible tiles' arithmetic at one rate, and what overlaps hides wholly."""

from __future__ import annotations

import dataclasses
import functools

from . import schedule
from .schedule import Band
from .shards import TILE, Shards


@dataclasses.dataclass(frozen=True)
class Links:
    """A machine: H200s of 8 on NVLink, nodes by a 400 Gb/s adapter each GPU. Rates of messages are
    those measured for large ones between two H200s; of attention, bf16 with head dim 128."""
    node: int = 8                     # GPUs on one NVLink
    latency: float = 50e-6            # seconds a message
    inside: float = 330e9             # bytes/s a GPU receives inside a node
    across: float = 45e9              # bytes/s a GPU receives from other nodes
    memory: float = 3.5e12            # bytes/s of a GPU's memory, for the passes of a merge
    forward: float = 650e12           # flop/s
    backward: float = 550e12
    multiprocessors: int = 132
    free_bytes: int = 80 << 30        # of which buffers may use 1/8 unless max_bytes says otherwise


@dataclasses.dataclass(frozen=True)
class Option:
    """An exchange: what a rank receives, and what of it shows. The largest rank's figures."""
    exchange: str
    groups: int                       # of kv heads
    bytes: tuple[int, int]            # received, forward and backward
    exposed: tuple[float, float]      # seconds not hidden behind attention
    memory: int                       # bytes beside the shard
    why_not: str = ""                 # empty for what can run


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The choice, and all that it was made from; prints as a table."""
    shards: Shards
    exchange: str
    groups: int
    compute: tuple[float, float]      # seconds of attention of the busiest rank
    balance: float                    # its work over the mean
    options: tuple[Option, ...]

    @property
    def chosen(self) -> Option:
        return next(option for option in self.options
                    if (option.exchange, option.groups) == (self.exchange, self.groups))

    def __str__(self) -> str:
        lines = [f"{self.shards!r}: {self.exchange}, {self.groups} group(s) of kv heads; attention "
                 f"{self.compute[0] * 1e3:.3f} + {self.compute[1] * 1e3:.3f} ms, work max/mean "
                 f"{self.balance:.3f} (a model)",
                 f"  {'exchange':12}{'groups':>7}{'MB in, fwd':>12}{'MB in, bwd':>12}"
                 f"{'exposed ms':>16}{'memory MB':>11}"]
        for option in self.options:
            mark = "*" if option is self.chosen else " "
            figures = f"{option.bytes[0] / 1e6:12.1f}{option.bytes[1] / 1e6:12.1f}" \
                f"{option.exposed[0] * 1e3:8.3f}{option.exposed[1] * 1e3:8.3f}" \
                f"{option.memory / 1e6:11.1f}"
            lines.append(f"{mark} {option.exchange:12}{option.groups:7}{figures}  {option.why_not}")
        return "\n".join(lines)

    __repr__ = __str__


@functools.lru_cache(maxsize=256)
def plan(shards: Shards, *, hq: int, hk: int, dqk: int, dv: int, itemsize: int = 2,
         causal: bool = False, window: tuple[int, int] | None = None,
         shifts: tuple[int, ...] | int = 0, shards_k: Shards | None = None, inner: int = 1,
         exchange: str = "auto", groups: int | None = None, has_rows: bool = False,
         save_gathered: bool = False, max_bytes: int | None = None, links: Links | None = None) -> Plan:
    """Which exchange a call uses, and what each would cost.

    hq, hk, dqk, dv and itemsize are of the whole problem; shifts is the diagonal, of each sequence or
    of all; inner is the size of the inner groups of two levels, 1 for a flat group; has_rows says
    that a dense mask or bias has an axis of rows, save_gathered that "keys" keeps what it fetched for
    the backward pass. exchange and groups force a choice. ValueError for what can never run."""
    links, shards_k = links or Links(), shards_k or shards
    model = _Model(shards, shards_k, band_of(causal, window, shifts, len(shards.lengths)), hq, hk, dqk,
                   dv, itemsize, inner, links, save_gathered)
    limit = links.free_bytes // 8 if max_bytes is None else max_bytes
    options = [model.option(name, g) for name, g in _candidates(inner, hk, groups)]
    options = tuple(dataclasses.replace(option, why_not=_why_not(option, model, has_rows))
                    for option in options)
    able = [option for option in options if not option.why_not]
    if exchange != "auto":
        able = [option for option in options if option.exchange == exchange]
        if not able:
            raise ValueError(f"tessera.context_parallel.plan: exchange={exchange!r}: must be "
                             '"auto" or one of ' + ", ".join(sorted({o.exchange for o in options})))
        if able[0].why_not:
            raise ValueError(f"tessera.context_parallel.plan: exchange={exchange!r}: "
                             f"{able[0].why_not}")
        able = [option for option in able if not option.why_not]
    best = _choose(able, model, exchange, limit)
    return Plan(shards, best.exchange, best.groups, model.compute, model.balance, options)


def band_of(causal: bool, window, shifts, sequences: int) -> Band:
    """The band of a call; shifts is one for all sequences, or one for each."""
    left, right = (-1, -1) if window is None else window
    shifts = (int(shifts),) * sequences if not isinstance(shifts, tuple) else shifts
    return Band(int(left), 0 if causal else int(right), shifts)


# ---- the model ----

class _Model:
    def __init__(self, shards, shards_k, band, hq, hk, dqk, dv, itemsize, inner, links, saves):
        self.shards, self.shards_k, self.hq, self.hk, self.links = shards, shards_k, hq, hk, links
        self.inner, self.size, self.itemsize, self.saves = inner, shards.size, itemsize, saves
        self.width, self.dv = dqk + dv, dv
        self.tokens = max(shards.extents)
        work, missing, remote, held = [], [], [], []
        for rank in range(self.size):
            work.append(sum(_tiles(run, band, shards_k.lengths[run.sequence])
                            for run in shards.runs[rank] if run.length))
            wants = schedule.needed(shards, shards_k, band, rank)
            own = schedule._by_sequence(shards_k.runs[rank])
            local = sum(len(schedule._segments((want,), own)[0]) for want in wants)
            held.append(sum(want.length for want in wants))
            missing.append(held[-1] - local)
            remote.append(self._from_other_nodes(rank, wants))
        self.missing, self.remote, self.held = max(missing), max(remote), max(held)
        mean = sum(work) / self.size
        self.balance = max(work) / mean if mean else 1.0
        flops = 2 * TILE * TILE * hq * self.width
        self.compute = max(work) * flops / links.forward, 2.5 * max(work) * flops / links.backward
        self.even = mean * flops / links.forward, 2.5 * mean * flops / links.backward

    def _from_other_nodes(self, rank, wants) -> int:
        node = self.inner if self.inner > 1 else self.links.node
        if self.size <= node:
            return 0
        own = [schedule._by_sequence(self.shards_k.runs[r])
               for r in range(rank // node * node, min(rank // node * node + node, self.size))]
        near = sum(len(schedule._segments((want,), runs)[0]) for want in wants for runs in own)
        return sum(want.length for want in wants) - near

    def seconds(self, size: float, remote: float, messages: int) -> float:
        return messages * self.links.latency + max((size - remote) / self.links.inside,
                                                   remote / self.links.across)

    def option(self, name: str, groups: int) -> Option:
        return {"heads": self._heads, "keys": self._keys, "ring": self._ring,
                "heads+keys": self._two_levels, "heads+ring": self._two_levels,
                "keys+keys": self._keys}[name](name, groups)

    def _keys(self, name, groups) -> Option:
        row = self.itemsize * self.width * self.hk
        remote = self.remote / self.inner if name == "keys+keys" else self.remote
        bytes_in, hops = self.missing * row, 1 + (name == "keys+keys")
        time = self.seconds(bytes_in, remote * row, groups * hops)
        again = 1 if self.saves else 2  # dK and dV back, and K and V once more unless they were kept
        exposed = (time / groups + max(0.0, time - time / groups - self.compute[0]),
                   again * time / groups + max(0.0, again * (time - time / groups) - self.compute[1]))
        memory = self.held * row if self.saves else 2 * self.held * row / groups
        return Option(name, groups, (int(bytes_in), int(again * bytes_in)), exposed, int(memory))

    def _ring(self, name, groups) -> Option:
        row = self.itemsize * self.width * self.hk
        bytes_in = self.missing * row
        time = self.seconds(bytes_in, self.remote * row, self.size - 1)
        merge = 12 * self.tokens * self.hq * self.dv * (self.size - 1) / self.links.memory
        hidden = (self.size - 1) / self.size
        exposed = (max(0.0, time - hidden * self.compute[0]) + merge,
                   max(0.0, 2 * time - hidden * self.compute[1]) + time / max(self.size - 1, 1))
        return Option(name, groups, (int(bytes_in), int(2 * bytes_in)), exposed,
                      int(2 * row * self.tokens + 4 * self.tokens * (
                          self.hq * self.width + self.hk * self.width)))

    def _heads(self, name, groups) -> Option:
        size = self.size if name == "heads" else self.inner
        far = 0 if name != "heads" or size <= self.links.node else 1 - self.links.node / size
        kv = max(self.hk, size)
        once = (1 - 1 / size) * self.tokens * self.itemsize * self.width * (self.hq + kv)
        time = self.seconds(once, far * once, 2)
        again = 2 * once  # q, k, v, o and do in, dq, dk and dv out
        total = sum(self.shards.lengths) if name == "heads" else size * self.tokens
        memory = total * self.itemsize * self.width * (self.hq + kv) / size * min(1, 2 / groups)
        # All ranks have the same work then, whatever the shards.
        gain = [a - b for a, b in zip(self.compute, self.even)] if name == "heads" else [0.0, 0.0]
        back = self.seconds(again, far * again, 2)
        # The first part in and the last part out show; what travels between hides behind attention.
        exposed = tuple(t / groups + max(0.0, t - t / groups - work) - saved for t, work, saved in
                        zip((time, back), self.even, gain))
        return Option(name, groups, (int(once), int(again)), exposed, int(memory))

    def _two_levels(self, name, groups) -> Option:
        heads = self._heads(name, 1)
        row = self.itemsize * self.width * max(self.hk / self.inner, 1)
        rows = self.remote
        time = self.links.latency * groups + rows * row / self.links.across
        over = (time / groups + max(0.0, time - time / groups - self.compute[0]),
                2 * time / groups + max(0.0, 2 * (time - time / groups) - self.compute[1]))
        return Option(name, groups, tuple(int(a + n * rows * row) for n, a in
                                          zip((1, 2), heads.bytes)),
                      tuple(a + b for a, b in zip(heads.exposed, over)),
                      int(heads.memory + 2 * self.held * row / groups))


def _tiles(run, band: Band, length_k: int) -> int:
    """Visible 128 x 128 tiles of a run of queries."""
    tiles = 0
    for start in range(run.start, run.stop, TILE):
        row = run._replace(start=start, length=min(TILE, run.stop - start))
        lo, hi = band.seen(row, length_k)
        tiles += -(-(hi - lo) // TILE)
    return tiles


# ---- the choice ----

def _candidates(inner: int, hk: int, groups: int | None):
    counts = [groups] if groups else [g for g in (1, 2, 4, 8, 16, 32, 64) if g <= hk]
    if inner > 1:
        return [("heads+keys", 1), ("heads+ring", 1), *(("keys+keys", g) for g in counts)]
    return [*(("keys", g) for g in counts), *(("heads", g) for g in counts), ("ring", 1)]


def _why_not(option: Option, model: _Model, has_rows: bool) -> str:
    if has_rows and option.exchange.startswith("heads"):
        return "a mask or bias with rows is not exchanged, being O(s²); use keys"
    most = -(-model.hk // model.size) if option.exchange == "heads" else model.hk
    if option.groups > most:
        return f"groups={option.groups}: there are {most} kv heads" + " a rank" * (most < model.hk)
    return ""


def _choose(able, model: _Model, exchange: str, limit: int) -> Option:
    """Heads where they are fewer bytes and every rank has kv heads of its own, or runs are too short
    for keys; else keys. Of either, the smallest number of groups that is within 5 % of the fastest,
    fills the GPU and fits; a ring where nothing fits."""
    if len(able) == 1:
        return able[0]
    by_name = {}
    for option in able:
        by_name.setdefault(option.exchange, []).append(option)
    ring = by_name.get("ring")
    keys = by_name.get("keys") or by_name.get("keys+keys") or able
    best = _best(keys, model, limit)
    heads = by_name.get("heads" if model.inner == 1 else "heads+keys")
    if exchange != "auto" or not heads:
        return best or (ring or keys)[-1]
    if model.shards.is_fine:
        return _best(heads, model, limit) or heads[0]
    if model.inner > 1:
        return min(heads + [best or keys[-1]], key=lambda option: sum(option.exposed))
    fewer = sum(heads[0].bytes) < sum(keys[0].bytes) and model.hk >= model.size
    return _best(heads, model, limit) or heads[0] if fewer else best or ring[0]


def _best(options, model: _Model, limit: int) -> Option | None:
    whole = sum(model.compute)

    def fills(option):
        return option.groups == 1 or model.tokens / TILE * model.hq / option.groups >= \
            2 * model.links.multiprocessors
    fitting = [option for option in options if option.memory <= limit]
    full = [option for option in fitting if fills(option)] or fitting
    if not full:
        return None
    # Calls of fewer heads take longer. On two H200s, more groups than one were no faster where the messages that they
    # hide are up to 5 % of the time.
    fastest = min(sum(option.exposed) for option in full)
    return next(option for option in full
                if whole + sum(option.exposed) <= 1.05 * (whole + fastest))
