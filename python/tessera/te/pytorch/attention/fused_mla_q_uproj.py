# SPDX-License-Identifier: Apache-2.0
"""TE's fused projection of MLA, for MXFP8, is not here; its names say so."""

from ..._names import missing

__getattr__ = missing(__name__)
