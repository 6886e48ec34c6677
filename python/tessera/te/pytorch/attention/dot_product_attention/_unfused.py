# SPDX-License-Identifier: Apache-2.0
"""The keywords of tessera.torch.attention in plain PyTorch, on any device and in any float dtype.

Materialises the scores, [b, h, sq, skv] in fp32 (fp64 for fp64), and reads lengths of packed
tensors on the host. Dropout hides what tessera.torch hides, bit for bit.
"""

from __future__ import annotations

import torch

from .....torch import dropout_mask
from ...._words import visible


def attention(q, k, v, *, layout, softmax_scale=None, causal=False, window=None, align=None,
              seqlens_q=None, seqlens_k=None, cu_seqlens_q=None, cu_seqlens_k=None,
              cu_seqlens_q_padded=None, cu_seqlens_k_padded=None, max_seqlen_q=None,
              max_seqlen_k=None, drop=None, key_ranges=None, segment_ids=None, bias=None,
              bias_at="post_scale", alibi_slopes=None, sink=None, dropout_p=0.0, rng_state=None,
              return_max_logit=False, deterministic=False, softcap=0.0, emulation=None):
    """o in q's layout, or (o, max_logit). `emulation` (Emulation) rounds tensors on their way."""
    if emulation is not None:
        q, k, v = emulation.inputs(q, k, v)
    side_q = _Side(layout[0], seqlens_q, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, q)
    side_k = _Side(layout[1], seqlens_k, cu_seqlens_k, cu_seqlens_k_padded, max_seqlen_k, k)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = side_q.padded(q).to(wide)
    group = queries.shape[1] // side_k.padded(k).shape[1]
    keys, values = (side_k.padded(x).to(wide).repeat_interleave(group, 1) for x in (k, v))
    b, h, sq, d = queries.shape
    sk = keys.shape[2]

    distance = _distance(side_q.lengths, side_k.lengths, align, b, sq, sk, q.device)
    scores = queries @ keys.mT
    if bias is not None and bias_at == "pre_scale":
        scores = scores + bias
    scores = scores * (d ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None and bias_at == "post_scale":
        scores = scores + bias
    if alibi_slopes is not None:
        scores = scores - distance.abs() * alibi_slopes.reshape(-1, h, 1, 1)
    if emulation is not None:
        scores = emulation.scores(scores)
    seen = visible(distance, causal, window) & side_q.valid[:, None, :, None] & \
        side_k.valid[:, None, None, :]
    if drop is not None:
        seen = seen & ~drop
    if key_ranges is not None:
        j = torch.arange(sk, device=q.device)
        seen = seen & (j >= key_ranges[..., :1]) & (j < key_ranges[..., 1:2])
    if segment_ids is not None:
        seen = seen & (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :])
    scores = scores.masked_fill(~seen, -torch.inf)

    probabilities = _softmax(scores, sink)
    if dropout_p:
        threshold = int(dropout_p * 65536 + 0.5)
        keep = dropout_mask(b, h, sq, sk, dropout_p, rng_state)
        probabilities = probabilities * keep * (65536 / (65536 - threshold))
    if emulation is not None:
        probabilities = emulation.probabilities(probabilities)
    o = side_q.stored((probabilities @ values).to(q.dtype), q)
    if emulation is not None:
        o = emulation.output(o)
    if not return_max_logit:
        return o
    return o, scores.detach().amax((0, 2, 3)) if scores.numel() else scores.new_full((h,), -torch.inf)


class _Side:
    """Where the tokens of one side lie, and which of [b, s] exist."""

    def __init__(self, layout, seqlens, cu_seqlens, starts, max_seqlen, x):
        self.layout = layout
        self.index = None
        if layout == "thd":
            self.lengths = cu_seqlens.diff()
            starts = (cu_seqlens if starts is None else starts)[:-1]
            s = int(self.lengths.max()) if max_seqlen is None and len(self.lengths) else \
                max_seqlen or 0
        else:
            b, s = x.shape[layout.index("b")], x.shape[layout.index("s")]
            self.lengths = x.new_full((b,), s, dtype=torch.int32) if seqlens is None else seqlens
        positions = torch.arange(s, device=x.device)
        self.valid = positions < self.lengths[:, None]
        if layout == "thd":
            self.index = (starts[:, None] + positions).clamp(max=max(x.shape[0] - 1, 0)).long()

    def padded(self, x):
        """x as [b, h, s, d], zero where there is no token."""
        if self.layout == "thd":  # a row to point at, where there is none
            x = (x if x.shape[0] else torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)))[self.index]
        elif self.layout == "sbhd":
            x = x.transpose(0, 1)
        return x.masked_fill(~self.valid[:, :, None, None], 0).transpose(1, 2)

    def stored(self, o, q):
        """o [b, h, s, dv] in this side's layout, as long as q."""
        o = o.transpose(1, 2)
        if self.layout == "thd":
            tokens = o.new_zeros(q.shape[0], *o.shape[2:])
            return tokens.index_put((self.index[self.valid],), o[self.valid])
        return (o.transpose(0, 1) if self.layout == "sbhd" else o).contiguous()


def _distance(lengths_q, lengths_k, align, b, sq, sk, device):
    """i + shift - j, [b, 1, sq, sk]."""
    i, j = torch.arange(sq, device=device), torch.arange(sk, device=device)
    shift = align if isinstance(align, torch.Tensor) else \
        lengths_k - lengths_q if align == "bottom_right" else torch.zeros_like(lengths_q)
    return (shift[:, None, None] + i[:, None] - j)[:, None]


def _softmax(scores, sink):
    """Rows that see nothing are zero; a sink joins the sum only."""
    if scores.shape[-1] == 0:
        return scores
    peak = scores.detach().amax(-1, keepdim=True)
    if sink is not None:
        sink = scores.new_zeros(1) if isinstance(sink, str) else sink
        sink = sink.to(scores.dtype).reshape(-1, 1, 1)
        peak = torch.maximum(peak, sink.detach())
    peak = peak.masked_fill(peak == -torch.inf, 0)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - peak).exp()
    return weights / total.masked_fill(total == 0, 1)
