# SPDX-License-Identifier: Apache-2.0
"""What a peer is given, what it raises instead of a function, and what peers without our keywords take instead."""

from __future__ import annotations

import dataclasses
from typing import Iterator

import numpy as np

from .. import work


class Unsupported(Exception):
    pass


@dataclasses.dataclass
class Workload:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray | None  # None: the forward pass
    keywords: dict
    threads: int | None
    device: str = "cpu"
    backend: str | None = None  # asked for by name
    gradients: tuple[str, ...] = ()
    dlse: bool = False  # a gradient of lse comes in, beside do
    # Sets of tensors that were drawn on the device, in turn, where arrays stand for shapes alone (decode_grid).
    drawn: Iterator[dict] | None = None

    @property
    def backward(self) -> bool:
        return self.do is not None


def require_numpy_dtypes(w: Workload, name: str):
    """Unsupported where NumPy lacks the dtypes: it would compute on their bits."""
    for x in (w.q, w.k, w.v, w.keywords.get("bias")):
        if x is not None and x.dtype.names:
            raise Unsupported(f"{name} needs the package ml_dtypes for {x.dtype.names[0]}: pip install ml_dtypes")


def refuse(w: Workload, names, text: str):
    """Unsupported where a keyword of `names` is on, by the text with it in the place of {}."""
    for name in names:
        given = w.keywords.get(name)
        if given is not None and not (isinstance(given, (int, float)) and given == 0):
            raise Unsupported(text.format(name))


def first_line(error) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


# ---- what peers without our keywords are given instead ----

_LARGEST_MASK = 1 << 27  # elements, made on the host
_FORMATS = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}


def _bhsd(x, layout):
    bits = x.view(f"u{x.dtype.itemsize}")  # NumPy copies integers several times as fast as types it does not know
    return np.ascontiguousarray(bits.transpose(_FORMATS[layout])).view(x.dtype)


def plain(w: Workload, name: str):
    """(q, k, v, do) as contiguous [b, h, s, d]; Unsupported for what has no such form."""
    kw = w.keywords
    layout = kw.get("layout", "bshd")
    layout_q, layout_k = layout if isinstance(layout, tuple) else (layout, layout)
    refuse(w, ("page_table", "sink"), name + " has no {}")
    if "thd" in (layout_q, layout_k):
        raise Unsupported(f"{name} has no packed sequences")
    if kw.get("bias_at") == "pre_scale":
        raise Unsupported(f"{name} has no bias before the scale")
    return (_bhsd(w.q, layout_q), _bhsd(w.k, layout_k), _bhsd(w.v, layout_k),
            None if w.do is None else _bhsd(w.do, layout_q))


def is_plain_causal(kw, sq, sk) -> bool:
    return bool(kw.get("causal")) and kw.get("window") is None and \
        (sq == sk or kw.get("align") == "top_left")


def dense_mask(w: Workload, b, hq, sq, sk) -> np.ndarray | None:
    """Dense [b|1, hq|1, sq, sk], True = visible; None when everything is."""
    kw = w.keywords
    names = ("causal", "window", "seqlens_q", "seqlens_k", *work.DATA_MASKS)
    if all(kw.get(name) is None for name in names):
        return None
    per_batch = any(kw.get(name) is not None for name in names[2:])
    if (b if per_batch else 1) * sq * sk > _LARGEST_MASK:
        raise Unsupported(f"a dense mask of more than {_LARGEST_MASK} elements is not made: it would take seconds")
    mask = np.stack([work.visible(n, w.q, w.k, kw) for n in range(b if per_batch else 1)])
    return np.broadcast_to(mask, (len(mask), mask.shape[1], sq, sk))


def dense_bias(w: Workload, sq, sk) -> np.ndarray | None:
    """Post-scale bias and ALiBi as one dense array of at most 4 axes."""
    kw = w.keywords
    bias = kw.get("bias")
    if kw.get("alibi_slopes") is None:
        return bias
    require_numpy_dtypes(w, "ALiBi as a dense bias")
    slopes = np.atleast_2d(kw["alibi_slopes"])[:, :, None, None].astype(np.float32)
    shift = sk - sq if kw.get("align") == "bottom_right" else 0
    distance = np.abs(np.arange(sq)[:, None] + shift - np.arange(sk)).astype(np.float32)
    alibi = -slopes * distance
    return alibi.astype(w.q.dtype) if bias is None else (alibi + bias).astype(w.q.dtype)
