# SPDX-License-Identifier: Apache-2.0
"""flash_attn's attention functions, version 2.8, computed by tessera: change the import line.

    from tessera.flash_attn import flash_attn_func                     # was: from flash_attn import ...

Names, signatures and return values are flash_attn's. Everything runs on the CPU and in float32 too, for any head
dim and page size. docs/migrating.md says what differs. tessera.flash_attn_interface has version 3's functions.
"""

from .._lib import Refused
from . import bert_padding, layers
from .flash_attn_interface import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func,
                                   flash_attn_varlen_func, flash_attn_varlen_kvpacked_func,
                                   flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache)

__version__ = "2.8.3"  # whose interface this is; programs compare it

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
           "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
           "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "bert_padding", "layers", "Refused"]
