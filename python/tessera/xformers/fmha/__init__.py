# SPDX-License-Identifier: Apache-2.0
"""xformers.ops.fmha: attention of [b, s, h, d], of [b, s, d] for one head, or of [b, s, g, h, d] for g
groups of heads of which each has one head of keys and values. A bias class of attn_bias says which keys
are seen; its packed forms take b = 1."""

from __future__ import annotations

import torch

from ... import Refused
from ...torch import merge
from . import _operators, attn_bias as _biases
from ._call import Call
from ._operators import *  # noqa: F403
from .attn_bias import *  # noqa: F403
from .attn_bias import AttentionBias

attn_bias = _biases

__all__ = ["memory_efficient_attention", "memory_efficient_attention_forward",
           "memory_efficient_attention_forward_requires_grad", "memory_efficient_attention_backward",
           "memory_efficient_attention_partial", "merge_attentions", "attn_bias", *_operators.__all__]


def memory_efficient_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                               attn_bias: torch.Tensor | AttentionBias | None = None, p: float = 0.0,
                               scale: float | None = None, *, op=None,
                               output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """softmax(query keyᵀ · scale + attn_bias) value, with dropout p. It is differentiable, in a tensor attn_bias
    too. Such a tensor has query's dtype or float32, and broadcasts to [b, h, sq, sk] ([b, sq, sk] for three
    axes). op names a kernel and has no effect; output_dtype is query's unless given."""
    call = _call("memory_efficient_attention", query, key, value, attn_bias, p, scale, op, output_dtype)
    return call.shaped(call.run())


def memory_efficient_attention_forward(query, key, value, attn_bias=None, p: float = 0.0, scale=None, *,
                                       op=None, output_dtype=None) -> torch.Tensor:
    """memory_efficient_attention without a gradient."""
    with torch.no_grad():
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, op=op,
                                          output_dtype=output_dtype)


def memory_efficient_attention_forward_requires_grad(query, key, value, attn_bias=None, p: float = 0.0,
                                                     scale=None, *, op=None, output_dtype=None
                                                     ) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) for memory_efficient_attention_backward: lse [b, h, sq], packed [1, h, tokens]; g, h instead of h
    for five axes."""
    _no_dropout(p)
    call = _call("memory_efficient_attention_forward_requires_grad", query, key, value, attn_bias, p,
                 scale, op, output_dtype)
    with torch.no_grad():
        out, lse = call.run(return_lse=True)
    return call.shaped(out), call.shaped_rows(lse)


def memory_efficient_attention_backward(grad, output, lse, query, key, value, attn_bias=None,
                                        p: float = 0.0, scale=None, *, op=None
                                        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of an output and lse that ..._forward_requires_grad returned."""
    _no_dropout(p)
    call = _call("memory_efficient_attention_backward", query, key, value, attn_bias, p, scale, op, None,
                 share_heads=False)
    with torch.no_grad():
        grads = call.gradients(grad, output, lse)
    return tuple(x.reshape(like.shape) for x, like in zip(grads, (query, key, value)))


def memory_efficient_attention_partial(query, key, value, attn_bias=None, p: float = 0.0, scale=None, *,
                                       op=None, output_dtype=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over a part of the keys, for merge_attentions; differentiable. lse [b, h, sq],
    [b, g, h, sq] for five axes."""
    _no_dropout(p)
    call = _call("memory_efficient_attention_partial", query, key, value, attn_bias, p, scale, op,
                 output_dtype)
    out, lse = call.run(return_lse=True)
    return call.shaped(out), call.shaped_rows(lse)


def merge_attentions(attn_split, lse_split, write_lse: bool = True,
                     output_dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) over the union of parts: lists, or tensors with a first axis, of out [b, s, h, d] or
    [b, s, g, h, d] and lse [b, h, s] or [b, g, h, s]. lse is None without write_lse."""
    outs, lses = list(attn_split), list(lse_split)
    shape = outs[0].shape
    parts = [(o.flatten(2, 3) if o.dim() == 5 else o, rows.flatten(1, 2) if rows.dim() == 4 else rows)
             for o, rows in zip(outs, lses, strict=True)]
    out, lse = merge(parts)
    out = out.reshape(shape) if output_dtype is None else out.reshape(shape).to(output_dtype)
    return out, lse.reshape(lses[0].shape) if write_lse else None


def _memory_efficient_attention_forward(inp: Inputs, op) -> torch.Tensor:  # noqa: F405
    """The output of a call as an object, without a gradient; that of triton_splitk.InputsFp8 has no other function."""
    return _memory_efficient_attention_forward_requires_grad(inp, op)[0]


def _memory_efficient_attention_forward_requires_grad(inp: Inputs, op) -> tuple[torch.Tensor, Context]:  # noqa: F405
    """(out, what the backward pass wants) of a call as an object."""
    inp.validate_inputs()
    shape = inp.normalize_bmhk()
    _check_op("_memory_efficient_attention_forward_requires_grad", op)
    out, context = AttentionFwOpBase.apply(inp, needs_gradient=True)  # noqa: F405
    return out.reshape(shape), context


# ---- below: how ----

def _call(name: str, query, key, value, attn_bias, p, scale, op, output_dtype, share_heads=True) -> Call:
    _check_op(name, op)
    return Call(name, query, key, value, attn_bias, p, scale, output_dtype, share_heads)


def _check_op(name: str, op):
    if not _operators.is_known(op):
        raise Refused(f"tessera.xformers.{name}: op={op!r}: is no kernel of tessera.xformers.fmha, such as "
                      "fmha.flash.FwOp, and none of them has an effect; leave it out")


def _no_dropout(p: float):
    if p != 0.0:
        raise NotImplementedError("tessera.xformers: p: dropout belongs to memory_efficient_attention, "
                                  "whose backward pass knows its state")
