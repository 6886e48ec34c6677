# SPDX-License-Identifier: Apache-2.0
"""What is said about names of transformer_engine.paddle that are not here."""

from .. import _names

_LAYERS = "use paddle.nn's"
_FP8 = "pass 16-bit tensors; fp8 keys and values run in tessera.paddle.attention"

LATER = {
    **dict.fromkeys(("Linear", "LayerNorm", "LayerNormLinear", "LayerNormMLP"), _LAYERS),
    "TransformerLayer": "build it from paddle.nn and MultiHeadAttention",
    "FusedScaleMaskSoftmax": "DotProductAttention applies scale, mask and softmax",
    **dict.fromkeys(("fp8_autocast", "fp8", "fp8_buffer", "is_fp8_available"), _FP8),
}


def missing(module: str):
    """A module's __getattr__."""
    return _names.missing(module, later=LATER)
