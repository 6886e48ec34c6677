# SPDX-License-Identifier: Apache-2.0
"""Recomputation of activations."""

import os

from ._refused import missing

__all__ = ["recompute"]
__getattr__ = missing(__name__)

_DISABLE_RECOMPUTE = int(os.getenv("NVTE_DISABLE_RECOMPUTE", "0"))


def recompute(function, *args, **kwargs):
    """function(*args, **kwargs), whose activations are computed again in the backward pass:
    paddle.distributed.fleet.utils.recompute."""
    from paddle.distributed import fleet
    assert not _DISABLE_RECOMPUTE, \
        f"Recompute is disabled. Got NVTE_DISABLE_RECOMPUTE={_DISABLE_RECOMPUTE}."
    return fleet.utils.recompute(function, *args, **kwargs)
