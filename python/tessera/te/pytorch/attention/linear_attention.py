# SPDX-License-Identifier: Apache-2.0
"""TE's linear attention is not here; its names say so."""

from ..._names import missing

__getattr__ = missing(__name__)
