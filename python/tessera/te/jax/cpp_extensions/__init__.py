# SPDX-License-Identifier: Apache-2.0
"""TE's functions without gradients of their own."""

from .._words import missing
from . import attention
from .attention import (FusedAttnBwdPrimitive, FusedAttnFwdPrimitive, FusedAttnHelper, FusedAttnParams,
                        fused_attn_bwd, fused_attn_fwd)

__all__ = ["FusedAttnBwdPrimitive", "FusedAttnFwdPrimitive", "FusedAttnHelper", "FusedAttnParams", "attention",
           "fused_attn_bwd", "fused_attn_fwd"]
__getattr__ = missing(__name__)
