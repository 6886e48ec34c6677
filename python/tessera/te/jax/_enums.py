# SPDX-License-Identifier: Apache-2.0
"""TE-JAX's enumerations, whose values are the NVTE_* numbers."""

from __future__ import annotations

import enum

from .._config import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_Softmax_Type
from .._words import MASKS, mask_of
from ._numbers import NVTE_QKV_Format, NVTE_QKV_Layout, nvte_get_qkv_format
from ._words import error


class AttnBiasType(enum.Enum):
    NO_BIAS = NVTE_Bias_Type.NVTE_NO_BIAS
    PRE_SCALE_BIAS = NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS     # scale * (qk + bias)
    POST_SCALE_BIAS = NVTE_Bias_Type.NVTE_POST_SCALE_BIAS   # scale * qk + bias


class AttnMaskType(enum.Enum):
    NO_MASK = NVTE_Mask_Type.NVTE_NO_MASK
    PADDING_MASK = NVTE_Mask_Type.NVTE_PADDING_MASK
    CAUSAL_MASK = NVTE_Mask_Type.NVTE_CAUSAL_MASK
    PADDING_CAUSAL_MASK = NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK
    CAUSAL_BOTTOM_RIGHT_MASK = NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK

    def is_causal(self) -> bool:
        return "CAUSAL" in self.name

    def is_padding(self) -> bool:
        return "PADDING" in self.name

    def is_bottom_right(self) -> bool:
        return "BOTTOM_RIGHT" in self.name


class AttnSoftmaxType(enum.Enum):
    VANILLA_SOFTMAX = NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    OFF_BY_ONE_SOFTMAX = NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX  # 1 joins the sum
    LEARNABLE_SOFTMAX = NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX    # exp(softmax_offset) joins it

    @classmethod
    def from_str(cls, softmax_type: str) -> AttnSoftmaxType:
        """From "vanilla", "off_by_one" (TE's documentation writes "off-by-one") or "learnable"."""
        words = {"vanilla": cls.VANILLA_SOFTMAX, "off_by_one": cls.OFF_BY_ONE_SOFTMAX,
                 "off-by-one": cls.OFF_BY_ONE_SOFTMAX, "learnable": cls.LEARNABLE_SOFTMAX}
        if softmax_type not in words:
            raise error("softmax_type", repr(softmax_type),
                        'must be "vanilla", "off_by_one" or "learnable"', "AttnSoftmaxType")
        return words[softmax_type]


class QKVFormat(enum.Enum):
    SBHD = NVTE_QKV_Format.NVTE_SBHD
    BSHD = NVTE_QKV_Format.NVTE_BSHD
    THD = NVTE_QKV_Format.NVTE_THD  # [b, s, ..., h, d] too, with several segments in a row


class QKVLayout(enum.Enum):
    """Shapes are [b, s, h, d], of packed arrays [b, s, 3, h, d] and [b, s, 2, h, d], for BSHD and
    for THD."""
    BS3HD = NVTE_QKV_Layout.NVTE_BS3HD
    BSHD_BS2HD = NVTE_QKV_Layout.NVTE_BSHD_BS2HD
    BSHD_BSHD_BSHD = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
    T3HD = NVTE_QKV_Layout.NVTE_T3HD
    THD_T2HD = NVTE_QKV_Layout.NVTE_THD_T2HD
    THD_THD_THD = NVTE_QKV_Layout.NVTE_THD_THD_THD

    def get_qkv_format(self) -> QKVFormat:
        return QKVFormat(nvte_get_qkv_format(self.value))

    def is_qkvpacked(self) -> bool:
        return self in (QKVLayout.BS3HD, QKVLayout.T3HD)

    def is_kvpacked(self) -> bool:
        return self in (QKVLayout.BSHD_BS2HD, QKVLayout.THD_T2HD)

    def is_separate(self) -> bool:
        return self in (QKVLayout.BSHD_BSHD_BSHD, QKVLayout.THD_THD_THD)

    def is_thd(self) -> bool:
        return self.get_qkv_format() == QKVFormat.THD

    def to_qkvpacked(self) -> QKVLayout:
        return QKVLayout.T3HD if self.is_thd() else QKVLayout.BS3HD

    def to_kvpacked(self) -> QKVLayout:
        return QKVLayout.THD_T2HD if self.is_thd() else QKVLayout.BSHD_BS2HD

    def to_separate(self) -> QKVLayout:
        return QKVLayout.THD_THD_THD if self.is_thd() else QKVLayout.BSHD_BSHD_BSHD


class CPStrategy(enum.Enum):
    """How devices that hold parts of a sequence meet."""
    DEFAULT = 0
    ALL_GATHER = 1
    RING = 2


class ReorderStrategy(enum.Enum):
    """Which tokens a device holds, so that causal work is even: with 4 devices and 16 tokens the
    first holds 0 1 14 15 (DualChunkSwap), or 0 4 8 12 (Striped)."""
    DualChunkSwap = 0
    Striped = 1


_MASKS = dict(zip(MASKS, AttnMaskType))


def canonicalize_attn_mask_type(attn_mask_type: str) -> AttnMaskType:
    """The mask of a name, whose words may stand in any order."""
    name = mask_of(attn_mask_type)
    if name not in _MASKS:
        raise error("attn_mask_type", repr(attn_mask_type), "must be one of " +
                    ", ".join(f'"{name}"' for name in _MASKS), "canonicalize_attn_mask_type")
    return _MASKS[name]
