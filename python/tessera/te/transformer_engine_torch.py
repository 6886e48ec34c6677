# SPDX-License-Identifier: Apache-2.0
"""The functions of TE's compiled extension for attention: a training loop, or a program with its own ring, imports it
as ``tex``. In functions of packed sequences on several ranks, a rank holds two chunks of equal length of every
sequence; cu_seqlens are those of its own tensors, padding included.

    import tessera.te.transformer_engine_torch as tex
    index = tex.thd_get_partitioned_indices(cu_seqlens_padded, t, cp_size, cp_rank)
"""

from __future__ import annotations

import enum

import torch

from ..context_parallel import Shards
from ._names import missing
from ._words import DType, ScalingMode as NVTEScalingMode
from .pytorch.attention.custom_ops import (convert_bshd_to_thd, convert_thd_to_bshd, copy_to_kv_cache,
                                           fa_prepare_bwd, fa_prepare_fwd)
from .pytorch.attention.dot_product_attention import _cp_parts
from .pytorch.attention.dot_product_attention._fused import get_fused_attn_backend
from .pytorch.attention.dot_product_attention.softmax import (
    scaled_aligned_causal_masked_softmax_backward, scaled_aligned_causal_masked_softmax_forward,
    scaled_masked_softmax_backward, scaled_masked_softmax_forward, scaled_softmax_backward, scaled_softmax_forward,
    scaled_upper_triang_masked_softmax_backward, scaled_upper_triang_masked_softmax_forward)
from .pytorch.attention.dot_product_attention._inputs._masks import get_thd_padding_mask
from .pytorch.attention.rope import (fused_qkv_rope_backward, fused_qkv_rope_forward, fused_rope_backward,
                                     fused_rope_forward)
from .pytorch.cpp_extensions._positional import fused_attn_bwd, fused_attn_fwd
from .pytorch.cpp_extensions._tables import (FusedAttnBackend, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format,
                                             NVTE_QKV_Layout, NVTE_Softmax_Type)
from .pytorch.utils import get_cudnn_version

__all__ = ["DType", "NVTEScalingMode", "NVTE_Bias_Type", "NVTE_Fused_Attn_Backend", "NVTE_Mask_Type",
           "NVTE_QKV_Format", "NVTE_QKV_Layout", "NVTE_Softmax_Type", "convert_bshd_to_thd", "convert_thd_to_bshd",
           "copy_to_kv_cache", "fa_prepare_bwd", "fa_prepare_fwd", "fused_attn_bwd", "fused_attn_fwd",
           "fused_qkv_rope_backward", "fused_qkv_rope_forward", "fused_rope_backward", "fused_rope_forward",
           "get_cudnn_version", "get_fused_attn_backend",
           "multi_tensor_pad_last_dim", "multi_tensor_transpose_to_bhsd",
           "scaled_aligned_causal_masked_softmax_backward", "scaled_aligned_causal_masked_softmax_forward",
           "scaled_masked_softmax_backward", "scaled_masked_softmax_forward", "scaled_softmax_backward",
           "scaled_softmax_forward", "scaled_upper_triang_masked_softmax_backward",
           "scaled_upper_triang_masked_softmax_forward", "thd_copy_valid_tokens_from_per_split_to_rank_local",
           "thd_cp_rank_order_to_sequence_order", "thd_sequence_order_to_cp_rank_order",
           "thd_get_partitioned_indices", "thd_grad_correction", "thd_out_correction",
           "thd_read_half_tensor", "thd_read_second_half_lse", "thd_second_half_lse_correction"]
__getattr__ = missing(__name__)

NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", {
    f"NVTE_{name}": int(FusedAttnBackend[name]) for name in ("No_Backend", "F16_arbitrary_seqlen", "FP8")})


def thd_get_partitioned_indices(cu_seqlens, total_tokens, world_size, rank):
    """Places of a rank's tokens in the packed whole, int32 [total_tokens / world_size]."""
    shards = Shards.te(_cp_parts.host(cu_seqlens), world_size)
    if sum(shards.lengths) != total_tokens:
        raise ValueError(f"thd_get_partitioned_indices: total_tokens={total_tokens}: must be the end "
                         f"of cu_seqlens, {sum(shards.lengths)}")
    return torch.from_numpy(shards.index(rank)).to(cu_seqlens.device, torch.int32)


def thd_read_half_tensor(tensor, cu_seqlens, half_idx):
    """The first (0) or second (1) chunks of every sequence, of [t, h, d] or of the pair
    [2, t, h, d]."""
    axis = tensor.dim() - 3
    return tensor.index_select(axis, _cp_parts.halves(cu_seqlens)[half_idx])


def thd_read_second_half_lse(lse, cu_seqlens, lse_packed, second_half_lse_seqlen):
    """lse of the second chunks: [h, second_half_lse_seqlen] packed, else [b, h, second_half_lse_seqlen], zero
    behind them."""
    if lse_packed:
        found = lse.index_select(1, _cp_parts.halves(cu_seqlens)[1])
        return torch.nn.functional.pad(found, (0, second_half_lse_seqlen - found.shape[1]))
    out = lse.new_zeros(*lse.shape[:2], second_half_lse_seqlen)
    for n, (begin, end) in enumerate(_spans(cu_seqlens)):
        half = (end - begin) // 2
        out[n, :, :half] = lse[n, :, half:2 * half]
    return out


def thd_second_half_lse_correction(lse, lse_per_step, cu_seqlens, lse_packed):
    """lse of the second chunks becomes that of the union with a step's, in place."""
    if lse_packed:
        rows = _cp_parts.halves(cu_seqlens)[1]
        lse[:, rows] = torch.logaddexp(lse[:, rows], lse_per_step[:, :len(rows)].to(lse.dtype))
        return
    for n, (begin, end) in enumerate(_spans(cu_seqlens)):
        half = (end - begin) // 2
        own = lse[n, :, half:2 * half]
        own.copy_(torch.logaddexp(own, lse_per_step[n, :, :half].to(lse.dtype)))


def thd_out_correction(out, out_per_step, old_lse, lse, lse_per_step, cu_seqlens, only_second_half, lse_packed):
    """Joins a step with out [t, h, d], in place: out exp(old_lse - lse) + out_per_step exp(lse_per_step - lse).
    old_lse is what out was summed by, lse that of the union; with only_second_half the first chunks stay."""
    rows = _cp_parts.halves(cu_seqlens)[1] if only_second_half else \
        torch.arange(out.shape[0], device=out.device)
    old, total, step = (x if lse_packed else _packed(x, cu_seqlens, half) for x, half in
                        ((old_lse, False), (lse, False), (lse_per_step, only_second_half)))
    total = total.index_select(1, rows)
    kept, added = (_weight(x, total) for x in (old.index_select(1, rows), step[:, :len(rows)]))
    out[rows] = (out[rows].float() * kept + out_per_step.float() * added).to(out.dtype)


def thd_grad_correction(grad, grad_per_step, cu_seqlens, first_half, second_half):
    """Adds ("add"), copies ("copy") or leaves out ("none") a step's gradient in the first and second chunks
    of grad [t, h, d] or [2, t, h, d], or clears them ("zero"), in place. grad_per_step has the chunks that are
    added or copied."""
    words = {"first_half": first_half, "second_half": second_half}
    for name, word in words.items():
        if word not in ("add", "copy", "none", "zero"):
            raise ValueError(f'thd_grad_correction: {name}={word!r}: must be "add", "copy", "none" or "zero"')
    axis = grad.dim() - 3
    halves = _cp_parts.halves(cu_seqlens)
    for word, rows in zip((first_half, second_half), halves):
        if word == "zero":
            grad.index_fill_(axis, rows, 0)
    used = [i for i, word in enumerate((first_half, second_half)) if word in ("add", "copy")]
    for i in used:
        word = (first_half, second_half)[i]
        step = grad_per_step if len(used) == 1 else grad_per_step.index_select(axis, halves[i])
        if word == "add":
            step = (grad.index_select(axis, halves[i]).float() + step.float()).to(grad.dtype)
        grad.index_copy_(axis, halves[i], step.to(grad.dtype))


def thd_sequence_order_to_cp_rank_order(inp, cu_seqlens, cp_size, total_tokens):
    """As context_parallel's; total_tokens is inp's first extent."""
    del total_tokens
    return _cp_parts.thd_sequence_order_to_cp_rank_order(inp, cu_seqlens, cp_size)


def thd_cp_rank_order_to_sequence_order(inp, cu_seqlens, cp_size, total_tokens):
    """thd_sequence_order_to_cp_rank_order undone."""
    del total_tokens
    return _cp_parts.thd_cp_rank_order_to_sequence_order(inp, cu_seqlens, cp_size)


def thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp, cu_seqlens_padded, cu_seqlens):
    """Copies the tokens of sequences, not those between them, from inp to the same places of out."""
    between = get_thd_padding_mask(inp.shape[0], cu_seqlens, cu_seqlens_padded)
    out.copy_(torch.where(between.view(-1, *[1] * (inp.dim() - 1)), out, inp))


def multi_tensor_transpose_to_bhsd(inputs, original_format, outputs=()):
    """Dense copies [b, h, s, d] of tensors [s, b, h, d] or [b, s, h, d], in `outputs` where given; None stays."""
    order = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
    if original_format not in order:
        raise ValueError(f"multi_tensor_transpose_to_bhsd: original_format={original_format!r}: must be \"sbhd\" or "
                         '"bshd"')
    found = []
    for x, out in zip(inputs, outputs or [None] * len(inputs), strict=True):
        view = None if x is None else x.permute(order[original_format])
        found.append(None if x is None else view.contiguous() if out is None else out.copy_(view))
    return found


def multi_tensor_pad_last_dim(inputs, alignment):
    """Tensors [rows, n] with n filled up with zeros to a multiple of `alignment`; those that are so come back."""
    return [x if x.shape[-1] % alignment == 0 else
            torch.nn.functional.pad(x, (0, -x.shape[-1] % alignment)) for x in inputs]


# ---- below: how ----

def _spans(cu_seqlens) -> list[tuple[int, int]]:
    ends = _cp_parts.host(cu_seqlens)
    return list(zip(ends, ends[1:]))


def _packed(lse, cu_seqlens, half: bool):
    """[b, h, s] -> [h, t], of whole sequences or of halves."""
    return torch.cat([lse[n, :, :(end - begin) // (2 if half else 1)]
                      for n, (begin, end) in enumerate(_spans(cu_seqlens))], 1)


def _weight(part, total):
    """exp(part - total) of lses [h, t] as [t, h, 1]; what saw no key has none."""
    return torch.where(part == -torch.inf, 0.0, (part - total).exp()).T[..., None]
