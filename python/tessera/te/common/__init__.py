# SPDX-License-Identifier: Apache-2.0
"""What TE's front ends share: `recipe` says how tensors become FP8."""

from .._names import missing
from . import recipe

__all__ = ["recipe"]
__getattr__ = missing(__name__)
