# SPDX-License-Identifier: Apache-2.0
# Types of interface.py, whose signatures at run time are FlashAttention 4's to the letter: a test compares names and
# defaults. What is refused whatever it is, or has no effect, may be anything.

from typing import Any

from torch import Tensor, dtype

_WithLse = tuple[Tensor, Tensor | None]

def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, gather_kv_indices: Any = None,
                    softmax_scale: float | None = None, causal: bool = False,
                    window_size: tuple[int | None, int | None] = (None, None), learnable_sink: Tensor | None = None,
                    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
                    deterministic: bool = False, score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None,
                    aux_tensors: Any = None, aux_scalars: Any = None, block_sparse_tensors: Any = None,
                    block_sparse_tensors_bwd: Any = None, return_lse: bool = False,
                    gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: Any = None) -> _WithLse: ...
def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None,
                           cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
                           max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                           min_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
                           seqused_k: Tensor | None = None, gather_kv_indices: Any = None,
                           page_table: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int | None, int | None] = (None, None),
                           learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1,
                           pack_gqa: bool | None = None, deterministic: bool = False, score_mod: Any = None,
                           score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
                           aux_tensors: Any = None, aux_scalars: Any = None, return_lse: bool = False,
                           scheduler_metadata: Tensor | None = None, seqlen_k_per_split: int | None = None,
                           disable_scheduler_metadata: bool = False, gather_bwd_recompute_p: bool = False,
                           gather_bwd_token_chunk: Any = None) -> _WithLse: ...
def flash_attn_combine(out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None,
                       out_dtype: dtype | None = None, cu_seqlens: Tensor | None = None, seqused: Tensor | None = None,
                       virtual_batch_idx: Any = None, return_lse: bool = True) -> _WithLse: ...
def get_scheduler_metadata(max_seqlen_q: int, max_seqlen_k: int, nheads: int, nheads_kv: int, headdim: int,
                           num_splits: int, headdim_v: int | None = None, pack_gqa: bool | None = None,
                           causal: bool = False, window_size_left: int | None = None,
                           window_size_right: int | None = None, seqlen_k_new: int = 0,
                           cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
                           cu_seqlens_k_new: Tensor | None = None, seqused_q: Tensor | None = None,
                           seqused_k: Tensor | None = None, leftpad_k: Tensor | None = None,
                           seqlen_k_per_split: int | None = None, _arch: Any = None) -> None: ...
