# SPDX-License-Identifier: Apache-2.0
"""vmap's rule for attention and its backward pass: one call for all n examples, where _fold knows one
that means the same."""

from __future__ import annotations

import torch

from ..._call import Call, _fold


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
        pairs = _fold.computed(_Library, call, tensors, dims, n, lambda folded: operator(folded, sizes, text))
        if pairs is None:
            return _one_by_one(lambda *x: operator(x, sizes, text), n, tensors, dims)
        return [x for x, _ in pairs], [dim for _, dim in pairs]
    return vmap


def _one_by_one(function, n, tensors, dims):
    results = [function(*(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)))
               for i in range(n)]
    stacked = [torch.stack(parts) for parts in zip(*results)]
    return stacked, [0] * len(stacked)
