#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/cases/{smoke,ci,nightly}.cases: every line of docs/semantics.md, then random products.

    tools/cases/make_cases.py            rewrite the files
    tools/cases/make_cases.py --check    fail if a file differs from what this script writes

The output is reviewed text: it changes only when this script does (fixed seeds).
"""

import random
import sys
from itertools import cycle, product
from pathlib import Path

import decode_cases
import fp8_cases
import kernel_cases as kernels
import low_cases
from case_lines import PASSES, both, heads, line

CASES = Path(__file__).resolve().parents[2] / "tests" / "cases"

DTYPES = ("fp32", "bf16", "fp16")
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
HEAD_DIMS = (1, 8, 16, 33, 40, 64, 72, 80, 96, 112, 128, 192, 256, 576)
PACKED = ("sb3hd", "sbh3d", "bs3hd", "bsh3d", "t3hd", "th3d")
KV_PACKED = ("sbhd_sb2hd", "sbhd_sbh2d", "bshd_bs2hd", "bshd_bsh2d", "thd_t2hd", "thd_th2d")
SEPARATE = ("bshd", "sbhd", "bhsd", "thd", "sbhd_sbhd_sbhd", "bshd_bshd_bshd", "thd_thd_thd")
MIXED = ("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd", "bhsd,sbhd", "bshd,thd",
         "bhsd,thd")
PAGED = ("paged_kv_bshd_bshd_bshd", "paged_kv_bshd_sbhd_sbhd", "paged_kv_sbhd_bshd_bshd",
         "paged_kv_sbhd_sbhd_sbhd", "paged_kv_thd_bshd_bshd", "paged_kv_thd_sbhd_sbhd", "bhsd")
SHAPES = ("1", "k", "q", "qk", "h", "hk", "hq", "hqk", "b", "bk", "bq", "bqk", "bh", "bhk", "bhq", "bhqk")
# (sq, sk): square, decode, one of either, wide, tall.
PAIRS = ((64, 64), (1, 65), (33, 1), (17, 129), (129, 17), (5, 64), (63, 257))


def sizes(full):
    """Every length and every head dim in every dtype, with tails of tiles."""
    rng = random.Random(1)
    types = cycle(DTYPES)
    for s in LENGTHS:
        for d in (HEAD_DIMS if full else rng.sample(HEAD_DIMS, 4)):
            if s * d > 40000 and not full:
                continue
            yield from both(dtype=next(types), b=1, s=s, **heads(rng), d=d, causal=rng.random() < 0.5 or None,
                            poison=True)
    for d in HEAD_DIMS:
        for dtype in DTYPES:
            yield from both(dtype=dtype, b=1, s=33, h=2, d=d, poison=True)
    for dqk, dv in ((192, 128), (128, 64), (64, 128), (40, 1), (1, 40), (33, 72), (576, 512), (8, 257)):
        for dtype in DTYPES:
            yield from both(dtype=dtype, b=1, sq=17, sk=65, hq=4, hk=2, dqk=dqk, dv=dv, poison=True)
    for sq, sk in product((1, 9, 16, 65), (1, 15, 64, 129)):
        yield from both(dtype=next(types), b=2, sq=sq, sk=sk, hq=6, hk=3, d=rng.choice((16, 64, 80)), poison=True)


def empty():
    """Zero sizes and rows that see nothing."""
    for dtype in DTYPES:
        yield from both(dtype=dtype, b=0, s=8, h=2, d=16)
        yield from both(dtype=dtype, b=2, sq=0, sk=9, h=2, d=16)
        yield from both(dtype=dtype, b=2, sq=0, sk=9, h=2, d=64, softcap=3)
        yield from both(dtype=dtype, b=2, sq=9, sk=0, hq=4, hk=2, d=16)
        yield from both(dtype=dtype, b=2, s=0, h=2, d=16)
        yield from both(dtype=dtype, b=3, s=16, h=2, d=16, lens="0,16,0", poison=True)
        yield from both(dtype=dtype, b=3, s=16, h=2, d=16, layout="thd", lens="0,16,0", gaps=2, poison=True)
        yield from both(dtype=dtype, b=3, s=16, h=2, d=16, layout="thd", lens="0,0,0", poison=True)
        yield from both(dtype=dtype, b=0, s=16, h=2, d=16, layout="thd")
        yield from both(dtype=dtype, b=2, s=16, h=2, d=16, page=4, lens_k="0,9", poison=True)
        # Rows above the diagonal of a tall problem see nothing.
        for sink in (None, "off_by_one", "learnable"):
            grads = "dsink" if sink == "learnable" else None
            yield from both(dtype=dtype, b=2, sq=33, sk=9, h=2, d=16, causal=True, align="bottom_right", sink=sink,
                            grads=grads, dlse=True, max_logit=True, poison=True)
            yield from both(dtype=dtype, b=1, s=33, h=2, d=16, keep="random:0/qk", sink=sink, grads=grads, dlse=True,
                            max_logit=True, poison=True)
            yield from both(dtype=dtype, b=1, s=65, h=2, d=40, window="0,-1", align="bottom_right", lens_q="65",
                            lens_k="9", sink=sink, grads=grads, dlse=True, max_logit=True, poison=True)


def layouts():
    """Every layout in every pass, padded and packed, contiguous, strided and interleaved."""
    rng = random.Random(2)
    for which, dtype in product(PASSES, DTYPES):
        for layout in PACKED + KV_PACKED + SEPARATE + MIXED:
            group = {"h": 3} if layout in PACKED else {"hq": 4, "hk": 2}
            packed = layout.startswith("t") or ",thd" in layout
            token = {"lens": f"random:{rng.randrange(99)}"}
            if layout in MIXED:
                token = {"lens_q": f"random:{rng.randrange(99)}", "lens_k": f"random:{rng.randrange(99)}"}
            for strided in (None, True):
                yield line(which, dtype=dtype, b=3, s=rng.choice((9, 33, 64)), **group, d=rng.choice((8, 33, 64)),
                           layout=layout, **rng.choice(({}, token)), gaps=rng.choice((None, "3", "random:5"))
                           if packed else None, int64=rng.random() < 0.3 or None, strided=strided,
                           out=rng.random() < 0.5 or None, causal=True, align=rng.choice(("top_left", "bottom_right")),
                           poison=True)
        for layout in ("bshd", "sbhd", "bhsd", "thd"):
            for group in ({"hq": 4, "hk": 2, "dqk": 24, "dv": 8}, {"h": 2, "d": 64}):
                yield line(which, dtype=dtype, b=2, s=33, **group, layout=layout, lens="random:4",
                           interleaved=True, strided=rng.random() < 0.5 or None, out=True,
                           gaps=2 if layout == "thd" else None, poison=True)


def pages():
    """Paged k and v: page sizes, tables, formats of q, decode."""
    rng = random.Random(3)
    for which, dtype, layout in product(PASSES, DTYPES, PAGED):
        for page in (1, 16, rng.choice((3, 7, 64, 100))):
            sq = rng.choice((1, 4, 33))
            yield line(which, dtype=dtype, b=3, sq=sq, sk=rng.choice((33, 65)), hq=4, hk=2, d=rng.choice((16, 40, 64)),
                       layout=layout, lens_k=f"random:{rng.randrange(99)}", page=page, tables=rng.choice((None, 2)),
                       lens_q=rng.choice((None, f"random:{rng.randrange(99)}")),
                       strided=rng.random() < 0.3 or None, int64=rng.random() < 0.3 or None,
                       causal=rng.random() < 0.6 or None, align="bottom_right", poison=True)
        yield line(which, dtype=dtype, b=2, s=33, h=2, d=16, layout=layout, page=8)
    # Pages that a window has left behind, or that a diagonal has not reached.
    for dtype, page in product(DTYPES, (1, 3, 4, 16)):
        window = {"window": rng.choice(("3,0", "0,0", "7,2")), "align": "bottom_right"}
        for sq, both_heads in ((1, {"h": 2}), (5, {"hq": 8, "hk": 1}), (3, {"hq": 4, "hk": 2}), (70, {"h": 2})):
            yield from both(dtype=dtype, b=3, sq=sq, sk=150, **both_heads, d=rng.choice((8, 40, 64)), page=page,
                            lens_k=f"random:{rng.randrange(99)}", tables=rng.choice((None, 2)), **window, poison=True)
        yield from both(dtype=dtype, b=3, sq=9, sk=90, h=2, d=16, page=page, lens_q="9,0,4", lens_k="90,60,80",
                        window="5,-1", align="bottom_right", sink="learnable", grads="dsink", poison=True)
        yield from both(dtype=dtype, b=2, sq=33, sk=150, h=2, d=32, page=page, lens_k="150,120", causal=True,
                        align="top_left", poison=True)
        yield line("fwd", dtype=dtype, b=2, sq=1, sk=3000, hq=4, hk=2, d=64, page=page, lens_k="3000,2111",
                   window="1100,0", align="bottom_right", poison=True)
        yield from both(dtype=dtype, b=2, sq=9, sk=90, h=2, d=16, page=page, lens_k="90,60", q_start="50,7",
                        k_start="3,0", window="8,1", align="top_left", poison=True)
        yield from both(dtype=dtype, b=2, sq=9, sk=90, h=2, d=16, page=page, lens_k="90,60", shift="random:2",
                        window="8,0", poison=True)
    for kv in ("e4m3", "e5m2"):
        yield line("fwd", dtype="bf16", b=3, sq=2, sk=150, hq=4, hk=2, d=64, kv=kv, page=16, lens_k="random:3",
                   window="9,0", align="bottom_right", poison=True)


def bands():
    """Causal and windows, both alignments, every shape, padded and packed."""
    rng = random.Random(4)
    windows = ("0,0", "1,0", "0,1", "16,0", "0,16", "3,5", "-1,0", "0,-1", "-1,7", "7,-1", "-1,-1", "64,64",
               "9223372036854775807,0")
    types = cycle(DTYPES)
    for which, (sq, sk), align in product(PASSES, PAIRS, ("top_left", "bottom_right")):
        for band in ({"causal": True}, {"causal": True, "window": "8,0"}, {"causal": True, "window": "8,-1"},
                     *({"window": w} for w in rng.sample(windows, 4))):
            yield line(which, dtype=next(types), b=1, sq=sq, sk=sk, hq=2, hk=1, d=rng.choice((16, 33, 64)), **band,
                       align=align, poison=True)
    for which, window, layout in product(PASSES, windows, ("bshd", "thd")):
        yield line(which, dtype=next(types), b=3, sq=33, sk=65, h=2, d=32, layout=layout, lens_q="33,5,20",
                   lens_k="65,31,9", window=window, align=rng.choice(("top_left", "bottom_right")), poison=True)
        yield line(which, dtype=next(types), b=3, s=65, h=2, d=16, layout=layout, lens="65,17,33", window=window,
                   poison=True)


def masks():
    """Data masks of every shape, ranges and segments, alone and under a band, padded and packed."""
    rng = random.Random(5)
    types = cycle(DTYPES)
    for which, shape, kind in product(PASSES, SHAPES, ("random", "blocks")):
        layout = rng.choice(("bshd", "sbhd", "bhsd", "thd"))
        yield line(which, dtype=next(types), b=2, s=rng.choice((33, 65, 129)), hq=2, hk=1, d=rng.choice((16, 40)),
                   layout=layout, lens=rng.choice((None, "random:8")), strided=rng.random() < 0.3 or None,
                   **{rng.choice(("keep", "drop")): f"{kind}:0.6/{shape}"}, poison=True)
    for which, shape, dtype in product(PASSES, ("1", "k", "b", "h", "bk", "hk", "bhk"), DTYPES):
        yield line(which, dtype=dtype, b=3, sq=33, sk=65, hq=4, hk=2, d=32, layout=rng.choice(("bshd", "thd", "bhsd")),
                   lens_k="random:6", **{rng.choice(("keep", "drop")): f"keys:0.5/{shape}"}, poison=True)
    extra = ({}, {"causal": True, "align": "bottom_right"}, {"window": "9,4", "align": "top_left"},
             {"segments": 3}, {"softcap": 5}, {"sink": "learnable", "grads": "dsink"}, {"page": 7})
    data = ("ranges=random:3", "ranges=two:4", "ranges=prefix:11", "ranges=prefix:0", "segments=1", "segments=4",
            "keep=random:0.4/qk", "keep=blocks:0.5/hqk", "keep=keys:0.5/bk")
    for which, what, more in product(PASSES, data, extra):
        key, value = what.split("=")
        if key in more:
            continue
        tokens = {"layout": rng.choice(("bshd", "sbhd", "bhsd", "thd", "bshd,thd", "thd_bshd_bshd"))}
        if "page" in more:
            tokens["layout"] = rng.choice(("bshd", "thd_bshd_bshd"))
        if rng.random() < 0.6:
            tokens |= {"lens_q": f"random:{rng.randrange(99)}", "lens_k": f"random:{rng.randrange(99)}"}
        yield line(which, dtype=next(types), b=2, sq=33, sk=rng.choice((33, 70)), hq=4, hk=2, d=rng.choice((8, 33)),
                   **tokens, **{key: value}, **more, strided=rng.random() < 0.2 or None, poison=True)


def scores():
    """Scale, softcap, bias of every shape with its gradient, ALiBi, sinks, dropout, dlse, max_logit."""
    rng = random.Random(6)
    types = cycle(DTYPES)
    for at, shape, which in product(("post", "pre"), SHAPES, PASSES):
        layout = rng.choice(("bshd", "sbhd", "bhsd", "thd"))
        yield line(which, dtype=next(types), b=2, sq=17, sk=rng.choice((17, 65)), hq=4, hk=2, d=rng.choice((16, 40)),
                   layout=layout, lens=rng.choice((None, "random:8")), bias=f"{at}/{shape}",
                   bias_dtype=rng.choice((None, "fp32")), grads=rng.choice(("dbias", "dbias", None)),
                   strided=rng.random() < 0.3 or None, poison=True)
    for which, dtype, scale in product(PASSES, DTYPES, ("0", "1", "0.01", "0.3")):
        yield line(which, dtype=dtype, b=1, s=65, h=2, d=32, scale=scale, dlse=True, max_logit=True, poison=True)
        yield line(which, dtype=dtype, b=1, s=33, h=2, d=32, scale=scale, softcap=2, bias="pre/hqk", grads="dbias",
                   max_logit=True, poison=True)
    for dtype, d in product(DTYPES, (64, 128)):
        yield line("bwd", dtype=dtype, b=2, s=65, h=2, d=d, scale="0", softcap=3, poison=True)
    # So small that all weights are alike, and so large that one key has all the weight.
    for which, dtype, d, scale in product(PASSES, DTYPES, (64, 128), ("1e-30", "1e10", "1e30")):
        yield line(which, dtype=dtype, b=1, s=65, h=2, d=d, scale=scale, causal=True, dlse=True, max_logit=True,
                   poison=True)
    for dtype, d in product(("bf16", "fp16"), (96, 512)):
        yield line("fwd", dtype=dtype, b=2, sq=130, sk=200, hq=4, hk=2, d=d, scale="1e5", poison=True)
    for dtype, layout in product(("bf16", "fp16"), ("bshd", "thd")):
        yield line("bwd", dtype=dtype, b=2, s=200, hq=4, hk=2, d=96, layout=layout, lens="random:5", causal=True,
                   sink="learnable", grads="dsink", dlse=True, poison=True)
    for which, dtype, cap in product(PASSES, DTYPES, ("0.5", "5", "30")):
        yield line(which, dtype=dtype, b=1, s=65, hq=2, hk=1, d=64, softcap=cap, causal=True, max_logit=True,
                   poison=True)
        yield line(which, dtype=dtype, b=2, s=33, h=2, d=40, softcap=cap, bias="post/bk", grads="dbias",
                   sink="off_by_one", poison=True)
    # Caps far above the scores, which must not lose digits to them; the last meets a bias that saturates it.
    for which, dtype, cap in product(PASSES, DTYPES, ("1e3", "1e5")):
        yield line(which, dtype=dtype, b=1, s=130, hq=2, hk=1, d=64, softcap=cap, causal=True, dlse=True,
                   max_logit=True,
                   poison=True)
        yield line(which, dtype=dtype, b=2, s=65, h=2, d=128, softcap=cap, bias="post/hqk", grads="dbias", poison=True)
    for which, dtype in product(PASSES, DTYPES):
        yield line(which, dtype=dtype, b=1, s=65, h=2, d=64, softcap="1e5", bias="pre/hqk", bias_low="-1e10,rows:0.5",
                   bias_dtype="fp32", grads="dbias", poison=True)
    for which, dtype, alibi, align in product(PASSES, DTYPES, (True, "bh"), ("top_left", "bottom_right")):
        for layout, band in (("bshd", {}), ("thd", {"causal": True})):
            yield line(which, dtype=dtype, b=2, sq=17, sk=65, hq=4, hk=2, d=32, layout=layout, alibi=alibi,
                       align=align, **band, lens_q="random:5", lens_k="random:6",
                       bias_dtype=rng.choice((None, "fp32")), grads="dalibi_slopes", poison=True)
    for which, dtype, sink in product(PASSES, DTYPES, ("off_by_one", "learnable")):
        for more in ({}, {"causal": True, "dlse": True}, {"layout": "thd", "lens": "random:3", "dlse": True},
                     {"bias": "post/hqk", "softcap": 4}, {"dropout": 0.2}, {"window": "4,0"}):
            learnable = sink == "learnable"
            yield line(which, dtype=dtype, b=3, s=33, hq=4, hk=2, d=rng.choice((16, 64)), **more, sink=sink,
                       grads="dsink" if learnable else None,
                       bias_dtype=rng.choice((None, "fp32")) if learnable else None,
                       max_logit=True, poison=True)
    for which, dtype, p in product(PASSES, DTYPES, ("0.1", "0.5", "0.99", "0.00001")):
        for more in ({"layout": "bshd"}, {"layout": "thd", "lens": "random:2", "gaps": 1},
                     {"causal": True, "bias": "post/qk", "grads": "dbias"}):
            yield line(which, dtype=dtype, b=2, s=rng.choice((17, 33, 65)), hq=4, hk=2, d=32, **more, dropout=p,
                       seed=rng.randrange(1 << 32), poison=True)
    for which, dtype, layout in product(PASSES, DTYPES, ("bshd", "bhsd", "thd")):
        yield line(which, dtype=dtype, b=2, s=129, hq=2, hk=1, d=64, layout=layout, dlse=True, max_logit=True,
                   deterministic=True, batch_invariant=True, lens="random:1", poison=True)


def decode(full):
    """A few queries over many keys, grouped heads."""
    rng = random.Random(7)
    for dtype, sq in product(DTYPES, (1, 2, 3, 4, 8, 16)):
        for hq, hk in ((1, 1), (4, 1), (8, 2), (12, 3)):
            more = rng.choice(({}, {"lens_k": "random:3"}, {"window": "64,0", "align": "bottom_right"},
                               {"page": 16, "lens_k": "random:9"}, {"sink": "learnable"}, {"softcap": 10},
                               {"alibi": True, "align": "bottom_right"}))
            if "window" not in more and "alibi" not in more and sq > 1:
                more = more | {"causal": True, "align": "bottom_right"}
            yield line("fwd", dtype=dtype, b=2, sq=sq, sk=rng.choice((257, 600, 1000 if full else 129)), hq=hq, hk=hk,
                       d=rng.choice((64, 80, 128)), **more, max_logit=rng.random() < 0.3 or None, poison=True)


def other_dtypes():
    """fp64 (the reference only), 16-bit queries over fp8 keys, fp8 throughout."""
    for which in PASSES:
        yield line(which, dtype="fp64", b=2, s=33, hq=4, hk=2, d=40, causal=True, poison=True)
        yield line(which, dtype="fp64", b=3, s=17, h=2, d=16, layout="thd", lens="random:3", softcap=4,
                   sink="learnable",
                   grads="dsink", dlse=True, max_logit=True, poison=True)
    for dtype, kv in product(("bf16", "fp16"), ("e4m3", "e5m2")):
        yield line("fwd", dtype=dtype, b=2, s=65, hq=4, hk=2, d=64, kv=kv, causal=True, poison=True)
        yield line("fwd", dtype=dtype, b=3, sq=1, sk=129, hq=8, hk=2, d=64, kv=kv, page=16, lens_k="random:3",
                   poison=True)
        yield line("fwd", dtype=dtype, b=3, s=40, hq=8, hk=2, d=128, kv=kv, layout="thd", lens="random:3", poison=True)
        yield line("bwd", dtype=dtype, b=1, s=33, h=2, d=64, kv=kv, poison=True)
    for dtype in ("e4m3", "e5m2"):
        yield line("fwd", dtype=dtype, b=1, s=65, hq=4, hk=2, d=64, causal=True, poison=True)


def two_keys(dtype):
    """One of two keys has all but the whole weight. In fp32 the reference backend itself misses the limit:
    it takes o and lse as they are given, rounded, where a backend may weigh such a row anew."""
    return line("bwd", dtype=dtype, b=2, sq=1, sk=2, h=2, d=64, scale=3, poison=True, seed=314)


def parts():
    """Backward passes of a part of a union: o and lse are the union's, and P is not to be renormalised."""
    for dtype, s in product(DTYPES, (8, 65)):
        yield line("bwd", dtype=dtype, b=2, s=s, h=2, d=64, partial=True, poison=True)
        yield line("bwd", dtype=dtype, b=2, sq=s, sk=130, hq=4, hk=2, d=40, causal=True, align="bottom_right",
                   lens_k="random:3", partial=True, dlse=True, poison=True)
    for dtype in DTYPES:
        yield line("bwd", dtype=dtype, b=1, s=200, h=2, d=128, causal=True, partial=True, poison=True)
        yield line("bwd", dtype=dtype, b=3, s=40, h=2, d=32, layout="thd", lens="random:7", gaps=1, partial=True,
                   sink="learnable", grads="dsink", poison=True)
        yield line("bwd", dtype=dtype, b=2, s=33, h=2, d=64, keep="random:0.5/bqk", bias="post/hqk", softcap=5,
                   dropout="0.2", grads="dbias", partial=True, poison=True)
    yield from both(dtype="bf16", b=2, s=65, h=2, dqk=72, dv=64, vink=True, poison=True)
    yield from both(dtype="fp32", b=2, s=33, h=2, d=32, shift=0, causal=True, poison=True)


def added():
    """Outputs that are added to: o and lse of two parts, sums of gradients, each way of making dbias."""
    for dtype in DTYPES:
        yield line("fwd", dtype=dtype, b=2, s=33, h=2, d=64, causal=True, accumulate=True, poison=True)
        yield line("fwd", dtype=dtype, b=2, sq=3, sk=300, hq=8, hk=2, d=40, lens_k="random:3", accumulate=True,
                   poison=True)
        yield line("fwd", dtype=dtype, b=2, sq=1, sk=700, h=2, d=64, page=16, lens_k="random:1", window="500,0",
                   align="bottom_right", accumulate=True)
        yield line("fwd", dtype=dtype, b=3, s=70, h=2, d=32, layout="thd", lens="random:7", gaps=1, sink="learnable",
                   dropout="0.2", max_logit=True, accumulate=True, strided=True, poison=True)
        yield line("bwd", dtype=dtype, b=2, s=65, hq=4, hk=2, d=64, causal=True, accumulate=True, poison=True)
        yield line("bwd", dtype=dtype, b=3, s=40, h=2, d=32, layout="thd", lens="random:7", gaps=1, sink="learnable",
                   grads="dsink", partial=True, accumulate=True, poison=True)
        yield line("bwd", dtype=dtype, b=2, sq=20, sk=1100, hq=4, hk=1, d=16, bias="post/hqk", alibi=True,
                   align="top_left", grads="dbias,dalibi_slopes", accumulate=True)
        yield line("bwd", dtype=dtype, b=1, s=70, h=2, d=24, layout="sbhd", bias="pre/bhqk", segments=2, softcap=5,
                   grads="dbias", accumulate=True, interleaved=True)
        yield line("bwd", dtype=dtype, b=3, sq=9, sk=70, h=2, d=16, page=16, lens_k="random:3", bias="post/k",
                   grads="dbias", accumulate=True)
        yield line("bwd", dtype=dtype, b=2, s=50, h=2, d=16, keep="random:0.3/qk", bias="post/q", grads="dbias",
                   accumulate=True, poison=True)
    for dtype in ("bf16", "fp16"):
        yield line("fwd", dtype=dtype, b=2, s=65, hq=4, hk=2, d=40, o="fp32", causal=True, accumulate=True, poison=True)
        yield line("bwd", dtype=dtype, b=2, s=65, hq=4, hk=2, d=40, o="fp32", grad="fp32", causal=True, partial=True,
                   dlse=True, accumulate=True, poison=True)


def shards():
    """Parts of a larger problem: they count heads and sequences as the whole does."""
    for dtype, rng in product(DTYPES, ("4,16", "4294967295,1")):
        yield from both(dtype=dtype, b=3, s=65, hq=4, hk=2, d=32, rng=rng, dropout="0.3", poison=True)
        yield from both(dtype=dtype, b=2, s=70, h=2, d=64, layout="thd", lens="random:4", gaps=1, causal=True, rng=rng,
                        dropout="0.1", poison=True)
    yield from both(dtype="bf16", b=2, s=130, h=2, d=128, rng="7,1099511627776", dropout="0.5", strided=True)
    for dtype, shift in product(DTYPES, (5, -9, 200)):
        yield from both(dtype=dtype, b=2, s=33, h=2, d=16, shift=shift, causal=True, poison=True)
        yield from both(dtype=dtype, b=1, sq=150, sk=90, hq=4, hk=2, d=64, shift=shift, window="20,3", alibi=True,
                        grads="dalibi_slopes", poison=True)
        yield line("fwd", dtype=dtype, b=2, sq=1, sk=300, hq=4, hk=2, d=64, shift=shift, window="50,0", poison=True)


def sums():
    """o and gradients in fp32 beside 16-bit inputs, for those who add parts up."""
    for dtype in ("bf16", "fp16"):
        yield from both(dtype=dtype, b=2, s=65, hq=4, hk=2, d=40, o="fp32", causal=True, poison=True)
        yield line("fwd", dtype=dtype, b=2, sq=1, sk=600, hq=8, hk=2, d=64, lens_k="random:1", o="fp32", poison=True)
        yield line("bwd", dtype=dtype, b=2, s=33, hq=4, hk=2, d=72, o="fp32", do=dtype, grad="fp32", strided=True)
        for more in ({"hq": 4, "hk": 2}, {"h": 2, "layout": "thd", "lens": "random:2", "gaps": 1, "partial": True},
                     {"h": 2, "page": 16, "lens_k": "random:1"}, {"hq": 8, "hk": 1, "dlse": True, "dropout": "0.2"}):
            yield line("bwd", dtype=dtype, b=2, s=129, d=64, grad="fp32", poison=True, **more)
            yield line("bwd", dtype=dtype, b=2, s=40, d=24, grad="fp32", o="fp32", poison=True, **more)
        yield line("bwd", dtype=dtype, b=1, sq=64, sk=1100, h=2, d=64, grad="fp32", o="fp32", poison=True)


def parts_of_long_sequences(dtype):
    """Several tiles, so that walks begin and end inside; diagonals that leave nothing, or all; masks whose tiles
    the starts keep, and do not keep, whole."""
    far, gqa = {"int64": True, "align": "top_left"}, {"hq": 4, "hk": 2, "d": 64}
    lens = {"lens": "random:3", "align": "top_left"}
    for starts in ({"q_start": "256,17", "k_start": "0,150"}, {"q_start": "0,90", "k_start": "128,400"}):
        yield from both(dtype=dtype, b=2, s=300, **gqa, **starts, causal=True, align="top_left", poison=True)
        yield from both(dtype=dtype, b=2, s=300, **gqa, **starts, **lens, window="100,20", sink="learnable",
                        grads="dsink", poison=True)
        yield from both(dtype=dtype, b=2, sq=130, sk=300, h=2, d=128, **starts, align="top_left", alibi=True,
                        causal=True, deterministic=True)
        yield from both(dtype=dtype, b=2, s=200, **gqa, layout="thd", **starts, lens="random:4", causal=True,
                        shift="random:9", segments=3)
    both_far = {"q_start": "1099511627776,40", "k_start": "1099511627770,1099511627776"}
    yield from both(dtype=dtype, b=2, s=150, **gqa, **both_far, **far, causal=True, poison=True)
    yield from both(dtype=dtype, b=2, s=150, **gqa, q_start="1099511627776,7", **far,
                    window="1099511627760,-1", poison=True)
    yield from both(dtype=dtype, b=2, s=150, **gqa, k_start="1099511627776,7", **far,
                    window="-1,1099511627760", poison=True)
    packed = {"layout": "thd", "lens": "random:5", "gaps": 1, "poison": True}
    for starts in ({"q_start": "128,64", "k_start": "128,0"}, {"q_start": "5,64", "k_start": "64,3"}):
        yield from both(dtype=dtype, b=2, s=260, **gqa, **packed, **starts, keep="random:0.9/bqk")
        yield from both(dtype=dtype, b=2, s=260, **gqa, **packed, **starts, bias="post/hqk", grads="dbias",
                        dropout="0.2")
        yield from both(dtype=dtype, b=2, s=260, **gqa, **starts, ranges="two:4", poison=True)


def positions():
    """Rows and keys that begin anywhere in their sequences, and diagonals of each sequence's own."""
    starts = {"q_start": "random:1", "k_start": "random:2"}
    packed = {"layout": "thd", "lens": "random:2", "gaps": 1, "poison": True}
    for dtype in DTYPES[:2]:
        yield from parts_of_long_sequences(dtype)
    for dtype in DTYPES:
        yield from both(dtype=dtype, b=2, s=33, h=2, d=16, q_start="3,0", causal=True, align="top_left", poison=True)
        yield from both(dtype=dtype, b=2, s=80, h=2, d=32, **starts, window="30,5", align="bottom_right", int64=True)
        yield from both(dtype=dtype, b=2, sq=33, sk=70, h=2, d=16, shift="random:3", window="9,4", alibi=True,
                        grads="dalibi_slopes", q_start="9,100", k_start="3,90", strided=True, poison=True)
        yield from both(dtype=dtype, b=2, s=130, hq=4, hk=2, d=64, q_start="32,16", k_start="64,7", dropout="0.5",
                        rng="8,32", poison=True)
        yield from both(dtype=dtype, b=2, s=130, h=2, d=40, q_start="5,31", k_start="0,13", dropout="0.2")
        for bias in ("bhqk", "qk", "hqk", "k", "hq", "1"):
            yield from both(dtype=dtype, b=3, s=140, h=2, d=16, **packed, **starts, bias=f"post/{bias}", grads="dbias")
        yield from both(dtype=dtype, b=3, s=40, h=2, d=16, **packed, **starts, keep="random:0.8/bhqk", causal=True,
                        shift="random:4", sink="learnable", grads="dsink")
        yield from both(dtype=dtype, b=3, s=70, h=2, d=16, **packed, **starts, drop="keys:0.5/bk")
        yield from both(dtype=dtype, b=3, s=70, h=2, d=16, **packed, **starts, ranges="two:3", segments=2)
        yield line("fwd", dtype=dtype, b=2, sq=1, sk=600, hq=8, hk=2, d=64, lens_k="random:1", q_start="590,300",
                   k_start="5,7", window="200,0", align="top_left", dropout="0.2", poison=True)
    yield from both(dtype="fp32", b=2, sq=5, sk=100, hq=4, hk=2, d=16, page=16, lens_k="random:1", q_start="90,3",
                    k_start="5,0", ranges="random:3", causal=True, align="top_left", dropout="0.2", poison=True)
    yield from both(dtype="bf16", b=3, s=150, hq=4, hk=2, d=16, **packed, q_start="random:5", bias="pre/hqk",
                    grads="dbias", softcap=3, dropout="0.2")
    yield from both(dtype="fp32", b=2, s=33, h=2, d=16, q_start="1099511627776,0", k_start="1099511627770,40",
                    int64=True, causal=True, align="top_left", dropout="0.3")


def windows():
    """A window of each sequence's own, with what else moves or cuts the band."""
    bottom_right = {"align": "bottom_right"}
    for dtype in DTYPES:
        yield from both(dtype=dtype, b=5, s=70, h=2, d=16, windows="random:3", poison=True)
        yield from both(dtype=dtype, b=4, sq=70, sk=150, hq=4, hk=2, d=64, windows="random:4", lens_k="150,80,0,77",
                        **bottom_right, poison=True)
        yield from both(dtype=dtype, b=6, s=140, hq=4, hk=2, d=64, layout="thd", lens="random:5", gaps=3,
                        windows="random:6", align="top_left", poison=True)
        yield from both(dtype=dtype, b=3, s=150, h=2, d=40, windows="random:7", shift="random:3", alibi=True,
                        grads="dalibi_slopes", int64=True, strided=True)
        yield from both(dtype=dtype, b=3, s=90, h=2, d=32, windows="random:8", q_start="9,0,50", k_start="0,3,40",
                        align="top_left", bias="post/hqk", grads="dbias", dropout="0.2")
        yield from both(dtype=dtype, b=4, s=130, h=2, d=16, windows="random:9", keep="random:0.7/bqk", softcap=10,
                        sink="learnable", grads="dsink", deterministic=True)
        yield from both(dtype=dtype, b=3, sq=9, sk=90, h=2, d=16, page=4, lens_k="90,60,31", windows="random:2",
                        **bottom_right, poison=True)
        yield line("fwd", dtype=dtype, b=5, sq=1, sk=300, hq=8, hk=2, d=64, lens_k="random:4", windows="random:5",
                   **bottom_right, poison=True)
    for d in (128, 256):
        yield from both(dtype="bf16", b=3, s=300, hq=4, hk=2, d=d, windows="random:1", poison=True)
    yield from both(dtype="bf16", b=9, s=40, h=2, d=64, layout="thd", lens="random:2", windows="random:4",
                    **bottom_right, batch_invariant=True, poison=True)
    yield line("fwd", dtype="e4m3", b=3, s=150, h=2, d=64, windows="random:3")


def unbuilt():
    """Words whose features come later: legal, and refused by every backend."""
    yield line("fwd", dtype="bf16", kv="e4m3", kvscale="block", b=2, s=200, h=2, d=16)


def noise():
    """Gradients that hang on a few roundings: one visible key, differences that all but cancel."""
    grads, alibi = "dbias,dalibi_slopes", {"alibi": "bh", "align": "top_left"}
    for dtype in DTYPES:
        if dtype != "fp32":
            yield two_keys(dtype)
        yield line("bwd", dtype=dtype, b=2, sq=4, sk=64, hq=4, hk=1, dqk=55, dv=72, causal=True, window="0,-1", **alibi,
                   softcap=50, bias="post/bqk", grads=grads, dropout="0.9", poison=True, seed=68430)
        yield line("bwd", dtype=dtype, b=1, s=35, h=1, d=80, lens_k=5, causal=True, align="bottom_right", scale=3,
                   seed=6121)
        yield line("bwd", dtype=dtype, b=2, sq=23, sk=2, h=1, d=22, keep="keys:0.3/bk", scale=1, poison=True,
                   seed=56269)
        yield line("bwd", dtype=dtype, b=1, s=257, hq=3, hk=1, d=16, layout="thd", **alibi, softcap=3, dropout="0.1",
                   grads="dalibi_slopes", poison=True, seed=5132)


def opposed():
    """Rows whose lse is about -120 beside others, where e^-lse alone would be an infinity."""
    for i, words in enumerate((
            {"b": 2, "s": 200, "h": 2, "d": 64},
            {"b": 1, "s": 256, "hq": 4, "hk": 1, "d": 128, "causal": True},
            {"b": 1, "sq": 130, "sk": 300, "hq": 4, "hk": 2, "d": 128, "causal": True, "align": "bottom_right"},
            {"b": 1, "sq": 129, "sk": 256, "h": 2, "d": 256, "window": "64,0", "align": "top_left"},
            {"b": 2, "s": 192, "h": 2, "dqk": 192, "dv": 128, "causal": True},
            {"b": 3, "s": 150, "hq": 4, "hk": 2, "d": 64, "lens": "0,150,97", "causal": True},
            {"b": 3, "sq": 100, "sk": 210, "h": 2, "d": 40, "lens_q": "100,33,0", "lens_k": "210,0,64"},
            {"b": 3, "s": 170, "h": 2, "d": 128, "layout": "thd", "lens": "random:7", "gaps": 3},
            {"b": 4, "s": 140, "hq": 6, "hk": 2, "d": 96, "layout": "thd", "lens": "140,0,81,1", "causal": True,
             "longest": True},
            {"b": 2, "s": 160, "h": 2, "d": 64, "layout": "sb3hd", "out": True})):
        yield from both(dtype=("bf16", "fp16")[i % 2], **words, data="opposed", poison=True)
    yield from both(dtype="fp32", b=1, s=100, h=2, d=32, data="opposed", poison=True)


def products(count, seed, large):
    """Random legal products of everything."""
    rng = random.Random(seed)
    maybe = lambda p, value: value if rng.random() < p else None
    for _ in range(count):
        which, dtype = rng.choice(PASSES), rng.choice(DTYPES)
        s_list = [s for s in LENGTHS if large or s <= 129]
        sq = rng.choice(s_list)
        sk = sq if rng.random() < 0.5 else rng.choice(s_list)
        limit = 576 if sq * sk < 5000 else 128
        dims = [d for d in HEAD_DIMS if d <= limit]
        t = {"b": rng.choice((1, 2, 3)), "sq": sq, "sk": sk, **heads(rng)}
        dqk = rng.choice(dims)
        t |= {"d": dqk} if rng.random() < 0.7 else {"dqk": dqk, "dv": rng.choice(dims)}
        paged = rng.random() < 0.12
        layout = rng.choice(("bshd", "sbhd", "bhsd", "thd", "thd")) if not paged else \
            rng.choice(("bshd", "thd_bshd_bshd"))
        if not paged and rng.random() < 0.15:
            layout = rng.choice(MIXED)
        t["layout"] = layout
        thd_q, thd_k = layout.startswith("thd"), not paged and (layout == "thd" or layout.endswith(",thd"))
        lens = rng.choice(("none", "both", "two", "k"))
        one = False  # lengths known to be equal
        if lens == "both":
            t["lens"] = f"random:{rng.randrange(999)}"
            one = thd_q == thd_k and not paged
        elif lens == "two":
            t["lens_q"], t["lens_k"] = f"random:{rng.randrange(999)}", f"random:{rng.randrange(999)}"
        elif lens == "k":
            t["lens_k"] = f"random:{rng.randrange(999)}"
        else:
            one = sq == sk and thd_q == thd_k and not paged
        if thd_q or thd_k:
            t["gaps"] = rng.choice((None, 1, 5, f"random:{rng.randrange(99)}"))
        if paged:
            t |= {"page": rng.choice((1, 5, 16, 64)), "tables": maybe(0.3, 2)}
        t["int64"] = maybe(0.2, True)
        band = rng.choice(("none", "causal", "window", "both"))
        if band in ("causal", "both"):
            t["causal"] = True
        if band in ("window", "both"):
            left = rng.choice((-1, 0, 5, 16, 70))
            t["window"] = f"{left},{0 if band == 'both' else rng.choice((-1, 0, 3, 40))}"
        t["alibi"] = rng.choice((None, None, None, True, "bh"))
        if not one or rng.random() < 0.3:
            t["align"] = rng.choice(("top_left", "bottom_right"))
        data = rng.choice(("none", "none", "keep", "drop", "ranges"))
        if data in ("keep", "drop"):
            what, shape = rng.choice(("random", "blocks", "keys")), rng.choice(SHAPES)
            if what == "keys":
                shape = shape.replace("q", "") or "1"
            t[data] = f"{what}:{rng.choice((0.3, 0.7, 0.95))}/{shape}"
        elif data == "ranges":
            t["ranges"] = f"{rng.choice(('random', 'two', 'prefix'))}:{rng.randrange(40)}"
        t["segments"] = maybe(0.15, rng.choice((2, 5)))
        t["scale"] = maybe(0.2, rng.choice(("0.05", "0.5", "3")))
        t["softcap"] = maybe(0.2, rng.choice(("3", "50")))
        grads = []
        if rng.random() < 0.3:
            t["bias"] = f"{rng.choice(('post', 'pre'))}/{rng.choice(SHAPES)}"
            grads += ["dbias"] * (rng.random() < 0.7)
        t["sink"] = rng.choice((None, None, "off_by_one", "learnable"))
        grads += ["dsink"] * (t["sink"] == "learnable" and rng.random() < 0.7)
        grads += ["dalibi_slopes"] * (t["alibi"] is not None and rng.random() < 0.7)
        if "bias" in t or t["sink"] == "learnable" or t["alibi"]:
            t["bias_dtype"] = maybe(0.3, "fp32")
        t["dropout"] = maybe(0.15, rng.choice(("0.1", "0.6")))
        t |= {"dlse": maybe(0.3, True), "grads": ",".join(grads) or None, "max_logit": maybe(0.3, True),
              "deterministic": maybe(0.2, True)}
        t["batch_invariant"] = maybe(0.1, True) if not t["dropout"] else None
        same = sq == sk and not paged and layout in ("bshd", "sbhd", "bhsd", "thd") and lens in ("none", "both")
        t |= {"strided": maybe(0.25, True), "interleaved": maybe(0.2, True) if same else None,
              "out": maybe(0.3, True), "poison": maybe(0.85, True), "seed": rng.randrange(1, 10000)}
        yield line(which, dtype=dtype, **t)


def smoke():
    """A line or two for each feature: the loop of a minute."""
    yield from both(dtype="fp32", b=2, s=33, h=2, d=16, poison=True)
    yield from both(dtype="bf16", b=1, s=65, hq=4, hk=2, d=64, causal=True, poison=True)
    yield from both(dtype="fp16", b=2, sq=17, sk=70, h=2, dqk=40, dv=24, causal=True, align="bottom_right", poison=True)
    yield from both(dtype="bf16", b=1, s=257, h=1, d=128, window="64,0")
    yield from both(dtype="fp32", b=3, s=40, h=2, d=32, layout="thd", lens="random:7", gaps=3, poison=True)
    yield from both(dtype="bf16", b=3, s=40, hq=4, hk=2, d=32, lens="0,40,13", poison=True)
    yield from both(dtype="fp16", b=2, s=33, h=3, d=16, layout="sb3hd", strided=True, out=True, poison=True)
    yield from both(dtype="bf16", b=2, s=33, h=2, d=16, layout="bhsd", interleaved=True, out=True, poison=True)
    yield from both(dtype="fp32", b=3, sq=5, sk=65, hq=4, hk=2, d=32, page=16, lens_k="random:5", poison=True)
    yield from both(dtype="fp32", b=2, s=65, h=2, d=16, keep="random:0.5/bqk", poison=True)
    yield from both(dtype="bf16", b=2, s=65, h=2, d=16, drop="keys:0.5/bk", lens="random:3", poison=True)
    yield from both(dtype="fp16", b=1, s=129, h=2, d=32, keep="blocks:0.5/hqk", poison=True)
    yield from both(dtype="fp32", b=2, s=33, h=2, d=16, ranges="two:3", poison=True)
    yield from both(dtype="bf16", b=2, s=65, h=2, d=16, layout="thd", ranges="prefix:9", lens="random:2", poison=True)
    yield from both(dtype="fp32", b=2, s=65, h=2, d=16, segments=3, causal=True, poison=True)
    yield from both(dtype="fp32", b=2, s=33, h=2, d=16, bias="post/hqk", grads="dbias", poison=True)
    yield from both(dtype="bf16", b=2, s=33, hq=4, hk=2, d=16, bias="pre/bk", softcap=5, grads="dbias", poison=True)
    yield from both(dtype="fp32", b=2, s=33, h=2, d=16, alibi=True, causal=True, grads="dalibi_slopes", poison=True)
    yield from both(dtype="fp32", b=2, s=33, h=2, d=16, sink="learnable", grads="dsink", dlse=True, poison=True)
    yield from both(dtype="bf16", b=2, s=33, h=2, d=16, sink="off_by_one", window="3,3", max_logit=True, poison=True)
    yield from both(dtype="fp32", b=2, s=33, h=2, d=16, dropout="0.3", seed=11, poison=True)
    yield from both(dtype="fp16", b=1, sq=33, sk=9, h=2, d=16, causal=True, align="bottom_right", dlse=True,
                    poison=True)
    yield line("bwd", dtype="fp32", b=2, s=33, h=2, d=16, partial=True, poison=True)
    yield from both(dtype="fp32", b=0, s=8, h=2, d=16)
    yield from both(dtype="fp32", b=2, sq=9, sk=0, h=2, d=16)
    yield from both(dtype="bf16", b=2, s=33, h=2, d=72, layout="thd_bshd_bshd", lens_k="random:1", int64=True,
                    poison=True)
    yield line("fwd", dtype="bf16", b=2, sq=1, sk=600, hq=8, hk=2, d=64, lens_k="random:3", poison=True)
    yield line("fwd", dtype="fp32", b=2, sq=1, sk=257, hq=8, hk=1, d=128, page=32, lens_k="random:4", poison=True)
    yield from both(dtype="fp32", b=1, s=9, h=1, d=576, poison=True)
    yield from low_cases.small()


def ci():
    for section in (sizes(False), kernels.wide(), kernels.low(), empty(), layouts(), pages(), bands(), masks(),
                    scores(), decode(False), decode_cases.stream(), decode_cases.prompts(),
                    decode_cases.prompts_of_e4m3(), decode_cases.parts(), decode_cases.heads_of_tiles(),
                    decode_cases.latent(False),
                    decode_cases.few_rows_of_fp8(), other_dtypes(),
                    parts(), shards(), positions(),
                    windows(),
                    sums(),
                    added(), unbuilt(),
                    fp8_cases.inputs(), low_cases.low(), noise(), opposed(), kernels.apart(), kernels.halves(),
                    kernels.shaped(),
                    kernels.padded_bias(), kernels.many_sequences(), kernels.more_columns(),
                    kernels.groups(), kernels.documents(False), kernels.segments_again(False),
                    kernels.wide_backward(False), products(500, 8, False)):
        yield from section


def nightly():
    for section in (sizes(True), kernels.wide_backward(True), decode(True), decode_cases.latent(True),
                    kernels.many_short(),
                    kernels.many_tiles(), kernels.long_tiles(), kernels.tall(), kernels.lists(),
                    kernels.mixtures(), kernels.long(), kernels.tall_and_long(), kernels.documents(True),
                    kernels.segments_again(True), kernels.sections(), kernels.many_masks(), products(6000, 9, True),
                    kernels.named()):
        yield from section
    yield two_keys("fp32")


HEADERS = {
    "smoke": "Every feature once, small: seconds.",
    "ci": "Every line of docs/semantics.md, small sizes: minutes.",
    "nightly": "All sizes and many random products: an hour.",
}


def text_of(name):
    lines = dict.fromkeys({"smoke": smoke, "ci": ci, "nightly": nightly}[name]())  # unique, in order
    header = f"# {HEADERS[name]} Written by tools/cases/make_cases.py.\n"
    return header + "".join(f"{text}\n" for text in lines)


def main():
    stale = []
    for name in HEADERS:
        path, text = CASES / f"{name}.cases", text_of(name)
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"differs from tools/cases/make_cases.py: {', '.join(stale)}; run it and review the difference")


if __name__ == "__main__":
    main()
