# SPDX-License-Identifier: Apache-2.0
"""What a selection asks tessera's kernels: the call of its parameters, in the keywords that would run, of tensors
without values."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from ......_call import ROWS
from ......_call._description import NEW
from ......_call._prepared import gradient_outputs
from ......torch import _tensors
from ....._words import sides
from .... import _words
from ...._explained import Question
from ...._translate import Call

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_empty = functools.partial(torch.empty, device="meta")


@dataclasses.dataclass(frozen=True)
class Rounded:
    """What FP8 makes of a pass: products of rounded values (`products`), or tensors with a scale each."""
    products: bool = False
    qkv: torch.dtype | None = None
    do: torch.dtype | None = None


def questions(p, forward: Rounded | None = None, backward: Rounded | None = None) -> list[Question]:
    """One for each pass of AttentionParams that will run; a ValueError or Refused where its words make no call."""
    if p.qkv_dtype not in DTYPES:
        raise ValueError(f"qkv_dtype={p.qkv_dtype}: must be float16, bfloat16 or float32")
    if p.pad_between_seqs and "t" not in p.qkv_layout.removeprefix("paged_kv_"):
        raise ValueError(f"pad_between_seqs=True: needs packed sequences; qkv_layout={p.qkv_layout!r} has none")
    call = _call(p)
    given = {name: x for name, x in call.keywords(checked=True).items() if x is not None}
    if p.deterministic is None:
        given["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if p.attention_dropout:
        given |= {"dropout_p": p.attention_dropout, "rng_state": _empty(2, dtype=torch.int64)}
    if call.k.dtype in FP8:
        given |= dict.fromkeys(("k_scale", "v_scale"), _empty(p.num_gqa_groups))
    given |= {"q": call.q, "k": call.k, "v": call.v}
    found = [Question(False, _rounded(given, forward, p.qkv_dtype))]
    if p.is_training if p.requires_backward is None else p.requires_backward:
        grads = ["dq", "dk", "dv"]
        grads += ["dbias"] if "bias" in given and p.core_attention_bias_requires_grad else []
        grads += ["dsink"] if p.softmax_type == "learnable" else []
        rows = dict.fromkeys(ROWS[:3], NEW)
        given = {**given, **rows, **gradient_outputs(_tensors, tuple(grads))}
        del given["return_max_logit"]
        found.append(Question(True, _rounded(given, backward, p.qkv_dtype)))
    return found


def _rounded(given: dict, how: Rounded | None, wide: torch.dtype) -> dict:
    if how is None:
        return given
    if how.products:
        return {**given, "precision": "fp8"}
    scale = _empty(())
    given = {**given, **{name: _like(given[name], how.qkv) for name in "qkv"},
             **dict.fromkeys(("q_scale", "k_scale", "v_scale"), scale)}
    if "do" not in given:
        return {**given, "out_dtype": wide}
    o = _empty((*given["q"].shape[:-1], given["v"].shape[-1]), dtype=wide)
    return {**given, "o": o, "do": _like(o, how.do), "do_scale": scale}


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")


def _call(p) -> Call:
    """p as the call of a module. p.padding="lengths" means that one tensor has the lengths of both sides; where
    max_seqlen_q and max_seqlen_kv differ, each side has its own."""
    q_format, kv_format = _words.formats_of(p.qkv_layout)
    b, sq, sk = (max(n, 1) for n in (p.batch_size, p.max_seqlen_q, p.max_seqlen_kv))
    mask = _words.mask_type(p.attn_mask_type)
    table = None
    if p.qkv_layout.startswith("paged"):
        kv_format = "bshd"
        table = _empty((b, math.ceil(sk / _page_size(p))), dtype=torch.int32)
    slopes, biased = None, p.core_attention_bias_type not in ("no_bias", "alibi")
    hidden = _empty((b, p.num_heads, sq, sk), dtype=torch.bool) if mask == "arbitrary" else None
    lengths = {}
    if p.padding.endswith("lengths"):
        cu = [_empty(b + 1, dtype=torch.int32) for _ in range(4)]
        of_k = 0 if p.padding == "lengths" and sq == sk else 1
        lengths = {"cu_seqlens_q": cu[0], "cu_seqlens_kv": cu[of_k]}
        if p.pad_between_seqs:
            lengths |= {"cu_seqlens_q_padded": cu[2], "cu_seqlens_kv_padded": cu[2 + of_k]}
    else:
        hidden = tuple(_empty((b, 1, 1, s), dtype=torch.bool) for s in (sq, sk))
        hidden = hidden[0] if p.padding == "mask" else hidden
    if p.core_attention_bias_type == "alibi":
        shape = p.alibi_slopes_shape
        slopes = _empty((b, p.num_heads) if shape is not None and len(shape) == 2 else p.num_heads)
    shape = p.core_attention_bias_shape or (1, 2, 2, 2)
    bias = [1 if n == 1 else extent for n, extent in zip(shape, (b, p.num_heads, sq, sk), strict=True)]
    return Call(
        *_qkv(p, q_format, kv_format, (b, sq, sk)), q_format, kv_format, mask,
        sides("causal" in mask, p.window_size), _words.bottom_right(mask, p.bottom_right_diagonal), hidden,
        **lengths, max_seqlen_q=sq, max_seqlen_kv=sk, page_table_k=table, bias_type=p.core_attention_bias_type,
        bias=_empty(bias, dtype=p.qkv_dtype) if biased else None, alibi_slopes=slopes,
        softmax_scale=p.softmax_scale, softmax_type=p.softmax_type,
        softmax_offset=_empty(p.num_heads) if p.softmax_type == "learnable" else None,
        deterministic=p.deterministic, return_max_logit=p.return_max_logit, softcap=p.softcap)


def _qkv(p, q_format: str, kv_format: str, extents) -> list[torch.Tensor]:
    """q, k and v, views of the buffers that a layout names unless their sizes differ."""
    b, sq, sk = extents
    of_q = {"b": b, "s": sq, "t": p.num_tokens_q or b * sq, "h": p.num_heads, "d": p.head_dim_qk}
    of_k = {"b": b, "s": sk, "t": p.num_tokens_kv or b * sk, "h": p.num_gqa_groups, "d": p.head_dim_qk}
    cache = getattr(p.inference_params, "dtype", None)
    dtype = cache if cache in FP8 else p.qkv_dtype
    if p.qkv_layout.startswith("paged"):
        of_k |= {"b": b * math.ceil(sk / _page_size(p)), "s": _page_size(p)}
    one_size = p.head_dim_qk == p.head_dim_v and ("3" not in p.qkv_layout or of_q == of_k)
    parts = p.qkv_layout.split("_")
    if "paged" in parts or len(parts) == 3 or not one_size:
        parts = [q_format, kv_format, kv_format]
    found = []
    for part in parts:
        side = of_k if found else of_q
        shape = [int(axis) if axis.isdigit() else side[axis] for axis in part]
        if len(found) == 2:
            shape[-1] = p.head_dim_v
        x = _empty(shape, dtype=dtype if found else p.qkv_dtype)
        packed = next((i for i, axis in enumerate(part) if axis.isdigit()), None)
        found += [x] if packed is None else x.unbind(packed)
    return found


def _page_size(p) -> int:
    return p.inference_params.page_size or p.inference_params.max_sequence_length
