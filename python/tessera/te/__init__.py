# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's attention, by TransformerEngine's names.

    from tessera.te.pytorch import DotProductAttention    # was: from transformer_engine.pytorch
    from tessera.te.jax.attention import fused_attn       # was: from transformer_engine.jax...
    from tessera.te.paddle import DotProductAttention     # was: from transformer_engine.paddle

Module paths mirror TE's, so you change only the import line; TE itself is neither imported nor needed. These
modules translate TE's calls to tessera.torch, .jax and .paddle, whose meaning is in docs/semantics.md, and decide
nothing about kernels. Only attention is here.
"""

from ._names import missing

# The submodules need their frameworks.
__getattr__ = missing(__name__, lazy=("common", "pytorch", "jax", "paddle", "transformer_engine_paddle"))
