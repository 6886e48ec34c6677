# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers on tessera: import this, then

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tessera")

The import registers two functions under that name: one computes attention, the other makes masks. transformers
describes a mask by a function of (batch, head, query, key). tessera recognises transformers' own patterns, 2-D
padding included, and turns them into key ranges, int32 [b|1, 1, sq, 2], in O(sequence) memory. A mask with
functions of a user's own becomes a boolean mask, and its bytes are logged.

A model that computes attention by itself is refused by name when it is built (_models.py). If its code does not
show that, it is refused when it first computes with a mask that is not for it (_masks.py).
"""

from __future__ import annotations

import torch
from transformers import (AttentionInterface, AttentionMaskInterface, Cache, GenerationConfig,
                          masking_utils)

from .._lib import Refused
from ..torch import attention
from . import _continuous, _masks, _models, _parallel, _plans, _ulysses
from ._continuous import continuous_batching as continuous_batching
from ._masks import CausalMask, Mask, attention_mask
from ._parallel import context_parallel as context_parallel

# What models pass along that says nothing about scores.
_HARMLESS = {"cache_position", "use_cache", "output_hidden_states", "return_dict",
             "output_router_logits", "num_items_in_batch", "past_key_values", "layer_idx",
             "deterministic", "logits_to_keep", "labels", "shift_labels", "mm_token_type_ids",
             "token_type_ids",
             # Models that transcribe pass on what generate() takes.
             *vars(GenerationConfig())} - {"output_attentions"}


def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
                      value: torch.Tensor, attention_mask: torch.Tensor | None,
                      dropout: float = 0.0, scaling: float | None = None,
                      is_causal: bool | None = None, sliding_window: int | None = None,
                      softcap: float | None = None, s_aux: torch.Tensor | None = None,
                      position_bias: torch.Tensor | None = None,
                      cu_seq_lens_q: torch.Tensor | None = None,
                      cu_seq_lens_k: torch.Tensor | None = None, max_length_q: int | None = None,
                      max_length_k: int | None = None, seq_idx: torch.Tensor | None = None,
                      position_ids: torch.Tensor | None = None, **others: object
                      ) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query, key, value [b, h, s, d] -> (o [b, s, h, d], None).

    attention_mask is the result of attention_mask(), or a user's own mask: boolean (True = visible) or additive.
    Without one, is_causal and sliding_window decide. cu_seq_lens_q and cu_seq_lens_k, int32 [sequences + 1], say
    where the sequences of a packed row begin: none sees another. max_length_q and max_length_k bound their
    lengths. seq_idx, integers [b, s], gives the sequence of each token; it is ignored if cu_seq_lens_* are given.
    position_ids [b, s] separate sequences where they do not rise by 1, if the mask of transformers was dropped.

    module is the layer that calls. dropout is a probability, scaling the factor on scores (None: 1/sqrt(d)),
    softcap their cap (None: off), s_aux [h] a learnable sink. position_bias is added to scores, and broadcasts to
    [b, h, sq, sk]. others are further arguments of models: harmless ones are known by name, the rest is Refused.
    Raises ValueError as tessera.torch.attention does."""
    if others and not _HARMLESS.issuperset(others):
        _refuse_unknown(module, others)
    kind = None if attention_mask is None else _masks.kind_of(attention_mask)
    if kind is _parallel.BandMask or _parallel.is_on():
        return _on_ranks(module, query, key, value, attention_mask, position_bias, seq_idx, dict(
            softmax_scale=scaling, softcap=softcap or 0.0, dropout_p=dropout,
            sink=None if s_aux is None else s_aux.float())), None
    if kind is not None:
        if sliding_window == 1 and key.shape[2] > query.shape[2]:  # DynamicCache has then kept what the window hides
            key, value = key[:, :, -query.shape[2]:], value[:, :, -query.shape[2]:]
        if issubclass(kind, CausalMask):  # as in eager, the mask decides, whatever the module says
            attention_mask, is_causal, sliding_window = None, True, None
        elif isinstance(attention_mask, Mask):
            attention_mask = attention_mask.plain()
    if attention_mask is None and is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if position_ids is not None and is_causal and \
            attention_mask is kind is cu_seq_lens_q is seq_idx is position_bias is None:
        attention_mask, kind = _of_positions(module, query, key, position_ids, sliding_window)
    sink = None if s_aux is None else _ulysses.sinks(s_aux.float(), query.shape[1])

    words = None
    if position_bias is seq_idx is None and not dropout and not torch.compiler.is_compiling() and \
            type(query) is type(key) is type(value) is torch.Tensor:
        words, tensors = _plans.words(query, key, attention_mask, kind, is_causal, sliding_window, cu_seq_lens_q,
                                      cu_seq_lens_k, max_length_q, max_length_k, scaling, softcap, sink)
        run = _plans.known.get(words)
        if run is not None:
            o = run(query.transpose(1, 2), key, value, *tensors)
            if o is not None:
                return o, None

    packed = _packed_row(query, cu_seq_lens_q, cu_seq_lens_k)
    keywords = dict(softmax_scale=scaling, softcap=softcap or 0.0, dropout_p=dropout)
    if attention_mask is None:
        keywords.update(_band(is_causal, sliding_window, query.shape[2], packed))
    else:
        name, mask = _mask_keyword(module, attention_mask, kind, key)
        if name != "bias":
            keywords[name] = mask
        else:
            position_bias = mask if position_bias is None else position_bias + mask
    keywords["sink"] = sink  # tensors in the order of _plans
    if position_bias is not None:
        keywords["bias"] = _bias(position_bias, query.dtype)
    if packed and attention_mask is None and position_bias is None:
        keywords.update({f"max_seqlen_{side}": length for side, length in
                         (("q", max_length_q), ("k", max_length_k)) if isinstance(length, int)},
                        cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k)
    elif packed:  # the mask counts positions of the row
        keywords["segment_ids"] = _sequence_of_each(cu_seq_lens_q, query), _sequence_of_each(cu_seq_lens_k, key)
    elif seq_idx is not None:
        keywords["segment_ids"] = _segments(seq_idx, query, key)
    o = _attend(query, key, value, keywords)
    if words is not None:
        _plans.keep(words, query, key, value, keywords)
    return o, None


# ---- below: how ----

def _attend(query, key, value, keywords: dict) -> torch.Tensor:
    """o [b, s, h, d] of [b, h, s, d], from the views that a plan takes: a layer in a checkpoint may be translated in
    its forward pass and known when it is computed again, and both must save the same tensors."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous()  # a few models permute what they have projected
               for x in (query.transpose(1, 2), key, value))
    return attention(q, k, v, layout=("bshd", "bhsd"), **keywords)


def _mask_keyword(module, mask, kind, key) -> tuple[str, torch.Tensor]:
    """A mask as a keyword of attention; bias is one that others are added to."""
    if kind is not None and mask.dtype == torch.int32:
        return "key_ranges", mask
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"tessera.hf: {type(module).__name__}: attention_mask.dtype={mask.dtype}: must be bool, "
            "True = visible, or floating point, added to the scores; use attention_mask.bool() if 1 means "
            "visible, attention_mask == 0 if 1 means hidden")
    return "keep" if mask.dtype == torch.bool else "bias", mask[..., :key.shape[2]]


def _bias(bias, dtype) -> torch.Tensor:
    bias = bias if bias.dtype in (dtype, torch.float32) else bias.to(dtype)
    return bias if bias.stride(-1) in (0, 1) else bias.contiguous()  # T5 permutes it


def _of_positions(module, query, key, position_ids, sliding_window):
    """(mask, its class) of a causal layer whose mask somebody dropped, of position_ids of all its tokens. Models of
    attn_implementation="tessera" always have one, hub kernels none where the diagonal is all of it."""
    config = getattr(module, "config", None)
    if not 1 < query.shape[2] == key.shape[2] == position_ids.shape[-1] or position_ids.dim() != 2 or \
            getattr(config, "_attn_implementation", "tessera") != "tessera":
        return None, None
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds and layer is not None else ""
    slides = "sliding" in kind if kind else getattr(config, "sliding_window", None) is not None
    if "chunked" in kind or slides and sliding_window is None:
        raise Refused(f"tessera.hf: {type(module).__name__}: attention_mask=None: the {kind or 'sliding_window'} of "
                      "this layer was in the mask of transformers, which somebody dropped, as DeepSpeed's Ulysses "
                      "does; use tessera.hf.context_parallel")
    return _masks.of_positions(position_ids, sliding_window), Mask


def _refuse_unknown(module, others: dict):
    for name, value in others.items():
        harmless = name in _HARMLESS or isinstance(value, Cache)  # which the layer has read
        if not harmless and value is not None and value is not False:
            raise Refused(f"tessera.hf: {type(module).__name__}: {name}={type(value).__name__}: "
                          'attn_implementation="tessera" does not know this argument; use '
                          'attn_implementation="eager"')


def _on_ranks(module, query, key, value, mask, position_bias, seq_idx, keywords) -> torch.Tensor:
    """A layer of a model of context_parallel."""
    if seq_idx is not None:
        raise Refused("tessera.hf.context_parallel: seq_idx=Tensor: rows of several sequences are not known for "
                      "tokens on several ranks; give each rank's batch one sequence a row")
    if not isinstance(mask, _parallel.BandMask) or position_bias is not None:
        what = "position_bias" if position_bias is not None else "attention_mask"
        raise Refused(f"tessera.hf.context_parallel: {type(module).__name__}: {what}=...: is not known "
                      "for tokens on several ranks; masks that transformers makes are")
    return _parallel.attend(mask, *(x.transpose(1, 2) for x in (query, key, value)), keywords)


def _mask(*arguments, mask_function=masking_utils.causal_mask_function, **others):
    """attention_mask, or the band of a model of context_parallel."""
    if _parallel.is_on():
        return _parallel.band(mask_function)
    return attention_mask(*arguments, mask_function=mask_function, **others)


def _packed_row(query, cu_seq_lens_q, cu_seq_lens_k) -> bool:
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return False
    for name, lengths in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if not isinstance(lengths, torch.Tensor) or lengths.dim() != 1:
            raise ValueError(f"tessera.hf: {name}={lengths!r}: must be a tensor [sequences + 1], as "
                             "the other side's is given")
    if query.shape[0] != 1:
        raise ValueError(f"tessera.hf: cu_seq_lens_q={list(cu_seq_lens_q.shape)}: packs sequences "
                         f"into one row, but the batch has {query.shape[0]}; flatten it to one")
    return True


def _band(causal, sliding_window, sq: int, packed: bool) -> dict:
    """What is visible where transformers made no mask: in one row that begins at position 0, or
    that continues a cache, or in each sequence of a packed row, which ends where its keys end."""
    align = "bottom_right" if packed or sq == 1 else "top_left"
    if sliding_window is not None:
        left, right = (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)
        return dict(window=(left, right), align=align)
    return dict(causal=True, align=align) if causal and (packed or sq > 1) else {}


def _segments(seq_idx, q, k) -> tuple[torch.Tensor, torch.Tensor]:
    """segment_ids of q and k [b, h, s, d] where seq_idx [b|1, s] says whose each token is."""
    if seq_idx.dim() != 2 or seq_idx.shape[0] not in (1, q.shape[0]) or \
            not seq_idx.shape[1] == q.shape[2] == k.shape[2]:
        raise ValueError(f"tessera.hf: seq_idx.shape={list(seq_idx.shape)}: must be [{q.shape[0]}, {q.shape[2]}], a "
                         f"number for each query and for each of {k.shape[2]} keys; with a cache leave it out")
    ids = seq_idx.to(torch.int32).expand(q.shape[0], -1).contiguous()
    return ids, ids


def _sequence_of_each(cu_seq_lens, x) -> torch.Tensor:
    """int32 [1, s]: which sequence of a packed row each token of x [1, h, s, d] belongs to."""
    positions = torch.arange(x.shape[2], dtype=cu_seq_lens.dtype, device=x.device)
    return torch.searchsorted(cu_seq_lens[1:].contiguous(), positions, right=True,
                              out_int32=True)[None]


_models.install()
AttentionInterface.register("tessera", attention_forward)
AttentionMaskInterface.register("tessera", _mask)
AttentionInterface.register(_continuous.NAME, _continuous.packed_attention)
AttentionMaskInterface.register(_continuous.NAME, _continuous.no_mask)
