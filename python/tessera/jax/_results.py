# SPDX-License-Identifier: Apache-2.0
"""What comes back of a Call, and what the library says of it, for arrays of some shapes."""

from __future__ import annotations

import jax

from .. import _lib
from .._call import Call, _description
from . import _arrays, _binding


def results_of(call: Call, operands) -> list[jax.ShapeDtypeStruct]:
    """What comes back for arrays like `operands`."""
    return [jax.ShapeDtypeStruct(shape, _arrays.dtype_named(dtype)) for shape, dtype in _description.results_of(
        call, [x.shape for x in operands], [x.dtype.name for x in operands])]


def prepare(call: Call, operands, device: _lib.Device, spelling: dict[str, str] | None = None) -> int:
    """The workspace's bytes; raises ValueError or Refused for what shapes and options say, in the words of `spelling`,
    the call's unless given."""
    problem, _ = _binding.describe(call, operands, results_of(call, operands))
    return _description.prepare(problem, device, 0, call.operation, spelling or call.spelling)


def validate(call: Call, operands, pointers):
    """Raises the ValueError of a call on the CPU."""
    problem, buffers = _binding.describe(call, operands, results_of(call, operands), pointers)
    _description.validate(problem, buffers, call.places_of_results, call.operation, call.spelling)
