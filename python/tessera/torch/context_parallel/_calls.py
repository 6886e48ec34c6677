# SPDX-License-Identifier: Apache-2.0
"""The calls of the ranks of a topology, by number. Ranks agree through the store that their processes met at: nobody
waits for a device, or for a rank that went on.

    call n is known here   passed(it): noted, and no more
    call n is new here     ask(it): posts a digest, waits for everyone's, and returns the texts if they differ

A thread of each rank looks twice a second, and down to once in ten seconds while nobody asks, as all ranks share one
store. It posts for its rank what others ask about calls that the rank passed, and compares the passed calls of its rank
and of the rank before, whom nobody may have asked. Where digests differ, everyone posts a text and has all texts.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..comm import Processes, Topology

_TICK = 0.5      # seconds between looks at first,
_LONGEST = 10.0  # and when nobody has asked for a while
_KEPT = 1024     # passed calls that a rank can still answer for
_COMPARED = 128  # passed calls that are compared at each look
_LAG = 8         # asks after which one's own entries go from the store: by then everyone has read them


class Said(NamedTuple):
    """What a rank says of a call."""
    digest: bytes
    text: bytes

    @classmethod
    def of(cls, text: bytes) -> Said:
        return cls(hashlib.sha256(text).digest(), text)


class Calls:
    """The calls of this rank. `differing` is None, or the texts of all ranks at a call that some had passed."""

    def __init__(self, topology: Topology, store, name: str, is_on_gpu: bool):
        self._topology, self._rank, self._size = topology, topology.rank, topology.size
        # A connection of its own: another thread may wait in the store's for minutes.
        self._store, self._is_on_gpu = dist.PrefixStore(f"tessera.cp/{name}", store.clone()), is_on_gpu
        self._limit = store.timeout.total_seconds()
        self._number, self._passed = 0, [None] * _KEPT  # (number, Said) at number % _KEPT
        self._asked: list[int] = []
        # The thread's: calls seen, asks seen, calls to answer for, calls whose answers are awaited.
        self._looked, self._asks, self._open, self._awaited = 0, 0, set(), set()
        self.differing: list[bytes] | None = None
        self._ends, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)
        atexit.register(self._end)
        self._thread.start()

    def passed(self, said: Said):
        self._passed[self._number % _KEPT] = self._number, said
        self._number += 1

    def ask(self, said: Said) -> list[bytes] | None:
        """None where all ranks say the same, else their texts. RuntimeError: a rank does not come within the store's
        time limit."""
        number = self._number
        self._number += 1
        self._asked.append(number)
        self._post(number, b"asks", said)
        self._announce("asked", number)
        self._wait(str(number))
        if self.differing is None and self._differ(number, said):
            self._wait(f"{number}/text")
            return self.differing or self._of_all(f"{number}/text")
        while len(self._asked) > _LAG:
            self._store.delete_key(f"{self._asked.pop(0)}/{self._rank}")
        return self.differing

    def _post(self, number: int, how: bytes, said: Said):
        self._store.set(f"{number}/{self._rank}", how + said.digest)

    def _announce(self, how: str, number: int):
        self._store.set(f"{how}/{self._rank}", str(number))
        self._store.add("asks", 1)

    def _wait(self, name: str):
        """Until every rank has set its entry, or ranks were found to differ elsewhere."""
        end, pause = time.monotonic() + self._limit, 1e-4
        while self.differing is None and not self._is_complete(name):
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(self._keys(name)) if not self._store.check([key])]
                raise RuntimeError(f"tessera.context_parallel: ranks {missing} did not come to a call of rank "
                                   f"{self._rank} in {self._limit:.0f} s, the time limit of the store")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _keys(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(self._size)]

    def _is_complete(self, name: str) -> bool:
        return self._store.check(self._keys(name))

    def _of_all(self, name: str) -> list[bytes]:
        return [self._store.get(key) for key in self._keys(name)]

    def _differ(self, number: int, said: Said) -> bool:
        """True if ranks said different things of a call; then this one's text is there for all to read."""
        if all(entry[4:] == said.digest for entry in self._of_all(str(number))):
            return False
        self._store.set(f"{number}/text/{self._rank}", said.text)
        return True

    # ---- the thread, which waits for no rank ----

    def _watch(self):
        pause = _TICK
        while self.differing is None and not self._ends.wait(pause):
            asks = self._asks
            try:
                self._look()
            except RuntimeError:  # the store is gone, and its processes with it
                return
            pause = min(1.5 * pause, _LONGEST) if asks == self._asks and not self._awaited else _TICK
        if self._is_on_gpu and self.differing is not None:
            for group in self._topology:  # what was sent can meet nothing, and the program may wait for it
                if isinstance(group, Processes):
                    group.abort()

    def _end(self):
        self._ends.set()
        self._thread.join(2 * _TICK)

    def _look(self):
        number = self._number
        if number != self._looked:
            self._compare(number)
            self._looked = number
        asks = self._store.add("asks", 0)
        if asks != self._asks:
            self._open.update(int(n) for how in ("asked", "doubted") for n in self._of_others(how))
            self._asks = asks
        for n in [n for n in self._open if n < self._number]:  # to others this rank has yet to come
            self._open.discard(n)
            self._answer(n)
        for n in sorted(self._awaited):
            if not self._is_complete(str(n)):
                continue
            if not self._differ(n, self._passed_at(n)):
                self._awaited.discard(n)
            elif self._is_complete(f"{n}/text"):
                self.differing = self._of_all(f"{n}/text")

    def _answer(self, number: int):
        said = self._passed_at(number)
        if said is not None and number not in self._awaited:
            self._post(number, b"went", said)
            self._awaited.add(number)

    def _passed_at(self, number: int) -> Said | None:
        entry = self._passed[number % _KEPT]
        return entry[1] if entry is not None and entry[0] == number else None

    def _of_others(self, name: str) -> list[bytes]:
        keys = [key for rank, key in enumerate(self._keys(name)) if rank != self._rank]
        return [self._store.get(key) for key in keys if self._store.check([key])]

    def _compare(self, number: int):
        """Has everyone asked about the first of the passed calls in which this rank and the one before differ."""
        own = {entry[0]: entry[1].digest[:8] for entry in list(self._passed)
               if entry is not None and entry[0] >= number - _COMPARED}
        self._store.set(f"passed/{self._rank}", b"".join(n.to_bytes(8, "little") + x for n, x in own.items()))
        before = f"passed/{(self._rank - 1) % self._size}"
        if not self._store.check([before]):
            return
        data = self._store.get(before)
        other = {int.from_bytes(data[at:at + 8], "little"): data[at + 8:at + 16] for at in range(0, len(data), 16)}
        doubted = [n for n in own.keys() & other.keys() if own[n] != other[n]]
        if doubted:
            self._answer(min(doubted))
            self._announce("doubted", min(doubted))


_calls: dict[tuple, Calls | None] = {}


def of(topology: Topology, device: torch.device) -> Calls | None:
    """The calls of this rank with these groups; None where they are not of torch.distributed. The first time, all
    ranks must come."""
    groups = _groups(topology)
    key = tuple(group.name for group in groups)
    if key not in _calls:
        _calls[key] = None
        if groups and all(isinstance(group, Processes) for group in groups):
            own = repr([(group.name, group.ranks) for group in groups]).encode()
            everyone = [own] if len(groups) == 1 else topology.gather(own, device)
            _calls[key] = Calls(topology, dist.distributed_c10d._get_default_store(),
                                hashlib.sha256(b" ".join(everyone)).hexdigest()[:16], device.type == "cuda")
    return _calls[key]


def known(topology: Topology) -> Calls | None:
    """As `of`, if it was ever asked for."""
    return _calls.get(tuple(group.name for group in _groups(topology)))


def _groups(topology: Topology) -> list:
    return [group for group in topology if group.size > 1]
