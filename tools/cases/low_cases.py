# SPDX-License-Identifier: Apache-2.0
"""Lines of finite low biases for make_cases.py: whole rows, keys, columns and tiles of every size of number, in every
dtype of bias, in both positions, beside what else shapes a score, and sinks near the ends of fp32."""

import random
from itertools import product

from case_lines import PASSES, both, line

DTYPES = ("fp32", "bf16", "fp16")
VALUES = ("min", "-3.4e38", "-1e10", "-1e9", "-1e5", "-65504", "-1e4")
# WHERE with the bias shapes that have the axes it needs.
WHERE = {"keys:0.5": ("k", "bk", "hqk"), "keys:1": ("bk", "qk"), "rows:0.5": ("q", "hq", "bqk"),
         "blocks:0.5": ("hqk", "bqk"), "random:0.9": ("bhqk", "qk", "b"), "from:70": ("k", "bqk"),
         "causal": ("qk", "bhqk")}


def values():
    """Every number at every place, in every dtype, with head dims 8, 64, 128 and 256."""
    rng = random.Random(21)
    for dtype, value, where in product(DTYPES, VALUES, WHERE):
        yield from both(dtype=dtype, b=2, sq=rng.choice((130, 65)), sk=rng.choice((130, 257)), hq=2, hk=1,
                        d=rng.choice((8, 64, 128, 256)), bias=f"{rng.choice(('post', 'post', 'pre'))}/"
                        f"{rng.choice(WHERE[where])}", bias_low=f"{value},{where}",
                        bias_dtype=rng.choice((None, "fp32")) if dtype != "fp32" else None,
                        grads=rng.choice(("dbias", None)), max_logit=True, dlse=rng.choice((None, True)),
                        seed=rng.randrange(1, 1000))


def splits():
    """Keys in several parts, of which some are all low: right padding, few rows, decode."""
    for dtype, d in product(DTYPES, (64, 128)):
        yield line("fwd", dtype=dtype, b=1, s=512, h=4, d=d, bias="post/k", bias_low="min,from:200")
        yield line("fwd", dtype=dtype, b=1, sq=64, sk=1024, h=2, d=d, bias="post/bk", bias_low="min,from:128",
                   bias_dtype="fp32")
        yield line("bwd", dtype=dtype, b=1, s=512, h=1, d=d, bias="post/k", bias_low="-1e10,from:200", grads="dbias")
        yield line("bwd", dtype=dtype, b=1, s=256, h=2, d=d, bias="post/qk", bias_low="min,causal")
    yield line("fwd", dtype="fp32", b=1, s=512, h=12, d=64, bias="post/k", bias_low="-1e9,from:200")
    for dtype, (sq, hq, hk) in product(DTYPES, ((1, 2, 2), (1, 8, 1), (4, 4, 2))):
        for where in ("from:3000", "keys:0.9", "keys:1"):
            yield line("fwd", dtype=dtype, b=2, sq=sq, sk=8192, hq=hq, hk=hk, d=64, bias="post/bk",
                       bias_low=f"min,{where}", max_logit=True)
        yield line("fwd", dtype=dtype, b=2, sq=sq, sk=8192, hq=hq, hk=hk, d=128, bias="post/bqk",
                   bias_low="-1e10,blocks:0.9", sink="learnable")


def beside():
    """Low biases beside everything else that a row may have."""
    rng = random.Random(22)
    packed = {"layout": "thd", "lens": "130,64,100", "gaps": 3}
    extra = ({"causal": True}, {"window": "40,0"}, {"window": "20,30"}, {"keep": "random:0.5/qk"},
             {"drop": "keys:0.5/bk"}, {"ranges": "two:3"}, {"segments": 3}, {"softcap": 20}, {"scale": "0"},
             {"scale": "3"}, {"dropout": 0.2}, {"sink": "off_by_one"}, {"sink": "learnable", "grads": "dsink"},
             {"sink": "3e38", "grads": "dsink"}, {"sink": "-3e38", "grads": "dsink"}, {"alibi": True,
             "grads": "dalibi_slopes"}, packed, packed | {"causal": True}, {"lens": "130,1,70"}, {"bias_inf": 0.3},
             {"accumulate": True}, {"out": True}, {"strided": True}, {"layout": "sbhd"},
             {"deterministic": True, "batch_invariant": True})
    for which, more, where in product(PASSES, extra, ("rows:0.5", "blocks:0.6", "from:2")):
        shape = "bhqk" if where != "from:2" else rng.choice(("k", "bqk"))
        grads = ",".join(filter(None, ("dbias", more.get("grads"))))
        yield line(which, dtype=rng.choice(DTYPES), b=3, s=130, **rng.choice(({"h": 2}, {"hq": 4, "hk": 2})),
                   d=rng.choice((8, 64, 128)), **(more | {"grads": grads}),
                   bias=f"{rng.choice(('post', 'post', 'pre'))}/{shape}",
                   bias_low=f"{rng.choice(('min', '-1e10', '-1e4'))},{where}", max_logit=True, dlse=True, poison=True,
                   seed=rng.randrange(1, 1000))
    for dtype in DTYPES:
        # A softcap as wide as the rule's edge, and a row that a pre-scale bias hides by its scale.
        yield from both(dtype=dtype, b=1, s=65, h=2, d=32, bias="pre/hqk", bias_low="min,rows:0.5", softcap="1e8",
                        bias_dtype="fp32")
        yield from both(dtype=dtype, b=1, s=65, h=2, d=32, bias="pre/hqk", bias_low="-65504,rows:0.5", scale="1000")
        # Low scores without a bias.
        yield line("fwd", dtype=dtype, b=1, s=65, h=2, d=32, scale="1e10", max_logit=True)
        for sink in ("3.4e38", "-3.4e38", "-1e8"):
            yield from both(dtype=dtype, b=2, s=65, h=2, d=64, sink=sink, bias="post/hqk", bias_low="-1e9,rows:0.5",
                            bias_dtype="fp32", grads="dsink,dbias", dlse=True, max_logit=True)
            yield from both(dtype=dtype, b=2, s=65, h=2, d=64, sink=sink, bias_dtype="fp32", grads="dsink", dlse=True)
        yield line("bwd", dtype=dtype, b=2, s=65, h=2, d=64, bias="post/hqk", bias_low="min,rows:0.5", partial=True)
    for dtype, where in product(("e4m3", "e5m2"), ("rows:0.5", "from:100")):
        yield from both(dtype=dtype, b=2, s=130, h=2, d=64, bias="post/hqk", bias_low=f"min,{where}", grads="dbias")
    for where in ("keys:0.5", "keys:1"):
        yield line("fwd", dtype="bf16", b=2, sq=1, sk=300, hq=8, hk=2, d=64, kv="e4m3", bias="post/bk",
                   bias_low=f"min,{where}")
        yield from both(dtype="fp32", b=2, sq=20, sk=300, h=2, d=64, page=16, lens_k="random:1", bias="post/bk",
                        bias_low=f"min,{where}", poison=True)


def small():
    """For smoke.cases."""
    yield from both(dtype="bf16", b=2, s=33, h=2, d=64, bias="post/hqk", bias_low="min,rows:0.5", grads="dbias")
    yield from both(dtype="fp32", b=2, s=33, h=2, d=16, bias="post/bk", bias_low="-1e9,from:9", sink="3e38",
                    grads="dbias,dsink")


def low():
    yield from values()
    yield from splits()
    yield from beside()
