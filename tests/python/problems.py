# SPDX-License-Identifier: Apache-2.0
"""Random legal problems, drawn by hypothesis, with NaN in every byte outside the problem."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import oracle

DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16),
          "fp16": np.dtype(np.float16)}


class Drawn:
    """q, k, v and keywords are poisoned; clean holds q, k, v and bias without poison."""

    def __init__(self, q, k, v, keywords, clean, dtype):
        self.q, self.k, self.v = q, k, v
        self.keywords, self.clean, self.dtype = keywords, clean, dtype

    def oracle(self):
        keywords = dict(self.keywords)
        keywords.update({name: x for name, x in self.clean.items() if name not in "qkv"})
        return oracle.Oracle(self.clean["q"], self.clean["k"], self.clean["v"], **keywords)

    def __repr__(self):  # what hypothesis prints for a failing example
        def show(x):
            if isinstance(x, tuple):
                return "(" + ", ".join(map(show, x)) + ")"
            if not isinstance(x, np.ndarray):
                return repr(x)
            return f"{x.dtype}{list(x.shape)}" + (f"={x.tolist()}" if x.size <= 8 else "")
        parts = [f"q={show(self.q)} k={show(self.k)} v={show(self.v)}"]
        return " ".join(parts + [f"{name}={show(x)}" for name, x in self.keywords.items()])


def _shape(b, s, h, d, layout):
    return {"bshd": (b, s, h, d), "sbhd": (s, b, h, d), "bhsd": (b, h, s, d),
            "thd": (s, h, d)}[layout]


def _lengths(rng, b, s, dtype):
    return rng.integers(0, s + 1, b).astype(dtype)


@st.composite
def problems(draw, dtypes=("fp32", "fp32", "bf16", "fp16"), dropout=True):
    pick = lambda *options: draw(st.sampled_from(options))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = pick(*dtypes)
    element = DTYPES[dtype]
    layouts = ("bshd", "sbhd", "bhsd", "thd")
    layout_q = pick(*layouts)
    layout_k = pick(layout_q, layout_q, layout_q, *layouts)
    paged = pick(False, False, False, False, True)
    b, hk = pick(2, 1, 3, 0), pick(1, 2, 3)
    hq = hk * pick(1, 2, 4)
    dqk = pick(8, 1, 16, 24, 33, 64, 72)
    dv = pick(dqk, dqk, 1, 12, 40, 64)
    sq, sk = draw(st.integers(0, 70)), draw(st.integers(0, 140))
    if pick(False, True):
        sk = sq
    integer = pick(np.int32, np.int64)
    kw = {"layout": layout_q if layout_q == layout_k else (layout_q, layout_k)}

    # lengths, and where each side's valid rows are: rows[side] = list of index tuples
    sides, extents, lens = [], [], []
    same = False
    for side, (layout, s) in enumerate(((layout_q, sq), (layout_k, sk))):
        name = "qk"[side]
        if side == 1 and paged:
            sides.append("paged")
            lens.append(None)
            extents.append(s)
        elif layout == "thd":
            n = _lengths(rng, b, s, integer)
            if side == 1 and layout_q == "thd" and sq == sk and pick(False, True):
                same, n = True, lens[0]
            cu = np.concatenate([[0], np.cumsum(n)]).astype(integer)
            kw[f"cu_seqlens_{name}"] = kw["cu_seqlens_q"] if same else cu
            t = int(cu[-1])
            if pick(False, True):
                gaps = rng.integers(0, 4, b + 1)
                stored = cu + np.cumsum(gaps)
                kw[f"cu_seqlens_{name}_padded"] = stored.astype(integer)
                t = int(stored[-1]) + int(rng.integers(0, 3))
            if pick(False, True):
                kw[f"max_seqlen_{name}"] = int(max(n, default=0)) + pick(0, 0, 3)
            sides.append("packed")
            lens.append(n)
            extents.append(t)
        else:
            n = None
            if pick(False, True):
                n = _lengths(rng, b, s, integer)
                if side == 1 and sides[0] == "padded" and lens[0] is not None and sq == sk and \
                        pick(False, True):
                    same, n = True, lens[0]
                kw[f"seqlens_{name}"] = kw["seqlens_q"] if same else n
            sides.append("padded")
            lens.append(n)
            extents.append(s)

    if paged:
        size, per = pick(4, 1, 16), pick(1, 2, 5)
        pools = (per * max(b, 1) + pick(0, 3), per * max(b, 1) + 1)
        lens[1] = _lengths(rng, b, per * size, integer)
        kw["seqlens_k"] = lens[1]
        tables = [rng.permutation(min(pools))[:per * b].reshape(b, per).astype(np.int32)
                  for _ in range(2)]
        kw["page_table"] = tuple(tables) if pick(False, True) else tables[0]
        extents[1] = per * size
        k_shape, v_shape = (pools[0], size, hk, dqk), (pools[1], size, hk, dv)
    else:
        k_shape = _shape(b, extents[1], hk, dqk, layout_k)
        v_shape = _shape(b, extents[1], hk, dv, layout_k)
    q_shape = _shape(b, extents[0], hq, dqk, layout_q)
    q, k, v = (rng.standard_normal(s).astype(element) for s in (q_shape, k_shape, v_shape))

    # band
    if pick(False, True):
        kw["causal"] = True
    if pick(False, False, True):
        right = pick(-1, 0) if kw.get("causal") else pick(-1, 0, 3, 2**62)
        kw["window"] = (pick(-1, 0, 5, 20), right)
    if pick(False, False, False, True):
        kw["alibi_slopes"] = rng.uniform(-0.1, 0.6, pick((hq,), (b, hq), (1, hq))) \
            .astype(pick(np.float32, element))
    window = kw.get("window", (-1, -1))
    band = kw.get("causal") or window != (-1, -1) or "alibi_slopes" in kw
    equal = same or (sides == ["padded", "padded"] and lens[0] is None and lens[1] is None and
                     sq == sk)
    if (band and not equal) or pick(False, False, True):
        kw["align"] = pick("top_left", "bottom_right")

    # masks and bias: extents by position, of which thd needs max_seqlen
    def dense_shape():
        dims = []
        for full, side in ((b, None), (hq, None), (extents[0], 0), (extents[1], 1)):
            broadcast = pick(False, False, True)
            if not broadcast and side is not None and sides[side] == "packed":
                name = f"max_seqlen_{'qk'[side]}"
                kw.setdefault(name, int(max(lens[side], default=0)))
                full = kw[name]
            dims.append(1 if broadcast else full)
        while len(dims) > 1 and dims[0] == 1 and pick(False, True):
            dims = dims[1:]
        return tuple(dims)

    mask = pick(None, None, None, "keep", "drop", "ranges", "two")
    if mask in ("keep", "drop"):
        kw[mask] = rng.random(dense_shape()) < 0.6
    elif mask:
        shape = (pick(hq, 1), pick(extents[0], 1), 2 if mask == "ranges" else 4)
        if layout_q != "thd":
            shape = (pick(b, 1),) + shape
        kw["key_ranges"] = rng.integers(-3, extents[1] + 5, shape).astype(np.int32)
    if pick(False, False, False, True):
        shapes = [(extents[0],) if layout_q == "thd" else (b, extents[0]),
                  (extents[1],) if sides[1] == "packed" else (b, extents[1])]
        ids = tuple(rng.integers(-1, 2, s).astype(np.int32) for s in shapes)
        kw["segment_ids"] = ids[0] if shapes[0] == shapes[1] and pick(False, True) else ids
    if pick(False, False, True):
        bias = rng.standard_normal(dense_shape()).astype(pick(np.float32, element))
        if pick(False, False, True):
            bias[rng.random(bias.shape) < 0.1] = -np.inf
        kw["bias"] = bias
        kw["bias_at"] = pick("post_scale", "pre_scale")

    # score
    if pick(False, False, True):
        kw["softmax_scale"] = pick(0.0, 0.25, 1.0, np.float32(0.5), 1)
    if pick(False, False, False, True):
        kw["softcap"] = pick(0, 2.0, 30)
    sink = pick(None, None, None, "off_by_one", "learnable")
    if sink:
        kw["sink"] = rng.standard_normal(hq).astype(pick(np.float32, element)) \
            if sink == "learnable" else sink
    if dropout and pick(False, False, False, True):
        kw["dropout_p"] = pick(0.5, 0.1, 0.9)
        state = [int(rng.integers(-2**62, 2**62)), int(rng.integers(0, 2**40))]
        kw["rng_state"] = pick(state, tuple(state), np.array(state, np.int64))

    clean = {"q": q, "k": k, "v": v}
    if "bias" in kw:
        clean["bias"] = kw["bias"]
    poisoned = _poison(clean, kw, sides, extents, lens, b)
    if "bias" in kw:
        kw["bias"] = poisoned.pop("bias")
    if pick(False, False, True):
        poisoned = {name: strided(x) for name, x in poisoned.items()}
    return Drawn(**poisoned, keywords=kw, clean=clean, dtype=dtype)


def strided(x):
    """The same values with slack between the rows, NaN in the slack."""
    wide = np.full(x.shape[:-1] + (x.shape[-1] + 3,), np.nan, x.dtype)
    wide[..., :x.shape[-1]] = x
    return wide[..., :x.shape[-1]]


def valid_rows(kw, side, kind, extent, lens, n):
    """Storage rows of sequence n on a padded or packed side."""
    name = "qk"[side]
    if kind == "packed":
        stored = kw.get(f"cu_seqlens_{name}_padded", kw[f"cu_seqlens_{name}"])
        return int(stored[n]) + np.arange(int(lens[n]))
    return np.arange(extent if lens is None else int(lens[n]))


def _poison(clean, kw, sides, extents, lens, b):
    """Copies of q, k, v (and bias) with NaN wherever the problem does not reach."""
    poisoned = {}
    layouts = kw["layout"] if isinstance(kw["layout"], tuple) else (kw["layout"],) * 2
    for name, side in (("q", 0), ("k", 1), ("v", 1)):
        x = np.full_like(clean[name], np.nan)
        if sides[side] == "paged":
            table = kw["page_table"]
            table = table[name == "v"] if isinstance(table, tuple) else table
            size = x.shape[1]
            for n in range(b):
                j = np.arange(int(lens[1][n]))
                x[table[n, j // size], j % size] = clean[name][table[n, j // size], j % size]
        else:
            target, source = (oracle.canonical(y, layouts[side]) for y in (x, clean[name]))
            for n in range(b):
                rows = valid_rows(kw, side, sides[side], extents[side], lens[side], n)
                batch = 0 if sides[side] == "packed" else n
                target[batch, rows] = source[batch, rows]
        poisoned[name] = x
    if "bias" in clean:
        poisoned["bias"] = clean["bias"].copy()
        four = poisoned["bias"].reshape((1,) * (4 - clean["bias"].ndim) + clean["bias"].shape)
        for axis, side in ((2, 0), (3, 1)):  # past the longest length nothing is read
            if four.shape[axis] != 1 and lens[side] is not None:
                longest = int(max(lens[side], default=0))
                four[(slice(None),) * axis + (slice(longest, None),)] = np.nan
    return poisoned
