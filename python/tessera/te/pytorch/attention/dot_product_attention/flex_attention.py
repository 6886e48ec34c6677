# SPDX-License-Identifier: Apache-2.0
"""What callbacks of score_mod import: cuDNN's names, where its package is not installed. See _score_mod.py."""

from __future__ import annotations

import enum
import importlib
from types import SimpleNamespace

from ...._names import missing

__getattr__ = missing(__name__)


class _DataType(enum.Enum):
    NOT_SET, FLOAT, DOUBLE, HALF, BFLOAT16, INT8, INT32, INT64, BOOLEAN, UINT8 = range(10)


def _import_cudnn_frontend():
    """The package cudnn or, where it is not installed, data_type, whose members say how and not what."""
    try:
        return importlib.import_module("cudnn")
    except ImportError:
        return SimpleNamespace(data_type=_DataType)
