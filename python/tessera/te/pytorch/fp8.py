# SPDX-License-Identifier: Apache-2.0
"""quantization, where TE 1 had it."""

from .._names import missing
from .quantization import *  # noqa: F403
from .quantization import __all__  # noqa: F401

__getattr__ = missing(__name__)
