# SPDX-License-Identifier: Apache-2.0
"""What programs ask transformer_engine.jax.quantize before they compute in FP8, which tessera.te.jax does not:

    supported, reason = is_scaling_mode_supported(ScalingMode.DELAYED_TENSOR_SCALING)       # False, and why
"""

from .._words import missing
from ..transformer_engine_jax import get_device_compute_capability
from .helper import *  # noqa: F403
from .helper import __all__ as _answers

__all__ = [*_answers, "get_device_compute_capability"]
__getattr__ = missing(__name__)
