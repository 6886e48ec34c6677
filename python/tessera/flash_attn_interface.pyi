# SPDX-License-Identifier: Apache-2.0
# Types of flash_attn_interface.py, whose signatures at run time are FlashAttention 3's to the letter: a test compares
# names and defaults. A second result is rare; of calls that ask for it the result alone has a type.

from typing import Any, Literal, overload

from torch import Tensor, bfloat16, dtype

from ._lib import Refused as Refused
from .flash_attn import _ops_3

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_with_kvcache", "flash_attn_combine", "get_scheduler_metadata",
           "register_ops", "Refused"]

_WithLse = tuple[Tensor, Tensor]

def _flash_attn_forward(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor, None, None]: ...
def _flash_attn_backward(*arguments: Any, **keywords: Any) -> tuple[Tensor, ...]: ...

@overload
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
                    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
                    v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
                    deterministic: bool = False, sm_margin: int = 0,
                    return_attn_probs: Literal[False] = False) -> Tensor: ...
@overload
def flash_attn_func(*args: Any, return_attn_probs: Literal[True], **options: Any) -> _WithLse: ...
@overload
def flash_attn_qkvpacked_func(qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
                              q_descale: Tensor | None = None, k_descale: Tensor | None = None,
                              v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
                              attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
                              num_heads_q: int | None = None, sm_margin: int = 0,
                              return_attn_probs: Literal[False] = False) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(*args: Any, return_attn_probs: Literal[True], **options: Any) -> _WithLse: ...
@overload
def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, seqused_q: Tensor | None = None,
                           seqused_k: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
                           qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
                           v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
                           attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
                           pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
                           return_attn_probs: Literal[False] = False) -> Tensor: ...
@overload
def flash_attn_varlen_func(*args: Any, return_attn_probs: Literal[True], **options: Any) -> _WithLse: ...
@overload
def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                            v: Tensor | None = None, qv: Tensor | None = None, rotary_cos: Tensor | None = None,
                            rotary_sin: Tensor | None = None, cache_seqlens: Tensor | int | None = None,
                            cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
                            page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
                            cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None,
                            rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None,
                            k_descale: Tensor | None = None, v_descale: Tensor | None = None,
                            softmax_scale: float | None = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                            rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None,
                            num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
                            return_softmax_lse: Literal[False] = False) -> Tensor: ...
@overload
def flash_attn_with_kvcache(*args: Any, return_softmax_lse: Literal[True], **options: Any) -> _WithLse: ...
def flash_attn_combine(out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None,
                       out_dtype: dtype | None = None) -> tuple[Tensor, Tensor]: ...
def get_scheduler_metadata(batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
                           headdim: int, cache_seqlens: Tensor, qkv_dtype: dtype = bfloat16,
                           headdim_v: int | None = None, cu_seqlens_q: Tensor | None = None,
                           cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
                           page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False,
                           num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0) -> Tensor: ...
def register_ops(bwd_results: int = 8) -> _ops_3.RegisteredOps: ...
