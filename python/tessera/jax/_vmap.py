# SPDX-License-Identifier: Apache-2.0
"""vmap's rule for a call: one call for all n examples, where _fold knows one that means the same;
otherwise one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import _lib
from .._fold import Axes, Fold, folds_heads, shape_of
from ._spec import Spec


class _Library:
    """What _fold asks of JAX."""
    expand = staticmethod(jnp.broadcast_to)
    movedim = staticmethod(jnp.moveaxis)

    @staticmethod
    def sum(x, axis):
        return x.sum(axis, keepdims=True)


def rule(apply, spec: Spec, n: int, in_batched, *operands):
    """Results of `apply`(spec, operands), and whether each has the new axis, which is the first."""
    dims = [0 if batched else None for batched in in_batched]
    roles = spec.roles()
    fold = _choose(spec, roles, operands, dims, n)
    if fold is None:
        results = _one_by_one(lambda *examples: apply(spec, examples), operands, dims)
        return results, [True] * len(results)
    wanted = {like for like in spec.likes if isinstance(like, int)}
    folded = [fold.folded(name, x, dim, i in wanted, hidden) for i, ((name, hidden), x, dim)
              in enumerate(zip(roles, operands, dims))]
    results = []
    for like, result in zip(spec.likes, apply(spec, folded)):
        if isinstance(like, int):
            name, hidden = roles[like]
            pair = fold.unfolded(result, name, shape_of(operands[like], dims[like]), hidden)
        else:
            pair = fold.split(result, like)
        results.append(jnp.moveaxis(pair[0], pair[1], 0))
    return results, [True] * len(results)


def _choose(spec: Spec, roles, operands, dims, n) -> Fold | None:
    axes = Axes(spec.layouts, spec.is_paged)
    shapes = {_lib.TENSORS[index]: shape_of(operands[i], dims[i]) for i, index, _, _ in spec.inputs}
    ranks = {name: len(shape) - (spec.place(name)[2] >= 0) for name, shape in shapes.items()}
    batched = {_lib.TENSORS[index] for i, index, _, _ in spec.inputs if dims[i] is not None}
    gradients = [_lib.TENSORS[row[1]] for row in spec.outputs] if spec.is_backward else ()
    of_heads = folds_heads(ranks, batched, spec.flags, axes, gradients, "max_logit" in spec.likes)
    if of_heads is None:
        return None
    return Fold(_Library, n, axes, of_heads, spec.shape_of("q", [
        jax.ShapeDtypeStruct(shape_of(x, dim), x.dtype) for x, dim in zip(operands, dims)]))


def _one_by_one(function, operands, dims):
    own = [x for x, dim in zip(operands, dims) if dim is not None]

    def example(own):
        own = iter(own)
        return function(*(x if dim is None else next(own) for x, dim in zip(operands, dims)))
    return jax.lax.map(example, own)
