# SPDX-License-Identifier: Apache-2.0
"""Biases of sequences whose keys lie in pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ._base import CAUSAL_FROM_BOTTOM_RIGHT, Blocks, as_bias, check_count, visible_block
from ._lengths import GappySeqInfo, PaddedSeqLenInfo, SeqLenInfo


@dataclasses.dataclass
class PagedBlockDiagonalPaddedKeysMask(Blocks):
    """Keys lie in pages: key [1, pages * page_size, h, d], block_tables int32 [b, max_pages]."""
    block_tables: torch.Tensor
    page_size: int

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int],
                     block_tables: torch.Tensor, page_size: int, *, device=None):
        check_count(q_seqlen, kv_seqlen)
        device = block_tables.device if device is None else device
        places = PaddedSeqLenInfo.from_seqlens_padded(
            kv_seqlen, block_tables.shape[1] * page_size, device=device)
        return cls(SeqLenInfo.from_seqlens(q_seqlen, device=device), places, block_tables, page_size)

    def place(self, key, value):
        pools = (x.unflatten(1, (-1, self.page_size))[0] for x in (key, value))
        return *pools, {**self.q_seqinfo.packed("q"), "seqlens_k": self.k_seqinfo.seqlen,
                        "page_table": self.block_tables}

    def _first(self) -> list[int]:
        """Where each sequence begins in its pages."""
        return [0] * len(self.k_seqinfo.seqlen_py)

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        """[..., queries, keys of the pool]."""
        queries, keys = shape[-2:]
        visible = torch.zeros(queries, keys, dtype=torch.bool, device=device)
        places = zip(self.q_seqinfo.intervals(), self._first(), self.k_seqinfo.seqlen_py,
                     self.block_tables.tolist())
        for (q0, q1), first, end, pages in places:
            block = visible_block(self.band(), q1 - q0, end - first, device)
            for j in range(first, end):
                at = pages[j // self.page_size] * self.page_size + j % self.page_size
                visible[q0:q1, at] = block[:, j - first]
        return as_bias(visible, shape, dtype)


@dataclasses.dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Each block causal up to its last key."""

    def band(self):
        return CAUSAL_FROM_BOTTOM_RIGHT


@dataclasses.dataclass
class PagedBlockDiagonalGappyKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """PagedBlockDiagonalPaddedKeysMask whose sequences begin later: kv_seqstarts[i] in its pages."""

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int],
                     kv_seqlen: Sequence[int], block_tables: torch.Tensor, page_size: int, *,
                     device=None):
        check_count(q_seqlen, kv_seqlen)
        device = block_tables.device if device is None else device
        places = GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device)
        return cls(SeqLenInfo.from_seqlens(q_seqlen, device=device), places, block_tables, page_size)

    def place(self, key, value):
        key, value, given = super().place(key, value)
        places = torch.arange(self.block_tables.shape[1] * self.page_size, device=key.device)
        keep = places >= self.k_seqinfo.seqstart[:-1, None]
        return key, value, {**given, "keep": keep[:, None, None]}

    def _first(self):
        return self.k_seqinfo.seqstart_py[:-1]


@dataclasses.dataclass
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """Each block causal up to its last key."""

    def band(self):
        return CAUSAL_FROM_BOTTOM_RIGHT
