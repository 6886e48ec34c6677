# SPDX-License-Identifier: Apache-2.0
"""attention, explain and prepare: keywords in, one operator out."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as _Shard

from ... import _lib
from ..._call import _keywords
from ..._call._description import Description
from ...context_parallel import Plan, Shards, plan as _plan
from .. import _describe, _functions, _later, _tensors
from ..comm import Topology, by_name
from . import _check, _local, _op, _rows, _spec

_OPERATION = "tessera.context_parallel.attention"
_CARRIED = {*_spec.KEYWORDS, *_local.OPTIONS, *_local.TENSORS, "return_lse", "return_max_logit"}
_REASONS = {"page_table": "use decode for a cache", "out": "it returns a new tensor",
            "lse": "return_lse=True gives a new one"}
_REFUSED = {name: _REASONS.get(name, "fp8 q does not travel" if row.raw else "leave it out")
            for name, row in _keywords.FORWARD.items() if name not in _CARRIED and not row.lengths}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, shards: Shards | None = None,
              group=None, shards_k: Shards | None = None, exchange: str = "auto",
              groups_of_heads: int | None = None, save_gathered: bool = False,
              max_bytes: int | None = None, **keywords):
    """tessera.torch.attention of the whole sequences, of which each rank has the rows that `shards`
    gives it; differentiable.

    q [b, s, hq, dqk], k [b, s, hk, dqk], v [b, s, hk, dv] -> o [b, s, hq, dv] with s the rows of this
    rank, for layout="bshd", "sbhd" and "bhsd" permute; packed [t, h, d] for layout="thd", t the
    tokens of this rank. Where sequences of a padded batch differ in length, s is at least the
    longest's share, and what lies behind a sequence's own share is padding. shards_k says where keys
    lie, if not as queries do. group is a ProcessGroup, a DeviceMesh of one axis, or (inner, outer)
    for two levels; a mesh of two axes is (outer, inner). DTensors whose sequence axis is sharded bring
    group and shards with them.

    Keywords are those of tessera.torch.attention but lengths, which are in `shards`, pages, fp8's
    and those of outputs. Segment ids go with their rows; key_ranges and dense masks and biases have
    this rank's rows, and keys of the whole sequence; what has no rows (sink, slopes, key masks) is
    whole on every rank, and its gradient is this rank's share, as of any weight. align may be an
    integer, or a tuple of one for each sequence. Without rng_state, rank 0's draw is everyone's.
    exchange is "auto", "heads", "keys" or "ring", groups_of_heads how many groups of kv heads
    "keys" and "heads" are cut into, max_bytes how large buffers may be. With save_gathered "keys"
    keeps the k and v that it fetched for the backward pass, which then fetches nothing; other
    exchanges pay no heed.

    Returns o[, lse][, max_logit] as tessera.torch.attention does. All ranks must call it, in the same
    order. ValueError on every rank for what one refuses, and where ranks disagree.

    >>> o = attention(q, k, v, shards=Shards.zigzag([s], group.size()), group=group, causal=True)
    """
    if isinstance(q, DTensor):
        return _of_dtensors(q, k, v, shards, group, dict(
            keywords, exchange=exchange, groups_of_heads=groups_of_heads, max_bytes=max_bytes,
            shards_k=shards_k, save_gathered=save_gathered))
    names = _spec.names_of(group)
    how = exchange, groups_of_heads, bool(save_gathered), max_bytes
    if torch.compiler.is_compiling():
        call = _call(q, k, v, shards, shards_k, names, how, keywords)
    else:
        try:
            call = _call(q, k, v, shards, shards_k, names, how, keywords)
        except (ValueError, TypeError, _lib.Refused) as error:
            _refuse(error, names, q)
    o, lse, max_logit, *_ = _run(call.arguments)
    o, lse = call.shape.o(o), call.shape.lse(lse)
    want_lse, want_max = keywords.get("return_lse"), keywords.get("return_max_logit")
    if not want_lse and not want_max:
        return o
    return (o,) + (lse,) * bool(want_lse) + (max_logit,) * bool(want_max)


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, shards: Shards, group=None,
            shards_k: Shards | None = None, exchange: str = "auto",
            groups_of_heads: int | None = None, save_gathered: bool = False,
            max_bytes: int | None = None, links=None, **keywords) -> Plan:
    """What attention would exchange and why: bytes, exposed time, memory, balance of every exchange,
    by a model of the machine (tessera.context_parallel.Links). Computes and sends nothing; without a
    group, shards.size ranks of one level.

    >>> print(explain(q, k, v, shards=shards, group=group, causal=True))
    """
    inner = 1 if group is None else _sizes(*_spec.names_of(group))[1]
    hq, hk, dqk, dv = _heads(q, k, v, *_layouts(keywords))
    return _plan(shards, shards_k=shards_k, hq=hq, hk=hk, dqk=dqk, dv=dv, itemsize=k.element_size(),
                 causal=bool(keywords.get("causal")), window=_pair(keywords.get("window")),
                 shifts=_spec._shifts(_align(keywords.get("align")), shards, shards_k or shards),
                 inner=inner, exchange=exchange, groups=groups_of_heads,
                 has_rows=_has_rows(keywords), save_gathered=bool(save_gathered), max_bytes=max_bytes,
                 links=links)


def prepare(shards: Shards, group, *, hq: int, hk: int, dqk: int, dv: int, dtype: torch.dtype,
            device, shards_k: Shards | None = None, **keywords):
    """Does once, on every rank, what the first call would: agrees, builds tables on the device, warms
    up communication, forward and backward. Must come before CUDA graph capture; keywords are those
    of the calls to come.

    >>> prepare(shards, group, hq=32, hk=8, dqk=128, dv=128, dtype=torch.bfloat16, device="cuda",
    ...         causal=True)
    """
    rank = _sizes(*_spec.names_of(group))[0]
    rows = [one.extents[rank] for one in (shards, shards_k or shards)]
    q, k, v = (torch.zeros(t, h, d, dtype=dtype, device=device, requires_grad=True) for t, h, d in
               ((rows[0], hq, dqk), (rows[1], hk, dqk), (rows[1], hk, dv)))
    o = attention(q, k, v, shards=shards, group=group, shards_k=shards_k,
                  **{"layout": "thd", **keywords})
    (o[0] if isinstance(o, tuple) else o).sum().backward()


# ---- below: how ----

class _Shape(NamedTuple):
    """How this rank's tensors become packed rows, and back."""
    layout: str
    sequences: int
    extent: int                        # rows of each sequence in the caller's tensors
    rows: tuple[int, ...] | None       # of those, the shards' rows; None for all

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, ...] of the shards, from rows of the caller's."""
        return x if self.rows is None else x.index_select(0, self._index(x))

    def o(self, o):
        if self.rows is not None:
            o = o.new_zeros(self.sequences * self.extent, *o.shape[1:]).index_copy(
                0, self._index(o), o)
        return _rows.from_rows(o, self.layout, self.sequences)

    def lse(self, lse):
        if self.rows is not None:
            lse = lse.new_full((lse.shape[0], self.sequences * self.extent),
                               -torch.inf).index_copy(1, self._index(lse), lse)
        return _rows.lse_from_rows(lse, self.layout, self.sequences)

    def _index(self, x):
        return torch.tensor(self.rows, dtype=torch.int64, device=x.device)


class _Operator(NamedTuple):
    """What tessera::cp_attention is called with, and how its rows become the caller's."""
    arguments: tuple
    shape: _Shape


def _call(q, k, v, shards, shards_k, names, how, keywords) -> _Operator:
    """The operator's arguments; `how` is (exchange, groups of heads, save_gathered, max_bytes).
    torch.compile traces through it."""
    for name in keywords:
        if name in _keywords.LENGTHS and keywords[name] is not None:
            raise ValueError(f"{_OPERATION}: {name}=...: lengths and starts are in shards; leave it "
                             "out")
        if name in _REFUSED and keywords[name] is not None:
            raise ValueError(f"{_OPERATION}: {name}=...: does not go with shards; {_REFUSED[name]}")
    if not isinstance(shards, Shards) or not isinstance(shards_k, (Shards, type(None))):
        raise ValueError(f"{_OPERATION}: shards={type(shards).__name__}: must be "
                         "tessera.context_parallel.Shards, as must shards_k where it is given")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{_OPERATION}: {name}={type(x).__name__}: must be a PyTorch tensor")
    keys = shards if shards_k is None else shards_k
    layouts = _layouts(keywords)
    rank, inner = _sizes(*names)
    shape_q = _shape("q", q, layouts[0], shards.text, rank)
    shape_k = _shape("k", k, layouts[1], keys.text, rank)
    heads = _heads(q, k, v, *layouts)
    q = shape_q.pack(_rows.to_rows(q, layouts[0]))
    k, v = (shape_k.pack(_rows.to_rows(x, layouts[1])) for x in (k, v))
    align = _align(keywords.get("align"))
    window, causal = _pair(keywords.get("window")), bool(keywords.get("causal"))
    _check_band(window, causal, align, keywords, shards_k is None or shards_k is shards)
    draws = bool(keywords.get("dropout_p")) and keywords.get("rng_state") is None
    text = _text(shards.text, keys.text, inner, how, causal, window, align, heads,
                 k.dtype.itemsize, _has_rows(keywords), draws)
    rest = {name: value for name, value in keywords.items()
            if name not in _spec.KEYWORDS and name not in _keywords.LENGTHS}
    rest["layout"] = "thd"
    if rest.get("segment_ids") is not None:
        rest["segment_ids"] = _ids(rest["segment_ids"], layouts, shape_q, shape_k, q, k)
    if rest.get("key_ranges") is not None:
        rest["key_ranges"] = _ranges(rest["key_ranges"], layouts[0], shape_q)
    return _Operator((*_sorted(q, k, v, rest), text, *names), shape_q)


def _sorted(q, k, v, keywords) -> tuple:
    """Tensors, sizes and the text of a call."""
    _functions._complete("attention", q, keywords)
    names, tensors, options, flags = _functions._sorted(q, k, v, keywords)
    outputs = _functions._outputs(None, keywords)  # with lse: parts are merged by it
    if torch.compiler.is_compiling():
        return tensors, *_describe.written(names, options, flags, outputs)
    return tensors, *_functions._call(names, options, flags, outputs, (), q, lambda: Description(
        _tensors, "attention", {**keywords, "q": q, "k": k, "v": v}))


def _run(arguments):
    if torch.compiler.is_compiling():
        return _op.attention(*arguments)
    return _op._autograd(*arguments)


def _refuse(error: Exception, names, q):
    """Raises this rank's error on every rank that is at its first such call."""
    def again():
        raise error
    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
    _check.agree((object(),), Topology(by_name(names[0]), by_name(names[1])), device, again, dict)


@_later.constant
def _sizes(inner: str, outer: str) -> tuple[int, int]:
    """(rank, size of the inner groups)."""
    topology = Topology(by_name(inner), by_name(outer))
    return topology.rank, topology.inner.size


@_later.constant
def _text(*arguments) -> str:
    return _spec.spec_text(*arguments)


def _layouts(keywords) -> tuple[str, str]:
    layout = keywords.get("layout") or "bshd"
    pair = layout if isinstance(layout, tuple) and len(layout) == 2 else (layout, layout)
    for one in pair:
        if one not in _lib.FORMATS:
            raise ValueError(f"{_OPERATION}: layout={layout!r}: must be one of "
                             f"{', '.join(_lib.FORMATS)}, or a pair of them")
    return pair


def _heads(q, k, v, layout_q, layout_kv) -> tuple[int, int, int, int]:
    """(hq, hk, dqk, dv)"""
    for name, x, layout in (("q", q, layout_q), ("k", k, layout_kv), ("v", v, layout_kv)):
        if x.dim() != len(layout):
            raise ValueError(f"{_OPERATION}: {name}.shape={list(x.shape)}: must have the axes of "
                             f"layout={layout!r}")
    axis = [1 if layout == "bhsd" else layout.index("h") for layout in (layout_q, layout_kv)]
    hq, hk, dqk, dv = q.shape[axis[0]], k.shape[axis[1]], q.shape[-1], v.shape[-1]
    if not hk or hq % hk:
        raise ValueError(f"{_OPERATION}: q.shape={list(q.shape)}: heads {hq} must be a multiple of "
                         f"k's, {hk}")
    return hq, hk, dqk, dv


def _shape(name: str, x, layout: str, text: str, rank: int) -> _Shape:
    if layout == "thd":
        return _Shape(layout, 1, x.shape[0], None)
    at = layout.index("s")
    sequences, extents, rows = _padded_rows(text, rank, x.shape[at])
    if x.shape[layout.index("b")] != sequences:
        raise ValueError(f"{_OPERATION}: {name}.shape={list(x.shape)}: must have the {sequences} "
                         f"sequences of {Shards.parse(text)!r}")
    if extents > x.shape[at]:
        raise ValueError(f"{_OPERATION}: {name}.shape[{at}]={x.shape[at]}: rank {rank} holds "
                         f"{extents} tokens of a sequence of {Shards.parse(text)!r}")
    if rows is None and extents != x.shape[at]:
        raise ValueError(f"{_OPERATION}: {name}.shape[{at}]={x.shape[at]}: rank {rank} holds "
                         f"{extents} tokens of {Shards.parse(text)!r}")
    return _Shape(layout, sequences, x.shape[at], rows)


@_later.constant
def _padded_rows(text: str, rank: int, extent: int):
    return _rows_of(text, rank, extent)


@functools.lru_cache(maxsize=1024)
def _rows_of(text: str, rank: int, extent: int):
    """(sequences, the longest's rows on the rank, the shards' rows in [sequences * extent], or None
    for all of them)."""
    shards = Shards.parse(text)
    if rank >= shards.size:  # a group larger than the shards, which the check names
        return len(shards.lengths), extent, None
    own = [int(n) for n in shards.extents_of_sequences(rank)]
    if len(set(own)) <= 1:
        return len(own), own[0] if own else extent, None
    rows = tuple(n * extent + row for n, count in enumerate(own) for row in range(count))
    return len(own), max(own), rows


def _ids(ids, layouts, shape_q, shape_k, q, k):
    pair = ids if isinstance(ids, tuple) else (ids, ids)
    return tuple(shape.pack(_rows.ids_to_rows(x, layout))
                 for x, layout, shape in zip(pair, layouts, (shape_q, shape_k)))


def _ranges(ranges, layout, shape):
    ranges = _rows.ranges_to_rows(ranges, layout, shape.sequences, shape.extent)
    if shape.rows is None or ranges.shape[1] == 1:
        return ranges
    return shape.pack(ranges.transpose(0, 1)).transpose(0, 1)


def _has_rows(keywords) -> bool:
    return any(isinstance(keywords.get(name), torch.Tensor) and keywords[name].dim() > 1 and
               keywords[name].shape[-2] != 1 for name in _keywords.DENSE)


def _pair(window):
    return window if window is None else (int(window[0]), int(window[1]))


def _align(align):
    """None, a word, an integer, or a tuple of one for each sequence."""
    if align is None or isinstance(align, (str, int)):
        return align
    return tuple(int(x) for x in (align.tolist() if hasattr(align, "tolist") else align))


def _check_band(window, causal, align, keywords, same: bool):
    bounded = causal or window is not None and window != (-1, -1)
    if align is None and not same and (bounded or keywords.get("alibi_slopes") is not None):
        raise ValueError(f"{_OPERATION}: align=None: must be given where causal, window or "
                         "alibi_slopes are on and keys have shards of their own: \"top_left\", "
                         '"bottom_right" or the diagonal')
    if isinstance(align, str) and align not in _lib.ALIGNS:
        raise ValueError(f"{_OPERATION}: align={align!r}: must be \"top_left\", \"bottom_right\" or "
                         "the diagonal")
    if window is not None and (min(window) < -1 or causal and window[1] not in (-1, 0)):
        raise ValueError(f"{_OPERATION}: window={window}: both must be >= -1, and with causal right "
                         "must be -1 or 0")


def _of_dtensors(q, k, v, shards, group, keywords):
    """DTensors of one mesh axis, whose sequence axis is sharded in chunks of equal length."""
    layout = _layouts(keywords)[0]
    mesh, at = q.device_mesh, layout.index("s" if layout != "thd" else "t")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor) or x.device_mesh != mesh or mesh.ndim != 1 or \
                not x.placements[0].is_shard(at):
            raise ValueError(f"{_OPERATION}: {name}={type(x).__name__}: must be a DTensor on q's "
                             f"mesh of one axis, with the placement Shard({at})")
    if shards is None:
        sequences = 1 if layout == "thd" else q.shape[layout.index("b")]
        shards, shards_k = (_chunks(x.shape[at], mesh.size(), sequences) for x in (q, k))
        keywords["shards_k"] = keywords["shards_k"] or (shards_k if shards_k != shards else None)
    results = attention(q.to_local(), k.to_local(), v.to_local(), shards=shards,
                        group=mesh if group is None else group, **keywords)
    tensors = results if isinstance(results, tuple) else (results,)
    axes = [at] + [1 if layout == "thd" else 2] * bool(keywords.get("return_lse"))
    shapes = [(*q.shape[:-1], v.shape[-1])]
    wrapped = []
    for x, axis in zip(tensors, axes):
        shape = shapes[0] if x is tensors[0] else (*x.shape[:axis], q.shape[at])
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        wrapped.append(DTensor.from_local(x.contiguous(), mesh, [_Shard(axis)], run_check=False,
                                          shape=torch.Size(shape), stride=tuple(strides[::-1])))
    wrapped += tensors[len(axes):]
    return tuple(wrapped) if isinstance(results, tuple) else wrapped[0]


def _chunks(length: int, size: int, sequences: int) -> Shards:
    """DTensor's own cuts, those of torch.chunk."""
    step = max(-(-length // size), 1)
    return Shards.of([[(n, min(rank * step, length), max(min(step, length - rank * step), 0))
                       for n in range(sequences)] for rank in range(size)])
