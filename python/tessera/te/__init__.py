# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's attention, by TransformerEngine's names.

    from tessera.te.pytorch import DotProductAttention    # was: from transformer_engine.pytorch
    from tessera.te.jax.attention import fused_attn       # was: from transformer_engine.jax...
    from tessera.te.paddle import DotProductAttention     # was: from transformer_engine.paddle

Module paths mirror TE's, so that the import line is the migration; TE itself is neither imported
nor needed. Everything below translates to tessera.torch, .jax and .paddle, whose meaning is
docs/semantics.md, and decides nothing about kernels. What is not attention is not here.
"""

from ._names import missing

# The submodules need their frameworks.
__getattr__ = missing(__name__, lazy=("common", "pytorch", "jax", "paddle", "transformer_engine_paddle"))
