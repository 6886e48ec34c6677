# SPDX-License-Identifier: Apache-2.0
"""Lines of fp8 q, k, v and do for make_cases.py: layouts, scales of every kind, outputs and gradients of every dtype
beside the features that the fp32 problem inside has."""

FORWARD = """\
fwd e4m3 b=2 s=33 h=2 d=16 qscale=row
fwd e4m3 b=2 s=33 h=2 d=16 qscale=head amax
fwd e4m3 b=2 s=33 h=2 d=16 o=e4m3 qscale=one
fwd e4m3 b=2 sq=40 sk=300 hq=4 hk=2 d=32 kv=e5m2 qscale=row kvscale=block o=fp16 poison
fwd e4m3 b=2 sq=1 sk=600 hq=8 hk=2 d=64 lens_k=random:1 kvscale=block qscale=head poison
fwd e4m3 b=3 s=70 hq=4 hk=2 dqk=40 dv=24 layout=thd lens=random:3 gaps=1 causal qscale=row kvscale=block max_logit poison
fwd e4m3 b=2 s=129 h=2 d=64 layout=sbhd window=16,3 align=top_left sink=learnable o=e5m2 amax poison
fwd e5m2 b=2 s=64 hq=4 hk=1 d=96 layout=bhsd dropout=0.2 bias=post/hqk qscale=head o=fp32 poison
fwd e4m3 b=2 s=50 h=2 d=32 softcap=5 alibi align=top_left keep=keys:0.5/bk strided poison
fwd e4m3 b=2 s=40 h=3 d=32 layout=bs3hd lens=random:4 segments=3 poison
fwd e4m3 b=1 sq=0 sk=8 h=2 d=16 amax
fwd e4m3 b=2 sq=8 sk=0 h=2 d=16 amax
fwd e4m3 b=2 s=64 h=2 d=64 o=bf16 scale=4 seed=3
fwd e4m3 b=1 s=40 h=2 dqk=48 dv=32 vink qscale=row poison
fwd e4m3 b=2 s=33 h=2 d=16 qscale=one o=e4m3 amax
fwd e4m3 b=2 sq=1 sk=129 hq=4 hk=2 d=32 page=16 lens_k=random:3 qscale=head kvscale=block poison
fwd e4m3 b=2 s=33 h=2 d=16 accumulate
fwd e4m3 b=2 s=70 h=2 d=33 qscale=row kvscale=block o=e4m3 amax poison
fwd e5m2 b=2 sq=9 sk=140 hq=4 hk=2 dqk=6 dv=3 layout=bhsd qscale=head o=fp16 amax poison
fwd e4m3 b=1 s=1 h=1 d=1 o=fp32 amax poison
fwd e4m3 b=1 sq=3 sk=4100 hq=8 hk=2 d=64 causal align=bottom_right kvscale=block o=fp32 amax poison
fwd e4m3 b=3 sq=40 sk=150 hq=4 hk=2 d=64 layout=thd_bshd_bshd lens_q=0,40,17 lens_k=150,0,129 int64 qscale=row kvscale=block poison
fwd e4m3 b=2 s=48 hq=2 hk=1 dqk=576 dv=512 vink causal qscale=head amax poison
fwd e5m2 b=2 s=64 h=2 d=64 causal align=top_left q_start=64,0 k_start=0,32 qscale=row poison
"""  # noqa: E501

BACKWARD = """\
bwd e4m3 b=2 s=33 hq=4 hk=2 d=64 causal poison
bwd e5m2 b=2 s=33 hq=4 hk=2 d=64 causal do=e5m2 poison
bwd e4m3 b=2 s=65 h=2 d=32 qscale=row kvscale=block do=e4m3 amax poison
bwd e4m3 b=2 s=65 h=2 d=32 qscale=one kvscale=one do=e5m2 grad=e5m2 amax
bwd e4m3 b=2 s=40 h=2 d=32 o=e4m3 do=e5m2 grad=e5m2 amax poison
bwd e4m3 b=3 s=70 hq=4 hk=2 dqk=40 dv=24 layout=thd lens=random:3 gaps=1 causal qscale=row kvscale=block do=e5m2 o=fp16 poison
bwd e4m3 b=2 sq=40 sk=300 hq=4 hk=1 d=32 kv=e5m2 kvscale=block dlse grad=e4m3 amax poison
bwd e4m3 b=2 s=64 h=2 d=32 layout=sbhd sink=learnable grads=dsink window=16,0 align=top_left poison
bwd e4m3 b=2 s=48 h=2 d=32 layout=bhsd dropout=0.2 bias=post/hqk grads=dbias do=e4m3 qscale=head poison
bwd e4m3 b=2 s=130 h=2 d=64 lens=random:3 deterministic do=e5m2 amax poison
bwd e4m3 b=1 s=1 h=2 d=64 amax
bwd e4m3 b=2 sq=8 sk=0 h=2 d=16 amax poison
bwd e4m3 b=2 s=65 hq=4 hk=2 d=64 softcap=10 alibi align=top_left grads=dalibi_slopes strided do=e4m3 poison
bwd e4m3 b=2 s=40 h=2 dqk=48 dv=32 partial qscale=row do=e5m2 poison
bwd e5m2 b=2 sq=9 sk=40 h=2 d=16 page=16 lens_k=random:3 do=e4m3 amax poison
bwd e5m2 b=2 s=33 h=2 d=16 accumulate
bwd e4m3 b=2 s=65 hq=4 hk=2 d=33 qscale=row kvscale=block do=e5m2 o=e4m3 grad=e4m3 amax poison
bwd e5m2 b=2 sq=9 sk=140 hq=4 hk=2 dqk=6 dv=3 layout=bhsd do=e4m3 grad=fp16 amax poison
bwd e4m3 b=1 s=130 hq=4 hk=2 d=128 causal deterministic kvscale=block o=fp32 do=e5m2 amax poison
bwd e4m3 b=3 sq=40 sk=150 hq=4 hk=2 d=64 layout=thd_bshd_bshd lens_q=0,40,17 lens_k=150,0,129 int64 qscale=row do=e5m2 amax poison
bwd e5m2 b=2 s=64 h=2 d=64 causal align=top_left q_start=64,0 k_start=0,32 qscale=row do=e5m2 poison
bwd e4m3 b=1 s=130 h=2 d=256 causal qscale=one kvscale=one do=e5m2 grad=e5m2 amax poison
bwd e4m3 b=2 s=64 h=3 d=32 layout=bs3hd lens=random:4 segments=3 dlse do=e4m3 poison
"""  # noqa: E501

# What the fp8 kernels of Hopper have: the band, lengths, packed sequences and sinks; each with lse and without, which
# are two kernels. Blocks of 128 keys, so that several stand between those that the band cuts.
LEAN = """\
b=2 s=33 h=2 d=16 qscale=row poison
b=1 s=128 h=2 d=64 amax poison
b=2 s=257 hq=4 hk=2 d=128 causal qscale=head poison
b=1 sq=130 sk=700 hq=4 hk=1 d=128 causal align=bottom_right qscale=row max_logit poison
b=1 sq=300 sk=520 hq=2 hk=1 d=64 window=200,10 align=bottom_right sink=learnable qscale=row poison
b=2 s=390 h=2 dqk=192 dv=128 causal sink=off_by_one qscale=one kvscale=one poison
b=1 s=300 h=3 dqk=160 dv=112 layout=sbhd window=64,0 align=top_left qscale=row max_logit amax poison
b=3 sq=200 sk=260 hq=4 hk=2 d=128 lens_q=random:3 lens_k=random:5 causal align=top_left poison
b=4 s=290 hq=4 hk=2 d=64 layout=thd lens=random:3 gaps=5 causal qscale=row sink=learnable max_logit poison
b=4 s=290 hq=4 hk=2 d=128 layout=thd lens=290,0,1,129 window=100,0 int64 amax poison
b=3 sq=40 sk=350 hq=4 hk=2 dqk=96 dv=80 layout=thd_bshd_bshd lens_q=0,40,17 lens_k=350,0,129 qscale=row poison
b=2 s=200 h=2 d=48 layout=bhsd o=fp16 poison
b=1 sq=5 sk=1100 hq=8 hk=2 d=128 o=fp16 poison
b=2 s=256 h=2 d=64 data=sink scale=0.5 poison
b=1 s=200 h=2 d=128 data=positive layout=bs3hd poison
b=1 s=384 h=2 d=128 scale=1 causal shift=-40 poison
b=9 sq=193 sk=130 h=8 d=64 qscale=row poison
b=12 sq=193 sk=2100 hq=6 hk=2 d=64 lens_q=random:4 causal align=bottom_right poison
"""

# 16-bit inputs that are rounded inside: scores of what the quantiser makes of them, with the features that see scores
# (sinks, softcap, biases, lse), blocks of 128 keys that bands, lengths and packed sequences cut, and its distributions.
PRODUCTS = """\
b=2 s=33 h=2 d=16 smooth=none amax poison
b=2 s=33 h=2 d=16 smooth=mean poison
b=2 s=33 h=2 d=16 amax poison
b=2 s=300 hq=4 hk=2 d=96 causal poison
b=2 sq=40 sk=300 hq=4 hk=2 d=128 causal align=bottom_right sink=learnable SINK poison
b=3 s=300 hq=4 hk=2 dqk=40 dv=24 layout=thd lens=random:3 gaps=1 causal STATISTIC poison
b=3 sq=40 sk=350 hq=4 hk=2 dqk=96 dv=80 layout=thd_bshd_bshd lens_q=0,40,17 lens_k=350,0,129 int64 poison
b=2 s=129 h=2 d=64 layout=sbhd window=16,3 align=top_left softcap=5 DO poison
b=2 s=64 hq=4 hk=1 d=96 layout=bhsd dropout=0.2 bias=post/hqk BIAS smooth=mean poison
b=1 s=50 h=2 d=33 bias=pre/bk BIAS STATISTIC poison
b=2 s=140 h=2 d=32 alibi align=top_left keep=keys:0.5/bk strided sink=off_by_one poison
b=2 sq=1 sk=600 hq=8 hk=2 d=64 lens_k=random:1 batch poison
b=2 s=64 h=3 d=32 layout=bs3hd lens=random:4 segments=3 smooth=mean poison
b=2 s=64 h=2 d=64 causal align=top_left q_start=64,0 k_start=0,32 poison
b=1 s=40 h=2 dqk=48 dv=32 vink poison
b=1 s=400 h=2 d=128 window=100,0 align=top_left deterministic poison
b=1 s=256 h=2 d=128 data=channels causal poison
b=1 s=256 h=2 d=128 data=channels smooth=none poison
b=1 s=256 h=2 d=64 data=outliers poison
b=2 s=130 h=2 d=256 data=sink poison
b=1 s=200 h=2 d=128 data=positive scale=0.5 poison
b=1 s=1 h=1 d=1 amax poison
b=1 sq=8 sk=0 h=2 d=16 amax poison
b=1 sq=0 sk=8 h=2 d=16 poison
b=1 s=700 hq=4 hk=2 d=64 LSE data=outliers causal poison
b=2 s=600 hq=4 hk=2 d=128 LSE data=outliers lens=random:2 poison
b=2 s=520 h=2 dqk=192 dv=128 data=channels causal poison
b=3 s=900 hq=4 hk=1 d=128 layout=thd lens=700,0,200 gaps=3 window=300,20 align=bottom_right LSE data=outliers poison
b=2 s=520 h=2 dqk=192 dv=128 sink=learnable poison
"""
# Words of one pass alone.
OWN_WORDS = {"SINK": ("max_logit", "grads=dsink"), "STATISTIC": ("max_logit", "dlse"), "DO": ("", "do=e5m2"),
             "BIAS": ("", "grads=dbias"), "batch": ("batch_invariant", ""), "LSE": ("no_lse", ""),
             "vink": ("vink", "partial")}


def products():
    for i, case in enumerate(PRODUCTS.splitlines()):
        for own, name in enumerate(("fwd", "bwd")):
            words = [OWN_WORDS.get(word, (word, word))[own] for word in case.split()]
            yield " ".join([name, ("bf16", "fp16")[(i + own) % 3 == 2], *filter(None, words), "precision=fp8"])
    yield "fwd bf16 b=2 s=33 h=2 d=16 o=fp32 precision=fp8 poison"
    yield "bwd bf16 b=2 s=33 h=2 d=16 o=fp32 grad=fp32 precision=fp8 poison"
    yield "fwd bf16 b=2 sq=5 sk=33 h=2 d=16 page=16 precision=fp8"
    yield "fwd bf16 b=2 s=33 h=2 d=16 accumulate precision=fp8"


def inputs():
    yield from FORWARD.splitlines()
    yield from BACKWARD.splitlines()
    yield from products()
    for case in LEAN.splitlines():
        yield f"fwd e4m3 {case}"
        yield f"fwd e4m3 {case.replace(' poison', ' no_lse poison')}"
