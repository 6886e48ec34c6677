# SPDX-License-Identifier: Apache-2.0
"""How an axis of tokens is divided into sequences: one after another, in places of one size, or in
places anywhere. Lengths are kept twice, as lists and as int32 tensors, of which in-place updates keep the
addresses, so that a captured CUDA graph sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch


def default_device(device=None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _int32(values: Sequence[int], device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=default_device(device))


def _starts(seqlens: Iterable[int]) -> list[int]:
    starts = [0]
    for length in seqlens:
        starts.append(starts[-1] + length)
    return starts


@dataclasses.dataclass
class SeqLenInfo:
    """Sequences one after another. seqstart is int32 [b + 1], where each begins, and the end."""
    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device=None) -> SeqLenInfo:
        seqlens = list(seqlens)
        starts = _starts(seqlens)
        return cls(_int32(starts, device), max(seqlens, default=-1), min(seqlens, default=-1), starts)

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> None:
        """Other lengths, as many, none over max_seqlen."""
        seqlens = list(seqlens)
        _check_update(len(self.seqstart_py) - 1, self.max_seqlen, seqlens)
        self.seqstart_py[:] = _starts(seqlens)
        self.seqstart.copy_(_int32(self.seqstart_py, "cpu"), non_blocking=True)

    def to(self, device):
        if self.seqstart.device == torch.device(device):
            return self
        moved = {field.name: getattr(self, field.name).to(device)
                 for field in dataclasses.fields(self)
                 if isinstance(getattr(self, field.name), torch.Tensor)}
        return dataclasses.replace(self, **moved)

    def intervals(self) -> Iterable[tuple[int, int]]:
        yield from zip(self.seqstart_py, self.seqstart_py[1:])

    def fits(self, tokens: int) -> bool:
        """Whether an axis of `tokens` is what is divided here."""
        return tokens == self.seqstart_py[-1]

    @property
    def extent(self) -> str:
        """What fits, in words."""
        return str(self.seqstart_py[-1])

    def split(self, x: torch.Tensor, batch_sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """x [1, tokens, ...] as a list of [batch size, length, ...]."""
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(f"tessera.xformers: tensor.shape={list(x.shape)}: must begin with "
                             f"[1, {self.seqstart_py[-1]}], all tokens of the sequences")
        chunks, at = [], 0
        for size in batch_sizes or [1] * (len(self.seqstart_py) - 1):
            part = x[:, self.seqstart_py[at]:self.seqstart_py[at + size]]
            chunks.append(part.reshape(size, -1, *x.shape[2:]))
            at += size
        return chunks

    def packed(self, side: str) -> dict:
        """The keywords of a packed side."""
        return {f"cu_seqlens_{side}": self.seqstart, f"max_seqlen_{side}": max(self.max_seqlen, 0)}


@dataclasses.dataclass
class PaddedSeqLenInfo(SeqLenInfo):
    """Sequences in places of `padding` tokens each; seqlen int32 [b] is how many are used."""
    seqlen: torch.Tensor
    seqlen_py: Sequence[int]
    padding: int

    @classmethod
    def from_seqlens(cls, seqlens, *, device=None):
        raise RuntimeError("tessera.xformers: padded lengths come from from_seqlens_padded")

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device=None
                            ) -> PaddedSeqLenInfo:
        seqlens = list(seqlens)
        _check_padding(seqlens, padding)
        starts = list(range(0, len(seqlens) * padding + 1, padding)) if padding else \
            [0] * (len(seqlens) + 1)
        return cls(_int32(starts, device), max(seqlens), min(seqlens), starts,
                   _int32(seqlens, device), seqlens, padding)

    def from_seqlens_padded_inplace(self, seqlens: Sequence[int]) -> None:
        """Other lengths, as many, none over max_seqlen."""
        _check_padding(seqlens, self.padding)
        _check_update(len(self.seqlen_py), self.max_seqlen, seqlens)
        self.seqlen_py[:] = seqlens
        self.seqlen.copy_(_int32(seqlens, "cpu"), non_blocking=True)

    def intervals(self) -> Iterable[tuple[int, int]]:
        for start, length in zip(self.seqstart_py, self.seqlen_py):
            yield start, start + length

    def fits(self, tokens):
        return all(0 <= first and (end <= tokens or end == first) for first, end in self.intervals())

    @property
    def extent(self):
        first, end = min(x for x, _ in self.intervals()), max(y for _, y in self.intervals())
        return f"{end} or more" if first >= 0 else f"counted from 0, not from {first}"

    def split(self, x, batch_sizes=None):
        raise NotImplementedError("tessera.xformers: split: sequences in places with padding")

    def packed(self, side: str) -> dict:
        ends = torch.nn.functional.pad(self.seqlen.cumsum(0), (1, 0)).to(torch.int32)
        return {f"cu_seqlens_{side}": ends, f"cu_seqlens_{side}_padded": self.seqstart,
                f"max_seqlen_{side}": max(self.max_seqlen, 0)}


@dataclasses.dataclass
class GappySeqInfo(PaddedSeqLenInfo):
    """Sequences in places anywhere: seqstart[i] and seqlen[i]; the last start is the end of all. With
    pages a start is relative to the sequence's pages, and seqlen is where it ends there."""
    padding: int = 0

    @classmethod
    def from_seqlens_gappy(cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool, *,
                           device=None) -> GappySeqInfo:
        seqstarts, seqlens = list(seqstarts), list(seqlens)
        if not seqlens or len(seqstarts) - len(seqlens) != (0 if paged else 1):
            raise ValueError(f"tessera.xformers: kv_seqstarts={seqstarts}: must be one longer than "
                             f"kv_seqlen={seqlens}, or with pages as long, and not empty")
        longest, shortest = max(seqlens), min(seqlens)
        if paged:
            seqlens = [start + length for start, length in zip(seqstarts, seqlens)]
            seqstarts.append(-1)
        return cls(_int32(seqstarts, device), longest, shortest, seqstarts, _int32(seqlens, device),
                   seqlens)


def _check_padding(seqlens, padding: int):
    if any(not 0 <= length <= padding for length in seqlens):
        raise ValueError(f"tessera.xformers: kv_seqlen={list(seqlens)}: each must be 0 to kv_padding="
                         f"{padding}")


def _check_update(count: int, longest: int, seqlens):
    if len(seqlens) != count or max(seqlens, default=0) > longest:
        raise ValueError(f"tessera.xformers: seqlens={list(seqlens)}: an update in place must have "
                         f"{count} lengths, none over max_seqlen={longest}")
