# SPDX-License-Identifier: Apache-2.0
"""TE's questions about quantization, answered for 16-bit attention, and its merging of collections."""

from __future__ import annotations

import enum

from ..._words import DType  # noqa: F401
from ...common import recipe as recipes
from .._words import error, missing
from ..sharding import autocast, fp8_autocast

__all__ = ["NVTE_FP8_COLLECTION_NAME", "ScalingMode", "TensorSource", "autocast", "fp8_autocast",
           "get_global_quantize_recipe", "get_quantization_recipe", "get_supported_quantization_recipes",
           "get_supported_scaling_modes", "is_fp8_available", "is_quantize_recipe_supported",
           "is_scaling_mode_supported", "update_collections"]
__getattr__ = missing(__name__)

NVTE_FP8_COLLECTION_NAME = "fp8_metas"  # where TE's layers keep scales; no layer here has it
_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
_WHY = "tessera.te.jax computes in the dtype of its inputs; tessera.jax.attention has precision=\"fp8\" and FP8 inputs"


class ScalingMode(enum.Enum):
    """How TE scales a tensor; by TE's numbers."""
    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    NVFP4_1D_SCALING = 4
    NVFP4_2D_SCALING = 5


class TensorSource(enum.Enum):
    """Which tensor of a linear layer a scaling mode is of."""
    X = 0
    KERNEL = 1
    DGRAD = 2


def is_scaling_mode_supported(scaling_mode: ScalingMode = ScalingMode.NO_SCALING,
                              gpu_id: int | None = None) -> tuple[bool, str]:
    """(whether tessera.te.jax has it, why not); on every device only NO_SCALING."""
    return (True, "") if scaling_mode == ScalingMode.NO_SCALING else (False, f"{scaling_mode.name}: {_WHY}")


def is_fp8_available(scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING,
                     gpu_id: int | None = None) -> tuple[bool, str]:
    """is_scaling_mode_supported by its former name."""
    return is_scaling_mode_supported(scaling_mode, gpu_id)


def get_supported_scaling_modes() -> list[ScalingMode]:
    """Those that scale anything: none."""
    return []


def get_quantization_recipe(name: str) -> recipes.Recipe:
    """A recipe of its defaults. ValueError: `name` is not one of TE's four for JAX."""
    if name not in _RECIPES:
        raise error("name", repr(name), f"must be one of {', '.join(_RECIPES)}", "get_quantization_recipe")
    return getattr(recipes, name)()


def is_quantize_recipe_supported(recipe_name: str) -> tuple[bool, str]:
    """(False, why not). ValueError: as get_quantization_recipe."""
    get_quantization_recipe(recipe_name)
    return False, f"{recipe_name}: {_WHY}"


def get_supported_quantization_recipes() -> list[recipes.Recipe]:
    """None."""
    return []


def get_global_quantize_recipe() -> None:
    """The recipe of the region that autocast has opened; here none has one."""


def update_collections(new, original):
    """Collections of flax, dicts or FrozenDicts: those of `new`, and of `original` those that `new` does not name;
    of original's type."""
    return type(original)({**original, **new})
