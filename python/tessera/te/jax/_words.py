# SPDX-License-Identifier: Apache-2.0
"""What is said about TE-JAX's names, words and arguments."""

from __future__ import annotations

import functools
import numbers

import jax

from ..._lib import Refused
from .. import _names

_DENSE = "use flax.linen's, or TransformerLayer"
_SCORES = "a bias, a mask, a window or a sink may do"
_FP8 = "pass 16-bit arrays"

# TE's attention for JAX that tessera does not have yet, and what to use meanwhile.
_LATER = {
    **dict.fromkeys(("DenseGeneral", "LayerNorm", "LayerNormDenseGeneral", "LayerNormMLP",
                     "module"), _DENSE),
    **dict.fromkeys(("flex_attention", "validate_fused_attn_score_mod",
                     "make_fused_attn_score_mod_config"), _SCORES),
    **dict.fromkeys(("QuantizerFactory", "QuantizerSet", "get_quantize_config_with_recipe", "noop_quantizer_set"),
                    _FP8),
}

missing = functools.partial(_names.missing, later=_LATER)


def error(name: str, value, rule: str, operation: str = "fused_attn") -> ValueError:
    return ValueError(f"{operation}: {name}={value}: {rule}")


def later(name: str, value, feature: str, instead: str, operation: str = "fused_attn") -> Refused:
    """What is said of a part of TE that is not here yet."""
    return Refused(f"{operation}: {name}={value}: tessera.te does not have {feature} yet; "
                   f"{instead}")


def no_score_mod(operation: str, **given):
    """Refuses TE's callbacks that build cuDNN graphs."""
    for name, value in given.items():
        if value is not None:
            raise later(name, getattr(value, "__name__", type(value).__name__), "score_mod",
                        _SCORES, operation)


def enum_member(name: str, value, kind, operation: str = "fused_attn"):
    """`value`, or the member of `kind` whose NVTE_* number it is."""
    try:
        return kind(value)
    except ValueError:
        members = ", ".join(str(member) for member in kind)
        raise error(name, repr(value), f"must be one of {members}", operation) from None


def probability(value) -> float:
    if isinstance(value, jax.core.Tracer) or not isinstance(value, numbers.Real) or \
            not 0 <= value < 1:
        raise error("dropout_probability", value, "must be a Python number in [0, 1)")
    return float(value)


def window(value) -> tuple[int, int]:
    """(left, right), -1 for unbounded: TE takes any negative number for it, and None."""
    if value is None:
        return -1, -1
    fits = isinstance(value, (tuple, list)) and len(value) == 2 and all(
        isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in value)
    if not fits:
        raise error("window_size", value, "must be a pair (left, right) of integers, or None")
    left, right = (max(int(n), -1) for n in value)
    return left, right
