# SPDX-License-Identifier: Apache-2.0
"""The two passes of flash_attn as separate functions, without autograd, for schemes that split keys over ranks.
The out and lse given to the backward pass may be those of more keys than the call sees."""

from __future__ import annotations

import torch

from .._lib import Refused
from ..torch import _functions
from . import _translate as to, _weights


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                        alibi_slopes, return_softmax):
    """(out [b, s, h, d], lse [b, h, s], S_dmask, rng_state int64 [2]); S_dmask is flash_attn_func's, or empty."""
    return _forward("_flash_attn_forward", q, k, v, dropout_p, return_softmax,
                    **_shape(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes))


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                               softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
                               alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None,
                               seqused_k=None, zero_tensors=False):
    """_flash_attn_forward of packed q [tq, h, d] and k, v [tk, hk, d], or pools of pages with block_table; seqused_k
    [b] is how much of a sequence's place is used. zero_tensors has no effect. lse is [h, tq]."""
    if leftpad_k is not None:
        raise Refused("tessera._flash_attn_varlen_forward: leftpad_k=Tensor: is not built; use flash_attn_with_kvcache("
                      "cache_leftpad=), or cu_seqlens_k that begin later")
    return _forward("_flash_attn_varlen_forward", q, k, v, dropout_p, return_softmax,
                    **to.packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k),
                    **_shape(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes))


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                         window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):
    """Writes dq, dk and dv, those that are given; returns rowsum(dout * out), fp32 [b, h, s]."""
    return _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, rng_state, deterministic,
                     **_shape(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes))


def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
                                softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False):
    """_flash_attn_backward of packed tensors; the result is [h, tq]. zero_tensors has no effect."""
    return _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, rng_state, deterministic,
                     **to.packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
                     **_shape(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes))


def gradients(q, k, v, dq, dk, dv) -> list:
    """dq, dk and dv, new where they are None."""
    return [torch.empty_like(x) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv))]


def _shape(softmax_scale, causal, left, right, softcap, alibi_slopes) -> dict:
    return {**to.band(causal, (left, right)), **to.score(softmax_scale, softcap, alibi_slopes)}


@torch.no_grad()
def _forward(name, q, k, v, dropout_p, return_softmax, **keywords):
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if dropout_p:
        keywords["rng_state"] = state = _functions.drawn_state(q.device)
    out, lse = to.attention(q, k, v, return_lse=True, dropout_p=dropout_p, **keywords)
    weights = _weights.of(name, q, k, lse, dropout_p, **keywords) if dropout_p and return_softmax else q.new_empty(0)
    return out, lse, weights, state


@torch.no_grad()
def _backward(dout, q, k, v, out, lse, dq, dk, dv, dropout_p, rng_state, deterministic, **keywords):
    if dropout_p:
        keywords.update(dropout_p=dropout_p, rng_state=rng_state)
    outputs = {name: x for name, x in (("dq", dq), ("dk", dk), ("dv", dv)) if x is not None}
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    _functions.attention_backward(dout, q, k, v, out, lse, grads=outputs, partial=True,
                                  deterministic=to.deterministic(deterministic), **keywords)
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()
