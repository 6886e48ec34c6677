# SPDX-License-Identifier: Apache-2.0
"""The base classes of biases. A bias has three methods: `band()` gives the band of each sequence, `place()` how
tokens divide into sequences, and `materialize()` writes both out as a tensor, for tests. A window of one side, w,
holds keys at distance 0 to w - 1."""

from __future__ import annotations

import dataclasses

import torch

from ._lengths import SeqLenInfo

CAUSAL = {"causal": True, "align": "top_left"}
CAUSAL_FROM_BOTTOM_RIGHT = {"causal": True, "align": "bottom_right"}


def window(left: int, right: int, align="bottom_right") -> dict:
    return {"window": (left, right), "align": align}


def visible_block(band: dict, queries: int, keys: int, device=None) -> torch.Tensor:
    """Which keys of one sequence are visible: bool [queries, keys]."""
    shift = keys - queries if band.get("align") == "bottom_right" else 0
    left, right = band.get("window", (-1, -1))
    right = 0 if band.get("causal") else right
    distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] - shift
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left >= 0:
        visible &= distance >= -left
    return visible & (distance <= right) if right >= 0 else visible


def as_bias(visible: torch.Tensor, shape, dtype) -> torch.Tensor:
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, -torch.inf).to(dtype).expand(shape)


class AttentionBias:
    """What attn_bias= takes beside a tensor."""

    def band(self) -> dict:
        """Keywords of tessera.torch.attention for the band of each sequence."""
        return {}

    def to(self, device) -> AttentionBias:
        return self

    def materialize(self, shape, dtype: torch.dtype = torch.float32, device="cpu") -> torch.Tensor:
        """The bias as a tensor of `shape` [..., queries, keys]: 0 or -inf. For tests: it is large."""
        return as_bias(visible_block(self.band(), *shape[-2:], device), shape, dtype)


class Local:
    """Causal with a window of one side, which a mask has beside its base class."""
    _window_size: int

    def __post_init__(self):
        if self._window_size <= 0:
            raise ValueError(f"tessera.xformers: window_size={self._window_size}: must be positive")

    def band(self) -> dict:
        return window(self._window_size - 1, 0)


@dataclasses.dataclass
class Blocks(AttentionBias):
    """Queries [1, tokens] and keys, each divided into as many sequences."""
    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo

    def to(self, device):
        moved = {field.name: value.to(device) for field in dataclasses.fields(self)
                 if isinstance(value := getattr(self, field.name), (SeqLenInfo, torch.Tensor))}
        if self.k_seqinfo is self.q_seqinfo:  # equal lengths are known by identity
            moved["k_seqinfo"] = moved["q_seqinfo"]
        return dataclasses.replace(self, **moved)

    def place(self, key, value) -> tuple:
        """(key, value, keywords) of the packed call: key and value are [tokens, h, d]."""
        self.check_tokens("key", key.shape[1])
        return key[0], value[0], {**self.q_seqinfo.packed("q"), **self.k_seqinfo.packed("k")}

    def check_tokens(self, name: str, tokens: int):
        """query has the tokens of the sequences and no others; key may have more where its sequences lie in places."""
        info = self.q_seqinfo if name == "query" else self.k_seqinfo
        if not info.fits(tokens):
            raise ValueError(f"tessera.xformers: {name}.shape[1]={tokens}: must be {info.extent}, the tokens of the "
                             f"sequences of {type(self).__name__}")

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        queries, keys = shape[-2:]
        if queries != self.q_seqinfo.seqstart_py[-1] or keys != self.k_seqinfo.seqstart_py[-1]:
            raise ValueError(f"tessera.xformers: shape={list(shape)}: must end with all queries and keys, "
                             f"[{self.q_seqinfo.seqstart_py[-1]}, {self.k_seqinfo.seqstart_py[-1]}]")
        visible = torch.zeros(queries, keys, dtype=torch.bool, device=device)
        for (q0, q1), (k0, k1) in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals()):
            visible[q0:q1, k0:k1] = visible_block(self.band(), q1 - q0, k1 - k0, device)
        return as_bias(visible, shape, dtype)


def check_count(of_queries, of_keys):
    if len(of_queries) != len(of_keys):
        raise ValueError(f"tessera.xformers: {len(of_queries)} sequences of queries and {len(of_keys)} of "
                         "keys: must be as many")
