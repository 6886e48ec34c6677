# SPDX-License-Identifier: Apache-2.0
"""Decode problems that are too large to draw on the host: bench's --grid. A case line stands for each; its tensors
are drawn where they are timed."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from . import case_lines

_HEADS = ("hq=32 hk=8 d=128", "hq=64 hk=8 d=128", "hq=32 hk=4 d=128", "hq=128 hk=1 dqk=576 dv=512 vink")
_PAGES = ("", " page=16", " page=64", " page=256")
_CACHES = ("", " kv=e4m3")
_DRAWN_AT_ONCE = 1 << 26  # elements


def goals() -> list[str]:
    """The grid of the project's goals for decode: batch, keys, heads (the last is MLA), pages, dtype of the cache."""
    return [f"fwd bf16 b={b} sq=1 sk={sk} {heads}{page}{cache}"
            for b, sk, heads, page, cache in itertools.product((1, 8, 64), (1024, 8192, 131072), _HEADS, _PAGES,
                                                               _CACHES)]


GRIDS = {"goals": goals}


@dataclasses.dataclass
class Sizes:
    b: int
    sq: int
    sk: int
    hq: int
    hk: int
    dqk: int
    dv: int
    page: int | None
    cache: str  # dtype of k and v
    v_in_k: bool


def sizes_of(line: str) -> Sizes:
    """The sizes of a line that a grid has; of another it is an error."""
    words = line.split()
    given = dict(word.split("=", 1) for word in words if "=" in word)
    alone = {word for word in words[2:] if "=" not in word}
    known = {"b", "sq", "sk", "hq", "hk", "d", "dqk", "dv", "page", "kv"}
    if words[:2] != ["fwd", "bf16"] or alone - {"vink"} or given.keys() - known or \
            given.get("kv", "e4m3") != "e4m3":
        raise case_lines.UsageError(f"--grid: {line}: is no decode problem of a grid")
    number = {name: int(value) for name, value in given.items() if name != "kv"}
    d = number.get("d", 0)
    return Sizes(*(number[name] for name in ("b", "sq", "sk", "hq", "hk")), number.get("dqk", d),
                 number.get("dv", d), number.get("page"), given.get("kv", "bf16"), "vink" in alone)


class Drawn:
    """A line of a grid, in place of a conformance case."""

    def __init__(self, line: str):
        self.sizes = sizes_of(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def arguments(self) -> dict:
        """As a case's, for counting alone: every array is one zero, expanded."""
        s = self.sizes
        wide = np.dtype([("bfloat16", np.uint16)])
        cache = np.dtype([("float8_e4m3fn", np.uint8)]) if s.cache == "e4m3" else wide
        k = np.broadcast_to(np.zeros((), cache), self._cache_shape(s.dqk))
        v = k[..., :s.dv] if s.v_in_k else np.broadcast_to(np.zeros((), cache), self._cache_shape(s.dv))
        given = {"q": np.broadcast_to(np.zeros((), wide), (s.b, s.sq, s.hq, s.dqk)), "k": k, "v": v}
        if s.page:
            given["page_table"] = np.zeros((s.b, self._pages() // s.b), np.int32)
            given["seqlens_k"] = np.full(s.b, s.sk, np.int32)
        return given

    def tensors(self, torch, device: str) -> dict:
        """Keywords of tessera.torch.attention, drawn anew."""
        s = self.sizes
        cache = torch.float8_e4m3fn if s.cache == "e4m3" else torch.bfloat16
        k = _drawn(torch, self._cache_shape(s.dqk), cache, device)
        v = k[..., :s.dv] if s.v_in_k else _drawn(torch, self._cache_shape(s.dv), cache, device)
        given = {"q": _drawn(torch, (s.b, s.sq, s.hq, s.dqk), torch.bfloat16, device), "k": k, "v": v}
        if s.cache == "e4m3":
            given["k_scale"] = given["v_scale"] = torch.ones(1, device=device)
        if s.page:
            order = torch.randperm(self._pages(), device=device, dtype=torch.int32)
            given["page_table"] = order.view(s.b, -1)
            given["seqlens_k"] = torch.full((s.b,), s.sk, dtype=torch.int32, device=device)
        return given

    def _pages(self) -> int:
        return self.sizes.b * -(-self.sizes.sk // self.sizes.page)

    def _cache_shape(self, d: int) -> tuple:
        s = self.sizes
        return (self._pages(), s.page, s.hk, d) if s.page else (s.b, s.sk, s.hk, d)


def _drawn(torch, shape, dtype, device):
    x = torch.empty(shape, dtype=dtype, device=device)
    for part in x.view(-1).split(_DRAWN_AT_ONCE):
        part.copy_(torch.randn(part.shape, device=device))
    return x
