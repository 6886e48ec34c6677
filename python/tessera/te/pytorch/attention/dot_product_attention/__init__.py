# SPDX-License-Identifier: Apache-2.0
from ...._names import missing
from ._choice._selection import _attention_backends
from .dot_product_attention import DotProductAttention
from .utils import _alibi_cache

__all__ = ["DotProductAttention", "_attention_backends", "_alibi_cache"]
__getattr__ = missing(__name__)
