# SPDX-License-Identifier: Apache-2.0
"""S_dmask: the weights of attention with dropout, for tests of dropout alone. It is made from what attention
returned, by PyTorch's operations and in O(s²) memory, beside the call."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from .._lib import Refused
from ..torch import dropout_mask


@torch.no_grad()
def of(name: str, q, k, lse, dropout_p: float, rng_state, **keywords):
    """S_dmask of the call to.attention(q, k, v, dropout_p=, rng_state=, **keywords) that returned lse: [b, hq, max sq,
    max sk] in q's dtype, the softmax, negative where dropped, 0 where hidden. Refused: pages."""
    if keywords.get("page_table") is not None:
        raise Refused(f"tessera.{name}: return_attn_probs=True, block_table=Tensor: the weights of pages are not made; "
                      "gather k and v, or leave return_attn_probs out")
    cu_q, cu_k = keywords.get("cu_seqlens_q"), keywords.get("cu_seqlens_k")
    lengths_q, lengths_k = (torch.full((x.shape[0],), x.shape[1], device=x.device) if cu is None else cu.diff()
                            for x, cu in ((q, cu_q), (k, cu_k)))
    if cu_q is not None:
        starts = keywords.get("cu_seqlens_k_padded")
        lse = _padded(lse.T, cu_q, lengths_q).transpose(1, 2)
        q, k = _padded(q, cu_q, lengths_q), _padded(k, cu_k if starts is None else starts, lengths_k)
    (b, sq, hq, d), (_, sk, hk, _) = q.shape, k.shape
    scale = keywords.get("softmax_scale")
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float().repeat_interleave(hq // hk, 2))
    scores *= d ** -0.5 if scale is None else scale
    if cap := keywords.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    i, j = torch.arange(sq, device=q.device)[:, None], torch.arange(sk, device=q.device)
    ends = lengths_q.view(b, 1, 1, 1), lengths_k.view(b, 1, 1, 1)
    distance = j - i - (ends[1] - ends[0])
    if (slopes := keywords.get("alibi_slopes")) is not None:
        scores = scores - slopes.reshape(-1, hq, 1, 1).float() * distance.abs()
    left, right = keywords.get("window") or (-1, -1)
    right = 0 if keywords.get("causal") else right
    seen = (i < ends[0]) & (j < ends[1])
    seen = seen & (distance >= -left) if left >= 0 else seen
    seen = seen & (distance <= right) if right >= 0 else seen
    weights = torch.where(seen, (scores - lse.unsqueeze(-1)).exp(), 0.0)
    kept = dropout_mask(b, hq, sq, sk, dropout_p, rng_state)
    return torch.where(kept, weights, -weights).to(q.dtype)


def _padded(x, starts, lengths):
    """Packed tokens [t, ...] as [b, longest, ...]."""
    return pad_sequence([x[first:first + n] for first, n in zip(starts.tolist(), lengths.tolist())], batch_first=True)
