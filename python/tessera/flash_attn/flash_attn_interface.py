# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn 2.8. Shapes are [b, s, h, d], or packed [t, h, d]; hq is a multiple of hk.
Gradients reach q, k, v and alibi_slopes; an lse that is returned may be differentiated through."""

from __future__ import annotations

from ..torch._functions import drawn_state
from . import _kvcache, _translate as to, _weights, flash_attn_2_cuda as flash_attn_gpu  # noqa: F401
from ._passes import (_flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_backward,  # noqa: F401
                      _flash_attn_varlen_forward)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                    softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """Attention of q [b, sq, hq, d] over k, v [b, sk, hk, d] -> [b, sq, hq, d].

    return_attn_probs: (out, lse [b, hq, sq], S_dmask). S_dmask is None without dropout. With dropout it has the weights
    [b, hq, sq, sk] in q's dtype, negative where they are dropped; it is for tests of dropout only.
    """
    keywords = _keywords(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _returned("flash_attn_func", q, k, v, dropout_p, return_attn_probs, keywords)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False,
                              window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                              deterministic=False, return_attn_probs=False):
    """flash_attn_func of qkv [b, s, 3, h, d]."""
    q, k, v = to.unpacked("flash_attn_qkvpacked_func", "qkv", qkv, "b, s, 3, h, d")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
                           alibi_slopes, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False,
                             window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                             deterministic=False, return_attn_probs=False):
    """flash_attn_func of q and kv [b, sk, 2, hk, d]."""
    k, v = to.unpacked("flash_attn_kvpacked_func", "kv", kv, "b, sk, 2, hk, d")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
                           alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                           softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):
    """Attention of packed q [tq, hq, d] over k, v [tk, hk, d], or with block_table [b, pages] int32
    over pools [pages, page_size, hk, d] -> [tq, hq, d].

    return_attn_probs: (out, lse [hq, tq], S_dmask), as for flash_attn_func; S_dmask is [b, hq, longest q, longest k],
    and with block_table Refused.
    """
    keywords = {**to.packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table),
                **_keywords(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)}
    return _returned("flash_attn_varlen_func", q, k, v, dropout_p, return_attn_probs, keywords)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None,
                                     causal=False, window_size=(-1, -1), softcap=0.0,
                                     alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """flash_attn_varlen_func of qkv [t, 3, h, d]."""
    q, k, v = to.unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "t, 3, h, d")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
                                  dropout_p, softmax_scale, causal, window_size, softcap,
                                  alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                    dropout_p=0.0, softmax_scale=None, causal=False,
                                    window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                    deterministic=False, return_attn_probs=False):
    """flash_attn_varlen_func of q and kv [tk, 2, hk, d]."""
    k, v = to.unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, "tk, 2, hk, d")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                  max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
                                  softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
                            block_table=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
                            alibi_slopes=None, num_splits=0, return_softmax_lse=False):
    """Writes k and v [b, new, hk, d] into a cache, then computes attention of q [b, sq, hq, d] over it. The cache
    is [b_cache, s, hk, d], or with block_table pools of pages [pages, page_size, hk, d].

    New keys begin at position cache_seqlens: the length of each sequence before the call, an integer or int32
    [b]. They are rotated by rotary_cos and rotary_sin [positions, rotary_dim / 2]. cache_batch_idx int32 [b] says
    which row of the cache belongs to a sequence, cache_leftpad int32 [b] where its keys begin. num_splits has no
    effect. No gradient. Returns out, or (out, lse [b, hq, sq]).
    """
    return _kvcache.attend(
        "flash_attn_with_kvcache", q, k_cache, v_cache,
        new=_kvcache.New(k, v, None),
        rotary=_kvcache.Rotary(rotary_cos, rotary_sin, rotary_interleaved, None),
        cache=_kvcache.Cache(cache_seqlens, cache_batch_idx, cache_leftpad, block_table, "block_table"),
        causal=causal, window_size=window_size, return_lse=return_softmax_lse,
        **to.score(softmax_scale, softcap, alibi_slopes))


def _keywords(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic) -> dict:
    return {**to.band(causal, window_size), **to.score(softmax_scale, softcap, alibi_slopes),
            "deterministic": to.deterministic(deterministic)}


def _returned(name: str, q, k, v, dropout_p: float, return_attn_probs: bool, keywords: dict):
    if not return_attn_probs:
        return to.attention(q, k, v, dropout_p=dropout_p, **keywords)
    if dropout_p > 0:
        keywords["rng_state"] = drawn_state(q.device)
    results = to.attention(q, k, v, return_lse=True, dropout_p=dropout_p, **keywords)
    weights = _weights.of(name, q, k, results[1], dropout_p, **keywords) if dropout_p > 0 else None
    return (*results, weights)
