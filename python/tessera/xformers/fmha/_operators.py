# SPDX-License-Identifier: Apache-2.0
"""xformers' names of kernels. op= takes them and they have no effect: tessera chooses a backend by itself."""

from __future__ import annotations

import types


class AttentionOpBase:
    """A pass of one of xformers' kernels, by its name."""
    NAME = ""

    @classmethod
    def is_available(cls) -> bool:
        return True


class AttentionFwOpBase(AttentionOpBase):
    """A forward pass."""


class AttentionBwOpBase(AttentionOpBase):
    """A backward pass."""


AttentionOp = tuple  # (forward or None, backward or None)


def _kernel(name: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(FwOp=type("FwOp", (AttentionFwOpBase,), {"NAME": f"{name}F"}),
                                 BwOp=type("BwOp", (AttentionBwOpBase,), {"NAME": f"{name}B"}))


KERNELS = ck, ck_splitk, cutlass, cutlass_blackwell, flash, flash3, triton_splitk = tuple(map(_kernel, (
    "ck", "ck_splitK", "cutlass", "cutlass_blackwell", "fa2", "fa3", "triton_splitK")))
ALL_FW_OPS = [kernel.FwOp for kernel in KERNELS]
ALL_BW_OPS = [kernel.BwOp for kernel in KERNELS]
MemoryEfficientAttentionCutlassOp = cutlass.FwOp, cutlass.BwOp
MemoryEfficientAttentionCutlassBlackwellOp = cutlass_blackwell.FwOp, cutlass_blackwell.BwOp
MemoryEfficientAttentionCutlassFwdFlashBwOp = cutlass.FwOp, flash.BwOp
MemoryEfficientAttentionFlashAttentionOp = flash.FwOp, flash.BwOp
MemoryEfficientAttentionCkOp = ck.FwOp, ck.BwOp
MemoryEfficientAttentionSplitKCkOp = ck_splitk.FwOp, ck.BwOp

__all__ = ["AttentionOp", "AttentionOpBase", "AttentionFwOpBase", "AttentionBwOpBase", "ALL_FW_OPS", "ALL_BW_OPS",
           "MemoryEfficientAttentionCutlassOp", "MemoryEfficientAttentionCutlassBlackwellOp",
           "MemoryEfficientAttentionCutlassFwdFlashBwOp", "MemoryEfficientAttentionFlashAttentionOp",
           "MemoryEfficientAttentionCkOp", "MemoryEfficientAttentionSplitKCkOp", "ck", "ck_splitk", "cutlass",
           "cutlass_blackwell", "flash", "flash3", "triton_splitk"]


def is_known(op) -> bool:
    """Whether op= names passes that are here: one, or a pair of which either may be None."""
    ops = op if isinstance(op, tuple) else (op,)
    return all(each is None or isinstance(each, type) and issubclass(each, AttentionOpBase) for each in ops)
