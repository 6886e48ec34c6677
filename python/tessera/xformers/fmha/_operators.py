# SPDX-License-Identifier: Apache-2.0
"""xformers' names of kernels. op= takes them and they have no effect: tessera chooses a backend by itself. Each has
`supports`, `not_supported_reasons` and `apply` of tessera's one attention."""

from __future__ import annotations

import sys
import types

from . import triton_splitk
from .common import AttentionBwOpBase, AttentionFwOpBase, AttentionOp, AttentionOpBase, Context, Gradients, Inputs


def _kernel(file: str, name: str) -> types.ModuleType:
    """A module with a kernel's two passes, which programs import from too."""
    module = types.ModuleType(f"{__package__}.{file}", f"xformers' names of the passes of {name}.")
    for passed, base in (("FwOp", AttentionFwOpBase), ("BwOp", AttentionBwOpBase)):
        setattr(module, passed, type(passed, (base,), {"NAME": name + passed[0], "__module__": module.__name__}))
    return sys.modules.setdefault(module.__name__, module)


ck, ck_splitk, cutlass, cutlass_blackwell, flash, flash3 = (
    _kernel("ck", "ck"), _kernel("ck_splitk", "ck_splitK"), _kernel("cutlass", "cutlass"),
    _kernel("cutlass_blackwell", "cutlass_blackwell"), _kernel("flash", "fa2"), _kernel("flash3", "fa3"))
KERNELS = ck, ck_splitk, cutlass, cutlass_blackwell, flash, flash3, triton_splitk
flash3.FwOp_KVSplit = type("FwOp_KVSplit", (flash3.FwOp,), {"NAME": "fa3F_splitKV", "__module__": flash3.__name__})
ALL_FW_OPS = [kernel.FwOp for kernel in KERNELS]
ALL_BW_OPS = [kernel.BwOp for kernel in KERNELS]
MemoryEfficientAttentionCutlassOp = cutlass.FwOp, cutlass.BwOp
MemoryEfficientAttentionCutlassBlackwellOp = cutlass_blackwell.FwOp, cutlass_blackwell.BwOp
MemoryEfficientAttentionCutlassFwdFlashBwOp = cutlass.FwOp, flash.BwOp
MemoryEfficientAttentionFlashAttentionOp = flash.FwOp, flash.BwOp
MemoryEfficientAttentionCkOp = ck.FwOp, ck.BwOp
MemoryEfficientAttentionSplitKCkOp = ck_splitk.FwOp, ck.BwOp

__all__ = ["AttentionOp", "AttentionOpBase", "AttentionFwOpBase", "AttentionBwOpBase", "Context", "Gradients", "Inputs",
           "ALL_FW_OPS", "ALL_BW_OPS", "MemoryEfficientAttentionCutlassOp",
           "MemoryEfficientAttentionCutlassBlackwellOp", "MemoryEfficientAttentionCutlassFwdFlashBwOp",
           "MemoryEfficientAttentionFlashAttentionOp",
           "MemoryEfficientAttentionCkOp", "MemoryEfficientAttentionSplitKCkOp", "ck", "ck_splitk", "cutlass",
           "cutlass_blackwell", "flash", "flash3", "triton_splitk"]


def is_known(op) -> bool:
    """Whether op= names passes that are here: one, or a pair of which either may be None."""
    ops = op if isinstance(op, tuple) else (op,)
    return all(each is None or isinstance(each, type) and issubclass(each, AttentionOpBase) for each in ops)
