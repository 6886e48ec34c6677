# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention by tessera, under its own name and, on request, under
PyTorch's."""

from __future__ import annotations

import math
import re
import sys
import warnings

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .. import _lib
from .._call import _keywords
from . import _functions, _nested, _tensors

_NAME = "tessera.torch.scaled_dot_product_attention"
_SPELLING = {"q": "query", "k": "key", "v": "value", "keep": "attn_mask", "bias": "attn_mask",
             "softmax_scale": "scale"}
_original = functional.scaled_dot_product_attention


class IllegalArgument(ValueError, RuntimeError):
    """What tessera calls a ValueError and PyTorch a RuntimeError."""


def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                                 attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, *, scale: float | None = None,
                                 enable_gqa: bool = False) -> torch.Tensor:
    """Computes softmax(query keyᵀ · scale + attn_mask) value, with the arguments of torch.nn.functional's function.

    query is [..., hq, sq, e], key [..., hk, sk, e], value [..., hk, sk, ev] and the result [..., hq, sq, ev]. They
    have two axes or more, and leading axes broadcast. They may also be nested tensors [b, h, j, e]: jagged ones are
    one call, strided ones a call for each sequence. With enable_gqa hq is a multiple of key's heads and of
    value's, which may differ. Where there are no heads, or heads have no elements, PyTorch's own function answers.

    attn_mask broadcasts to [..., hq, sq, sk]. A boolean one is True where a key is visible. A floating one, of
    query's dtype or float32, is added to the scores and has a gradient. It may also be a
    torch.nn.attention.bias.CausalBias. With is_causal query i sees the keys up to i. A row that sees no key is 0.
    With up to four axes, the result is laid out in memory as query is: for query = x.transpose(1, 2) of x [b, s, h,
    e], memory holds [b, s, h, ev].

    dropout_p is a probability below 1; 0 and less drop nothing. scale is a finite number, 1/sqrt(e) unless given.

    An illegal call raises a ValueError that is a RuntimeError too, or a TypeError where a number or a flag is none. A
    legal call that no backend can run (float64, dropout_p=1) raises tessera.Refused, a RuntimeError.

    >>> o = tessera.torch.scaled_dot_product_attention(query, key, value, is_causal=True)
    """
    if torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export():
        return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if has_torch_function_variadic(query, key, value) and not _nested.is_nested(query, key, value):
        return handle_torch_function(scaled_dot_product_attention, (query, key, value), query, key, value, attn_mask,
                                     dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not type(is_causal) is type(enable_gqa) is bool:
        _check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    try:
        if scale is not None and type(scale) is not float:
            scale = _number("scale", scale)
        if type(dropout_p) is not float:
            dropout_p = _number("dropout_p", dropout_p)
        keywords = {"layout": "bhsd", "softmax_scale": scale}
        if is_causal:
            keywords.update(causal=True, align="top_left")
        if not dropout_p <= 0:  # PyTorch drops nothing for a negative one
            keywords["dropout_p"] = _probability(dropout_p)
        if torch._C._is_any_autocast_enabled():
            query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
        if attn_mask is None and query.dim() == key.dim() == value.dim() == 4 and not query.is_nested:
            shape, of_v = query.shape, value.shape
            if shape[:2] == key.shape[:2] == of_v[:2] and shape[1] and shape[3] and of_v[3] and \
                    (scale is None or scale >= 0):
                return _functions.attention(*_readable(query, key, value), **keywords)
        if _is_hollow(query, key, value):
            return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return _general(query, key, value, attn_mask, keywords, enable_gqa)
    except IllegalArgument:
        raise
    except (ValueError, AttributeError) as error:
        if not all(isinstance(x, torch.Tensor) for x in (query, key, value)):
            raise TypeError(f"{_NAME}: query, key and value must be tensors") from None
        raise _illegal(str(error)) from None


def _check_flags(**flags):
    """Raises TypeError as PyTorch does where a flag is no boolean; torch.compile may hand on a symbolic one."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, torch.SymBool)):
            raise TypeError(f"{_NAME}: {name}={flag!r}: must be a bool, True or False")


def _number(name: str, x):
    """x as PyTorch reads a float: True is 1, and a tensor without axes is the number in it."""
    if isinstance(x, torch.Tensor):
        x = _functions.number("torch.scaled_dot_product_attention", name, x)
    if type(x).__name__ in ("bool", "bool_"):  # NumPy's too
        return float(x)
    if not _keywords.is_number(x) and not isinstance(x, (torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{_NAME}: {name}={x!r}: must be a number")
    return x


def _is_hollow(query, key, value) -> bool:
    """Whether there are no heads, or heads without elements: no kernel is built for nothing, and PyTorch knows what it
    makes of it."""
    tensors = query, key, value
    return not _nested.is_nested(*tensors) and (
        0 in [x.shape[-1] for x in tensors if x.dim() > 1] or 0 in [x.shape[-3] for x in tensors if x.dim() > 2])


def _autocast(query, *others):
    """query, key, value and attn_mask in autocast's dtype, before anything is asked of their dtypes; a float32 mask
    stays what it is, which is no less exact."""
    dtype = _tensors.autocast_dtype(query)
    if dtype is None:
        return query, *others
    *tensors, mask = query, *others
    tensors = [x.to(dtype) if x.dtype in _functions.AUTOCAST else x for x in tensors]
    is_cast = type(mask) is torch.Tensor and mask.dtype in _functions.AUTOCAST and mask.dtype != torch.float32
    return *tensors, mask.to(dtype) if is_cast else mask


def _general(query, key, value, attn_mask, keywords: dict, enable_gqa: bool):
    if attn_mask is not None and type(attn_mask) is not torch.Tensor and _is_causal_bias(attn_mask):
        attn_mask = _as_keywords(attn_mask, keywords)
    if attn_mask is not None and keywords.get("causal"):
        raise _illegal("attn_mask and is_causal=True: one mask at a time; give one of them")
    if _nested.is_nested(query, key, value):
        return _of_nested(query, key, value, attn_mask, keywords, enable_gqa)
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise _illegal(f"query.dim()={query.dim()}, key.dim()={key.dim()}, value.dim()={value.dim()}: "
                       "must have at least the axes [s, e]")
    if not query.dtype == key.dtype == value.dtype:
        raise _illegal(f"query.dtype={query.dtype}, key.dtype={key.dtype}, value.dtype={value.dtype}: "
                       "must be one dtype")
    rank = max(query.dim(), key.dim(), value.dim())
    shape, (query, key, value) = _four_axes(query, key, value, enable_gqa)
    scale = keywords["softmax_scale"]
    if scale is not None and scale < 0:
        if scale == -math.inf:
            raise _illegal(f"scale={scale}: must be finite")
        key, keywords["softmax_scale"] = -key, -scale
    if attn_mask is not None:
        keywords.update(_mask(attn_mask, query, shape, rank))
    o = _functions.attention(*_readable(query, key, value), **keywords)
    if rank > 4:  # whose order PyTorch does not keep
        o = o.contiguous()
    o = o.unflatten(0, shape[:-1]) if len(shape) > 2 else o
    return o if rank == o.dim() else o.reshape(o.shape[o.dim() - rank:])


def _four_axes(query, key, value, enable_gqa: bool):
    """((batch axes..., heads) of the result, the three tensors as [b, h, s, e], broadcast)."""
    tensors = [x if x.dim() > 3 else x[(None,) * (4 - x.dim())] for x in (query, key, value)]
    heads = [x.shape[-3] for x in tensors]
    if enable_gqa:
        if heads[0] % heads[1] or heads[0] % heads[2]:
            raise _illegal(f"query has {heads[0]} heads, key {heads[1]} and value {heads[2]}: with "
                           "enable_gqa those of key and of value must divide query's")
        if heads[1] != heads[2]:  # which groups of one size cannot say
            tensors = [x.repeat_interleave(heads[0] // n, -3) for x, n in zip(tensors, heads)]
            heads = heads[:1] * 3
    else:
        most = max(heads)
        if any(n not in (1, most) for n in heads):
            raise _illegal(f"query has {heads[0]} heads, key {heads[1]} and value {heads[2]}: must be "
                           "equal, or 1, unless enable_gqa=True")
        heads = [most, *(heads[1:] if heads[1] == heads[2] else [most, most])]
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    except RuntimeError:
        raise _illegal("query.shape, key.shape, value.shape=" + ", ".join(
            str(list(x.shape)) for x in (query, key, value)) + ": batch axes must broadcast") from None
    tensors = [x.expand(*batch, n, *x.shape[-2:]).flatten(0, len(batch) - 1)
               for x, n in zip(tensors, heads)]
    return (*batch, heads[0]), tensors


def _mask(attn_mask, query, shape, rank: int = 4) -> dict:
    """attn_mask as a keyword; `shape` is the batch axes and heads of the result, `rank` how many axes the caller's
    tensors have."""
    if not isinstance(attn_mask, torch.Tensor):
        raise _illegal(f"attn_mask={type(attn_mask).__name__}: must be a tensor")
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise _illegal(f"attn_mask.dtype={attn_mask.dtype}: must be bool, float32 or query's dtype, "
                       f"{query.dtype}")
    if attn_mask.dim() > rank:
        raise _illegal(f"attn_mask.shape={list(attn_mask.shape)}: has more axes than the scores")
    if len(shape) > 2 and attn_mask.dim() > 3:
        if any(n not in (1, extent) for n, extent in zip(attn_mask.shape[-4::-1], shape[-2::-1])):
            raise _illegal(f"attn_mask.shape={list(attn_mask.shape)}: must broadcast to the batch axes of the result, "
                           f"{list(shape[:-1])}")
        mask = attn_mask.expand(*shape[:-1], *attn_mask.shape[-3:]).flatten(0, len(shape) - 2)
    else:
        mask = attn_mask
    if mask.dim() and mask.stride(-1) not in (0, 1) and mask.shape[-1] > 1:
        mask = mask.contiguous()
    return {"keep" if mask.dtype == torch.bool else "bias": mask}


def _is_causal_bias(mask) -> bool:
    """Whether mask is a torch.nn.attention.bias.CausalBias. That module imports torch._dynamo, and whoever made such a
    mask has imported it."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _as_keywords(mask, keywords: dict):
    """A CausalBias as a band."""
    from torch.nn.attention.bias import CausalVariant
    if keywords.get("causal"):
        raise _illegal("attn_mask=CausalBias and is_causal=True: one mask at a time; give one of them")
    align = "top_left" if mask.variant == CausalVariant.UPPER_LEFT else "bottom_right"
    keywords.update(causal=True, align=align)


def _of_nested(query, key, value, attn_mask, keywords: dict, enable_gqa: bool):
    if attn_mask is not None:
        raise _illegal("attn_mask: nested tensors take none here; tessera.torch.attention takes keep= "
                       "and bias= beside them")
    tensors = query, key, value
    if all(x.is_nested and x.layout is torch.strided and x.dim() == 4 for x in tensors):
        parts = [scaled_dot_product_attention(*(x[None] for x in each), is_causal=keywords.get("causal", False),
                                              dropout_p=keywords.get("dropout_p", 0.0), enable_gqa=enable_gqa,
                                              scale=keywords["softmax_scale"])[0]
                 for each in zip(*(x.unbind() for x in tensors), strict=True)]
        return torch.nested.as_nested_tensor(parts)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise _illegal(f"query has {query.shape[1]} heads and key {key.shape[1]}: must be equal, "
                       "unless enable_gqa=True")
    if keywords["softmax_scale"] is not None and keywords["softmax_scale"] < 0:
        raise _illegal(f"scale={keywords['softmax_scale']}: must not be negative for nested tensors")
    return _functions.attention(query, key, value, **keywords)


def _readable(*tensors):
    """The tensors, copied where the last axis is not dense: PyTorch takes any strides."""
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]


def _probability(dropout_p):
    if dropout_p == 1:
        raise _lib.Refused(f"{_NAME}: dropout_p=1: drops every weight, which no backend is built for; "
                           "use torch.zeros")
    return dropout_p


def _illegal(text: str) -> IllegalArgument:
    text = re.sub(r"^[\w.]+: ", "", text) if text.startswith("tessera.") else text
    field = re.match(r"\w+", text)
    if field and field[0] in _SPELLING:
        text = _SPELLING[field[0]] + text[field.end():]
    text = re.sub(r"\b[qkv](?=\.(shape|dtype)\b)", lambda name: _SPELLING[name[0]], text)
    text = re.sub("pass seqlens_k, the lengths, or the (mask|bias) as", "pass it as", text)  # lengths are no argument
    return IllegalArgument(f"{_NAME}: {text}")


# TorchScript knows functions of torch.nn.functional by their operators: under a patch it runs PyTorch's own,
# as TorchScript's exporter to ONNX does, for which tessera's is no operator.
def _scripts_as_pytorch(function):
    torch.jit._builtins._register_builtin(function, "aten::scaled_dot_product_attention")


class patch_sdpa:
    """Makes tessera run torch.nn.functional.scaled_dot_product_attention, in every loaded module that has that name.

    The patch holds for all threads, from this call on; used as a context manager it ends with the block, and undo()
    ends it at any time. With fallback=True PyTorch's own function runs what tessera refuses, with one warning for
    each reason; otherwise such a call is Refused. The patch does not reach calls that PyTorch makes below Python:
    those of the fused encoder layer in eval mode, of what torch.jit.script compiles, and of torch.onnx.export by
    TorchScript.

    >>> with tessera.torch.patch_sdpa():
    ...     logits = model(images)
    >>> tessera.torch.patch_sdpa()          # for good
    """

    def __init__(self, *, fallback: bool = False):
        function = _with_fallback if fallback else scaled_dot_product_attention
        self._places = [(module, name) for module in list(sys.modules.values())
                        for name, value in list(getattr(module, "__dict__", {}).items())
                        if value is functional.scaled_dot_product_attention and
                        module is not sys.modules[__name__] and
                        getattr(module, "__name__", "") != "torch._C._nn"]
        self._before = functional.scaled_dot_product_attention
        for module, name in self._places:
            setattr(module, name, function)

    def undo(self):
        """Ends the patch: every module has its own function again."""
        while self._places:
            setattr(*self._places.pop(), self._before)

    def __enter__(self) -> patch_sdpa:
        return self

    def __exit__(self, *_):
        self.undo()


def _with_fallback(query, key, value, *arguments, **keywords):
    try:
        return scaled_dot_product_attention(query, key, value, *arguments, **keywords)
    except _lib.Refused as refused:
        warnings.warn(f"{refused}; PyTorch computes it", stacklevel=2)
    return _original(query, key, value, *arguments, **keywords)


_scripts_as_pytorch(scaled_dot_product_attention)
_scripts_as_pytorch(_with_fallback)
