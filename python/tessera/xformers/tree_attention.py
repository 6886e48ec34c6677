# SPDX-License-Identifier: Apache-2.0
"""xformers.ops.tree_attention: attention of a tree of drafted tokens over a context and over the tree."""

from __future__ import annotations

import torch

from .. import Refused
from .fmha import memory_efficient_attention_partial, merge_attentions

__all__ = ["tree_attention"]


def tree_attention(q, spec_k, spec_v, cache_k, cache_v, spec_attn_bias, prefix_attn_bias, prefix_op=None,
                   suffix_op=None, autotune: bool = False, quantized_kv_scales=None) -> torch.Tensor:
    """Attention of q [b, tree, h, d] over cache_k, cache_v [b, s, h, d], whose lengths prefix_attn_bias knows, and over
    spec_k, spec_v [b, tree or more, h, d], seen as spec_attn_bias says; either may have groups, [b, s, g, h, d].

    prefix_attn_bias packs b sequences of `tree` queries, as BlockDiagonalPaddedKeysMask does; for a paged bias the
    cache is [1, tokens, h, d]. spec_attn_bias [tree, of spec_k] is added to the scores. Gradients reach every tensor
    of floats. The ops and autotune have no effect; quantized_kv_scales is Refused.
    """
    if quantized_kv_scales is not None or not cache_k.is_floating_point():
        raise Refused(f"tessera.xformers.tree_attention: cache_k.dtype={cache_k.dtype}, quantized_kv_scales: keys with "
                      "a shift are not built; fp8 ones are, by tessera.torch.attention(k_scale=, v_scale=)")
    b, tree = q.shape[:2]
    if spec_attn_bias.shape != (tree, spec_k.shape[1]):
        raise ValueError(f"tessera.xformers.tree_attention: spec_attn_bias.shape={list(spec_attn_bias.shape)}: must be "
                         f"{[tree, spec_k.shape[1]]}, of q and spec_k")
    context, context_lse = memory_efficient_attention_partial(*(x.flatten(0, 1)[None] for x in (q, cache_k, cache_v)),
                                                              prefix_attn_bias, op=prefix_op)
    drafts, drafts_lse = memory_efficient_attention_partial(q, spec_k, spec_v, spec_attn_bias, op=suffix_op)
    rows = context_lse[0].unflatten(-1, (b, tree)).movedim(-2, 0)
    return merge_attentions([context.reshape(drafts.shape), drafts], [rows, drafts_lse], write_lse=False,
                            output_dtype=q.dtype)[0]
