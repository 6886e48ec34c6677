# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache that is spread over ranks: whole queries, each rank's keys, parts merged."""

from __future__ import annotations

import torch

from .. import _functions
from ._sharding import _topology, merge

_OPERATION = "tessera.context_parallel.decode"
_REFUSED = ("layout", "seqlens_q", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded",
            "cu_seqlens_k_padded", "max_seqlen_q", "max_seqlen_k", "q_start", "k_start", "keep", "drop",
            "key_ranges", "segment_ids", "bias", "dropout_p", "out")


def decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, seqlens_k: torch.Tensor,
           group, interleave: int = 1, page_table=None, window: tuple[int, int] | None = None,
           **keywords):
    """Attention of new queries over a cache of which each rank has a part; the same bits on every rank.

    q [b, sq, hq, dqk], whole on every rank, holds the last sq tokens of sequences of seqlens_k [b]
    tokens, new ones included; row i sees the tokens up to its own. Token j lies on rank
    j // interleave % size, in order: k_cache [b, s, hk, dqk], v_cache [b, s, hk, dv], or pages with
    page_table, as tessera.torch.attention has them. window=(left, 0) limits what a row sees. Other
    keywords: softmax_scale, softcap, sink, k_scale, v_scale, backend, return_lse. Synchronises nothing;
    no gradient. ValueError: anything else, and ALiBi, whose distances a part of a cache cannot say.

    >>> o = decode(q, k_cache, v_cache, seqlens_k=lengths, group=group)      # [b, sq, hq, dv]
    """
    for name in _REFUSED + ("alibi_slopes", "causal", "align", "shards"):
        if keywords.get(name) is not None:
            raise ValueError(f"{_OPERATION}: {name}=...: a row sees the tokens of its sequence up to its "
                             "own, and window; leave it out")
    if not isinstance(interleave, int) or isinstance(interleave, bool) or interleave < 1:
        raise ValueError(f"{_OPERATION}: interleave={interleave}: must be at least 1")
    left, right = (-1, 0) if window is None else window
    if left < -1 or right not in (-1, 0):
        raise ValueError(f"{_OPERATION}: window={window}: must be (left, 0), left >= -1")
    topology = _topology(group)
    b, sq = q.shape[:2]
    if seqlens_k.shape != (b,):
        raise ValueError(f"{_OPERATION}: seqlens_k.shape={list(seqlens_k.shape)}: must be [{b}]")

    def local(count):
        """How many of a sequence's first `count` tokens this rank has."""
        period = interleave * topology.size
        rest = count % period - topology.rank * interleave
        return count // period * interleave + rest.clamp(0, interleave)
    ends = (seqlens_k.long()[:, None] - sq + 1 + torch.arange(sq, device=q.device)).clamp(min=0)
    starts = torch.zeros_like(ends) if left < 0 else (ends - 1 - left).clamp(min=0)
    ranges = torch.stack([local(starts), local(ends)], -1)[:, None].to(torch.int32)
    sink = keywords.pop("sink", None)
    want_lse = keywords.pop("return_lse", False)
    o, lse = _functions.attention(
        q, k_cache, v_cache, seqlens_k=local(seqlens_k), key_ranges=ranges, page_table=page_table,
        sink=sink if topology.rank == 0 else None, return_lse=True, **keywords)
    o, lse = merge(o, lse, group)
    return (o, lse) if want_lse else o
