# SPDX-License-Identifier: Apache-2.0
"""The public packages of FlashAttention, for callers that ask for one by name, to compare with or to
keep, and for those who keep TE's order by TESSERA_TE_ORDER=te: flash_attn is its second version,
flash_attn_interface its third, flash_attn.cute its fourth. What a package does not have is refused by
name; nothing is copied, padded or packed for it."""

from __future__ import annotations

import functools
import importlib
import os

import torch

from ...... import _lib
from ......torch import attention as own_attention
from ....._logging import logger, switch

NAMES = ("flash_attn", "flash_attn_interface", "flash_attn.cute")
TE_ORDER = "TESSERA_TE_ORDER"
# What a package has beyond scale, causal, window and determinism, under tessera's keywords. The fourth's sink
# has no gradient.
_HAS = {"flash_attn": ("dropout_p", "alibi_slopes", "softcap"), "flash_attn_interface": ("softcap",),
        "flash_attn.cute": ("softcap",)}
_SWITCHES = dict(zip(NAMES, ("NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4")))
_DENSE = (("bshd", "bshd"), ("sbhd", "sbhd"))


def attention(package: str, q, k, v, **keywords):
    """Keywords of tessera.torch.attention -> o in q's layout. The package draws its own dropout."""
    if package not in NAMES:
        raise ValueError(f"FlashAttention: package={package!r}: must be one of {', '.join(NAMES)}")
    options, lacks = _translated(package, q, k, **keywords)
    for name, value in lacks.items():
        raise _lib.Refused(f"FlashAttention: {name}={_shown(value)}: the package {package} cannot; "
                           "tessera's kernels can, so leave package= out")
    functions = _imported(package)
    if keywords["layout"][0] == "thd":
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if options[name] is None:
                raise _lib.Refused(f"FlashAttention: {name}=None: the package {package} needs it")
        return _o(functions.flash_attn_varlen_func(q, k, v, **options))
    if keywords["layout"][0] == "bshd":
        return _o(functions.flash_attn_func(q, k, v, **options))
    views = (x.transpose(0, 1) for x in (q, k, v))
    return _o(functions.flash_attn_func(*views, **options)).transpose(0, 1)


def keeps_te_order() -> bool:
    """TESSERA_TE_ORDER=te, read now: TE's FlashAttention is a package where one is installed."""
    order = os.environ.get(TE_ORDER, "")
    if order not in ("", "te"):
        raise ValueError(f'{TE_ORDER}={order!r}: must be "te", or unset for tessera\'s kernels')
    return order == "te"


def in_te_order(q, k, v, **keywords):
    """Keywords of tessera.torch.attention, by the package that TE would take; by tessera's kernels
    where none has it all."""
    for package in _candidates(q, v):
        lacks = _translated(package, q, k, **keywords)[1]
        if keywords["layout"][0] == "thd":
            lacks |= {name: None for name in ("max_seqlen_q", "max_seqlen_k") if keywords.get(name) is None}
        if not lacks:
            logger.debug("Running FlashAttention of the package %s", package)
            return attention(package, q, k, v, **keywords)
        logger.debug("Disabling the package %s due to %s", package, ", ".join(lacks))
    return own_attention(q, k, v, **keywords)


def _candidates(q, v) -> list[str]:
    """The packages that are installed, switched on, and meant for this GPU, dtype and head dims, as TE
    prefers them: the third on Hopper, else the fourth from there on, else the second."""
    capability = _capability(q)
    if capability < (8, 0) or q.dtype not in (torch.float16, torch.bfloat16):
        return []
    second, third, fourth = NAMES
    order = [third] if capability == (9, 0) else []
    order += [fourth] if capability >= (9, 0) else []
    order = [name for name in (*order, second) if switch(_SWITCHES[name], 1) and _installed(name)]
    largest = max(q.shape[-1], v.shape[-1])
    if largest > 256 or q.shape[-1] % 8 or v.shape[-1] % 8 or q.shape[-1] != v.shape[-1]:
        return []
    return order


def _capability(q) -> tuple[int, int]:
    return torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)


def _translated(package: str, q, k, *, layout, softmax_scale=None, causal=False, window=None, align=None,
                cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                rng_state=None, deterministic=False, **others) -> tuple[dict, dict]:
    """(the package's keywords, those of tessera's that it does not have)."""
    options = {"softmax_scale": softmax_scale, "causal": causal, "deterministic": deterministic}
    if window is not None:
        unbounded = None if package == "flash_attn.cute" else -1
        options["window_size"] = tuple(unbounded if side < 0 else side for side in window)
    given = {name: value for name, value in others.items()
             if value is not None and value is not False and not (name in ("dropout_p", "softcap") and value == 0)}
    options |= {name: given.pop(name) for name in _HAS[package] if name in given}
    if align == "top_left" and (causal or window or others.get("alibi_slopes") is not None) and \
            _lengths_differ(q, k, layout, cu_seqlens_q, cu_seqlens_k):
        given["align"] = "top_left"
    if layout == ("thd", "thd"):
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
                    "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    elif layout not in _DENSE:
        given["layout"] = layout
    return options, given


@functools.lru_cache
def _installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def _imported(package: str):
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _lib.Refused(f"FlashAttention: package={package!r}: is not installed ({error}); leave "
                           "package= out for tessera's kernels") from error


def _lengths_differ(q, k, layout, cu_seqlens_q, cu_seqlens_k) -> bool:
    if layout[0] == "thd":
        return cu_seqlens_q is not cu_seqlens_k
    axis = layout[0].index("s")
    return q.shape[axis] != k.shape[axis]


def _o(result) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _shown(value):
    return repr(value) if isinstance(value, (str, int, float)) else type(value).__name__
