# SPDX-License-Identifier: Apache-2.0
"""xformers.ops.fmha.merge_training: attention over parts of the keys, whose union is differentiable. Here
memory_efficient_attention_partial and merge_attentions are so themselves; this module has xformers' names for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import memory_efficient_attention_partial, merge_attentions

__all__ = ["Partial", "memory_efficient_attention_partial_autograd", "merge_attentions_autograd"]


class Partial:
    """Attention over a part of the keys: out [b, s, h, d] or [b, s, g, h, d], and lse [b, h, s] or [b, g, h, s]."""

    def __init__(self, attn: torch.Tensor, lse: torch.Tensor):
        self._attn, self._lse = attn, lse

    def is_bmghk(self) -> bool:
        return self._attn.dim() == 5

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Partial:
        """The Partial of fn(out). fn is called with lse too, as [b, s, h, 1] or [b, s, g, h, 1]: it may change or cut
        any axis but the last."""
        rows = fn(self._lse.movedim(-1, 1).unsqueeze(-1))
        return type(self)(fn(self._attn), rows.squeeze(-1).movedim(1, -1))


def memory_efficient_attention_partial_autograd(query, key, value, attn_bias=None, p: float = 0.0, scale=None, *,
                                                op=None, output_dtype=None) -> Partial:
    """memory_efficient_attention_partial, for merge_attentions_autograd."""
    return Partial(*memory_efficient_attention_partial(query, key, value, attn_bias, p, scale, op=op,
                                                       output_dtype=output_dtype))


def merge_attentions_autograd(*partials: Partial) -> torch.Tensor:
    """Attention over the union of the parts, with gradients of the tensors of each."""
    if not partials:
        raise ValueError("tessera.xformers.merge_attentions_autograd: partials=(): must be one or more")
    if len(partials) == 1:
        return partials[0]._attn
    return merge_attentions([x._attn for x in partials], [x._lse for x in partials], write_lse=False)[0]
