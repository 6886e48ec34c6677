# SPDX-License-Identifier: Apache-2.0
"""The parts of TE's compiled module for Paddle that callers of attention use: its enumerations, which backend a
problem would get, and lengths from a mask.

    from tessera.te import transformer_engine_paddle as tex     # was: from transformer_engine
"""

from __future__ import annotations

import enum
import functools

import paddle

from .. import _explain
from . import _words
from ._names import missing

__getattr__ = missing(__name__)

_LAYOUTS = _words.LAYOUTS[:15]


class DType(enum.IntEnum):
    kByte, kInt32, kInt64, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 = range(8)


NVTE_Bias_Type = _words.numbers("NVTE_Bias_Type", _words.BIASES[:3])
NVTE_Mask_Type = _words.numbers("NVTE_Mask_Type", _words.MASKS[:3], suffix="_MASK")
NVTE_QKV_Layout = _words.numbers("NVTE_QKV_Layout", _LAYOUTS)


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    """The first two are both tessera's kernels."""
    NVTE_No_Backend, NVTE_F16_max512_seqlen, NVTE_F16_arbitrary_seqlen, NVTE_FP8 = range(-1, 3)


_CASES = {DType.kFloat32: "fp32", DType.kFloat16: "fp16", DType.kBFloat16: "bf16"}


def get_nvte_qkv_layout(qkv_layout: str) -> NVTE_QKV_Layout:
    """The member that a name like "bshd_bshd_bshd" stands for; ValueError if there is none."""
    if qkv_layout not in _LAYOUTS:
        raise ValueError(f"tessera.te.get_nvte_qkv_layout: qkv_layout={qkv_layout!r}: must be one of "
                         + ", ".join(_LAYOUTS))
    return NVTE_QKV_Layout(_LAYOUTS.index(qkv_layout))


def get_fused_attn_backend(q_dtype, kv_dtype, qkv_layout, bias_type, attn_mask_type, dropout: float,
                           num_attn_heads: int, num_gqa_groups: int, max_seqlen_q: int,
                           max_seqlen_kv: int, head_size: int) -> NVTE_Fused_Attn_Backend:
    """NVTE_F16_arbitrary_seqlen where tessera.explain names a backend for the problem on this machine,
    else NVTE_No_Backend."""
    name = _CASES.get(q_dtype)
    if name is None or kv_dtype != q_dtype:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend
    words = [f"fwd {name} b=1 sq={max_seqlen_q} sk={max_seqlen_kv} hq={num_attn_heads} "
             f"hk={num_gqa_groups} d={head_size}"]
    if attn_mask_type == NVTE_Mask_Type.NVTE_CAUSAL_MASK:
        words.append("causal align=top_left")
    if bias_type != NVTE_Bias_Type.NVTE_NO_BIAS:
        pre = bias_type == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS
        words.append(f"bias={'pre' if pre else 'post'}")
    if dropout:
        words.append(f"dropout={dropout}")
    has_backend = _has_backend(" ".join(words), _device())
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen if has_backend else \
        NVTE_Fused_Attn_Backend.NVTE_No_Backend


@functools.lru_cache(maxsize=512)
def _has_backend(case: str, device: str) -> bool:
    return _explain.explain(case, device=device).backend is not None


def _device() -> str:
    if not paddle.get_device().startswith("gpu"):
        return "cpu"
    major, minor = paddle.device.cuda.get_device_capability()
    return f"sm{major}{minor}" if f"sm{major}{minor}" in _explain._DEVICES else f"sm{major}0"


def mask_to_cu_seqlens(mask, q_cu_seqlens, kv_cu_seqlens, q_seqlen: int, kv_seqlen: int,
                       need_kv: bool):
    """Writes where each sequence would begin if it were packed, from a mask [b, 1, q, kv], True =
    hidden, that leaves each sequence's first queries and keys."""
    for seqlens, lengths in ((q_cu_seqlens, mask[:, 0, :, :1]), (kv_cu_seqlens, mask[:, 0, :1, :])):
        if seqlens is not None:
            seen = paddle.logical_not(lengths).astype("int32").sum([1, 2])
            paddle.assign(paddle.concat([paddle.zeros([1], "int32"),
                                         paddle.cumsum(seen).astype("int32")]), seqlens)
