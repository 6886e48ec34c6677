# SPDX-License-Identifier: Apache-2.0
"""vmap's rule for a call: one call for all n examples, where _fold knows one that means the same;
otherwise one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._call import Call, _fold


class _Library:
    """What _fold asks of JAX."""
    expand = staticmethod(jnp.broadcast_to)
    movedim = staticmethod(jnp.moveaxis)

    @staticmethod
    def sum(x, axis):
        return x.sum(axis, keepdims=True)


def rule(apply, call: Call, n: int, in_batched, *operands):
    """Results of `apply`(call, operands), and whether each has the new axis, which is the first."""
    dims = [0 if batched else None for batched in in_batched]
    pairs = _fold.computed(_Library, call, operands, dims, n, lambda folded: apply(call, folded))
    if pairs is None:
        results = _one_by_one(lambda *examples: apply(call, examples), operands, dims)
    else:
        results = [jnp.moveaxis(x, axis, 0) for x, axis in pairs]
    return results, [True] * len(results)


def _one_by_one(function, operands, dims):
    own = [x for x, dim in zip(operands, dims) if dim is not None]

    def example(own):
        own = iter(own)
        return function(*(x if dim is None else next(own) for x, dim in zip(operands, dims)))
    return jax.lax.map(example, own)
