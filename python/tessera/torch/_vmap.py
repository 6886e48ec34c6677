# SPDX-License-Identifier: Apache-2.0
"""vmap's rule for attention and its backward pass: one call for all n examples, where _fold knows one
that means the same."""

from __future__ import annotations

import torch

from .. import _lib
from .._fold import Axes, Fold, folds_heads, shape_of
from . import _describe

_FORMATS = tuple(_lib.FORMATS)


class _Library:
    """What _fold asks of PyTorch."""
    expand = staticmethod(torch.Tensor.expand)
    movedim = staticmethod(torch.movedim)

    @staticmethod
    def sum(x, axis):
        return x.sum(axis, keepdim=True)


def rule(operator, leading: tuple[str, ...]):
    """The rule of `operator`, whose arguments are what all operators take, or for the backward pass the
    tensors `leading` and which gradients are wanted before."""
    names = leading + _describe.INPUTS

    def vmap(info, in_dims, *arguments):
        n = len(leading)
        first = n + 1 if leading else 0  # of what all take
        inputs, values, max_logit = _describe.unpack(arguments[first:])
        q, k, v, more, *_ = in_dims[first:]
        dims = dict.fromkeys(names) | dict(zip(names, (*in_dims[:n], q, k, v, *(more or ()))))
        given = {name: (x, dims[name]) for name, x in zip(names, (*arguments[:n], *inputs))
                 if x is not None}
        wanted = [name for i, name in enumerate(_describe.GRADIENT_OF)
                  if leading and arguments[n] >> i & 1]
        fold = _choose(given, values, wanted, max_logit, info.batch_size)
        if fold is None:
            return _one_by_one(operator, info.batch_size, in_dims, arguments)
        gradient_of = {_describe.GRADIENT_OF[name] for name in wanted}
        folded = [fold.folded(name, *given[name], name in gradient_of) if name in given else None
                  for name in names]
        results = operator(*folded[:n], *arguments[n:first],
                           *_describe.pack(folded[n:], values, max_logit))
        if leading:
            pairs = [fold.unfolded(x, name, shape_of(*given[name]))
                     for x, name in zip(results, map(_describe.GRADIENT_OF.get, wanted))]
            return [x for x, _ in pairs], [dim for _, dim in pairs]
        o, lse, peaks = results
        o, lse = fold.split(o, "o"), fold.split(lse, "lse")
        peaks = (peaks.unflatten(0, (info.batch_size, -1)), 0) if max_logit else (peaks, None)
        return tuple(zip(o, lse, peaks))
    return vmap


def _choose(given, values, wanted, max_logit, n) -> Fold | None:
    at = dict(zip(_describe.SCALARS, values))
    axes = Axes((_FORMATS[at["format_q"]], _FORMATS[at["format_kv"]]), "page_table_k" in given)
    ranks = {name: len(shape_of(x, dim)) for name, (x, dim) in given.items()}
    batched = {name for name, (_, dim) in given.items() if dim is not None}
    of_heads = folds_heads(ranks, batched, at["flags"], axes, wanted, max_logit)
    return None if of_heads is None else Fold(_Library, n, axes, of_heads, shape_of(*given["q"]))


def _one_by_one(operator, n, in_dims, arguments):
    results = [operator(*(_example(x, dim, i) for x, dim in zip(arguments, in_dims)))
               for i in range(n)]
    stacked = [torch.stack(parts) for parts in zip(*results)]
    dims = [0] * len(stacked)
    return (stacked, dims) if isinstance(results[0], list) else (tuple(stacked), tuple(dims))


def _example(x, dim, i: int):
    if isinstance(x, (list, tuple)):
        return [_example(*pair, i) for pair in zip(x, dim)]
    return x if dim is None else x.select(dim, i)
