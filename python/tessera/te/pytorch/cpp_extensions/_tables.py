# SPDX-License-Identifier: Apache-2.0
"""TE's enumerations, with TE's numbers."""

from __future__ import annotations

import enum

from ... import _words
from ..._config import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type


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
        member = _BACKENDS.get(value if isinstance(value, str) else int(value))
        return cls(value) if member is None else member  # cls(...) is an error here


# Looked up, because Dynamo cannot make a member by its number on Python 3.12 and later (PyTorch 2.11).
_BACKENDS = {**FusedAttnBackend.__members__, **{int(member): member for member in FusedAttnBackend}}

QKVLayout = dict(zip(_words.LAYOUTS, NVTE_QKV_Layout))
QKVFormat = dict(zip((*_words.FORMATS, None), NVTE_QKV_Format))
AttnBiasType = dict(zip(_words.BIASES, NVTE_Bias_Type))
AttnMaskType = dict(zip(_words.MASKS, NVTE_Mask_Type))
SoftmaxType = dict(zip(_words.SOFTMAXES, NVTE_Softmax_Type))

# Where an FP8 tensor's scale stands among those of TE's GEMMs.
META_QKV, META_O, META_S = 2, 3, 8
META_DQKV, META_DO, META_DP = 0, 3, 5
