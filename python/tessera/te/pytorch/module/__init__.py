# SPDX-License-Identifier: Apache-2.0
"""What TE's modules of layers have in common; the layers themselves are not attention."""

from ..._names import missing
from .base import TransformerEngineBaseModule

__all__ = ["TransformerEngineBaseModule"]
__getattr__ = missing(__name__)
