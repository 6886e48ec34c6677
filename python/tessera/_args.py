# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments -> tessera_problem: the one normalizer, for every array library.

What it decides is spelling only: which axis of an array is which axis of a tensor, which flag a
keyword sets, which Python type a keyword takes. Whatever the C core can see (extents, strides,
contradictions, alignment, values) is left to it. Every error is a ValueError that says
``tessera.<operation>: name=value: rule``.

An array library joins through an adapter with
    noun                  what an array is called in messages, "NumPy array"
    info(x)               ArrayInfo, or None when x is not an array of this library
"""

from __future__ import annotations

import numbers
import operator
from typing import NamedTuple

from . import _lib

# Arguments that are arrays, in one order for every operation (sink, segment_ids, page_table and
# rng_state have other spellings too), then the options of every operation.
ARRAYS = ("q", "k", "v", "seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k",
          "cu_seqlens_q_padded", "cu_seqlens_k_padded", "keep", "drop", "key_ranges",
          "segment_ids", "bias", "alibi_slopes", "sink", "rng_state", "page_table", "k_scale",
          "v_scale")
OPTIONS = ("layout", "softmax_scale", "causal", "window", "align", "max_seqlen_q", "max_seqlen_k",
           "bias_at", "softcap", "dropout_p", "deterministic", "batch_invariant", "backend",
           "allow_quadratic")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink", "dalibi_slopes")

# Array axis that holds tensor axis i, None where the tensor has an axis of extent 1 of its own.
ORDERS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3), "thd": (None, 0, 1, 2)}
_PADDED, _PACKED = 0, 1
ROWS = ((0, 1, 2), (None, 0, 1))          # lse: [b, hq, sq] or [hq, t]
SEGMENTS = ((0, 1), (None, 0))            # [b, s] or [t]
RANGES = ((0, 1, 2, 3), (None, 0, 1, 2))  # [b, hq, sq, 2] or [hq, t, 2]
_VECTOR, _MATRIX = (0,), (0, 1)

_FLOATS = "float32, bfloat16, float16, float64, float8_e4m3fn or float8_e5m2"
_DTYPE_RULES = {
    "keep": "bool", "drop": "bool", "key_ranges": "int32", "segment_ids": "int32",
    "page_table": "int32", "rng_state": "int64", "k_scale": "float32", "v_scale": "float32",
    "lse": "float32", "dlse": "float32", "seqlens_q": "int32 or int64",
    "seqlens_k": "int32 or int64", "cu_seqlens_q": "int32 or int64",
    "cu_seqlens_k": "int32 or int64", "cu_seqlens_q_padded": "int32 or int64",
    "cu_seqlens_k_padded": "int32 or int64",
}


class ArrayInfo(NamedTuple):
    dtype: str                # "bfloat16"
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    device: tuple[int, int]   # kind, ordinal of tessera_device
    writable: bool
    flaw: str = ""            # "dtype='>f4': must be of native byte order", if it cannot be read


class Source(NamedTuple):
    """Where the pointer of a tensor comes from: argument `name`, item `part` of a pair."""
    index: int  # enum tessera_index
    name: str
    part: int | None


class Arguments:
    """A problem under construction, with the scalars that go into tessera_buffers."""

    def __init__(self, adapter, operation: str, backward: bool = False):
        self.adapter = adapter
        self.operation = operation
        self.problem = _lib.Problem()
        self.problem.struct_size = _lib.ctypes.sizeof(_lib.Problem)
        self.problem.pass_ = _lib.BACKWARD if backward else _lib.FORWARD
        self.sources: list[Source] = []
        self.spelling: dict[str, str] = {}  # the library's name of a tensor -> the caller's
        self.softmax_scale = self.softcap = self.dropout_p = 0.0
        self.layout_q = self.layout_kv = "bshd"
        self.paged = False
        self.device = None

    # ---- errors ----

    def error(self, field: str, value, rule: str) -> ValueError:
        return ValueError(f"tessera.{self.operation}: {field}={_text(value)}: {rule}")

    # ---- one tensor ----

    def put(self, tensor: str, name: str, value, order=None, *, axes="", pad=0, part=None,
            output=False):
        """Describes array `value`, given as argument `name`, as `tensor` of the problem."""
        info = self.adapter.info(value)
        if info is None:
            raise self.error(name, value, f"must be a {self.adapter.noun}")
        rank = len(info.shape)
        if pad:
            if rank > pad:
                raise self.error(f"{name}.shape", list(info.shape), f"must have at most {pad} "
                                 f"axes, broadcastable to [{axes}]")
            order = (None,) * (pad - rank) + tuple(range(rank))
        elif rank != sum(axis is not None for axis in order):
            raise self.error(f"{name}.shape", list(info.shape),
                             f"must have the axes [{_in_array_order(axes, order)}]")
        if info.flaw:
            raise ValueError(f"tessera.{self.operation}: {name}.{info.flaw}")
        code = _lib.DTYPES.get(info.dtype)
        if code is None:
            raise self.error(f"{name}.dtype", info.dtype,
                             f"must be {_DTYPE_RULES.get(name, _FLOATS)}")
        if output and not info.writable:
            raise self.error(f"{name}.flags.writeable", False, "an output must be writable; pass a "
                             "copy or a writable array")
        if self.device is None:
            self.device = info.device
        elif info.device != self.device:
            raise self.error(f"{name}.device", info.device, "all arrays must be on one device; q "
                             f"is on {self.device}")
        self._describe(tensor, code, info.shape, info.strides, order)
        self.sources.append(Source(_lib.INDEX[tensor], name, part))
        self.spelling[tensor] = name if part is None else f"{name}[{part}]"
        return info

    def put_new(self, tensor: str, dtype: str, shape, order) -> tuple[int, ...]:
        """Describes a contiguous output that the front end will allocate."""
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= max(extent, 1)
        self._describe(tensor, _lib.DTYPES[dtype], shape, strides[::-1], order)
        return tuple(shape)

    def _describe(self, tensor, code, shape, strides, order):
        target = self.problem.tensor[_lib.INDEX[tensor]]
        target.dtype = code
        try:
            for i, axis in enumerate(order):
                target.extent[i] = 1 if axis is None else shape[axis]
                target.stride[i] = 0 if axis is None else strides[axis]
        except (OverflowError, _lib.ctypes.ArgumentError) as error:
            raise self.error(f"{tensor}.shape", list(shape), "must fit int64") from error

    # ---- axis orders of this problem ----

    @property
    def order_q(self):
        return ORDERS[self.layout_q]

    @property
    def order_kv(self):
        return ORDERS["bshd"] if self.paged else ORDERS[self.layout_kv]

    @property
    def order_rows(self):
        return ROWS[self.packed_q]

    @property
    def packed_q(self) -> int:
        return _PACKED if self.layout_q == "thd" else _PADDED

    @property
    def packed_kv(self) -> int:
        return _PACKED if self.layout_kv == "thd" and not self.paged else _PADDED

    def axes_kv(self, d: str) -> str:
        return f"pages, page_size, hk, {d}" if self.paged else f"b, sk, hk, {d}"

    # ---- one Python value ----

    def boolean(self, name, value, default=False) -> bool:
        if value is None:
            return default
        if type(value).__name__ not in ("bool", "bool_") or getattr(value, "shape", ()) != ():
            raise self.error(name, value, "must be True or False")
        return bool(value)

    def number(self, name, value) -> float:
        if not is_number(value) or self.adapter.info(value) is not None:
            raise self.error(name, value, "must be a number")
        try:
            return float(value)
        except OverflowError as error:
            raise self.error(name, value, "must be finite") from error

    def integer(self, name, value) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise self.error(name, value, "must be an integer")
        if not -2**63 <= value < 2**63:
            raise self.error(name, value, "must fit int64")
        return operator.index(value)

    def pair_of_integers(self, name, value, what: str) -> tuple[int, int]:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise self.error(name, value, f"must be a pair {what} of integers")
        return self.integer(f"{name}[0]", value[0]), self.integer(f"{name}[1]", value[1])

    def choice(self, name, value, choices) -> str:
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, value, "must be " + " or ".join(f'"{c}"' for c in choices))
        return value


def fill(a: Arguments, given: dict):
    """Everything but the outputs and the inputs of the backward pass. `given` maps the names of
    ARRAYS and OPTIONS to values; None, or an absent name, is not given."""
    get = given.get
    a.paged = get("page_table") is not None
    _layout(a, get("layout"))
    a.put("q", "q", get("q"), a.order_q, axes="b, sq, hq, dqk")
    a.put("k", "k", get("k"), a.order_kv, axes=a.axes_kv("dqk"))
    a.put("v", "v", get("v"), a.order_kv, axes=a.axes_kv("dv"))
    _band(a, get)
    _lengths(a, get)
    _masks(a, get)
    _score(a, get)
    _dropout(a, get)
    if a.paged:
        _pair(a, "page_table", get("page_table"), _MATRIX, _MATRIX, "b, max_pages", share=False)
    for name in ("k_scale", "v_scale"):
        if get(name) is not None:
            a.put(name, name, get(name), pad=2, axes="b, hk")
    for flag, name, default in ((_lib.DETERMINISTIC, "deterministic", True),
                                (_lib.BATCH_INVARIANT, "batch_invariant", False),
                                (_lib.ALLOW_QUADRATIC, "allow_quadratic", False)):
        if a.boolean(name, get(name), default):
            a.problem.flags |= flag
    _backend(a, get("backend"))


def is_number(value) -> bool:
    """A real Python or NumPy number (ml_dtypes scalars included), not a boolean, not an array."""
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return False
    if isinstance(value, numbers.Complex):
        return isinstance(value, numbers.Real)
    return getattr(value, "shape", None) == () and type(value).__name__ in _lib.DTYPES and \
        type(value).__name__ != "bool"


def _layout(a: Arguments, layout):
    formats = tuple(_lib.FORMATS)
    if layout is None:
        layout = "bshd"
    if isinstance(layout, tuple) and len(layout) == 2:
        a.layout_q = a.choice("layout[0]", layout[0], formats)
        a.layout_kv = a.choice("layout[1]", layout[1], formats)
    elif isinstance(layout, str) and layout in formats:
        a.layout_q = a.layout_kv = layout
    else:
        raise a.error("layout", layout, "must be " + ", ".join(f'"{f}"' for f in formats) +
                      ', or a pair such as ("bshd", "sbhd") for q and for k and v')
    a.problem.format_q = _lib.FORMATS[a.layout_q]
    a.problem.format_kv = _lib.FORMATS[a.layout_kv]


def _band(a: Arguments, get):
    if a.boolean("causal", get("causal")):
        a.problem.flags |= _lib.CAUSAL
    if get("window") is not None:
        left, right = a.pair_of_integers("window", get("window"), "(left, right)")
        a.problem.flags |= _lib.WINDOW
        a.problem.window_left, a.problem.window_right = left, right
    if get("align") is not None:
        a.problem.align = _lib.ALIGNS[a.choice("align", get("align"), tuple(_lib.ALIGNS))]


def _lengths(a: Arguments, get):
    for name in ("seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded",
                 "cu_seqlens_k_padded"):
        if get(name) is not None:
            axes = "b" if name.startswith("seqlens") else "b + 1"
            a.put(name, name, get(name), _VECTOR, axes=axes)
    for kind in ("seqlens", "cu_seqlens"):
        if get(f"{kind}_q") is not None and get(f"{kind}_q") is get(f"{kind}_k"):
            a.problem.flags |= _lib.SAME_LENGTHS
    if get("max_seqlen_q") is not None:
        a.problem.flags |= _lib.MAX_SEQLEN_Q
        a.problem.max_seqlen_q = a.integer("max_seqlen_q", get("max_seqlen_q"))
    if get("max_seqlen_k") is not None:
        a.problem.flags |= _lib.MAX_SEQLEN_K
        a.problem.max_seqlen_k = a.integer("max_seqlen_k", get("max_seqlen_k"))


def _masks(a: Arguments, get):
    keep, drop = get("keep"), get("drop")
    if keep is not None and drop is not None:
        raise a.error("drop", drop, "keep and drop are one mask with two polarities; give one")
    for name, value in (("keep", keep), ("drop", drop)):
        if value is not None:
            a.put("mask", name, value, pad=4, axes="b, hq, sq, sk")
    if drop is not None:
        a.problem.flags |= _lib.MASK_DROP
    if get("key_ranges") is not None:
        a.put("key_ranges", "key_ranges", get("key_ranges"), RANGES[a.packed_q],
              axes="b|1, hq|1, sq|1, 2|4")
    if get("segment_ids") is not None:
        _pair(a, "segment_ids", get("segment_ids"), SEGMENTS[a.packed_q],
              SEGMENTS[a.packed_kv], "b, s", share=True)


def _pair(a: Arguments, name: str, value, order_first, order_second, axes: str, share: bool):
    """An array, or a tuple of two. Alone it is the first tensor, and the second too if shared."""
    first, second = ("_q", "_k") if name == "segment_ids" else ("_k", "_v")
    if isinstance(value, tuple):
        if len(value) != 2:
            raise a.error(name, value, f"must be a {a.adapter.noun} or a pair of them")
        for side, part, order in ((first, 0, order_first), (second, 1, order_second)):
            if a.adapter.info(value[part]) is None:
                raise a.error(f"{name}[{part}]", value[part], f"must be a {a.adapter.noun}")
            a.put(name + side, name, value[part], order, axes=axes, part=part)
        return
    a.put(name + first, name, value, order_first, axes=axes)
    if share:
        a.put(name + second, name, value, order_second, axes=axes)


def _score(a: Arguments, get):
    if get("softmax_scale") is not None:
        a.problem.flags |= _lib.SOFTMAX_SCALE
        a.softmax_scale = a.number("softmax_scale", get("softmax_scale"))
    if get("softcap") is not None:
        a.softcap = a.number("softcap", get("softcap"))
        if a.softcap != 0:
            a.problem.flags |= _lib.SOFTCAP
    if get("bias_at") is not None:
        if a.choice("bias_at", get("bias_at"), ("post_scale", "pre_scale")) == "pre_scale":
            a.problem.flags |= _lib.BIAS_PRE_SCALE
    if get("bias") is not None:
        a.put("bias", "bias", get("bias"), pad=4, axes="b, hq, sq, sk")
    else:
        a.problem.flags &= ~_lib.BIAS_PRE_SCALE
    if get("alibi_slopes") is not None:
        a.put("alibi_slopes", "alibi_slopes", get("alibi_slopes"), pad=2, axes="b, hq")
    sink = get("sink")
    if isinstance(sink, str):
        a.choice("sink", sink, ("off_by_one",))
        a.problem.flags |= _lib.SINK_OFF_BY_ONE
    elif sink is not None:
        if a.adapter.info(sink) is None:
            raise a.error("sink", sink, f'must be "off_by_one" or a {a.adapter.noun} [hq]')
        a.put("sink", "sink", sink, _VECTOR, axes="hq")


def _dropout(a: Arguments, get):
    if get("dropout_p") is not None:
        a.dropout_p = a.number("dropout_p", get("dropout_p"))
        if a.dropout_p != 0:
            a.problem.flags |= _lib.DROPOUT
    if get("rng_state") is not None:
        a.put("rng_state", "rng_state", get("rng_state"), _VECTOR, axes="seed and offset")


def _backend(a: Arguments, backend):
    if backend is None:
        return
    if not isinstance(backend, str) or not 0 < len(backend) < 16 or \
            not (backend.isascii() and backend.isprintable()):
        names = ", ".join(f'"{name}"' for name in _lib.backends())
        raise a.error("backend", backend, f"must be one of {names}")
    a.problem.backend = backend.encode()


def _in_array_order(axes: str, order) -> str:
    names = axes.split(", ")
    shown = [""] * sum(axis is not None for axis in order)
    for i, axis in enumerate(order):
        if axis is not None:
            shown[axis] = "t" if None in order and names[i].startswith("s") else names[i]
    return ", ".join(shown)


def _text(value) -> str:
    """A value in a message: short values as they are, others by their type."""
    if isinstance(value, (str, bool, int, float, type(None))) or is_number(value):
        text = repr(value) if isinstance(value, str) else str(value)
        return text if len(text) <= 60 else text[:57] + "..."
    if isinstance(value, (tuple, list)) and len(value) <= 8:
        inner = ", ".join(_text(item) for item in value)
        if len(inner) <= 60:
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return type(value).__name__
