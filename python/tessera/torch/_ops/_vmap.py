# SPDX-License-Identifier: Apache-2.0
"""vmap's rule for attention and its backward pass: one call for all n examples, where _fold knows one
that means the same."""

from __future__ import annotations

import torch

from ..._call import Call
from ..._call._fold import Axes, Fold, folds_heads, shape_of


class _Library:
    """What _fold asks of PyTorch."""
    expand = staticmethod(torch.Tensor.expand)
    movedim = staticmethod(torch.movedim)

    @staticmethod
    def sum(x, axis):
        return x.sum(axis, keepdim=True)


def rule(operator):
    """The rule of `operator`."""
    def vmap(info, in_dims, tensors, sizes, text):
        call, n, dims = Call.of(text), info.batch_size, in_dims[0]
        fold = _choose(call, tensors, dims, n)
        if fold is None:
            return _one_by_one(lambda *x: operator(x, sizes, text), n, tensors, dims)
        wanted = {like for like in call.likes if isinstance(like, int)}
        names = [operand.tensors[0] for operand in call.operands]
        folded = [fold.folded(name, x, dim, i in wanted)
                  for i, (name, x, dim) in enumerate(zip(names, tensors, dims))]
        pairs = []
        for like, x in zip(call.likes, operator(folded, sizes, text)):
            if isinstance(like, int):
                pairs.append(fold.unfolded(x, names[like], shape_of(tensors[like], dims[like])))
            else:
                pairs.append(fold.split(x, like))
        return [x for x, _ in pairs], [dim for _, dim in pairs]
    return vmap


def _choose(call: Call, tensors, dims, n) -> Fold | None:
    axes = Axes(call.layouts, call.is_paged)
    shapes = {name: shape_of(tensors[place.operand], dims[place.operand])
              for name, place in call.places.items()}
    ranks = {name: len(shape) for name, shape in shapes.items()}
    batched = {name for name, place in call.places.items() if dims[place.operand] is not None}
    gradients = list(call.places_of_results) if call.is_backward else ()
    of_heads = folds_heads(ranks, batched, call.flags, axes, gradients,
                           [like for like in call.likes if isinstance(like, str)])
    return None if of_heads is None else Fold(_Library, n, axes, of_heads, shapes["q"], shapes["k"])


def _one_by_one(function, n, tensors, dims):
    results = [function(*(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)))
               for i in range(n)]
    stacked = [torch.stack(parts) for parts in zip(*results)]
    return stacked, [0] * len(stacked)
