# SPDX-License-Identifier: Apache-2.0
"""precision="fp8" of bf16 inputs on a GPU beside bf16 and beside raw E4M3 inputs, forward and backward.

    python benchmarks/fp8_rounded.py [--kernels] [--loop]

Microseconds of a call, 16k tokens in all: the median of five rounds by turns. "plain" is smooth="none"; "raw" are E4M3
inputs, which nobody rounds. --kernels also lists what each kernel takes of the first shape, as PyTorch's profiler says;
--loop says it of calls in the midst of a second of them, with the time between kernels, the clock and the power.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import time

import torch
from torch.profiler import ProfilerActivity, profile

import tessera.torch as tt

TOKENS = 16384
# (length, query heads, key heads, head dim of q and k, of v, causal)
SHAPES = ((16384, 16, 16, 128, 128, False), (16384, 16, 16, 128, 128, True), (8192, 16, 16, 128, 128, True),
          (4096, 16, 16, 128, 128, True), (2048, 16, 16, 128, 128, True), (16384, 32, 4, 128, 128, True),
          (16384, 16, 16, 64, 64, True), (4096, 16, 16, 64, 64, True), (8192, 16, 16, 192, 128, True))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="what each kernel of the first shape takes")
    parser.add_argument("--loop", action="store_true", help="the same in the midst of a second of calls")
    args = parser.parse_args(argv)
    print(torch.cuda.get_device_name())
    for i, shape in enumerate(SHAPES):
        calls = forms(*shape)
        s, hq, hk, d, dv, causal = shape
        took = times(calls, max(3, 100 * 2048 // s))
        print(f"{TOKENS // s} x {s}, {hq} on {hk}, {d}/{dv}, {'causal' if causal else 'full'}: "
              + ", ".join(f"{name} {us:.0f}" for name, us in took.items()), flush=True)
        for name in calls if args.kernels and i == 0 else ():
            print(f"  {name}")
            for kernel, us in kernels(calls[name]):
                print(f"    {us:8.1f}  {kernel}")
        for name in calls if args.loop and i == 0 else ():
            in_a_loop(name, calls[name])


def forms(s, hq, hk, d, dv, causal):
    b = TOKENS // s
    q, k, v = (torch.randn(b, s, *shape, device="cuda", dtype=torch.bfloat16)
               for shape in ((hq, d), (hk, d), (hk, dv)))
    raw = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    do = torch.randn(b, s, hq, dv, device="cuda", dtype=torch.bfloat16)
    calls = {}
    for name, inputs, words in (("bf16", (q, k, v), {}), ("fp8", (q, k, v), dict(precision="fp8")),
                                ("plain", (q, k, v), dict(precision="fp8", smooth="none")), ("raw", raw, {})):
        def call(inputs=inputs, words=words, **more):
            return tt.attention(*inputs, causal=causal, **words, **more)
        calls[name] = call
        calls[f"{name} lse"] = lambda call=call: call(return_lse=True)
        if name in ("bf16", "fp8"):
            o, lse = call(return_lse=True)
            calls[f"{name} backward"] = lambda o=o, lse=lse, words=words: tt.attention_backward(
                do, q, k, v, o, lse, causal=causal, **words)
    return calls


def times(calls, count):
    took = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(5):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(count):
                call()
            end.record()
            torch.cuda.synchronize()
            took[name].append(1000 * begin.elapsed_time(end) / count)
    return {name: statistics.median(us) for name, us in took.items()}


def kernels(call, count=3):
    """[(kernel, microseconds a call)], the longest first."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    found = [(event.key[:100], event.self_device_time_total / count) for event in run.key_averages()]
    return sorted((x for x in found if x[1] > 0), key=lambda x: -x[1])


def in_a_loop(name, call, seconds=1.0, count=20):
    """Prints what kernels take, and what is between them, after `seconds` of calls: by then the clock is what power
    allows."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        for _ in range(3 * count):
            call()
        state = sensors()  # while the calls are at work
        torch.cuda.synchronize()
    events = sorted((event for event in run.events() if event.device_time > 0), key=lambda e: e.time_range.start)
    events = events[len(events) // 3:]
    calls = count * 2
    busy, gaps = {}, {}
    for before, event in zip([None, *events], events):
        key = event.name[:60]
        busy.setdefault(key, []).append(event.time_range.elapsed_us())
        if before:
            gap = event.time_range.start - before.time_range.end
            gaps.setdefault(key, []).append(gap)
    span = events[-1].time_range.end - events[0].time_range.start
    print(f"  {name}, in a loop: {span / calls:.1f} us a call, {state}")
    for key, took in sorted(busy.items(), key=lambda item: -sum(item[1])):
        gap = statistics.median(gaps.get(key, [0]))
        print(f"    {sum(took) / calls:8.1f} in {len(took) / calls:.1f} launches, median gap before {gap:6.1f}  {key}")


def sensors() -> str:
    """Clock and power of the device now, as nvidia-smi says."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi"
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
