# SPDX-License-Identifier: Apache-2.0
"""Dense masks and biases, for callers that want to look at them: the kernels need none of these.
True = hidden."""

from __future__ import annotations

import torch

from ....._words import visible
from ...._translate import usual_slopes
from ...._words import bottom_right


@torch.no_grad()
def get_padding_mask(batch_size, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None,
                     max_seqlen_kv=None, attention_type="self"):
    """bool [b, 1, 1, s] from cumulative lengths; for cross attention a pair."""
    masks = []
    for side, cu_seqlens, s in (("q", cu_seqlens_q, max_seqlen_q),
                                ("kv", cu_seqlens_kv, max_seqlen_kv)):
        if side == "kv" and attention_type == "self":
            break
        if cu_seqlens is None or s is None:
            raise ValueError(f"get_padding_mask: cu_seqlens_{side} and max_seqlen_{side} must be "
                             f'given for attention_type="{attention_type}"')
        positions = torch.arange(s, device=cu_seqlens.device)
        masks.append((positions >= cu_seqlens.diff()[:batch_size, None])[:, None, None])
    return masks[0] if attention_type == "self" else tuple(masks)


@torch.no_grad()
def get_full_mask(max_seqlen_q, max_seqlen_kv, attn_mask_type="no_mask", attention_mask=None,
                  window_size=None, attention_type="self", bottom_right_alignment=True):
    """(attn_mask_type, mask, lengths_q, lengths_kv): padding, band and attention_mask in one mask
    [b|1, h|1, sq, skv]. The type is "arbitrary" when there is a window; the lengths, of padding
    masks only, count what is visible. The diagonal is the mask type's, else follows
    bottom_right_alignment."""
    left, right = (-1, -1) if window_size is None else window_size
    has_window = left != -1 or right not in (-1, 0)
    device, lengths_q, lengths_kv, shift = None, None, None, max_seqlen_kv - max_seqlen_q
    if "padding" in attn_mask_type:
        mask_q, mask_kv = (attention_mask, attention_mask) if attention_type == "self" else \
            attention_mask
        lengths_q, lengths_kv = ((~mask).sum((1, 2, 3)) for mask in (mask_q, mask_kv))
        shift = (lengths_kv - lengths_q).view(-1, 1, 1, 1)
        attention_mask = mask_q.mT | mask_kv
    if attention_mask is not None:
        device = attention_mask.device
    if not bottom_right(attn_mask_type, bool(bottom_right_alignment)):
        shift = 0
    distance = _distance(max_seqlen_q, max_seqlen_kv, device or _default_device()) + shift
    hidden = ~visible(distance, "causal" in attn_mask_type, (left, right))
    if attention_mask is not None:
        hidden = hidden | attention_mask
    return "arbitrary" if has_window else attn_mask_type, hidden, lengths_q, lengths_kv


@torch.no_grad()
def get_alibi(_alibi_cache, num_heads, max_seqlen_q, max_seqlen_kv, actual_seqlens_q=None,
              actual_seqlens_kv=None, alibi_slopes=None, bias_dtype=None,
              bottom_right_alignment=True):
    """(slopes, bias): fp32 [h] or [b, h], and -slope * |i + shift - j| as [1|b, h, sq, skv] in
    bias_dtype. The cache is TE's dictionary: written, and never read, since lengths change."""
    device = alibi_slopes.device if alibi_slopes is not None else \
        actual_seqlens_q.device if actual_seqlens_q is not None else _default_device()
    slopes = usual_slopes(num_heads, device) if alibi_slopes is None else alibi_slopes
    if slopes.dim() > 2:
        raise ValueError(f"get_alibi: alibi_slopes.shape={list(slopes.shape)}: must be [h] or "
                         "[b, h]")
    if (actual_seqlens_q is None) != (actual_seqlens_kv is None):
        raise ValueError("get_alibi: actual_seqlens_q and actual_seqlens_kv must be given together")
    distance = _distance(max_seqlen_q, max_seqlen_kv, device)
    if actual_seqlens_q is not None:
        distance = distance.expand(len(actual_seqlens_q), -1, -1, -1)
    if bottom_right_alignment and actual_seqlens_q is not None:
        distance = distance + (actual_seqlens_kv - actual_seqlens_q).view(-1, 1, 1, 1)
    elif bottom_right_alignment:
        distance = distance + max_seqlen_kv - max_seqlen_q
    bias = -distance.abs() * slopes.reshape(-1, slopes.shape[-1], 1, 1)
    bias = bias.to(bias_dtype or torch.float32)
    _alibi_cache.update(_num_heads=num_heads, _alibi_slopes=slopes, _max_seqlen_q=max_seqlen_q,
                        _max_seqlen_kv=max_seqlen_kv, _alibi_bias=bias,
                        _bottom_right_alignment=bottom_right_alignment,
                        _alibi_slopes_require_update=False, _alibi_bias_require_update=False)
    return slopes, bias


def _distance(sq, skv, device):
    """i - j, int32 [1, 1, sq, skv]."""
    i, j = (torch.arange(n, dtype=torch.int32, device=device) for n in (sq, skv))
    return (i[:, None] - j)[None, None]


def _default_device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def get_thd_padding_mask(num_tokens, cu_seqlens, cu_seqlens_padded):
    """bool [num_tokens], True for the tokens of a packed tensor between sequences and behind them."""
    rows = torch.arange(num_tokens, device=cu_seqlens_padded.device)
    owner = torch.searchsorted(cu_seqlens_padded[1:-1].contiguous(), rows, right=True)
    return rows >= (cu_seqlens_padded[:-1] + cu_seqlens.diff())[owner]


def causal_hidden(mask_type: str, sq: int, sk: int, device):
    """bool [sq, sk], along the diagonal that the mask's name says."""
    shift = sk - sq if "bottom_right" in mask_type else 0
    return torch.ones(sq, sk, dtype=torch.bool, device=device).triu(shift + 1)
