# SPDX-License-Identifier: Apache-2.0
"""An oracle of its own: attention and its gradients in NumPy fp64, written from docs/semantics.md
element by element, sharing no line with the library. Takes the keywords of tessera.attention."""

from __future__ import annotations

import numpy as np

_PERMUTE = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}


def canonical(x, layout):
    """A [b, s, h, d] view of an array in `layout`; packed arrays get a batch axis of extent 1."""
    return x[None] if layout == "thd" else x.transpose(_PERMUTE[layout])


def philox(key0, key1, c0, c1, c2, c3):
    """Seven rounds of Philox-4x32 on arrays of uint64 that hold 32-bit words."""
    mask = np.uint64(0xFFFFFFFF)
    key0, key1, c0, c1, c2, c3 = (np.asarray(w, np.uint64) & mask
                                  for w in (key0, key1, c0, c1, c2, c3))
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = ((b >> np.uint64(32)) ^ c1 ^ key0, b & mask,
                          (a >> np.uint64(32)) ^ c3 ^ key1, a & mask)
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & mask, (key1 + np.uint64(0xBB67AE85)) & mask
    return c0, c1, c2, c3


def threshold(p):
    return int(np.floor(p * 65536 + 0.5))


def dropout_keep(n, hq, i, j, p, rng_state):
    """keep[hq, len(i), len(j)] of sequence n."""
    seed, offset, *rest = (int(w) % 2**64 for w in rng_state)
    first, stride = rest or (0, hq)
    h, i, j = np.arange(hq)[:, None, None], np.asarray(i)[None, :, None], np.asarray(j)[None, None]
    row, column = i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2
    field = 4 * (i % 16 >= 8) + 2 * (j % 16 >= 8) + j % 2
    h, row, column, field = np.broadcast_arrays(h, row, column, field)
    words = philox(seed, (seed >> 32) ^ (offset >> 32), offset, (first + n * stride) % 2**32 + h, row, column)
    word = np.choose(field // 2, words)
    return ((word >> (16 * (field % 2)).astype(np.uint64)) & np.uint64(0xFFFF)) >= threshold(p)


class Oracle:
    """o, lse, max_logit in the layout of the call; backward() for the gradients."""

    def __init__(self, q, k, v, *, layout="bshd", softmax_scale=None, causal=False, window=None,
                 align=None, seqlens_q=None, seqlens_k=None, cu_seqlens_q=None, cu_seqlens_k=None,
                 cu_seqlens_q_padded=None, cu_seqlens_k_padded=None, max_seqlen_q=None,
                 max_seqlen_k=None, keep=None, drop=None, key_ranges=None, segment_ids=None,
                 bias=None, bias_at="post_scale", alibi_slopes=None, softcap=0.0, sink=None,
                 dropout_p=0.0, rng_state=None, page_table=None, q_start=None, k_start=None, **_):
        layout_q, layout_k = layout if isinstance(layout, tuple) else (layout, layout)
        if page_table is not None:
            layout_k = "bshd"
        self.layout_q, self.layout_k = layout_q, layout_k
        self.packed_q, self.packed_k = layout_q == "thd", layout_k == "thd"
        f8 = np.float64
        self.q = canonical(q, layout_q).astype(f8)
        self.k = canonical(k, layout_k).astype(f8)
        self.v = canonical(v, layout_k).astype(f8)
        self.hq, self.hk = self.q.shape[2], self.k.shape[2]
        self.scale = 1 / np.sqrt(self.q.shape[3]) if softmax_scale is None else float(softmax_scale)
        left, right = window if window is not None else (-1, -1)
        self.left, self.right = int(left), 0 if causal else int(right)
        self.align, self.starts = align, (q_start, k_start)
        self.lens = seqlens_q, seqlens_k
        self.cu = cu_seqlens_q, cu_seqlens_k
        self.stored = cu_seqlens_q_padded, cu_seqlens_k_padded
        self.mask = None
        if keep is not None or drop is not None:
            mask = np.asarray(keep) if keep is not None else ~np.asarray(drop)
            self.mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        self.ranges = None
        if key_ranges is not None:
            self.ranges = key_ranges[None] if self.packed_q else key_ranges
        self.segments = None
        if segment_ids is not None:
            pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
            self.segments = (pair[0][None] if self.packed_q else pair[0],
                             pair[1][None] if self.packed_k else pair[1])
        self.bias = self.bias_shape = None
        if bias is not None:
            self.bias_shape = bias.shape
            self.bias = bias.astype(f8).reshape((1,) * (4 - bias.ndim) + bias.shape)
        self.pre = bias_at == "pre_scale"
        self.slopes = self.slopes_shape = None
        if alibi_slopes is not None:
            self.slopes_shape = alibi_slopes.shape
            self.slopes = np.atleast_2d(alibi_slopes.astype(f8))
        self.cap = float(softcap or 0)
        self.sink = None
        if sink is not None:
            self.sink = np.zeros(self.hq) if isinstance(sink, str) else sink.astype(f8)
        self.dropout_p, self.rng_state = float(dropout_p or 0), rng_state
        self.pages = None
        if page_table is not None:
            self.pages = page_table if isinstance(page_table, tuple) else (page_table, page_table)
        if self.packed_q:
            self.batch = len(self.cu[0]) - 1
        elif self.packed_k:
            self.batch = len(self.cu[1]) - 1
        else:
            self.batch = self.q.shape[0]
        self._forward()

    # ---- one sequence ----

    def _side(self, n, side):
        """(length, batch indices, row indices) of a padded or packed side."""
        x, packed = (self.q, self.packed_q) if side == 0 else (self.k, self.packed_k)
        if packed:
            length = int(self.cu[side][n + 1]) - int(self.cu[side][n])
            stored = self.stored[side] if self.stored[side] is not None else self.cu[side]
            return length, np.zeros(length, int), int(stored[n]) + np.arange(length)
        length = x.shape[1] if self.lens[side] is None else int(self.lens[side][n])
        return length, np.full(length, n), np.arange(length)

    def _sequence(self, n):
        len_q, qb, qr = self._side(n, 0)
        if self.pages is None:
            len_k, kb, kr = self._side(n, 1)
            where_k = where_v = (kb, kr)
        else:
            len_k, size = int(self.lens[1][n]), self.k.shape[1]
            j = np.arange(len_k)
            where_k, where_v = ((table[n, j // size], j % size) for table in self.pages)
        i0, j0 = self._starts(n)
        shift = self._shift(n, i0 + len_q, j0 + len_k)
        i, j = i0 + np.arange(len_q)[:, None], j0 + np.arange(len_k)[None, :]
        visible = np.ones((self.hq, len_q, len_k), bool)
        if self.left >= 0:
            visible &= (j >= i + shift - self.left)[None]
        if self.right >= 0:
            visible &= (j <= i + shift + self.right)[None]
        if self.mask is not None:
            visible &= self._dense(self.mask, n, len_q, len_k)
        if self.ranges is not None:
            r = self.ranges
            b = 0 if r.shape[0] == 1 else n
            rows = np.zeros(len_q, int) if r.shape[2] == 1 else qr
            mine = r[b][:, rows].astype(np.int64)  # [h|1, len_q, 2|4]
            inside = np.zeros((mine.shape[0], len_q, len_k), bool)
            for c in range(0, mine.shape[2], 2):
                inside |= (j[None] >= mine[:, :, c, None]) & (j[None] < mine[:, :, c + 1, None])
            visible &= inside
        if self.segments is not None:
            sq = self.segments[0][qb, qr]
            kb, kr = (np.full(len_k, n), np.arange(len_k)) if self.pages is not None else where_k
            visible &= (sq[:, None] == self.segments[1][kb, kr][None, :])[None]
        return len_q, len_k, (qb, qr), where_k, where_v, np.abs(i + shift - j), visible

    def _starts(self, n):
        """The positions of the first query and the first key."""
        return tuple(0 if start is None else int(start[n]) for start in self.starts)

    def _shift(self, n, end_q, end_k):
        if self.align is None or isinstance(self.align, str):
            return end_k - end_q if self.align == "bottom_right" else 0
        return int(self.align if np.ndim(self.align) == 0 else self.align[n])

    def _planes(self, n):
        """Where dense tensors have the first query and the first key: packed, at their positions."""
        return tuple(start * packed for start, packed in zip(self._starts(n), (self.packed_q, self.packed_k)))

    def _dense(self, x, n, len_q, len_k):
        i0, j0 = self._planes(n)
        x = x[0 if x.shape[0] == 1 else n]
        x = x[:, :1] if x.shape[1] == 1 else x[:, i0:i0 + len_q]
        x = x[:, :, :1] if x.shape[2] == 1 else x[:, :, j0:j0 + len_k]
        return np.broadcast_to(x, (self.hq, len_q, len_k))

    def _scores(self, n):
        len_q, len_k, at_q, at_k, at_v, distance, visible = self._sequence(n)
        group = self.hq // self.hk
        q = self.q[at_q].transpose(1, 0, 2)                       # [hq, len_q, dqk]
        k = np.repeat(self.k[at_k].transpose(1, 0, 2), group, 0)  # [hq, len_k, dqk]
        v = np.repeat(self.v[at_v].transpose(1, 0, 2), group, 0)
        bias = np.zeros((self.hq, len_q, len_k))
        if self.bias is not None:
            bias = self._dense(self.bias, n, len_q, len_k)
            visible = visible & (bias > -np.inf)
            bias = np.where(visible, bias, 0.0)
        with np.errstate(invalid="ignore", over="ignore"):
            s = np.einsum("hid,hjd->hij", q, k)
        x = self.scale * (s + (bias if self.pre else 0))
        slope_of_cap = np.ones_like(x)
        if self.cap > 0:
            t = np.tanh(x / self.cap)
            x, slope_of_cap = self.cap * t, 1 - t * t
        if not self.pre:
            x = x + bias
        if self.slopes is not None:
            slopes = self.slopes[0 if self.slopes.shape[0] == 1 else n]
            x = x - slopes[:, None, None] * distance
        x = np.where(visible, x, -np.inf)
        drop = np.ones_like(x)
        if self.dropout_p > 0:
            t = threshold(self.dropout_p)
            i0, j0 = self._starts(n)
            kept = dropout_keep(n, self.hq, i0 + np.arange(len_q), j0 + np.arange(len_k), self.dropout_p,
                                self.rng_state)
            drop = kept * (65536 / (65536 - t))
        m = np.max(x, axis=2, initial=-np.inf)
        if self.sink is not None:
            m = np.maximum(m, self.sink[:, None])
        safe = np.where(m == -np.inf, 0, m)
        e = np.where(visible, np.exp(x - safe[:, :, None]), 0)
        l = e.sum(2)
        if self.sink is not None:
            l = l + np.exp(self.sink[:, None] - safe)
        with np.errstate(divide="ignore"):
            lse = np.where(l > 0, safe + np.log(np.where(l > 0, l, 1)), -np.inf)
        p = e / np.where(l > 0, l, 1)[:, :, None]
        return dict(len_q=len_q, len_k=len_k, at_q=at_q, at_k=at_k, at_v=at_v, q=q, k=k, v=v, x=x,
                    p=p, drop=drop, lse=lse, visible=visible, bias=bias, distance=distance,
                    slope_of_cap=slope_of_cap)

    # ---- results ----

    def _forward(self):
        b, s, _, _ = self.q.shape
        o = np.zeros((b, s, self.hq, self.v.shape[3]))
        lse = np.full((b, self.hq, s), -np.inf)
        self.max_logit = np.full(self.hq, -np.inf)
        self.score_size = self.value_size = 0.0  # largest sum of absolute terms of x, and |v|
        for n in range(self.batch):
            w = self._scores(n)
            qb, qr = w["at_q"]
            o[qb, qr] = np.einsum("hij,hjd->ihd", w["p"] * w["drop"], w["v"])
            lse[qb, :, qr] = w["lse"].T
            if w["x"].size:
                terms = self.scale * np.einsum("hid,hjd->hij", np.abs(w["q"]), np.abs(w["k"]))
                terms = terms + np.abs(w["bias"]) * (self.scale if self.pre else 1)
                if self.slopes is not None:
                    terms = terms + np.abs(self.slopes).max() * w["distance"]
                self.score_size = max(self.score_size, np.max(terms))
                self.value_size = max(self.value_size, np.max(np.abs(w["v"]) * w["drop"].max()))
                self.max_logit = np.maximum(self.max_logit, w["x"].max(axis=(1, 2)))
        self.o, self.lse = self._back(o, self.layout_q), lse[0] if self.packed_q else lse

    def backward(self, do, dlse=None, union=None):
        """Gradients by name, in the layout of the inputs. self.size[name] is the largest sum of
        absolute terms of each, which rounding errors are measured against. union: (o, lse) of a union
        of keys of which these are a part, shaped like those of the call."""
        if union is not None:
            union = (canonical(np.asarray(union[0], np.float64), self.layout_q),
                     np.asarray(union[1], np.float64)[(None,) * self.packed_q])
        do = canonical(do, self.layout_q).astype(np.float64)
        self.size = dict.fromkeys(("dq", "dk", "dv", "dbias", "dsink", "dalibi_slopes"), 0.0)
        if dlse is not None:
            dlse = dlse[None] if self.packed_q else dlse
        dq, dk, dv = np.zeros_like(self.q), np.zeros_like(self.k), np.zeros_like(self.v)
        dbias = np.zeros_like(self.bias) if self.bias is not None else None
        dslopes = np.zeros_like(self.slopes) if self.slopes is not None else None
        dsink = np.zeros(self.hq)
        group = self.hq // self.hk
        for n in range(self.batch):
            w = self._scores(n)
            qb, qr = w["at_q"]
            p, g = w["p"], do[qb, qr].transpose(1, 0, 2)  # [hq, len_q, dv]
            dp = np.einsum("hid,hjd->hij", g, w["v"]) * w["drop"]
            delta = (p * dp).sum(2)
            if union is not None:
                w["lse"] = union[1][qb, :, qr].T
                seen = w["visible"] & (w["lse"] > -np.inf)[:, :, None]
                p = w["p"] = np.where(seen, np.exp(np.where(seen, w["x"] - w["lse"][:, :, None], 0)), 0)
                delta = (g * union[0][qb, qr].transpose(1, 0, 2)).sum(2)
            row = -delta
            if dlse is not None:
                row = row + np.where(w["lse"] > -np.inf, dlse[qb, :, qr].T, 0)
            dx = np.where(w["visible"], p * (dp + row[:, :, None]), 0)
            self._measure(w, p, g, row)
            if self.sink is not None:
                dsink += (np.exp(self.sink[:, None] - w["lse"]) * row).sum(1)
            if dslopes is not None:
                per_head = -(dx * w["distance"]).sum((1, 2))
                dslopes[0 if dslopes.shape[0] == 1 else n] += per_head
            ds = dx * w["slope_of_cap"] * self.scale
            if dbias is not None:
                self._add_dense(dbias, ds if self.pre else dx, n)
            dq[qb, qr] = np.einsum("hij,hjd->ihd", ds, w["k"])
            dk_n = np.einsum("hij,hid->jhd", ds, w["q"])
            dv_n = np.einsum("hij,hid->jhd", p * w["drop"], g)
            sum_group = lambda x: x.reshape(x.shape[0], self.hk, group, x.shape[2]).sum(2)
            np.add.at(dk, w["at_k"], sum_group(dk_n))
            np.add.at(dv, w["at_v"], sum_group(dv_n))
        result = {"dq": self._back(dq, self.layout_q), "dk": self._back(dk, self.layout_k),
                  "dv": self._back(dv, self.layout_k)}
        if dbias is not None:
            result["dbias"] = dbias.reshape(self.bias_shape)
        if self.sink is not None:
            result["dsink"] = dsink
        if dslopes is not None:
            result["dalibi_slopes"] = dslopes.reshape(self.slopes_shape)
        return result

    def _measure(self, w, p, g, row):
        dp = np.einsum("hid,hjd->hij", np.abs(g), np.abs(w["v"])) * w["drop"]
        dx = p * (dp + np.abs(row)[:, :, None] + (p * dp).sum(2)[:, :, None])
        ds = dx * w["slope_of_cap"] * self.scale
        terms = {"dq": np.einsum("hij,hjd->hid", ds, np.abs(w["k"])),
                 "dk": np.einsum("hij,hid->jd", ds, np.abs(w["q"])),
                 "dv": np.einsum("hij,hid->jd", p * w["drop"], np.abs(g)),
                 "dbias": np.sum(ds if self.pre else dx) if self.bias is not None else np.zeros(1),
                 "dsink": np.abs(row) + (p * dp).sum(2),
                 "dalibi_slopes": (dx * w["distance"]).sum((1, 2))}
        for name, x in terms.items():
            self.size[name] += np.max(np.abs(x), initial=0.0)

    def _add_dense(self, target, x, n):
        """Adds x[hq, len_q, len_k] into a broadcast [b|1, hq|1, sq|1, sk|1]."""
        for axis in range(1, 4):
            if target.shape[axis] == 1:
                x = x.sum(axis - 1, keepdims=True)
        i0, j0 = (0 if extent == 1 else at for at, extent in zip(self._planes(n), target.shape[2:]))
        target[0 if target.shape[0] == 1 else n, :, i0:i0 + x.shape[1], j0:j0 + x.shape[2]] += x

    @staticmethod
    def _back(x, layout):
        return x[0] if layout == "thd" else x.transpose(np.argsort(_PERMUTE[layout]))
