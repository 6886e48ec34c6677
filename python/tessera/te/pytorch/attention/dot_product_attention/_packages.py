# SPDX-License-Identifier: Apache-2.0
"""The public packages of FlashAttention, for callers that ask for one by name, to compare with or to
keep: flash_attn is its second version, flash_attn_interface its third. What a package does not have
is refused by name; nothing is copied, padded or packed for it."""

from __future__ import annotations

import importlib

import torch

from ..... import _lib

NAMES = ("flash_attn", "flash_attn_interface")


def attention(package: str, q, k, v, *, layout, softmax_scale=None, causal=False, window=None,
              align=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
              alibi_slopes=None, dropout_p=0.0, rng_state=None, deterministic=False, **others):
    """Keywords of tessera.torch.attention -> o in q's layout. The package draws its own dropout."""
    if package not in NAMES:
        raise ValueError(f"FlashAttention: package={package!r}: must be one of {', '.join(NAMES)}")
    options = {"softmax_scale": softmax_scale, "causal": causal, "deterministic": deterministic}
    if window is not None:
        options["window_size"] = window
    second = {"dropout_p": dropout_p or None, "alibi_slopes": alibi_slopes}
    if package == "flash_attn":
        options.update({name: x for name, x in second.items() if x is not None})
    else:
        others.update(second)
    if align == "top_left" and (causal or window or alibi_slopes is not None) and \
            _lengths_differ(q, k, layout, cu_seqlens_q, cu_seqlens_k):
        others["align"] = "top_left"
    if layout not in (("bshd", "bshd"), ("sbhd", "sbhd"), ("thd", "thd")):
        others["layout"] = layout
    for name, value in others.items():
        if value is not None and value is not False:
            raise _lib.Refused(f"FlashAttention: {name}={_shown(value)}: the package {package} cannot; "
                               "tessera's kernels can, so leave package= out")
    functions = _imported(package)
    if layout[0] == "thd":
        lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        for name, value in lengths.items():
            if value is None:
                raise _lib.Refused(f"FlashAttention: {name}=None: the package {package} needs it")
        return _o(functions.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **lengths, **options))
    if layout[0] == "bshd":
        return _o(functions.flash_attn_func(q, k, v, **options))
    views = (x.transpose(0, 1) for x in (q, k, v))
    return _o(functions.flash_attn_func(*views, **options)).transpose(0, 1)


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
