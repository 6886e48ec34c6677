# SPDX-License-Identifier: Apache-2.0
"""Lines for make_cases.py of few rows over many keys without features, which have kernels of their own on GPUs: pages,
caches in E4M3, ragged lengths, tiles of every number of rows."""

from itertools import cycle, product

from case_lines import line

# Batch, keys, lengths: one sequence on all multiprocessors, ragged ones with 0 and 1, more than one wave of work.
_BATCHES = cycle((
    {"b": 1, "sk": 1500}, {"b": 3, "sk": 300, "lens_k": "300,0,1"}, {"b": 2, "sk": 257, "lens_k": "random:3"},
    {"b": 5, "sk": 130, "lens_k": "1,130,64,65,0"}, {"b": 64, "sk": 90, "lens_k": "random:9"}, {"b": 2, "sk": 4100}))
_BANDS = cycle((
    {"causal": True, "align": "bottom_right"}, {}, {"window": "70,0", "align": "bottom_right"}, {"sink": "learnable"},
    {"window": "33,5", "align": "bottom_right", "max_logit": True}))
_PAGES = cycle((None, 16, 1, 64, 3, 256, 8, 32))
_LAYOUTS = cycle((None, "bhsd", None, "sbhd"))


def _heads(group):
    return {"hq": 2 * group, "hk": 2} if group < 16 else {"hq": 16, "hk": 1}


def stream():
    types = cycle(("bf16", "fp16"))
    # Rows of a sequence, from 1 to more than a tile has, at each width.
    for kv, d, (sq, group) in product((None, "e4m3"), (64, 128, 256),
                                      ((1, 1), (1, 4), (4, 4), (5, 4), (8, 8), (16, 16), (1, 16))):
        yield line("fwd", dtype=next(types), **next(_BATCHES), sq=sq, **_heads(group), d=d, kv=kv, page=next(_PAGES),
                   layout=next(_LAYOUTS), **next(_BANDS), poison=True)
    for kv, batch_invariant in product((None, "e4m3"), (None, True)):
        # Groups that do not divide a tile, head dims that do not fill one, v of another width.
        for sq, hq, hk, dims in ((2, 6, 2, {"d": 80}), (3, 14, 2, {"dqk": 192, "dv": 128}),
                                 (7, 5, 1, {"dqk": 64, "dv": 96}),
                                 (1, 96, 1, {"d": 128}), (64, 2, 2, {"d": 64}), (16, 3, 3, {"dqk": 40, "dv": 16})):
            yield line("fwd", dtype=next(types), **next(_BATCHES), sq=sq, hq=hq, hk=hk, **dims, kv=kv,
                       page=next(_PAGES),
                       **next(_BANDS), batch_invariant=batch_invariant, poison=True)
        # Packed queries, of which a sequence may have none; packed keys; lengths of padded queries.
        more = {"kv": kv, "batch_invariant": batch_invariant, "poison": True}
        yield line("fwd", dtype=next(types), b=4, sq=4, sk=300, hq=8, hk=2, d=128, layout="paged_kv_thd_bshd_bshd",
                   lens_q="4,0,1,3", lens_k="300,17,0,211", page=16, causal=True, align="bottom_right", **more)
        yield line("fwd", dtype=next(types), b=3, sq=3, sk=200, hq=4, hk=1, d=64, layout="thd", lens_q="3,1,2",
                   lens_k="200,0,77", gaps=5, **more)
        yield line("fwd", dtype=next(types), b=3, sq=5, sk=200, hq=4, hk=1, d=64, lens_q="0,5,2", lens_k="200,9,77",
                   tables=2, page=16, int64=True, **more)
        yield line("fwd", dtype=next(types), b=64, sq=1, sk=700, hq=8, hk=2, d=64, lens_k="random:5", page=16, **more)
    # Plain keys of all sequences, in so many units that decode/ keeps them.
    for d in (64, 128, 256):
        yield line("fwd", dtype=next(types), b=17, sq=1, sk=150, hq=8, hk=4, d=d, poison=True)
        yield line("fwd", dtype=next(types), b=1, sq=4, sk=1500, hq=8, hk=2, d=d, kv="e4m3", page=16, causal=True,
                   align="bottom_right", poison=True)
    for d, (sq, group), page in product((64, 128, 256), ((1, 4), (4, 4), (8, 4), (1, 8)), (None, 16, 64)):
        yield line("fwd", dtype=next(types), **next(_BATCHES), sq=sq, **_heads(group), d=d, kv="e5m2", page=page,
                   kvscale="head" if page else None, layout=next(_LAYOUTS), **next(_BANDS), poison=True)
    # Sequences whose lengths a lane reads two, three or four of, and so many that it resolves one after the other.
    for i, b in enumerate((50, 70, 128, 300)):
        yield line("fwd", dtype=next(types), b=b, sq=1 + i % 2, sk=300, hq=4, hk=1, d=64, lens_k=f"random:{i}", page=16,
                   align="bottom_right", causal=i % 2 == 1 or None, int64=i > 1 or None, poison=True)
    # Rows of q beyond a head dim that no 16 bytes hold, and strides that leave the general kernel alone.
    yield line("fwd", dtype="bf16", b=1, sq=1, sk=1, h=1, d=36, poison=True)
    yield line("fwd", dtype="bf16", b=2, sq=2, sk=70, hq=4, hk=2, d=64, strided=True, poison=True)
    yield line("fwd", dtype="bf16", b=2, sq=1, sk=0, h=2, d=64)
    yield line("fwd", dtype="bf16", b=2, sq=1, sk=70, hq=4, hk=2, d=64, scale="0", poison=True)
    yield line("fwd", dtype="bf16", b=2, sq=1, sk=70, hq=4, hk=2, d=64, kv="e5m2", poison=True)


def prompts():
    """Prompts over pages, whole, in chunks and beside decoding steps; pairs of heads in a tile."""
    types = cycle(("bf16", "fp16"))
    bottom_right = {"causal": True, "align": "bottom_right"}
    # Boxes of every height: pages of many to a block, of one, of several blocks.
    pages = ((1, 300, "300,9,0"), (7, 290, "290,77,1"), (8, 300, "300,9,0"), (16, 300, "300,1,129"),
             (32, 140, "140,128,33"), (64, 500, "500,65,64"), (128, 300, "300,129,7"), (256, 600, "600,257,10"))
    for d, (page, sk, lens) in product((64, 128, 256), pages):
        for sq, heads in ((200, {"hq": 4, "hk": 2}), (50, {"hq": 8, "hk": 2}), (129, {"h": 1})):
            yield line("fwd", dtype=next(types), b=3, sq=sq, sk=sk, **heads, d=d, page=page, lens_k=lens,
                       layout=next(_LAYOUTS), **next(_BANDS), tables=2 if page % 64 else None, poison=True)
    # Head dims that do not fill a row, v of another width.
    for dims in ({"d": 80}, {"d": 40}, {"dqk": 64, "dv": 96}, {"dqk": 192, "dv": 128}, {"dqk": 40, "dv": 16},
                 {"d": 200}):
        yield line("fwd", dtype=next(types), b=2, sq=70, sk=300, hq=4, hk=2, **dims, page=32, lens_k="300,77",
                   **bottom_right, poison=True)
        yield line("fwd", dtype=next(types), b=2, sq=33, sk=300, hq=4, hk=2, **dims, page=32, lens_k="300,77",
                   sink="learnable", poison=True)
    # Packed prompts beside decoding steps of one query and of a few, padding, sequences of none, more than 128.
    for hq, hk, d, lens_q in ((8, 2, 128, "1,300,0,4,70"), (8, 1, 64, "2,1,200,3,1"), (6, 6, 256, "17,1,0,16,90"),
                              (4, 2, 64, "60,1,64,9,2"), (64, 2, 128, "1,1,100,2,30")):
        for more in ({"gaps": 5, "window": "100,0", "align": "bottom_right"}, {**bottom_right, "sink": "off_by_one"}):
            yield line("fwd", dtype=next(types), b=5, sq=300, sk=400, hq=hq, hk=hk, d=d,
                       layout="paged_kv_thd_bshd_bshd", lens_q=lens_q, lens_k="400,333,17,260,128", page=16, **more,
                       poison=True)
    yield line("fwd", dtype="bf16", b=150, sq=70, sk=90, hq=4, hk=2, d=64, layout="paged_kv_thd_bshd_bshd",
               lens_q="random:1", lens_k="random:2", page=16, **bottom_right, poison=True)
    yield line("fwd", dtype="fp16", b=3, sq=90, sk=300, hq=4, hk=2, d=128, page=64, lens_k="300,90,100", max_logit=True,
               **bottom_right, poison=True)
    yield line("fwd", dtype="bf16", b=3, sq=40, sk=300, hq=4, hk=2, d=64, page=64, lens_k="300,90,100", lens_q="40,0,9",
               max_logit=True, sink="learnable", poison=True)
    yield line("fwd", dtype="bf16", b=2, sq=90, sk=300, hq=4, hk=2, d=64, page=16, lens_k="300,120", q_start="50,7",
               k_start="3,0", window="80,1", align="top_left", poison=True)
    # The same pairs where nothing lies in pages.
    for d, more in product((64, 128), ({"lens_k": "300,0,65"}, {**bottom_right}, {"layout": "thd", "gaps": 3},
                                       {"window": "40,9", "align": "top_left", "max_logit": True},
                                       {"sink": "learnable", "lens_q": "50,3,0"})):
        yield line("fwd", dtype=next(types), b=3, sq=50, sk=300, hq=6, hk=3, d=d, **more, poison=True)


def parts():
    """Few tiles and many keys, which are cut into parts: of unlike lengths, of none, with pages and without."""
    types = cycle(("bf16", "fp16"))
    bottom_right = {"causal": True, "align": "bottom_right"}
    bands = cycle((bottom_right, {}, {"sink": "learnable"}))
    for d, page in product((64, 128, 256), (None, 16, 128, 1)):
        for sq, heads in ((40, {"hq": 4, "hk": 2}), (100, {"hq": 2, "hk": 1}), (70, {"h": 1})):
            yield line("fwd", dtype=next(types), b=1, sq=sq, sk=4000, **heads, d=d, page=page, layout=next(_LAYOUTS),
                       **next(bands), poison=True)
        yield line("fwd", dtype=next(types), b=4, sq=33, sk=3000, hq=4, hk=2, d=d, page=page, lens_k="3000,0,300,1111",
                   lens_q="33,5,0,20", sink="learnable", max_logit=True, poison=True)
        yield line("fwd", dtype=next(types), b=3, sq=129, sk=3000, h=2, d=d, page=page, lens_k="3000,9,2049",
                   lens_q="129,70,3", **bottom_right, poison=True)
    for dims in ({"d": 80}, {"d": 40}, {"dqk": 192, "dv": 128}, {"dqk": 40, "dv": 16}):
        yield line("fwd", dtype=next(types), b=1, sq=50, sk=5000, hq=4, hk=2, **dims, page=64, **bottom_right,
                   poison=True)
        yield line("fwd", dtype=next(types), b=1, sq=300, sk=5000, hq=3, hk=1, **dims, sink="off_by_one", poison=True)
    # Packed queries: prompts beside decoding steps, whose rows the merging must leave alone.
    for hq, hk, d in ((8, 2, 128), (4, 1, 64)):
        yield line("fwd", dtype=next(types), b=5, sq=80, sk=4000, hq=hq, hk=hk, d=d, layout="paged_kv_thd_bshd_bshd",
                   lens_q="1,80,0,2,60", lens_k="4000,3333,17,2600,128", page=16, gaps=5, sink="learnable",
                   **bottom_right, poison=True)
        yield line("fwd", dtype=next(types), b=2, sq=128, sk=2300, hq=hq, hk=hk, d=d, layout="thd_bshd_bshd", gaps=5,
                   lens_q="128,3", lens_k="2300,2000", **bottom_right, poison=True)


def prompts_of_e4m3():
    """Prompts over pages of E4M3, with scales and without, and beside decoding steps."""
    types, bands = cycle(("bf16", "fp16")), cycle(({"causal": True, "align": "bottom_right"}, {},
                                                    {"window": "70,5", "align": "bottom_right"}))
    for d, page, kvscale in product((64, 128, 80), (1, 16, 300), (None, "head")):
        for sq, heads in ((200, {"hq": 4, "hk": 2}), (40, {"hq": 8, "hk": 1})):
            yield line("fwd", dtype=next(types), b=3, sq=sq, sk=300, **heads, d=d, page=page, lens_k="300,17,0",
                       kv="e4m3", kvscale=kvscale, layout=next(_LAYOUTS), **next(bands), poison=True)
    for more in ({"max_logit": True, "sink": "learnable"}, {"lens_q": "100,0,7", "kvscale": "head", "tables": 2},
                 {"kvscale": "one", "scale": 2}, {"dqk": 64, "dv": 128, "d": None}, {"d": 72}):
        yield line("fwd", **{"dtype": next(types), "b": 3, "sq": 100, "sk": 500, "hq": 4, "hk": 2, "d": 128, "page": 16,
                             "lens_k": "500,260,128", "kv": "e4m3", "poison": True, **more})
    for hq, hk, d in ((8, 2, 128), (8, 1, 64)):
        yield line("fwd", dtype=next(types), b=5, sq=300, sk=400, hq=hq, hk=hk, d=d, layout="paged_kv_thd_bshd_bshd",
                   lens_q="1,200,0,4,70", lens_k="400,333,17,260,128", page=16, gaps=5, kv="e4m3", kvscale="head",
                   causal=True, align="bottom_right", poison=True)


def heads_of_tiles():
    """Four and eight heads in a tile: of few queries, in pages and not, of keys that are cut and not."""
    types, bottom_right = cycle(("bf16", "fp16")), {"align": "bottom_right"}
    bands = cycle(({"causal": True, **bottom_right}, {"sink": "learnable"}, {"window": "90,4", **bottom_right}, {}))
    shapes = ((32, 8, 2), (17, 4, 1), (20, 12, 3), (16, 8, 1), (9, 16, 2), (11, 16, 1), (30, 16, 2))
    for (sq, hq, hk), page, d in product(shapes, (None, 16, 1, 128), (64, 128, 256)):
        yield line("fwd", dtype=next(types), b=3, sq=sq, sk=300, hq=hq, hk=hk, d=d, page=page, lens_k="300,0,77",
                   layout=next(_LAYOUTS), **next(bands), poison=True)
        if sq not in (20, 30):
            yield line("fwd", dtype=next(types), b=2, sq=sq, sk=3000, hq=hq, hk=hk, d=d, page=page, lens_k="2999,1300",
                       layout=next(_LAYOUTS), **next(bands), poison=True)
    for hq, hk, sq in ((8, 2, 30), (16, 2, 15)):
        yield line("fwd", dtype=next(types), b=4, sq=60, sk=500, hq=hq, hk=hk, d=128, layout="thd",
                   lens_q=f"{sq},0,9,10", lens_k="500,100,9,300", longest=True, gaps=3, causal=True,
                   align="bottom_right", poison=True)
        yield line("fwd", dtype=next(types), b=4, sq=60, sk=2500, hq=hq, hk=hk, d=64, layout="paged_kv_thd_bshd_bshd",
                   lens_q=f"{sq},1,9,2", lens_k="2500,100,9,2300", longest=True, page=16, max_logit=True,
                   sink="learnable", poison=True)
        yield line("fwd", dtype=next(types), b=2, sq=sq, sk=4000, hq=hq, hk=hk, dqk=96, dv=80, page=64, max_logit=True,
                   lens_q=f"{sq},4", poison=True)


def latent(full):
    """Latent attention (MLA): many heads on one whose v is the first columns of k; groups of every kind of share of a
    tile, pages of every kind of box, one piece a unit and many, what neither Hopper's kernels nor pages of theirs
    take."""
    types, more = cycle(("bf16", "fp16")), {"dqk": 576, "dv": 512, "vink": True, "poison": True}
    bottom_right = {"causal": True, "align": "bottom_right"}
    for tokens in ({"b": 1, "sq": 1, "sk": 1, "hq": 128, "hk": 1}, {"b": 1, "sq": 1, "sk": 1300, "hq": 128, "hk": 1},
                   {"b": 9, "sq": 1, "sk": 177, "hq": 32, "hk": 1, "lens_k": "random:3"},
                   {"b": 2, "sq": 2, "sk": 300, "hq": 128, "hk": 1, "lens_k": "300,0", **bottom_right},
                   {"b": 2, "sq": 4, "sk": 200, "hq": 16, "hk": 1, "lens_k": "77,200", **bottom_right,
                    "sink": "learnable"},
                   {"b": 3, "sq": 5, "sk": 150, "hq": 64, "hk": 1, "sink": "off_by_one", **bottom_right},
                   {"b": 2, "sq": 7, "sk": 400, "hq": 24, "hk": 1, "window": "150,0", "align": "bottom_right"},
                   {"b": 2, "sq": 3, "sk": 190, "hq": 6, "hk": 2, "layout": "bhsd"},
                   {"b": 70, "sq": 1, "sk": 65, "hq": 16, "hk": 1, "lens_k": "random:5"},
                   {"b": 3, "sq": 1, "sk": 1200, "hq": 16, "hk": 1, "lens_k": "1200,5,600", "batch_invariant": True},
                   {"b": 4, "sq": 5, "sk": 100, "hq": 16, "hk": 1, "layout": "thd", "lens_q": "random:2",
                    "lens_k": "random:4", "gaps": "random:6", **bottom_right},
                   {"b": 2, "sq": 40, "sk": 130, "hq": 16, "hk": 1, "page": 64, "lens_q": "40,9", "lens_k": "130,64",
                    **bottom_right},
                   {"b": 2, "sq": 1, "sk": 150, "hq": 16, "hk": 1, "max_logit": True},
                   {"b": 2, "sq": 1, "sk": 150, "hq": 16, "hk": 1, "page": 3, "lens_k": "150,31"},
                   {"b": 2, "sq": 1, "sk": 150, "hq": 16, "hk": 1, "kv": "e4m3", "page": 16}):
        yield line("fwd", dtype=next(types), **tokens, **more)
    for page in (8, 16, 32, 64, 128, 256):
        yield line("fwd", dtype=next(types), b=3, sq=3, sk=500, hq=16, hk=1, page=page, window="100,0",
                   align="bottom_right", lens_k="random:3", **more)
    # Pages that no box of TMA fits, whose rows are copied one by one: one CTA a unit and two, ends of pages and blocks.
    for page, tokens in ((1, {"sq": 1, "sk": 300, "hq": 128, "lens_k": "300,0,65"}),
                         (1, {"sq": 3, "sk": 500, "hq": 16, "lens_k": "random:3"}),
                         (3, {"sq": 7, "sk": 400, "hq": 24, "lens_k": "400,31,1", "window": "150,0",
                              "align": "bottom_right", "sink": "learnable"}),
                         (7, {"sq": 2, "sk": 700, "hq": 128, "lens_k": "random:5", **bottom_right}),
                         (24, {"sq": 3, "sk": 1300, "hq": 16, "window": "100,0", "lens_k": "1300,24,64",
                               "align": "bottom_right"}),
                         (7, {"sq": 1, "sk": 1200, "hq": 16, "lens_k": "1200,5,600", "batch_invariant": True}),
                         (24, {"sq": 2, "sk": 900, "hq": 128, "lens_k": "900,1,400", "batch_invariant": True,
                               **bottom_right}),
                         (1, {"sq": 40, "sk": 130, "hq": 16, "lens_q": "40,9,0", "lens_k": "130,64,7",
                              **bottom_right})):
        for dtype in ("bf16", "fp16"):
            yield line("fwd", dtype=dtype, b=3, hk=1, page=page, **tokens, **more)
    # Caches in E4M3, which are converted on their way.
    for tokens in ({"b": 1, "sq": 1, "sk": 1300, "hq": 128, "hk": 1}, {"b": 1, "sq": 1, "sk": 1, "hq": 128, "hk": 1},
                   {"b": 3, "sq": 2, "sk": 300, "hq": 128, "hk": 1, "page": 64, "lens_k": "300,0,65", **bottom_right},
                   {"b": 9, "sq": 1, "sk": 177, "hq": 32, "hk": 1, "lens_k": "random:3"},
                   {"b": 2, "sq": 3, "sk": 190, "hq": 6, "hk": 2, "layout": "bhsd"},
                   {"b": 2, "sq": 7, "sk": 400, "hq": 24, "hk": 1, "page": 3, "lens_k": "400,31", "window": "150,0",
                    "align": "bottom_right", "sink": "learnable"},
                   {"b": 3, "sq": 1, "sk": 1200, "hq": 16, "hk": 1, "page": 16, "lens_k": "1200,5,600",
                    "batch_invariant": True},
                   {"b": 4, "sq": 5, "sk": 100, "hq": 16, "hk": 1, "layout": "thd", "lens_q": "random:2",
                    "lens_k": "random:4", "gaps": "random:6", **bottom_right},
                   {"b": 2, "sq": 1, "sk": 150, "hq": 16, "hk": 1, "page": 1, "lens_k": "150,31"},
                   {"b": 70, "sq": 1, "sk": 129, "hq": 64, "hk": 1, "page": 32, "lens_k": "random:5"}):
        yield line("fwd", dtype=next(types), kv="e4m3", **tokens, **more)
    if not full:
        return
    for page, (b, sk, hq) in product((None, 64), ((1, 20000, 128), (5, 3000, 128), (66, 700, 128), (200, 300, 16))):
        for sq, batch_invariant in ((1, None), (2, True)):
            yield line("fwd", dtype=next(types), b=b, sq=sq, sk=sk, hq=hq, hk=1, page=page, lens_k="random:7",
                       **bottom_right, batch_invariant=batch_invariant, **more)


def few_rows_of_fp8():
    """fp8 caches beside few rows of bf16, which CPUs multiply as bf16: groups of one to eight, ends of blocks and of
    vectors, and what keeps fp32."""
    pages, more = {"page": 16, "lens_k": "300,77"}, {"poison": True}
    for tokens in ({"sk": 300, "hq": 8, "hk": 2, "d": 128, "kv": "e4m3"},
                   {"sk": 300, "hq": 16, "hk": 2, "d": 128, "kv": "e4m3"},
                   {"sk": 300, "hq": 2, "hk": 2, "d": 128, "kv": "e4m3", **pages, **more},
                   {"sq": 2, "sk": 300, "hq": 8, "hk": 2, "d": 80, "kv": "e4m3", **pages, "causal": True,
                    "align": "bottom_right", **more},
                   {"sk": 300, "hq": 8, "hk": 2, "d": 40, "kv": "e5m2"},
                   {"sk": 3000, "hq": 6, "hk": 2, "d": 72, "kv": "e5m2", "window": "100,0", "align": "bottom_right",
                    **more},
                   {"sk": 300, "hq": 8, "hk": 2, "dqk": 9, "dv": 35, "kv": "e4m3", "dropout": 0.2},
                   {"sk": 300, "hq": 8, "hk": 2, "d": 9, "kv": "e5m2"},
                   {"sq": 3, "sk": 2100, "hq": 8, "hk": 8, "dqk": 192, "dv": 128, "kv": "e4m3", "page": 7,
                    "lens_k": "2100,5", **more}):
        yield line("fwd", dtype="bf16", b=2, sq=tokens.pop("sq", 1), **tokens)
