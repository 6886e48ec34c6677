# SPDX-License-Identifier: Apache-2.0
"""Illegal calls, hundreds of them: each is one clear error that names its field with its value, and
nothing is written."""

import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera
from tessera._call import _keywords
import signatures
from problems import problems

F32, I32, I64 = np.float32, np.int32, np.int64
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def bases():
    """Legal calls that together give every array keyword."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(F32)
    padded = dict(q=normal(2, 5, 4, 8), k=normal(2, 7, 2, 8), v=normal(2, 7, 2, 6),
                  seqlens_q=np.array([5, 3], I32), seqlens_k=np.array([7, 2], I64),
                  keep=np.ones((2, 4, 5, 7), bool), bias=normal(2, 4, 5, 7), sink=normal(4),
                  alibi_slopes=normal(2, 4), segment_ids=(np.zeros((2, 5), I32),
                                                          np.zeros((2, 7), I32)),
                  rng_state=np.array([1, 2], I64), dropout_p=0.5, align="top_left", causal=True,
                  window=(3, 0), softmax_scale=0.5, softcap=2.0)
    cu = np.array([0, 2, 5], I32)
    packed = dict(q=normal(9, 4, 8), k=normal(8, 2, 8), v=normal(8, 2, 6), layout="thd",
                  cu_seqlens_q=cu, cu_seqlens_k=np.array([0, 3, 7], I32),
                  cu_seqlens_q_padded=np.array([1, 4, 8], I32),
                  cu_seqlens_k_padded=np.array([0, 3, 8], I64), max_seqlen_q=3, max_seqlen_k=4,
                  key_ranges=np.array([0, 4], I32) * np.ones((4, 9, 2), I32),
                  segment_ids=(np.zeros(9, I32), np.zeros(8, I32)))
    paged = dict(q=normal(2, 3, 4, 8), k=normal(5, 4, 2, 8), v=normal(5, 4, 2, 6),
                 page_table=np.array([[0, 1], [2, 4]], I32), seqlens_k=np.array([8, 5], I32),
                 key_ranges=np.zeros((2, 4, 3, 4), I32))
    return {"padded": padded, "packed": packed, "paged": paged}


BASES = bases()


def output_shapes(call):
    shape = call["q"].shape[:-1] + (call["v"].shape[-1],)
    q = call["q"].shape
    lse = (q[1], q[0]) if call.get("layout") == "thd" else (q[0], q[2], q[1])
    return shape, lse


@pytest.mark.parametrize("name", BASES)
def test_bases_are_legal(name):
    call = BASES[name]
    o, lse = tessera.attention(**call, return_lse=True)
    assert (o.shape, lse.shape) == output_shapes(call)
    tessera.attention_backward(o, o=o, lse=lse, **call)


def short(x):
    if isinstance(x, (tuple, list)):
        return "(" + ", ".join(map(short, x)) + ")"
    if isinstance(x, np.ndarray):
        return f"{x.dtype}{list(x.shape)}"
    return type(x).__name__ if " at 0x" in repr(x) else repr(x)[:30]  # an address is no name


MUTATIONS = []  # (id, base, field that the message names, changed keywords)


def bad(base, field, **changes):
    what = ", ".join(f"{name}={short(x)}" for name, x in changes.items())
    MUTATIONS.append(pytest.param(base, field, changes, id=f"{base}: {what} #{len(MUTATIONS)}"))


def strided(x, step):
    """x with a last axis of stride `step`."""
    wide = np.repeat(x, abs(step), -1)
    return wide[..., ::step]


ARRAYS = [(base, name) for base, call in BASES.items() for name, x in call.items()
          if isinstance(x, np.ndarray)]
FLOATS = ("q", "k", "v", "bias", "sink", "alibi_slopes")
for base, name in ARRAYS:
    x = BASES[base][name]
    if name != "rng_state":
        bad(base, name, **{name: x.tolist()})
    for wrong in (3, 2.5, object(), {}, b"x", lambda: 0, True):
        bad(base, name, **{name: wrong})
    if name != "sink":
        bad(base, name, **{name: "off_by_one"})
    bad(base, "sink" if name == "sink" else name, **{name: "nonsense"})
    bad(base, name, **{name: x[None][None] if x.ndim > 2 else x[None, None, None]})
    if x.ndim > 1 and name not in ("keep", "bias", "alibi_slopes"):
        bad(base, name, **{name: x[0]})
    for dtype in (np.int8, np.uint64, np.complex64, object, "S4", "M8[s]"):
        bad(base, name, **{name: np.zeros(x.shape, dtype)})
    if x.dtype.itemsize > 1:
        bad(base, name, **{name: x.astype(x.dtype.newbyteorder())})
    bad(base, name, **{name: np.ma.masked_array(x)})
    if name in FLOATS:
        bad(base, f"{name}|out", **{name: x.astype(I32)})
        bad(base, f"{name}|out", **{name: x.astype(bool)})
    elif name != "keep":
        bad(base, name, **{name: x.astype(F32)})
        bad(base, name, **{name: x.astype(bool)})
    else:
        bad(base, name, **{name: x.astype(F32)})
        bad(base, name, **{name: x.astype(I32)})
    for axis in range(x.ndim):
        if name in ("q", "k", "v") and base == "packed" and axis == 0 and name == "q":
            continue  # one token more is legal where lengths are given
        if name in ("k", "v") and base == "paged" and axis == 0:
            continue  # page counts may differ
        if name == "page_table" and axis == 1:
            continue  # more pages are more room
        if base == "packed" and name == "key_ranges" and axis == 3:
            continue
        wider = np.concatenate([x, np.take(x, [-1], axis)], axis)
        bad(base, r"\w+", **{name: wider})
    if x.ndim > 1:
        bad(base, name, **{name: x[..., ::-1]})
        if x.dtype.itemsize > 1 and name not in ("alibi_slopes", "page_table", "rng_state"):
            bad(base, name, **{name: strided(x, 2)})
    else:
        bad(base, name, **{name: x[::-1]})
    if x.dtype.itemsize > 1:
        odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        bad(base, name, **{name: odd})

for name in ("q", "k", "v"):
    bad("padded", name, **{name: None})
    bad("padded", "[qkv]|out", **{name: BASES["padded"][name].astype(BF16)})
    bad("padded", "[qkv]|out", **{name: BASES["padded"][name].astype(np.float16)})
bad("padded", "k", k=np.zeros((2, 7, 3, 8), F32), v=np.zeros((2, 7, 3, 6), F32))  # 4 % 3
bad("padded", "k", k=np.zeros((2, 7, 0, 8), F32), v=np.zeros((2, 7, 0, 6), F32))
bad("padded", "v", v=np.zeros((2, 7, 2, 0), F32))
bad("padded", "[qk]", q=np.zeros((2, 5, 4, 0), F32), k=np.zeros((2, 7, 2, 0), F32))

# scalars
for name in ("softmax_scale", "softcap", "dropout_p"):
    for wrong in (float("nan"), float("inf"), -1.0, -1, "1", [1.0], (1.0,), True, 1j,
                  np.array(True), np.array("1"), np.array(-0.5), np.array([0.5]), 10**400, object(), np.bool_(True)):
        bad("padded", name, **{name: wrong})
for wrong in (1, 1.5, 1 - 1e-9, 1e-9, 5e-6, np.float64(2)):
    bad("padded", "dropout_p", dropout_p=wrong)
bad("padded", "rng_state", rng_state=None)
for wrong in ([1], [1, 2, 3], (), [1.0, 2], ["a", "b"], [2**63, 0], [0, -2**63 - 1], [True, 0],
              {1, 2}, np.zeros(3, I64), np.zeros(2, I32), np.zeros(2, np.uint64), 5, "seed"):
    bad("padded", "rng_state", rng_state=wrong)
    bad("padded", "rng_state", rng_state=wrong, dropout_p=0)
for wrong in (1, 0, "yes", np.array(True), np.ones(1, bool), 1.0, [], object()):
    for name in ("causal", "deterministic", "batch_invariant", "allow_quadratic"):
        bad("padded", name, **{name: wrong})
for name in ("return_lse", "return_max_logit"):
    for wrong in (1, "yes", np.ones(2, bool)):
        bad("forward", name, **{name: wrong})
for wrong in (3, (3,), (3, 0, 1), (-2, 0), (0, -5), (1.5, 0), ("a", "b"), "ab", (None, 0), (3, None),
              (2**63, 0), (-2**63 - 1, 0), (True, 0), {3, 0}, np.array([3, 0]), (3, 1), (0, 2**40)):
    bad("padded", "window", window=wrong)
for wrong in ("topleft", "TOP_LEFT", "", 1.5, 2**63, True, b"top_left", ("top_left",), np.ones(2, F32)):
    bad("padded", "align", align=wrong)
    bad("packed", "align", align=wrong)
bad("padded", "align", align=None)
bad("padded", "align", align=None, causal=False)
bad("padded", "align", align=None, alibi_slopes=None)
bad("packed", "align", causal=True)
bad("packed", "align", window=(2, -1))
bad("paged", "align", causal=True)
bad("paged", "align", window=(-1, 1))
bad("paged", "align", alibi_slopes=np.ones(4, F32))
for wrong in ("post", "PRE_SCALE", 0, True, ("post_scale",)):
    bad("padded", "bias_at", bias_at=wrong)
    bad("packed", "bias_at", bias_at=wrong)
for wrong in ("none", "offbyone", "", 0, 0.0, [0.0] * 4, True):
    bad("padded", "sink", sink=wrong)
for wrong in ("BSHD", "bshd_bshd_bshd", "", "sb3hd", 0, ["bshd", "bshd"], ("bshd",),
              ("bshd", "bshd", "bshd"), ("bshd", "x"), (0, "bshd"), b"bshd", "thd ", np.array("bshd")):
    bad("padded", "layout", layout=wrong)
for wrong in ("gpu", "", "CPU", "cpu ", "a" * 16, "é", 1, True, b"cpu", ("cpu",), "cpu\0x"):
    bad("padded", "backend", backend=wrong)

# lengths
for wrong in ([6, 1], [-1, 2], [2**31 - 1, 0]):
    bad("padded", "seqlens_q", seqlens_q=np.array(wrong, I32))
bad("padded", "seqlens_k", seqlens_k=np.array([0, 2**40], I64))
bad("padded", "seqlens_k", seqlens_k=np.array([8, 0], I64))
bad("padded", "seqlens_k", seqlens_k=np.array([7], I64))
for wrong in ([1, 2, 5], [0, 4, 2], [0, -1, 5], [0, 2, 4], [-1, 2, 5]):
    bad("packed", "cu_seqlens_q|max_seqlen_q|cu_seqlens_q_padded", cu_seqlens_q=np.array(wrong, I32)
        if wrong != [0, 2, 4] else np.array([0, 5, 5], I32))
bad("packed", "cu_seqlens_q", cu_seqlens_q=np.array([0, 2, 10], I32), cu_seqlens_q_padded=None,
    max_seqlen_q=None)
bad("packed", "cu_seqlens_k", cu_seqlens_k=np.array([0, 2, 2**31 - 1], I32),
    cu_seqlens_k_padded=None, max_seqlen_k=None)
for wrong in ([0, 1, 8], [-1, 2, 8], [1, 7, 8], [1, 4, 99], [4, 1, 8], [1, 4, 6]):
    bad("packed", "cu_seqlens_q_padded", cu_seqlens_q_padded=np.array(wrong, I32))
bad("packed", "cu_seqlens_q", cu_seqlens_q=None)
bad("packed", "cu_seqlens_k", cu_seqlens_k=None)
bad("packed", "cu_seqlens_q", cu_seqlens_q=None, cu_seqlens_q_padded=None, max_seqlen_q=None)
bad("packed", "cu_seqlens_\\w", cu_seqlens_q=np.array([0, 1, 2, 5], I32), cu_seqlens_q_padded=None)
bad("packed", "seqlens_q", seqlens_q=np.array([1, 2], I32))
bad("packed", "seqlens_k", seqlens_k=np.array([1, 2], I32))
bad("padded", "cu_seqlens_q", cu_seqlens_q=np.array([0, 1, 2], I32))
bad("padded", "cu_seqlens_k", cu_seqlens_k=np.array([0, 1, 2], I32))
bad("padded", "cu_seqlens_q_padded", cu_seqlens_q_padded=np.array([0, 1, 2], I32))
bad("padded", "max_seqlen_k", max_seqlen_k=7)
for name in ("max_seqlen_q", "max_seqlen_k"):
    for wrong in (-1, 0, 2, 1.5, "3", True, 2**63, np.array(3), [3], np.float32(4)):
        bad("packed", name, **{name: wrong})

# masks
bad("padded", "drop", drop=np.zeros((2, 4, 5, 7), bool))
bad("padded", "keep|key_ranges", key_ranges=np.zeros((2, 4, 5, 2), I32))
bad("packed", "keep", keep=np.ones((2, 4, 3, 4), bool))
bad("packed", "keep", keep=np.ones((2, 4, 3, 4), bool), max_seqlen_q=None, key_ranges=None)
bad("packed", "keep", keep=np.ones((2, 4, 9, 8), bool), key_ranges=None)
bad("paged", "key_ranges", key_ranges=np.zeros((2, 4, 3, 3), I32))
bad("paged", "key_ranges", key_ranges=np.zeros((3, 2), I32))
bad("packed", "key_ranges", key_ranges=np.zeros((4, 9, 1), I32))
bad("padded", "segment_ids", segment_ids=np.zeros((2, 5), I32))
for wrong in ((np.zeros((2, 5), I32),), (np.zeros((2, 5), I32),) * 3, [np.zeros((2, 5), I32)] * 2,
              (np.zeros((2, 5), I32), None), (None, None), (), (np.zeros((2, 5), I64),) * 2):
    bad("padded", "segment_ids", segment_ids=wrong)
bad("padded", "keep", keep=np.ones((5, 2), bool))
bad("padded", "bias", bias=np.ones((3, 5, 7), F32))

# pages
for wrong in ([[0, 1], [2, 5]], [[0, -1], [2, 4]], [[0, 1], [2**31 - 1, 4]]):
    bad("paged", "page_table", page_table=np.array(wrong, I32))
bad("paged", "page_table", page_table=np.zeros((2, 0), I32))
bad("paged", "page_table", page_table=np.zeros((3, 2), I32))
bad("paged", "page_table", page_table=(np.zeros((2, 2), I32), np.zeros((2, 3), I32)))
bad("paged", "page_table", page_table=(np.zeros((2, 2), I32), np.full((2, 2), 9, I32)))
bad("paged", "page_table", page_table=(np.zeros((2, 2), I32),))
bad("paged", "page_table", page_table=(np.zeros((2, 2), I32), None))
bad("paged", "seqlens_k", seqlens_k=None)
bad("paged", "seqlens_k", seqlens_k=np.array([9, 0], I32))
bad("paged", "[kv]", k=np.zeros((5, 0, 2, 8), F32), v=np.zeros((5, 0, 2, 6), F32))
bad("paged", "v", v=np.zeros((5, 3, 2, 6), F32))

# partners
for name in ("k_scale", "v_scale"):
    bad("padded", name, **{name: np.ones(2, F32)})
    bad("padded", name, **{name: np.ones((2, 2), F32)})
bad("forward", "batch_invariant", batch_invariant=True, dropout_p=0.5, rng_state=[1, 2])
bad("backward", "batch_invariant", batch_invariant=True)
bad("padded", "sink", sink=np.array([0, np.nan, 0, 0], F32))
bad("padded", "alibi_slopes", alibi_slopes=np.array([0, np.inf, 0, 0], F32))

# outputs
OUT = np.zeros((2, 5, 4, 8), F32)
for wrong in ([1], "o", 1, np.zeros((2, 5, 4, 7), F32), np.zeros((2, 5, 32), F32),
              np.zeros((2, 5, 4, 8), np.float64), np.zeros((2, 5, 4, 8), BF16),
              np.broadcast_to(F32(0), (2, 5, 4, 8)), OUT[..., ::-1], OUT[::-1],
              np.zeros((2, 5, 4, 16), F32)[..., ::2], np.ma.masked_array(OUT),
              np.zeros((2, 5, 4, 8), ">f4"),
              np.lib.stride_tricks.as_strided(np.zeros((2, 5, 4, 8), F32), (2, 5, 4, 8),
                                              (0, 128, 32, 4))):
    bad("forward", "out", out=wrong)

GRADIENT = np.zeros((2, 5, 4, 8), F32)
for wrong in (["dq"], "dq", None, {"dq"}, 1, ("dq", "dz"), ("dq", 1), ("dq", "dq"), {"dz": GRADIENT},
              {1: GRADIENT}, ("o",)):
    bad("backward", "grads", grads=wrong)
for wrong in (None, 1, [1.0], "dq"):
    bad("backward", "grads", grads={"dq": wrong})
for wrong in (np.zeros((2, 5, 4, 7), F32), np.zeros((2, 5, 4, 8), BF16), GRADIENT[::-1],
              np.broadcast_to(F32(0), (2, 5, 4, 8)), np.zeros((5, 4, 8), F32)):
    bad("backward", "dq", grads={"dq": wrong})
for name in ("dbias", "dsink", "dalibi_slopes"):
    bad("backward", f"{name}|grads", grads=("dq", name))
bad("backward", "dsink|grads", grads=("dsink",), sink="off_by_one")
for name in ("do", "o", "lse"):
    bad("backward", name, **{name: None})
    bad("backward", name, **{name: [1.0]})
for name in ("do", "o"):
    bad("backward", name, **{name: np.zeros((2, 5, 4, 9), F32)})
    bad("backward", name, **{name: np.zeros((2, 5, 4, 8), np.float16)})
    bad("backward", name, **{name: np.zeros((2, 5, 4, 16), F32)[..., ::2]})
for name in ("lse", "dlse"):
    bad("backward", name, **{name: np.zeros((2, 5, 4), F32)})
    bad("backward", name, **{name: np.zeros((2, 4, 5), np.float64)})
    bad("backward", name, **{name: np.zeros((2, 4, 5), BF16)})
    bad("backward", name, **{name: np.zeros((4, 5), F32)})
    bad("backward", name, **{name: np.zeros((2, 4, 5), F32)[:, :, ::-1]})


def simple():
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((2, 5, h, 8)).astype(F32) for h in (4, 2, 2, 4))
    o, lse = tessera.attention(q, k, v, return_lse=True)
    return q, k, v, do, o, lse


def raised_by(function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except (ValueError, TypeError, tessera.Refused, MemoryError) as error:
        return error
    return None


@pytest.mark.parametrize("base, field, changes", MUTATIONS)
def test_mutation(base, field, changes):
    if base in ("forward", "backward"):
        q, k, v, do, o, lse = simple()
        call = dict(q=q, k=k, v=v)
        if base == "backward":
            call.update(do=do, o=o, lse=lse)
    else:
        call = dict(BASES[base])
    call.update(changes)
    function = tessera.attention_backward if base == "backward" else tessera.attention
    outputs = {}
    if base not in ("forward", "backward"):
        outputs["out"] = np.full(output_shapes(BASES[base])[0], 7, F32)
        call["out"] = outputs["out"]
    elif base == "backward" and "grads" not in changes:
        outputs = {name: np.full(x.shape, 7, F32) for name, x in (("dq", q), ("dk", k), ("dv", v))}
        call["grads"] = outputs
    elif base == "backward" and isinstance(changes["grads"], dict):
        outputs = {name: x for name, x in changes["grads"].items() if isinstance(x, np.ndarray)}
    elif isinstance(changes.get("out"), np.ndarray):
        outputs["out"] = changes["out"]
    before = {name: x.copy() for name, x in outputs.items()}
    error = raised_by(function, **call)
    assert isinstance(error, ValueError), error
    message = str(error)
    operation = "attention_backward" if base == "backward" else "attention"
    assert message.startswith(f"tessera.{operation}: "), message
    assert re.search(rf"(^|[^a-z_])({field})(\[[^]]*\]|\.\w+)*=", message), message
    for name, x in outputs.items():
        np.testing.assert_array_equal(x, before[name])


@pytest.mark.parametrize("name, beside", [("q", ""), ("cu_seqlens_q", ""), ("k", " beside q in fp32")])
def test_a_dtype_is_measured_by_that_of_q(name, beside):
    call = BASES["packed"]
    with pytest.raises(ValueError) as raised:
        tessera.attention(**(call | {name: call[name].astype(bool)}))
    assert f"{name}.dtype=bool: must be " in str(raised.value)
    assert ("beside" in str(raised.value)) == bool(beside) and beside in str(raised.value)


@pytest.mark.parametrize("changes, cure", [
    ({"keep": np.ones((2, 16), bool)}, "pass seqlens_k, the lengths, or the mask as [b, 1, 1, sk]"),
    ({"keep": np.ones((2, 1, 16), bool)}, "pass seqlens_k, the lengths, or the mask as [b, 1, 1, sk]"),
    ({"bias": np.zeros((2, 16), "f")}, "pass seqlens_k, the lengths, or the bias as [b, 1, 1, sk]"),
    ({"keep": np.ones((2, 16, 16), bool)}, "for one mask of all heads pass it as [b, 1, sq, sk]"),
    ({"keep": np.ones((2, 16), bool)}, "keep.shape=[2, 16], read as [1, 1, 2, 16]: must be"),
    ({"drop": np.ones((2, 16), bool)}, "pass seqlens_k"),
    ({"bias": np.ones((2, 16), F32)}, "bias.shape=[2, 16], read as [1, 1, 2, 16]: must be"),
    ({"bias": np.ones((1, 1, 2, 16), F32)}, "bias.shape=[1, 1, 2, 16]: must be"),
    ({"key_ranges": np.zeros((2, 1, 16, 2), np.int64)}, "must be int32; convert it"),
    ({"q": np.zeros((2, 4, 10, 8), F32), "k": np.zeros((2, 4, 20, 8), F32), "v": np.zeros((2, 4, 20, 8), F32)},
     'or layout="bhsd"'),
    ({"q": np.zeros((2, 8, 10, 8), F32), "k": np.zeros((2, 4, 10, 8), F32), "v": np.zeros((2, 4, 10, 8), F32),
      "causal": True}, 'or layout="bhsd"'),
])
def test_what_newcomers_pass_is_told_what_works(changes, cure):
    x = np.zeros((2, 16, 4, 8), F32)
    with pytest.raises(ValueError) as raised:
        tessera.attention(**{"q": x, "k": x, "v": x} | changes)
    assert cure in str(raised.value)
    if "keep" in changes:  # nor is a mask of another shape taken for padding
        with pytest.raises(ValueError) as raised:
            tessera.attention(x, x, x, keep=np.ones((3, 7), bool))
        assert "seqlens" not in str(raised.value)


def test_misspelt_words_are_told_the_nearest():
    x = np.zeros((2, 16, 4, 8), F32)
    for call in (tessera.attention, tessera.explain, lambda *a, **b: tessera.attention_backward(*a, x, x, x, **b)):
        with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'causel'; did you mean 'causal'\?"):
            call(x, x, x, causel=True)
    with pytest.raises(TypeError, match="argument 'colour'$"):
        tessera.attention(x, x, x, colour=1)
    for wrong, right in (("causl", "causal"), ("soft_cap=20", "softcap"), ("layuot=bhsd", "layout"),
                         ("aling=top_left", "align")):
        with pytest.raises(ValueError, match=rf"no such key; did you mean {right}\? one of "):
            tessera.explain(f"fwd bf16 b=2 s=64 h=1 d=64 {wrong}")
    with pytest.raises(ValueError, match="no such key; one of "):
        tessera.explain("fwd bf16 b=2 s=64 h=1 d=64 zebra")


@pytest.mark.parametrize("theirs, hint", [
    ("scale", "did you mean 'softmax_scale'?"), ("sm_scale", "did you mean 'softmax_scale'?"),
    ("is_causal", "did you mean 'causal'?"), ("attn_mask", "did you mean 'keep', 'drop' or 'bias'?"),
    ("attention_mask", "did you mean 'seqlens_k', 'keep' or 'drop'?"), ("block_table", "did you mean 'page_table'?"),
    ("score_mod", "did you mean 'bias', 'alibi_slopes' or 'softcap'?"),
    ("p", "did you mean 'dropout_p'?"), ("attention_bias", "did you mean 'bias'?"),
    ("cu_seqlens", "did you mean 'cu_seqlens_q' or 'cu_seqlens_k'?"), ("kv_lengths", "did you mean 'seqlens_k'?"),
    ("enable_gqa", "k and v may have fewer heads than q without it"),
])
def test_words_of_other_libraries_are_told_ours(theirs, hint):
    x = np.zeros((2, 16, 4, 8), F32)
    with pytest.raises(TypeError) as raised:
        tessera.attention(x, x, x, **{theirs: None})
    assert str(raised.value) == f"attention() got an unexpected keyword argument {theirs!r}; {hint}"


def test_words_of_other_libraries_lead_to_keywords():
    assert {ours for meant in _keywords._ELSEWHERE.values() for ours in meant} <= set(_keywords.ALL)
    assert not (_keywords._ELSEWHERE.keys() | _keywords._NEEDLESS.keys()) & set(_keywords.ALL)
    error = _keywords.unexpected("attention_backward", "return_residual", _keywords.BACKWARD)
    assert "return_lse" not in str(error)  # which attention alone has


def test_a_wrong_number_of_axes_leads_to_the_layout():
    x, cu = np.zeros((2, 16, 4, 8), F32), np.array([0, 4, 16], I32)
    with pytest.raises(ValueError, match=r'\[b, sq, hq, dqk\]; q\[None\] adds .*, and layout="thd" is for packed'):
        tessera.attention(x[0], x[0], x[0])
    with pytest.raises(ValueError, match=r'\[t, hq, dqk\]; layout="thd" has no axis of the batch: leave layout out'):
        tessera.attention(x, x, x, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu)
    for far in (x[0, 0], x[None]):  # from both
        with pytest.raises(ValueError, match=r"must have the axes \[b, sq, hq, dqk\]$"):
            tessera.attention(far, far, far)


def test_lengths_are_no_offsets():
    x, lengths = np.zeros((16, 4, 8), F32), np.array([4, 12], I32)
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[0\]=4: must be 0; pass offsets, .*, not lengths$"):
        tessera.attention(x, x, x, layout="thd", cu_seqlens_q=lengths, cu_seqlens_k=lengths)


def test_a_device_is_told_by_its_cards():
    with pytest.raises(ValueError, match=r"device='h100': must be \"cpu\" or .*\"sm90\" \(H100, H200\)"):
        tessera.explain("fwd bf16 b=2 s=64 h=1 d=64", device="h100")
    assert set(tessera._explain._CARDS) == set(tessera._explain._DEVICES) - {"cpu"}


def test_names_of_other_libraries_say_what_they_were_given():
    torch = pytest.importorskip("torch")
    from tessera import flash_attn, xformers
    from tessera.torch import scaled_dot_product_attention
    x, one = torch.zeros(2, 16, 4, 8), torch.zeros(2, 1, 4, 8)
    for text, call in {
        "q=[1.0]: must be a PyTorch tensor": lambda: flash_attn.flash_attn_func([1.0], x, x),
        "window_size=3: must be a pair (left, right) of integers":
            lambda: flash_attn.flash_attn_func(x, x, x, window_size=3),
        "cache_seqlens=[5, 6]: must be an int32 tensor [b], or an int for all":
            lambda: flash_attn.flash_attn_with_kvcache(one, x, x, cache_seqlens=[5, 6]),
        "query=ndarray: must be a PyTorch tensor": lambda: xformers.memory_efficient_attention(x.numpy(), x, x),
        "attn_mask.shape=[2, 16], read as [1, 1, 2, 16]: must be [2|1, 16|1, 4|1, 4|1], to go with "
        "query.shape=[2, 16, 4, 8] and key.shape=[2, 16, 4, 8]":
            lambda: scaled_dot_product_attention(x, x, x, torch.ones(2, 16, dtype=torch.bool)),
        "as [b, 1, 1, sk]": lambda: scaled_dot_product_attention(*[x.transpose(1, 2)] * 3, torch.zeros(2, 16)),
    }.items():
        with pytest.raises(ValueError) as raised:
            call()
        assert text in str(raised.value) and "seqlens_k," not in str(raised.value)


def test_packed_tensors_of_flash_attn_say_their_axes():
    torch = pytest.importorskip("torch")
    from tessera import flash_attn, flash_attn_interface
    cu = torch.tensor([0, 16, 32], dtype=torch.int32)
    q, wrong, packed = torch.zeros(2, 16, 4, 8), torch.zeros(2, 16, 4, 3, 8), torch.zeros(32, 4, 3, 8)
    for text, call in {
        "qkv.shape=[2, 16, 4, 3, 8]: must be [b, s, 3, h, d]": lambda: flash_attn.flash_attn_qkvpacked_func(wrong, 0.1),
        "kv.shape=[2, 16, 4, 3, 8]: must be [b, sk, 2, hk, d]": lambda: flash_attn.flash_attn_kvpacked_func(q, wrong),
        "qkv.shape=[32, 4, 3, 8]: must be [t, 3, h, d]":
            lambda: flash_attn.flash_attn_varlen_qkvpacked_func(packed, cu, 16),
        "kv.shape=[32, 4, 3, 8]: must be [tk, 2, hk, d]":
            lambda: flash_attn.flash_attn_varlen_kvpacked_func(q[0], packed, cu, cu, 16, 16),
        "qkv=ndarray: must be a PyTorch tensor of shape [b, s, 3, h, d]":
            lambda: flash_attn.flash_attn_qkvpacked_func(np.zeros((2, 16, 3, 4, 8), F32)),
        "qkv.shape=[2, 16, 4, 3, 8]: must be [b, s, 3, h, d]; ":
            lambda: flash_attn_interface.flash_attn_qkvpacked_func(wrong),
    }.items():
        with pytest.raises(ValueError) as raised:
            call()
        assert text in str(raised.value)


def test_there_are_hundreds():
    assert len(MUTATIONS) > 600


def test_unknown_keyword_is_a_type_error():
    q, k, v, do, o, lse = simple()
    for call in (lambda: tessera.attention(q, k, v, colour=1), lambda: tessera.attention(q, k),
                 lambda: tessera.attention_backward(do, q, k, v, o, lse, return_lse=True),
                 lambda: tessera.merge([(o, lse)], colour=1)):
        with pytest.raises(TypeError):
            call()


def test_overlapping_outputs():
    q, k, v, do, o, lse = simple()
    buffer = np.zeros((2, 5, 8, 8), F32)
    cases = [lambda: tessera.attention(q, k, v, out=q),
             lambda: tessera.attention(buffer[:, :, :4], k, v, out=buffer[:, :, 2:6]),
             lambda: tessera.attention_backward(do, q, k, v, o, lse, grads={"dq": do}),
             lambda: tessera.attention_backward(do, q, k, v, o, lse, grads={"dk": buffer[:, :, :2],
                                                                            "dv": buffer[:, :, 1:3]})]
    for case in cases:
        before = [x.copy() for x in (q, do, buffer)]
        with pytest.raises(ValueError, match="shares? memory|overlap"):
            case()
        for x, y in zip((q, do, buffer), before):
            np.testing.assert_array_equal(x, y)
    # disjoint halves of one buffer are legal
    tessera.attention_backward(do, q, k, v, o, lse, grads={"dk": buffer[:, :, :2],
                                                           "dv": buffer[:, :, 2:4]})


def test_a_number_may_be_an_array_without_axes():
    q, k, v, *_ = simple()
    np.testing.assert_array_equal(tessera.attention(q, k, v, softmax_scale=np.array(0.5), softcap=np.array(3.0)),
                                  tessera.attention(q, k, v, softmax_scale=0.5, softcap=3.0))


def test_legal_and_refused():
    q, k, v = (np.ones((1, 2, 2, 8), np.float64) for _ in range(3))
    with pytest.raises(tessera.Refused) as refused:
        tessera.attention(q, k, v)
    message = str(refused.value)
    assert message.startswith("tessera.attention: ")
    assert all(name in message for name in tessera.backends())
    with pytest.raises(tessera.Refused):
        tessera.attention(q.astype(F32), k.astype(F32), v.astype(F32), backend="cuda_sm90")


def test_outputs_that_do_not_fit():
    q = np.lib.stride_tricks.as_strided(np.ones(8, F32), (1, 1 << 44, 4, 8), (0, 0, 0, 4))
    k = np.ones((1, 4, 4, 8), F32)
    with pytest.raises(MemoryError, match="tessera.attention: "):
        tessera.attention(q, k, k)


@pytest.mark.parametrize("parts, field", [
    ([], "parts"), (None, "parts"), ("ab", "parts"), ([1], r"parts\[0\]"),
    ([(np.zeros((1, 2, 3, 4), F32),)], r"parts\[0\]"),
    ([(np.zeros((2, 3, 4), F32), np.zeros((1, 3, 2), F32))], r"parts\[0\].o.shape"),
    ([(np.zeros((1, 2, 3, 4), F32), np.zeros((3, 2), F32))], r"parts\[0\].lse.shape"),
    ([(np.zeros((1, 2, 3, 4), F32), [[0.0]])], r"parts\[0\].lse"),
    ([(np.zeros((1, 2, 3, 4), I32), np.zeros((1, 3, 2), F32))], "dtype"),
    ([(np.zeros((1, 2, 3, 4), F32), np.zeros((1, 3, 2), np.float64))], "dtype"),
    ([(np.zeros((1, 2, 3, 4), F32), np.zeros((1, 2, 3), F32))], "lse"),
    ([(np.zeros((1, 2, 3, 4), F32), np.zeros((1, 3, 2), F32)),
      (np.zeros((1, 2, 3, 5), F32), np.zeros((1, 3, 2), F32))], "o|shape"),
    ([(np.zeros((1, 2, 3, 4), F32), np.zeros((1, 3, 2), F32)),
      (np.zeros((1, 2, 3, 4), BF16), np.zeros((1, 3, 2), F32))], "dtype"),
])
def test_merge(parts, field):
    with pytest.raises(ValueError, match=rf"tessera.merge: .*({field}).*="):
        tessera.merge(parts)


@pytest.mark.parametrize("arguments, field", [
    ((-1, 1, 1, 1, 0.5, [0, 0]), "b"), ((1.0, 1, 1, 1, 0.5, [0, 0]), "b"),
    ((1, "1", 1, 1, 0.5, [0, 0]), "hq"), ((1, 1, 2**63, 1, 0.5, [0, 0]), "sq"),
    ((1, 1, 1, True, 0.5, [0, 0]), "sk"), ((1, 1, 1, 1, 1.0, [0, 0]), "dropout_p"),
    ((1, 1, 1, 1, -0.5, [0, 0]), "dropout_p"), ((1, 1, 1, 1, float("nan"), [0, 0]), "dropout_p"),
    ((1, 1, 1, 1, "x", [0, 0]), "dropout_p"), ((1, 1, 1, 1, 0.5, None), "rng_state"),
    ((1, 1, 1, 1, 0.5, [0]), "rng_state"), ((1, 1, 1, 1, 0.5, np.zeros(2, I32)), "rng_state"),
    ((2**40, 2**40, 2**40, 2**40, 0.5, [0, 0]), r"\w+"),
    ((1, 1, 1, 1, 0.5, [0, 0, 1]), "rng_state"),
    ((1, 1, 1, 1, 0.5, [0, 0], dict(q_start=[0])), "q_start"),
    ((1, 1, 1, 1, 0.5, [0, 0], dict(k_start=np.zeros(2, I32))), "k_start"),
    ((1, 1, 1, 1, 0.5, [0, 0], dict(k_start=np.zeros(1, F32))), "k_start"),
    ((1, 1, 1, 1, 0.5, [0, 0], dict(q_start=np.array([-1]))), "q_start"),
])
def test_dropout_mask(arguments, field):
    *arguments, keywords = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ValueError, match=rf"tessera.dropout_mask: .*{field}.*="):
        tessera.dropout_mask(*arguments, **keywords)


@pytest.mark.parametrize("name, arguments, message", signatures.WRONG_UTILITIES)
def test_utilities_say_what_is_wrong(name, arguments, message):
    signatures.assert_says(tessera, name, arguments, message)



@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True, 2**40])
def test_alibi_slopes(value):
    with pytest.raises(ValueError, match="tessera.alibi_slopes: hq="):
        tessera.alibi_slopes(value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, 2**31])
def test_set_num_threads(value):
    with pytest.raises(ValueError, match="tessera.set_num_threads: n="):
        tessera.set_num_threads(value)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.integers(-2**70, 2**70), st.floats(),
    st.sampled_from(["bshd", "thd", "off_by_one", "top_left", "pre_scale", "cpu", "x", ""]),
    st.tuples(st.integers(-2, 5), st.integers(-2, 5)), st.lists(st.integers(-2, 5), max_size=3),
    st.builds(lambda shape, dtype, step: np.zeros(shape, dtype)[..., ::step] if shape else
              np.zeros(shape, dtype), st.lists(st.integers(0, 5), max_size=4).map(tuple),
              st.sampled_from([F32, I32, I64, bool, np.float64, np.int8, BF16]),
              st.sampled_from([1, 2, -1])))


def test_random_edits_never_crash(examples, relaxed):
    """A random legal problem with random keywords replaced by junk: an answer or a clear error."""
    def names(problem):
        return st.lists(st.sampled_from(sorted(set(problem.keywords) | {
            "q", "k", "v", "layout", "causal", "window", "keep", "bias", "sink", "seqlens_k",
            "cu_seqlens_q", "page_table", "segment_ids", "rng_state", "dropout_p", "max_seqlen_q",
            "softcap", "align", "key_ranges", "alibi_slopes"})), min_size=1, max_size=3)

    @settings(max_examples=examples, **relaxed)
    @given(st.data())
    def run(data):
        problem = data.draw(problems())
        call = dict(q=problem.q, k=problem.k, v=problem.v, **problem.keywords)
        for name in data.draw(names(problem)):
            call[name] = data.draw(JUNK)
        error = raised_by(tessera.attention, **call)
        if error is not None:
            assert not isinstance(error, TypeError), error
            assert str(error).startswith("tessera.attention: "), error
    run()


def test_a_lone_surrogate_is_quoted():
    q = np.zeros((1, 1, 1, 1), "f4")
    for call in (lambda: tessera.explain("fwd \udc80\ud800"), lambda: tessera.attention(q, q, q, backend="\ud800")):
        with pytest.raises(ValueError) as error:
            call()
        assert not isinstance(error.value, UnicodeError)
        assert "ud800" in str(error.value)


@pytest.mark.parametrize("name, value", [("TESSERA_NUM_THREADS", "many"), ("TESSERA_NUM_THREADS", "-1"),
                                         ("TESSERA_NUM_THREADS", "4\n"), ("TESSERA_CPU_ISA", "avx1024"),
                                         ("TESSERA_BACKEND", "gpu"), ("TESSERA_LOG", "dispatch,nonsense"),
                                         ("TESSERA_LOG", "plan,")])
def test_the_environment_is_checked(name, value):
    code = "import numpy, tessera; q = numpy.zeros((1, 1, 1, 1), 'f4'); tessera.attention(q, q, q)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=dict(os.environ, **{name: value}), check=False)
    shown = value.replace("\n", "\\n")
    assert f'ValueError: tessera.attention: {name}="{shown}": must be' in done.stderr


def test_extents_without_elements():
    q = np.zeros((64051194700380384, 0, 1, 1), "f4")
    assert tessera.attention(q, q, q).shape == q.shape


@pytest.mark.parametrize("topics", ["dispatch,plan", "cp,sharding", "all", "hf"])
def test_topics_of_the_log_are_legal(topics):
    code = "import numpy, tessera; q = numpy.zeros((1, 1, 1, 1), 'f4'); tessera.attention(q, q, q)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=dict(os.environ, TESSERA_LOG=topics), check=False)
    assert done.returncode == 0 and ("tessera.dispatch: cpu runs " in done.stderr) == \
        (topics in ("dispatch,plan", "all"))


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_arrays_of_another_library_are_told_their_module(kind):
    other = pytest.importorskip(kind)
    ones = (other.ones if kind == "torch" else other.numpy.ones)((1, 4, 2, 8))
    noun = {"torch": "PyTorch tensor", "jax": "JAX array"}[kind]
    for operation, call in {"attention": lambda: tessera.attention(ones, ones, ones),
                            "explain": lambda: tessera.explain(ones, ones, ones),
                            "rotate": lambda: tessera.rotate(ones, *tessera.rope_table(8, 8))}.items():
        with pytest.raises(ValueError, match=rf"tessera\.{operation}: .*: must be a NumPy array; "
                                             rf"tessera\.{kind}\.{operation} takes {noun}s"):
            call()
    if kind == "torch":
        tt = pytest.importorskip("tessera.torch")
        with pytest.raises(ValueError,
                           match=r"q=ndarray: must be a PyTorch tensor; tessera\.attention takes NumPy arrays"):
            tt.attention(*[np.ones((1, 4, 2, 8))] * 3)
    with pytest.raises(ValueError, match="must be a NumPy array$"):
        tessera.attention([1.0], [1.0], [1.0])
