# SPDX-License-Identifier: Apache-2.0
"""TE's fused attention, forward and backward, without autograd.

    backend = FusedAttnBackend.F16_arbitrary_seqlen
    out, aux = fused_attn_fwd(True, sq, skv, cu_q, cu_kv, q, k, v, q.dtype, backend,
                              qkv_layout="bshd_bshd_bshd", attn_mask_type="causal")
    dq, dk, dv, dbias, dsink = fused_attn_bwd(sq, skv, cu_q, cu_kv, q, k, v, out, d_out, q.dtype,
                                              aux, backend, qkv_layout="bshd_bshd_bshd", ...)

aux = [stats, rng_state(, bias)(, softmax_offset)]: stats are fp32 log-sum-exps, [b, h, sq, 1], of
packed sequences [t, h, 1]; rng_state is int64 [seed, offset]. Gradients are dense and in the
formats of dqkv_layout. Both take Q=, K=, V=, ... too: _documented.py.
"""

from __future__ import annotations

import torch

from ...._call._args import ORDERS
from ....torch import attention, attention_backward
from .. import _words
from .._translate import Call
from ..._names import missing
from ..constants import TE_DType_To_Torch
from . import _documented
from ._tables import (META_DO, META_DP, META_DQKV, META_O, META_QKV, META_S, AttnBiasType,
                      AttnMaskType, FusedAttnBackend, QKVFormat, QKVLayout, SoftmaxType)

__all__ = ["fused_attn_fwd", "fused_attn_bwd", "QKVLayout", "QKVFormat", "AttnBiasType",
           "AttnMaskType", "SoftmaxType", "FusedAttnBackend", "META_QKV", "META_O", "META_S",
           "META_DQKV", "META_DO", "META_DP", "TORCH_DType"]
__getattr__ = missing(__name__)
# The dtype of a tensor's memory by TE's tag of its numbers; FP8 lies in bytes.
TORCH_DType = {tag: torch.uint8 if dtype.itemsize == 1 else dtype for tag, dtype in TE_DType_To_Torch.items()}


@_documented.forward
def fused_attn_fwd(is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v,
                   fake_dtype, fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None,
                   cu_seqlens_kv_padded=None, page_table_k=None, page_table_v=None,
                   s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0,
                   fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd",
                   qkv_scale_inv_format=None, attn_bias_type="no_bias", attn_mask_type="padding",
                   softmax_type="vanilla", window_size=(-1, -1), bottom_right_diagonal=None,
                   rng_gen=None, softmax_offset=None, return_max_logit=False, cuda_graph=False):
    """(out, aux), and max_logit [h] when asked for. Without training there is no dropout."""
    _sixteen_bits(fused_attention_backend, s_quantizer=s_quantizer, o_quantizer=o_quantizer,
                  qkv_scale_inv_format=qkv_scale_inv_format)
    call = _call(q, k, v, qkv_layout, attn_mask_type, window_size, bottom_right_diagonal,
                 attn_bias_type, softmax_type, cu_seqlens_q=cu_seqlens_q,
                 cu_seqlens_kv=cu_seqlens_kv, cu_seqlens_q_padded=cu_seqlens_q_padded,
                 cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_q=max_seqlen_q,
                 max_seqlen_kv=max_seqlen_kv, page_table_k=page_table_k, page_table_v=page_table_v,
                 bias=attn_bias, softmax_scale=attn_scale, softmax_offset=softmax_offset,
                 deterministic=None, return_max_logit=return_max_logit)
    rng_state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device,
                              generator=rng_gen)
    keywords = call.keywords()
    if is_training and dropout:
        keywords.update(dropout_p=dropout, rng_state=rng_state)
    with torch.no_grad():
        o, lse, *max_logit = attention(call.q, call.k, call.v, **keywords, return_lse=True)
    stats = lse.transpose(0, 1) if call.q_format == "thd" else lse
    aux = [stats.unsqueeze(-1), rng_state]
    aux += [attn_bias] * ("bias" in keywords)
    aux += [softmax_offset] * ("sink" in keywords and softmax_offset is not None)
    return _formatted(o, call.q_format, o_format), aux, *max_logit


@_documented.backward
def fused_attn_bwd(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o,
                   fake_dtype, aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None,
                   cu_seqlens_kv_padded=None, s_quantizer=None, dp_quantizer=None,
                   dqkv_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True,
                   qkv_layout="sbh3d", o_format="sbhd", do_format="sbhd", dqkv_layout="sbh3d",
                   qkv_scale_inv_format=None, do_scale_inv_format=None, attn_bias_type="no_bias",
                   attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1),
                   bottom_right_diagonal=None, deterministic=False, cuda_graph=False):
    """(dq, dk, dv, dbias, d_softmax_offset); what has no gradient is None."""
    _sixteen_bits(fused_attention_backend, s_quantizer=s_quantizer, dp_quantizer=dp_quantizer,
                  dqkv_quantizer=dqkv_quantizer, qkv_scale_inv_format=qkv_scale_inv_format,
                  do_scale_inv_format=do_scale_inv_format)
    stats, rng_state, *more = aux_ctx_tensors
    bias = more.pop(0) if attn_bias_type.endswith("scale_bias") else None
    offset = more.pop(0) if softmax_type != "vanilla" and more else None
    call = _call(q, k, v, qkv_layout, attn_mask_type, window_size, bottom_right_diagonal,
                 attn_bias_type, softmax_type, cu_seqlens_q=cu_seqlens_q,
                 cu_seqlens_kv=cu_seqlens_kv, cu_seqlens_q_padded=cu_seqlens_q_padded,
                 cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_q=max_seqlen_q,
                 max_seqlen_kv=max_seqlen_kv, bias=bias, softmax_scale=attn_scale,
                 softmax_offset=offset, deterministic=deterministic)
    keywords = call.keywords()
    if dropout:
        keywords.update(dropout_p=dropout, rng_state=rng_state)
    lse = stats.squeeze(-1)
    lse = lse.transpose(0, 1).contiguous() if call.q_format == "thd" else lse
    names = ["dq", "dk", "dv"] + ["dbias"] * (bias is not None) + ["dsink"] * (offset is not None)
    grads = _backward(_formatted(d_o, do_format, call.q_format),
                      _formatted(o, o_format, call.q_format), lse,
                      dict(keywords, q=call.q, k=call.k, v=call.v), names)
    to_q, to_kv = _words.formats_of(dqkv_layout)
    return (_formatted(grads["dq"], call.q_format, to_q),
            _formatted(grads["dk"], call.kv_format, to_kv),
            _formatted(grads["dv"], call.kv_format, to_kv), grads.get("dbias"),
            grads["dsink"].reshape(offset.shape) if offset is not None else None)


def _call(q, k, v, qkv_layout, mask, window, bottom_right, bias_type, softmax_type,
          **more) -> Call:
    if mask == "arbitrary":
        raise _words.error("attn_mask_type", mask, "has no place for the mask here; use "
                           "DotProductAttention, or a bias of -inf")
    return Call.of_layout(q, k, v, qkv_layout, mask, window, bottom_right,
                          bias_type=_words.bias_type(bias_type),
                          softmax_type=_words.softmax_type(softmax_type), **more)


def _backward(do, o, lse, given: dict, names) -> dict:
    given = {name: x for name, x in given.items() if name != "return_max_logit"}
    found = attention_backward(do, o=o, lse=lse, grads=tuple(names), **given)
    return {name: getattr(found, name) for name in names}


def _formatted(x, have: str, want: str):
    """x, a view of it, in another format; packed tensors have one."""
    if have == want or "thd" in (have, want):
        return x
    axes = [None] * 4
    for source, target in zip(ORDERS[have], ORDERS[want]):
        axes[target] = source
    return x.permute(axes)


def _sixteen_bits(backend, **quantizers):
    if FusedAttnBackend.cast(backend) not in (FusedAttnBackend.F16_max512,
                                              FusedAttnBackend.F16_arbitrary_seqlen):
        raise _words.error("fused_attention_backend", FusedAttnBackend.cast(backend).name,
                           "DotProductAttention in an autocast region runs in FP8; "
                           "F16_arbitrary_seqlen would work")
    for name, value in quantizers.items():
        if value is not None:
            raise _words.error(name, type(value).__name__, "DotProductAttention in an autocast region runs "
                               "in FP8; leave it out")
