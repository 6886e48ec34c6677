# SPDX-License-Identifier: Apache-2.0
"""The functions of ``tessera`` on JAX arrays, for grad, jit, vmap and meshes.

    o      = tessera.jax.attention(q, k, v, causal=True)           # jax.grad, jit, vmap, ... work
    o, lse = tessera.jax.attention(q, k, v, causal=True, return_lse=True)
    print(tessera.jax.explain(q, k, v, causal=True))               # which backend, why

Each shard of a mesh computes its own sequences and heads, without communication. docs/jax.md has the details,
docs/semantics.md says what every call computes.
"""

import jax as _jax

if _jax.__version_info__ < (0, 10):
    raise ImportError(f"tessera.jax: jax {_jax.__version__} is installed; needs jax 0.10 or later")

from .._lib import Refused  # noqa: E402
from .._utilities import alibi_slopes  # noqa: E402
from ._arrays import Slice  # noqa: E402
from ._functions import attention, attention_backward, explain  # noqa: E402
from ._utilities import dropout_mask, merge  # noqa: E402

__all__ = ["attention", "attention_backward", "explain", "merge", "dropout_mask", "alibi_slopes",
           "Refused", "Slice"]
