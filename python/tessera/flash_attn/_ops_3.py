# SPDX-License-Identifier: Apache-2.0
"""torch.ops.flash_attn_3, the operators of FlashAttention-3's extension, by its schemas.

They are composite: PyTorch looks into them rather than past them, so they run wherever tessera's own operators do, on
the CPU and on CUDA, and torch.compile traces them, outputs that are written included. A kernel of a device could not be
compiled, because results that are arguments have no functional form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .._lib import Refused
from . import _plan, _translate as to

_NAMESPACE = "flash_attn_3"
_SCHEMAS = {
    "fwd": "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
           "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
           "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, "
           "int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
           "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
           "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, "
           "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
           "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, "
           "int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
           "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
           "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
           "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
           "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> ",
    "fwd_combine": "(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) -> "
                   "(Tensor(out!), Tensor)",
    "get_scheduler_metadata":
        "(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, "
        "int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, "
        "int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
        "int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> "
        "Tensor",
}
# The results of bwd, by their number: later versions of the extension only write dq, dk and dv.
_BWD_RESULTS = {8: "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
                5: "(Tensor, Tensor, Tensor, Tensor, Tensor)"}


class Passes(NamedTuple):
    """The two passes of the interface."""
    forward: Callable
    backward: Callable


class RegisteredOps:
    """Operators that are registered until remove()."""

    def __init__(self, passes: Passes, bwd_results: int):
        if bwd_results not in _BWD_RESULTS:
            raise ValueError(f"tessera.flash_attn_interface.register_ops: bwd_results={bwd_results}: must be 8 or 5")
        taken = [name for name in _SCHEMAS if hasattr(getattr(torch.ops, _NAMESPACE), name)]
        if taken:
            raise Refused(f"tessera.flash_attn_interface.register_ops: torch.ops.{_NAMESPACE}.{taken[0]}: is "
                          "registered already, by FlashAttention-3's extension or by an earlier call; leave that "
                          "extension out, or call remove() of what the earlier call returned")
        self._library = torch.library.Library(_NAMESPACE, "FRAGMENT")
        for name, function in _functions(passes, bwd_results).items():
            results = _BWD_RESULTS[bwd_results] if name == "bwd" else ""
            self._library.define(name + _SCHEMAS[name] + results)
            self._library.impl(name, function, "CompositeImplicitAutograd")

    def remove(self):
        """Takes the operators away; a second call does nothing."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _functions(passes: Passes, bwd_results: int) -> dict:
    """Operator -> its function, whose parameters are those of its schema in their order."""
    def fwd(q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None,
            cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
            page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, is_causal=False, window_size_left=-1,
            window_size_right=-1, attention_chunk=0, softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None,
            num_splits=0, pack_gqa=None, sm_margin=0):
        out, lse, _, _ = passes.forward(
            q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
            max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
            q_descale, k_descale, v_descale, softmax_scale, is_causal, (window_size_left, window_size_right),
            attention_chunk, softcap, is_rotary_interleaved, sm_margin=sm_margin)
        return out, lse, *_nothing(q, 2)

    def bwd(dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None,
            seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, is_causal=False,
            window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0):
        if bwd_results == 5 and any(x is None for x in (dq, dk, dv)):
            raise ValueError("tessera.flash_attn_3.bwd: dq, dk and dv must be given, as none of five results is a "
                             "gradient; register_ops(bwd_results=8) returns them")
        *gradients, delta = passes.backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q,
            max_seqlen_k, dq, dk, dv, softmax_scale, is_causal, (window_size_left, window_size_right), softcap,
            deterministic, sm_margin)
        return *(gradients if bwd_results == 8 else ()), delta, *_nothing(q, 4)

    def fwd_combine(out_partial, lse_partial, out=None, out_dtype=None):
        with torch.no_grad():
            return to.combined(out_partial, lse_partial, out, out_dtype)

    def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v,
                               qkv_dtype, seqused_k, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
                               seqused_q=None, leftpad_k=None, page_size=None, max_seqlen_k_new=0, is_causal=False,
                               window_size_left=-1, window_size_right=-1, attention_chunk=0, has_softcap=False,
                               num_splits=0, pack_gqa=None, sm_margin=0):
        return _plan.scheduler_metadata(
            batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k,
            per_sequence={"seqused_q": seqused_q, "leftpad_k": leftpad_k},
            cumulative={"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
                        "cu_seqlens_k_new": cu_seqlens_k_new},
            page_size=page_size, max_seqlen_k_new=max_seqlen_k_new, causal=is_causal,
            window_size=(window_size_left, window_size_right), attention_chunk=attention_chunk)

    return {"fwd": fwd, "bwd": bwd, "fwd_combine": fwd_combine, "get_scheduler_metadata": get_scheduler_metadata}


def _nothing(like, count: int) -> list:
    """Empty tensors, in the place of the extension's own intermediate results."""
    return [like.new_empty(0, dtype=torch.float32) for _ in range(count)]
