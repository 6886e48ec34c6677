# SPDX-License-Identifier: Apache-2.0
"""How much a problem asks for: visible scores, useful floating-point operations, bytes."""

from __future__ import annotations

import numpy as np

_ROWS_AT_A_TIME = 512
DATA_MASKS = ("keep", "drop", "key_ranges", "segment_ids")


def visible_scores(q, k, v, kw: dict) -> int:
    """Pairs (query, key) that lengths, band and masks leave, summed over sequences and heads."""
    layout = kw.get("layout", "bshd")
    layout_q, layout_k = layout if isinstance(layout, tuple) else (layout, layout)
    pages = kw.get("page_table")
    hq = q.shape[{"bshd": 2, "sbhd": 2, "bhsd": 1, "thd": 1}[layout_q]]
    sides = [_lengths(q, layout_q, kw, "q"), _lengths(k, layout_k, kw, "k", pages)]
    batch = max(len(side) for side in sides if side is not None)
    total = 0
    for n in range(batch):
        total += _of_sequence(n, int(sides[0][n]), int(sides[1][n]), hq, kw, layout_q, layout_k)
    return total


def _lengths(x, layout, kw, name, pages=None):
    if pages is not None:
        return np.asarray(kw["seqlens_k"])
    if layout == "thd":
        return np.diff(kw[f"cu_seqlens_{name}"])
    if kw.get(f"seqlens_{name}") is not None:
        return np.asarray(kw[f"seqlens_{name}"])
    batch, extent = {"bshd": (0, 1), "sbhd": (1, 0), "bhsd": (0, 2)}[layout]
    return np.full(x.shape[batch], x.shape[extent])


def visible(n, q, k, kw) -> np.ndarray:
    """[hq|1, rows, sk] of sequence n of a padded batch, True = visible."""
    layout = kw.get("layout", "bshd")
    layout_q, layout_k = layout if isinstance(layout, tuple) else (layout, layout)
    axis = {"bshd": 1, "sbhd": 0, "bhsd": 2}
    len_q = int(_lengths(q, layout_q, kw, "q")[n])
    len_k = int(_lengths(k, layout_k, kw, "k")[n])
    sq, sk = q.shape[axis[layout_q]], k.shape[axis[layout_k]]
    seen = _visible_rows(n, slice(0, len_q), len_q, len_k, kw, layout_q, layout_k)
    whole = np.zeros((seen.shape[0], sq, sk), bool)
    whole[:, :len_q, :len_k] = seen
    return whole


def _of_sequence(n, len_q, len_k, hq, kw, layout_q, layout_k) -> int:
    if not any(kw.get(name) is not None for name in DATA_MASKS):
        low, high = _band(n, np.arange(len_q), len_q, len_k, kw)
        return hq * int(np.maximum(high - low, 0).sum())
    total = 0
    for first in range(0, len_q, _ROWS_AT_A_TIME):
        rows = slice(first, min(first + _ROWS_AT_A_TIME, len_q))
        seen = _visible_rows(n, rows, len_q, len_k, kw, layout_q, layout_k)
        total += int(np.count_nonzero(seen)) * (hq // seen.shape[0])
    return total


def _start(kw, name, n) -> int:
    """The position of a side's first row."""
    starts = kw.get(f"{name}_start")
    return 0 if starts is None else int(starts[n])


def _band(n, i, len_q, len_k, kw):
    """Half-open interval of keys of each query of sequence n by position alone, both counted from the
    first that is there."""
    align = kw.get("align")
    shift = len_k - len_q  # of rows and keys as they lie: of positions less the difference of starts
    if not isinstance(align, str) or align != "bottom_right":
        diagonal = 0 if align is None or isinstance(align, str) else align if np.ndim(align) == 0 else align[n]
        shift = int(diagonal) + _start(kw, "q", n) - _start(kw, "k", n)
    left, right = kw.get("window") or (-1, -1)
    right = 0 if kw.get("causal") else right
    low = np.clip(i + shift - left, 0, len_k) if left >= 0 else np.zeros_like(i)
    high = np.clip(i + shift + right + 1, 0, len_k) if right >= 0 else np.full_like(i, len_k)
    return low, high


def _visible_rows(n, rows, len_q, len_k, kw, layout_q, layout_k):
    low, high = _band(n, np.arange(rows.start, rows.stop), len_q, len_k, kw)
    j = np.arange(len_k)
    seen = ((j >= low[:, None]) & (j < high[:, None]))[None]
    for name in DATA_MASKS:
        if kw.get(name) is not None:
            seen = seen & _data_mask(name, kw, n, rows, len_k, layout_q, layout_k)
    return seen


def _data_mask(name, kw, n, rows, len_k, layout_q, layout_k):
    """[hq|1, rows|1, len_k|1] of one mask."""
    x = kw[name]
    first_q = _stored(kw, "q", n) if layout_q == "thd" else 0
    stored = slice(first_q + rows.start, first_q + rows.stop)
    if name == "segment_ids":
        q_ids, k_ids = x if isinstance(x, tuple) else (x, x)
        q_ids = q_ids[stored] if layout_q == "thd" else q_ids[n, rows]
        first_k = _stored(kw, "k", n) if k_ids.ndim == 1 else 0
        k_ids = k_ids[first_k:first_k + len_k] if k_ids.ndim == 1 else k_ids[n, :len_k]
        return (q_ids[:, None] == k_ids[None, :])[None]
    if name == "key_ranges":
        x = x if layout_q == "thd" else x[0 if x.shape[0] == 1 else n]
        x = x if x.shape[1] == 1 else x[:, stored]
        j = np.arange(len_k) + _start(kw, "k", n)
        inside = (j >= x[..., 0, None]) & (j < x[..., 1, None])
        if x.shape[-1] == 4:
            inside |= (j >= x[..., 2, None]) & (j < x[..., 3, None])
        return inside
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    x = x[0 if x.shape[0] == 1 else n]
    i0 = rows.start + (_start(kw, "q", n) if layout_q == "thd" else 0)  # packed masks go by position
    j0 = _start(kw, "k", n) if layout_k == "thd" else 0
    x = x if x.shape[1] == 1 else x[:, i0:i0 + rows.stop - rows.start]
    x = x if x.shape[2] == 1 else x[:, :, j0:j0 + len_k]
    return ~x if name == "drop" else x


def _stored(kw, name, n) -> int:
    offsets = kw.get(f"cu_seqlens_{name}_padded")
    return int((kw[f"cu_seqlens_{name}"] if offsets is None else offsets)[n])


def flops(scores: int, dqk: int, dv: int, backward: bool) -> int:
    """Operations of the matrix products alone: 2 forward, 5 backward (S, dP, dQ, dK; dV)."""
    return 2 * scores * ((3 * dqk + 2 * dv) if backward else (dqk + dv))


def bytes_touched(arrays) -> int:
    """Each input and output once, at the size of its elements."""
    return sum(x.size * x.itemsize for x in arrays if x is not None)


def lies_in(v, k) -> bool:
    """True if v is the first columns of k, as in an MLA cache: one read serves both."""
    return v.ctypes.data == k.ctypes.data and v.strides == k.strides and v.dtype == k.dtype and v.size > 0


def read_once(q, k, v) -> list:
    """Those of the three arrays that a forward pass reads: without v where it lies in k."""
    return [q, k] if lies_in(v, k) else [q, k, v]
