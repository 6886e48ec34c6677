# SPDX-License-Identifier: Apache-2.0
"""Attention of many sequences that begin with the same tokens."""

from __future__ import annotations

import torch

from .. import _keywords, _lib
from ._functions import attention, merge

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
    """tessera.torch.attention over keys that are a prefix common to all sequences, then each
    sequence's own; differentiable.

    q [b, sq, hq, dqk]; k_prefix, v_prefix [1, sp, hk, d], or with prefix_table int32 [1, n] the first n
    pages of the pool that k and v are; k, v and the other keywords are attention's, for the own keys:
    causal (along the bottom right, as queries are the last tokens), seqlens_q, seqlens_k, page_table,
    sink, softmax_scale, softcap. Returns o, with return_lse also lse [b, hq, sq].

    The b·sq rows run as one sequence over the prefix, which is then read once, and each over its own;
    the parts are merged. Where all keys are pages of one pool and that would not pay (the prefix costs
    less than 10 us to read again, or a key head has 16 rows or fewer), it is one call over a joint
    table. ValueError as attention; Refused: keywords whose meaning leans on positions.

    >>> o = tessera.torch.attention_shared_prefix(q, k_prompt, v_prompt, k, v, seqlens_k=lengths)
    """
    _check(keywords)
    if prefix_table is not None:
        if keywords.get("page_table") is None:
            raise ValueError("tessera.attention_shared_prefix: page_table=None: prefix_table names pages of "
                             "the pool k, v; give the pages of the own keys too")
        if not _pays(q, k, v, prefix_table):
            return _joint(q, k, v, prefix_table, return_lse, keywords)
        k_prefix, v_prefix = k, v
        pages = {"page_table": prefix_table, "seqlens_k": _full(prefix_table, k)}
    else:
        pages = {}
    b, sq = q.shape[:2]
    common = {name: value for name, value in keywords.items() if name in _BOTH}
    rows = q.flatten(0, 1)[None]
    o, lse = attention(rows, k_prefix, v_prefix, return_lse=True, **pages, **common)
    o, lse = o.unflatten(1, (b, sq))[0], lse[0].unflatten(1, (b, sq)).transpose(0, 1).contiguous()
    if keywords.get("seqlens_q") is not None:  # padding sees nothing, nor does the merge
        padding = torch.arange(sq, device=q.device) >= keywords["seqlens_q"][:, None]
        lse = lse.masked_fill(padding[:, None], -torch.inf)
    if keywords.get("causal"):
        keywords.setdefault("align", "bottom_right")
    merged = merge([(o, lse), attention(q, k, v, return_lse=True, **keywords)])
    return merged if return_lse else merged[0]


def _check(keywords: dict):
    for name, value in keywords.items():
        if name not in _keywords.FORWARD:
            raise TypeError(f"tessera.attention_shared_prefix() got an unexpected keyword argument {name!r}")
        if name not in _BOTH | _OWN and not _is_default(value):
            raise _lib.Refused(f"tessera.attention_shared_prefix: {name}={type(value).__name__}: has a meaning "
                               "over all keys at once; call tessera.torch.attention on joint keys, or pages")
    if keywords.get("causal") and keywords.get("align") not in (None, "bottom_right"):
        raise ValueError(f"tessera.attention_shared_prefix: align={keywords['align']!r}: must be "
                         '"bottom_right", as the queries are the last tokens')


def _is_default(value) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) and value in (False, 0, "bshd")


def _pays(q, k, v, prefix_table) -> bool:
    """Whether to read the prefix once is worth a second launch."""
    tokens = prefix_table.shape[1] * k.shape[1]
    row_bytes = k.shape[2] * (k.shape[3] * k.element_size() + v.shape[3] * v.element_size())
    again = (q.shape[0] - 1) * tokens * row_bytes / _BYTES_PER_US
    return again > _WORTH_US and q.shape[0] * (q.shape[2] // k.shape[2]) > _ROWS


def _full(table, pool) -> torch.Tensor:
    """The lengths of sequences whose pages are all full: int32 [b]."""
    return torch.full((table.shape[0],), table.shape[1] * pool.shape[1], dtype=torch.int32,
                      device=table.device)


def _joint(q, k, v, prefix_table, return_lse, keywords):
    table = keywords.pop("page_table")
    prefix = prefix_table.shape[1] * k.shape[1]
    lengths = keywords.pop("seqlens_k", None)
    lengths = _full(table, k) if lengths is None else lengths
    if keywords.get("causal"):
        keywords.setdefault("align", "bottom_right")
    joint = torch.cat((prefix_table.expand(q.shape[0], -1), table), 1)
    return attention(q, k, v, page_table=joint, seqlens_k=lengths + prefix, return_lse=return_lse,
                     **keywords)
