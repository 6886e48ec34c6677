# SPDX-License-Identifier: Apache-2.0
"""flash_attn.cute.interface: the functions of FlashAttention 4. They return (out, lse); lse is None without
return_lse. A side of window_size that is None is unbounded, and so are two negative sides; the diagonal is always
bottom-right. qv is the part of q that attends to v, as latent attention has it: scores are those of q k + qv v.

num_splits, pack_gqa, min_seqlen_k, scheduler_metadata and the words for FlashAttention's own schedules have no effect.
What is given as code (score_mod, mask_mod) or as sparse blocks and indices is refused by name.
"""

from __future__ import annotations

from .. import _translate as to


def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
                    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
                    aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False,
                    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None):
    """(out [b, sq, hq, dv], lse) of q [b, sq, hq, d] over k [b, sk, hk, d] and v [b, sk, hk, dv]; qv [b, sq, hq, dv].
    lse is fp32 [b, hq, sq], beside qv [b, sq, hq]. learnable_sink [hq] is a logit more in each row's sum."""
    _refuse("flash_attn_func", gather_kv_indices=gather_kv_indices, score_mod=score_mod, mask_mod=mask_mod,
            block_sparse_tensors=block_sparse_tensors)
    return _attend("flash_attn_func", q, k, v, qv, return_lse, {}, softmax_scale, causal, window_size, learnable_sink,
                   softcap, deterministic)


def flash_attn_varlen_func(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                           max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
                           gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
                           window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                           deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
                           block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False,
                           scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
                           gather_bwd_recompute_p=False, gather_bwd_token_chunk=None):
    """flash_attn_func of sequences of their own lengths. q is packed [tq, hq, d] with cu_seqlens_q [b + 1], or padded
    [b, sq, hq, d] with seqused_q [b]; k and v likewise, or pages [pages, page_size, hk, d] with page_table [b, n] and
    seqused_k. lse of packed q is [hq, tq], beside qv [tq, hq]."""
    name = "flash_attn_varlen_func"
    _refuse(name, gather_kv_indices=gather_kv_indices, score_mod=score_mod, mask_mod=mask_mod,
            block_sparse_tensors=block_sparse_tensors)
    if cu_seqlens_k is not None and cu_seqlens_q is None:
        raise to.Refused(f"tessera.{name}: cu_seqlens_k.shape={list(cu_seqlens_k.shape)}: packed keys need packed "
                         "queries; give cu_seqlens_q")
    where = {}
    if cu_seqlens_q is not None:
        where |= {"layout": "thd" if cu_seqlens_k is not None or page_table is not None else ("thd", "bshd"),
                  "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": to.lengths(max_seqlen_q, None)["max_seqlen_q"]}
        if seqused_q is not None:
            where |= {"cu_seqlens_q": to.cumulative(seqused_q).to(cu_seqlens_q.dtype),
                      "cu_seqlens_q_padded": cu_seqlens_q}
    elif seqused_q is not None:
        where["seqlens_q"] = seqused_q
    if page_table is not None:
        where |= {"page_table": page_table,
                  "seqlens_k": cu_seqlens_k.diff() if seqused_k is None else seqused_k}
    elif cu_seqlens_k is not None:
        where |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": to.lengths(None, max_seqlen_k)["max_seqlen_k"]}
        if seqused_k is not None:
            where |= {"cu_seqlens_k": to.cumulative(seqused_k).to(cu_seqlens_k.dtype),
                      "cu_seqlens_k_padded": cu_seqlens_k}
    elif seqused_k is not None:
        where["seqlens_k"] = seqused_k
    return _attend(name, q, k, v, qv, return_lse, where, softmax_scale, causal, window_size, learnable_sink, softcap,
                   deterministic)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None,
                       virtual_batch_idx=None, return_lse=True):
    """(out [b, s, h, d], lse [b, s, h] or None) over the union of parts: out_partial [parts, b, s, h, d] and
    lse_partial [parts, b, s, h], or packed [parts, t, h, d] and [parts, t, h]. out is written where it is given."""
    _refuse("flash_attn_combine", cu_seqlens=cu_seqlens, seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    o, lse = to.combined(out_partial, lse_partial, out, out_dtype)
    return o, (lse if return_lse else None)


def get_scheduler_metadata(max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None,
                           pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0,
                           cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None,
                           seqused_k=None, leftpad_k=None, seqlen_k_per_split=None, _arch=None):
    """None for scheduler_metadata=, which has no effect: the backend plans each call by itself."""


def _attend(name, q, k, v, qv, return_lse, where, softmax_scale, causal, window_size, learnable_sink, softcap,
            deterministic):
    keywords = {**where, **_band(name, causal, window_size), **to.score(softmax_scale, softcap), "sink": learnable_sink,
                "deterministic": to.deterministic(deterministic)}
    if qv is not None:
        q, k, v = to.with_qv(q, k, v, qv)
    found = to.attention(q, k, v, return_lse=return_lse, **keywords)
    if not return_lse:
        return found, None
    o, lse = found
    return o, (lse if qv is None else lse.transpose(-1, -2))


def _band(name: str, causal: bool, window_size) -> dict:
    left, right = window_size
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    if causal:
        right = 0
    for side in (left, right):
        if side is not None and side < 0:
            raise to.Refused(f"tessera.{name}: window_size={tuple(window_size)}: a negative side beside another moves "
                             "the diagonal; pass None for an unbounded one")
    return to.band(causal, tuple(-1 if side is None else side for side in (left, right)))


def _refuse(operation: str, **given):
    asked = [name for name, value in given.items() if value is not None]
    if asked:
        raise to.Refused(f"tessera.{operation}: {', '.join(asked)}: not built; key_ranges, mask, segment ids, bias and "
                         "softcap of tessera.torch.attention say what most of them do")
