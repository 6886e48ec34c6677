# SPDX-License-Identifier: Apache-2.0
"""A backend's module called on its own, in TE's words.

    flash_attn = FlashAttention()
    out = flash_attn(query_layer=q, key_layer=k, value_layer=v, qkv_layout="bshd_bshd_bshd",
                     attn_mask_type="causal")
"""

from __future__ import annotations

import inspect

import torch

from .....torch._functions import drawn_state
from ... import _words
from ..._translate import Call

_FP8 = ("FP8 in a backend called on its own", "call DotProductAttention in an autocast region, or pass "
        "16-bit tensors and leave it out")
# What is refused unless it is None, False, or said to be the default.
_LATER = {"fp8": _FP8, "fp8_output": _FP8, "fp8_quantizer": _FP8,
          "inference_params": ("TE's KV cache", "give tessera.torch.attention a page_table or "
                               "seqlens_k"),
          **dict.fromkeys(("score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors"),
                          ("score_mod in a backend called on its own", "call DotProductAttention"))}
# What says how, not what: TE's caches and schedules, and details of features refused above.
_SCHEDULE = frozenset({"_alibi_cache", "fast_zero_fill", "pad_between_seqs", "num_splits",
                       "flash_attention_backend", "fp8_meta", "quantizers", "cp_global_ranks",
                       "cp_stream", "cp_comm_type", "load_balancing_strategy", "packed_qkv", "packed_kv",
                       "bf16_backward"})


def merged(result):
    """out [.., h, dv] -> [.., h * dv]; max_logit [h] beside it in out's dtype."""
    if isinstance(result, tuple):
        out, max_logit = result
        return out.flatten(-2), max_logit.to(out.dtype)
    return result.flatten(-2)


def translated(module, q, k, v, *, qkv_layout="sbh3d", attn_mask_type="causal",
               attention_mask=None, window_size=None, bottom_right_diagonal=None,
               softcap=0.0, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
               cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, page_table_k=None,
               page_table_v=None, core_attention_bias_type=None, core_attention_bias=None,
               alibi_slopes=None, softmax_offset=None, attention_dropout=None, cp_group=None,
               **others):
    """(q, k, v, keywords of tessera.torch.attention) of TE's words, or a ValueError or Refused.

    A bias without core_attention_bias_type is "post_scale_bias". attention_dropout is the module's
    unless given, and needs a module that trains."""
    _refuse(type(module).__name__, cp_group, others)
    if core_attention_bias_type is None:
        core_attention_bias_type = "no_bias" if core_attention_bias is None else "post_scale_bias"
    for name, x in (("query_layer", q), ("key_layer", k), ("value_layer", v)):
        if not isinstance(x, torch.Tensor):
            raise _words.error(name, type(x).__name__, "must be a torch.Tensor")
    call = Call.of_layout(
        q, k, v, qkv_layout, attn_mask_type, window_size, bottom_right_diagonal,
        attention_mask=attention_mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
        cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, page_table_k=page_table_k,
        page_table_v=page_table_v, bias_type=_words.bias_type(core_attention_bias_type),
        bias=core_attention_bias, alibi_slopes=alibi_slopes, softmax_scale=module.softmax_scale,
        softmax_type=_words.softmax_type(module.softmax_type), softmax_offset=softmax_offset,
        deterministic=module.deterministic, return_max_logit=module.return_max_logit,
        softcap=_words.softcap(softcap))
    keywords = call.keywords()
    dropout = module.attention_dropout if attention_dropout is None else \
        _words.dropout(attention_dropout)
    if dropout and module.training:
        with module.attention_dropout_ctx():
            keywords["rng_state"] = drawn_state(q.device)
        keywords["dropout_p"] = dropout
    return call.q, call.k, call.v, keywords


_SHARED = {"module", "q", "k", "v", "others", "cu_seqlens_q", "cu_seqlens_q_padded",
           "max_seqlen_q", "alibi_slopes", "softcap"}
# The words that tessera.torch.attention does not have: one of them, and a call is in TE's.
WORDS = (inspect.signature(translated).parameters.keys() | _LATER.keys() | _SCHEDULE) - _SHARED


def _refuse(module: str, cp_group, others: dict):
    _words.one_rank(cp_group)
    for name, value in others.items():
        if name in _LATER and value is not None and value is not False:
            raise _words.later(name, type(value).__name__, *_LATER[name])
        if name not in _LATER and name not in _SCHEDULE:
            raise TypeError(f"{module}: {name}=: is no keyword beside TE's; give tessera's "
                            "keywords without TE's (qkv_layout, attn_mask_type, ...)")
