# SPDX-License-Identifier: Apache-2.0
"""xformers.ops' memory-efficient attention, computed by tessera: change the import line.

    import tessera.xformers as xops            # was: import xformers.ops as xops
    from tessera.xformers import fmha          # was: from xformers.ops import fmha

    o = xops.memory_efficient_attention(q, k, v, attn_bias=xops.LowerTriangularMask())

Names, signatures and return values are xformers', on the CPU too. docs/migrating.md says what differs.
"""

from .. import Refused
from . import fmha
from ._stack import get_stack_strides, stack_or_none, unbind
from .fmha import *  # noqa: F403  its __all__
from .fmha.attn_bias import *  # noqa: F403
from .fmha.attn_bias import __all__ as _biases

AttentionMask = fmha.AttentionBias  # as xformers still has it

__all__ = [*fmha.__all__, *_biases, "AttentionMask", "get_stack_strides", "stack_or_none", "unbind", "fmha", "Refused"]
