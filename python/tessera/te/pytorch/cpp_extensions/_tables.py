# SPDX-License-Identifier: Apache-2.0
"""TE's enumerations, with TE's numbers."""

from __future__ import annotations

import enum

from .._words import LAYOUTS
from ..constants import SoftmaxTypes


class FusedAttnBackend(enum.IntEnum):
    """F16_max512 and F16_arbitrary_seqlen are both tessera's kernels."""
    No_Backend = -1
    F16_max512 = 0
    F16_arbitrary_seqlen = 1
    FP8 = 2
    F16_max512_seqlen = 0
    F16_arbitrary = 1

    @classmethod
    def cast(cls, value) -> FusedAttnBackend:
        """From a member, its name or its number."""
        return cls[value] if isinstance(value, str) else cls(int(value))


_FORMATS = ("sbhd", "bshd", "thd", "bshd_2sbhd", "sbhd_2bshd", "thd_2bshd", "thd_2sbhd", "bhsd")
_BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
_MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
          "padding_causal_bottom_right")


def _table(name: str, words) -> dict[str, enum.IntEnum]:
    members = enum.IntEnum(name, [(f"NVTE_{word.replace('-', '_').upper()}", number)
                                  for number, word in enumerate(words)])
    return dict(zip(words, members))


QKVLayout = _table("NVTE_QKV_Layout", LAYOUTS)
QKVFormat = _table("NVTE_QKV_Format", _FORMATS)
AttnBiasType = _table("NVTE_Bias_Type", _BIASES)
AttnMaskType = _table("NVTE_Mask_Type", _MASKS)
SoftmaxType = _table("NVTE_Softmax_Type", SoftmaxTypes)

# Where an FP8 tensor's scale stands among those of TE's GEMMs.
META_QKV, META_O, META_S = 2, 3, 8
META_DQKV, META_DO, META_DP = 0, 3, 5
