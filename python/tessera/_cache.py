# SPDX-License-Identifier: Apache-2.0
"""rotate and append_kv: keywords -> the structs of tessera.h, for every array library; and both on
NumPy arrays. An adapter of _args serves here too, with pointer(x) beside it."""

from __future__ import annotations

import ctypes

import numpy as np

from . import _lib, _numpy, _utilities
from ._call import _args, _keywords

_POSITIONS = {1: (0, None), 2: (0, 1)}
_SCALE = {1: (None, 0), 2: (0, 1)}
_ROWS = (0, 1)
_LENGTHS = (0,)


class Struct:
    """tessera_rotate_args or tessera_append_args under construction."""

    def __init__(self, adapter, operation: str, args, names: tuple[str, ...], layout: str,
                 interleaved: bool):
        self.adapter = adapter
        self.arguments = a = _args.Arguments(adapter, operation)
        self.args = args
        self.names = names
        self.spelling: dict[str, str] = {}  # the library's name of a tensor -> the caller's
        args.struct_size = ctypes.sizeof(args)
        a.layout_q = a.choice("layout", layout, tuple(_lib.FORMATS))
        args.format = _lib.FORMATS[layout]
        args.flags = _lib.INTERLEAVED if a.boolean("interleaved", interleaved) else 0

    def put(self, name: str, value, order, axes: str, spelling: str | None = None, output=False):
        """Describes array `value`, given as argument `spelling`, as tensor `name`."""
        a = self.arguments
        if isinstance(order, dict):
            info = self.adapter.info(value)
            if info is not None and len(info.shape) not in order:
                raise a.error(f"{spelling or name}.shape", list(info.shape),
                              f"must have the axes [{axes}]")
            order = order[len(info.shape)] if info is not None else _LENGTHS
        info = a.put("q", spelling or name, value, order, axes=axes, output=output)
        self.spelling[name] = spelling or name
        index = self.names.index(name)
        self.args.tensor[index] = a.problem.tensor[_lib.INDEX["q"]]
        self.args.data[index] = self.adapter.pointer(value)
        return info

    def run(self, function, device, context):
        error = _lib.error_of_thread()
        code = function(ctypes.addressof(self.args), ctypes.addressof(device),
                        ctypes.addressof(context), ctypes.addressof(error))
        _lib.check(code, error, self.arguments.operation, self.spelling)


def rotate_call(adapter, x, y, cos, sin, positions, *, layout: str, interleaved: bool,
                inverse: bool = False) -> Struct:
    """The call that turns x into y."""
    call = Struct(adapter, "rotate", _lib.RotateArgs(), _lib.ROTATE_TENSORS, layout, interleaved)
    order = call.arguments.order_q
    if inverse:
        call.args.flags |= _lib.INVERSE
    call.put("x", x, order, "b, s, h, d")
    call.put("y", y, order, "b, s, h, d", "out", output=True)
    for name, table in (("cos", cos), ("sin", sin)):
        call.put(name, table, _ROWS, "max_pos, r/2")
    if positions is not None:
        thd = layout == "thd"
        call.put("positions", positions, (None, 0) if thd else _POSITIONS,
                 "t" if thd else "b] or [b, s")
    elif layout == "thd":
        raise call.arguments.error("positions", None, 'layout="thd" needs the position of each row, '
                                   "int32 or int64 [t]")
    return call


def append_call(adapter, k, v, k_cache, v_cache, seqlens_k, *, layout: str, cu_seqlens, seqlens_q,
                page_table, q, q_out, rope, interleaved: bool, k_scale, v_scale) -> Struct:
    """The call that appends k and v to the caches and turns q into q_out."""
    call = Struct(adapter, "append_kv", _lib.AppendArgs(), _lib.APPEND_TENSORS, layout, interleaved)
    a = call.arguments
    order, in_cache = a.order_q, _keywords.ORDERS["bshd"]
    first = "b, sk" if page_table is None else "pages, page_size"
    call.put("k", k, order, "b, s, hk, dqk")
    call.put("k_cache", k_cache, in_cache, f"{first}, hk, dqk", output=True)
    if v is not None:
        call.put("v", v, order, "b, s, hk, dv")
    if v_cache is not None:
        call.put("v_cache", v_cache, in_cache, f"{first}, hk, dv", output=True)
    call.put("seqlens", seqlens_k, _LENGTHS, "b", "seqlens_k")
    if rope is not None:
        if not isinstance(rope, (tuple, list)) or len(rope) != 2:
            raise a.error("rope", rope, "must be a pair (cos, sin), as rope_table returns")
        for i, name in enumerate(("cos", "sin")):
            call.put(name, rope[i], _ROWS, "max_pos, r/2", f"rope[{i}]")
    if q is not None:
        call.put("q", q, order, "b, s, hq, dqk")
        call.put("q_out", q_out, order, "b, s, hq, dqk", output=True)
    for name, value, axes, text in (("cu_seqlens", cu_seqlens, _LENGTHS, "b + 1"),
                                    ("seqlens_q", seqlens_q, _LENGTHS, "b"),
                                    ("page_table", page_table, _ROWS, "b, max_pages"),
                                    ("k_scale", k_scale, _SCALE, "hk] or [b, hk"),
                                    ("v_scale", v_scale, _SCALE, "hk] or [b, hk")):
        if value is not None:
            call.put(name, value, axes, text)
    return call


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray | None = None, *,
           interleaved: bool = False, layout: _keywords.Format = "bshd",
           out: np.ndarray | None = None) -> np.ndarray:
    """Applies rotary position embedding (Su et al., arXiv:2104.09864) and returns a new array of x's shape and dtype.

    x is [b, s, h, d] for layout="bshd", in float32, bfloat16, float16 or float64. "sbhd" and "bhsd" are other orders of
    axes; "thd" is packed [t, h, d]. cos and sin are fp32 [max_pos, r/2], as rope_table returns them. The first r <= d
    elements of a head turn, and the others stay. Element i turns with element i + r/2; if interleaved, 2i with 2i + 1.

    positions, int32 or int64, are [b] for the position of each sequence's first row, or [b, s] (with "thd" [t]) for
    that of each row; None counts 0, 1, 2, ... out is an array to write into, which may be x itself. ValueError:
    anything else, or a position outside the tables.

    >>> q = tessera.rotate(q, *tessera.rope_table(4096, 128), positions=seqlens_k)
    """
    if not isinstance(x, np.ndarray):
        raise _args.Arguments(_numpy, "rotate").not_an_array("x", x)
    y = _numpy.empty("rotate", "out", x.shape, x.dtype) if out is None else out
    call = rotate_call(_numpy, x, y, cos, sin, positions, layout=layout, interleaved=interleaved)
    call.run(_lib.rotate, _lib.CPU_DEVICE, _utilities.context_of(_numpy, None))
    return y


def append_kv(k: np.ndarray, v: np.ndarray | None, k_cache: np.ndarray, v_cache: np.ndarray | None,
              seqlens_k: np.ndarray, *, layout: _keywords.Format = "bshd",
              cu_seqlens: np.ndarray | None = None, seqlens_q: np.ndarray | None = None,
              page_table: np.ndarray | None = None, q: np.ndarray | None = None,
              rope: tuple[np.ndarray, np.ndarray] | None = None, interleaved: bool = False,
              k_scale: np.ndarray | None = None, v_scale: np.ndarray | None = None
              ) -> np.ndarray | None:
    """Appends new keys and values to a cache. Returns q, turned by rope, or None if q is not given.

    k is [b, s, hk, dqk] and v [b, s, hk, dv] for layout="bshd", in float32, bfloat16 or float16. "sbhd" and "bhsd"
    are other orders of axes; "thd" is packed [t, hk, d] with cu_seqlens [b + 1]. seqlens_k [b], int32 or int64, are
    the lengths before the call: the tokens of sequence n go to places seqlens_k[n], seqlens_k[n] + 1, ... seqlens_q
    [b] says how many of the s tokens of each sequence are new; by default all are.

    k_cache is [b, sk, hk, dqk] and v_cache [b, sk, hk, dv]; or both are pools [pages, page_size, hk, d], with
    page_table int32 [b, max_pages]. No two sequences may append to one page. With v=None and v_cache=None one cache
    serves both (MLA). Values are converted to the dtype of the cache; fp8 is round(x / scale), saturating, with
    k_scale and v_scale fp32 [hk] or [b, hk].

    rope=(cos, sin), as rope_table returns them, turns k and q [b, s, hq, dqk] by their positions, in pairs as
    rotate's, interleaved or not. ValueError: anything else, or a token past the end of the cache; then nothing is
    written.

    >>> tessera.append_kv(k, v, k_cache, v_cache, lengths)
    >>> o = tessera.attention(q, k_cache, v_cache, seqlens_k=lengths + 1)
    """
    y = None if q is None or not isinstance(q, np.ndarray) else \
        _numpy.empty("append_kv", "q", q.shape, q.dtype)
    call = append_call(_numpy, k, v, k_cache, v_cache, seqlens_k, layout=layout,
                       cu_seqlens=cu_seqlens, seqlens_q=seqlens_q, page_table=page_table, q=q, q_out=y,
                       rope=rope,
                       interleaved=interleaved, k_scale=k_scale, v_scale=v_scale)
    call.run(_lib.append, _lib.CPU_DEVICE, _utilities.context_of(_numpy, None))
    return y
