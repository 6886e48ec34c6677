# SPDX-License-Identifier: Apache-2.0
from ..._names import missing
from .dot_product_attention import DotProductAttention

__all__ = ["DotProductAttention"]
__getattr__ = missing(__name__)
