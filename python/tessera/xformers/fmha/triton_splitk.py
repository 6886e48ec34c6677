# SPDX-License-Identifier: Apache-2.0
"""xformers' names of the passes of triton_splitK, and its call with keys and values in fp8."""

from __future__ import annotations

import dataclasses

import torch

from .common import AttentionBwOpBase, AttentionFwOpBase, Inputs

__all__ = ["BwOp", "FwOp", "FwOp_Map", "FwOp_S1", "FwOp_S2", "FwOp_S4", "FwOp_S8", "FwOp_S16", "FwOp_S32", "FwOp_S64",
           "FwOp_S128", "InputsFp8"]


@dataclasses.dataclass
class InputsFp8(Inputs):
    """Inputs whose key and value are int32 [..., d / 4]: the bytes of e4m3 columns. k_fp8_scale_shift and
    v_fp8_scale_shift, int32 [b, s, h] or [b, s, g, h], have an fp16 scale in the low half and a shift in the high one:
    a value is column · scale + shift. With a packed or paged bias b is 1, as key's is. FwOp.apply takes it, and
    fmha._memory_efficient_attention_forward."""
    k_fp8_scale_shift: torch.Tensor | None = None
    v_fp8_scale_shift: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of query, key, value and the scales."""
        given = [x for x in self.scale_shift if x is not None]
        return super().nbytes + sum(x.untyped_storage().nbytes() for x in given)

    @property
    def scale_shift(self):
        return self.k_fp8_scale_shift, self.v_fp8_scale_shift


class FwOp(AttentionFwOpBase):
    """The forward pass. Keys of 4 bits have as many groups as their shape says, whatever NUM_GROUPS is."""
    NAME = "triton_splitKF"
    NUM_GROUPS = 1
    NUM_GROUPS_VALUES = (1, 2, 4, 8)
    SPLIT_K: int | None = None

    @classmethod
    def get_operator(cls, splitk: int, *, block_m=None, block_n=None, num_warps=None, num_stages=None,
                     split_k_early_exit=None) -> type[AttentionFwOpBase]:
        """xformers' name of this pass in `splitk` parts, which have no effect, nor have the other words."""
        return type(f"FwOp_S{splitk}", (cls,), {"NAME": f"triton_splitK{splitk}", "SPLIT_K": splitk})


class BwOp(AttentionBwOpBase):
    """The backward pass, which keys in codes do not have."""
    NAME = "triton_splitKB"


FwOp_Map = {parts: FwOp.get_operator(parts) for parts in (1, 2, 4, 8, 16, 32, 48, 64, 72, 80, 96, 112, 128)}
FwOp_S1, FwOp_S2, FwOp_S4, FwOp_S8, FwOp_S16, FwOp_S32, FwOp_S64, FwOp_S128 = (FwOp_Map[2**i] for i in range(8))
