# SPDX-License-Identifier: Apache-2.0
"""DTensors of tensor and data parallelism: attention of each rank's own batch and heads. Rows of one
sequence on several ranks are tessera.torch.context_parallel's.

    placement of q     Replicate       Shard(batch)    Shard(heads)
    k and v            Replicate       Shard(batch)    Shard(heads), or Replicate for one kv head
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
          "keep", "drop", "bias", "key_ranges", "segment_ids", "alibi_slopes", "sink", "q_start", "k_start")


def are(*tensors) -> bool:
    """Whether one of them is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any([isinstance(x, module.DTensor) for x in tensors])


def attention(function, q, k, v, keywords: dict):
    """function(q, k, v, **keywords), which is attention, of DTensors: results are placed as q is."""
    from torch.distributed.tensor import DTensor
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor) or x.device_mesh != q.device_mesh:
            raise ValueError(f"{_NAME}: {name}={type(x).__name__}: q, k and v must all be DTensors of one mesh; use "
                             "distribute_tensor, or to_local() of each")
    layout = keywords.get("layout") or "bshd"
    if layout not in ("bshd", "sbhd", "bhsd", "thd"):
        raise ValueError(f"{_NAME}: layout={layout!r}: DTensors have one of bshd, sbhd, bhsd and thd")
    split = _split(q, layout)
    _check_heads(q, k, layout, split)
    given = {}
    for name, value in keywords.items():
        if name in _KNOWN and value is not None:
            given[name] = tuple(_part(x, _axes_of(name, x), split, q) for x in value) \
                if isinstance(value, tuple) else _part(value, _axes_of(name, value), split, q)
        elif isinstance(value, torch.Tensor) and value.dim() or name == "dropout_p" and value:
            raise _lib.Refused(f"{_NAME}: {name}={type(value).__name__}: is not known of DTensors; call it with "
                               "to_local() of each tensor")
        else:
            given[name] = value
    results = function(*(_part(x, _places(layout, x), split, q) for x in (q, k, v)), **given)
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
        if axis in ("s", "t"):
            raise _lib.Refused(f"{_NAME}: q.placements={tuple(q.placements)}: shards the sequence; use "
                               "tessera.torch.context_parallel.attention, or redistribute to shards of the batch or of "
                               "the heads")
        if axis == "d":
            raise _lib.Refused(f"{_NAME}: q.placements={tuple(q.placements)}: shards the elements of a head; "
                               "redistribute to shards of the batch or of the heads")
        split.append(axis)
    return split


def _check_heads(q, k, layout: str, split: list[str]):
    ranks = math.prod([size for size, axis in zip(q.device_mesh.shape, split) if axis == "h"])
    hq, hk = (x.shape[layout.index("h")] for x in (q, k))
    if hq % ranks or hk % ranks and hk != 1:
        raise _lib.Refused(f"{_NAME}: hq={hq}, hk={hk}: must be multiples of the {ranks} ranks that share them, or "
                           "hk=1; replicate k and v for each group of query heads, or use fewer ranks")


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
