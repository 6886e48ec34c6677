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
    drawing = _Drawing(draw, dtypes)
    drawing.sides()
    if drawing.paged:
        drawing.pages()
    drawing.tensors()
    drawing.band()
    drawing.masks()
    drawing.bias()
    drawing.score(dropout)
    return drawing.done()


class _Drawing:
    """A problem on its way: each method draws a part of it, most of them into the keywords kw."""

    def __init__(self, draw, dtypes):
        self._draw = draw
        pick = self.pick
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.dtype = pick(*dtypes)
        self.element = DTYPES[self.dtype]
        layouts = ("bshd", "sbhd", "bhsd", "thd")
        layout_q = pick(*layouts)
        self.layouts = (layout_q, pick(layout_q, layout_q, layout_q, *layouts))
        self.paged = pick(False, False, False, False, True)
        self.b, self.hk = pick(2, 1, 3, 0), pick(1, 2, 3)
        self.hq = self.hk * pick(1, 2, 4)
        self.dqk = pick(8, 1, 16, 24, 33, 64, 72)
        self.dv = pick(self.dqk, self.dqk, 1, 12, 40, 64)
        sq, sk = draw(st.integers(0, 70)), draw(st.integers(0, 140))
        self.s = (sq, sq if pick(False, True) else sk)
        self.integer = pick(np.int32, np.int64)
        self.kw = {"layout": layout_q if layout_q == self.layouts[1] else self.layouts}
        self.clean = {}
        self.starts = [self._start(side) for side in "qk"]
        # What each side is: packed, padded or paged; rows as stored; the lengths of its sequences, or None.
        self.kinds, self.extents, self.lens = [], [], []
        self.same_lens = False  # one array for both sides

    def pick(self, *options):
        return self._draw(st.sampled_from(options))

    def _start(self, side):
        """Positions [b] at which a side's sequences begin: 0 unless they are given."""
        most = self.pick(0, 0, 0, 20, 100)
        start = self.rng.integers(0, most + 1, self.b) * self.pick(1, 16)
        if most:
            self.kw[f"{side}_start"] = start.astype(self.pick(np.int32, np.int64))
        return start * bool(most)

    def bound(self, side):
        """What no position of a packed side reaches."""
        return int(max(self.starts[side] + self.lens[side], default=0))

    def sides(self):
        for side, (layout, s) in enumerate(zip(self.layouts, self.s)):
            if side == 1 and self.paged:
                kind, extent, n = "paged", s, None
            elif layout == "thd":
                kind, extent, n = "packed", *self._packed(side, s)
            else:
                kind, extent, n = "padded", s, self._padded(side, s)
            self.kinds.append(kind)
            self.extents.append(extent)
            self.lens.append(n)

    def _packed(self, side, s):
        """Rows that are stored, and lengths."""
        kw, name = self.kw, "qk"[side]
        n = _lengths(self.rng, self.b, s, self.integer)
        if side == 1 and self.layouts[0] == "thd" and self.s[0] == s and self.pick(False, True):
            self.same_lens, n = True, self.lens[0]
        cu = np.concatenate([[0], np.cumsum(n)]).astype(self.integer)
        kw[f"cu_seqlens_{name}"] = kw["cu_seqlens_q"] if self.same_lens else cu
        t = int(cu[-1])
        if self.pick(False, True):
            stored = cu + np.cumsum(self.rng.integers(0, 4, self.b + 1))
            kw[f"cu_seqlens_{name}_padded"] = stored.astype(self.integer)
            t = int(stored[-1]) + int(self.rng.integers(0, 3))
        if self.pick(False, True):
            kw[f"max_seqlen_{name}"] = int(max(self.starts[side] + n, default=0)) + self.pick(0, 0, 3)
        return t, n

    def _padded(self, side, s):
        """Lengths, or None for sequences as long as the extent."""
        if not self.pick(False, True):
            return None
        n = _lengths(self.rng, self.b, s, self.integer)
        if side == 1 and self.kinds[0] == "padded" and self.lens[0] is not None and \
                self.s[0] == s and self.pick(False, True):
            self.same_lens, n = True, self.lens[0]
        self.kw[f"seqlens_{'qk'[side]}"] = self.kw["seqlens_q"] if self.same_lens else n
        return n

    def pages(self):
        size, per = self.pick(4, 1, 16), self.pick(1, 2, 5)
        self.pools = (per * max(self.b, 1) + self.pick(0, 3), per * max(self.b, 1) + 1)
        self.lens[1] = self.kw["seqlens_k"] = _lengths(self.rng, self.b, per * size, self.integer)
        tables = [self.rng.permutation(min(self.pools))[:per * self.b].reshape(self.b, per)
                  .astype(np.int32) for _ in range(2)]
        self.kw["page_table"] = tuple(tables) if self.pick(False, True) else tables[0]
        self.page_size, self.extents[1] = size, per * size

    def tensors(self):
        if self.paged:
            stored = [(pages, self.page_size, self.hk) for pages in self.pools]
            k_shape, v_shape = (*stored[0], self.dqk), (*stored[1], self.dv)
        else:
            k_shape, v_shape = (_shape(self.b, self.extents[1], self.hk, d, self.layouts[1])
                                for d in (self.dqk, self.dv))
        q_shape = _shape(self.b, self.extents[0], self.hq, self.dqk, self.layouts[0])
        for name, shape in zip("qkv", (q_shape, k_shape, v_shape)):
            self.clean[name] = self.rng.standard_normal(shape).astype(self.element)

    def band(self):
        kw, pick = self.kw, self.pick
        if pick(False, True):
            kw["causal"] = True
        if pick(False, False, True):
            right = pick(-1, 0) if kw.get("causal") else pick(-1, 0, 3, 2**62)
            kw["window"] = (pick(-1, 0, 5, 20), right)
        if pick(False, False, False, True):
            shape = pick((self.hq,), (self.b, self.hq), (1, self.hq))
            kw["alibi_slopes"] = self.rng.uniform(-0.1, 0.6, shape) \
                .astype(pick(np.float32, self.element))
        window = kw.get("window", (-1, -1))
        band = kw.get("causal") or window != (-1, -1) or "alibi_slopes" in kw
        starts = any(f"{side}_start" in kw for side in "qk")
        equal = not starts and (self.same_lens or (self.kinds == ["padded", "padded"] and self.s[0] == self.s[1] and
                                   all(n is None for n in self.lens)))
        if (band and not equal) or pick(False, False, True):
            far = int(self.rng.integers(-60, 100))
            each = self.rng.integers(-60, 100, self.b).astype(self.integer)
            kw["align"] = pick("top_left", "bottom_right", "top_left", "bottom_right", far, each)

    def _dense_shape(self):
        """A mask's or a bias's: extents by position, for which thd needs max_seqlen."""
        dims = []
        for full, side in ((self.b, None), (self.hq, None), (self.extents[0], 0), (self.extents[1], 1)):
            broadcast = self.pick(False, False, True)
            if not broadcast and side is not None and self.kinds[side] == "packed":
                full = self.kw.setdefault(f"max_seqlen_{'qk'[side]}", self.bound(side))
            dims.append(1 if broadcast else full)
        while len(dims) > 1 and dims[0] == 1 and self.pick(False, True):
            dims = dims[1:]
        return tuple(dims)

    def masks(self):
        kw, pick, rng, packed_q = self.kw, self.pick, self.rng, self.layouts[0] == "thd"
        mask = pick(None, None, None, "keep", "drop", "ranges", "two")
        if mask in ("keep", "drop"):
            kw[mask] = rng.random(self._dense_shape()) < 0.6
        elif mask:
            shape = (pick(self.hq, 1), pick(self.extents[0], 1), 2 if mask == "ranges" else 4)
            if not packed_q:
                shape = (pick(self.b, 1),) + shape
            kw["key_ranges"] = rng.integers(-3, self.extents[1] + 5, shape).astype(np.int32)
        if pick(False, False, False, True):
            shapes = [(self.extents[0],) if packed_q else (self.b, self.extents[0]),
                      (self.extents[1],) if self.kinds[1] == "packed" else (self.b, self.extents[1])]
            ids = tuple(rng.integers(-1, 2, s).astype(np.int32) for s in shapes)
            kw["segment_ids"] = ids[0] if shapes[0] == shapes[1] and pick(False, True) else ids

    def bias(self):
        if not self.pick(False, False, True):
            return
        bias = self.rng.standard_normal(self._dense_shape()) \
            .astype(self.pick(np.float32, self.element))
        if self.pick(False, False, True):
            bias[self.rng.random(bias.shape) < 0.1] = -np.inf
        self.clean["bias"] = bias
        self.kw["bias_at"] = self.pick("post_scale", "pre_scale")

    def score(self, dropout):
        kw, pick, rng = self.kw, self.pick, self.rng
        if pick(False, False, True):
            kw["softmax_scale"] = pick(0.0, 0.25, 1.0, np.float32(0.5), 1)
        if pick(False, False, False, True):
            kw["softcap"] = pick(0, 2.0, 30)
        sink = pick(None, None, None, "off_by_one", "learnable")
        if sink:
            kw["sink"] = rng.standard_normal(self.hq).astype(pick(np.float32, self.element)) \
                if sink == "learnable" else sink
        if dropout and pick(False, False, False, True):
            kw["dropout_p"] = pick(0.5, 0.1, 0.9)
            state = [int(rng.integers(-2**62, 2**62)), int(rng.integers(0, 2**40))]
            if pick(False, False, True):
                state += [int(rng.integers(0, 2**40)), int(rng.integers(0, 2**33))]
            kw["rng_state"] = pick(state, tuple(state), np.array(state, np.int64))

    def done(self):
        ends = [None if n is None else (start if kind == "packed" else 0) + n
                for start, n, kind in zip(self.starts, self.lens, self.kinds)]
        poisoned = _poison(self.clean, self.kw, self.kinds, self.extents, self.lens, self.b, ends)
        if "bias" in poisoned:
            self.kw["bias"] = poisoned.pop("bias")
        if self.pick(False, False, True):
            poisoned = {name: strided(x) for name, x in poisoned.items()}
        return Drawn(**poisoned, keywords=self.kw, clean=self.clean, dtype=self.dtype)


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


def _poison(clean, kw, sides, extents, lens, b, ends):
    """Copies of q, k, v (and bias) with NaN wherever the problem does not reach; `ends` are where dense
    tensors end for each sequence of a side."""
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
                longest = int(max(ends[side], default=0))
                four[(slice(None),) * axis + (slice(longest, None),)] = np.nan
    return poisoned
