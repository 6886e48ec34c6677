# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments -> tessera_problem: the one normalizer, for every array library.

What it decides is spelling only: which axis of an array is which axis of a tensor, which flag a
keyword sets, which Python type a keyword takes; the rows of _keywords say how. Whatever the C core
can see (extents, strides, contradictions, alignment, values) is left to it. Every error is a
ValueError that says ``tessera.<operation>: name=value: rule``.

An array library joins through an adapter with
    noun                  what an array is called in messages, "NumPy array"
    info(x)               ArrayInfo, or None when x is not an array of this library
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import NamedTuple

from .. import _lib
from . import GRADIENTS, _keywords
from ._keywords import ORDERS

ROWS = ((0, 1, 2), (None, 0, 1))  # lse: [b, hq, sq] or [hq, t]
_PADDED, _PACKED = 0, 1
# tensors that no keyword gives and that are no keyword's gradient -> order, axes; amax are numbers
FORMS = {"q": ("order_q", "b, sq, hq, dqk"), "o": ("order_q", "b, sq, hq, dv"),
         "lse": ("order_rows", "b, hq, sq"), "shift": ((0,), "b"), "max_logit": ((0,), "hq")}

# package -> who takes its arrays
_HOMES = {"numpy": ("tessera", "NumPy array"), "torch": ("tessera.torch", "PyTorch tensor"),
          "jax": ("tessera.jax", "JAX array"), "jaxlib": ("tessera.jax", "JAX array"),
          "paddle": ("tessera.paddle", "Paddle tensor")}
_FLOATS = "float32, bfloat16, float16, float64, float8_e4m3fn or float8_e5m2"
_DTYPE_RULES = {"lse": "float32", "dlse": "float32", "align": "int32 or int64", **{
    name: row.dtype for name, row in _keywords.ALL.items() if isinstance(row, _keywords.Tensor)}}


class ArrayInfo(NamedTuple):
    dtype: str                # "bfloat16"
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    device: object            # equal to that of arrays in the same memory: kind and ordinal, or a name
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
        self.sources: list[Source] = []  # of what goes in
        self.targets: list[Source] = []  # of what is written into
        self.wanted: dict[str, tuple[int | None, ...]] = {}  # tensor -> order of its array
        # The library's name of a tensor -> the caller's, and NAME.shape -> the caller's where axes are missing.
        self.spelling: dict[str, str] = {}
        self.softmax_scale = self.softcap = self.dropout_p = 0.0
        self.sm_margin = 0
        self.out_dtype = self.grad_dtype = None  # names
        self.return_lse = self.return_max_logit = self.return_amax = False
        self.layout_q = self.layout_kv = "bshd"
        self.paged = False
        self.device = None

    # ---- errors ----

    def error(self, field: str, value, rule: str) -> ValueError:
        return ValueError(f"tessera.{self.operation}: {field}={_text(value)}: {rule}")

    def not_an_array(self, field: str, value) -> ValueError:
        """The error of a value that is no array of this front end; another's array is told where it belongs."""
        home, noun = _HOMES.get(type(value).__module__.partition(".")[0], ("", self.adapter.noun))
        is_another = noun != self.adapter.noun and hasattr(value, "dtype")
        hint = f"; {home}.{self.operation} takes {noun}s" if is_another else ""
        return self.error(field, value, f"must be a {self.adapter.noun}{hint}")

    # ---- one tensor ----

    def put(self, tensor: str, name: str, value, order=None, *, axes="", pad=0, part=None,
            output=False):
        """Describes array `value`, given as argument `name`, as `tensor` of the problem."""
        info = self.adapter.info(value)
        if info is None:
            raise self.not_an_array(name, value)
        rank = len(info.shape)
        if pad:
            if rank > pad:
                raise self.error(f"{name}.shape", list(info.shape), f"must have at most {pad} "
                                 f"axes, broadcastable to [{axes}]")
            order = (None,) * (pad - rank) + tuple(range(rank))
            if rank < pad:
                self.spelling[f"{name}.shape"] = str(list(info.shape))
        elif rank != sum(axis is not None for axis in order):
            raise self.error(f"{name}.shape", list(info.shape),
                             f"must have the axes [{_in_array_order(axes, order)}]{_other_layout(name, rank, order)}")
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
        (self.targets if output else self.sources).append(Source(_lib.INDEX[tensor], name, part))
        self.spelling[tensor] = name if part is None else f"{name}[{part}]"
        return info

    def put_new(self, tensor: str, dtype: str, shape, order, strides=None) -> tuple[int, ...]:
        """Describes an output that the front end will allocate, row-major unless it has `strides`."""
        if strides is None:
            strides, step = [0] * len(shape), 1
            for axis in reversed(range(len(shape))):
                strides[axis] = step
                step *= max(shape[axis], 1)
        self._describe(tensor, _lib.DTYPES[dtype], shape, strides, order)
        return tuple(shape)

    def form(self, tensor: str) -> tuple:
        """(order, axes, pad) of put() for a tensor that is no keyword's."""
        if tensor in GRADIENTS[3:]:
            row = _keywords.ALL[tensor[1:]]
            rank = row.axes.count(",") + 1
            return tuple(range(rank)), row.axes, rank * row.broadcasts
        tensor = tensor.removeprefix("d")
        if tensor in ("k", "v"):
            return self.order_kv, self.axes_kv("dqk" if tensor == "k" else "dv"), 0
        order, axes = FORMS.get(tensor, ((None,), "1"))
        return getattr(self, order) if isinstance(order, str) else order, axes, 0

    def put_own(self, tensor: str, value, name: str = "", output=False):
        """put() of a tensor that is no keyword's, given as argument `name`."""
        order, axes, pad = self.form(tensor)
        return self.put(tensor, name or tensor, value, order, axes=axes, pad=pad, output=output)

    def want(self, tensor: str, dtype: str | None = None, rank: int = 0):
        """Asks for the description of an output, whose `dtype` None is the usual; axes beyond its `rank`
        are missing on the left."""
        order, _, pad = self.form(tensor)
        self.wanted[tensor] = (None,) * (pad - rank) + tuple(range(rank)) if pad else order
        self.problem.tensor[_lib.INDEX[tensor]].dtype = _lib.DTYPES[dtype] if dtype else 0

    def describe_wanted(self):
        """Lets the library describe what is wanted, beside everything that was put before."""
        has_rows = self._pack_rows()
        indices = [_lib.INDEX[tensor] for tensor in self.wanted]
        error = _lib.error_of_thread()
        code = _lib.outputs(_lib.ctypes.addressof(self.problem), (_lib.c_int32 * len(indices))(*indices),
                            len(indices), _lib.ctypes.addressof(error))
        _lib.check(code, error, self.operation, self.spelling)
        for tensor, order in self.wanted.items() if has_rows else ():  # the library knows another order of axes
            shape, dtype = self.new(tensor)
            self.put_new(tensor, dtype, shape, order)

    def _pack_rows(self) -> bool:
        """Makes thd of each side whose format is padded beside lengths of packed sequences: an array of one row is
        that packed buffer, in its own order of axes. describe.h does the same. Returns whether there is one."""
        found = False
        for side, names, order in (("q", "q", self.order_q), ("kv", "kv", self.order_kv)):
            first = names[0]
            is_given = self.problem.tensor[_lib.INDEX[f"cu_seqlens_{first}"]].dtype
            if not is_given or order[0] is None or side == "kv" and self.paged or \
                    self.problem.tensor[_lib.INDEX[first]].extent[0] != 1:
                continue
            setattr(self.problem, f"format_{side}", _lib.FORMATS["thd"])
            self.spelling |= {f"{name}.shape": str(list(self._shape(name, order))) for name in names}
            found = True
        return found

    def _shape(self, tensor: str, order) -> tuple[int, ...]:
        """The shape of an array that was described."""
        extents = self.problem.tensor[_lib.INDEX[tensor]].extent
        axes = {axis: extents[i] for i, axis in enumerate(order)}
        return tuple(axes[axis] for axis in sorted(axes.keys() - {None}))

    def new(self, tensor: str) -> tuple[tuple[int, ...], str]:
        """(shape, dtype) of the array of a wanted tensor."""
        described = self.problem.tensor[_lib.INDEX[tensor]]
        return self._shape(tensor, self.wanted[tensor]), _lib.DTYPE_NAMES[described.dtype]

    def _describe(self, tensor, code, shape, strides, order):
        target = self.problem.tensor[_lib.INDEX[tensor]]
        target.dtype = code
        try:
            for i, axis in enumerate(order):
                target.extent[i] = 1 if axis is None else shape[axis]
                target.stride[i] = 0 if axis is None else strides[axis]
        except (OverflowError, _lib.ctypes.ArgumentError) as error:
            raise self.error(f"{tensor}.shape", list(shape), "must fit int64") from error

    def set_field(self, field: str, value):
        """Sets a field of tessera_problem, or of this."""
        if hasattr(self.problem, field):
            setattr(self.problem, field, _lib.bytes_of(value) if isinstance(value, str) else value)
        else:
            setattr(self, field, value)

    # ---- axis orders of this problem ----

    def packs(self, side: str) -> bool:
        return bool(self.packed_q if side == "q" else self.packed_kv)

    @property
    def format_q(self) -> int:
        return _lib.FORMATS[self.layout_q]

    @property
    def format_kv(self) -> int:
        return _lib.FORMATS[self.layout_kv]

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
        if type(value).__name__ == "ndarray" and value.shape == ():
            value = value[()]
        if not _keywords.is_number(value) or self.adapter.info(value) is not None:
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

    def dtype(self, name, value) -> str:
        """The name of a dtype: "bfloat16", or what prints so."""
        text = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
        text = text.rpartition(".")[2]
        if text not in _lib.DTYPES or text in ("bool", "int32", "int64"):
            raise self.error(name, value, f"must be {_FLOATS}")
        return text

    def choice(self, name, value, choices) -> str:
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, value, "must be " + " or ".join(f'"{c}"' for c in choices))
        return value


def _other_layout(name: str, rank: int, order) -> str:
    """What helps where q, k or v has the axes of a packed array and should not, or the other way round."""
    is_packed = order is not None and order[0] is None
    if name not in ("q", "k", "v") or rank != (4 if is_packed else 3):
        return ""
    return '; layout="thd" has no axis of the batch: leave layout out, or pack the sequences' if is_packed else \
        f'; {name}[None] adds an axis of one sequence, and layout="thd" is for packed ones'


def _rows_of(table):
    """(options with their defaults, tensors) of a table; a default that leaves the problem as it is counts as
    none."""
    options = [row for row in table.values() if isinstance(row, _keywords.Option)]
    return ([(row, row.default if row.default is not None and any(row.encode(row.default)) else None)
             for row in options], [row for row in table.values() if isinstance(row, _keywords.Tensor)])


_ROWS_OF = {_lib.FORWARD: _rows_of(_keywords.FORWARD), _lib.BACKWARD: _rows_of(_keywords.BACKWARD)}


def fill(a: Arguments, given: dict):
    """Everything but the outputs and the inputs of the backward pass. `given` maps names of keywords
    to values; None, or an absent name, is not given."""
    get = given.get
    options, tensors = _ROWS_OF[a.problem.pass_]
    a.paged = get("page_table") is not None
    for row, default in options:
        value = get(row.name)
        if value is not None:
            row.fill(a, value)
        elif default is not None:
            row.fill(a, default)
    for name in ("q", "k", "v"):
        a.put_own(name, get(name))
    if get("keep") is not None and get("drop") is not None:
        raise a.error("drop", get("drop"), "keep and drop are one mask with two polarities; give one")
    for row in tensors:
        if get(row.name) is not None:
            row.fill(a, get(row.name))
    if a.adapter.info(get("align")) is not None:
        a.put_own("shift", get("align"), "align")
    _join(a, get)


def _join(a: Arguments, get):
    """Flags that depend on several keywords."""
    flags = a.problem.flags | _keywords.same_lengths(get)
    if get("smooth") is not None and get("precision") is None:
        raise a.error("smooth", get("smooth"), 'belongs to precision="fp8", which is not given')
    a.problem.flags = _keywords.joined(flags, get("bias") is not None, get)


def is_on(adapter, given: dict, name: str) -> bool:
    """A switch that the front end changes before the call would look at it."""
    value = given.get(name)
    if value is None or type(value) is bool:
        return bool(value)
    return Arguments(adapter, "attention").boolean(name, value)


def statistic(name: str, shape_q, q_dtype: str, layout: str) -> tuple[tuple, str]:
    """(shape, name of the dtype) of lse, [b, hq, sq] or packed [hq, t], of max_logit or of an amax. torch.compile
    traces through it."""
    if name.startswith("amax"):
        return (), "float32"
    b, s, h, _ = ORDERS[layout]
    rows = (shape_q[h], shape_q[s]) if b is None else (shape_q[b], shape_q[h], shape_q[s])
    return rows if name == "lse" else rows[-2:-1], "float64" if q_dtype == "float64" else "float32"


def is_fp8(dtype: str) -> bool:
    return dtype.startswith("float8")


def ask_for_lse(adapter, given: dict) -> bool:
    """Asks for lse where autograd may save it, and says whether users did not. fp8 q has no autograd, and
    kernels that need not sum lse are faster."""
    wanted, q = is_on(adapter, given, "return_lse"), adapter.info(given["q"])
    given["return_lse"] = wanted or q is None or not is_fp8(q.dtype)
    return given["return_lse"] and not wanted


def no_autograd(dtype: str, package: str, stop: str) -> Exception:
    """What a front end with autograd raises of an fp8 q, where a gradient is asked for."""
    return _lib.Refused(f"tessera.attention: q.dtype={dtype}: has no autograd, and a gradient is asked for here; "
                        f"use {stop} and {package}.attention_backward")


def accumulates(a: Arguments, given: dict) -> bool:
    """Whether the forward pass adds to the arrays `out` and `lse` of `given`, which are there then."""
    adds = bool(a.problem.flags & _lib.ACCUMULATE)
    for name in ("out", "lse"):
        if adds and given.get(name) is None:
            raise a.error("accumulate", True, f"adds to what {name}= holds, which is not given")
    if not adds and given.get("lse") is not None:
        raise a.error("lse", given["lse"], "is what accumulate=True adds to; give both, or "
                      "return_lse=True for a new one")
    return adds


def rng_words(a: Arguments, value) -> list[int]:
    """A list or tuple of two or four integers."""
    if len(value) == 4:
        return [a.integer(f"rng_state[{i}]", word) for i, word in enumerate(value)]
    return list(a.pair_of_integers("rng_state", value, "(seed, offset)"))


def pairs_of(adapter, parts):
    """Checks that the argument of merge is a list of pairs. torch.compile traces it, so that it makes Arguments
    for messages alone."""
    if not isinstance(parts, (list, tuple)) or not parts:
        raise Arguments(adapter, "merge").error("parts", parts, "must be a list of at least one pair (o, lse)")
    for i, part in enumerate(parts):
        if not isinstance(part, (list, tuple)) or len(part) != 2:
            raise Arguments(adapter, "merge").error(f"parts[{i}]", part, "must be a pair (o, lse)")
    return parts


def mask_inputs(a: Arguments, extents: dict, rng_state, starts: dict) -> tuple[int, ...]:
    """Checks what dropout_mask takes, and returns the extents: those of b, hq, sq and sk that are known now,
    rng_state, and `starts`, the positions of each sequence's first row and key or None."""
    sizes = {name: a.integer(name, value) for name, value in extents.items()}
    for name, size in sizes.items():
        if size < 0:
            raise a.error(name, size, "must not be negative")
    if math.prod(sizes.values()) >= 2**63:
        raise a.error(", ".join(sizes), tuple(sizes.values()), "the mask must have fewer than 2^63 elements")
    info = a.put("rng_state", "rng_state", rng_state, (0,), axes="2|4")
    if info.dtype != "int64" or info.shape not in ((2,), (4,)):
        raise a.error("rng_state", f"{info.dtype}{list(info.shape)}", "must be int64 of shape [2], "
                      "(seed, offset), or [4], (seed, offset, first, stride)")
    for name, start in starts.items():
        if start is None:
            continue
        info = a.put(name, name, start, (0,), axes="b")
        b = sizes.get("b", info.shape[0])
        if info.dtype not in ("int32", "int64") or info.shape != (b,):
            raise a.error(name, f"{info.dtype}{list(info.shape)}", f"must be int32 or int64 of shape [{b}]")
    return tuple(sizes.values())


def _in_array_order(axes: str, order) -> str:
    names = axes.split(", ")
    shown = [""] * sum(axis is not None for axis in order)
    for i, axis in enumerate(order):
        if axis is not None:
            shown[axis] = "t" if None in order and names[i].startswith("s") else names[i]
    return ", ".join(shown)


def _text(value) -> str:
    """A value in a message: short values as they are, others by their type."""
    if isinstance(value, (str, bool, int, float, type(None))) or _keywords.is_number(value):
        text = repr(value) if isinstance(value, str) else str(value)
        return text if len(text) <= 60 else text[:57] + "..."
    if isinstance(value, (tuple, list)) and len(value) <= 8:
        inner = ", ".join(_text(item) for item in value)
        if len(inner) <= 60:
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return type(value).__name__
