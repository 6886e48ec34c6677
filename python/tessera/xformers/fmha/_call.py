# SPDX-License-Identifier: Apache-2.0
"""A call of xformers.ops.fmha as one of tessera.torch: heads, biases and packed sequences in tessera's words."""

from __future__ import annotations

import torch

from ... import Refused
from ...torch import _functions, attention
from . import _quantized
from ._base import Blocks
from .attn_bias import AttentionBias, LowerTriangularMaskWithTensorBias


class Call:
    """One problem in tessera's words."""

    def __init__(self, name: str, query, key, value, bias, p, scale, output_dtype=None, share_heads=True,
                 scale_shift=None):
        for word, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, torch.Tensor):
                raise ValueError(f"tessera.xformers.{name}: {word}={type(x).__name__}: must be a PyTorch tensor")
        in_codes = torch.int32 in (key.dtype, value.dtype) or scale_shift is not None
        if in_codes and not share_heads:
            raise Refused(f"tessera.xformers.{name}: key.dtype={key.dtype}: keys and values in codes have no backward "
                          "pass; decode them, in query's dtype")
        if not 3 <= query.dim() <= 5 or not query.dim() == key.dim() == value.dim():
            raise ValueError(f"tessera.xformers.{name}: query.shape={list(query.shape)}, key.shape="
                             f"{list(key.shape)}, value.shape={list(value.shape)}: must all be "
                             "[b, s, d], [b, s, h, d] or [b, s, g, h, d]")
        self.name, self.query_shape = name, query.shape
        if query.dim() == 5 and share_heads and key.stride(3) == value.stride(3) == 0:
            key, value = key[:, :, :, :1], value[:, :, :, :1]
            if scale_shift is not None:
                scale_shift = [x if x is None else x[..., :1] for x in scale_shift]
        if in_codes:
            key, value = _quantized.decoded(name, query, key, value, scale_shift)
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
            bias = _with_one_axis_of_heads(bias, self.query_shape[2:4])
        if bias.dim() and bias.stride(-1) not in (0, 1):
            bias = bias.contiguous()
        return {"bias": bias}

    def run(self, return_lse: bool = False):
        more = {"out_dtype": torch.float32} if self.out_dtype == torch.float32 else {}
        results = attention(self.query, self.key, self.value, return_lse=return_lse, **more, **self.keywords)
        if self.out_dtype in (None, torch.float32):
            return results
        return (results[0].to(self.out_dtype), results[1]) if return_lse else results.to(self.out_dtype)

    def gradients(self, grad, output, lse, of_bias: bool = False):
        """(dq, dk, dv), of_bias also dbias, as tessera's heads have them."""
        o, do = (_with_heads(x) for x in (output, grad))
        o, do = (x[0] if self.packed else x for x in (o, do))
        rows = lse.reshape(self.query.shape[1], -1) if self.packed else \
            lse.reshape(lse.shape[0], -1, lse.shape[-1])
        wanted = ("dq", "dk", "dv", "dbias") if of_bias else ("dq", "dk", "dv")
        g = _functions.attention_backward(do, self.query, self.key, self.value, o, rows.contiguous(), grads=wanted,
                                          **self.keywords)
        more = (g.dbias,) if of_bias else ()
        if self.rows is None:
            return g.dq, g.dk, g.dv, *more
        return g.dq, *(x.new_zeros(self.tokens, *x.shape[1:]).index_add_(0, self.rows, x) for x in (g.dk, g.dv)), *more

    def draws(self, rng_state=None):
        """A state of dropout, which is kept for the backward pass: that of the forward pass, or a new one."""
        if self.keywords["dropout_p"]:
            self.keywords["rng_state"] = _functions.drawn_state(self.query.device) if rng_state is None else rng_state
        return self.keywords.get("rng_state")

    def explain(self, backward: bool = False):
        return _functions.explain(self.query, self.key, self.value, backward=backward, **self.keywords)

    def shaped(self, out):
        return out.reshape(*self.query_shape[:-1], out.shape[-1])

    def shaped_bias(self, gradient, shape):
        """The gradient of a bias, which has one axis of heads, as that of a tensor of `shape`."""
        if len(shape) == 5 and gradient.shape[1] > 1:
            gradient = gradient.unflatten(1, self.query_shape[2:4])
            if gradient.shape != shape:
                gradient = gradient.sum_to_size(shape)
        return gradient.reshape(shape)

    def shaped_rows(self, lse):
        lse = lse[None] if self.packed else lse
        return lse.unflatten(1, self.query_shape[2:4]) if len(self.query_shape) == 5 else lse


def _with_heads(x):
    """[b, s, h, d]."""
    return x[:, :, None] if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x


def _with_one_axis_of_heads(bias, heads):
    """bias [b, g, h, sq, sk] as [b, g·h, sq, sk]. Where only one of g and h broadcasts, it is written out."""
    groups, each = bias.shape[1:3]
    if (groups, each) != (1, 1) and groups in (1, heads[0]) and each in (1, heads[1]):
        bias = bias.expand(-1, *heads, -1, -1)
    return bias.flatten(1, 2)
