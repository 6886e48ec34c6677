# SPDX-License-Identifier: Apache-2.0
"""fused_attn_fwd and fused_attn_bwd by the names of TE's documentation:

    output, softmax_lse, rng_state = fused_attn_fwd(
        is_training=True, max_seqlen_q=s, max_seqlen_kv=s, cu_seqlens_q=cu, cu_seqlens_kv=cu, Q=q,
        K=k, V=v, qkv_dtype=torch.bfloat16,
        fused_attention_backend=FusedAttnBackend["F16_arbitrary"])

Without qkv_layout it is read off Q: [t, h, d], or [b, s, h, d] where s alone is max_seqlen_q, else
TE's default [s, b, h, d]. Formats of O, dO and the gradients are Q's unless given.
"""

from __future__ import annotations

import functools
import inspect

import torch

from .. import _words
from ..constants import TE_DType_To_Torch


def forward(function):
    """Adds Q, K, V, qkv_dtype, with which (output, softmax_lse, rng_state[, max_logit]) is
    returned."""
    @functools.wraps(function)
    def fused_attn_fwd(*args, Q=None, K=None, V=None, qkv_dtype=None, **options):
        if Q is None and K is None and V is None:
            return function(*args, **options)
        options = _named(function, args, options, qkv_dtype, Q=Q, K=K, V=V)
        output, aux, *max_logit = function(*args, **options)
        return output, aux[0], aux[1], *max_logit
    return fused_attn_fwd


def backward(function):
    """Adds Q, K, V, O, dO, qkv_dtype; beside them softmax_lse, rng_state, attn_bias and
    softmax_offset may stand for aux_ctx_tensors. Returns what `function` does."""
    @functools.wraps(function)
    def fused_attn_bwd(*args, Q=None, K=None, V=None, O=None, dO=None, qkv_dtype=None,  # noqa: E741
                       softmax_lse=None, rng_state=None, attn_bias=None, softmax_offset=None,
                       aux_ctx_tensors=None, **options):
        if all(x is None for x in (Q, K, V, O, dO)):
            given = {} if aux_ctx_tensors is None else {"aux_ctx_tensors": aux_ctx_tensors}
            return function(*args, **given, **options)
        options = _named(function, args, options, qkv_dtype, Q=Q, K=K, V=V, O=O, dO=dO)
        if aux_ctx_tensors is None:
            if not isinstance(softmax_lse, torch.Tensor):
                raise _words.error("softmax_lse", type(softmax_lse).__name__, "must be what "
                                   "fused_attn_fwd returned, here or first in aux_ctx_tensors")
            aux_ctx_tensors = softmax_lse, rng_state
        more = [x for x in (attn_bias, softmax_offset) if x is not None]
        layout = options["qkv_layout"]
        options.setdefault("do_format", options["o_format"])
        options.setdefault("dqkv_layout", layout)
        return function(*args, aux_ctx_tensors=[*aux_ctx_tensors, *more], **options)
    return fused_attn_bwd


_LOWER = {"Q": "q", "K": "k", "V": "v", "O": "o", "dO": "d_o"}


def _named(function, args, options, qkv_dtype, **tensors) -> dict:
    """The keywords of `function`."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise _words.error(name, type(x).__name__, "must be a torch.Tensor")
    dtype = TE_DType_To_Torch.get(qkv_dtype, qkv_dtype)
    q = tensors["Q"]
    if dtype is not None and dtype != q.dtype:
        raise _words.error("qkv_dtype", qkv_dtype, f"must be Q's, {q.dtype}")
    renamed = {_LOWER[name]: x for name, x in tensors.items()}
    given = inspect.signature(function).bind_partial(*args, **options).arguments
    options = {"qkv_layout": _layout(q, given), **options, **renamed, "fake_dtype": q.dtype}
    options.setdefault("o_format", _words.formats_of(options["qkv_layout"])[0])
    return options


def _layout(q, given: dict) -> str:
    if q.dim() == 3:
        return "thd_thd_thd"
    longest, cu_seqlens = given.get("max_seqlen_q"), given.get("cu_seqlens_q")
    batch_first = q.dim() == 4 and q.shape[1] == longest != q.shape[0] and \
        (cu_seqlens is None or cu_seqlens.shape[0] == q.shape[0] + 1)
    return "bshd_bshd_bshd" if batch_first else "sbhd_sbhd_sbhd"
