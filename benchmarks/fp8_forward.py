# SPDX-License-Identifier: Apache-2.0
"""The forward pass of E4M3 q, k and v on a Hopper GPU, with and without lse, beside bf16 of this library
and, where it is given, FlashAttention-3.

    python benchmarks/fp8_forward.py [--fa3 LIBRARY] [--shapes d128 d64 d192 gqa] [--json FILE]

TFLOP/s of 16k tokens, causal at half; a median of rounds by turns, each of 12 ms after a warm-up.
LIBRARY is FlashAttention-3 as a shared object whose operator torch.ops.flash_attn_3.fwd is that of its
hopper/ folder. The transposing of v is in every figure.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics

import torch

import tessera.torch as tt

SHAPES = {"d128": (16, 16, 128, 128), "d64": (32, 32, 64, 64), "d192": (16, 16, 192, 128), "gqa": (32, 8, 128, 128)}
LENGTHS = ((1, 16384), (2, 8192), (4, 4096), (8, 2048), (16, 1024))
WINDOW_MS = 12


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fa3", metavar="LIBRARY")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.fa3:
        torch.ops.load_library(args.fa3)
    rows = []
    print(torch.cuda.get_device_name())
    for name in args.shapes:
        for b, s in LENGTHS:
            for causal in (False, True):
                rows.append(measure(name, b, s, causal, args))
                print("{case:34} ".format(**rows[-1]) + "  ".join(
                    f"{form} {rate:5.0f}" for form, rate in rows[-1]["tflops"].items()), flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)


def measure(name: str, b: int, s: int, causal: bool, args) -> dict:
    hq, hk, d, dv = SHAPES[name]
    wide = [torch.randn(shape, device="cuda") for shape in ((b, s, hq, d), (b, s, hk, d), (b, s, hk, dv))]
    fp8, bf16 = ([x.to(dtype) for x in wide] for dtype in (torch.float8_e4m3fn, torch.bfloat16))
    forms = {"fp8": lambda: tt.attention(*fp8, causal=causal),
             "with lse": lambda: tt.attention(*fp8, causal=causal, return_lse=True),
             "bf16": lambda: tt.attention(*bf16, causal=causal)}
    if args.fa3 and d == dv:
        forms["FA3"] = lambda: fa3(*fp8, 1 / math.sqrt(d), causal)
    flop = 2 * b * hq * s * s * (d + dv) * (0.5 if causal else 1)
    return {"case": f"{hq} on {hk}, {d}/{dv}, {b} x {s} {'causal' if causal else 'full'}",
            "tflops": {form: flop / ms / 1e9 for form, ms in by_turns(forms, args.rounds).items()}}


def by_turns(forms: dict, rounds: int) -> dict:
    """Milliseconds a call, the median of the rounds."""
    calls = {form: max(4, int(WINDOW_MS / max(window(call, 2), 0.01))) for form, call in forms.items()}
    taken = {form: [] for form in forms}
    for _ in range(rounds):
        for form, call in forms.items():
            taken[form].append(window(call, calls[form]))
    return {form: statistics.median(ms) for form, ms in taken.items()}


def window(call, calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def fa3(q, k, v, scale: float, causal: bool):
    return torch.ops.flash_attn_3.fwd(q, k, v, *[None] * 20, scale, causal, -1, -1, 0, 0.0, True, None, 1, None, 0)


if __name__ == "__main__":
    main()
