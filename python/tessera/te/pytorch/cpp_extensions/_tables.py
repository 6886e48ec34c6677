# SPDX-License-Identifier: Apache-2.0
"""TE's enumerations, with TE's numbers."""

from __future__ import annotations

import enum

from ... import _words


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


def _table(name: str, words, suffix: str = "") -> dict[str, enum.IntEnum]:
    return dict(zip(words, _words.numbers(name, words, suffix=suffix)))


QKVLayout = _table("NVTE_QKV_Layout", _words.LAYOUTS)
QKVFormat = _table("NVTE_QKV_Format", _words.FORMATS)
AttnBiasType = _table("NVTE_Bias_Type", _words.BIASES)
AttnMaskType = _table("NVTE_Mask_Type", _words.MASKS, "_MASK")
SoftmaxType = _table("NVTE_Softmax_Type", _words.SOFTMAXES, "_SOFTMAX")

# Where an FP8 tensor's scale stands among those of TE's GEMMs.
META_QKV, META_O, META_S = 2, 3, 8
META_DQKV, META_DO, META_DP = 0, 3, 5
