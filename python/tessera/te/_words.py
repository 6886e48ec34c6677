# SPDX-License-Identifier: Apache-2.0
"""TE's words for attention, which every framework shares: their numbers, those of include/tessera_nvte.h, and
what a mask, a bias and a softmax mean to tessera."""

from __future__ import annotations

import enum
import re
import sys

# Each in the order of its numbers from 0.
MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
         "padding_causal_bottom_right")
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAXES = ("vanilla", "off-by-one", "learnable")
FORMATS = ("sbhd", "bshd", "thd", "bshd_2sbhd", "sbhd_2bshd", "thd_2bshd", "thd_2sbhd", "bhsd")
LAYOUTS = ("sb3hd", "sbh3d", "sbhd_sb2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd",
           "bs3hd", "bsh3d", "bshd_bs2hd", "bshd_bsh2d", "bshd_bshd_bshd",
           "t3hd", "th3d", "thd_t2hd", "thd_th2d", "thd_thd_thd",
           "sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd",
           "paged_kv_bshd_bshd_bshd", "paged_kv_bshd_sbhd_sbhd", "paged_kv_sbhd_bshd_bshd",
           "paged_kv_sbhd_sbhd_sbhd", "paged_kv_thd_bshd_bshd", "paged_kv_thd_sbhd_sbhd",
           "bhsd_bhsd_bhsd")


class DType(enum.IntEnum):
    """TE's tags of dtypes. Callers of PyTorch's fused_attn_fwd pass one as fake_dtype, where the
    dtype of q speaks for itself."""
    kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 = 0, 2, 4, 5, 6, 7, 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype) -> DType:
        """From a member or a number."""
        return cls(int(dtype))


class ScalingMode(enum.IntEnum):
    """TE's NVTEScalingMode. Attention has the first, which is that of 16-bit tensors too."""
    NVTE_DELAYED_TENSOR_SCALING, NVTE_MXFP8_1D_SCALING, NVTE_BLOCK_SCALING_1D = 0, 1, 2
    NVTE_BLOCK_SCALING_2D, NVTE_NVFP4_1D_SCALING, NVTE_INVALID_SCALING = 3, 4, 100


def numbers(name: str, words, given=None, suffix: str = "", unset=False) -> type[enum.IntEnum]:
    """An enumeration NVTE_* of those of the words that are given; `suffix` ends the names that lack it, and
    `unset` adds the number behind the words, that of none."""
    members = {}
    for number, word in enumerate(words):
        if given is None or word in given:
            spelled = word.replace("-", "_").upper().replace("PAGED_KV", "Paged_KV")
            members["NVTE_" + spelled.removesuffix(suffix) + suffix] = number
    if unset:
        members[f"{name}_NOT_SET"] = len(words)
    return enum.IntEnum(name, members, module=sys._getframe(1).f_globals["__name__"])  # for pickle


_SPELLINGS = {frozenset(name.split("_")): name for name in (*MASKS, "arbitrary")}


def mask_of(text) -> str | None:
    """"causal_padding", "causal,padding" and "padding_causal" are one; None: no mask is called so."""
    return _SPELLINGS.get(frozenset(re.split("[_,]", text))) if isinstance(text, str) else None


def band(mask: str, left: int = -1, right: int = -1, bottom_right: bool | None = None) -> dict:
    """causal, window and align of a mask. None: its name says where the diagonal ends, the top left unless that has
    bottom_right. A window's -1 is unbounded."""
    causal = "causal" in mask
    if bottom_right is None:
        bottom_right = mask.endswith("bottom_right")
    given = {"causal": causal, "align": "bottom_right" if bottom_right else "top_left"}
    if left >= 0 or right >= 0 and not causal:
        given["window"] = left, 0 if causal else right
    return given


def sides(causal: bool, window=None) -> tuple[int, int]:
    """The window that causal and window of a band are together. -1 is unbounded, and None is (-1, -1)."""
    left, right = window or (-1, -1)
    return left, 0 if causal else right


def visible(distance, causal: bool, window=None):
    """What a band shows, as booleans, in the operations of any array library. distance is i + shift - j of query i
    and key j; shift is where the diagonal begins."""
    left, right = sides(causal, window)
    seen = distance == distance  # all
    if left >= 0:
        seen = seen & (distance <= left)
    if right >= 0:
        seen = seen & (distance >= -right)
    return seen


def bias(kind: str, array) -> dict:
    """bias and bias_at of a kind of bias. "no_bias" and "alibi" have none; slopes say the latter."""
    return {"bias": array, "bias_at": kind.removesuffix("_bias")} if kind in BIASES[1:3] else {}


def sink(kind: str, offset=None) -> dict:
    """sink of a kind of softmax. Without an offset "off-by-one" has a sink of 0, which learns nothing."""
    return {} if kind == "vanilla" else {"sink": "off_by_one" if offset is None else offset}
