# SPDX-License-Identifier: Apache-2.0
"""flash_attn.bert_padding: a padded batch [b, s, ...] as packed tokens [t, ...], and back. PyTorch's own indexing,
with its gradients."""

from __future__ import annotations

import torch

from . import _translate as to


def index_first_axis(input, indices):
    """input [n, ...] -> its rows `indices`."""
    return input[indices]


def index_put_first_axis(values, indices, first_axis_dim):
    """[first_axis_dim, ...] of zeros with `values` in its rows `indices`."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input, indices):
    """(index_first_axis(input, indices), input)."""
    return input[indices], input


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Packs the tokens of hidden_states [b, s, ...] whose mask [b, s] is 1 or True. Tokens of unused_mask get a
    place too, but do not count as used.

    Returns (tokens [t, ...], their indices in [b * s], cu_seqlens int32 [b + 1], the longest length as an int, the
    lengths in attention_mask int32 [b])."""
    placed = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = placed.sum(-1, dtype=torch.int32)
    return *_taken(hidden_states, placed, lengths), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """unpad_input of rows that hold several sequences: attention_mask_in_length [b, s] begins with their lengths, and
    has zeros behind. Returns four values, without the last."""
    length = attention_mask_in_length.sum(-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[-1], device=length.device)
    return _taken(hidden_states, places < length, attention_mask_in_length[attention_mask_in_length > 0])


def pad_input(hidden_states, indices, batch, seqlen):
    """What unpad_input took, [t, ...], in its places of [batch, seqlen, ...], and zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _taken(hidden_states, mask, lengths) -> tuple:
    indices = mask.flatten().nonzero().flatten()
    return (index_first_axis(hidden_states.flatten(0, 1), indices), indices, to.cumulative(lengths),
            int(lengths.max()))
