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
"""

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
"""


def inputs():
    yield from FORWARD.splitlines()
    yield from BACKWARD.splitlines()
