#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of TE's four configurations, through any two of TE's backends.

    python benchmarks/te/benchmark_attention.py
    python benchmarks/te/benchmark_attention.py --backends FusedAttention UnfusedDotProductAttention

Times are medians of one pass, by events on a GPU and by the clock on a CPU; the backends take
turns. On a CPU the configurations are eight times smaller unless --reduce says otherwise.
"""

import argparse
import platform
import statistics
import time

import torch

import common


def milliseconds(run, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(name: str, args) -> dict[str, float]:
    """{backend: median ms}; warms up, and checks that the backends agree."""
    run = common.Pass(common.config_of(name, args), common.DTYPES[args.dtype], args.device)
    times, results = {backend: [] for backend in args.backends}, []
    for repeat in range(args.warmup + args.iterations):
        for backend in args.backends:
            with common.only(backend):
                result = run()  # untimed: here the backend is selected
                if repeat == 0:
                    results.append(result)
                elapsed = milliseconds(run, args.device)
            if repeat >= args.warmup:
                times[backend].append(elapsed)
    for parts in zip(*results):
        torch.testing.assert_close(*parts, atol=common.TOLERANCE, rtol=common.TOLERANCE)
    return {backend: statistics.median(values) for backend, values in times.items()}


def device_line(device: str) -> str:
    if device == "cpu":
        return f"Device cpu: {platform.processor() or platform.machine()}, " \
               f"{torch.get_num_threads()} threads"
    index = torch.cuda.current_device()
    gpu = torch.cuda.get_device_properties(index)
    return f"Device {index}: {gpu.name} GPU, sm{gpu.major}{gpu.minor} compute capability, " \
           f"{gpu.total_memory / 1024**3:.1f}GB memory"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_arguments(parser)
    parser.add_argument("--backends", nargs=2, choices=common.LABELS,
                        default=["FusedAttention", "FlashAttention"])
    parser.add_argument("--configs", nargs="+", choices=common.CONFIGS, default=common.CONFIGS)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=10)
    args = common.parsed(parser)

    print(device_line(args.device))
    print(common.NOTE)
    first, second = args.backends
    labels = [common.LABELS[backend] for backend in args.backends]
    columns = [f"{label} fwd+bwd (ms)" for label in labels] + [f"{labels[0]} TFLOP/s"] + \
        [f"{labels[0]} vs {labels[1].removesuffix('-attn')} speedup"]
    rows = []
    for name in args.configs:
        print(f"Running {name} with {common.TITLES[first]} and {common.TITLES[second]}...")
        times = measure(name, args)
        rate = common.config_of(name, args).flops() / times[first] / 1e9
        rows.append((name, [f"{times[first]:.4f}", f"{times[second]:.4f}", f"{rate:.3f}",
                            f"{times[second] / times[first]:.4f}"]))
    print()
    print(" " * 6, *columns, sep="  ")
    for name, cells in rows:
        print(name, *(f"{cell:>{len(column)}}" for cell, column in zip(cells, columns)), sep="  ")


if __name__ == "__main__":
    main()
