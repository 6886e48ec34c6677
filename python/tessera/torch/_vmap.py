# SPDX-License-Identifier: Apache-2.0
"""vmap's rule for attention and its backward pass: one call for all n examples.

The new axis is folded into the batch or into the heads of every tensor, whichever means the same:

    batch   lengths, segment ids, key ranges, masks, biases and page tables of each example's own
    heads   packed sequences; a sink, slopes or scales of each example's own, or gradients of them;
            max_logit

Heads of one example stay together, so that they keep their key-value heads. What is neither is
computed example by example: dropout, whose mask counts sequences and heads; packed sequences with
lengths of each example's own; pools of pages of each example's own, or gradients of them.
"""

from __future__ import annotations

import torch

from .. import _lib
from .._args import ORDERS
from . import _describe

_NUM_INPUTS = len(_describe.INPUTS)
_FORMATS = tuple(_lib.FORMATS)
_DENSE = ("bias", "mask")
_IDS = ("segment_ids_q", "segment_ids_k")
_LENGTHS = ("seqlens_q", "seqlens_k")
_PAGES = ("page_table_k", "page_table_v")
_PACKED = tuple(name for name in _describe.INPUTS if name.startswith("cu_seqlens"))
_OF_HEADS = ("sink", "alibi_slopes", "k_scale", "v_scale")


def rule(operator, leading: tuple[str, ...]):
    """The rule of `operator`, whose arguments are the tensors `leading`, INPUTS, SCALARS and a last
    one: whether max_logit is wanted, or for the backward pass which gradients are."""
    names = leading + _describe.INPUTS

    def vmap(info, in_dims, *arguments):
        tensors = dict(zip(names, arguments))
        dims = dict(zip(names, in_dims))
        values = arguments[len(names):]
        wanted = [name for i, name in enumerate(_describe.GRADIENT_OF)
                  if leading and values[-1] >> i & 1]
        max_logit = not leading and values[-1]
        fold = _choose(tensors, dims, values, wanted, max_logit, info.batch_size)
        if fold is None:
            return _one_by_one(operator, info.batch_size, in_dims, arguments)
        gradient_of = {_describe.GRADIENT_OF[name] for name in wanted}
        results = operator(*(fold.folded(name, tensors[name], dims[name], name in gradient_of)
                             for name in names), *values)
        if leading:
            like = [(_describe.GRADIENT_OF[name], tensors[_describe.GRADIENT_OF[name]],
                     dims[_describe.GRADIENT_OF[name]]) for name in wanted]
            pairs = [fold.unfolded(x, *of) for x, of in zip(results, like)]
            return [x for x, _ in pairs], [dim for _, dim in pairs]
        o, lse, peaks = results
        o, lse = fold.split(o, "o"), fold.split(lse, "lse")
        peaks = (peaks.unflatten(0, (info.batch_size, -1)), 0) if max_logit else (peaks, None)
        return tuple(zip(o, lse, peaks))
    return vmap


def _choose(tensors, dims, values, wanted, max_logit, n) -> _Fold | None:
    flags, _, *formats = values[:4]
    layouts = [_FORMATS[code] for code in formats]
    batched = {name for name, dim in dims.items() if dim is not None}
    paged = tensors["page_table_k"] is not None
    pools = batched & {"k", "v"} or {"dk", "dv"} & set(wanted)
    if flags & _lib.DROPOUT or batched & set(_PACKED) or paged and pools:
        return None
    of_heads = "thd" in layouts or max_logit or batched & set(_OF_HEADS) or \
        {"dsink", "dalibi_slopes"} & set(wanted)
    if of_heads:
        blocked = batched & {*_IDS, *_LENGTHS, *_PAGES} or paged
        return None if blocked else _Fold(n, layouts, False, tensors, dims)
    return _Fold(n, layouts, True, tensors, dims)


class _Fold:
    """Where the new axis goes: before the batch of each tensor, or before its heads."""

    def __init__(self, n, layouts, batch, tensors, dims):
        self.n, self.layouts, self.batch = n, layouts, batch
        self.paged = tensors["page_table_k"] is not None
        self.extent = {}  # of the axis, for tensors whose own extent may be 1
        for name, layout in (("q", layouts[0]), ("k", layouts[1])):
            shape = _shape(tensors[name], dims[name])
            axis = self.axis(name, len(shape))
            self.extent[name] = 1 if axis is None else shape[axis]

    def axis(self, name: str, rank: int) -> int | None:
        """The axis that it goes before, counted without it; dense tensors as if they had all four.
        None for a tensor that stays as it is."""
        layout = self.layouts[name in ("k", "v")]
        if name in ("q", "k", "v", "do", "o"):
            if self.paged and name in ("k", "v"):
                return None if self.batch else 2
            return ORDERS[layout][0 if self.batch else 2]
        if name in ("lse", "dlse"):
            return 0 if self.batch or rank == 2 else 1
        if name in _DENSE or name == "key_ranges":
            return 0 if self.batch or rank == 3 and name == "key_ranges" else 1
        if name in _OF_HEADS:
            return rank - 1 if not self.batch else 0 if rank == 2 else None
        if name in _IDS + _LENGTHS + _PAGES:
            return 0 if self.batch else None
        return None

    def folded(self, name: str, x, dim, wants_gradient: bool):
        """`x`, with the new axis at `dim` or without it, for the one call."""
        if x is None:
            return None
        shape = _shape(x, dim)
        axis = self.axis(name, len(shape))
        if axis is None:
            return x
        missing = 4 - len(shape) if name in _DENSE else 0
        extent = self._extent(name, (1,) * missing + shape, axis)
        if dim is None:
            if not wants_gradient and extent != (*(1,) * missing, *shape)[axis]:
                return x  # broadcast over the batch or the heads already
            x = x.expand(self.n, *shape)
        else:
            x = x.movedim(dim, 0)
        x = x[(slice(None), *(None,) * missing)].movedim(0, axis)
        return x.expand(*x.shape[:axis + 1], extent, *x.shape[axis + 2:]).flatten(axis, axis + 1)

    def _extent(self, name, shape, axis):
        """What an axis of extent 1 stands for, if the tensor may have it."""
        broadcasts = name in _DENSE or name in ("key_ranges", "alibi_slopes")
        return self.extent["q"] if broadcasts and shape[axis] == 1 else shape[axis]

    def split(self, x, name: str):
        """(x with the new axis, where it is)."""
        axis = self.axis(name, x.dim())
        return x.unflatten(axis, (self.n, -1)), axis

    def unfolded(self, gradient, name: str, x, dim):
        """The gradient of `x` for each example: summed where x was of extent 1."""
        shape = _shape(x, dim)
        gradient, axis = self.split(gradient, name)
        if name not in (*_DENSE, *_OF_HEADS):
            return gradient, axis
        missing = 4 - len(shape) if name in _DENSE else 0
        if (*(1,) * missing, *shape)[axis] == 1:
            gradient = gradient.sum(axis + 1, keepdim=True)
        return gradient.movedim(axis, 0).reshape(self.n, *shape), 0


def _shape(x, dim) -> tuple:
    """The shape of one example."""
    return tuple(x.shape) if dim is None else (*x.shape[:dim % x.dim()], *x.shape[dim % x.dim() + 1:])


def _one_by_one(operator, n, in_dims, arguments):
    results = [operator(*(x if dim is None else x.select(dim, i)
                          for x, dim in zip(arguments, in_dims))) for i in range(n)]
    stacked = [torch.stack(parts) for parts in zip(*results)]
    dims = [0] * len(stacked)
    return (stacked, dims) if isinstance(results[0], list) else (tuple(stacked), tuple(dims))
