# SPDX-License-Identifier: Apache-2.0
"""Cumulative lengths, and copies between layouts, which no kernel here needs."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def get_cu_seqlens(mask):
    """int32 [b + 1] from a padding mask [b, 1, 1, s], True = hidden."""
    lengths = (~mask).sum((1, 2, 3))
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def get_cu_seqlens_and_indices(mask):
    """get_cu_seqlens(mask), and where the visible tokens lie in [b * s]: int64 [b * s, 1, 1],
    filled up with b * s."""
    tokens = (~mask).reshape(-1).nonzero().squeeze(1)
    return get_cu_seqlens(mask), _filled(tokens, mask.numel())


def get_indices(max_seqlen, cu_seqlens):
    """Where the tokens of sequences that are padded to max_seqlen lie, in the form of
    get_cu_seqlens_and_indices."""
    positions = torch.arange(max_seqlen, device=cu_seqlens.device)
    visible = positions < cu_seqlens.diff()[:, None]
    return _filled(visible.reshape(-1).nonzero().squeeze(1), visible.numel())


_MAX_KEPT = 256
_cu_seqlens_cache: dict = {}  # (batch size, length, device, whether inference made it) -> tensor


def get_full_cu_seqlens(batch_size, max_seqlen, device):
    """int32 [b + 1] of sequences that are all max_seqlen long; one tensor for equal questions. One
    that inference mode made cannot be saved for a backward pass, so it is kept apart."""
    key = batch_size, max_seqlen, torch.device(device), torch.is_inference_mode_enabled()
    if key not in _cu_seqlens_cache:
        if len(_cu_seqlens_cache) >= _MAX_KEPT:
            _cu_seqlens_cache.clear()
        _cu_seqlens_cache[key] = torch.arange(batch_size + 1, dtype=torch.int32,
                                              device=device) * max_seqlen
    return _cu_seqlens_cache[key]


class PackTensors:
    """The tokens at `indices`, [b * s, h, d] -> the same shape, what is filled up being zero."""

    @staticmethod
    def apply(indices, *tensors):
        packed = tuple(pad(x, (0, 0, 0, 0, 0, 1))[indices.reshape(-1)] for x in tensors)
        return packed if len(packed) > 1 else packed[0]


class UnpackTensor:
    """PackTensors undone: [n, h, d] -> [dim0, h, d]."""

    @staticmethod
    def apply(indices, dim0, tensor):
        rows = indices.reshape(-1)[:tensor.shape[0]]
        grown = tensor.new_zeros(dim0 + 1, *tensor.shape[1:])
        return grown.index_put((rows,), tensor[:rows.shape[0]])[:dim0]


class ConvertTHDtoBSHD:
    """[t, h, d] -> [b, max_seqlen, h, d], zero after each sequence."""

    @staticmethod
    def apply(thd_tensor, cu_seqlens, max_seqlen):
        positions = torch.arange(max_seqlen, device=cu_seqlens.device)
        visible = positions < cu_seqlens.diff()[:, None]
        index = (cu_seqlens[:-1, None] + positions).clamp(max=max(thd_tensor.shape[0] - 1, 0))
        return thd_tensor[index.long()].masked_fill(~visible[:, :, None, None], 0)


class ConvertBSHDtoTHD:
    """[b, s, h, d] -> [num_tokens, h, d]: padding left out, zero behind the sequences. Without num_tokens, which
    TE 2.20 needs, those of the sequences are counted, for which a GPU is waited for."""

    @staticmethod
    def apply(bshd_tensor, cu_seqlens, num_tokens=None):
        b, s = bshd_tensor.shape[:2]
        if num_tokens is None:
            num_tokens = int(cu_seqlens[-1])
        rows = torch.arange(num_tokens, device=cu_seqlens.device)
        owner = torch.searchsorted(cu_seqlens[1:-1].contiguous(), rows, right=True)
        index = owner * s + (rows - cu_seqlens[owner]).clamp(0, max(s - 1, 0))
        inside = rows < cu_seqlens[-1]
        tokens = bshd_tensor.reshape(b * s, *bshd_tensor.shape[2:])[index.clamp(max=max(b * s - 1, 0))]
        return tokens.masked_fill(~inside[:, None, None], 0)


class _PrepareQKVForFA:
    """q, k, v [s, b, h, d], views of one buffer or not -> each dense and [b, s, h, d]."""

    @staticmethod
    def apply(query_layer, key_layer, value_layer):
        return tuple(x.transpose(0, 1).contiguous() for x in (query_layer, key_layer, value_layer))


def _filled(tokens, size):
    return pad(tokens, (0, size - tokens.shape[0]), value=size).reshape(-1, 1, 1)
