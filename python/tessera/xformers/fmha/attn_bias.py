# SPDX-License-Identifier: Apache-2.0
"""The biases of xformers.ops.fmha.attn_bias: which keys a query sees, without a tensor of all pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ._base import (CAUSAL, CAUSAL_FROM_BOTTOM_RIGHT, AttentionBias, Blocks, Local, check_count, window)
from ._lengths import GappySeqInfo, PaddedSeqLenInfo, SeqLenInfo
from ._paged import (PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
                     PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
                     PagedBlockDiagonalGappyKeysMask, PagedBlockDiagonalPaddedKeysMask)

__all__ = [
    "AttentionBias", "LowerTriangularMask", "LowerTriangularMaskWithTensorBias",
    "LowerTriangularFromBottomRightMask", "LowerTriangularFromBottomRightLocalAttentionMask",
    "LocalAttentionFromBottomRightMask", "BlockDiagonalMask", "BlockDiagonalCausalMask",
    "BlockDiagonalCausalFromBottomRightMask", "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask", "BlockDiagonalPaddedKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask", "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask", "BlockDiagonalGappyKeysMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask", "PagedBlockDiagonalPaddedKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", "PagedBlockDiagonalGappyKeysMask",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask"]

# ---- one sequence for all queries of a batch element ----

class LowerTriangularMask(AttentionBias):
    """Query i sees keys up to i."""

    def __init__(self, *, device=None):
        pass

    def band(self):
        return CAUSAL

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """LowerTriangularMask, and a bias that is added, with a gradient."""

    def __init__(self, bias: torch.Tensor):
        self.bias = bias

    def to(self, device):
        return type(self)(self.bias.to(device))

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return super().materialize(shape, dtype, device) + self.bias.to(device)


class LowerTriangularFromBottomRightMask(AttentionBias):
    """The last query sees the last key."""

    def band(self):
        return CAUSAL_FROM_BOTTOM_RIGHT

    def make_local_attention(self, window_size: int):
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclasses.dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(Local, LowerTriangularFromBottomRightMask):
    """The same with a window."""
    _window_size: int


@dataclasses.dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Keys at distance -window_left to window_right."""
    window_left: int
    window_right: int

    def __post_init__(self):
        for name in ("window_left", "window_right"):
            if getattr(self, name) < 0:
                raise ValueError(f"tessera.xformers: {name}={getattr(self, name)}: must not be negative")

    def band(self):
        return window(self.window_left, self.window_right)


# ---- many sequences in one row of tokens ----

@dataclasses.dataclass
class BlockDiagonalMask(Blocks):
    """Packed sequences: queries see keys of their own."""
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *,
                     device=None):
        """From lengths; kv_seqlen is q_seqlen unless given."""
        q_seqinfo = SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None or list(q_seqlen) == list(kv_seqlen):
            return cls(q_seqinfo, q_seqinfo)
        check_count(q_seqlen, kv_seqlen)
        return cls(q_seqinfo, SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]):
        """(the mask, the tensors [b_i, s_i, ...] as one [1, tokens, ...])."""
        mask = cls.from_seqlens(_seqlens(tensors), device=tensors[0].device)
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, _joined(tensors)

    @classmethod
    def from_tensor_lists_qkv(cls, tensors_q, tensors_k, tensors_v=None):
        """(the mask, queries, keys, values or None), each as one [1, tokens, ...]."""
        check_count(tensors_q, tensors_k)
        mask = cls.from_seqlens(_seqlens(tensors_q), _seqlens(tensors_k), device=tensors_q[0].device)
        mask._batch_sizes = [x.shape[0] for x in tensors_q]
        return mask, _joined(tensors_q), _joined(tensors_k), \
            None if tensors_v is None else _joined(tensors_v)

    def split_queries(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What from_tensor_list joined."""
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError("tessera.xformers: split: lengths of queries and keys differ; use "
                             "split_queries or split_kv")
        return self.split_queries(tensor)

    def _as(self, kind, *more):
        return kind(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, *more)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return self._as(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return self._as(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return self._as(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(self, window_size: int):
        return self._as(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)


@dataclasses.dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each block causal from its first query on."""

    def band(self):
        return CAUSAL


@dataclasses.dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each block causal up to its last key."""

    def band(self):
        return CAUSAL_FROM_BOTTOM_RIGHT


@dataclasses.dataclass
class BlockDiagonalCausalLocalAttentionMask(Local, BlockDiagonalCausalMask):
    """BlockDiagonalCausalMask with a window."""
    _window_size: int = 0

    def band(self):
        return window(self._window_size - 1, 0, "top_left")


@dataclasses.dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(Local, BlockDiagonalCausalFromBottomRightMask):
    """BlockDiagonalCausalFromBottomRightMask with a window."""
    _window_size: int = 0


@dataclasses.dataclass
class BlockDiagonalPaddedKeysMask(Blocks):
    """Keys lie in places of one size, of which a part is used."""

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int],
                     causal_diagonal: Any = None, *, device=None):
        return cls._from(q_seqlen, kv_padding, kv_seqlen, device)

    @classmethod
    def _from(cls, q_seqlen, kv_padding, kv_seqlen, device=None, **more):
        check_count(q_seqlen, kv_seqlen)
        return cls(SeqLenInfo.from_seqlens(q_seqlen, device=device),
                   PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device), **more)

    def make_local_attention(self, window_left: int, window_right: int):
        """Keys at distance -window_left to window_right."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)

    def make_paged(self, block_tables: torch.Tensor, page_size: int, paged_type):
        """The same lengths over pages."""
        places = dataclasses.replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, places, block_tables, page_size)


@dataclasses.dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Each block causal up to its last key; causal_diagonal has no effect."""
    causal_diagonal: Any = None

    def band(self):
        return CAUSAL_FROM_BOTTOM_RIGHT


@dataclasses.dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Keys at distance -window_left to window_right from the bottom right diagonal."""
    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(cls, q_seqlen, kv_padding: int, kv_seqlen, window_left: int,
                           window_right: int):
        return cls._from(q_seqlen, kv_padding, kv_seqlen, window_left=window_left,
                         window_right=window_right)

    def band(self):
        return window(self.window_left, self.window_right)


@dataclasses.dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(Local, BlockDiagonalPaddedKeysMask):
    """BlockDiagonalCausalWithOffsetPaddedKeysMask with a window."""
    _window_size: int

    @classmethod
    def from_seqlens_local(cls, q_seqlen, kv_padding: int, kv_seqlen, window_size: int):
        return cls._from(q_seqlen, kv_padding, kv_seqlen, _window_size=window_size)


@dataclasses.dataclass
class BlockDiagonalGappyKeysMask(Blocks):
    """Keys lie anywhere: sequence i from kv_seqstarts[i] on."""

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int],
                     kv_seqlen: Sequence[int], *, device=None):
        check_count(q_seqlen, kv_seqlen)
        return cls(SeqLenInfo.from_seqlens(q_seqlen, device=device),
                   GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device))

    def place(self, key, value):
        """Places that are out of order, or that share keys, are copied one behind another: `rows` says which."""
        starts, lengths = self.k_seqinfo.seqstart_py, self.k_seqinfo.seqlen_py
        self.check_tokens("key", key.shape[1])
        if all(start + length <= end for start, length, end in zip(starts, lengths, starts[1:])):
            return super().place(key, value)
        rows = torch.cat([torch.arange(first, end, device=key.device) for first, end in self.k_seqinfo.intervals()])
        keys = SeqLenInfo.from_seqlens(lengths, device=key.device)
        return key[0][rows], value[0][rows], {**self.q_seqinfo.packed("q"), **keys.packed("k"), "rows": rows}

    def make_paged(self, block_tables: torch.Tensor, page_size: int, notional_padding: int, paged_type):
        """The same over pages, for sequences that lie in places of notional_padding tokens."""
        if notional_padding % page_size:
            raise ValueError(f"tessera.xformers: notional_padding={notional_padding}: must be a multiple "
                             f"of page_size={page_size}")
        starts = [start - i * notional_padding
                  for i, start in enumerate(self.k_seqinfo.seqstart_py[:-1])]
        places = GappySeqInfo.from_seqlens_gappy(starts, self.k_seqinfo.seqlen_py, True,
                                                 device=block_tables.device)
        return paged_type(self.q_seqinfo, places, block_tables, page_size)


@dataclasses.dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Each block causal up to its last key."""

    def band(self):
        return CAUSAL_FROM_BOTTOM_RIGHT


VARLEN_BIASES = (BlockDiagonalMask, BlockDiagonalGappyKeysMask, BlockDiagonalPaddedKeysMask,
                 PagedBlockDiagonalPaddedKeysMask, PagedBlockDiagonalGappyKeysMask)


def _seqlens(tensors) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(x.shape[0])]


def _joined(tensors) -> torch.Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)
