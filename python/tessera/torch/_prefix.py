# SPDX-License-Identifier: Apache-2.0
"""Attention of many sequences that begin with the same tokens."""

from __future__ import annotations

import dataclasses

import torch

from .. import _lib
from .._call import _keywords
from .._explain import Explanation
from ._functions import attention, explain, merge

# What holds of both parts as it stands, and what of the own keys alone.
_BOTH = {"softmax_scale", "softcap", "deterministic", "backend", "allow_quadratic"}
_OWN = {"causal", "align", "seqlens_q", "seqlens_k", "sink", "page_table", "max_seqlen_q",
        "max_seqlen_k", "k_scale", "v_scale"}
_BYTES_PER_US = 4e6       # of a device's memory
_WORTH_US = 10.0          # that reading the prefix once a sequence must cost beyond reading it once
_ROWS = 16                # of one key head that the kernels of few rows take


def attention_shared_prefix(q: torch.Tensor, k_prefix: torch.Tensor, v_prefix: torch.Tensor,
                            k: torch.Tensor, v: torch.Tensor, *,
                            prefix_table: torch.Tensor | None = None, return_lse: bool = False,
                            **keywords: object) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of sequences that begin with the same keys, and reads these keys once; differentiable.

    Each sequence sees the common prefix, then its own keys. q is [b, sq, hq, dqk]. k_prefix and v_prefix are [1, sp,
    hk, d]; or pass prefix_table int32 [1, n] in their place, if the prefix is n pages of the pools k and v. k, v and
    the keywords describe each sequence's own keys, as in attention: causal (the last query is at the last key),
    seqlens_q, seqlens_k, page_table, sink, softmax_scale and softcap. Returns o, and with return_lse also lse [b, hq,
    sq].

    All b·sq queries run over the prefix as one sequence, then each over its own keys, and the parts are merged. That
    does not pay if a key head has 16 rows or fewer, or if reading the prefix again would take less than 10 us; then,
    if all keys are pages of one pool, it is one call over a joint table. ValueError: as attention. Refused: keywords
    that depend on positions (windows, ALiBi, bias, masks, dropout).

    >>> o = tessera.torch.attention_shared_prefix(q, k_prompt, v_prompt, k, v, seqlens_k=lengths)
    """
    _check(keywords)
    _check_tables(prefix_table, keywords)
    if prefix_table is not None and not _Gain(q, k, v, prefix_table).pays:
        return attention(q, k, v, return_lse=return_lse, **_joint(q, k, prefix_table, keywords))
    b, sq = q.shape[:2]
    rows, *prefix, of_prefix = _of_prefix(q, k_prefix, v_prefix, k, v, prefix_table, keywords)
    o, lse = attention(rows, *prefix, return_lse=True, **of_prefix)
    o, lse = o.unflatten(1, (b, sq))[0], lse[0].unflatten(1, (b, sq)).transpose(0, 1).contiguous()
    if keywords.get("seqlens_q") is not None:  # rows of padding see nothing, in the merge either
        padding = torch.arange(sq, device=q.device) >= keywords["seqlens_q"][:, None]
        lse = lse.masked_fill(padding[:, None], -torch.inf)
    merged = merge([(o, lse), attention(q, k, v, return_lse=True, **_of_own(keywords))])
    return merged if return_lse else merged[0]


@dataclasses.dataclass(frozen=True, repr=False)
class PrefixExplanation:
    """What attention_shared_prefix would do; print it."""
    parts: bool                       # two calls and a merge; otherwise one call
    why: str
    calls: dict[str, Explanation]     # "prefix" and "own keys", or "joint keys"

    def __str__(self) -> str:
        lines = [f"{'in two parts' if self.parts else 'in one call'}: {self.why}"]
        for name, each in self.calls.items():
            lines += [f"{name}:", *(f"  {line}" for line in str(each).splitlines())]
        return "\n".join(lines)

    __repr__ = __str__


def explain_shared_prefix(q: torch.Tensor, k_prefix: torch.Tensor, v_prefix: torch.Tensor,
                          k: torch.Tensor, v: torch.Tensor, *, prefix_table: torch.Tensor | None = None,
                          return_lse: bool = False, device: str | None = None,
                          **keywords: object) -> PrefixExplanation:
    """Says whether attention_shared_prefix would make two calls or one, why, and which backend would run each.

    q, k_prefix, v_prefix, k, v, prefix_table, return_lse and the keywords are those of attention_shared_prefix.
    device is as in explain, by default that of q. Nothing is computed. It raises the errors that
    attention_shared_prefix would raise.

    >>> print(tessera.torch.explain_shared_prefix(q, None, None, k, v, prefix_table=prompt, page_table=own))
    """
    _check(keywords)
    _check_tables(prefix_table, keywords)
    gain = None if prefix_table is None else _Gain(q, k, v, prefix_table)
    if gain is not None and not gain.pays:
        joint = explain(q, k, v, device=device, **_joint(q, k, prefix_table, keywords))
        return PrefixExplanation(False, gain.why, {"joint keys": joint})
    rows, *prefix, of_prefix = _of_prefix(q, k_prefix, v_prefix, k, v, prefix_table, keywords)
    calls = {"prefix": explain(rows, *prefix, device=device, **of_prefix),
             "own keys": explain(q, k, v, device=device, **_of_own(keywords))}
    why = gain.why if gain else "the prefix has tensors of its own, which no call can join to k and v in place"
    return PrefixExplanation(True, why, calls)


# ---- below: how ----

def _of_prefix(q, k_prefix, v_prefix, k, v, prefix_table, keywords):
    """(q, k, v, keywords) of the call over the prefix: all rows as one sequence, [1, b·sq, hq, d]."""
    common = {name: value for name, value in keywords.items() if name in _BOTH}
    if prefix_table is not None:
        k_prefix, v_prefix = k, v
        common |= {"page_table": prefix_table, "seqlens_k": _full(prefix_table, k)}
    return q.flatten(0, 1)[None], k_prefix, v_prefix, common


def _of_own(keywords: dict) -> dict:
    return {"align": "bottom_right", **keywords} if keywords.get("causal") else keywords


def _check(keywords: dict):
    for name, value in keywords.items():
        if name not in _keywords.FORWARD:
            raise _keywords.unexpected("tessera.attention_shared_prefix", name, _keywords.FORWARD)
        if name not in _BOTH | _OWN and not _is_default(value):
            raise _lib.Refused(f"tessera.attention_shared_prefix: {name}={type(value).__name__}: has a meaning "
                               "over all keys at once; call tessera.torch.attention on joint keys, or pages")
    if keywords.get("causal") and keywords.get("align") not in (None, "bottom_right"):
        raise ValueError(f"tessera.attention_shared_prefix: align={keywords['align']!r}: must be "
                         '"bottom_right", as the queries are the last tokens')


def _is_default(value) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) and value in (False, 0, "bshd")


def _check_tables(prefix_table, keywords: dict):
    if prefix_table is not None and keywords.get("page_table") is None:
        raise ValueError("tessera.attention_shared_prefix: page_table=None: prefix_table names pages of "
                         "the pool k, v; give the pages of the own keys too")


class _Gain:
    """What reading the prefix once would save, of keys in pages of one pool."""

    def __init__(self, q, k, v, prefix_table):
        tokens = prefix_table.shape[1] * k.shape[1]
        row_bytes = k.shape[2] * (k.shape[3] * k.element_size() + v.shape[3] * v.element_size())
        self.again = (q.shape[0] - 1) * tokens * row_bytes / _BYTES_PER_US
        self.rows = q.shape[0] * (q.shape[2] // k.shape[2])

    @property
    def pays(self) -> bool:
        """Whether it is worth a second launch."""
        return self.again > _WORTH_US and self.rows > _ROWS

    @property
    def why(self) -> str:
        again = f"to read the prefix again for each sequence takes {self.again:.3g} us at " \
                f"{_BYTES_PER_US / 1e6:g} TB/s, {'more' if self.again > _WORTH_US else 'no more'} than {_WORTH_US:g}"
        return again + f", and {self.rows} rows share a key head, " \
            f"{'more' if self.rows > _ROWS else 'no more'} than {_ROWS}"


def _full(table, pool) -> torch.Tensor:
    """The lengths of sequences whose pages are all full: int32 [b]."""
    return torch.full((table.shape[0],), table.shape[1] * pool.shape[1], dtype=torch.int32,
                      device=table.device)


def _joint(q, k, prefix_table, keywords: dict) -> dict:
    """The keywords of one call over the pages of the prefix, then each sequence's own."""
    keywords = dict(_of_own(keywords))
    table, lengths = keywords.pop("page_table"), keywords.pop("seqlens_k", None)
    lengths = _full(table, k) if lengths is None else lengths
    return {**keywords, "page_table": torch.cat((prefix_table.expand(q.shape[0], -1), table), 1),
            "seqlens_k": lengths + prefix_table.shape[1] * k.shape[1]}
