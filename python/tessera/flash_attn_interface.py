# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn_interface, FlashAttention 3, computed by tessera: change the import line.

    from tessera.flash_attn_interface import flash_attn_func     # was: from flash_attn_interface import

Shapes are [b, s, h, d], or packed [t, h, d]; dv may differ from d; descales are [b, hk]. num_splits,
pack_gqa and scheduler_metadata have no effect. qv, of q's shape with dv columns, is the part of q that attends to v,
as latent attention has it: softmax((q kᵀ + qv vᵀ) · softmax_scale) v, where softmax_scale is 1/√(d + dv) unless given.
It is one product over columns that lie beside each other, for which k and v are copied. tessera.flash_attn is
version 2's.
Programs that call torch.ops.flash_attn_3 themselves call register_ops() once before.
"""

from __future__ import annotations

import torch

from .flash_attn import _kvcache, _ops_3, _passes, _plan, _translate as to
from .flash_attn._translate import Refused

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_with_kvcache", "flash_attn_combine", "get_scheduler_metadata",
           "register_ops", "Refused"]


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    """Attention of q [b, sq, hq, d] over k [b, sk, hk, d], v [b, sk, hk, dv] -> [b, sq, hq, dv], or with
    return_attn_probs (out, lse [b, hq, sq]). A query sees keys of its own attention_chunk positions."""
    q, k, v = _with_qv("flash_attn_func", q, k, v, qv, q_descale, k_descale, v_descale)
    positions = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
    return to.attention(q, k, v, return_lse=return_attn_probs,
                        **to.chunk_ranges(attention_chunk, positions, (1, 1, -1, 2)),
                        **_keywords(softmax_scale, causal, window_size, softcap, q_descale, k_descale,
                                    v_descale, sm_margin),
                        deterministic=to.deterministic(deterministic))


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None,
                              v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
                              deterministic=False, num_heads_q=None, sm_margin=0,
                              return_attn_probs=False):
    """flash_attn_func of qkv [b, s, 3, h, d], or [b, s, hq + 2 hk, d] with num_heads_q=hq."""
    if qkv.dim() == 5:
        q, k, v = to.unpacked("flash_attn_qkvpacked_func", "qkv", qkv, "b, s, 3, h, d")
    elif num_heads_q is None or (qkv.shape[2] - num_heads_q) % 2:
        raise ValueError("tessera.flash_attn_qkvpacked_func: num_heads_q="
                         f"{num_heads_q}: must be given with qkv [b, s, hq + 2 hk, d]")
    else:
        hk = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, hk, hk], 2)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale,
                           window_size, attention_chunk, softcap, deterministic=deterministic,
                           sm_margin=sm_margin, return_attn_probs=return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None,
                           q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
                           attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                           deterministic=False, sm_margin=0, return_attn_probs=False):
    """Attention of packed q [tq, hq, d] over k [tk, hk, d], v [tk, hk, dv] -> [tq, hq, dv], or with
    return_attn_probs (out, lse [hq, tq]). seqused [b] is how much of a sequence's place is used."""
    q, k, v = _with_qv("flash_attn_varlen_func", q, k, v, qv, q_descale, k_descale, v_descale)
    where = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    if attention_chunk:
        used_q = cu_seqlens_q.diff() if seqused_q is None else seqused_q
        used_k = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        sequence, places = to.sequence_of(cu_seqlens_q, q.shape[0])
        positions = places - cu_seqlens_q[sequence] + (used_k - used_q)[sequence]
        where |= to.chunk_ranges(attention_chunk, positions, (1, -1, 2))
    return to.attention(q, k, v, return_lse=return_attn_probs, **where,
                        **_keywords(softmax_scale, causal, window_size, softcap, q_descale, k_descale,
                                    v_descale, sm_margin),
                        deterministic=to.deterministic(deterministic))


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None,
                            rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                            cache_leftpad=None, page_table=None, cu_seqlens_q=None,
                            cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
                            rotary_interleaved=True, scheduler_metadata=None, num_splits=0,
                            pack_gqa=None, sm_margin=0, return_softmax_lse=False):
    """tessera.flash_attn.flash_attn_with_kvcache, with queries [b, sq, hq, d] or packed [tq, hq, d] by
    cu_seqlens_q, new keys packed by cu_seqlens_k_new, and rotary_seqlens [b], the position of the first
    new token where that is not the cache's length. Returns out, or (out, lse). Beside qv, k_cache and v_cache are
    copied unless they are columns of one tensor, those of v before those of k."""
    _check_qv("flash_attn_with_kvcache", q, v_cache, qv, q_descale, k_descale, v_descale)
    given = _keywords(softmax_scale, causal, window_size, softcap, q_descale, k_descale, v_descale,
                      sm_margin)
    for name in ("causal", "window", "align"):
        given.pop(name, None)
    return _kvcache.attend(
        "flash_attn_with_kvcache", q, k_cache, v_cache,
        new=_kvcache.New(k, v, cu_seqlens_k_new),
        rotary=_kvcache.Rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens),
        cache=_kvcache.Cache(cache_seqlens, cache_batch_idx, cache_leftpad, page_table, selects_rows=True),
        queries=_kvcache.Queries(cu_seqlens_q, to.lengths(max_seqlen_q, None)["max_seqlen_q"]),
        causal=causal, window_size=window_size, attention_chunk=attention_chunk, qv=qv,
        return_lse=return_softmax_lse, **given)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """(out [b, s, h, d], lse [b, s, h]) over the union of parts: out_partial [parts, b, s, h, d] and lse_partial
    [parts, b, s, h], or packed [parts, t, h, d] and [parts, t, h]. out is written where it is given."""
    return to.combined(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                           cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
                           attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    """scheduler_metadata= for a call of flash_attn_with_kvcache: int32, as long as FlashAttention 3's on Hopper, on
    cache_seqlens' device. It has no effect, and is 0: the backend plans each call by itself. num_splits, pack_gqa,
    has_softcap and sm_margin do not change it; sequences' lengths and starts are int32."""
    return _plan.scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim,
        headdim if headdim_v is None else headdim_v, qkv_dtype, cache_seqlens,
        per_sequence={"cache_leftpad": cache_leftpad},
        cumulative={"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new}, page_size=page_size,
        max_seqlen_k_new=max_seqlen_k_new, causal=causal, window_size=window_size, attention_chunk=attention_chunk)


def register_ops(bwd_results: int = 8) -> _ops_3.RegisteredOps:
    """Registers fwd, bwd, fwd_combine and get_scheduler_metadata of torch.ops.flash_attn_3, with the schemas and
    results of FlashAttention-3's extension, until remove() of the result. bwd has 8 results, which begin with dq, dk,
    dv and rowsum(dout * out); with bwd_results=5 it has those of the extension's later versions, which begin with that
    sum: dq, dk and dv are then only written. Intermediate results of its kernels are empty tensors, and the sum is not
    padded. Refused where the extension is loaded."""
    return _ops_3.RegisteredOps(_ops_3.Passes(_flash_attn_forward, _flash_attn_backward), bwd_results)


@torch.no_grad()
def _flash_attn_forward(q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
                        seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
                        rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
                        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0):
    """(out, lse, None, None): the forward pass of the functions above, without autograd. With k_new, page_table,
    kv_batch_idx, leftpad_k or rotary_cos, or cu_seqlens_q alone, k and v are the cache of flash_attn_with_kvcache, and
    seqused_k its lengths; with both cu_seqlens they are packed; else padded, of lengths seqused_k. out is written.
    Beside qv, softmax_scale=None is 1/√d, not 1/√(d + dv), as in FlashAttention 3."""
    name = "_flash_attn_forward"
    if qv is not None and softmax_scale is None:
        softmax_scale = q.shape[-1]**-0.5  # the extension's, which does not count qv
    score = dict(softmax_scale=softmax_scale, causal=causal, q_descale=q_descale, k_descale=k_descale,
                 v_descale=v_descale, window_size=window_size, softcap=softcap, sm_margin=sm_margin)
    if any(x is not None for x in (k_new, page_table, kv_batch_idx, leftpad_k, rotary_cos)) or \
            cu_seqlens_q is not None and cu_seqlens_k is None:
        for word, x in (("seqused_q", seqused_q), ("cu_seqlens_k", cu_seqlens_k)):
            if x is not None:
                raise Refused(f"tessera.{name}: {word}=Tensor: is not built beside a cache; its lengths are seqused_k")
        o, lse = flash_attn_with_kvcache(
            q, k, v, k_new, v_new, qv, rotary_cos, rotary_sin, seqused_k, kv_batch_idx, leftpad_k, page_table,
            cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, seqlens_rotary, attention_chunk=attention_chunk,
            rotary_interleaved=rotary_interleaved, return_softmax_lse=True, **score)
    elif cu_seqlens_q is not None and cu_seqlens_k is not None:
        o, lse = flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q,
                                        seqused_k, qv=qv, attention_chunk=attention_chunk, return_attn_probs=True,
                                        **score)
    else:
        q, k, v = _with_qv(name, q, k, v, qv, q_descale, k_descale, v_descale)
        _check_padded(name, cu_seqlens_q, cu_seqlens_k)
        if attention_chunk and not (seqused_q is seqused_k is None):
            raise Refused(f"tessera.{name}: attention_chunk={attention_chunk}: is not built beside seqused_q and "
                          "seqused_k of padded tensors; pack them")
        positions = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
        o, lse = to.attention(q, k, v, return_lse=True, seqlens_q=seqused_q, seqlens_k=seqused_k, **_keywords(**score),
                              **to.chunk_ranges(attention_chunk, positions, (1, 1, -1, 2)))
    return o if out is None else out.copy_(o), lse, None, None


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
                         max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
                         deterministic=False, sm_margin=0):
    """(dq, dk, dv, rowsum(dout * out)): the gradients that are given are written, the others are new. sequed_q and
    sequed_k are _flash_attn_forward's seqused_q and seqused_k."""
    name = "_flash_attn_backward"
    if sm_margin:
        raise Refused(f"tessera.{name}: sm_margin={sm_margin}: is not built; leave it out")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        where = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sequed_q, sequed_k)
    else:
        _check_padded(name, cu_seqlens_q, cu_seqlens_k)
        where = {"seqlens_q": sequed_q, "seqlens_k": sequed_k}
    gradients = _passes.gradients(q, k, v, dq, dk, dv)
    delta = _passes._backward(dout, q, k, v, out, softmax_lse, *gradients, 0.0, None, deterministic, **where,
                              **to.band(causal, window_size), **to.score(softmax_scale, softcap))
    return *gradients, delta


def _check_padded(name: str, cu_seqlens_q, cu_seqlens_k):
    if not (cu_seqlens_q is cu_seqlens_k is None):
        given, other = ("q", "k") if cu_seqlens_k is None else ("k", "q")
        raise ValueError(f"tessera.{name}: cu_seqlens_{given}=Tensor: must come with cu_seqlens_{other}")


def _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k) -> dict:
    """Where packed sequences lie, and how much of the place of each is used."""
    where = {"layout": "thd", "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
             **to.lengths(max_seqlen_q, max_seqlen_k)}
    for side, used, cu_seqlens in (("q", seqused_q, cu_seqlens_q), ("k", seqused_k, cu_seqlens_k)):
        if used is not None:
            where[f"cu_seqlens_{side}"] = to.cumulative(used).to(cu_seqlens.dtype)
            where[f"cu_seqlens_{side}_padded"] = cu_seqlens
    return where


def _keywords(softmax_scale, causal, window_size, softcap, q_descale, k_descale, v_descale,
              sm_margin) -> dict:
    return {**to.band(causal, window_size), **to.score(softmax_scale, softcap),
            "q_scale": q_descale, "k_scale": k_descale, "v_scale": v_descale, "sm_margin": sm_margin}


def _with_qv(name: str, q, k, v, qv, *descales):
    _check_qv(name, q, v, qv, *descales)
    return (q, k, v) if qv is None else to.with_qv(q, k, v, qv)


def _check_qv(name: str, q, v, qv, *descales):
    if qv is None:
        return
    if qv.shape != (*q.shape[:-1], v.shape[-1]) or qv.dtype != q.dtype:
        raise ValueError(f"tessera.{name}: qv.shape={list(qv.shape)}, qv.dtype={qv.dtype}: must be "
                         f"{[*q.shape[:-1], v.shape[-1]]} in q's dtype, {q.dtype}")
    if q.dtype.itemsize == 1 or v.dtype.itemsize == 1 or any(x is not None for x in descales):
        raise Refused(f"tessera.{name}: qv: is not built for fp8, nor beside descales, as k and v are one product; use "
                      "16 bits")
