# SPDX-License-Identifier: Apache-2.0
"""xformers.ops.fmha: attention of [b, s, h, d], of [b, s, d] for one head, or of [b, s, g, h, d] for g
groups of heads of which each has one head of keys and values. A bias class of attn_bias says which keys
are seen; its packed forms take b = 1."""

from __future__ import annotations

import torch

from ... import Refused
from ...torch import _functions, attention, merge
from . import _operators, attn_bias as _biases
from ._base import Blocks
from ._operators import *  # noqa: F403
from .attn_bias import *  # noqa: F403
from .attn_bias import AttentionBias, LowerTriangularMaskWithTensorBias

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
    call = _Call("memory_efficient_attention", query, key, value, attn_bias, p, scale, op, output_dtype)
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
    call = _Call("memory_efficient_attention_forward_requires_grad", query, key, value, attn_bias, p,
                 scale, op, output_dtype)
    with torch.no_grad():
        out, lse = call.run(return_lse=True)
    return call.shaped(out), call.shaped_rows(lse)


def memory_efficient_attention_backward(grad, output, lse, query, key, value, attn_bias=None,
                                        p: float = 0.0, scale=None, *, op=None
                                        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of an output and lse that ..._forward_requires_grad returned."""
    _no_dropout(p)
    call = _Call("memory_efficient_attention_backward", query, key, value, attn_bias, p, scale, op, None,
                 share_heads=False)
    with torch.no_grad():
        grads = call.gradients(grad, output, lse)
    return tuple(x.reshape(like.shape) for x, like in zip(grads, (query, key, value)))


def memory_efficient_attention_partial(query, key, value, attn_bias=None, p: float = 0.0, scale=None, *,
                                       op=None, output_dtype=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over a part of the keys, for merge_attentions; differentiable. lse [b, h, sq],
    [b, g, h, sq] for five axes."""
    _no_dropout(p)
    call = _Call("memory_efficient_attention_partial", query, key, value, attn_bias, p, scale, op,
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


# ---- below: how ----

class _Call:
    """One problem in tessera's words."""

    def __init__(self, name: str, query, key, value, bias, p, scale, op, output_dtype,
                 share_heads=True):
        if not _operators.is_known(op):
            raise Refused(f"tessera.xformers.{name}: op={op!r}: is no kernel of tessera.xformers.fmha, such as "
                          "fmha.flash.FwOp, and none of them has an effect; leave it out")
        if key.dtype == torch.int32 or value.dtype == torch.int32:
            raise Refused(f"tessera.xformers.{name}: key.dtype={key.dtype}: keys and values of 4 bits in int32 are not "
                          "built; fp8 ones are, by tessera.torch.attention(k_scale=, v_scale=)")
        if not 3 <= query.dim() <= 5 or not query.dim() == key.dim() == value.dim():
            raise ValueError(f"tessera.xformers.{name}: query.shape={list(query.shape)}, key.shape="
                             f"{list(key.shape)}, value.shape={list(value.shape)}: must all be "
                             "[b, s, d], [b, s, h, d] or [b, s, g, h, d]")
        self.name, self.query_shape = name, query.shape
        if query.dim() == 5 and share_heads and key.stride(3) == value.stride(3) == 0:
            key, value = key[:, :, :, :1], value[:, :, :, :1]
        self.query, self.key, self.value = map(_with_heads, (query, key, value))
        self.packed, self.tokens = isinstance(bias, Blocks), self.key.shape[1]
        self.rows = None  # of key, where sequences share some
        self.keywords = {"softmax_scale": scale, "dropout_p": p, **self._of_bias(bias)}
        self.out_dtype = None if output_dtype in (None, query.dtype) else output_dtype

    def _of_bias(self, bias) -> dict:
        if bias is None:
            return {}
        if isinstance(bias, AttentionBias):
            bias = bias.to(self.query.device)
            if self.packed:
                return {**bias.band(), **self._pack(bias)}
            if isinstance(bias, LowerTriangularMaskWithTensorBias):
                return {**bias.band(), **self._dense(bias.bias)}
            return bias.band()
        if not isinstance(bias, torch.Tensor):
            raise ValueError(f"tessera.xformers.{self.name}: attn_bias={type(bias).__name__}: must be a "
                             "tensor or an AttentionBias")
        return self._dense(bias)

    def _pack(self, bias) -> dict:
        if self.query.shape[0] != 1 or self.key.shape[0] != 1:
            raise ValueError(f"tessera.xformers.{self.name}: query.shape={list(self.query_shape)}: must "
                             f"have b = 1 with {type(bias).__name__}")
        bias.check_tokens("query", self.query.shape[1])
        self.query = self.query[0]
        self.key, self.value, keywords = bias.place(self.key, self.value)
        self.rows = keywords.pop("rows", None)
        return {"layout": "thd", **keywords}

    def _dense(self, bias) -> dict:
        if bias.dtype == torch.bool:
            raise ValueError(f"tessera.xformers.{self.name}: attn_bias.dtype=torch.bool: is added to the "
                             "scores; use torch.where(mask, 0.0, -inf)")
        if len(self.query_shape) == 3 and bias.dim() == 3:
            bias = bias[:, None]
        if bias.dim() == 5:
            bias = bias.flatten(1, 2)
        if bias.dim() and bias.stride(-1) not in (0, 1):
            bias = bias.contiguous()
        return {"bias": bias}

    def run(self, return_lse: bool = False):
        more = {"out_dtype": torch.float32} if self.out_dtype == torch.float32 else {}
        results = attention(self.query, self.key, self.value, return_lse=return_lse, **more, **self.keywords)
        if self.out_dtype in (None, torch.float32):
            return results
        return (results[0].to(self.out_dtype), results[1]) if return_lse else results.to(self.out_dtype)

    def gradients(self, grad, output, lse):
        o, do = (_with_heads(x) for x in (output, grad))
        o, do = (x[0] if self.packed else x for x in (o, do))
        rows = lse.reshape(self.query.shape[1], -1) if self.packed else \
            lse.reshape(lse.shape[0], -1, lse.shape[-1])
        g = _functions.attention_backward(do, self.query, self.key, self.value, o, rows.contiguous(),
                                          **self.keywords)
        if self.rows is None:
            return g.dq, g.dk, g.dv
        return g.dq, *(x.new_zeros(self.tokens, *x.shape[1:]).index_add_(0, self.rows, x) for x in (g.dk, g.dv))

    def shaped(self, out):
        return out.reshape(*self.query_shape[:-1], out.shape[-1])

    def shaped_rows(self, lse):
        lse = lse[None] if self.packed else lse
        return lse.unflatten(1, self.query_shape[2:4]) if len(self.query_shape) == 5 else lse


def _with_heads(x):
    """[b, s, h, d]."""
    return x[:, :, None] if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x


def _no_dropout(p: float):
    if p != 0.0:
        raise NotImplementedError("tessera.xformers: p: dropout belongs to memory_efficient_attention, "
                                  "whose backward pass knows its state")
