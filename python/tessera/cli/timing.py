# SPDX-License-Identifier: Apache-2.0
"""Alternating timing: on a shared machine only ratios of neighbouring samples mean anything."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Callable

_SAMPLE_SECONDS = 0.01  # a sample repeats the call for at least this long
_SETTLE_SECONDS = 0.003  # for the last contender's threads, which spin for a while, to sleep


@dataclasses.dataclass(frozen=True)
class Mode:
    """How samples are spread. burst: a pause before each, so that the clock recovers; sustained:
    without pause until the clock has settled."""
    name: str
    min_samples: int
    seconds: float  # of all contenders together
    pause: float


MODES = {mode.name: mode for mode in (
    Mode("quick", 5, 0.2, 0.0), Mode("burst", 7, 0.5, 0.15), Mode("normal", 7, 1.5, 0.0),
    Mode("sustained", 20, 12.0, 0.0))}


@dataclasses.dataclass
class Samples:
    """Seconds per call."""
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    def times(self, other: Samples) -> float:
        """How many times as long the other takes: the median over neighbouring samples."""
        return statistics.median(b / a for a, b in zip(self.seconds, other.seconds))


def alternate(contenders: dict[str, Callable[[], object]], mode: Mode) -> dict[str, Samples]:
    """Times every function, one sample of each in turn, in changing order."""
    repeats = {}
    for name, function in contenders.items():
        function()  # warm up: plans, caches, pages
        start = time.perf_counter()
        function()
        once = time.perf_counter() - start
        repeats[name] = max(1, int(_SAMPLE_SECONDS / max(once, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    start = time.perf_counter()
    while True:
        for name in names:
            time.sleep(max(mode.pause, _SETTLE_SECONDS))
            if repeats[name] > 1:
                contenders[name]()  # wakes its own threads
            samples[name].append(_sample(contenders[name], repeats[name]))
        names.reverse()
        count = len(samples[names[0]])
        if count >= mode.min_samples and time.perf_counter() - start >= mode.seconds:
            return {name: Samples(seconds) for name, seconds in samples.items()}
        if count >= 3 and time.perf_counter() - start >= 4 * mode.seconds + 8:
            return {name: Samples(seconds) for name, seconds in samples.items()}  # slow peers


def _sample(function, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats
