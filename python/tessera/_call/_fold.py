# SPDX-License-Identifier: Apache-2.0
"""Where the batch and the heads of a call are, in the arrays of any library, and what follows from it:
vmap's rule, which makes one call of n examples. Shards of a mesh are the same question asked backwards.

vmap's new axis is folded into the batch or into the heads of every tensor, whichever means the same:

    batch   lengths, segment ids, key ranges, masks, biases and page tables of each example's own
    heads   packed sequences; a sink, slopes or scales of each example's own, or gradients of them;
            max_logit

Heads of one example stay together, so that they keep their key-value heads. What is neither is
computed example by example: dropout, whose mask counts sequences and heads; packed sequences with
lengths of each example's own; pools of pages of each example's own, or gradients of them; amax.
"""

from __future__ import annotations

import dataclasses

from .. import _lib
from . import _keywords
from ._args import ORDERS

DENSE = ("bias", "mask", "keep_tail")
_QUERIES = ("q", "do", "o", "dq")
_KEYS = ("k", "v", "dk", "dv")
_ROWS = ("lse", "dlse")
_OF_SEQUENCES = ("segment_ids_q", "segment_ids_k", "seqlens_q", "seqlens_k", "page_table_k",
                 "page_table_v", "q_start", "k_start", "shift")
_SCALES = ("k_scale", "v_scale", "q_scale", "do_scale")
_OF_HEADS = frozenset(("sink", "alibi_slopes", "max_logit", *_SCALES))
_GRADIENT_OF = {f"d{name}": name for name in _keywords.DIFFERENTIABLE}


@dataclasses.dataclass(frozen=True)
class Axes:
    """Where the batch and the heads of each array are."""
    layouts: tuple[str, str]  # of q and of k and v
    paged: bool

    def batch(self, name: str, rank: int) -> int | None:
        """The axis of sequences, dense tensors as if they had all four axes; None where the array is for
        all of them. Packed arrays have no such axis: what is returned is where one would be put."""
        if name in _QUERIES:
            return ORDERS[self.layouts[0]][0]
        if name in _KEYS:
            return None if self.paged else ORDERS[self.layouts[1]][0]
        if name in (*_ROWS, *DENSE, "key_ranges", *_OF_SEQUENCES):
            return 0
        return 0 if name in _OF_HEADS and rank >= 2 else None

    def heads(self, name: str, rank: int) -> int | None:
        """The axis of heads, likewise."""
        if name in _QUERIES:
            return ORDERS[self.layouts[0]][2]
        if name in _KEYS:
            return ORDERS["bshd" if self.paged else self.layouts[1]][2]
        if name in _ROWS:
            return rank - 2
        if name in DENSE:
            return 1
        if name == "key_ranges":
            return rank - 3
        if name in _SCALES:
            return (None, 0, 1, 1)[rank]
        return rank - 1 if name in _OF_HEADS else None


def folds_heads(ranks: dict[str, int], batched: set[str], flags: int, axes: Axes, wanted=(),
                others=()) -> bool | None:
    """Whether the new axis joins the heads (else the batch), or None: neither means the same. `ranks`
    has all tensors, with the rank of one example's; `batched` those that each example has its own of;
    `wanted` names gradients, `others` what else comes back."""
    if any(name.startswith("amax") for name in others):
        return None  # of all examples together
    if flags & _lib.DROPOUT or axes.paged and {"dk", "dv"} & set(wanted):
        return None
    of_heads = "thd" in axes.layouts or "max_logit" in others or \
        not _OF_HEADS.isdisjoint(batched | {_GRADIENT_OF.get(name) for name in wanted})
    axis = axes.heads if of_heads else axes.batch
    if of_heads and axes.paged or any(axis(name, ranks[name]) is None for name in batched):
        return None
    return bool(of_heads)


class Fold:
    """The new axis, of n examples, before the batch of each tensor or before its heads. `library` has
    the three functions that array libraries spell differently: expand, movedim and sum."""

    def __init__(self, library, n: int, axes: Axes, of_heads: bool, shape_q):
        self.library, self.n = library, n
        self.axis = axes.heads if of_heads else axes.batch
        self._extent = shape_q[self.axis("q", len(shape_q))]

    def folded(self, name: str, x, dim: int | None, wants_gradient: bool, hidden: int | None = None):
        """`x`, with the new axis at `dim` or without it, for the one call. `hidden` is an axis of an
        example's array that the tensor has not."""
        shape = shape_of(x, dim)
        axis = self.axis(name, len(shape))
        if axis is None:
            return x
        axis = _past(axis, hidden)
        missing = 4 - len(shape) if name in DENSE else 0
        shape = (1,) * missing + shape
        extent = self._full(name, shape, axis)
        if dim is None:
            if not wants_gradient and extent != shape[axis]:
                return x  # broadcast over the batch or the heads already
            x = self.library.expand(x.reshape(shape), (self.n, *shape))
        else:
            x = self.library.movedim(x, dim, 0).reshape((self.n, *shape))
        x = self.library.movedim(x, 0, axis)
        before, after = shape[:axis], shape[axis + 1:]
        x = self.library.expand(x, (*before, self.n, extent, *after))
        return x.reshape((*before, self.n * extent, *after))

    def _full(self, name, shape, axis):
        """What an axis of extent 1 stands for, if the tensor may have it."""
        broadcasts = name in DENSE or name in ("key_ranges", "alibi_slopes")
        return self._extent if broadcasts and shape[axis] == 1 else shape[axis]

    def split(self, x, name: str, hidden: int | None = None):
        """(x with the new axis, where it is)."""
        axis = _past(self.axis(name, len(x.shape)), hidden)
        parts = self.n, x.shape[axis] // self.n
        return x.reshape((*x.shape[:axis], *parts, *x.shape[axis + 1:])), axis

    def unfolded(self, gradient, name: str, shape, hidden: int | None = None):
        """(The gradient of `name` for each example, of `shape`, where the new axis is), summed where an
        example's array is of extent 1."""
        gradient, axis = self.split(gradient, name, hidden)
        if name not in DENSE and name not in _OF_HEADS:
            return gradient, axis
        missing = 4 - len(shape) if name in DENSE else 0
        if (*(1,) * missing, *shape)[axis] == 1:
            gradient = self.library.sum(gradient, axis + 1)
        return self.library.movedim(gradient, axis, 0).reshape((self.n, *shape)), 0


def shape_of(x, dim: int | None) -> tuple:
    """The shape of one example."""
    shape = tuple(x.shape)
    return shape if dim is None else (*shape[:dim % len(shape)], *shape[dim % len(shape) + 1:])


def _past(axis: int, hidden: int | None) -> int:
    return axis + (hidden is not None and axis >= hidden)
