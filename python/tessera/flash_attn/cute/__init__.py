# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn.cute, FlashAttention 4, computed by tessera: change the import line.

    from tessera.flash_attn.cute import flash_attn_func      # was: from flash_attn.cute import flash_attn_func
"""

from .interface import flash_attn_combine, flash_attn_func, flash_attn_varlen_func, get_scheduler_metadata

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_combine", "get_scheduler_metadata"]
