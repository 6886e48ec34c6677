# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's attention, by TransformerEngine's names.

    from tessera.te.pytorch import DotProductAttention    # was: from transformer_engine.pytorch

Module paths mirror TE's, so that the import line is the migration; TE itself is neither imported
nor needed. Everything below translates to tessera.torch, whose meaning is docs/semantics.md, and
decides nothing about kernels. What is not attention is not here.
"""

import importlib

from ._names import missing

_missing = missing(__name__)


def __getattr__(name: str):
    if name == "pytorch":  # imported when it is used, as it needs PyTorch
        return importlib.import_module(f"{__name__}.pytorch")
    return _missing(name)
