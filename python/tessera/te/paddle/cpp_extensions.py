# SPDX-License-Identifier: Apache-2.0
"""TE's fused attention, forward and backward, without autograd.

    out, softmax_aux, rng_state = fused_attn_fwd(q, k, v, cu_q, cu_kv, True, sq, skv, dtype, backend)
    dq, dk, dv, dbias = fused_attn_bwd(q, k, v, cu_q, cu_kv, rng_state, out, d_out, softmax_aux,
                                       backend, sq, skv, dtype)

q is [b, sq, h, d], k and v [b, skv, hk, d]; a packed qkv [b, s, 3, h, d], a packed kv [b, skv, 2, hk,
d]; cu_seqlens [b + 1], from which "padding" takes the lengths. softmax_aux is the log-sum-exp, fp32
[b, h, sq, 1], None without training; rng_state is int64 [seed, offset]. Without training there is
no dropout. set_zero says how TE clears memory, and has no effect: what is hidden is always 0.
"""

from __future__ import annotations

import logging

import paddle

from ...paddle import _tensors, attention, attention_backward
from .. import transformer_engine_paddle as tex
from ._refused import missing
from .constants import AttnBiasType, AttnMaskType, FusedAttnBackend

__all__ = ["fused_attn_fwd_qkvpacked", "fused_attn_bwd_qkvpacked", "fused_attn_fwd_kvpacked",
           "fused_attn_bwd_kvpacked", "fused_attn_fwd", "fused_attn_bwd", "mask_to_cu_seqlens"]
__getattr__ = missing(__name__)

_log = logging.getLogger("FusedAttnFunc")


def mask_to_cu_seqlens(mask: paddle.Tensor, need_kv: bool = False):
    """(cu_seqlens of queries, of keys or None), int32 [b + 1], of a mask bool [b, 1, sq, skv], True =
    hidden, that leaves each sequence's first queries and keys."""
    cu_seqlens = [paddle.zeros([mask.shape[0] + 1], "int32") for _ in range(1 + need_kv)] + [None]
    tex.mask_to_cu_seqlens(mask, *cu_seqlens[:2], *mask.shape[2:], need_kv)
    return cu_seqlens[0], cu_seqlens[1]


def fused_attn_fwd_qkvpacked(qkv, cu_seqlens, is_training, max_seqlen, qkv_dtype,
                             fused_attention_backend, Bias=None, attn_scale=None, dropout=0.0,
                             set_zero=True, qkv_layout="bs3hd", bias_type="no_bias",
                             attn_mask_type="padding"):
    """(out [b, s, h, d], softmax_aux, rng_state)."""
    _check_layout("fused_attn_fwd_qkvpacked", qkv_layout, "bs3hd")
    return _forward("fused_attn_fwd_qkvpacked", qkv.unbind(2), cu_seqlens, cu_seqlens, is_training,
                    max_seqlen, max_seqlen, fused_attention_backend, Bias, attn_scale, dropout,
                    bias_type, attn_mask_type)


def fused_attn_bwd_qkvpacked(qkv, cu_seqlens, rng_state, o, d_o, softmax_aux,
                             fused_attention_backend, max_seqlen, qkv_dtype, attn_scale=None,
                             dropout=0.0, set_zero=True, qkv_layout="bs3hd", bias_type="no_bias",
                             attn_mask_type="padding", Bias=None):
    """(dqkv [b, s, 3, h, d], dbias or None). Bias, which TE's has no place for, is the forward's."""
    _check_layout("fused_attn_bwd_qkvpacked", qkv_layout, "bs3hd")
    dqkv = paddle.empty_like(qkv)
    dbias = _backward("fused_attn_bwd_qkvpacked", qkv.unbind(2), dqkv.unbind(2), cu_seqlens,
                      cu_seqlens, rng_state, o, d_o, softmax_aux, fused_attention_backend,
                      max_seqlen, max_seqlen, Bias, attn_scale, dropout, bias_type, attn_mask_type)
    return dqkv, dbias


def fused_attn_fwd_kvpacked(q, kv, cu_seqlens_q, cu_seqlens_kv, is_training, max_seqlen_q,
                            max_seqlen_kv, qkv_dtype, fused_attention_backend, Bias=None,
                            attn_scale=None, dropout=0.0, set_zero=True, qkv_layout="bshd_bs2hd",
                            bias_type="no_bias", attn_mask_type="padding"):
    """(out [b, sq, h, d], softmax_aux, rng_state)."""
    _check_layout("fused_attn_fwd_kvpacked", qkv_layout, "bshd_bs2hd")
    return _forward("fused_attn_fwd_kvpacked", (q, *kv.unbind(2)), cu_seqlens_q, cu_seqlens_kv,
                    is_training, max_seqlen_q, max_seqlen_kv, fused_attention_backend, Bias,
                    attn_scale, dropout, bias_type, attn_mask_type)


def fused_attn_bwd_kvpacked(q, kv, cu_seqlens_q, cu_seqlens_kv, rng_state, o, d_o, softmax_aux,
                            fused_attention_backend, max_seqlen_q, max_seqlen_kv, qkv_dtype,
                            attn_scale=None, dropout=0.0, set_zero=True, qkv_layout="bshd_bs2hd",
                            bias_type="no_bias", attn_mask_type="padding", Bias=None):
    """(dq, dkv [b, skv, 2, hk, d], dbias or None)."""
    _check_layout("fused_attn_bwd_kvpacked", qkv_layout, "bshd_bs2hd")
    dq, dkv = paddle.empty_like(q), paddle.empty_like(kv)
    dbias = _backward("fused_attn_bwd_kvpacked", (q, *kv.unbind(2)), (dq, *dkv.unbind(2)),
                      cu_seqlens_q, cu_seqlens_kv, rng_state, o, d_o, softmax_aux,
                      fused_attention_backend, max_seqlen_q, max_seqlen_kv, Bias, attn_scale,
                      dropout, bias_type, attn_mask_type)
    return dq, dkv, dbias


def fused_attn_fwd(q, k, v, cu_seqlens_q, cu_seqlens_kv, is_training, max_seqlen_q, max_seqlen_kv,
                   qkv_dtype, fused_attention_backend, Bias=None, attn_scale=None, dropout=0.0,
                   set_zero=True, qkv_layout="bshd_bshd_bshd", bias_type="no_bias",
                   attn_mask_type="padding"):
    """(out [b, sq, h, d], softmax_aux, rng_state)."""
    _check_layout("fused_attn_fwd", qkv_layout, "bshd_bshd_bshd")
    return _forward("fused_attn_fwd", (q, k, v), cu_seqlens_q, cu_seqlens_kv, is_training,
                    max_seqlen_q, max_seqlen_kv, fused_attention_backend, Bias, attn_scale, dropout,
                    bias_type, attn_mask_type)


def fused_attn_bwd(q, k, v, cu_seqlens_q, cu_seqlens_kv, rng_state, o, d_o, softmax_aux,
                   fused_attention_backend, max_seqlen_q, max_seqlen_kv, qkv_dtype, attn_scale=None,
                   dropout=0.0, set_zero=True, qkv_layout="bshd_bshd_bshd", bias_type="no_bias",
                   attn_mask_type="padding", Bias=None):
    """(dq, dk, dv, dbias or None)."""
    _check_layout("fused_attn_bwd", qkv_layout, "bshd_bshd_bshd")
    grads = [paddle.empty(x.shape, x.dtype) for x in (q, k, v)]
    dbias = _backward("fused_attn_bwd", (q, k, v), grads, cu_seqlens_q, cu_seqlens_kv, rng_state, o,
                      d_o, softmax_aux, fused_attention_backend, max_seqlen_q, max_seqlen_kv, Bias,
                      attn_scale, dropout, bias_type, attn_mask_type)
    return (*grads, dbias)


# ---- below: how ----

def _forward(operation, qkv, cu_q, cu_kv, is_training, max_q, max_kv, backend, bias, scale, dropout,
             bias_type, mask_type):
    keywords = _keywords(operation, qkv, cu_q, cu_kv, max_q, max_kv, backend, bias, scale, bias_type,
                         mask_type)
    _log.debug("Running forward in %s", qkv[0].dtype)
    rng_state = paddle.zeros([2], "int64")
    if is_training and dropout:
        rng_state = _tensors.random_words(qkv[0])
        keywords.update(dropout_p=dropout, rng_state=rng_state)
    with paddle.no_grad():
        o, lse = attention(*qkv, **keywords, return_lse=True)
    return o, lse.unsqueeze(-1) if is_training else None, rng_state


def _backward(operation, qkv, grads, cu_q, cu_kv, rng_state, o, d_o, softmax_aux, backend, max_q,
              max_kv, bias, scale, dropout, bias_type, mask_type):
    """dbias; dq, dk and dv are written into `grads`."""
    keywords = _keywords(operation, qkv, cu_q, cu_kv, max_q, max_kv, backend, bias, scale, bias_type,
                         mask_type)
    _log.debug("Running backward in %s", qkv[0].dtype)
    if dropout:
        keywords.update(dropout_p=dropout, rng_state=rng_state)
    into = dict(zip(("dq", "dk", "dv"), grads))
    if "bias" in keywords:
        into["dbias"] = paddle.empty(bias.shape, bias.dtype)
    d_o = d_o if d_o.strides[-1] == 1 else d_o.contiguous()
    attention_backward(d_o, *qkv, o, softmax_aux.squeeze(-1), grads=into, **keywords)
    return into.get("dbias")


def _keywords(operation, qkv, cu_q, cu_kv, max_q, max_kv, backend, bias, scale, bias_type,
              mask_type) -> dict:
    """Keywords of tessera.paddle.attention."""
    def must_be(name, value, table):
        if value not in table:
            raise _error(operation, name, value, "must be one of " + ", ".join(table))

    must_be("attn_mask_type", mask_type, AttnMaskType)
    must_be("bias_type", bias_type, AttnBiasType)
    assert backend != FusedAttnBackend["No_Backend"], \
        "Fused attention does not support this input combination."
    for name, given, x in (("max_seqlen_q", max_q, qkv[0]), ("max_seqlen_kv", max_kv, qkv[1])):
        if given != x.shape[1]:
            raise _error(operation, name, given, f"must be the sequence axis of its tensor, {x.shape[1]}")
    if bias_type != "no_bias" and bias is None:
        raise _error(operation, "Bias", None, f"must be given with bias_type={bias_type!r}")
    keywords = {"softmax_scale": scale, **tex.scores(bias_type, bias, mask_type)}
    if mask_type == "padding":
        for name, cu in (("seqlens_q", cu_q), ("seqlens_k", cu_kv)):
            keywords[name] = cu[1:] - cu[:-1]
    return keywords


def _check_layout(operation, layout, only):
    if layout != only:
        raise _error(operation, "qkv_layout", layout, f"must be {only!r} here")


def _error(operation, name, value, rule) -> ValueError:
    return ValueError(f"tessera.te.{operation}: {name}={value!r}: {rule}")
