# SPDX-License-Identifier: Apache-2.0
"""TE's functions without autograd."""

from ..._names import missing
from . import fused_attn as _module
from .fused_attn import *  # noqa: F403

__all__ = list(_module.__all__)
__getattr__ = missing(__name__)
