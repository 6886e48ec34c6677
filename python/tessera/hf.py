# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers on tessera: import this, then

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tessera")

It registers two things under that name: the attention function, and the function that makes masks.
transformers describes a mask by a function of (batch, head, query, key); the patterns of its own are
recognised and become key ranges, int32 [b|1, 1, sq, 2], in O(sequence) memory, 2-D padding included.
Whatever users compose with functions of their own becomes a boolean mask, and its bytes are logged.
"""

from __future__ import annotations

import logging

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .torch import attention

_log = logging.getLogger("tessera.hf")

# What models pass along that says nothing about scores.
_HARMLESS = {"position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict",
             "output_router_logits", "num_items_in_batch", "past_key_values", "layer_idx",
             "deterministic", "logits_to_keep", "labels", "mm_token_type_ids", "token_type_ids"}


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None,
                      is_causal=None, sliding_window=None, softcap=None, s_aux=None,
                      position_bias=None, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None,
                      max_length_k=None, **others):
    """transformers' attention function: q, k, v [b, h, s, d] -> (o [b, s, h, d], None).

    attention_mask is what attention_mask() made, or a mask of the user's own: boolean (True = visible)
    or additive. Without one, is_causal and sliding_window decide. cu_seq_lens_q and cu_seq_lens_k,
    int32 [sequences + 1], say where the sequences of a packed row begin: none sees another."""
    for name, value_ in others.items():
        if name not in _HARMLESS and value_ is not None and value_ is not False:
            raise ValueError(f"tessera.hf: {name}={type(value_).__name__}: attn_implementation="
                             '"tessera" does not know this argument; use attn_implementation="eager"')
    packed = _packed_row(query, cu_seq_lens_q, cu_seq_lens_k)
    keywords = {}
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        keywords.update(_band(causal, sliding_window, query.shape[2], packed))
    elif attention_mask.dtype == torch.int32:
        keywords["key_ranges"] = attention_mask
    elif attention_mask.dtype == torch.bool:
        keywords["keep"] = attention_mask[..., :key.shape[2]]
    else:
        mask = attention_mask[..., :key.shape[2]]
        position_bias = mask if position_bias is None else position_bias + mask
    if position_bias is not None:
        fits = position_bias.dtype in (query.dtype, torch.float32)
        bias = position_bias if fits else position_bias.to(query.dtype)
        keywords["bias"] = bias if bias.stride(-1) in (0, 1) else bias.contiguous()  # T5 permutes it
    if s_aux is not None:
        keywords["sink"] = s_aux.float()
    keywords.update(softmax_scale=scaling, softcap=softcap or 0.0, dropout_p=dropout)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if packed and attention_mask is None and position_bias is None:
        longest = {f"max_seqlen_{side}": length for side, length in
                   (("q", max_length_q), ("k", max_length_k)) if isinstance(length, int)}
        o = attention(q[0], k[0], v[0], layout="thd", cu_seqlens_q=cu_seq_lens_q,
                      cu_seqlens_k=cu_seq_lens_k, **longest, **keywords)
        return o[None], None
    if packed:  # the mask counts positions of the row
        keywords["segment_ids"] = _sequence_of_each(cu_seq_lens_q, q), \
            _sequence_of_each(cu_seq_lens_k, k)
    return attention(q, k, v, **keywords), None


def attention_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0,
                   mask_function=masking_utils.causal_mask_function, attention_mask=None, **others):
    """transformers' mask function. None for a plain causal or unmasked square, which the attention
    function knows by itself; key ranges for patterns of transformers' own; else a boolean mask."""
    simple = attention_mask is None and kv_offset == 0 and \
        not isinstance(q_offset, torch.Tensor) and q_offset == 0 and q_length == kv_length
    if mask_function is masking_utils.causal_mask_function and simple and \
            others.get("allow_is_causal_skip", True):
        return None
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
    except _NotAnInterval:
        return _dense(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function,
                      attention_mask, **others)
    ranges = torch.stack(torch.broadcast_tensors(start, end), -1) - kv_offset
    return ranges.clamp(0, kv_length).to(torch.int32)[:, None]


# ---- below: how ----

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


def _sequence_of_each(cu_seq_lens, x) -> torch.Tensor:
    """int32 [1, s]: which sequence of a packed row each token of x [1, s, h, d] belongs to."""
    positions = torch.arange(x.shape[1], dtype=cu_seq_lens.dtype, device=x.device)
    return torch.searchsorted(cu_seq_lens[1:].contiguous(), positions, right=True,
                              out_int32=True)[None]


class _NotAnInterval(Exception):
    pass


def _interval(function, rows):
    """[start, end) of the keys that `function` shows to the queries at absolute positions `rows`,
    int64 [b|1, sq] each."""
    if function is masking_utils.causal_mask_function:
        return torch.zeros_like(rows), rows + 1
    if function is masking_utils.bidirectional_mask_function:
        return torch.zeros_like(rows), torch.full_like(rows, _FAR)
    maker = getattr(function, "__qualname__", "").partition(".")[0]
    if getattr(function, "__module__", "") != masking_utils.__name__ or maker not in _PATTERNS:
        raise _NotAnInterval
    names = function.__code__.co_freevars
    captured = {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or ())}
    return _PATTERNS[maker](rows, **captured)


_FAR = 2**31 - 1


def _and(rows, mask_functions):
    start, end = _interval(mask_functions[0], rows)
    for function in mask_functions[1:]:
        other_start, other_end = _interval(function, rows)
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
    """The extent of each token's sequence: ids of packed sequences never decrease."""
    ids = packed_sequence_mask.contiguous()
    return torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)


def _remapped(rows, mask_function, position_ids):
    """A pattern in positions that count from the start of each packed sequence."""
    start, end = _interval(mask_function, position_ids)
    shift = rows - position_ids
    return start + shift, torch.where(end >= _FAR, end, end + shift)


_PATTERNS = {"and_masks": _and, "sliding_window_overlay": _window, "chunked_overlay": _chunk,
             "sliding_window_bidirectional_overlay": _window_both_sides,
             "packed_sequence_mask_function": _packed,
             "remap_positions_for_packed_sequence": _remapped}


def _padding(mask):
    """[first, last) of the real tokens of each sequence, int64 [b, 1] each."""
    mask = mask.to(torch.bool)
    n = mask.shape[-1]
    position = torch.arange(n, device=mask.device)
    first = torch.where(mask, position, n).amin(-1, keepdim=True)
    last = torch.where(mask, position + 1, 0).amax(-1, keepdim=True)
    whole = (mask.sum(-1, keepdim=True) == (last - first).clamp(min=0)).all()
    if torch.compiler.is_compiling():
        torch._assert_async(whole, "tessera.hf: attention_mask: must be padding on the left or right "
                                   "under torch.compile; a mask with holes works in eager mode")
    elif not whole:
        raise _NotAnInterval
    return first, last


def _dense(*arguments, **others):
    others.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask = masking_utils.sdpa_mask(*arguments, **others)
    shown = sum((n - 1) * stride for n, stride in zip(mask.shape, mask.stride())) + 1
    _log.warning("this mask is not an interval of keys: a boolean mask of %d bytes", shown)
    return mask


AttentionInterface.register("tessera", attention_forward)
AttentionMaskInterface.register("tessera", attention_mask)
