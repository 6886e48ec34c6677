# SPDX-License-Identifier: Apache-2.0
"""Cases for what the kernels of a GPU do in parts: the ends of their tiles and blocks, more tiles than a GPU runs at a
time, rows of the tile tables. For make_cases.py."""

import random
from itertools import cycle, product

from case_lines import PASSES, both, heads, line


def wide():
    """Head dims beyond 256, forward: every band, padded and packed, with tails of tiles and of head dims."""
    rng = random.Random(10)
    dims = cycle(({"d": 512}, {"dqk": 576, "dv": 512}, {"d": 320}, {"d": 384}, {"d": 264}, {"dqk": 576, "dv": 128},
                  {"dqk": 64, "dv": 512}, {"dqk": 512, "dv": 456}))
    bands = ({}, {"causal": True}, {"window": "70,30"}, {"window": "40,-1"}, {"causal": True, "window": "150,0"})
    for band, align, dtype in product(bands, ("top_left", "bottom_right"), ("bf16", "fp16")):
        extras = lambda: {"sink": rng.choice((None, "learnable", "off_by_one")),
                          "max_logit": rng.random() < 0.3 or None,
                          "scale": rng.choice((None, None, "1")), "poison": True, "seed": rng.randrange(1, 10000)}
        yield line("fwd", dtype=dtype, b=2, sq=rng.choice((17, 65, 130)), sk=rng.choice((33, 129, 300)), **heads(rng),
                   **next(dims), layout=rng.choice(("bshd", "sbhd", "bhsd")), **band, align=align, **extras())
        yield line("fwd", dtype=dtype, b=3, sq=rng.choice((40, 129, 200)), sk=rng.choice((65, 257)), **heads(rng),
                   **next(dims), lens_q=rng.choice((None, "random:2")), lens_k="random:3", **band, align=align,
                   **extras())
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


def more_columns():
    """Short sequences of 65 to 96 columns, which Hopper computes in kernels of 128."""
    yield from """
fwd bf16 b=3 s=300 h=4 d=80 causal poison
fwd fp16 b=2 sq=150 sk=500 hq=4 hk=2 dqk=72 dv=88 causal align=bottom_right lens_k=random:3 sink=learnable poison
fwd bf16 b=2 s=260 hq=4 hk=1 d=96 window=90,5 layout=sbhd max_logit strided poison
bwd bf16 b=140 s=70 h=4 d=72 poison
bwd fp16 b=70 sq=150 sk=100 hq=8 hk=4 d=96 causal align=bottom_right dlse poison
bwd bf16 b=140 s=60 h=4 dqk=80 dv=72 causal deterministic poison
""".strip().splitlines()


def many_sequences():
    """Packed sequences in numbers that no CTA puts into order, and many short ones whose longest the caller says."""
    yield from """
fwd bf16 b=200 s=60 h=2 d=128 layout=thd lens=random:1 poison
fwd bf16 b=200 s=60 hq=4 hk=2 d=64 layout=thd longest lens=random:2 gaps=random:3 causal poison
fwd fp16 b=1100 s=20 h=1 d=128 layout=thd lens=random:4 gaps=2 poison
fwd bf16 b=150 sq=150 sk=30 h=2 d=64 layout=thd lens_q=random:4 lens_k=random:5 poison
fwd bf16 b=150 sq=30 sk=150 h=2 d=96 layout=thd lens_q=random:4 lens_k=random:5 causal align=bottom_right poison
fwd bf16 b=140 s=70 h=2 d=192 layout=thd lens=random:6 softcap=20 gaps=5 poison
fwd bf16 b=130 s=200 h=2 d=128 layout=thd lens=random:8 alibi window=60,0 poison
fwd e4m3 b=200 s=140 h=2 d=128 layout=thd lens=random:7 causal poison
bwd bf16 b=200 s=60 hq=4 hk=2 d=128 layout=thd longest lens=random:2 gaps=random:3 causal poison
bwd fp16 b=170 s=90 h=4 d=64 layout=thd longest lens=random:5 gaps=2 poison
bwd bf16 b=40 s=192 h=16 d=64 layout=thd longest lens=random:1 poison
bwd fp16 b=30 s=300 hq=24 hk=8 d=128 layout=thd longest lens=random:3 causal poison
bwd bf16 b=9 s=700 hq=24 hk=8 d=64 layout=thd longest lens=random:4 causal gaps=random:4 poison
bwd bf16 b=40 s=530 hq=6 hk=2 d=128 layout=thd longest lens=random:9 causal poison
bwd fp16 b=60 s=400 hq=6 hk=3 d=64 layout=thd lens=random:7 gaps=random:90 window=100,20 poison
bwd bf16 b=50 sq=150 sk=260 h=3 d=256 layout=thd lens_q=random:6 lens_k=random:8 causal align=bottom_right poison
""".strip().splitlines()


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
    """More row tiles than a GPU computes at a time, forward, and more blocks of keys than a CTA asks for ahead."""
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


def sections():
    """Heads enough for sections, backward: tiles clear sums of dq of one to come and convert those of one before."""
    for dtype, d, sq in (("bf16", {"d": 128}, 600), ("fp16", {"dqk": 104, "dv": 72}, 610), ("fp16", {"d": 96}, 800),
                         ("bf16", {"d": 64}, 1200)):
        many = {"b": 28, "h": 4, "sq": sq, **d, "poison": True}
        yield line("bwd", dtype=dtype, sk=350, **many)
        yield line("bwd", dtype=dtype, sk=380, causal=True, align="bottom_right", lens_q="random:3", lens_k="random:4",
                   sink="learnable", grads="dsink", dlse=True, **many)
        many = {"hq": 8, "hk": 4, **d, "causal": True, "poison": True}
        yield line("bwd", dtype=dtype, b=4, sq=64, sk=2000, align="bottom_right", **many)
        yield line("bwd", dtype=dtype, b=8, sq=300, sk=1100, align="top_left", window="800,0", layout="sbhd", **many)


def many_masks():
    """More dense masks than a grid has on its last axis."""
    many = {"dtype": "bf16", "b": 11000, "sq": 17, "sk": 20, "hq": 6, "hk": 1, "keep": "random:0.5", "poison": True}
    yield line("fwd", **many, d=8)
    yield line("fwd", **many, d=72, causal=True, align="top_left")
    yield line("bwd", **many, d=8)


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
                {"dropout": "0.3", "keep": "blocks:0.5"}, {**bias, "keep": "random:0.5/bqk"},
                {**bias, "dropout": "0.2"},
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


def groups():
    """Gradients of groups of heads whose tiles are not in step: windows of up to half a sequence, and packed ones."""
    orders = cycle((None, True))
    for dtype, d in (("bf16", {"d": 64}), ("fp16", {"d": 96}), ("bf16", {"d": 128}), ("fp16", {"dqk": 104, "dv": 72})):
        for window in ("200,0", "90,60"):
            yield line("bwd", dtype=dtype, b=1, s=700, hq=6, hk=2, **d, window=window, deterministic=next(orders),
                       poison=True)
        for deterministic in (None, True):
            yield line("bwd", dtype=dtype, b=2, sq=600, sk=750, hq=4, hk=1, **d, window="150,20", align="bottom_right",
                       lens_q="random:5", lens_k="random:6", deterministic=deterministic, poison=True)
            yield line("bwd", dtype=dtype, b=2, s=650, hq=4, hk=2, **d, layout="thd", lens="random:4", gaps=3,
                       causal=True,
                       sink="learnable", grads="dsink", dlse=True, deterministic=deterministic, poison=True)


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
    packed = {"s": 130, "layout": "thd", "lens": "random:3", "gaps": 5}
    sizes = cycle(({"s": 300}, {"sq": 200, "sk": 450}, packed, {"s": 600, "lens": "random:4"}) if full else
                  ({"s": 200}, {"sq": 140, "sk": 270}, packed, {"s": 260, "lens": "random:4"}))
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
    features = ({}, {"softcap": 5}, {"softcap": 30, "sink": "learnable", "grads": "dsink", "dlse": True},
                {"softcap": "0.5"},
                {"alibi": True, **slopes}, {"alibi": "bh", "sink": "off_by_one"}, {"dropout": "0.1"},
                {"dropout": "0.6", "softcap": 8}, {"bias": "post/hqk", **bias}, {"bias": "pre/bhqk", **bias},
                {"bias": "post/k", **bias}, {"bias": "post/hq", "bias_dtype": "fp32", **bias}, {"bias": "post/bqk"},
                {"bias": "pre/qk", "softcap": 5, **bias}, {"bias": "post/hqk", "softcap": 3, **bias},
                {"keep": "random:0.5/qk"}, {"drop": "random:0.3/bhqk"}, {"keep": "blocks:0.4/hqk"},
                {"ranges": "random:3"},
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


def long():
    """Gradients that are sums over thousands of rows."""
    for dtype, d in product(("bf16", "fp16"), (64, 96, 128)):
        yield line("bwd", dtype=dtype, b=1, s=1500, h=1, d=d, causal=True, sink="learnable", grads="dsink", dlse=True,
                   poison=True)


def apart():
    """On Hopper gradients of short sequences come from two kernels: the ends of their tiles and blocks. In a fixed
    order they do however few there are, but for a causal mask: a window that reaches all keys is one, too."""
    rng = random.Random(11)
    sides = (17, 64, 65, 127, 128, 129, 192, 200, 257, 320, 512)
    dims = (64, 128, 48, 104, {"dqk": 64, "dv": 24}, {"dqk": 80, "dv": 128})
    for i in range(48):
        d = dims[i % len(dims)]
        sq = rng.choice(sides)
        sk = sq if i % 3 == 0 else rng.choice(sides)
        band = rng.choice(({}, {"causal": True}, {"window": "600,0"}, {"window": "64,0"}, {"window": "-1,30"},
                           {"window": "100,64"}, {"window": "0,0"}))
        lens = rng.choice(({}, {"lens_q": f"random:{i}", "lens_k": f"random:{i + 50}"}))
        yield line("bwd", dtype=("bf16", "fp16")[i % 2], b=rng.choice((1, 2, 3)), sq=sq, sk=sk,
                   hq=rng.choice((2, 4)), hk=rng.choice((1, 2)), **(d if isinstance(d, dict) else {"d": d}),
                   layout=rng.choice(("bshd", "sbhd", "bhsd")), **band,
                   align=rng.choice(("top_left", "bottom_right")), **lens, sink=rng.choice((None, None, "learnable")),
                   dlse=rng.random() < 0.4, deterministic=rng.random() < 0.8, poison=True, seed=i + 1)
    for d, deterministic in product((64, 128), (False, True)):
        yield line("bwd", dtype="bf16", b=3, s=200, hq=4, hk=2, d=d, causal=True, sink="learnable", grads="dsink",
                   dlse=True, deterministic=deterministic, poison=True)
        # o is a row of v: dq and dk are exactly 0
        yield line("bwd", dtype="bf16", b=2, sq=200, sk=1, h=2, d=d, deterministic=deterministic, poison=True)


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
        yield line("bwd", dtype=("bf16", "fp16")[i % 2], b=(2, 2, 1, 3)[i % 4], sq=sq, sk=sk, **heads(rng),
                   d=rng.choice(dims),
                   **rng.choice(bands), align=rng.choice(("top_left", "bottom_right")),
                   bias="post/bhqk" if i % 4 == 3 else "post/hqk", grads="dbias", deterministic=next(orders),
                   poison=True,
                   seed=i + 1)


def padded_bias():
    """A bias in the type of q whose rows do not begin at multiples of 16 bytes: on Hopper kernels read a copy of it
    (cuda/sm90/bias), of every combination of features. A row that all queries share has none."""
    for i, (s, d, shape) in enumerate(((49, 32, "bhqk"), (196, 64, "hqk"), (197, 128, "qk"), (51, 96, "bqk"))):
        yield from both(dtype=("bf16", "fp16")[i % 2], b=3, s=s, h=3, d=d, bias=f"post/{shape}", grads="dbias",
                        poison=True)
    small = {"b": 2, "hq": 4, "hk": 2, "d": 64, "poison": True}
    yield line("bwd", dtype="bf16", **small, s=99, bias="post/hqk", grads="dbias", deterministic=True)
    yield from both(dtype="fp16", **small, s=77, causal=True, bias="pre/hqk", softcap=20, grads="dbias")
    yield from both(dtype="bf16", **small, sq=65, sk=131, causal=True, align="bottom_right", bias="post/bhqk",
                    alibi=True, sink="learnable", grads="dbias,dalibi_slopes")
    yield from both(dtype="fp16", **small, s=49, bias="post/hqk", dropout="0.2", keep="random:0.7")
    yield from both(dtype="bf16", **small, s=90, layout="thd", lens="90,37", bias="post/hqk", grads="dbias")
    yield from both(dtype="bf16", **small, s=130, bias="post/bhqk", bias_low="min,random:0.4", lens="130,71")
    yield from both(dtype="fp16", b=2, hq=4, hk=2, dqk=192, dv=128, s=76, causal=True, bias="post/qk", grads="dbias",
                    poison=True)
    yield line("fwd", dtype="bf16", **{**small, "d": 128}, s=194, bias="post/hqk", bias_inf="0.3", max_logit=True)
    yield line("fwd", dtype="bf16", **small, s=49, bias="post/k")


def many_short():
    """On a GPU there are more tiles than multiprocessors: so many that two kernels are the faster form."""
    for dtype, d in product(("bf16", "fp16"), (64, 128)):
        yield line("bwd", dtype=dtype, b=512, s=40, h=1, d=d, causal=True, poison=True)
        yield line("bwd", dtype=dtype, b=256, s=33, h=2, d=d, dlse=True, poison=True)
        yield line("bwd", dtype=dtype, b=64, s=70, hq=16, hk=8, d=d, causal=True, poison=True)
        yield line("bwd", dtype=dtype, b=64, s=150, h=8, d=d, lens="random:4", causal=True, dlse=True, poison=True)
        yield line("bwd", dtype=dtype, b=256, s=200, h=2, d=d, causal=True, sink="learnable", grads="dsink",
                   poison=True)
        # packed, and few tokens: the longest sequence is known to be short
        yield line("bwd", dtype=dtype, b=7, sq=200, sk=190, hq=60, hk=12, d=d, layout="thd", causal=True,
                   align="bottom_right", lens_q="200,129,65,30,0,1,80", lens_k="190,187,64,50,9,0,12", dlse=True,
                   poison=True)
        yield line("bwd", dtype=dtype, b=8, s=200, h=48, d=d, layout="thd", lens="200,0,128,190,5,64,130,17",
                   gaps=3, causal=True, deterministic=True, poison=True)
        yield line("bwd", dtype=dtype, b=40, sq=20, sk=30, h=16, d=d, layout="thd", window="10,3",
                   align="top_left", lens_q="random:5", lens_k="random:6", gaps="random:3", int64=True,
                   sink="learnable", poison=True)
        for window in ("100,0", "60,30"):  # a band that is short although the sequence is not
            yield line("bwd", dtype=dtype, b=8, s=1030, hq=16, hk=8, d=d, window=window, align="top_left", poison=True)


def named():
    """Rows of the tile tables that no other case reaches (tests/cuda/rooms.py): a bias that TMA reads, which needs rows
    of keys aligned to 16 bytes, and single features at the head dims that have a kernel for each."""
    for dtype, d in product(("bf16", "fp16"), (64, 128)):
        small = {"dtype": dtype, "b": 2, "s": 208, "hq": 4, "hk": 2, "d": d, "causal": True, "poison": True}
        yield line("fwd", **small, bias="post/hqk")
        yield line("fwd", **{**small, "causal": None}, bias="pre/bhqk")
        yield line("bwd", **small, bias="post/hqk", grads="dbias")
        yield line("bwd", **small, bias="post/qk", grads="dbias", deterministic=True)
        yield line("bwd", **small, bias="post/hqk")
        yield line("bwd", **small, bias="post/hqk", deterministic=True)
        for feature in ({"softcap": 20}, {"dropout": "0.2"}, {"alibi": True}):
            yield line("fwd", **small, **feature)
            yield line("bwd", **small, **feature)
            yield line("bwd", **small, **feature, deterministic=True)
    # Tiles of 192 rows: enough of them for every multiprocessor, and too long for lower ones.
    yield line("fwd", dtype="bf16", b=1, s=4200, h=12, d=64, causal=True, poison=True)
    yield line("fwd", dtype="fp16", b=12, s=700, h=4, d=64, poison=True)
