# SPDX-License-Identifier: Apache-2.0
"""The parts of TE's compiled module for Paddle that callers of attention use: its enumerations, which backend a
problem would get, and lengths from a mask.

    from tessera.te import transformer_engine_paddle as tex     # was: from transformer_engine
"""

from __future__ import annotations

import enum
import functools

import paddle
from paddle.static import InputSpec

from .._lib import Refused
from ..paddle import explain
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


_DTYPES = {DType.kFloat32: "float32", DType.kFloat16: "float16", DType.kBFloat16: "bfloat16"}


def get_nvte_qkv_layout(qkv_layout: str) -> NVTE_QKV_Layout:
    """The member that a name like "bshd_bshd_bshd" stands for; ValueError if there is none."""
    if qkv_layout not in _LAYOUTS:
        raise ValueError(f"tessera.te.get_nvte_qkv_layout: qkv_layout={qkv_layout!r}: must be one of "
                         + ", ".join(_LAYOUTS))
    return NVTE_QKV_Layout(_LAYOUTS.index(qkv_layout))


def get_fused_attn_backend(q_dtype, kv_dtype, qkv_layout, bias_type, attn_mask_type, dropout: float,
                           num_attn_heads: int, num_gqa_groups: int, max_seqlen_q: int,
                           max_seqlen_kv: int, head_size: int) -> NVTE_Fused_Attn_Backend:
    """NVTE_F16_arbitrary_seqlen where tessera.paddle.explain names a backend for the forward call of one sequence on
    Paddle's device, else NVTE_No_Backend. The lengths of a padding mask are tensors in that call."""
    name = _DTYPES.get(q_dtype)
    can = name is not None and kv_dtype == q_dtype and _has_backend(
        name, _words.BIASES[bias_type], _words.MASKS[attn_mask_type], dropout, (max_seqlen_q, num_attn_heads),
        (max_seqlen_kv, num_gqa_groups), head_size, paddle.get_device())
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen if can else NVTE_Fused_Attn_Backend.NVTE_No_Backend


@functools.lru_cache(maxsize=512)
def _has_backend(dtype: str, bias_type: str, mask: str, dropout: float, of_q: tuple[int, int], of_kv: tuple[int, int],
                 head_size: int, device: str) -> bool:
    """of_q and of_kv are the longest sequence and the heads of each side; `device` is paddle.get_device()."""
    q, k, v = (InputSpec([1, *side, head_size], dtype) for side in (of_q, of_kv, of_kv))
    bias = InputSpec([1, of_q[1], of_q[0], of_kv[0]], dtype)
    given = {**scores(bias_type, bias, mask), "dropout_p": dropout, "return_lse": True}
    if mask == "padding":
        given |= {"seqlens_q": InputSpec([1], "int32"), "seqlens_k": InputSpec([1], "int32")}
    try:
        return explain(q, k, v, **given).backend is not None
    except (ValueError, Refused):
        return False


def scores(bias_type: str, bias, mask: str) -> dict:
    """Keywords of tessera.paddle.attention that bias_type and a mask of _words.MASKS[:3] say. Padding says none: the
    caller has a mask or lengths."""
    return _words.bias(bias_type, bias) | (_words.band(mask) if mask == "causal" else {})


def mask_to_cu_seqlens(mask, q_cu_seqlens, kv_cu_seqlens, q_seqlen: int, kv_seqlen: int,
                       need_kv: bool):
    """Writes where each sequence would begin if it were packed, from a mask [b, 1, q, kv], True =
    hidden, that leaves each sequence's first queries and keys."""
    for seqlens, lengths in ((q_cu_seqlens, mask[:, 0, :, :1]), (kv_cu_seqlens, mask[:, 0, :1, :])):
        if seqlens is not None:
            seen = paddle.logical_not(lengths).astype("int32").sum([1, 2])
            paddle.assign(paddle.concat([paddle.zeros([1], "int32"),
                                         paddle.cumsum(seen).astype("int32")]), seqlens)
