# SPDX-License-Identifier: Apache-2.0
"""fused_attn_fwd and fused_attn_bwd as TE's extension has them: arguments by their places, words by their numbers."""

from __future__ import annotations

from ... import _words
from . import fused_attn
from ._tables import FusedAttnBackend

_BACKEND = FusedAttnBackend.F16_arbitrary_seqlen


def fused_attn_fwd(max_seqlen_q, max_seqlen_kv, is_training, attn_scale, p_dropout, set_zero, qkv_layout, o_format,
                   qkv_scale_inv_format, bias_type, attn_mask_type, softmax_type, window_size, bottom_right_diagonal,
                   cu_seqlens_q, cu_seqlens_kv, Q, K, V, fake_dtype, cu_seqlens_q_padded, cu_seqlens_kv_padded,
                   page_table_k, page_table_v, s_quantizer, o_quantizer, Bias, SoftmaxOffset, rng_gen,
                   rng_elts_per_thread, return_max_logit, cuda_graph):
    """[out, stats(, max), rng_state(, Bias)(, SoftmaxOffset)], as cpp_extensions.fused_attn describes them. With
    return_max_logit max has the shape of stats, and in each row the largest logit of its head, of which callers take
    the largest."""
    del rng_elts_per_thread
    out, aux, *largest = fused_attn.fused_attn_fwd(
        is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, Q, K, V, fake_dtype, _BACKEND, Bias,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, page_table_k, page_table_v, s_quantizer, o_quantizer, attn_scale,
        p_dropout, set_zero, softmax_offset=SoftmaxOffset, rng_gen=rng_gen, return_max_logit=return_max_logit,
        cuda_graph=cuda_graph,
        **_said(qkv_layout, o_format, bias_type, attn_mask_type, softmax_type, window_size, bottom_right_diagonal,
                qkv_scale_inv_format=qkv_scale_inv_format))
    stats, *rest = aux
    return [out, stats, *(x.view(-1, *(1,) * (stats.dim() - 2)).expand_as(stats) for x in largest), *rest]


def fused_attn_bwd(max_seqlen_q, max_seqlen_kv, attn_scale, p_dropout, set_zero, qkv_layout, o_format, do_format,
                   dqkv_layout, qkv_scale_inv_format, do_scale_inv_format, bias_type, attn_mask_type, softmax_type,
                   window_size, bottom_right_diagonal, deterministic, cu_seqlens_q, cu_seqlens_kv, Q, K, V, O,  # noqa: E741
                   dO, fake_dtype, Aux_CTX_Tensors, cu_seqlens_q_padded, cu_seqlens_kv_padded, s_quantizer,
                   dp_quantizer, dqkv_quantizer, cuda_graph):
    """[dq, dk, dv, dbias, d_softmax_offset]; what has no gradient is None."""
    return list(fused_attn.fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, Q, K, V, O, dO, fake_dtype, Aux_CTX_Tensors,
        _BACKEND, cu_seqlens_q_padded, cu_seqlens_kv_padded, s_quantizer, dp_quantizer, dqkv_quantizer, attn_scale,
        p_dropout, set_zero, do_format=_word(_words.FORMATS, do_format),
        dqkv_layout=_word(_words.LAYOUTS, dqkv_layout), deterministic=deterministic, cuda_graph=cuda_graph,
        **_said(qkv_layout, o_format, bias_type, attn_mask_type, softmax_type, window_size, bottom_right_diagonal,
                qkv_scale_inv_format=qkv_scale_inv_format, do_scale_inv_format=do_scale_inv_format)))


def _said(qkv_layout, o_format, bias_type, mask, softmax, window_size, bottom_right_diagonal, **scale_formats) -> dict:
    return {"qkv_layout": _word(_words.LAYOUTS, qkv_layout), "o_format": _word(_words.FORMATS, o_format),
            "attn_bias_type": _word(_words.BIASES, bias_type), "attn_mask_type": _word(_words.MASKS, mask),
            "softmax_type": _word(_words.SOFTMAXES, softmax), "window_size": tuple(window_size),
            "bottom_right_diagonal": bottom_right_diagonal,
            **{name: _word(_words.FORMATS, number) for name, number in scale_formats.items()}}


def _word(words, number) -> str | None:
    """The word of a number; None of that which says none."""
    return words[number] if 0 <= number < len(words) else None
