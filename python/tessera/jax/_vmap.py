# SPDX-License-Identifier: Apache-2.0
"""vmap's rule for a call: one call for all n examples, where _fold knows one that means the same;
otherwise one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._call import Call, _description
from .._call._fold import Axes, Fold, folds_heads, shape_of


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
    roles = [(operand.tensors[0], None if operand.axis < 0 else operand.axis)
             for operand in call.operands]
    fold = _choose(call, roles, operands, dims, n)
    if fold is None:
        results = _one_by_one(lambda *examples: apply(call, examples), operands, dims)
        return results, [True] * len(results)
    wanted = {like for like in call.likes if isinstance(like, int)}
    folded = [fold.folded(name, x, dim, i in wanted, hidden) for i, ((name, hidden), x, dim)
              in enumerate(zip(roles, operands, dims))]
    results = []
    for like, result in zip(call.likes, apply(call, folded)):
        if isinstance(like, int):
            name, hidden = roles[like]
            pair = fold.unfolded(result, name, shape_of(operands[like], dims[like]), hidden)
        else:
            pair = fold.split(result, like)
        results.append(jnp.moveaxis(pair[0], pair[1], 0))
    return results, [True] * len(results)


def _choose(call: Call, roles, operands, dims, n) -> Fold | None:
    axes = Axes(call.layouts, call.is_paged)
    shapes = {name: shape_of(operands[i], dims[i]) for name, (i, _, _) in call.places.items()}
    ranks = {name: len(shape) - (call.places[name].axis >= 0) for name, shape in shapes.items()}
    batched = {name for name, (i, _, _) in call.places.items() if dims[i] is not None}
    gradients = list(call.places_of_results) if call.is_backward else ()
    of_heads = folds_heads(ranks, batched, call.flags, axes, gradients,
                           [like for like in call.likes if isinstance(like, str)])
    if of_heads is None:
        return None
    shapes = [shape_of(x, dim) for x, dim in zip(operands, dims)]
    return Fold(_Library, n, axes, of_heads, *(_description.shape_of(call, name, shapes) for name in "qk"))


def _one_by_one(function, operands, dims):
    own = [x for x, dim in zip(operands, dims) if dim is not None]

    def example(own):
        own = iter(own)
        return function(*(x if dim is None else next(own) for x, dim in zip(operands, dims)))
    return jax.lax.map(example, own)
