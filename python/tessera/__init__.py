# SPDX-License-Identifier: Apache-2.0
"""tessera: dot-product attention, forward and backward, on NumPy arrays.

    o      = tessera.attention(q, k, v, causal=True)
    o, lse = tessera.attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = tessera.attention_backward(do, q, k, v, o, lse, causal=True)
    print(tessera.explain(q, k, v, causal=True))                               # which backend, why

Arrays are NumPy's; bf16 and fp8 need the package ml_dtypes. docs/semantics.md says what every call computes. The
command line is `python -m tessera --help`.
"""

import importlib as _importlib
import typing as _typing

from ._attention import Gradients, attention, attention_backward, set_num_threads
from ._cache import append_kv, rotate
from ._explain import Explanation, explain
from ._lib import Refused, backends, version as _version
from ._rope import rope_table
from ._utilities import alibi_slopes, dropout_mask, merge

__version__ = _version().decode()
__all__ = [
    "attention", "attention_backward", "explain", "dropout_mask", "merge", "backends",
    "set_num_threads", "alibi_slopes", "rotate", "rope_table", "append_kv", "Refused", "Gradients", "Explanation",
    "__version__",
]

_FRONT_ENDS = ("torch", "jax", "paddle", "hf", "flash_attn", "xformers", "te")


def _front_end(name: str):
    """The module of a front end, imported when `tessera.torch` and its like are first written."""
    if name not in _FRONT_ENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _importlib.import_module(f"{__name__}.{name}")


if not _typing.TYPE_CHECKING:  # where it would give every name a type
    __getattr__ = _front_end
