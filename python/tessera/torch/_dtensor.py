# SPDX-License-Identifier: Apache-2.0
"""DTensors of tensor and data parallelism: attention of each rank's own batch and heads. Rows of one
sequence on several ranks are tessera.torch.context_parallel's.

    placement of q     Replicate       Shard(batch)    Shard(heads)
    k and v            Replicate       Shard(batch)    Shard(heads), or Replicate and of them the heads that q reads
    o, lse             as q, whatever k and v came as
"""

from __future__ import annotations

import math
import sys

import torch

from .. import _lib
from .._call import _keywords

_NAME = "tessera.attention"
# What each rank's part of is known: by the names of their axes, right-aligned, an extent of 1 for all.
_KNOWN = ("seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded",
          "keep", "drop", "bias", "key_ranges", "segment_ids", "alibi_slopes", "sink", "q_start", "k_start",
          "windows", "page_table")


def are(*tensors) -> bool:
    """Whether one of them is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any([isinstance(x, module.DTensor) for x in tensors])


def refuse(operation: str, *tensors):
    """Raises Refused where one of them is a DTensor, which this operation does not know."""
    if are(*tensors):
        raise _lib.Refused(f"tessera.{operation}: q=DTensor: is not known of DTensors; call it with to_local() of each "
                           "tensor, or differentiate tessera.torch.attention by autograd")


def attention(function, q, k, v, keywords: dict, is_drawn: bool):
    """function(q, k, v, **keywords), which is attention, of DTensors: results are placed as q is. `is_drawn` says
    that each rank has drawn an rng_state of its own."""
    from torch.distributed.tensor import DTensor
    mesh = next(x for x in (q, k, v) if isinstance(x, DTensor)).device_mesh
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor) or x.device_mesh != mesh:
            raise ValueError(f"{_NAME}: {name}={type(x).__name__}: q, k and v must all be DTensors of one mesh; use "
                             "distribute_tensor, or to_local() of each")
    layout = keywords.get("layout") or "bshd"
    if layout not in ("bshd", "sbhd", "bhsd", "thd"):
        raise ValueError(f"{_NAME}: layout={layout!r}: DTensors have one of bshd, sbhd, bhsd and thd")
    split = _split(q, layout)
    at, count = _own(q, layout, split)
    given = {}
    for name, value in keywords.items():
        if name in _KNOWN and value is not None:
            given[name] = tuple(_part(x, _axes_of(name, x), split, q) for x in value) \
                if isinstance(value, tuple) else _part(value, _axes_of(name, value), split, q)
        elif name == "rng_state" and value is not None:
            given[name] = _state(value, q, layout, at, is_drawn)
        elif isinstance(value, torch.Tensor) and value.dim():
            raise _lib.Refused(f"{_NAME}: {name}={type(value).__name__}: is not known of DTensors; call it with "
                               "to_local() of each tensor")
        else:
            given[name] = value
    keys = _keys(k, v, q, layout, split, at["h"], count, given.get("page_table") is not None)
    results = function(_part(q, _places(layout, q), split, q), *keys, **given)
    if not isinstance(results, tuple):
        return _whole(results, layout, q.shape, split, q)
    more = [name for name in ("return_lse", "return_max_logit") if keywords.get(name)]
    b, h, s = (q.shape[layout.index(axis)] if axis in layout else None for axis in "bhs")
    kinds = {"return_lse": ("ht", (h, q.shape[0])) if layout == "thd" else ("bhs", (b, h, s)),
             "return_max_logit": ("h", (h,))}
    axes = [(layout, q.shape), *(kinds[name] for name in more)]
    return tuple(_whole(x, *kind, split, q) for x, kind in zip(results, axes, strict=True))


# ---- below: how ----

def _split(q, layout: str) -> list[str]:
    """For each axis of the mesh what it splits: "b", "h", or "" where all ranks have the same."""
    split = []
    for place in q.placements:
        axis = layout[place.dim] if place.is_shard() else ""
        axis = axis if axis not in ("b", "h") or q.shape[place.dim] > 1 else ""  # nothing to share
        if axis in ("s", "t"):
            raise _lib.Refused(f"{_NAME}: q.placements={tuple(q.placements)}: shards the sequence; use "
                               "tessera.torch.context_parallel.attention, or redistribute to shards of the batch or of "
                               "the heads")
        if axis == "d":
            raise _lib.Refused(f"{_NAME}: q.placements={tuple(q.placements)}: shards the elements of a head; "
                               "redistribute to shards of the batch or of the heads")
        split.append(axis)
    return split


def _own(q, layout: str, split: list[str]) -> tuple[dict[str, int], int]:
    """Where this rank's part of q begins, in sequences and heads, and how many heads it has."""
    at, count = {}, 0
    for axis in "bh":
        first, size = 0, q.shape[layout.index(axis)] if axis in layout else 1
        every = {size}  # what ranks have: all of them refuse, or none
        for on_axis, ranks, rank in zip(split, q.device_mesh.shape, q.device_mesh.get_coordinate()):
            if on_axis == axis:  # the cuts are torch.chunk's
                if any([-(-n // ranks) * (ranks - 1) >= n for n in every]):
                    raise _lib.Refused(f"{_NAME}: q.shape={list(q.shape)}: leaves one of {ranks} ranks without a "
                                       f"{'head' if axis == 'h' else 'sequence'}; use fewer ranks, or redistribute")
                every = {part for n in every for part in (-(-n // ranks), n - -(-n // ranks) * (ranks - 1))}
                step = -(-size // ranks)
                first, size = first + step * rank, min(step, size - step * rank)
        at[axis], count = first, size
    return at, count


def _keys(k, v, q, layout: str, split: list[str], first: int, count: int, is_paged: bool):
    """What this rank's `count` heads of q read, of which `first` is the first. k and v are cut as q is where that
    gives these heads; otherwise every rank has them all, and picks."""
    ranks = math.prod([size for size, axis in zip(q.device_mesh.shape, split) if axis == "h"])
    layout = "bshd" if layout == "thd" and is_paged else layout
    at = layout.index("h")
    hq, hk = q.shape[-2 if layout != "bhsd" else 1], k.shape[at]
    is_cut = ranks == 1 or hq == hk or hq % ranks == hk % ranks == 0
    for x in (k, v):
        places = _places(layout, x)
        if is_paged:  # a pool's pages are any sequence's
            places.pop("b", None)
        if is_cut or hq % hk or x.shape[at] != hk:
            yield _part(x, places, split, q)
            continue
        places.pop("h", None)
        x, group = _part(x, places, split, q), hq // hk
        own = [head // group for head in range(first, first + count)]
        heads = own[-1] - own[0] + 1
        if all(one == own[0] + i * heads // count for i, one in enumerate(own)) and count % heads == 0:
            yield x.narrow(at, own[0], heads)
        else:  # groups of other sizes: each head of q has its own
            yield x.index_select(at, torch.tensor(own, device=x.device))


def _state(state, q, layout: str, at: dict[str, int], is_drawn: bool):
    """rng_state of this rank's part, whose mask is that of the whole."""
    from torch.distributed.tensor import DTensor, Partial
    if is_drawn and torch.compiler.is_compiling() and torch.is_grad_enabled():
        # A drawn state is a checkpoint's, and in a graph with one PyTorch 2.15 fails to keep the mesh for the backward.
        raise _lib.Refused(f"{_NAME}: rng_state=None: torch.compile draws none for DTensors; draw it before, "
                           "torch.randint(2**63 - 1, (2,)), the same on every rank")
    state = state.full_tensor() if isinstance(state, DTensor) else state
    mesh = q.device_mesh
    if is_drawn:  # the first rank's word counts
        state = state if not any(mesh.get_coordinate()) else torch.zeros_like(state)
        state = DTensor.from_local(state, mesh, [Partial()] * mesh.ndim, run_check=False).full_tensor()
    if len(state) == 2:
        state = torch.cat([state, state.new_tensor([0, q.shape[layout.index("h")]])])
    if not any(at.values()):
        return state
    first = state[2] + at["b"] * state[3] + at["h"]
    return torch.stack([state[0], state[1], first, state[3]])


def _places(layout: str, x) -> dict[str, int]:
    """The axes of the batch and of the heads, where there are several."""
    return {axis: layout.index(axis) for axis in "bh" if axis in layout and x.shape[layout.index(axis)] > 1}


def _axes_of(name: str, x) -> dict[str, int]:
    names = _keywords.SHARED[name].axes.replace("|1", "").split(", ")[-x.dim():]
    letters = {"b": "b", "hq": "h"}
    return {letters[axis]: i for i, axis in enumerate(names) if axis in letters and x.shape[i] > 1}


def _part(x, places: dict[str, int], split: list[str], q):
    """This rank's part of x. The gradient of what all ranks have is a sum over those that split q."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    if not isinstance(x, torch.Tensor):
        return x
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, q.device_mesh, [Replicate()] * len(split), run_check=False)
    wanted = [Shard(places[axis]) if axis in places else Replicate() for axis in split]
    gradient = [Shard(places[axis]) if axis in places else Partial() if axis else Replicate() for axis in split]
    return x.redistribute(placements=wanted).to_local(grad_placements=gradient)


def _whole(x, axes: str, shape, split: list[str], q):
    """The DTensor of `shape` whose part is x; a largest value over a batch that is split is one over ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    places = [Replicate() if not axis else Shard(axes.index(axis)) if axis in axes else Partial("max")
              for axis in split]
    shape = (*shape[:-1], x.shape[-1]) if axes.endswith("d") else tuple(shape)
    strides, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda i: (x.stride(i), -i)):
        strides[axis], step = step, step * shape[axis]
    return DTensor.from_local(x, q.device_mesh, places, run_check=False, shape=torch.Size(shape),
                              stride=tuple(strides))
