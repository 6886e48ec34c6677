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
from . import INPUT_OF, Call, _description, _keywords
from ._args import FORMS

_QUERIES = ("q", "do", "o", "dq")
_KEYS = ("k", "v", "dk", "dv")
_ROWS = {tensor: row for row in _keywords.ALL.values() if isinstance(row, _keywords.Tensor) for tensor in row.tensors}


def _letters(axes: str) -> tuple[str, ...]:
    """"b" of a batch, "h" of heads, "s" of what a sequence has and "" of anything else, for each axis of a row."""
    known = {"b": "b", "hq": "h", "hk": "h", "sq": "s", "s": "s"}
    return tuple(known.get(axis.removesuffix("|1"), "") for axis in axes.split(", "))


# The letters of each tensor whose axes follow no layout.
_AXES = {name: _letters(FORMS[name.removeprefix("d")][1]) for name in ("lse", "dlse", "shift", "max_logit")} | {
    name: _letters(row.axes) for name, row in _ROWS.items()}
_DENSE = frozenset(name for name, row in _ROWS.items() if row.broadcasts and len(_AXES[name]) == 4)
_OF_HEADS = frozenset(name for name, letters in _AXES.items() if "h" in letters and "s" not in letters)
_BROADCAST = frozenset(name for name, row in _ROWS.items() if row.broadcasts or row.blocks or "|1" in row.axes)
_OF_KEY_HEADS = frozenset(name for name, row in _ROWS.items() if "hk" in row.axes.split(", "))
_PACKED = frozenset(("cu_seqlens_q", "cu_seqlens_k"))  # which say that a batch is of packed sequences


@dataclasses.dataclass(frozen=True)
class Axes:
    """Where the batch and the heads of each array are."""
    layouts: tuple[str, str]  # of q and of k and v
    paged: bool

    def letters(self, name: str, rank: int) -> tuple[str, ...]:
        """The letter of each axis of an array: "b" of the batch, "h" of the heads."""
        if name in _QUERIES:
            return tuple(self.layouts[0])
        if name in _KEYS:  # a pool's pages are any sequence's
            return ("", "s", "h", "d") if self.paged else tuple(self.layouts[1])
        letters = _AXES.get(name, ())
        if name in _ROWS and _ROWS[name].blocks and rank < 3:
            letters = letters[:2]
        return letters[len(letters) - rank:]

    def batch(self, name: str, rank: int) -> int | None:
        """The axis of sequences, dense tensors as if they had all four axes; None where the array is for
        all of them. Packed arrays have no such axis: what is returned is where one would be put."""
        if name in _AXES and name not in _OF_HEADS:
            return 0 if "b" in _AXES[name] else None
        return self._index("b", name, rank)

    def heads(self, name: str, rank: int) -> int | None:
        """The axis of heads, likewise."""
        return self._index("h", name, 4 if name in _DENSE else rank)

    def _index(self, letter: str, name: str, rank: int) -> int | None:
        letters = self.letters(name, rank)
        return letters.index(letter) if letter in letters else None


def folds_heads(ranks: dict[str, int], batched: set[str], flags: int, axes: Axes, wanted=(),
                others=()) -> bool | None:
    """Whether the new axis joins the heads (else the batch), or None: neither means the same. `ranks`
    has all tensors, with the rank of one example's; `batched` those that each example has its own of;
    `wanted` names gradients, `others` what else comes back."""
    if any(name.startswith("amax") for name in others):
        return None  # of all examples together
    if flags & _lib.DROPOUT or axes.paged and {"dk", "dv"} & set(wanted):
        return None
    of_heads = not _PACKED.isdisjoint(ranks) or "max_logit" in others or \
        not _OF_HEADS.isdisjoint(batched | {INPUT_OF.get(name) for name in wanted})
    axis = axes.heads if of_heads else axes.batch
    if of_heads and axes.paged or any(axis(name, ranks[name]) is None for name in batched):
        return None
    return bool(of_heads)


class Fold:
    """The new axis, of n examples, before the batch of each tensor or before its heads. `library` has
    the three functions that array libraries spell differently: expand, movedim and sum."""

    def __init__(self, library, n: int, axes: Axes, of_heads: bool, shape_q, shape_k):
        self.library, self.n = library, n
        self.axis = axes.heads if of_heads else axes.batch
        self._extent = shape_q[self.axis("q", len(shape_q))]
        self._extent_of_keys = shape_k[self.axis("k", len(shape_k))] if of_heads else self._extent

    def folded(self, name: str, x, dim: int | None, wants_gradient: bool, hidden: int | None = None):
        """`x`, with the new axis at `dim` or without it, for the one call. `hidden` is an axis of an
        example's array that the tensor has not."""
        shape = shape_of(x, dim)
        axis = self.axis(name, len(shape))
        if axis is None:
            return x
        axis = _past(axis, hidden)
        missing = 4 - len(shape) if name in _DENSE else 0
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
        if name not in _BROADCAST or shape[axis] != 1:
            return shape[axis]
        return self._extent_of_keys if name in _OF_KEY_HEADS else self._extent

    def split(self, x, name: str, hidden: int | None = None):
        """(x with the new axis, where it is)."""
        axis = _past(self.axis(name, len(x.shape)), hidden)
        parts = self.n, x.shape[axis] // self.n
        return x.reshape((*x.shape[:axis], *parts, *x.shape[axis + 1:])), axis

    def unfolded(self, gradient, name: str, shape, hidden: int | None = None):
        """(The gradient of `name` for each example, of `shape`, where the new axis is), summed where an
        example's array is of extent 1."""
        gradient, axis = self.split(gradient, name, hidden)
        if name not in _DENSE and name not in _OF_HEADS:
            return gradient, axis
        missing = 4 - len(shape) if name in _DENSE else 0
        if (*(1,) * missing, *shape)[axis] == 1:
            gradient = self.library.sum(gradient, axis + 1)
        return self.library.movedim(gradient, axis, 0).reshape((self.n, *shape)), 0


def computed(library, call: Call, operands, dims, n: int, apply) -> list[tuple] | None:
    """What apply(folded operands) returns, each with where the new axis is, of n examples whose axis is at `dims`;
    None where no one call means the same. `library` is Fold's."""
    roles = [(operand.tensors[0], None if operand.axis < 0 else operand.axis) for operand in call.operands]
    fold = _fold_of(library, call, operands, dims, n)
    if fold is None:
        return None
    wanted = {like for like in call.likes if isinstance(like, int)}
    folded = [fold.folded(name, x, dim, i in wanted, hidden)
              for i, ((name, hidden), x, dim) in enumerate(zip(roles, operands, dims))]
    pairs = []
    for like, result in zip(call.likes, apply(folded)):
        if isinstance(like, int):
            name, hidden = roles[like]
            pairs.append(fold.unfolded(result, name, shape_of(operands[like], dims[like]), hidden))
        else:
            pairs.append(fold.split(result, like))
    return pairs


def _fold_of(library, call: Call, operands, dims, n: int) -> Fold | None:
    axes, shapes = Axes(call.layouts, call.is_paged), [shape_of(x, dim) for x, dim in zip(operands, dims)]
    ranks = {name: len(shapes[place.operand]) - (place.axis >= 0) for name, place in call.places.items()}
    batched = {name for name, place in call.places.items() if dims[place.operand] is not None}
    gradients = list(call.places_of_results) if call.is_backward else ()
    of_heads = folds_heads(ranks, batched, call.flags, axes, gradients,
                           [like for like in call.likes if isinstance(like, str)])
    if of_heads is None:
        return None
    return Fold(library, n, axes, of_heads, *(_description.shape_of(call, name, shapes) for name in "qk"))


def shape_of(x, dim: int | None) -> tuple:
    """The shape of one example."""
    shape = tuple(x.shape)
    return shape if dim is None else (*shape[:dim % len(shape)], *shape[dim % len(shape) + 1:])


def _past(axis: int, hidden: int | None) -> int:
    return axis + (hidden is not None and axis >= hidden)
