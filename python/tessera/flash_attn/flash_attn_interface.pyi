# SPDX-License-Identifier: Apache-2.0
# Types of flash_attn_interface.py, whose signatures at run time are flash_attn's to the letter: a test compares names
# and defaults. A second result is rare; of calls that ask for it the result alone has a type.

from typing import Any, Literal, overload

from torch import Tensor

from . import flash_attn_2_cuda as flash_attn_gpu  # noqa: F401
from ._passes import (_flash_attn_backward as _flash_attn_backward, _flash_attn_forward as _flash_attn_forward,
                      _flash_attn_varlen_backward as _flash_attn_varlen_backward,
                      _flash_attn_varlen_forward as _flash_attn_varlen_forward)

_WithLse = tuple[Tensor, Tensor]
_WithProbs = tuple[Tensor, Tensor, Tensor | None]

@overload
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: Literal[False] = False) -> Tensor: ...
@overload
def flash_attn_func(*args: Any, return_attn_probs: Literal[True], **options: Any) -> _WithProbs: ...
@overload
def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Tensor | None = None, deterministic: bool = False,
                              return_attn_probs: Literal[False] = False) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(*args: Any, return_attn_probs: Literal[True], **options: Any) -> _WithProbs: ...
@overload
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                             causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Tensor | None = None, deterministic: bool = False,
                             return_attn_probs: Literal[False] = False) -> Tensor: ...
@overload
def flash_attn_kvpacked_func(*args: Any, return_attn_probs: Literal[True], **options: Any) -> _WithProbs: ...
@overload
def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: Literal[False] = False, block_table: Tensor | None = None) -> Tensor: ...
@overload
def flash_attn_varlen_func(*args: Any, return_attn_probs: Literal[True], **options: Any) -> _WithProbs: ...
@overload
def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                                     softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                     return_attn_probs: Literal[False] = False) -> Tensor: ...
@overload
def flash_attn_varlen_qkvpacked_func(*args: Any, return_attn_probs: Literal[True], **options: Any) -> _WithProbs: ...
@overload
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                                    softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                    return_attn_probs: Literal[False] = False) -> Tensor: ...
@overload
def flash_attn_varlen_kvpacked_func(*args: Any, return_attn_probs: Literal[True], **options: Any) -> _WithProbs: ...
@overload
def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                            v: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
                            cache_seqlens: Tensor | int | None = None, cache_batch_idx: Tensor | None = None,
                            cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
                            softmax_scale: float | None = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
                            return_softmax_lse: Literal[False] = False) -> Tensor: ...
@overload
def flash_attn_with_kvcache(*args: Any, return_softmax_lse: Literal[True], **options: Any) -> _WithLse: ...
