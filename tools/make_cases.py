#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/cases/{smoke,ci,nightly}.cases: every line of docs/semantics.md, then random products.

    tools/make_cases.py            rewrite the files
    tools/make_cases.py --check    fail if a file differs from what this script writes

The output is reviewed text: it changes only when this script does (fixed seeds).
"""

import random
import sys
from itertools import cycle, product
from pathlib import Path

CASES = Path(__file__).resolve().parents[1] / "tests" / "cases"

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
PASSES = ("fwd", "bwd")
# (sq, sk): square, decode, one of either, wide, tall.
PAIRS = ((64, 64), (1, 65), (33, 1), (17, 129), (129, 17), (5, 64), (63, 257))


def both(**tokens):
    """A case body in both passes; gradients and max_logit go where they belong."""
    for which in PASSES:
        yield line(which, **tokens)


def line(which, dtype, **tokens):
    """One line. True is a flag, None leaves the key out, '_' of `grads` etc. is decided by the pass."""
    if which == "fwd":
        tokens.pop("grads", None)
        tokens.pop("dlse", None)
    else:
        tokens.pop("max_logit", None)
        tokens.pop("batch_invariant", None)
    words = [which, dtype]
    for key, value in tokens.items():
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f"{key}={value}")
    return " ".join(words)


def heads(rng):
    return rng.choice(({"h": 1}, {"h": 2}, {"h": 3}, {"hq": 4, "hk": 2}, {"hq": 6, "hk": 2}, {"hq": 3, "hk": 1}))


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


def wide():
    """Head dims beyond 256, forward: every band, padded and packed, with tails of tiles and of head dims."""
    rng = random.Random(10)
    dims = cycle(({"d": 512}, {"dqk": 576, "dv": 512}, {"d": 320}, {"d": 384}, {"d": 264}, {"dqk": 576, "dv": 128},
                  {"dqk": 64, "dv": 512}, {"dqk": 512, "dv": 456}))
    bands = ({}, {"causal": True}, {"window": "70,30"}, {"window": "40,-1"}, {"causal": True, "window": "150,0"})
    for band, align, dtype in product(bands, ("top_left", "bottom_right"), ("bf16", "fp16")):
        extras = lambda: {"sink": rng.choice((None, "learnable", "off_by_one")), "max_logit": rng.random() < 0.3 or None,
                          "scale": rng.choice((None, None, "1")), "poison": True, "seed": rng.randrange(1, 10000)}
        yield line("fwd", dtype=dtype, b=2, sq=rng.choice((17, 65, 130)), sk=rng.choice((33, 129, 300)), **heads(rng),
                   **next(dims), layout=rng.choice(("bshd", "sbhd", "bhsd")), **band, align=align, **extras())
        yield line("fwd", dtype=dtype, b=3, sq=rng.choice((40, 129, 200)), sk=rng.choice((65, 257)), **heads(rng),
                   **next(dims), lens_q=rng.choice((None, "random:2")), lens_k="random:3", **band, align=align, **extras())
        yield line("fwd", dtype=dtype, b=5, sq=150, sk=rng.choice((90, 270)), **heads(rng), **next(dims), layout="thd",
                   lens_q="random:4", lens_k="random:5", gaps=rng.choice((None, 3, "random:6")), **band, align=align,
                   **extras())


def low():
    """Wide heads, no more queries a sequence than one CTA has and more tiles than clusters, forward."""
    yield line("fwd", dtype="bf16", b=17, sq=17, sk=150, h=4, d=512, poison=True)
    yield line("fwd", dtype="fp16", b=9, sq=64, sk=290, hq=8, hk=2, dqk=576, dv=512, causal=True,
               align="bottom_right", sink="learnable", max_logit=True, poison=True)
    yield line("fwd", dtype="bf16", b=18, sq=33, sk=129, hq=4, hk=1, dqk=576, dv=512, window="70,30",
               align="bottom_right", layout="sbhd", poison=True)
    yield line("fwd", dtype="bf16", b=35, sq=63, sk=90, h=2, d=392, causal=True, align="bottom_right", scale="1",
               poison=True)
    yield line("fwd", dtype="bf16", b=35, sq=64, sk=90, h=2, d=512, layout="thd", lens_q="random:4",
               lens_k="random:5", gaps=3, causal=True, align="top_left", poison=True)
    yield line("fwd", dtype="fp16", b=20, sq=64, sk=200, hq=4, hk=2, dqk=64, dv=512, lens_q="random:2",
               lens_k="random:3", poison=True)
    yield line("fwd", dtype="fp16", b=40, sq=20, sk=150, hq=8, hk=1, dqk=576, dv=512, causal=True,
               align="bottom_right", poison=True)


def many_tiles():
    """More row tiles than a GPU computes at a time, forward: each CTA has several, and some kernels come only then."""
    rng = random.Random(12)
    many = {"b": 20, "hq": 12, "hk": 4, "causal": True, "poison": True}
    for dtype, d in (("bf16", 64), ("fp16", 40), ("fp16", 128)):
        yield line("fwd", dtype=dtype, s=130, d=d, **many)
        yield line("fwd", dtype=dtype, sq=100, sk=150, d=d, align="bottom_right", lens_q="random:3", lens_k="random:4",
                   layout=rng.choice(("bshd", "sbhd", "bhsd")), sink="learnable", max_logit=True, **many)
        yield line("fwd", dtype=dtype, sq=150, sk=100, d=d, align="bottom_right", window="60,0", scale="1", **many)
        yield line("fwd", dtype=dtype, s=200, d=d, layout="thd", lens="random:6", gaps="random:2", **many)
        yield line("fwd", dtype=dtype, sq=200, sk=170, d=d, align="bottom_right", layout="thd", lens_q="random:7",
                   lens_k="random:8", gaps=3, sink="off_by_one", int64=rng.random() < 0.5 or None, **many)
        yield line("fwd", dtype=dtype, **{**many, "b": 150, "hq": 3, "hk": 1}, s=40, d=d, layout="thd", lens="random:9")
        yield line("fwd", dtype=dtype, sq=150, sk=130, d=d, align="top_left", layout="thd_bshd_bshd", lens_q="random:7",
                   lens_k="random:8", **many)


def long_tiles():
    """More row tiles than a GPU computes at a time, forward, and more blocks of keys in each than a CTA asks for ahead."""
    many = {"b": 10, "hq": 30, "hk": 5, "sq": 24, "causal": True, "align": "bottom_right", "poison": True}
    for dtype, d in (("bf16", {"d": 256}), ("fp16", {"dqk": 192, "dv": 128}), ("bf16", {"d": 192}), ("bf16", {"d": 96}),
                     ("fp16", {"d": 128}), ("bf16", {"d": 64})):
        yield line("fwd", dtype=dtype, sk=1200, **d, **many)
    yield line("fwd", dtype="fp16", sk=1600, d=256, lens_q="random:3", lens_k="random:4", sink="learnable", **many)
    yield line("fwd", dtype="bf16", sk=1600, d=128, layout="thd", lens_q="random:5", lens_k="random:6", gaps=2, **many)
    yield line("fwd", dtype="bf16", sk=1100, d=128, keep="blocks:0.5/hqk", **many)
    yield line("fwd", dtype="bf16", sk=1100, d=128, segments=9, **many)
    yield line("fwd", dtype="fp16", sk=1100, d=128, alibi=True, **many)
    yield line("fwd", dtype="bf16", **{**many, "causal": None}, sk=1300, d=128, window="900,20")
    # Heads that no number of them divides, and three CTAs a multiprocessor.
    yield line("fwd", dtype="bf16", **{**many, "b": 1, "hq": 149, "hk": 149}, sk=1100, d=64)
    yield line("fwd", dtype="bf16", **{**many, "b": 40, "hq": 40}, sk=600, d=64)


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
                       grads="dsink" if learnable else None, bias_dtype=rng.choice((None, "fp32")) if learnable else None,
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
        yield line(which, dtype="fp64", b=3, s=17, h=2, d=16, layout="thd", lens="random:3", softcap=4, sink="learnable",
                   grads="dsink", dlse=True, max_logit=True, poison=True)
    for dtype, kv in product(("bf16", "fp16"), ("e4m3", "e5m2")):
        yield line("fwd", dtype=dtype, b=2, s=65, hq=4, hk=2, d=64, kv=kv, causal=True, poison=True)
        yield line("fwd", dtype=dtype, b=3, sq=1, sk=129, hq=8, hk=2, d=64, kv=kv, page=16, lens_k="random:3", poison=True)
        yield line("fwd", dtype=dtype, b=3, s=40, hq=8, hk=2, d=128, kv=kv, layout="thd", lens="random:3", poison=True)
        yield line("bwd", dtype=dtype, b=1, s=33, h=2, d=64, kv=kv, poison=True)
    for dtype in ("e4m3", "e5m2"):
        yield line("fwd", dtype=dtype, b=1, s=65, hq=4, hk=2, d=64, causal=True, poison=True)


def two_keys(dtype):
    """Of two keys one has all but the whole weight. In fp32 the reference backend itself misses the limit:
    it takes o and lse as they are given, rounded, where a backend may weigh such a row anew."""
    return line("bwd", dtype=dtype, b=2, sq=1, sk=2, h=2, d=64, scale=3, poison=True, seed=314)


def noise():
    """Gradients that hang on a few roundings: one visible key, differences that all but cancel."""
    grads, alibi = "dbias,dalibi_slopes", {"alibi": "bh", "align": "top_left"}
    for dtype in DTYPES:
        if dtype != "fp32":
            yield two_keys(dtype)
        yield line("bwd", dtype=dtype, b=2, sq=4, sk=64, hq=4, hk=1, dqk=55, dv=72, causal=True, window="0,-1", **alibi,
                   softcap=50, bias="post/bqk", grads=grads, dropout="0.9", poison=True, seed=68430)
        yield line("bwd", dtype=dtype, b=1, s=35, h=1, d=80, lens_k=5, causal=True, align="bottom_right", scale=3, seed=6121)
        yield line("bwd", dtype=dtype, b=2, sq=23, sk=2, h=1, d=22, keep="keys:0.3/bk", scale=1, poison=True, seed=56269)
        yield line("bwd", dtype=dtype, b=1, s=257, hq=3, hk=1, d=16, layout="thd", **alibi, softcap=3, dropout="0.1",
                   grads="dalibi_slopes", poison=True, seed=5132)


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
        layout = rng.choice(("bshd", "sbhd", "bhsd", "thd", "thd")) if not paged else rng.choice(("bshd", "thd_bshd_bshd"))
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
    yield from both(dtype="fp16", b=1, sq=33, sk=9, h=2, d=16, causal=True, align="bottom_right", dlse=True, poison=True)
    yield from both(dtype="fp32", b=0, s=8, h=2, d=16)
    yield from both(dtype="fp32", b=2, sq=9, sk=0, h=2, d=16)
    yield from both(dtype="bf16", b=2, s=33, h=2, d=72, layout="thd_bshd_bshd", lens_k="random:1", int64=True,
                    poison=True)
    yield line("fwd", dtype="bf16", b=2, sq=1, sk=600, hq=8, hk=2, d=64, lens_k="random:3", poison=True)
    yield line("fwd", dtype="fp32", b=2, sq=1, sk=257, hq=8, hk=1, d=128, page=32, lens_k="random:4", poison=True)
    yield from both(dtype="fp32", b=1, s=9, h=1, d=576, poison=True)


def tall():
    """Rows and heads enough for the tiles of 192 rows that kernels of one feature have at d = 64."""
    for dtype, more in product(("bf16", "fp16"), ({"alibi": True}, {"alibi": "bh", "bias_dtype": "fp32"},
                                                  {"softcap": 20}, {"softcap": 1})):
        yield line("fwd", dtype=dtype, b=70, s=200, h=2, d=64, **more, poison=True)
        yield line("fwd", dtype=dtype, b=9, s=600, hq=8, hk=4, d=64, layout="thd", lens="random:5", gaps="random:3",
                   **more, max_logit=True, poison=True)


def tall_and_long():
    """The same where a causal mask is too long for lower tiles."""
    for dtype, s, more in product(("bf16", "fp16"), (1100, 2100), ({"alibi": True}, {"softcap": 20})):
        yield line("fwd", dtype=dtype, b=1, s=s, hq=24, hk=8, d=64, causal=True, **more, poison=True)
        yield line("fwd", dtype=dtype, b=3, s=s, h=8, d=64, window="300,-1", lens="random:5", **more, poison=True)


def lists():
    """Row tiles over several blocks of keys, which data masks hide, cut or leave alone."""
    data = ({"keep": "random:0.5"}, {"keep": "random:0.999/bqk"}, {"keep": "blocks:0.5"}, {"drop": "random:0.3/hqk"},
            {"keep": "random:0.9", "segments": 3}, {"segments": 9}, {"ranges": "random:3"}, {"ranges": "two:3"})
    for dtype, d, more in product(("bf16", "fp16"), (64, 128), data):
        yield line("fwd", dtype=dtype, b=2, s=700, hq=4, hk=2, d=d, **more, poison=True)
        yield line("fwd", dtype=dtype, b=3, s=500, hq=2, hk=1, d=d, lens="random:5", causal=True, **more, poison=True)
    for dtype, d in product(("bf16", "fp16"), (64, 128)):
        yield line("fwd", dtype=dtype, b=1, sq=300, sk=17000, h=1, d=d, segments=9, poison=True)
        yield line("fwd", dtype=dtype, b=2, s=700, hq=4, hk=2, d=d, keep="random:0.5", alibi=True, poison=True)
        yield line("fwd", dtype=dtype, b=2, s=700, hq=4, hk=2, d=d, causal=True, alibi=True, softcap=20, dropout="0.2",
                   poison=True)
        yield line("fwd", dtype=dtype, b=2, s=700, hq=4, hk=2, d=d, causal=True, dropout="0.2", poison=True)


def mixtures():
    """Two features and more, in kernels that know all of them."""
    bias = {"bias": "post/hqk"}
    features = ({"alibi": True, "dropout": "0.2"}, {"softcap": 20, "alibi": "bh"}, {"softcap": 1, "dropout": "0.5"},
                {"softcap": 20, "segments": 3}, {"alibi": True, "segments": 5}, {"dropout": "0.1", "segments": 2},
                {"alibi": True, "ranges": "two:3"}, {"softcap": 8, "keep": "random:0.5"},
                {"dropout": "0.3", "keep": "blocks:0.5"}, {**bias, "keep": "random:0.5/bqk"}, {**bias, "dropout": "0.2"},
                {"bias": "pre/bhqk", "softcap": 20}, {**bias, "softcap": 5, "dropout": "0.1"}, {**bias, "segments": 3},
                {**bias, "alibi": True}, {"bias": "post/qk", "bias_dtype": "fp32", "alibi": True},
                {"bias": "pre/k", "softcap": 20, "segments": 2},
                {**bias, "alibi": True, "softcap": 20, "dropout": "0.1", "ranges": "random:7"})
    bands = cycle(({"causal": True}, {}, {"window": "150,0"}, {"window": "100,70"}, {"causal": True}))
    layouts = cycle(("bshd", "thd", "sbhd"))
    for dtype, d, feature in product(("bf16", "fp16"), (64, 128), features):
        layout = next(layouts)
        yield line("fwd", dtype=dtype, b=2, s=416, hq=4, hk=2, d=d, layout=layout,
                   lens="random:5" if layout == "thd" else None, **next(bands), **feature, poison=True)
    for d, sink in product((40, 104), ("learnable", None)):
        yield line("fwd", dtype="bf16", b=1, sq=200, sk=520, h=2, d=d, causal=True, align="bottom_right", alibi=True,
                   softcap=20, segments=2, sink=sink, max_logit=True, poison=True)


def halves():
    """Gradients where a block of queries sees both halves of a tile of 128 keys, one of them, or a part."""
    for dtype, d in product(("bf16", "fp16"), (64, 96, 128)):
        for band in (dict(causal=True), dict(window="70,0"), dict(window="5,30")):
            for align in ("top_left", "bottom_right"):
                yield line("bwd", dtype=dtype, b=1, sq=330, sk=450, hq=4, hk=2, d=d, **band, align=align, poison=True)
        yield line("bwd", dtype=dtype, b=1, s=330, h=2, d=d, causal=True, deterministic=True, poison=True)
        yield line("bwd", dtype=dtype, b=2, s=333, hq=4, hk=2, d=d, layout="thd", gaps=5, lens="random:7", causal=True,
                   sink="learnable", grads="dsink", dlse=True, poison=True)


def documents(full):
    """Gradients under segments alone, which are intervals here, with bands, lengths and groups: in any order, and in
    a fixed one, where the tiles of a block of dq are in line if the ids of queries and keys agree."""
    band = {"causal": True}
    bands = ({}, band | {"align": "top_left"}, {"window": "100,0", "align": "top_left"},
             {"window": "70,30", "align": "bottom_right"})
    rng = random.Random(14)
    orders = cycle((None, True))
    for dtype, d in product(("bf16", "fp16"), (64, 128)):
        for case in ({"s": 700, "h": 2, "segments": 6} | band, {"s": 300, "h": 2, "segments": 60, "dlse": True} | band,
                     {"s": 333, "hq": 4, "hk": 2, "segments": 2} | band, {"s": 400, "h": 1, "segments": 4},
                     {"sq": 300, "sk": 430, "h": 2, "segments": 4, "align": "bottom_right"} | band,
                     {"s": 500, "h": 2, "segments": 4, "lens": "random:3"} | band,
                     {"s": 450, "h": 2, "layout": "thd", "lens": "random:5", "segments": 5} | band,
                     {"s": 400, "h": 2, "segments": 4, "window": "100,0", "align": "top_left"}):
            for deterministic in (None, True) if full else (next(orders),):
                yield line("bwd", dtype=dtype, b=2, d=d, **case, deterministic=deterministic, poison=True)
    for _ in range(250 if full else 0):
        lens = rng.choice((None, None, "thd", "padded"))
        sq = rng.choice((70, 130, 200, 257, 333, 500, 700, 1100))
        sk = rng.choice((sq, sq, 64, 129, 300, 450, 800))
        yield line("bwd", dtype=rng.choice(("bf16", "fp16")), b=rng.choice((1, 2, 3)), sq=sq, sk=sk, **heads(rng),
                   d=rng.choice((64, 128, 96, 80) if lens else (64, 128, 96, 80, 40, 112)),
                   layout="thd" if lens == "thd" else rng.choice(("bshd", "sbhd", "bhsd")),
                   lens_q=f"random:{rng.randrange(99)}" if lens else None,
                   lens_k=f"random:{rng.randrange(99)}" if lens else None,
                   gaps="random:4" if lens == "thd" and rng.random() < 0.5 else None, **rng.choice(bands),
                   segments=rng.choice((1, 2, 3, 4, 6, 9, 20, 60)), dlse=rng.random() < 0.3 or None,
                   deterministic=next(orders), poison=True)


def segments_again(full):
    """Segments whose ids come again, or change with each token: no intervals."""
    rng = random.Random(15)
    bands = cycle(({}, {"causal": True, "align": "top_left"}, {"window": "100,30", "align": "bottom_right"}))
    sizes = cycle(({"s": 300}, {"sq": 200, "sk": 450}, {"s": 130, "layout": "thd", "lens": "random:3", "gaps": 5},
                   {"s": 600, "lens": "random:4"}))
    orders, types = cycle((None, True, True)), cycle(("bf16", "fp16", "bf16", "fp16", "fp32"))
    extra = ({}, {"softcap": 10}, {"alibi": True}, {"dropout": "0.2"}, {"bias": "post/hqk"},
             {"keep": "random:0.9"}, {"ranges": "random:2"}, {"sink": "learnable"}) if full else ({},)
    forms = ("again:1", "again:3", "again:40", "random:2", "random:9")
    for which, d, ids, more in product(PASSES, (64, 96, 128, 256), forms, extra):
        more = dict(more, grads="dsink") if "sink" in more and which == "bwd" else more
        yield line(which, dtype=next(types), b=2, **next(sizes), **heads(rng), d=d, **next(bands), segments=ids, **more,
                   deterministic=next(orders) if which == "bwd" else None, poison=True)


def wide_backward(full):
    """The backward pass at head dims beyond 128 with everything that shapes scores: tails of tiles, bands, lengths."""
    rng = random.Random(12)
    dims = ({"dqk": 192, "dv": 128}, {"d": 256}, {"d": 224})
    alone = (*dims, {"d": 160}, {"dqk": 136, "dv": 64}, {"dqk": 256, "dv": 128})  # without lengths
    slopes, bias = {"grads": "dalibi_slopes"}, {"grads": "dbias"}
    features = ({}, {"softcap": 5}, {"softcap": 30, "sink": "learnable", "grads": "dsink", "dlse": True}, {"softcap": "0.5"},
                {"alibi": True, **slopes}, {"alibi": "bh", "sink": "off_by_one"}, {"dropout": "0.1"},
                {"dropout": "0.6", "softcap": 8}, {"bias": "post/hqk", **bias}, {"bias": "pre/bhqk", **bias},
                {"bias": "post/k", **bias}, {"bias": "post/hq", "bias_dtype": "fp32", **bias}, {"bias": "post/bqk"},
                {"bias": "pre/qk", "softcap": 5, **bias}, {"bias": "post/hqk", "softcap": 3, **bias},
                {"keep": "random:0.5/qk"}, {"drop": "random:0.3/bhqk"}, {"keep": "blocks:0.4/hqk"}, {"ranges": "random:3"},
                {"ranges": "two:4", "dropout": "0.3"}, {"segments": 3}, {"segments": 2, "softcap": 10},
                {"alibi": True, "dropout": "0.3", "keep": "random:0.7/qk", **slopes},
                {"alibi": "bh", "softcap": 4, "bias": "post/bk", "grads": "dbias,dalibi_slopes"})
    bands = ({}, {"causal": True}, {"window": "70,30"}, {"window": "100,0"})
    shapes = ((130, 300), (200, 200), (257, 129), (70, 260), (150, 70))
    orders = cycle((None, True))
    for number, feature in enumerate(features):
        for _ in range(12 if full else 1):
            sq, sk = rng.choice(shapes)
            layout = rng.choice(("bshd", "sbhd", "bhsd", "thd"))
            lens = layout == "thd" or rng.random() < 0.3
            yield line("bwd", dtype=rng.choice(("bf16", "fp16")), b=2, sq=sq, sk=sk, **heads(rng),
                       **rng.choice(dims if lens else alone) if full else dims[number % len(dims)], layout=layout,
                       lens_q=f"random:{rng.randrange(99)}" if lens else None,
                       lens_k=f"random:{rng.randrange(99)}" if lens else None,
                       gaps="random:4" if layout == "thd" and rng.random() < 0.5 else None, **rng.choice(bands),
                       align=rng.choice(("top_left", "bottom_right")), **feature, deterministic=next(orders),
                       poison=True, seed=rng.randrange(1, 10000))


def ci():
    for section in (sizes(False), wide(), low(), empty(), layouts(), pages(), bands(), masks(), scores(),
                    decode(False), other_dtypes(), noise(), apart(), halves(), shaped(), documents(False),
                    segments_again(False),
                    wide_backward(False), products(500, 8, False)):
        yield from section


def long():
    """Gradients that are sums over thousands of rows."""
    for dtype, d in product(("bf16", "fp16"), (64, 96, 128)):
        yield line("bwd", dtype=dtype, b=1, s=1500, h=1, d=d, causal=True, sink="learnable", grads="dsink", dlse=True,
                   poison=True)


def apart():
    """On Hopper gradients of short sequences come from two kernels: the ends of their tiles and blocks."""
    rng = random.Random(11)
    sides = (17, 64, 65, 127, 128, 129, 192, 200, 257, 320, 512)
    dims = (64, 128, 48, 104, {"dqk": 64, "dv": 24}, {"dqk": 80, "dv": 128})
    for i in range(48):
        d = dims[i % len(dims)]
        sq = rng.choice(sides)
        sk = sq if i % 3 == 0 else rng.choice(sides)
        band = rng.choice(({}, {"causal": True}, {"causal": True}, {"window": "64,0"}, {"window": "-1,30"},
                           {"window": "100,64"}, {"window": "0,0"}))
        lens = rng.choice(({}, {"lens_q": f"random:{i}", "lens_k": f"random:{i + 50}"}))
        yield line("bwd", dtype=("bf16", "fp16")[i % 2], b=rng.choice((1, 2, 3)), sq=sq, sk=sk,
                   hq=rng.choice((2, 4)), hk=rng.choice((1, 2)), **(d if isinstance(d, dict) else {"d": d}),
                   layout=rng.choice(("bshd", "sbhd", "bhsd")), **band,
                   align=rng.choice(("top_left", "bottom_right")), **lens, sink=rng.choice((None, None, "learnable")),
                   dlse=rng.random() < 0.4, deterministic=rng.random() < 0.3, poison=True, seed=i + 1)
    for d in (64, 128):
        yield line("bwd", dtype="bf16", b=3, s=200, hq=4, hk=2, d=d, causal=True, sink="learnable", grads="dsink",
                   dlse=True, poison=True)
        # o is a row of v: dq and dk are exactly 0
        yield line("bwd", dtype="bf16", b=2, sq=200, sk=1, h=2, d=d, poison=True)


def shaped():
    """On Hopper: ALiBi in the step of no features, and dbias that two sequences add to side by side."""
    rng = random.Random(13)
    bands = ({"causal": True}, {"causal": True}, {}, {"window": "100,0"}, {"window": "70,30"})
    dims = (64, 128, 40, 120)
    orders = cycle((None, True))
    for i in range(20):
        sq, sk = rng.choice(((130, 130), (300, 300), (200, 330), (330, 200), (65, 257)))
        thd = rng.random() < 0.3
        d = rng.choice((64, 128) if thd else dims)
        yield line("bwd", dtype=("bf16", "fp16")[i % 2], b=2, sq=sq, sk=sk, **heads(rng), d=d,
                   layout="thd" if thd else rng.choice(("bshd", "sbhd", "bhsd")),
                   lens_q=f"random:{i}" if thd else None, lens_k=f"random:{i + 50}" if thd else None,
                   **rng.choice(bands), align=rng.choice(("top_left", "bottom_right")),
                   alibi=rng.choice((True, "bh")), grads=rng.choice(("dalibi_slopes", None)),
                   sink=rng.choice((None, None, "learnable")), deterministic=next(orders), poison=True, seed=i + 1)
    for i in range(20):
        sq, sk = rng.choice(((136, 136), (304, 304), (200, 328), (328, 200), (64, 256)))
        yield line("bwd", dtype=("bf16", "fp16")[i % 2], b=(2, 2, 1, 3)[i % 4], sq=sq, sk=sk, **heads(rng), d=rng.choice(dims),
                   **rng.choice(bands), align=rng.choice(("top_left", "bottom_right")),
                   bias="post/bhqk" if i % 4 == 3 else "post/hqk", grads="dbias", deterministic=next(orders), poison=True,
                   seed=i + 1)


def many_short():
    """On a GPU there are more tiles than multiprocessors."""
    for dtype, d in product(("bf16", "fp16"), (64, 128)):
        yield line("bwd", dtype=dtype, b=512, s=40, h=1, d=d, causal=True, poison=True)
        yield line("bwd", dtype=dtype, b=64, s=150, h=8, d=d, lens="random:4", causal=True, dlse=True, poison=True)
        yield line("bwd", dtype=dtype, b=256, s=200, h=2, d=d, causal=True, sink="learnable", grads="dsink", poison=True)
        # packed, and few tokens: the longest sequence is known to be short
        yield line("bwd", dtype=dtype, b=7, sq=270, sk=260, hq=60, hk=12, d=d, layout="thd", causal=True,
                   align="bottom_right", lens_q="270,129,65,30,0,1,128", lens_k="260,257,64,50,9,0,128", dlse=True,
                   poison=True)
        yield line("bwd", dtype=dtype, b=8, s=200, hq=48, hk=24, d=d, layout="thd", lens="200,0,128,190,5,64,130,17",
                   gaps=3, causal=True, deterministic=True, poison=True)
        yield line("bwd", dtype=dtype, b=40, sq=20, sk=30, hq=16, hk=2, d=d, layout="thd", window="10,3",
                   align="top_left", lens_q="random:5", lens_k="random:6", gaps="random:3", int64=True,
                   sink="learnable", poison=True)
        for window in ("100,0", "60,30"):  # a band that is short although the sequence is not
            yield line("bwd", dtype=dtype, b=8, s=1100, hq=8, hk=4, d=d, window=window, align="top_left", poison=True)


def nightly():
    for section in (sizes(True), wide_backward(True), decode(True), many_short(), many_tiles(), long_tiles(), tall(), lists(), mixtures(), long(),
                    tall_and_long(), documents(True), segments_again(True), products(6000, 9, True)):
        yield from section
    yield two_keys("fp32")


HEADERS = {
    "smoke": "Every feature once, small: seconds.",
    "ci": "Every line of docs/semantics.md, small sizes: minutes.",
    "nightly": "All sizes and many random products: an hour.",
}


def text_of(name):
    lines = dict.fromkeys({"smoke": smoke, "ci": ci, "nightly": nightly}[name]())  # unique, in order
    header = f"# {HEADERS[name]} Written by tools/make_cases.py.\n"
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
        sys.exit(f"differs from tools/make_cases.py: {', '.join(stale)}; run it and review the difference")


if __name__ == "__main__":
    main()
