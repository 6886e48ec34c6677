# SPDX-License-Identifier: Apache-2.0
"""The functions of ``tessera`` on PyTorch tensors, with autograd.

    o      = tessera.torch.attention(q, k, v, causal=True)         # o.sum().backward() works
    o, lse = tessera.torch.attention(q, k, v, causal=True, return_lse=True)
    print(tessera.torch.explain(q, k, v, causal=True))             # which backend, why

Tensors of any strides are used in place. The functions work under torch.compile (without graph breaks), autocast,
checkpointing and vmap; docs/torch.md has the details, docs/semantics.md says what every call computes.
"""

import contextlib as _contextlib

from .._lib import Refused
from . import _later
from . import _registry  # noqa: F401 - lists the name
from ._cache import append_kv, rotate
from ._functions import attention, attention_backward, dropout_mask, explain, merge
from ._prefix import attention_shared_prefix, explain_shared_prefix
from ._sdpa import patch_sdpa, scaled_dot_product_attention

__all__ = ["attention", "attention_backward", "merge", "explain", "dropout_mask", "rotate",
           "append_kv", "attention_shared_prefix", "explain_shared_prefix",
           "scaled_dot_product_attention", "patch_sdpa", "Refused"]


def _register_strategies():
    with _contextlib.suppress(ImportError):  # of a PyTorch that has them elsewhere: its error then says what it lacks
        from . import _sharding
        _sharding.register()


_later.when_imported("torch.distributed.tensor", _register_strategies)
