# SPDX-License-Identifier: Apache-2.0
"""get_scheduler_metadata of FlashAttention 3: its checks and the shape of what it returns. The backend plans each call
by itself, so that the numbers in it say nothing."""

from __future__ import annotations

import torch

_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32)


def scheduler_metadata(batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads: int, num_heads_k: int,
                       headdim: int, headdim_v: int, qkv_dtype, seqused_k, *, per_sequence: dict, cumulative: dict,
                       page_size: int | None, max_seqlen_k_new: int, causal: bool, window_size, attention_chunk: int):
    """Zeros, int32, as many as FlashAttention 3 has on Hopper (mha_fwd_get_scheduler_metadata in hopper/flash_api.cpp):
    batch_size rounded up to 4 for the splits and the tiles of each sequence, again unless attention is local for their
    order, again if it is causal or local for the heads of a turn, and 1."""
    _check_numbers(least=1, batch_size=batch_size, num_heads=num_heads, num_heads_k=num_heads_k, headdim=headdim,
                   headdim_v=headdim_v, page_size=1 if page_size is None else page_size)
    _check_numbers(least=0, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, max_seqlen_k_new=max_seqlen_k_new,
                   attention_chunk=attention_chunk)
    if num_heads % num_heads_k:
        raise _illegal(f"num_heads={num_heads}, num_heads_k={num_heads_k}: the one must be a multiple of the other")
    if qkv_dtype not in _DTYPES:
        raise _illegal(f"qkv_dtype={qkv_dtype}: must be one of {', '.join(map(str, _DTYPES))}")
    for given, count in (({"cache_seqlens": seqused_k, **per_sequence}, batch_size), (cumulative, batch_size + 1)):
        for name, x in given.items():
            if x is not None and (x.dtype != torch.int32 or x.shape != (count,) or x.device != seqused_k.device):
                raise _illegal(f"{name}.dtype={x.dtype}, {name}.shape={list(x.shape)}, {name}.device={x.device}: must "
                               f"be torch.int32, [{count}], {seqused_k.device}")
    left, right = window_size
    left, right = -1 if left >= max_seqlen_k - 1 else left, -1 if right >= max_seqlen_q - 1 else right
    whole = left < 0 and right < 0 and not attention_chunk
    if max_seqlen_q == 1 and whole and (not 64 < headdim <= 128 or page_size is None):
        causal = False  # one query at the end sees every key
    right = 0 if causal else right
    triangular = left < 0 and right == 0 and not attention_chunk
    local = (left >= 0 or right >= 0 or attention_chunk > 0) and not triangular
    vectors = 2 + (not local) + (triangular or local)
    return torch.zeros(-(-batch_size // 4) * 4 * vectors + 1, dtype=torch.int32, device=seqused_k.device)


def _check_numbers(least: int, **given):
    for name, value in given.items():
        if value < least:
            raise _illegal(f"{name}={value}: must be {least} or more")


def _illegal(text: str) -> ValueError:
    return ValueError(f"tessera.get_scheduler_metadata: {text}")
