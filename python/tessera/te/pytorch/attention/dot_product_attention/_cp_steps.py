# SPDX-License-Identifier: Apache-2.0
"""One step of TE's ring as functions, for loops that are written in TE's words; tessera's own ring is
tessera.torch.context_parallel's.

    section            queries        keys          mask
    "diagonal"         both chunks    both          the call's
    "all"              both           both          the call's, which is not causal
    "lower-triangle"   both           the first     padding at most
    "upper-triangle"   the second     both          padding at most

Tensors are [b, 2, s / 2, h, d], [2, s / 2, b, h, d] or packed [t, h, d], of two chunks of every sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import _words
from ...cpp_extensions.fused_attn import fused_attn_bwd, fused_attn_fwd
from ._cp_parts import get_cu_seqlens_on_cp_rank, halves


class _Section(NamedTuple):
    of_q: int | None   # which chunk; None is both
    of_kv: int | None


_SECTIONS = {"diagonal": _Section(None, None), "all": _Section(None, None), "lower-triangle": _Section(None, 0),
             "upper-triangle": _Section(1, None)}


def _section(name: str) -> _Section:
    if name not in _SECTIONS:
        raise _words.error("section", name, f"must be one of {_words.quoted(_SECTIONS)}")
    return _SECTIONS[name]


def _half(x, qkv_format: str, which: int | None, cu_seqlens_padded):
    """One chunk of each sequence, or both as one."""
    if qkv_format == "thd":
        return x if which is None else x.index_select(0, halves(cu_seqlens_padded)[which])
    axis = qkv_format.index("s")
    return x.flatten(axis, axis + 1) if which is None else x.select(axis, which)


def _halved(n, which: int | None):
    return n if which is None or n is None else n // 2


def _mask(attn_mask_type: str, section: _Section) -> str:
    if section == (None, None):
        return attn_mask_type
    return "padding" if "padding" in attn_mask_type else "no_mask"


# ---- what a step reads ----

def cp_p2p_fwd_prepare_qkv(q_part, k_part, v_part, qkv_format, pad_between_seqs, cu_seqlens_q, cu_seqlens_kv,
                           cu_seqlens_q_padded, cu_seqlens_kv_padded, cu_seqlens_q_half, cu_seqlens_kv_half, rank, step,
                           cp_size, section):
    """(q, k, v, cu_seqlens_q, cu_seqlens_kv) of a section; *_padded are of a rank's tensors, *_half of one chunk."""
    of = _section(section)
    source = rank if section == "diagonal" else (rank - step) % cp_size
    lengths = []
    for cu, padded, half, which, holder in (
            (cu_seqlens_q, cu_seqlens_q_padded, cu_seqlens_q_half, of.of_q, rank),
            (cu_seqlens_kv, cu_seqlens_kv_padded, cu_seqlens_kv_half, of.of_kv, source)):
        if pad_between_seqs:
            cu = get_cu_seqlens_on_cp_rank(cu, padded, cp_size, holder, which != 1, which != 0)
        elif qkv_format == "thd":
            cu = cu // (cp_size * (1 if which is None else 2))
        elif which is not None:
            cu = half
        lengths.append(cu)
    return (_half(q_part, qkv_format, of.of_q, cu_seqlens_q_padded),
            *(_half(x, qkv_format, of.of_kv, cu_seqlens_kv_padded) for x in (k_part, v_part)), *lengths)


def cp_p2p_bwd_prepare_qkv(q_part, k_part, v_part, out_part, dout_part, qkv_format, cu_seqlens_q_padded,
                           cu_seqlens_kv_padded, section):
    """(q, k, v, out, dout) of a section."""
    of = _section(section)
    q, out, dout = (_half(x, qkv_format, of.of_q, cu_seqlens_q_padded) for x in (q_part, out_part, dout_part))
    k, v = (_half(x, qkv_format, of.of_kv, cu_seqlens_kv_padded) for x in (k_part, v_part))
    return q, k, v, out, dout


# ---- by FusedAttention ----

def cp_p2p_fwd_fused_attn(attn_bias, attn_bias_, is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q_padded,
                          cu_seqlens_kv_padded, fused_attn_backend, softmax_scale, dropout_p, qkv_layout, o_format,
                          attn_mask_type, attn_bias_type, fp8, fp8_recipe, q_fp8, k_fp8, v_fp8, fwd_nominal_dtype,
                          QKV_quantizer, S_quantizer_per_step, O_quantizer_per_step, rank, step, cp_size,
                          return_max_logit, q_part, k_part, v_part, cu_seqlens_q_per_step, cu_seqlens_kv_per_step,
                          section):
    """(out, lse, rng_state, bias, max_logit) of a section's tensors, None for what there is not. attn_bias is
    [.., sq, 2 cp, skv / 2 cp], attn_bias_ [.., 2, sq / 2, 2 cp, skv / 2 cp], or attn_bias where its rows are one."""
    del fp8_recipe, q_fp8, k_fp8, v_fp8, QKV_quantizer, S_quantizer_per_step, O_quantizer_per_step
    _sixteen_bits(fp8)
    of, bias = _section(section), None
    if attn_bias is not None:
        chunk = (rank - step) % cp_size
        rows = attn_bias if of.of_q is None else attn_bias_ if attn_bias.shape[-3] == 1 else attn_bias_[..., 1, :, :, :]
        chunks = (chunk,) if of.of_kv is not None else (chunk, 2 * cp_size - 1 - chunk)
        bias = torch.cat([rows[..., i, :] for i in chunks], -1)
    out, (lse, rng_state, *more), *max_logit = fused_attn_fwd(
        is_training, _halved(max_seqlen_q, of.of_q), _halved(max_seqlen_kv, of.of_kv), cu_seqlens_q_per_step,
        cu_seqlens_kv_per_step, q_part, k_part, v_part, fwd_nominal_dtype, fused_attn_backend, attn_bias=bias,
        cu_seqlens_q_padded=_halved(cu_seqlens_q_padded, of.of_q),
        cu_seqlens_kv_padded=_halved(cu_seqlens_kv_padded, of.of_kv), attn_scale=softmax_scale, dropout=dropout_p,
        qkv_layout=qkv_layout, o_format=o_format, attn_mask_type=_mask(attn_mask_type, of),
        attn_bias_type=attn_bias_type, return_max_logit=return_max_logit)
    return out, lse, rng_state, *(more or (None,)), *(max_logit or (None,))


def cp_p2p_bwd_fused_attn(fp8, fp8_recipe, q_fp8, kv_fp8, out_fp8, dout_fp8, softmax_lse, softmax_lse_, rng_states,
                          attn_dbias, attn_biases, max_seqlen_q, max_seqlen_kv, step, cp_size, cu_seqlens_q_per_step,
                          cu_seqlens_kv_per_step, cu_seqlens_q_padded, cu_seqlens_kv_padded, fused_attn_backend,
                          softmax_scale, dropout_p, qkv_layout, o_format, do_format, dqkv_layout, attn_mask_type,
                          attn_bias_type, deterministic, fwd_nominal_dtype, bwd_nominal_dtype, S_quantizer,
                          dP_quantizer_per_step, dQKV_quantizer_per_step, QKV_quantizer_per_step, dO_quantizer_per_step,
                          q_part, k_part, v_part, out_part, dout_part, section):
    """(dq, dk, dv, dbias) of a section's tensors. Lists have an entry for each step of the forward pass, which this one
    goes through backwards; softmax_lse_ is of second chunks."""
    del fp8_recipe, q_fp8, kv_fp8, out_fp8, dout_fp8, S_quantizer, dP_quantizer_per_step, dQKV_quantizer_per_step, \
        QKV_quantizer_per_step, dO_quantizer_per_step, fwd_nominal_dtype
    _sixteen_bits(fp8)
    of, at = _section(section), cp_size - step - 1
    aux = [softmax_lse if of.of_q is None else softmax_lse_, rng_states[at]]
    aux += [] if attn_dbias is None else [attn_biases[at]]
    return fused_attn_bwd(
        _halved(max_seqlen_q, of.of_q), _halved(max_seqlen_kv, of.of_kv), cu_seqlens_q_per_step[at],
        cu_seqlens_kv_per_step[at], q_part, k_part, v_part, out_part, dout_part, bwd_nominal_dtype, aux,
        fused_attn_backend, cu_seqlens_q_padded=_halved(cu_seqlens_q_padded, of.of_q),
        cu_seqlens_kv_padded=_halved(cu_seqlens_kv_padded, of.of_kv), attn_scale=softmax_scale, dropout=dropout_p,
        qkv_layout=qkv_layout, o_format=o_format, do_format=do_format, dqkv_layout=dqkv_layout,
        attn_mask_type=_mask(attn_mask_type, of), attn_bias_type=attn_bias_type, deterministic=deterministic)[:4]


def _sixteen_bits(fp8):
    if fp8:
        raise _words.later("fp8", str(fp8), "FP8 attention over several ranks", "pass 16-bit tensors")


# ---- by a flash-attn package, or tessera.flash_attn ----

def get_fa_args(forward: bool, use_flash_attn_3: bool, qkv_format: str, cu_seqlens_q=None, cu_seqlens_kv=None,
                max_seqlen_q=None, max_seqlen_kv=None, dq=None, dk=None, dv=None, seqused_q=None, seqused_k=None,
                use_flash_attn_4: bool = False):
    """What follows q, k and v (backward: lse) in the passes of flash-attn 2, the _varlen_ ones for "thd", and 3; of 4
    keywords."""
    packed = qkv_format == "thd"
    lengths = [cu_seqlens_q, cu_seqlens_kv] if packed else [None, None]
    used = [seqused_q, seqused_k] if packed else [None, None]
    longest, grads = [max_seqlen_q, max_seqlen_kv], [dq, dk, dv]
    if use_flash_attn_4:
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k")
        keywords = dict(zip(names, (*lengths, *used, *longest))) if packed else {}
        return keywords if forward else {**keywords, "dq": dq, "dk": dk, "dv": dv}
    if use_flash_attn_3:  # k_new, v_new, qv, out, lengths, cu_seqlens_k_new; pages, rotary tables, descales
        return [*[None] * 4, *lengths, None, *used, *longest, *[None] * 9] if forward else \
            [*lengths, *used, *longest, *grads]
    return ([] if forward else grads) + ([*lengths, *longest] if packed else [])


def cp_p2p_fwd_flash_attn(use_flash_attn_3, use_flash_attn_4, qkv_format, fa_forward_kwargs, flash_attn_fwd,
                          max_seqlen_q, max_seqlen_kv, pad_between_seqs, cu_seqlens_q_padded, cu_seqlens_kv_padded,
                          q_part, k_part, v_part, cu_seqlens_q_per_step, cu_seqlens_kv_per_step, section):
    """(out, lse, rng_state or None) of a section's tensors, by a package's forward pass: 2.7 or later, 3 or 4. Sets
    the window of fa_forward_kwargs where the section has no diagonal."""
    of = _section(section)
    if of != (None, None):
        fa_forward_kwargs.update(window_size_left=-1, window_size_right=-1)
    arguments = _lengths(of, pad_between_seqs and (use_flash_attn_3 or use_flash_attn_4), qkv_format, max_seqlen_q,
                         max_seqlen_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, cu_seqlens_q_per_step,
                         cu_seqlens_kv_per_step)
    given = get_fa_args(True, use_flash_attn_3, qkv_format, **arguments, use_flash_attn_4=use_flash_attn_4)
    positional, named = ((), given) if use_flash_attn_4 else (given, {})
    out, lse, *more = flash_attn_fwd(q_part, k_part, v_part, *positional, **named, causal=section == "diagonal",
                                     **fa_forward_kwargs)
    return out, lse, None if use_flash_attn_3 or use_flash_attn_4 else more[1]


def cp_p2p_bwd_flash_attn(use_flash_attn_3, use_flash_attn_4, qkv_format, max_seqlen_q, max_seqlen_kv,
                          cu_seqlens_q_per_step, cu_seqlens_kv_per_step, step, cp_size, fa_backward_kwargs,
                          flash_attn_bwd, rng_states, softmax_lse, softmax_lse_, pad_between_seqs, cu_seqlens_q_padded,
                          cu_seqlens_kv_padded, q_part, k_part, v_part, out_part, dout_part, section):
    """(dq, dk, dv) of a section's tensors, by a package's backward pass. Lists as in cp_p2p_bwd_fused_attn; sets
    window, mask and random state in fa_backward_kwargs."""
    of, at = _section(section), cp_size - step - 1
    causal = section == "diagonal"
    grads = [(torch.zeros_like if pad_between_seqs else torch.empty_like)(x) for x in (q_part, k_part, v_part)]
    fa_backward_kwargs.update(window_size_left=-1, window_size_right=0 if causal else -1)
    fa_backward_kwargs["is_causal" if use_flash_attn_3 else "causal"] = causal
    if not use_flash_attn_3 and not use_flash_attn_4:
        fa_backward_kwargs["rng_state"] = rng_states[at]
    arguments = _lengths(of, pad_between_seqs and (use_flash_attn_3 or use_flash_attn_4), qkv_format, max_seqlen_q,
                         max_seqlen_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, cu_seqlens_q_per_step[at],
                         cu_seqlens_kv_per_step[at])
    given = get_fa_args(False, use_flash_attn_3, qkv_format, **arguments, **dict(zip(("dq", "dk", "dv"), grads)),
                        use_flash_attn_4=use_flash_attn_4)
    lse = softmax_lse if of.of_q is None else softmax_lse_
    if use_flash_attn_4:
        return flash_attn_bwd(q_part, k_part, v_part, out_part, dout_part, lse, **fa_backward_kwargs, **given)
    flash_attn_bwd(dout_part, q_part, k_part, v_part, out_part, lse, *given, **fa_backward_kwargs)
    return tuple(grads)


def _lengths(of: _Section, has_gaps: bool, qkv_format: str, max_seqlen_q, max_seqlen_kv, padded_q, padded_kv, cu_q,
             cu_kv) -> dict:
    """get_fa_args' lengths. Packages of which a sequence may be shorter than its place take the places and what is
    used of them."""
    used_q = used_k = None
    if has_gaps and qkv_format == "thd":
        used_q, used_k = cu_q.diff(), cu_kv.diff()
        cu_q, cu_kv = _halved(padded_q, of.of_q), _halved(padded_kv, of.of_kv)
    return {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "max_seqlen_q": _halved(max_seqlen_q, of.of_q),
            "max_seqlen_kv": _halved(max_seqlen_kv, of.of_kv), "seqused_q": used_q, "seqused_k": used_k}
