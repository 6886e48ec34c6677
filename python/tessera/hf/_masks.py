# SPDX-License-Identifier: Apache-2.0
"""transformers' masks for tessera: key ranges where they are intervals, and in a form that nothing but
tessera's attention function can use, so that a model which computes attention itself cannot be wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import transformers
from packaging.version import Version  # which transformers needs
from transformers import masking_utils

from .._lib import Refused

if Version(transformers.__version__) < Version("5.4.dev0"):
    raise ImportError(f"tessera.hf: transformers=={transformers.__version__}: tells mask functions no q_length; must "
                      "be 5.4 or later")

_log = logging.getLogger("tessera.hf")


class Mask(torch.Tensor):
    """A mask that may be looked at, sliced, moved and handed on, but not computed with.

    It holds key ranges, int32 [b|1, 1, sq, 2], or True where visible, bool [b|1, 1, sq, sk]. A model
    that does not call transformers' attention interface adds its mask to its scores: a sum with
    key ranges is a wrong result or an obscure error. Any tensor made of a Mask, except by _HANDED_ON,
    raises tessera.Refused. `mask.plain()` is the tensor itself."""

    model_type = ""  # of the model whose mask it is

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        # Beside a mode, such as a default device, PyTorch 2.11 compiles DisableTorchFunctionSubclass to nothing.
        plain = [x._plain if isinstance(x, HeldMask) else x for x in args]
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = function(*plain, **(kwargs or {}))
            except RuntimeError as error:  # shapes that do not fit, as a rule
                raise _refusal(name, args) from error
            if not isinstance(result, torch.Tensor) or function == _BASE or \
                    isinstance(function, torch._ops.OpOverload):  # only compiled graphs call these
                return result
            mask = args[0]
            if name in _HANDED_ON and isinstance(mask, Mask) and result.dtype == mask.dtype:
                kind = Mask if isinstance(mask, HeldMask) else type(mask)
                return _of(result.as_subclass(kind), mask.model_type)
        raise _refusal(name, args)

    def plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()  # as_subclass is not for torch.compile


class HeldMask(Mask):
    """A Mask that was made outside of a compiled graph, beside the tensor itself. A graph is so called with a plain
    tensor: PyTorch 2.11 puts modes around a graph's first call in which operators of a subclass fail."""

    _plain: torch.Tensor

    def plain(self) -> torch.Tensor:
        return self._plain


class CausalMask(Mask):
    """The whole lower triangle of [b, 1, s, s], which has that shape and one byte."""


def made(plain: torch.Tensor, kind: type[Mask]) -> torch.Tensor:
    """`plain` as a mask. Where torch.export runs Python itself (strict=False) a tensor is a subclass already,
    and is marked; what is made of it is then not looked at."""
    if type(plain) is torch.Tensor or isinstance(plain, Mask) or not torch.compiler.is_exporting():
        return plain.as_subclass(kind)
    plain._tessera_kind = kind
    return plain


def kind_of(mask) -> type[Mask] | None:
    """The class of a mask that was made here, None of anything else."""
    kind = type(mask)
    if kind is torch.Tensor:
        return None
    return kind if issubclass(kind, Mask) else getattr(mask, "_tessera_kind", None)


# What generate and layers do to a mask on its way to the attention function.
_HANDED_ON = {"__getitem__", "to", "cuda", "cpu", "contiguous", "clone", "detach", "expand", "__deepcopy__"}
_BASE = torch.Tensor._base.__get__  # torch.compile asks for what a mask is a view of


def attention_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0,
                   kv_offset: int = 0, mask_function: Callable = masking_utils.causal_mask_function,
                   attention_mask: torch.Tensor | None = None, **others: object) -> Mask | None:
    """transformers' mask function: a Mask. CausalMask for a plain causal square; key ranges for
    patterns of transformers' own; else a boolean mask; None where nothing is masked.

    batch_size, q_length and kv_length are the extents of the scores, q_offset and kv_offset the
    positions of their first query and key; mask_function says of (batch, head, query, key) what is
    visible; attention_mask, bool [b, keys], which keys are no padding. others are transformers'
    settings, such as config and device."""
    mask = _mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **others)
    return None if mask is None else _of(mask, getattr(others.get("config"), "model_type", ""))


def of_positions(position_ids: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Key ranges of causal rows of packed sequences, of position_ids [b, s] alone: a sequence begins where they do not
    rise by 1. Nothing is read back from the device."""
    rows = torch.arange(position_ids.shape[1], device=position_ids.device)[None]
    begins = torch.nn.functional.pad(position_ids.diff() != 1, (1, 0), value=True)
    start = torch.where(begins, rows, 0).cummax(-1).values
    if sliding_window is not None:
        start = torch.maximum(start, rows - sliding_window + 1)
    return torch.stack((start, (rows + 1).expand_as(start)), -1).to(torch.int32)[:, None]


# ---- below: how ----

def _mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **others):
    simple = attention_mask is None and kv_offset == 0 and \
        not isinstance(q_offset, torch.Tensor) and q_offset == 0 and q_length == kv_length
    if mask_function is masking_utils.causal_mask_function and simple and \
            others.get("allow_is_causal_skip", True):
        whole = torch.empty(1, dtype=torch.int8, device=others.get("device", "cpu"))
        return made(whole.expand(batch_size, 1, q_length, kv_length), CausalMask)
    if mask_function is masking_utils.bidirectional_mask_function and attention_mask is None and \
            others.get("allow_is_bidirectional_skip", False):
        return None
    device = others.get("device", "cpu") if attention_mask is None else attention_mask.device
    rows = torch.arange(q_length, device=device)[None] + q_offset  # [1, sq], absolute
    try:
        start, end = _interval(mask_function, rows)
        if attention_mask is not None:
            first, last = _padding(attention_mask)
            start, end = torch.maximum(start, first), torch.minimum(end, last)
    except NotAnInterval:
        return made(_dense(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function,
                           attention_mask, **others), Mask)
    ranges = torch.stack(torch.broadcast_tensors(start, end), -1) - kv_offset
    return made(ranges.clamp(0, kv_length).to(torch.int32)[:, None], Mask)


def _of(mask: Mask, model_type: str) -> Mask:
    """Remembers whose mask it is, for the message, and the tensor itself; torch.compile has no room for either."""
    if torch.compiler.is_compiling():
        return mask
    if type(mask) is Mask:
        plain = mask.plain()
        mask = plain.as_subclass(HeldMask)
        mask._plain = plain
    mask.model_type = model_type
    return mask


def _refusal(name: str, arguments) -> Refused:
    model_type = next((x.model_type for x in arguments if isinstance(x, Mask)), "")
    return Refused(f'tessera.hf: attn_implementation="tessera": model_type="{model_type}": {name} of a mask: this '
                   "model computes with its mask outside transformers' attention interface; use "
                   'attn_implementation="eager", in a composite model for this part alone: {"": "tessera", '
                   '"name_of_its_sub_config": "eager"}')


class NotAnInterval(Exception):
    pass


def pattern(function: Callable) -> tuple[str, dict]:
    """The function of transformers that made a mask function, and what it was given; ("", {}) of a function that is
    not made so."""
    maker = getattr(function, "__qualname__", "").partition(".")[0]
    if getattr(function, "__module__", "") != masking_utils.__name__ or not function.__closure__:
        return "", {}
    return maker, {name: cell.cell_contents
                   for name, cell in zip(function.__code__.co_freevars, function.__closure__)}


def _interval(function, rows):
    """[start, end) of the keys that `function` shows to the queries at absolute positions `rows`,
    int64 [b|1, sq] each."""
    if function is masking_utils.causal_mask_function:
        return torch.zeros_like(rows), rows + 1
    if function is masking_utils.bidirectional_mask_function:
        return torch.zeros_like(rows), torch.full_like(rows, _FAR)
    maker, given = pattern(function)
    if maker not in _PATTERNS:
        raise NotAnInterval
    return _PATTERNS[maker](rows, **given)


_FAR = 2**31 - 1


def _and(rows, mask_functions):
    patterns = [pattern(function) for function in mask_functions]
    packed = next((given["packed_sequence_mask"] for maker, given in patterns if maker == PACKED), None)
    start, end = torch.zeros_like(rows), torch.full_like(rows, _FAR)
    for function, (maker, given) in zip(mask_functions, patterns):
        other_start, other_end = _remapped(rows, packed, **given) if maker == REMAPPED else _interval(function, rows)
        start, end = torch.maximum(start, other_start), torch.minimum(end, other_end)
    return start, end


def _window(rows, sliding_window):
    return rows - sliding_window + 1, torch.full_like(rows, _FAR)


def _window_both_sides(rows, sliding_window):
    return rows - sliding_window, rows + sliding_window + 1


def _chunk(rows, chunk_size, left_padding):
    left = left_padding.to(rows.device)[:, None]
    start = left + (rows - left).div(chunk_size, rounding_mode="floor") * chunk_size
    return start, start + chunk_size


def _packed(rows, packed_sequence_mask):
    """The extent of each row's sequence. Ids may have any values and any order."""
    ids = packed_sequence_mask
    in_order = ids.sort(-1).values
    ends, kinds = ids[:, 1:] != ids[:, :-1], in_order[:, 1:] != in_order[:, :-1]
    require((ends.sum(-1) == kinds.sum(-1)).all(), "ids of packed sequences: the tokens of a sequence must be "
                                                   "neighbours")
    runs = torch.nn.functional.pad(ends.cumsum(-1), (1, 0))
    mine = _at(runs, rows)
    return torch.searchsorted(runs, mine), torch.searchsorted(runs, mine, right=True)


def _remapped(rows, packed, mask_function, position_ids):
    """A pattern in positions that count on within each packed sequence. Only beside the mask of these sequences is it
    an interval: alone it shows keys of several."""
    if packed is None:
        raise NotAnInterval
    require(((position_ids.diff() == 1) | (packed.diff() != 0)).all(),
            "position_ids: must rise by 1 within a packed sequence")
    positions = _at(position_ids, rows)
    start, end = _interval(mask_function, positions)
    shift = rows - positions
    return start + shift, torch.where(end >= _FAR, end, end + shift)


def _at(x, rows):
    """x [b, tokens] at rows [b|1, sq]."""
    return x.gather(1, rows.expand(x.shape[0], -1))


PACKED, REMAPPED = "packed_sequence_mask_function", "remap_positions_for_packed_sequence"
_PATTERNS = {"and_masks": _and, "sliding_window_overlay": _window, "chunked_overlay": _chunk,
             "sliding_window_bidirectional_overlay": _window_both_sides, PACKED: _packed}


def require(condition, what: str):
    """Makes a mask of intervals possible: a graph cannot choose another."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, f"tessera.hf: {what} under torch.compile; others work in eager mode")
    elif not condition:
        raise NotAnInterval


def _padding(mask):
    """[first, last) of the real tokens of each sequence, int64 [b, 1] each."""
    mask = mask.to(torch.bool)
    n = mask.shape[-1]
    position = torch.arange(n, device=mask.device)
    first = torch.where(mask, position, n).amin(-1, keepdim=True)
    last = torch.where(mask, position + 1, 0).amax(-1, keepdim=True)
    require((mask.sum(-1, keepdim=True) == (last - first).clamp(min=0)).all(),
            "attention_mask: must be padding on the left or right")
    return first, last


def _dense(*arguments, **others):
    others.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask = masking_utils.sdpa_mask(*arguments, **others)
    shown = sum((n - 1) * stride for n, stride in zip(mask.shape, mask.stride())) + 1
    _log.warning("this mask is not an interval of keys: a boolean mask of %d bytes", shown)
    return mask
