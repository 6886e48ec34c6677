# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one attention call against the number of tokens, tessera beside unfused NumPy.

Each figure is taken in a process of its own: the peak of its resident memory during the call, less
what was resident before (inputs, libraries). Outputs, workspace and every temporary count.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ._limits import SHORTEST
from .model import HEAD_DIM

HEADS = 4  # of HEAD_DIM, as in the model: a third of one of its layers
UNFUSED_BYTES = 1536 << 20  # largest score matrix that is tried
SECONDS = 30.0  # the whole run stops growing when the next length would pass this
SETTING = (
    f"{HEADS} heads of {HEAD_DIM}, fp32, forward, {len(os.sched_getaffinity(0))} cores; "
    "memory: peak of the process during the call, beside its inputs"
)


class Point(NamedTuple):
    tokens: int
    seconds: float
    bytes: int


@dataclass
class Curve:
    name: str
    measured: list[Point]
    extrapolated: list[Point]  # quadratic, from the longest measured one


def lengths(longest):
    """1k, 2k, 4k ... up to longest."""
    return [SHORTEST << i for i in range(32) if SHORTEST << i <= longest]


def count(longest):
    """Measurements of a whole run."""
    return sum(1 + _affordable(tokens) for tokens in lengths(longest))


def run(longest, advance=lambda note: None):
    """Measures both curves, and says after each measurement to advance(text) what came out.

    tessera stops early, with a shorter curve, on a machine too slow for SECONDS.
    """
    fused, unfused = Curve("tessera", [], []), Curve("unfused NumPy", [], [])
    deadline = time.perf_counter() + SECONDS
    for tokens in lengths(longest):
        if _affordable(tokens):
            _add(unfused, "unfused", tokens, advance)
        if fused.measured and time.perf_counter() + 4 * fused.measured[-1].seconds > deadline:
            break
        _add(fused, "tessera", tokens, advance)
    if unfused.measured and fused.measured:
        last = unfused.measured[-1]
        for tokens in lengths(fused.measured[-1].tokens):
            if tokens > last.tokens:
                growth = (tokens / last.tokens) ** 2
                point = Point(tokens, last.seconds * growth, int(last.bytes * growth))
                unfused.extrapolated.append(point)
    return fused, unfused


def _add(curve, kind, tokens, advance):
    point = _in_child(kind, tokens)
    if point:
        curve.measured.append(point)
        advance(f"{curve.name}, {tokens:,} tokens: {point.seconds:.3f} s")
    else:
        advance(f"{curve.name}, {tokens:,} tokens: failed")


def _affordable(tokens):
    """Whether the unfused attention is tried: its scores fit well in the machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HEADS * tokens**2 * 4 <= min(UNFUSED_BYTES, memory // 4)


def _in_child(kind, tokens):
    """A Point, or None when the child did not live (killed for its memory, say)."""
    import tessera

    source = str(Path(tessera.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    child = subprocess.run(
        [sys.executable, "-m", __name__, kind, str(tokens)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
        text=True,
    )
    return Point(tokens, *json.loads(child.stdout)) if child.returncode == 0 else None


def _child(kind, tokens):
    from .attentions import tessera_packed, unfused_each

    attention = {"tessera": tessera_packed, "unfused": unfused_each}[kind]()
    random = np.random.default_rng(0)

    def inputs(n):
        q, k, v = random.standard_normal((3, n, HEADS, HEAD_DIM), dtype=np.float32)
        return q, k, v, np.array([0, n], np.int32)

    attention.forward(*inputs(64))  # loads what is loaded once
    args = inputs(tokens)
    resident = _resident("VmRSS")
    seconds, begin = [], time.perf_counter()
    while not seconds or (len(seconds) < 5 and time.perf_counter() - begin < 0.5):
        start = time.perf_counter()
        result = attention.forward(*args)
        seconds.append(time.perf_counter() - start)
        del result
    return min(seconds), max(_resident("VmHWM") - resident, 0)


def _resident(field):
    """Bytes of this process from /proc: VmRSS now, VmHWM at its peak. (getrusage's peak would
    include the parent's.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; the scaling run needs Linux")


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], int(sys.argv[2]))))
