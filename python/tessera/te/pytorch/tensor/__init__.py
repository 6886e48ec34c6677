# SPDX-License-Identifier: Apache-2.0
"""TE's containers of FP8 tensors, and what fills them."""

from ..._names import missing
from .float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from .quantized_tensor import QuantizedTensor, Quantizer

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor", "QuantizedTensor",
           "Quantizer"]
__getattr__ = missing(__name__)
