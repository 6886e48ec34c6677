# SPDX-License-Identifier: Apache-2.0
"""A model of transformers whose sequences lie on several ranks. A hook cuts each batch to this rank's shard, and
the attention layers see the whole sequences.

Masks that transformers makes become a band (BandMask), which knows the shards. So a layer that is recomputed in a
checkpoint's backward pass computes the same as before.
"""

from __future__ import annotations

import contextvars
import dataclasses

import torch
from transformers import masking_utils

from .._lib import Refused
from ..context_parallel import Shards
from ..context_parallel.shards import TILE
from ..torch import context_parallel as cp
from ..torch.comm import by_name
from ..torch.context_parallel._spec import names_of
from . import _masks

_current: contextvars.ContextVar[Spread | None] = contextvars.ContextVar("spread", default=None)
# A spread of every batch that any thread is in: torch.compile reads and guards this one, PyTorch 2.11's cannot
# read a context variable.
_entered: list[Spread] = []


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where the tokens of a batch lie. `packed` rows hold all sequences, one after another."""
    shards: Shards
    group: object
    packed: bool
    exchange: str = "auto"
    padded: bool = False  # on the right, which causal layers never see
    place: torch.Tensor | None = dataclasses.field(default=None, compare=False)  # position_ids of this rank's tokens

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of [b, s, ...]; of packed rows, [1, tokens, ...]."""
        return cp.shard(x.flatten(0, 1)[None] if self.packed else x, self.shards, self.group, 1)

    def placed(self, device) -> Spread:
        """This, with `place` on `device`."""
        rows = cp.positions(self.shards, self.group, device)
        return dataclasses.replace(self, place=rows[None] if self.packed else rows.view(len(self.shards.lengths), -1))


class BandMask(_masks.Mask):
    """A mask of sequences on several ranks: a window (left, right), and where they lie."""
    window: tuple[int, int] | None = None
    spread: Spread | None = None


def context_parallel(model: torch.nn.Module, group, *, exchange: str = "auto", reduction: str = "sum") -> Parallel:
    """Makes model(**batch) compute on this rank's tokens. Call it on every rank of `group` with the same whole
    batch; `remove()` of the result ends that.

    Build the model with attn_implementation="tessera". Batches hold input_ids [b, s], whose rows may be packed:
    position_ids begin at 0 again in each document, or one row has cu_seq_lens_q. labels are shifted before they are
    cut; shift_labels are shifted already. Layers keep their windows, caps and sinks. logits are those of this rank's
    tokens, in the order of spread().shards, in one row if rows are packed. attention_mask may pad causal models on
    the right. group is that of tessera.torch.context_parallel.attention. ValueError or Refused for anything else.

    loss is this rank's share: its sum over ranks is the loss of one device, and likewise for gradients; with
    reduction="mean" their mean is, which DDP and FSDP take. A batch's num_items_in_batch replaces that divisor.

    >>> parallel = tessera.hf.context_parallel(model, group)
    >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(f"tessera.hf.context_parallel: reduction={reduction!r}: must be 'sum' or 'mean'")
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if strange:
        raise Refused(f"tessera.hf.context_parallel: config.layer_types={strange}: only attention sees the tokens of "
                      f"other ranks; {', '.join(sorted(_LAYERS))} are known")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        kind = model.active_peft_config.peft_type
        raise Refused(f"tessera.hf.context_parallel: peft_type={getattr(kind, 'value', kind)}: puts tokens before "
                      "those of every rank; adapters of weights, such as LORA, would work")
    return Parallel(model, group, exchange, reduction)


class Parallel:
    """The hooks of context_parallel."""

    def __init__(self, model, group, exchange, reduction="sum"):
        self.group, self.exchange, self._spread = group, exchange, None
        self._size = _size(group)
        self._average = reduction == "mean"
        self._tokens = []
        self._handles = [model.register_forward_pre_hook(self._before, with_kwargs=True),
                         model.register_forward_hook(self._after, always_call=True)]

    def spread(self) -> Spread | None:
        """Where the tokens of the last batch lie."""
        return self._spread

    def remove(self):
        for handle in self._handles:
            handle.remove()

    @torch.compiler.disable  # it reads lengths back from the batch; the model within is compiled
    def _before(self, module, args, keywords):
        keywords = dict(keywords)
        if args:
            keywords["input_ids"] = args[0]
        of_caches = ("cache", "past_key_values", "inputs_embeds")  # transformers 5.24 renamed the second
        if len(args) > 1 or any(keywords.get(name) is not None for name in of_caches):
            raise ValueError("tessera.hf.context_parallel: a batch must be keywords with input_ids; of "
                             "caches use tessera.torch.context_parallel.decode")
        ids = keywords["input_ids"]
        spread = self._spread = self._of(ids, keywords)
        keywords.pop("attention_mask", None)
        if keywords.get("cu_seq_lens_q") is not None:
            keywords.pop("seq_idx", None)  # which says the same
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
            keywords.pop(name, None)
        keywords["input_ids"] = spread.shard(ids)
        keywords["position_ids"] = spread.place
        keywords["use_cache"] = False
        labels, following = keywords.get("labels"), keywords.get("shift_labels")
        if following is None and labels is not None:
            following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        if following is not None:
            keywords["labels"] = keywords["shift_labels"] = spread.shard(following)
            if keywords.get("num_items_in_batch") is None:
                items = (following != -100).sum()
                keywords["num_items_in_batch"] = items / self._size if self._average else items
        self._tokens.append(_current.set(spread))
        _entered.append(spread)
        return (), keywords

    @torch.compiler.disable
    def _after(self, module, args, output):
        if self._tokens:
            _current.reset(self._tokens.pop())
            _entered.pop()

    def _of(self, ids, keywords) -> Spread:
        b, s = ids.shape
        lengths, size = _documents(ids, keywords), self._size
        padded = _is_padded(keywords.get("attention_mask"))
        packed = len(lengths) > b
        if packed:
            shards = Shards.balanced(lengths, size)
        else:
            shards = Shards.zigzag([s] * b, size, align=TILE if s >= 2 * size * TILE else 1)
        if packed and _has_idle(shards):  # a few short documents
            shards = Shards.zigzag(lengths, size, align=1)
        if _has_idle(shards):  # no model of transformers takes a row without tokens
            raise ValueError(f"tessera.hf.context_parallel: input_ids.shape={[b, s]}: leaves a rank of {size} without "
                             f"tokens; rows of {2 * size} tokens or more would work")
        return Spread(shards, self.group, packed, self.exchange, padded).placed(ids.device)


def band(mask_function) -> BandMask | None:
    """The mask of `mask_function` while a batch is spread, else None."""
    spread = _current.get()
    if spread is None:
        return None
    window = _window(mask_function)
    if spread.padded and window[1] != 0:
        raise Refused("tessera.hf.context_parallel: attention_mask=Tensor: pads sequences, and a layer "
                      "that is not causal would see the padding; pack documents by position_ids")
    mask = torch.empty(0, dtype=torch.int8).as_subclass(BandMask)
    mask.window, mask.spread = window, spread
    return mask


def is_on() -> bool:
    return bool(_entered) and _current.get() is not None


def attend(mask: BandMask, q, k, v, keywords: dict) -> torch.Tensor:
    """o [b, s, h, d] of q, k, v [b, s, h, d] of this rank's tokens."""
    spread = mask.spread
    words = dict(keywords, window=mask.window, shards=spread.shards, group=spread.group,
                 exchange=spread.exchange)
    if not spread.packed:
        return cp.attention(q, k, v, **words)
    return cp.attention(q[0], k[0], v[0], layout="thd", **words)[None]


# ---- below: how ----

_LAYERS = {"full_attention", "sliding_attention"}


def _window(function) -> tuple[int, int]:
    """(left, right) of a pattern of transformers' own."""
    if function is masking_utils.causal_mask_function:
        return -1, 0
    if function is masking_utils.bidirectional_mask_function:
        return -1, -1
    maker, given = _masks.pattern(function)
    try:
        if maker in _PATTERNS:
            return _PATTERNS[maker](**given)
    except _masks.NotAnInterval:
        pass
    raise Refused(f"tessera.hf.context_parallel: mask_function={maker or function!r}: is no band; "
                  "causal masks, sliding windows and packed documents are")


def _and(mask_functions):
    windows = [_window(function) for function in mask_functions]
    return tuple(min((side for side in sides if side >= 0), default=-1) for sides in zip(*windows))


def _packed(packed_sequence_mask):
    """No window: the ids that transformers makes of this rank's positions, whose documents are in the shards. A shard
    cannot tell which tokens of other ranks a user's own ids name."""
    place = _current.get().place
    counted = (place.diff(prepend=place[:, :1] - 1) != 1).cumsum(-1)
    own = counted.shape == packed_sequence_mask.shape and (counted == packed_sequence_mask).all()
    _masks.require(own, "ids of packed sequences: must be those of position_ids")
    return -1, -1


_PATTERNS = {"and_masks": _and, "sliding_window_overlay": lambda sliding_window: (sliding_window - 1, -1),
             "sliding_window_bidirectional_overlay":
                 lambda sliding_window: (sliding_window, sliding_window),
             _masks.PACKED: _packed,
             _masks.REMAPPED: lambda mask_function, position_ids: _window(mask_function)}


def _documents(ids, keywords) -> list[int]:
    """Lengths of the documents of all rows, one after another: as many as rows if none is packed."""
    b, s = ids.shape
    lengths, positions = keywords.get("cu_seq_lens_q"), keywords.get("position_ids")
    if lengths is not None:
        lengths = lengths.diff().tolist()
        if b != 1 or sum(lengths) != s:
            raise ValueError(f"tessera.hf.context_parallel: cu_seq_lens_q: has {sum(lengths)} tokens, input_ids "
                             f"{[b, s]}; must be of one row and all its tokens")
        return lengths
    if positions is None:
        return [s] * b
    if positions.dim() != 2 or positions.shape[1] != s:
        raise ValueError(f"tessera.hf.context_parallel: position_ids.shape={list(positions.shape)}: must be "
                         f"[{b}, {s}], as input_ids")
    positions, mask = positions.expand(b, s), keywords.get("attention_mask")
    if mask is not None:  # transformers then looks for no documents, and says nothing of the padding's positions
        along = torch.arange(s, device=positions.device)
        if bool(((positions != along) & mask.bool()).any()):
            raise ValueError("tessera.hf.context_parallel: position_ids: must count from 0 beside an attention_mask; "
                             "leave the mask out to pack documents")
        return [s] * b
    first = positions == 0
    wrong = ~first
    wrong[:, 1:] &= positions.diff() != 1
    if bool(wrong.any()):
        raise ValueError(f"tessera.hf.context_parallel: position_ids={int(positions[wrong][0])}: must begin at 0, "
                         "and again where a document begins, and rise by 1")
    starts = first.flatten().nonzero()[:, 0].tolist()
    return [b - a for a, b in zip(starts, [*starts[1:], first.numel()])]


def _has_idle(shards) -> bool:
    return any(shards.tokens(rank) == 0 for rank in range(shards.size))


def _is_padded(mask) -> bool:
    if mask is None:
        return False
    if mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(f"tessera.hf.context_parallel: attention_mask.shape={list(mask.shape)}: must "
                         "be [b, s] with padding on the right, which a causal model never sees")
    return not bool(mask.all())


def _size(group) -> int:
    inner, outer = names_of(group)
    return by_name(inner).size * by_name(outer).size
