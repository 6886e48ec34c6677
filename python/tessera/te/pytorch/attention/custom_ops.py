# SPDX-License-Identifier: Apache-2.0
"""TE's copies between layouts, as its custom operators are called. No kernel here needs one."""

from __future__ import annotations

import torch

from .... import _lib
from ....torch import append_kv
from ..._names import missing
from ..cpp_extensions._tables import QKVFormat
from .dot_product_attention._inputs._sequences import ConvertBSHDtoTHD, ConvertTHDtoBSHD

__all__ = ["convert_bshd_to_thd", "convert_thd_to_bshd", "copy_to_kv_cache", "fa_prepare_bwd", "fa_prepare_fwd"]
__getattr__ = missing(__name__)

QKV_FORMAT_VALUE = {name: int(number) for name, number in QKVFormat.items()}
_FORMATS = {number: name for name, number in QKV_FORMAT_VALUE.items()}


def convert_bshd_to_thd(tensor, cu_seqlens, t: int):
    """[b, s, h, d] -> [t, h, d]: padding left out, zero behind the sequences."""
    return ConvertBSHDtoTHD.apply(tensor, cu_seqlens, t)


def convert_thd_to_bshd(tensor, cu_seqlens, b: int, max_seq_len: int):
    """[t, h, d] -> [b, max_seq_len, h, d], zero after each sequence."""
    return ConvertTHDtoBSHD.apply(tensor, cu_seqlens[:b + 1], max_seq_len)


def fa_prepare_fwd(qkvi):
    """q [s, b, h, d], a view of a buffer [s, b, h, 3 d] of q, k and v -> q, k and v in one [3, b, s, h, d]."""
    s, b, h, d = qkvi.shape
    strides = (b * h * 3 * d, h * 3 * d, 3 * d, 1)
    if qkvi.stride() != strides:
        raise ValueError(f"fa_prepare_fwd: qkvi.stride()={qkvi.stride()}: must be those of q in [s, b, h, 3 d], "
                         f"{strides}")
    whole = qkvi.as_strided((s, b, h, 3, d), (*strides[:3], d, 1))
    return whole.permute(3, 1, 0, 2, 4).contiguous()


def fa_prepare_bwd(q, k, v):
    """q, k and v [b, s, h, d] -> one [s, b, h, 3 d]."""
    return torch.cat((q, k, v), -1).transpose(0, 1).contiguous()


def copy_to_kv_cache(new_k, new_v, k_cache, v_cache, page_table, cu_new_lens, cu_cached_lens, qkv_format: int, b: int,
                     max_ctx_len: int, max_seq_len: int, max_pages_per_seq: int, is_non_paged: bool):
    """Writes new keys and values behind those of the b sequences in pages [pages, page_size, h, d], in place.
    cu_cached_lens count the new ones; qkv_format is a number of QKV_FORMAT_VALUE."""
    del max_ctx_len, max_seq_len
    if is_non_paged:
        raise _lib.Refused("copy_to_kv_cache: is_non_paged=True: TE's kernel moves rows of the cache too; "
                           "InferenceParams, or tessera.torch.append_kv, would work")
    layout, new = _FORMATS[int(qkv_format)], cu_new_lens[:b + 1]
    lengths = {"cu_seqlens": new} if layout == "thd" else {"seqlens_q": new.diff()}
    with torch.no_grad():
        append_kv(new_k, new_v, k_cache, v_cache, cu_cached_lens[:b + 1].diff() - new.diff(), layout=layout,
                  page_table=page_table[:b, :max_pages_per_seq], **lengths)
