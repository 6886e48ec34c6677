# SPDX-License-Identifier: Apache-2.0
"""attention and sharded: what runs on each device of a mesh axis.

Every device runs the same program. What differs between ranks (which rows are which positions) is a
constant table, of which a device takes its row by its index on the axis.

    keys    all_gather of k and v; a call for each of a sequence's runs of queries, on whole keys
    ring    k and v go round by ppermute; a call for each pair of runs, parts merged by lse (_ring)
    heads   all_to_all to some heads of whole sequences, one call, all_to_all back
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ... import _lib
from ..._call import _args, _keywords
from ...context_parallel import Shards
from .. import _arrays, _functions
from ._ring import Ring, is_compiled
from ._rows import OPERATION, Rows, Slot, error, mine, rows_of, slot_places, slots_of, taken, whole

_ORDERS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3), "thd": None}
_PASSED = ("softmax_scale", "softcap", "sink", "alibi_slopes", "dropout_p", "rng_state", "causal", "window",
           "deterministic", "backend")
_OWN = ("layout", "align", "return_lse", "return_max_logit")
_EXCHANGES = ("auto", "heads", "keys", "ring")
_MOST_RUNS = 16  # of a sequence on a rank, or pairs of runs in a ring; each is a call in the program


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, axis_name: str | tuple[str, ...], shards: Shards,
              shards_k: Shards | None = None, exchange: str = "auto", **keywords):
    """tessera.jax.attention of the whole sequences, of which each device of a mesh axis has the rows
    that `shards` gives its rank; differentiable. Must be called inside a shard_map over `axis_name`,
    whose size is shards.size.

    q [b, s, hq, dqk], k [b, s, hk, dqk], v [b, s, hk, dv] -> o [b, s, hq, dv] for layout="bshd", and
    "sbhd" and "bhsd" permute: of each sequence this rank's rows, then slack, with s the most that any
    rank holds of a sequence. For layout="thd", [t, h, d], this rank's buffer, then slack, with t the
    largest buffer. Both are at least 1. Slack may hold anything, and is 0 in o and -inf in lse. shards_k says where
    keys lie, if not as queries do.

    Keywords are causal, window, align, softmax_scale, softcap, sink, alibi_slopes, dropout_p,
    rng_state, deterministic, backend, layout, return_lse and return_max_logit, as of
    tessera.jax.attention; align may be an integer, or a tuple of one for each sequence. sink, slopes
    and rng_state are the same on every device, and dropout's mask is that of one device. exchange
    is "keys", "ring" (least memory), "heads" (both kinds of heads must be multiples of the devices), or
    "auto", which is "keys" or "heads".

    Returns o[, lse][, max_logit]. ValueError and Refused are raised as the program is traced.

    >>> o = attention(q, k, v, axis_name="cp", shards=Shards.zigzag([s] * b, 4), causal=True)
    """
    call = _OnShards(q, k, v, axis_name, shards, shards_k, keywords)
    run = {"heads": _by_heads, "keys": _by_keys, "ring": _by_ring}[call.chosen(exchange)]
    o, lse, max_logit = run(call)
    wanted = [o]
    if call.want_lse:
        wanted.append(call.lse(lse))
    if call.want_max_logit:
        wanted.append(jax.lax.pmax(jax.lax.stop_gradient(max_logit), axis_name))
    wanted[0] = call.o(o)
    return tuple(wanted) if len(wanted) > 1 else wanted[0]


def sharded(mesh: jax.sharding.Mesh, axis: str | tuple[str, ...], *, shards: Shards,
            shards_k: Shards | None = None, exchange: str = "auto", **keywords):
    """attention on arrays whose sequence axis is split over the mesh axis `axis`, in the order that
    shard gives: a function of (q, k, v), and of sink, alibi_slopes and rng_state by name, which may
    also be among the keywords here. Other axes of the mesh stay with the partitioner.

    q [b, size * s, hq, dqk] and so on, or packed [size * t, h, d] for layout="thd"; results are split as
    q is. ValueError and Refused as of attention.

    >>> attend = sharded(mesh, "cp", shards=shards, causal=True)
    >>> o = attend(q, k, v, sink=sink)
    """
    layout = keywords.get("layout") or "bshd"
    if layout not in _ORDERS:
        raise _layout_error(layout)
    at = layout.index("t" if layout == "thd" else "s")
    rows = jax.sharding.PartitionSpec(*[None] * at, axis)
    lse = jax.sharding.PartitionSpec(*[None] * (1 if layout == "thd" else 2), axis)
    nowhere = jax.sharding.PartitionSpec()
    out = [rows] + [lse] * bool(keywords.get("return_lse")) + \
        [nowhere] * bool(keywords.get("return_max_logit"))
    axes = {axis} if isinstance(axis, str) else set(axis)

    def call(q, k, v, **arrays):
        arrays = {name: x for name, x in arrays.items() if x is not None}
        for name in arrays:
            if name not in ("sink", "alibi_slopes", "rng_state"):
                raise error(name, "...", "must be given to sharded; its function takes q, k, v, sink, "
                            "alibi_slopes and rng_state", "tessera.context_parallel.sharded")
        options = {name: x for name, x in keywords.items() if name not in arrays}
        # What JAX cannot pass into a shard_map ("off_by_one", a tuple of words) is closed over.
        arrays, closed = ({name: x for name, x in arrays.items() if isinstance(x, jax.Array) == of}
                          for of in (True, False))

        def one(q, k, v, arrays):
            return attention(q, k, v, axis_name=axis, shards=shards, shards_k=shards_k,
                             exchange=exchange, **options, **closed, **arrays)
        return jax.shard_map(one, mesh=mesh, in_specs=(rows, rows, rows, nowhere),
                             out_specs=tuple(out) if len(out) > 1 else rows,
                             axis_names=axes)(q, k, v, arrays)
    return call


# ---- a call, checked ----

class _OnShards:
    """q, k and v as rows, and what is known of the problem when a program is traced."""

    def __init__(self, q, k, v, axis_name, shards, shards_k, keywords):
        self.axis, self.keywords = axis_name, _checked(keywords)
        for name, one in (("shards", shards), ("shards_k", shards if shards_k is None else shards_k)):
            if not isinstance(one, Shards):
                raise error(name, type(one).__name__, "must be tessera.context_parallel.Shards")
            if not one.lengths:
                raise error(name, repr(one), "must have a sequence, which may be empty")
        keys = shards if shards_k is None else shards_k
        if keys.size != shards.size or len(keys.lengths) != len(shards.lengths):
            raise error("shards_k", repr(keys), f"must have the size and as many sequences as {shards!r}")
        self.layout = keywords.get("layout") or "bshd"
        if self.layout not in _ORDERS:
            raise _layout_error(self.layout)
        _check_axis(axis_name, shards)
        is_packed = self.layout == "thd"
        self.rows, self.rows_k = rows_of(shards, is_packed), rows_of(keys, is_packed)
        self.q, self.k, self.v = (
            self._packed(name, x, rows) for name, x, rows in
            (("q", q, self.rows), ("k", k, self.rows_k), ("v", v, self.rows_k)))
        if _args.is_fp8(q.dtype.name):
            raise _lib.Refused(f"{OPERATION}: q.dtype={q.dtype.name}: does not travel; use bfloat16")
        self.hq, self.hk = self.q.shape[1], self.k.shape[1]
        if not self.hk or self.hq % self.hk or self.v.shape[1] != self.hk:
            raise error("q.shape", list(q.shape), f"hq={self.hq} must be a multiple of k's heads, "
                        f"{self.hk}, which v has too ({self.v.shape[1]})")
        _check_window(self.keywords.get("window"))
        self.shifts = self._shifts(shards_k is not None and keys.lengths != shards.lengths)
        self.want_lse = bool(keywords.get("return_lse"))
        self.want_max_logit = bool(keywords.get("return_max_logit"))

    def chosen(self, exchange: str) -> str:
        """"heads", "keys" or "ring"."""
        if exchange not in _EXCHANGES:
            raise error("exchange", repr(exchange), "must be one of " + ", ".join(_EXCHANGES))
        size, runs = self.rows.shards.size, len(slots_of(self.rows))
        divides = self.hq % size == 0 and self.hk % size == 0
        if exchange == "auto":
            is_less = self.hq // self.hk + 1 < size
            exchange = "heads" if divides and (is_less or runs > _MOST_RUNS) else "keys"
        if exchange == "heads" and not divides:
            raise error("exchange", "'heads'", f"hq={self.hq} and hk={self.hk} must be multiples of "
                        f"{size} devices; use \"keys\"")
        if exchange == "keys" and runs > _MOST_RUNS:
            raise _lib.Refused(
                f"{OPERATION}: exchange='keys': {self.rows.shards!r} cuts a sequence into {runs} runs a "
                f"rank, of which each is a call, and at most {_MOST_RUNS} are taken; use Shards.zigzag, "
                f"or \"heads\" with heads that are multiples of {size}")
        pairs = runs * len(slots_of(self.rows_k))
        if exchange == "ring" and not is_compiled():
            raise _lib.Refused(f"{OPERATION}: exchange='ring': XLA's compiler for CPUs dies of a ring in JAX "
                               f"{jax.__version__}; use 'keys', or JAX 0.10")
        if exchange == "ring" and pairs > _MOST_RUNS:
            raise _lib.Refused(
                f"{OPERATION}: exchange='ring': {self.rows.shards!r} and {self.rows_k.shards!r} cut a "
                f"sequence into {pairs} pairs of runs on two ranks, of which each is a call, and at most "
                f"{_MOST_RUNS} are taken; use Shards.zigzag, or \"keys\"")
        return exchange

    @property
    def window(self) -> tuple[int, int]:
        """(left, right), -1 for unbounded."""
        left, right = self.keywords.get("window", (-1, -1))
        return left, 0 if self.keywords.get("causal") else right

    def passed(self) -> dict:
        """Keywords of every call of attention."""
        return {name: self.keywords[name] for name in _PASSED if self.keywords.get(name) is not None}

    @property
    def diagonal(self):
        """Each sequence's diagonal: a word where one says it, else an integer or an array."""
        lengths = [rows.shards.lengths for rows in (self.rows, self.rows_k)]
        if not any(self.shifts):
            return "top_left"
        if list(self.shifts) == [k - q for q, k in zip(*lengths)]:
            return "bottom_right"
        return self.diagonal_of_whole

    @property
    def diagonal_of_whole(self):
        """As an integer or an array: the diagonal beside starts."""
        return jnp.asarray(self.shifts, jnp.int32) if len(set(self.shifts)) > 1 else (*self.shifts, 0)[0]

    def o(self, rows):
        return self._ordered(rows) if self.layout == "thd" else \
            self._ordered(rows).transpose(_ORDERS[self.layout])

    def lse(self, rows):
        """[t, hq] -> [hq, t], or [b, hq, s]."""
        return jnp.moveaxis(self._ordered(rows), -1, -2)

    def _ordered(self, rows):
        if self.layout == "thd":
            return rows
        return rows.reshape(len(self.rows.shards.lengths), self.rows.extent, *rows.shape[1:])

    def _packed(self, name: str, x, rows: Rows):
        if not isinstance(x, jax.Array):
            raise error(name, type(x).__name__, "must be a JAX array")
        order = _ORDERS[self.layout]
        if x.ndim != len(self.layout):
            raise error(f"{name}.shape", list(x.shape), f"must have the axes of layout={self.layout!r}")
        wanted = (rows.count,) if order is None else (len(rows.shards.lengths), rows.extent)
        x_ = x if order is None else x.transpose(order)
        if x_.shape[:len(wanted)] != wanted:
            axes = "t" if order is None else "b, s"
            raise error(f"{name}.shape", list(x.shape), f"must have {axes} = "
                        f"{', '.join(map(str, wanted))}, the most that a rank of {rows.shards!r} holds, "
                        f"for layout={self.layout!r}")
        return x_ if order is None else x_.reshape(-1, *x_.shape[2:])

    def _shifts(self, differ: bool) -> tuple[int, ...]:
        """The diagonal of each whole sequence."""
        align, lengths = self.keywords.get("align"), self.rows.shards.lengths
        if align is None and differ and (self.window != (-1, -1) or self.keywords.get("alibi_slopes") is not None):
            raise error("align", None, "must be given where causal, window or alibi_slopes are on and "
                        'keys have lengths of their own: "top_left", "bottom_right" or the diagonal')
        if align == "bottom_right":
            return tuple(k - q for q, k in zip(lengths, self.rows_k.shards.lengths))
        if align is None or align == "top_left":
            return (0,) * len(lengths)
        values = (align,) * len(lengths) if isinstance(align, (int, np.integer)) else align
        try:
            values = tuple(int(x) for x in values) if not isinstance(values, str) else ()
        except (TypeError, jax.errors.JAXTypeError):
            values = ()
        if len(values) != len(lengths) or isinstance(align, bool):
            raise error("align", repr(align), 'must be "top_left", "bottom_right", a Python integer or '
                        "a tuple of one for each sequence")
        return values


def _checked(keywords: dict) -> dict:
    given = {name: value for name, value in keywords.items() if value is not None}
    for name in given:
        if name in _keywords.LENGTHS:
            raise error(name, "...", "lengths and starts are in shards; leave it out")
        if name not in _PASSED + _OWN:
            if name in _functions.FORWARD:
                raise _lib.Refused(f"{OPERATION}: {name}=...: does not go with shards on a mesh yet; "
                                   f"{', '.join(_PASSED + _OWN)} do")
            raise _keywords.unexpected(OPERATION, name, _PASSED + _OWN)
    return given


def _check_window(window):
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2 or
                               not all(isinstance(n, (int, np.integer)) for n in window)):
        raise error("window", repr(window), "must be a pair (left, right) of integers")


def _layout_error(layout) -> ValueError:
    return error("layout", repr(layout), "must be one of " + ", ".join(_ORDERS))


def _check_axis(axis_name, shards: Shards):
    try:
        size = jax.lax.axis_size(axis_name)
    except NameError:
        raise error("axis_name", repr(axis_name), "must be an axis of the shard_map around the call; "
                    "sharded makes one") from None
    if size != shards.size:
        raise error("axis_name", repr(axis_name), f"must have the {shards.size} devices of {shards!r}, "
                    f"and has {size}")


# ---- keys ----

def _by_keys(call: _OnShards):
    """(o [t, hq, dv], lse [t, hq], max_logit [hq])"""
    slots = slots_of(call.rows)
    there, back = slot_places(call.rows, call.axis)
    q = taken(call.q, there, back)
    ks, vs = (whole(x, call.axis, call.rows_k, len(slots)) for x in (call.k, call.v))
    parts, begin = [], 0
    for slot, k, v in zip(slots, ks, vs):
        n = slot.extent
        parts.append(_functions.attention(
            jax.lax.slice_in_dim(q, begin, begin + n), k, v, layout="thd", cu_seqlens_q=mine(call.axis, slot.cu),
            **_seen(call, slot), max_seqlen_q=slot.longest,
            max_seqlen_k=max(call.rows_k.shards.lengths),
            return_lse=True, return_max_logit=call.want_max_logit, **call.passed()))
        begin += n
    o, lse = jnp.concatenate([x[0] for x in parts]), jnp.concatenate([x[1].T for x in parts])
    peak = functools.reduce(jnp.maximum, (x[2] for x in parts)) if call.want_max_logit else None
    return taken(o, back, there), taken(lse, back, there, -jnp.inf), peak


def _seen(call: _OnShards, slot: Slot) -> dict:
    """Keywords that say which of the whole keys each run sees. Starts can say all; they are left out
    where they are not needed, as GPUs do not take them yet."""
    keys = call.rows_k.shards.lengths
    cu_k = jnp.asarray(np.cumsum([0, *keys]), jnp.int32)
    left, right = call.window
    is_plain = not call.keywords.get("dropout_p") and not any(call.shifts)
    if is_plain and left < 0 and right < 0 and "alibi_slopes" not in call.keywords:
        return {"cu_seqlens_k": cu_k, "align": "top_left"}
    if is_plain and right == 0 and keys == call.rows.shards.lengths:
        # No run sees past its last position: its diagonal ends in the corner of the keys up to there.
        lengths = np.diff(slot.cu)
        ends = np.where(lengths, slot.start + lengths, 0)
        cu_seen = np.concatenate([np.zeros((len(ends), 1), int), np.cumsum(ends, 1)], 1)
        return {"cu_seqlens_k": mine(call.axis, cu_seen.astype(np.int32)), "cu_seqlens_k_padded": cu_k,
                "align": "bottom_right"}
    return {"cu_seqlens_k": cu_k, "q_start": mine(call.axis, slot.start), "align": call.diagonal_of_whole}


# ---- ring ----

def _by_ring(call: _OnShards):
    """(o [t, hq, dv], lse [t, hq], max_logit [hq])"""
    keywords = call.passed()
    ring = Ring(call.axis, call.rows, call.rows_k, call.window, call.shifts, keywords, call.want_max_logit)
    there, back = slot_places(call.rows, call.axis)
    places_k = slot_places(call.rows_k, call.axis)
    o, lse, *peak = ring(taken(call.q, there, back), *(taken(x, *places_k) for x in (call.k, call.v)), keywords)
    return taken(o, back, there), taken(lse.T, back, there, -jnp.inf), peak[0] if peak else None


# ---- heads ----

def _by_heads(call: _OnShards):
    """(o [t, hq, dv], lse [t, hq], max_logit [hq]); max_logit is -inf for other devices' heads."""
    own = call.hq // call.rows.shards.size
    first = jax.lax.axis_index(call.axis) * own
    keywords = call.passed()
    for name in ("sink", "alibi_slopes"):
        x = keywords.get(name)
        if x is not None and not isinstance(x, str):
            x = jnp.asarray(x)
            keywords[name] = x if x.shape[-1] != call.hq else \
                jax.lax.dynamic_slice_in_dim(x, first, own, x.ndim - 1)
    if "rng_state" in keywords:
        keywords["rng_state"] = counted(keywords["rng_state"], first, call.hq)
    cu_q, cu_k = (jnp.asarray(np.cumsum([0, *rows.shards.lengths]), jnp.int32)
                  for rows in (call.rows, call.rows_k))
    if call.rows.shards.lengths == call.rows_k.shards.lengths:
        cu_k = cu_q
    longest = [max(rows.shards.lengths) for rows in (call.rows, call.rows_k)]
    q, k, v = (_to_heads(x, call.axis, rows) for x, rows in
               ((call.q, call.rows), (call.k, call.rows_k), (call.v, call.rows_k)))
    o, lse, *peak = _functions.attention(
        q, k, v, layout="thd", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest[0],
        max_seqlen_k=longest[1], align=call.diagonal, return_lse=True,
        return_max_logit=call.want_max_logit, **keywords)
    if peak:
        peak = [jax.lax.dynamic_update_slice_in_dim(jnp.full(call.hq, -jnp.inf, peak[0].dtype),
                                                    peak[0], first, 0)]
    return (_from_heads(o, call.axis, call.rows), _from_heads(lse.T, call.axis, call.rows, -jnp.inf),
            peak[0] if peak else None)


def _to_heads(x, axis, rows: Rows):
    """[t, h, ...] of this rank -> [tokens, h / size, ...] of whole sequences."""
    x = jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=0, tiled=True)
    return taken(x, rows.where, rows.index.reshape(-1))


def _from_heads(x, axis, rows: Rows, fill=0):
    x = taken(x, rows.index.reshape(-1), rows.where, fill)
    return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=1, tiled=True)


def counted(rng_state, first, heads: int):
    """rng_state for a part of a problem of `heads` heads whose first head, counted over sequences, is
    `first`: the words of a mask that is the whole's."""
    words = _arrays.rng_words(OPERATION, rng_state).array
    if words.shape[0] != 8:
        words = jnp.concatenate([words, jnp.asarray([0, 0, heads, 0], jnp.uint32)])
    return _arrays.Words(words.at[4].add(first.astype(jnp.uint32)))
