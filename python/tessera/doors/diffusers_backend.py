# SPDX-License-Identifier: Apache-2.0
"""tessera among diffusers' attention backends:

    handle = tessera.doors.diffusers_backend.register()
    pipeline.transformer.set_attention_backend("tessera")     # or with diffusers' attention_backend("tessera"):
    ...
    pipeline.transformer.reset_attention_backend()
    handle.remove()

A backend gets the arguments of dispatch_attention_fn: q, k and v [b, s, h, d], and a mask of keys [b, sk] or one
that broadcasts to [b, h, sq, sk]. With return_lse it also returns lse [b, s, h], natural logarithms in fp32,
which diffusers' ring attention merges. Under context parallelism diffusers exchanges the results of `_forward`
and `_backward`.
"""

from __future__ import annotations

import inspect

from diffusers.models import attention_dispatch as host

from .._lib import Refused
from ..torch import _functions, _sdpa
from . import DOORS, _enum

TESTED = DOORS["diffusers"].tested
_NAME = "tessera.diffusers_backend"
_CALLED_WITH = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
                "attention_kwargs", "backend", "parallel_config")


class Handle:
    """The registered backend, until remove()."""

    def __init__(self, member, active):
        self.member, self._active = member, active

    def remove(self):
        """Takes the backend and its name away; the backend that was active before is active again. First call
        reset_attention_backend() of models that use it."""
        if self.member is None:
            return
        registry, member, self.member = host._AttentionBackendRegistry, self.member, None
        if registry._active_backend is member:
            registry.set_active_backend(self._active)
        for table in (registry._backends, registry._constraints, registry._supported_arg_names):
            table.pop(member, None)
        registry._supports_context_parallel.discard(member.value)
        _enum.remove(member)


def register() -> Handle:
    """Registers the backend "tessera", for context parallelism too, and activates nothing."""
    theirs = tuple(inspect.signature(host.dispatch_attention_fn).parameters)
    if theirs != _CALLED_WITH:
        raise RuntimeError(f"{_NAME}: register(): dispatch_attention_fn takes {', '.join(theirs)}, which the door does "
                           f"not know; it was tested with diffusers {TESTED}; install that")
    registry = host._AttentionBackendRegistry
    member = _enum.add(host.AttentionBackendName, "TESSERA", "tessera")
    registry.register(member, constraints=[host._check_device, host._check_shape],
                      supports_context_parallel=True)(attention)
    return Handle(member, registry._active_backend)


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
              return_lse=False, _parallel_config=None):
    """o [b, sq, h, d], with return_lse (o, lse)."""
    if _parallel_config is not None:
        return host._templated_context_parallel_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, forward_op=_forward,
            backward_op=_backward, _parallel_config=_parallel_config)
    if attn_mask is None and not dropout_p and (scale is None or scale >= 0) and (
            enable_gqa or query.shape[2] == key.shape[2]):
        o = _functions.attention(*_sdpa._readable(query, key, value), layout="bshd", softmax_scale=scale,
                                 return_lse=return_lse, **(_CAUSAL if is_causal else {}))
        return (o[0], o[1].transpose(1, 2)) if return_lse else o
    if return_lse:
        return _with_lse(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return _sdpa.scaled_dot_product_attention(q, k, v, _mask(attn_mask, query, key), dropout_p, is_causal, scale=scale,
                                              enable_gqa=enable_gqa).transpose(1, 2)


_CAUSAL = {"causal": True, "align": "top_left"}


def _mask(mask, query, key):
    """As diffusers' native backend has it: one number for each key hides it from all queries."""
    if mask is not None and mask.dim() == 2 and tuple(mask.shape) == (query.shape[0], key.shape[1]):
        return mask[:, None, None]
    return mask


def _with_lse(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa):
    for name, given in (("dropout_p", dropout_p), ("attn_mask beside is_causal", mask is not None and is_causal),
                        ("scale below 0", scale is not None and scale < 0),
                        ("heads without enable_gqa", not enable_gqa and query.shape[2] != key.shape[2])):
        if given:
            raise Refused(f"{_NAME}: {name}: has no lse; leave it or return_lse out")
    o, lse = _functions.attention(*_sdpa._readable(query, key, value), layout="bshd", softmax_scale=scale,
                                  return_lse=True, **_masked(mask, query, key))
    return o, lse.transpose(1, 2)


def _masked(mask, query, key) -> dict:
    b, _, heads, _ = query.shape
    return {} if mask is None else _sdpa._mask(_mask(mask, query, key), query, (b, heads))


# ---- a rank's part under context parallelism, which diffusers' autograd functions call ----

def _forward(ctx, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
             return_lse=False, _save_ctx=True, _parallel_config=None):
    ring = _parallel_config.context_parallel_config.ring_degree > 1
    for name, given, instead in (
            ("dropout_p", dropout_p, "ranks would draw the same mask; leave it out"),
            ("attn_mask beside ring_degree > 1", ring and attn_mask is not None,
             "the keys of other ranks are not in it; ulysses_degree would work"),
            ("attn_mask with a gradient", attn_mask is not None and attn_mask.requires_grad,
             "diffusers gives none back; detach() it")):
        if given:
            raise Refused(f"{_NAME}: {name}: is not built under context parallelism: {instead}")
    keywords = {"layout": "bshd", "softmax_scale": scale, **_masked(attn_mask, query, key)}
    o, lse = _functions.attention(*_sdpa._readable(query, key, value), return_lse=True, **keywords)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, o, lse)
        ctx.keywords = keywords
    return (o, lse.transpose(1, 2)) if return_lse else o


def _backward(ctx, grad_out, *_, query=None, key=None, value=None, out=None, lse=None, **__):
    """Gradients of a part of the keys: a ring gives the o and lse [b, s, h] of all of them."""
    saved = ctx.saved_tensors
    lse = saved[4] if lse is None else lse.transpose(1, 2).contiguous()
    query, key, value, out = (mine if given is None else given
                              for mine, given in zip(saved, (query, key, value, out)))
    g = _functions.attention_backward(grad_out.to(query.dtype), *_sdpa._readable(query, key, value), out, lse,
                                      partial=True, **ctx.keywords)
    return g.dq, g.dk, g.dv
