# SPDX-License-Identifier: Apache-2.0
"""TE's score_mod: a callback that builds nodes of a cuDNN graph, (graph, score, tensors) -> score. It is called with
a graph that only looks on, and what it built becomes keywords of tessera.torch.attention:

    score * c, score / c                           softmax_scale
    c * tanh(score / c)                            softcap
    score + tensor, score + a row + b column       bias (what a whole row shares cancels in the softmax)
    score - slopes * abs(row - column)             alibi_slopes
    select(score, -inf, mask)                      causal, window, key_ranges, segment_ids, drop
        mask: row and column compared with each other or a number, ids with ids, a bool tensor, and "and" of these

in this order; anything else is refused by the name of its node. Numbers are Python's, or tensors of one element, which
are read where a number is needed: on a GPU that waits for it.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from ..... import _lib

_LEAST = -1e9  # from here down a number that is selected hides


def refused(node: str, why: str) -> _lib.Refused:
    return _lib.Refused(f"DotProductAttention: score_mod: {node}: {why}; a bias, ALiBi or an arbitrary mask may do")


class _Node:
    """What a callback holds; the setters of cuDNN's tensors say how, not what."""

    def _said(self, *_, **__):
        return self

    set_data_type = set_dim = set_stride = set_name = set_output = set_is_pass_by_value = set_uid = _said


@dataclasses.dataclass(eq=False)
class _Number(_Node):
    value: float


@dataclasses.dataclass(eq=False)
class _Tensor(_Node):
    """x [b|1, h|1, sq|1, skv|1]."""
    x: torch.Tensor


@dataclasses.dataclass(eq=False)
class _Places(_Node):
    """tensor * (row * i + column * j + shift), or of its absolute value; tensor None is 1."""
    row: float = 0.0
    column: float = 0.0
    shift: float = 0.0
    tensor: torch.Tensor | None = None
    absolute: bool = False


@dataclasses.dataclass(eq=False)
class _Mask(_Node):
    """A conjunction: bounds are (row, column, shift), true where row i + column j + shift >= 0."""
    bounds: tuple = ()
    ids: tuple = ()      # (ids of rows, ids of columns), equal
    shown: tuple = ()    # bool tensors


@dataclasses.dataclass(eq=False)
class _Score(_Node):
    """after * tanh(before * score) if capped, else before * score; then + bias - slopes |i - j|, where masks
    are true."""
    before: float = 1.0
    after: float = 1.0
    capped: bool = False
    tanh_of: object = None   # the score that tanh was given
    added: tuple = ()
    slopes: torch.Tensor | None = None
    masks: tuple = ()

    @property
    def plain(self) -> bool:
        return not self.added and self.slopes is None and not self.masks


def _wrapped(x):
    if isinstance(x, _Node):
        return x
    if isinstance(x, (int, float)):
        return _Number(float(x))
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"score_mod: {type(x).__name__}: must be a node of the graph, one of score_mod_tensors, or a "
                        "number")
    return _Tensor(x)


def _one_element(x) -> bool:
    return isinstance(x, _Tensor) and x.x.numel() == 1 and not x.x.requires_grad


def _unreadable(x) -> bool:
    return _one_element(x) and x.x.is_cuda and torch.cuda.is_current_stream_capturing()


def _numbered(x):
    """x as a node: a number if it is a tensor of one element that can be read now."""
    x = _wrapped(x)
    return _Number(float(x.x)) if _one_element(x) and not _unreadable(x) else x


class Graph:
    """Stands for cudnn.pygraph while a callback runs."""

    def gen_index(self, input, axis, **_):  # noqa: A002 - cuDNN's name
        if axis not in (2, 3):
            raise refused(f"gen_index(axis={axis})", "tessera reads rows (2) and columns (3)")
        return _Places(row=float(axis == 2), column=float(axis == 3))

    def identity(self, input, **_):  # noqa: A002
        return input

    def mul(self, a, b, **_):
        a, b = _numbered(a), _numbered(b)
        if isinstance(b, _Score) or isinstance(a, (_Number, _Tensor)) and isinstance(b, _Places) or \
                isinstance(a, _Number) and isinstance(b, _Tensor):
            a, b = b, a
        if isinstance(b, _Number):
            return _scaled(a, b.value, "mul")
        if isinstance(a, _Places) and isinstance(b, _Tensor) and a.tensor is None:
            return dataclasses.replace(a, tensor=b.x)
        raise refused("mul", f"of {_name(a)} and {_name(b)}")

    scale = mul

    def div(self, a, b, **_):
        b = _numbered(b)
        if not isinstance(b, _Number):
            raise refused("div", f"by {_name(b)}, where a number would do")
        return _scaled(_wrapped(a), 1 / b.value if b.value else math.inf, "div")

    def neg(self, input, **_):  # noqa: A002
        return _scaled(_wrapped(input), -1.0, "neg")

    def abs(self, input, **_):  # noqa: A002
        x = _wrapped(input)
        if not isinstance(x, _Places) or x.tensor is not None or x.row != -x.column or x.shift:
            raise refused("abs", f"of {_name(x)}, where row - column would do")
        return dataclasses.replace(x, absolute=True)

    def tanh(self, input, **_):  # noqa: A002
        x = _wrapped(input)
        if not isinstance(x, _Score) or x.capped or not x.plain:
            raise refused("tanh", f"of {_name(x)}, where the scaled score would do, once")
        return _Score(before=x.before, capped=True, tanh_of=x)

    def tanh_backward(self, loss, input, **_):  # noqa: A002
        loss = _wrapped(loss)
        if not isinstance(loss, _Score) or loss.capped or not isinstance(input, _Score):
            raise refused("tanh_backward", f"of {_name(loss)}")
        return dataclasses.replace(loss, capped=True, tanh_of=input)

    def add(self, a, b, **_):
        a, b = _wrapped(a), _wrapped(b)
        if isinstance(b, _Score):
            a, b = b, a
        if isinstance(a, _Score):
            return _with_bias(a, b)
        a, b = _numbered(a), _numbered(b)
        if isinstance(a, (_Places, _Number)) and isinstance(b, (_Places, _Number)):
            a, b = (_Places(shift=x.value) if isinstance(x, _Number) else x for x in (a, b))
            if not (a.absolute or b.absolute or a.tensor is not None or b.tensor is not None):
                return _Places(a.row + b.row, a.column + b.column, a.shift + b.shift)
        if isinstance(a, (_Tensor, _Number)) and isinstance(b, (_Tensor, _Number)):
            return _Tensor((a.x if isinstance(a, _Tensor) else a.value) + (b.x if isinstance(b, _Tensor) else b.value))
        raise refused("add", f"of {_name(a)} and {_name(b)}")

    def sub(self, a, b, **_):
        b = _wrapped(b)
        if isinstance(b, _Score):
            raise refused("sub", "of the score from something")
        return self.add(a, _scaled(b, -1.0, "sub"))

    def cmp_ge(self, input, comparison, **_):  # noqa: A002
        return self._compared(self.sub(input, comparison), 0.0, "cmp_ge")

    def cmp_gt(self, input, comparison, **_):  # noqa: A002
        return self._compared(self.sub(input, comparison), -1.0, "cmp_gt")

    def cmp_le(self, input, comparison, **_):  # noqa: A002
        return self.cmp_ge(comparison, input)

    def cmp_lt(self, input, comparison, **_):  # noqa: A002
        return self.cmp_gt(comparison, input)

    def cmp_eq(self, input, comparison, **_):  # noqa: A002
        a, b = _wrapped(input), _wrapped(comparison)
        if isinstance(a, _Tensor) and isinstance(b, _Tensor) and a.x.dim() == b.x.dim() == 4:
            rows, columns = (a.x, b.x) if a.x.shape[-1] == 1 else (b.x, a.x)
            if rows.shape[-1] == 1 == columns.shape[-2] == rows.shape[1] == columns.shape[1]:
                return _Mask(ids=((rows, columns),))
        raise refused("cmp_eq", f"of {_name(a)} and {_name(b)}, where ids [b, 1, sq, 1] and [b, 1, 1, skv] would do")

    def logical_and(self, a, b, **_):
        a, b = _mask(a, "logical_and"), _mask(b, "logical_and")
        return _Mask(a.bounds + b.bounds, a.ids + b.ids, a.shown + b.shown)

    def logical_not(self, input, **_):  # noqa: A002
        return _not(_mask(input, "logical_not"), "logical_not")

    def binary_select(self, input0, input1, mask, **_):
        kept, other, mask = _numbered(input0), _numbered(input1), _mask(mask, "binary_select")
        if isinstance(other, _Score):
            kept, other, mask = other, kept, _not(mask, "binary_select")
        if not isinstance(kept, _Score) or not isinstance(other, _Number) or not self._hides(other.value):
            raise refused("binary_select", f"of {_name(kept)} and {_name(other)}, where the score and -inf would do")
        return dataclasses.replace(kept, masks=(*kept.masks, mask))

    def _hides(self, value: float) -> bool:
        return value <= _LEAST

    @staticmethod
    def _compared(difference, shift: float, node: str) -> _Mask:
        x = _numbered(difference)
        x = _Places(shift=x.value) if isinstance(x, _Number) else x
        whole = isinstance(x, _Places) and x.tensor is None and not x.absolute and \
            x.row in (-1, 0, 1) and x.column in (-1, 0, 1) and x.row * x.column != 1
        if not whole:
            raise refused(node, f"of {_name(x)}, where rows, columns and numbers would do")
        return _Mask(bounds=((x.row, x.column, math.floor(x.shift) if shift == 0 else math.ceil(x.shift) - 1),))

    def __getattr__(self, node: str):
        if node.startswith("__"):
            raise AttributeError(node)
        raise refused(node, "tessera has no such step between scores and softmax")


class _Backward(Graph):
    """The graph of score_mod_bprop, where a hidden gradient is 0."""

    def _hides(self, value: float) -> bool:
        return value == 0


def _name(x) -> str:
    if _unreadable(x):
        return "a number on the GPU, which the capture of a CUDA graph cannot read (give it on the CPU)"
    kinds = {_Score: "the score", _Number: "a number", _Tensor: "a tensor", _Places: "places", _Mask: "a mask"}
    return kinds.get(type(x), type(x).__name__)


def _scaled(x, factor: float, node: str):
    if isinstance(x, _Number):
        return _Number(x.value * factor)
    if isinstance(x, _Tensor):
        return _Tensor(x.x * factor)
    if isinstance(x, _Places):
        if x.absolute:  # the factor goes to what stands before it
            tensor = torch.tensor(factor) if x.tensor is None else x.tensor * factor
            return dataclasses.replace(x, tensor=tensor)
        return dataclasses.replace(x, row=x.row * factor, column=x.column * factor, shift=x.shift * factor)
    if isinstance(x, _Score) and not x.added and x.slopes is None and math.isfinite(factor):
        name = "after" if x.capped else "before"
        return dataclasses.replace(x, **{name: getattr(x, name) * factor})
    raise refused(node, f"of {_name(x)}, when something was added to it" if isinstance(x, _Score) else f"of {_name(x)}")


def _with_bias(score: _Score, x) -> _Score:
    if isinstance(x, _Number) or _one_element(x):
        return score  # cancels in the softmax
    if isinstance(x, _Places) and x.absolute:
        if x.tensor is None:
            x = dataclasses.replace(x, tensor=torch.tensor(1.0))
        if score.slopes is not None or x.tensor.dim() and tuple(x.tensor.shape[-2:]) != (1, 1):
            raise refused("add", "of a second distance" if score.slopes is not None else
                          "of distances times a tensor with rows or columns")
        return dataclasses.replace(score, slopes=-abs(x.row) * x.tensor)
    if isinstance(x, (_Tensor, _Places)):
        return dataclasses.replace(score, added=(*score.added, x))
    raise refused("add", f"of the score and {_name(x)}")


def _mask(x, node: str) -> _Mask:
    if isinstance(x, _Mask):
        return x
    x = _wrapped(x)
    if isinstance(x, _Tensor) and x.x.dtype == torch.bool and x.x.dim():
        return _Mask(shown=(x.x,))
    raise refused(node, f"by {_name(x)}, where a comparison or a bool tensor would do")


def _not(mask: _Mask, node: str) -> _Mask:
    if len(mask.bounds) == 1 and not mask.ids and not mask.shown:
        row, column, shift = mask.bounds[0]
        return _Mask(bounds=((-row, -column, -shift - 1),))
    if len(mask.shown) == 1 and not mask.ids and not mask.bounds:
        return _Mask(shown=(~mask.shown[0],))
    raise refused(node, "of more than one comparison, or of equal ids, is a disjunction")


# ---- what was built -> keywords ----

def keywords(score_mod, tensors, backward, backward_tensors, q, k, layout: str, scale: float) -> dict:
    """Keywords of tessera.torch.attention for what the callback builds of scale * q kT."""
    score = score_mod(Graph(), _Score(), _checked("score_mod_tensors", tensors))
    if not isinstance(score, _Score):
        raise TypeError(f"score_mod: gave {_name(score)}: must give a score")
    if backward is not None:
        _same_gradient(score, backward(_Backward(), _Score(), _checked("score_mod_bprop_tensors", backward_tensors)))
    given = {"softmax_scale": scale * score.before}
    if score.capped:
        if score.after <= 0:
            raise refused("mul", f"of tanh by {score.after:g}, where a number above 0 would do")
        given = {"softcap": score.after, "softmax_scale": scale * score.before * score.after}
    b, sq, sk = q.shape[layout.index("b")], q.shape[layout.index("s")], k.shape[layout.index("s")]
    heads = q.shape[2]
    parts = [_bias(x, sk, q.device) for x in score.added]
    if parts:
        given["bias"] = sum(parts[1:], parts[0])
    if score.slopes is not None:
        slopes = score.slopes.to(q.device, torch.float32).reshape(-1, score.slopes.shape[1] if score.slopes.dim() == 4
                                                                  else 1)
        given["alibi_slopes"] = slopes.expand(slopes.shape[0], heads).contiguous() if slopes.shape[0] > 1 else \
            slopes[0].expand(heads).contiguous()
        given["align"] = "top_left"
    masks = _Mask(*(sum((getattr(mask, name) for mask in score.masks), ()) for name in ("bounds", "ids", "shown")))
    return {**given, **_mask_keywords(masks, b, sq, sk, q.device)}


def _checked(name: str, tensors) -> dict:
    if tensors is None:
        return {}
    if not isinstance(tensors, dict) or not all(isinstance(x, torch.Tensor) for x in tensors.values()):
        raise ValueError(f"DotProductAttention: {name}={type(tensors).__name__}: must be a dict of tensors")
    return tensors


def _bias(x, sk: int, device):
    """A bias [b|1, h|1, sq|1, skv|1], of places [b|1, h|1, 1, skv]: what a row shares cancels."""
    if isinstance(x, _Tensor):
        return x.x
    columns = x.column * torch.arange(sk, dtype=torch.float32, device=device)[None, None, None]
    if x.tensor is None:
        return columns
    if tuple(x.tensor.shape[-2:]) != (1, 1):
        raise refused("mul", "of places and a tensor with rows or columns")
    return columns * x.tensor.to(device)


def _mask_keywords(mask: _Mask, b: int, sq: int, sk: int, device) -> dict:
    given = {}
    if mask.shown:
        given["drop"] = ~torch.stack(torch.broadcast_tensors(*mask.shown)).all(0)
    if len(mask.ids) > 1:
        raise refused("cmp_eq", "twice")
    if mask.ids:
        rows, columns = mask.ids[0]
        given["segment_ids"] = (rows.reshape(rows.shape[0], -1).expand(b, sq).to(torch.int32).contiguous(),
                                columns.reshape(columns.shape[0], -1).expand(b, sk).to(torch.int32).contiguous())
    if not mask.bounds:
        return given
    band = all(row == -column != 0 for row, column, _ in mask.bounds)
    lefts = [shift for row, _, shift in mask.bounds if row < 0]   # column >= row - shift
    rights = [shift for row, _, shift in mask.bounds if row > 0]  # column <= row + shift
    left, right = min(lefts, default=-1), min(rights, default=-1)
    if band and min(lefts + rights) >= 0:
        given["align"] = "top_left"
        if right == 0:
            given["causal"] = True
        if left >= 0 or right > 0:
            given["window"] = left, right
        return given
    return given | {"key_ranges": _ranges(mask.bounds, b, sq, sk, device)}


def _ranges(bounds, b: int, sq: int, sk: int, device):
    """int32 [b, 1, sq, 2]: the first key of a row and the one behind its last."""
    rows = torch.arange(sq, device=device)
    first, end = torch.zeros_like(rows), torch.full_like(rows, sk)
    for row, column, shift in bounds:
        if column > 0:    # j >= -row i - shift
            first = torch.maximum(first, (-row * rows - shift).long())
        elif column < 0:  # j <= row i + shift
            end = torch.minimum(end, (row * rows + shift).long() + 1)
        else:             # the row alone
            end = torch.where(row * rows + shift >= 0, end, 0)
    ranges = torch.stack((first, torch.maximum(end, first)), -1).to(torch.int32)
    return ranges.expand(b, 1, sq, 2).contiguous()


def _same_gradient(score: _Score, gradient):
    """The gradient is score_mod's own, so that a score_mod_bprop of another one is refused."""
    factor = score.before * score.after
    same = isinstance(gradient, _Score) and gradient.capped == score.capped and not gradient.added and \
        gradient.slopes is None and math.isclose(gradient.before * gradient.after, factor, rel_tol=1e-6) and \
        (not score.capped or gradient.tanh_of is score.tanh_of)
    hidden = [sorted(bound for mask in x.masks for bound in mask.bounds) for x in (score, gradient)] if same else []
    if not same or score.masks and gradient.masks and hidden[0] != hidden[1]:
        raise _lib.Refused("DotProductAttention: score_mod_bprop: builds another gradient than that of score_mod, "
                           "which tessera takes; leave it out")
