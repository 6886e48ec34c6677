# SPDX-License-Identifier: Apache-2.0
"""tessera as an attention of ComfyUI: a model's, by the node of examples/comfyui, or one of the registered:

    model.model_options["transformer_options"]["optimized_attention_override"] = tessera.doors.comfyui.override()
    tessera.doors.comfyui.register()                     # comfy's get_attention_function("tessera")

ComfyUI calls (q, k, v, heads, mask, ...) on [b, s, h * d], or [b, h, s, d] with skip_reshape. Masks broadcast to
[b, h, sq, sk]; they may leave out the axes of batch and heads. The attention that ComfyUI had chosen computes
calls with other arguments than those below, and calls that tessera refuses, with one warning for each reason.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch

from .._lib import Refused
from ..torch import _functions, _sdpa

TESTED = "0.7.0"  # in comfy.ldm.modules.attention, whose source was read
_HOST = "comfy.ldm.modules.attention"
# attn_precision asks for scores in fp32, which tessera's always are.
_KNOWN = frozenset({"mask", "attn_precision", "skip_reshape", "skip_output_reshape", "scale", "enable_gqa",
                    "transformer_options", "low_precision_attention", "_inside_attn_wrapper"})
_said: set[str] = set()
_NUMBERS = frozenset({type(None), int, float})
_MAX_KEPT = 512
_is_deterministic = torch._C._get_deterministic_algorithms
_plans: dict[tuple, Callable] = {}  # what attention says of a call without a mask -> _prepared


def override(otherwise=None):
    """A function for transformer_options["optimized_attention_override"]. ComfyUI calls it with the attention
    that it chose and its arguments. `otherwise`, an override that was there before, gets the calls that tessera
    does not compute."""
    def attention_override(func, q, k, v, heads, mask=None, *arguments, **words):
        try:
            return _attended(q, k, v, heads, mask, words) if not arguments else \
                attention(q, k, v, heads, mask, *arguments, **words)
        except (Refused, NotImplementedError) as reason:
            _say(str(reason))
        words["mask"] = mask
        if otherwise is not None:
            return otherwise(func, q, k, v, heads, *arguments, **words)
        return func(q, k, v, heads, *arguments, **words)
    return attention_override


def attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **more):
    """ComfyUI's attention: [b, s, h * d], or [b, h, s, d] with skip_output_reshape."""
    more.update(skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape)
    return _attended(q, k, v, heads, mask, more)


def _attended(q, k, v, heads, mask, words: dict):
    """attention, its other arguments by their names."""
    if not _KNOWN.issuperset(words):
        raise NotImplementedError(f"tessera.comfyui: {', '.join(sorted(words.keys() - _KNOWN))}: is not known")
    get = words.get
    reshape, reshape_output, scale = not get("skip_reshape"), not get("skip_output_reshape"), get("scale")
    plan = run = None
    if mask is None and type(q) is type(k) is type(v) is torch.Tensor and type(scale) in _NUMBERS and \
            not torch.compiler.is_compiling():
        plan = reshape, reshape_output, scale, _is_deterministic()
        run = _plans.get(plan)
        if run is not None:
            o = run(q, k, v, heads)
            if o is not None:
                return o
    o = _attention(q, k, v, heads, mask, not reshape, not reshape_output, scale, get("enable_gqa", False))
    if plan is not None and run is None:
        if len(_plans) >= _MAX_KEPT:
            _plans.clear()
        _plans[plan] = _prepared(*plan)
    return o


def _prepared(reshape, reshape_output, scale, deterministic):
    """attention of as many heads of q as of k, without a mask: what depends on neither q, k, v nor heads is decided
    here. It returns None where there is more to do."""
    layout = "bshd" if reshape else ("bshd", "bhsd") if reshape_output else "bhsd"  # the first is o's
    run = _functions.prepared((), lambda *_: None, layout=layout, softmax_scale=scale, deterministic=deterministic)

    def of_heads(q, k, v, heads):
        if q.shape[1] != k.shape[1]:
            return None
        o = run(q.transpose(1, 2) if reshape_output else q, k, v)
        return o if o is None or not reshape_output else o.flatten(-2)

    def of_rows(q, k, v, heads):
        shape = q.shape
        if len(shape) != 3:
            return None
        b, s, width = shape
        d = width // heads
        if not heads * d == width == k.shape[-1] == v.shape[-1]:
            return None
        # view is faster than reshape, and a shape in a tuple would take 0.4 us more.
        o = run(q.view(b, s, heads, d), k.view(b, -1, heads, d), v.view(b, -1, heads, d))
        return o if o is None else o.view(b, s, width) if reshape_output else o.transpose(1, 2)
    return of_rows if reshape else of_heads


def _attention(q, k, v, heads, mask, skip_reshape, skip_output_reshape, scale, enable_gqa):
    """attention, of all calls."""
    heads_at = 1 if skip_reshape else 2
    if not skip_reshape:
        b, d = q.shape[0], q.shape[-1] // heads
        q, k, v = (x.reshape(b, -1, x.shape[-1] // d, d) for x in (q, k, v))
    if mask is None and q.shape[heads_at] == k.shape[heads_at]:
        layout = "bhsd" if skip_reshape else "bshd"
        o = _functions.attention(*_sdpa._readable(q, k, v), layout=layout, softmax_scale=scale)
        if skip_reshape == skip_output_reshape:
            return o if skip_reshape else o.flatten(-2)
        o = o.transpose(1, 2)
        return o if skip_output_reshape else o.flatten(-2)
    if not skip_reshape:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask[(None,) * (3 - mask.dim())].unsqueeze(1) if mask.dim() < 4 else mask
    o = _sdpa.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return o if skip_output_reshape else o.transpose(1, 2).flatten(-2)


def register():
    """Registers "tessera" for nodes that ask ComfyUI for attentions by name; returns a handle that undoes it."""
    host = sys.modules.get(_HOST)
    if host is None or not hasattr(host, "register_attention_function"):
        raise RuntimeError(f"tessera.comfyui: register(): {_HOST} is not imported, or has no "
                           f"register_attention_function; the door was made for ComfyUI {TESTED}")
    host.register_attention_function("tessera", host.wrap_attn(attention))
    return lambda: host.REGISTERED_ATTENTION_FUNCTIONS.pop("tessera", None) and None


def _say(reason: str):
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"{reason}; the attention that ComfyUI chose computes it", RuntimeWarning, stacklevel=4)
