# SPDX-License-Identifier: Apache-2.0
"""The functions of flash-attn's extension flash_attn_2_cuda, which its interface calls flash_attn_gpu: positions and
results of version 2.8. They have no autograd. A generator is refused by name: dropout draws from PyTorch's own."""

from __future__ import annotations

import torch

from .._lib import Refused
from . import _kvcache, _passes, _translate as to

__all__ = ["fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache"]


def fwd(q, k, v, out_, alibi_slopes_, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        return_softmax, gen_):
    """[out [b, s, h, d], lse [b, h, s], S_dmask, rng_state int64 [2]]; out_, where it is given, is written."""
    _refuse_generator("fwd", gen_)
    out, *more = _passes._flash_attn_forward(q, k, v, p_dropout, softmax_scale, is_causal, window_size_left,
                                             window_size_right, softcap, alibi_slopes_, return_softmax)
    return [_into(out_, out), *more]


def varlen_fwd(q, k, v, out_, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k_, block_table_, alibi_slopes_,
               max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left,
               window_size_right, softcap, return_softmax, gen_):
    """fwd of packed q [tq, h, d] and k, v [tk, hk, d], or pools of pages with block_table_; lse is [h, tq].
    zero_tensors has no effect."""
    _refuse_generator("varlen_fwd", gen_)
    out, *more = _passes._flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, is_causal,
        window_size_left, window_size_right, softcap, alibi_slopes_, return_softmax, block_table_, leftpad_k_,
        seqused_k)
    return [_into(out_, out), *more]


def bwd(dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, alibi_slopes_, p_dropout, softmax_scale, is_causal,
        window_size_left, window_size_right, softcap, deterministic, gen_, rng_state):
    """[dq, dk, dv, rowsum(dout * out)]: the gradients that are given are written, the others are new."""
    _check_state("bwd", gen_, p_dropout, rng_state)
    gradients = _passes.gradients(q, k, v, dq_, dk_, dv_)
    return [*gradients, _passes._flash_attn_backward(
        dout, q, k, v, out, softmax_lse, *gradients, p_dropout, softmax_scale, is_causal, window_size_left,
        window_size_right, softcap, alibi_slopes_, deterministic, rng_state)]


def varlen_bwd(dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, cu_seqlens_q, cu_seqlens_k, alibi_slopes_, max_seqlen_q,
               max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left, window_size_right,
               softcap, deterministic, gen_, rng_state):
    """bwd of packed tensors. zero_tensors has no effect."""
    _check_state("varlen_bwd", gen_, p_dropout, rng_state)
    gradients = _passes.gradients(q, k, v, dq_, dk_, dv_)
    return [*gradients, _passes._flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, *gradients, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout,
        softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes_, deterministic,
        rng_state)]


def fwd_kvcache(q, kcache, vcache, k_, v_, seqlens_k_, rotary_cos_, rotary_sin_, cache_batch_idx_, leftpad_k_,
                block_table_, alibi_slopes_, out_, softmax_scale, is_causal, window_size_left, window_size_right,
                softcap, is_rotary_interleaved, num_splits):
    """[out [b, sq, h, d], lse [b, h, sq]] of flash_attn_with_kvcache; out_, where it is given, is written."""
    out, lse = _kvcache.attend(
        "fwd_kvcache", q, kcache, vcache, new=_kvcache.New(k_, v_, None),
        rotary=_kvcache.Rotary(rotary_cos_, rotary_sin_, is_rotary_interleaved, None),
        cache=_kvcache.Cache(seqlens_k_, cache_batch_idx_, leftpad_k_, block_table_, "block_table"), causal=is_causal,
        window_size=(window_size_left, window_size_right), return_lse=True,
        **to.score(softmax_scale, softcap, alibi_slopes_))
    return [_into(out_, out), lse]


# ---- below: how ----

@torch.no_grad()
def _into(given, out):
    return out if given is None else given.copy_(out)


def _refuse_generator(name: str, generator):
    if generator is not None:
        raise Refused(f"tessera.flash_attn_2_cuda.{name}: gen_={type(generator).__name__}: is not built; leave it out, "
                      "and torch.manual_seed sets the generator that dropout draws from")


def _check_state(name: str, generator, p_dropout: float, rng_state):
    _refuse_generator(name, generator)
    if p_dropout and rng_state is None:
        raise ValueError(f"tessera.flash_attn_2_cuda.{name}: rng_state=None: must be what the forward pass returned, "
                         f"with p_dropout={p_dropout}")
