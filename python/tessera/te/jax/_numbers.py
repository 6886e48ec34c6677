# SPDX-License-Identifier: Apache-2.0
"""TE's NVTE_* numbers for JAX, and the targets of its custom calls, which all else here stands on."""

from __future__ import annotations

import enum

from ...jax import _binding
from .._words import FORMATS, LAYOUTS, numbers

# Targets of the custom calls: one handler of libtessera runs both passes.
FusedAttnForwardFFI = FusedAttnBackwardFFI = _binding.ATTENTION

NVTE_QKV_Format = numbers("NVTE_QKV_Format", FORMATS, FORMATS[:3], unset=True)
NVTE_QKV_Layout = numbers("NVTE_QKV_Layout", LAYOUTS, (
    "bs3hd", "bshd_bs2hd", "bshd_bshd_bshd", "t3hd", "thd_t2hd", "thd_thd_thd"), unset=True)
NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", [
    ("NVTE_No_Backend", -1), ("NVTE_F16_arbitrary_seqlen", 1), ("NVTE_FP8", 2)])


def nvte_get_qkv_format(qkv_layout: NVTE_QKV_Layout) -> NVTE_QKV_Format:
    packed = NVTE_QKV_Layout(qkv_layout) >= NVTE_QKV_Layout.NVTE_T3HD
    return NVTE_QKV_Format.NVTE_THD if packed else NVTE_QKV_Format.NVTE_BSHD
