# SPDX-License-Identifier: Apache-2.0
"""rotate and append_kv on PyTorch tensors, as operators of the dispatcher."""

from __future__ import annotations

import torch

from .. import _cache, _lib, _utilities
from .._call import _keywords
from . import _ops, _tensors

_ROTATE = ("rotate(Tensor x, Tensor cos, Tensor sin, Tensor? positions, str layout, bool interleaved, "
           "bool inverse) -> Tensor")
_ROTATE_OUT = _ROTATE.replace("rotate(", "rotate_out(Tensor(a!) out, ").replace("-> Tensor", "-> ()")
_APPEND = ("append_kv(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor seqlens_k, "
           "str layout, Tensor? cu_seqlens, Tensor? seqlens_q, Tensor? page_table, Tensor? q, "
           "Tensor? cos, Tensor? sin, "
           "bool interleaved, Tensor? k_scale, Tensor? v_scale) -> Tensor")

for _schema in (_ROTATE, _ROTATE_OUT, _APPEND):
    _ops._library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))


# ---- kernels ----

def _rotate_out(out, x, cos, sin, positions, layout, interleaved, inverse):
    call = _cache.rotate_call(_tensors, x, out, cos, sin, positions, layout=layout,
                              interleaved=interleaved, inverse=inverse)
    call.run(_lib.rotate, _tensors.device(x), _utilities.context_of(_tensors, x))


def _rotate(x, *arguments):
    if x.stride(-1) != 1:  # the gradient of a sum is one number, expanded
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rotate_out(out, x, *arguments)
    return out


def _append_kv(k, v, k_cache, v_cache, seqlens_k, layout, cu_seqlens, seqlens_q, page_table,
               q, cos, sin,
               interleaved, k_scale, v_scale):
    turned = k.new_empty(0) if q is None else \
        torch.empty_like(q, memory_format=torch.contiguous_format)
    call = _cache.append_call(
        _tensors, k, v, k_cache, v_cache, seqlens_k, layout=layout, cu_seqlens=cu_seqlens,
        seqlens_q=seqlens_q, page_table=page_table, q=q, q_out=None if q is None else turned,
        rope=None if cos is None else (cos, sin), interleaved=interleaved, k_scale=k_scale,
        v_scale=v_scale)
    call.run(_lib.append, _tensors.device(k), _utilities.context_of(_tensors, k))
    return turned


for _name, _kernel in (("rotate", _rotate), ("rotate_out", _rotate_out), ("append_kv", _append_kv)):
    for _key in ("CPU", "CUDA"):
        _ops._library.impl(_name, _kernel, _key)


@torch.library.register_fake("tessera::rotate", lib=_ops._library)
def _(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("tessera::rotate_out", lib=_ops._library)
def _(*_):
    return None


@torch.library.register_fake("tessera::append_kv", lib=_ops._library)
def _(k, *arguments):
    q = arguments[8]
    return k.new_empty(0) if q is None else \
        torch.empty_like(q, memory_format=torch.contiguous_format)


def _save_angles(ctx, inputs, output):
    _, cos, sin, positions, ctx.layout, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _turn_back(ctx, dy):
    """A turn is orthogonal, so its gradient is the turn the other way."""
    dx = torch.ops.tessera.rotate(dy, *ctx.saved_tensors, ctx.layout, ctx.interleaved,
                                  not ctx.inverse)
    return dx, None, None, None, None, None, None


torch.library.register_autograd("tessera::rotate", _turn_back, setup_context=_save_angles,
                                lib=_ops._library)


# ---- what users call ----

def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
           positions: torch.Tensor | None = None, *, interleaved: bool = False,
           layout: _keywords.Format = "bshd", out: torch.Tensor | None = None) -> torch.Tensor:
    """Applies rotary position embedding (Su et al., arXiv:2104.09864) and returns a tensor of x's shape and dtype.

    x is [b, s, h, d] for layout="bshd", in float32, bfloat16, float16 or float64. "sbhd" and "bhsd" are other orders
    of axes; "thd" is packed [t, h, d]. cos and sin are fp32 [max_pos, r/2], on x's device, as tessera.rope_table
    makes them. The first r <= d elements of a head turn, and the others stay. Element i turns with element i + r/2;
    if interleaved, 2i with 2i + 1.

    positions, int32 or int64, are [b] for the position of each sequence's first row, or [b, s] (with "thd" [t]) for
    that of each row; None counts 0, 1, 2, ... The result is differentiable with respect to x. out is a tensor to
    write into, which may be x itself, for calls without gradients. ValueError: anything else, and on the CPU a
    position outside the tables.

    >>> cos, sin = map(torch.from_numpy, tessera.rope_table(4096, 128))
    >>> q = tessera.torch.rotate(q, cos, sin, positions=seqlens_k)
    """
    _check_tensors("rotate", x=x, cos=cos, sin=sin, positions=positions, out=out)
    if out is None:
        return torch.ops.tessera.rotate(x, cos, sin, positions, layout, interleaved, False)
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise _lib.Refused("tessera.rotate: out=Tensor: what is written into it has no gradient, and a "
                           "tensor here asks for one; use torch.no_grad(), or leave out= out")
    torch.ops.tessera.rotate_out(out, x, cos, sin, positions, layout, interleaved, False)
    return out


def append_kv(k: torch.Tensor, v: torch.Tensor | None, k_cache: torch.Tensor,
              v_cache: torch.Tensor | None, seqlens_k: torch.Tensor, *,
              layout: _keywords.Format = "bshd", cu_seqlens: torch.Tensor | None = None,
              seqlens_q: torch.Tensor | None = None, page_table: torch.Tensor | None = None,
              q: torch.Tensor | None = None,
              rope: tuple[torch.Tensor, torch.Tensor] | None = None, interleaved: bool = False,
              k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None
              ) -> torch.Tensor | None:
    """Appends new keys and values to a cache. Returns q, turned by rope, or None if q is not given.

    k is [b, s, hk, dqk] and v [b, s, hk, dv] for layout="bshd", in float32, bfloat16 or float16. "sbhd" and "bhsd"
    are other orders of axes; "thd" is packed [t, hk, d] with cu_seqlens [b + 1]. seqlens_k [b], int32 or int64, are
    the lengths before the call: the tokens of sequence n go to places seqlens_k[n], seqlens_k[n] + 1, ... seqlens_q
    [b] says how many of the s tokens of each sequence are new; by default all are.

    k_cache is [b, sk, hk, dqk] and v_cache [b, sk, hk, dv]; or both are pools [pages, page_size, hk, d], with
    page_table int32 [b, max_pages]. No two sequences may append to one page. With v=None and v_cache=None one cache
    serves both (MLA). Values are converted to the dtype of the cache; fp8 is round(x / scale), saturating, with
    k_scale and v_scale fp32 [hk] or [b, hk].

    rope=(cos, sin), as rope_table returns them, turns k and q [b, s, hq, dqk] by their positions, in pairs as
    rotate's, interleaved or not. ValueError: anything else, and on the CPU a token past the end of the cache; then
    nothing is written. On CUDA such a token is dropped. Refused: k, v or q needs a gradient.

    >>> tessera.torch.append_kv(k, v, k_pool, v_pool, lengths, page_table=table)
    >>> o = tessera.torch.attention(q, k_pool, v_pool, seqlens_k=lengths + 1, page_table=table)
    """
    _check_tensors("append_kv", k=k, v=v, k_cache=k_cache, v_cache=v_cache, seqlens_k=seqlens_k,
                   cu_seqlens=cu_seqlens, seqlens_q=seqlens_q, page_table=page_table, q=q, k_scale=k_scale,
                   v_scale=v_scale)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad
                                       for x in (k, v, q, k_cache, v_cache)):
        raise _lib.Refused("tessera.append_kv: requires_grad=True: a cache has no gradient; use "
                           "torch.no_grad() or torch.inference_mode()")
    if rope is not None:
        if not isinstance(rope, (tuple, list)) or len(rope) != 2:
            raise ValueError(f"tessera.append_kv: rope={type(rope).__name__}: must be a pair (cos, sin), "
                             "as rope_table returns")
        _check_tensors("append_kv", **{"rope[0]": rope[0], "rope[1]": rope[1]})
    cos, sin = rope or (None, None)
    turned = torch.ops.tessera.append_kv(k, v, k_cache, v_cache, seqlens_k, layout, cu_seqlens,
                                         seqlens_q, page_table, q, cos, sin, interleaved, k_scale,
                                         v_scale)
    return None if q is None else turned


def _check_tensors(operation: str, **given):
    for name, value in given.items():
        optional = value is None and name not in ("x", "cos", "sin", "k", "k_cache", "seqlens_k")
        if not optional and not isinstance(value, torch.Tensor):
            raise ValueError(f"tessera.{operation}: {name}={value if value is None else type(value).__name__}"
                             f": must be a {_tensors.noun}")
