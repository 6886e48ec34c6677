# SPDX-License-Identifier: Apache-2.0
"""TE's recipes: how tensors become FP8, as plain data with TE's fields, defaults and assertions.

    recipe = DelayedScaling(amax_history_len=16, fp8_dpa=True)
    with autocast(recipe=recipe):
        out = attention(q, k, v)

tessera uses the fields for attention: fp8_dpa, fp8_mha, fp8_format, margin, the history and the two algorithms.
It keeps fields for matrix products of linear layers, but they change nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .._names import missing

__all__ = ["CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format",
           "MMParams", "MXFP8BlockScaling", "NVFP4BlockScaling", "QParams", "Recipe"]
__getattr__ = missing(__name__)


class _FormatHelper(NamedTuple):  # TE's name, which pickled recipes hold
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """The largest value of tensors of the forward and of the backward pass. HYBRID is E4M3 forward and
    E5M2 backward."""
    E2M1 = _FormatHelper(6, 6)
    E4M3 = _FormatHelper(448, 448)
    E5M2 = _FormatHelper(57344, 57344)
    HYBRID = _FormatHelper(448, 57344)


@dataclass(frozen=True)
class MMParams:
    """How linear layers multiply."""
    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How linear layers quantise."""
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


_OVERRIDES = (None, "high_precision", "dequantized")
_SCOPES = ("none", "weights", "activations", "all")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") == "1"


class Recipe:
    """What kind a recipe is: each predicate is of the class, so an instance has it too."""

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        return issubclass(cls, CustomRecipe)

    def __repr__(self) -> str:
        shown = (f"{field.name}={_shown(getattr(self, field.name))}" for field in dataclasses.fields(self))
        return ", ".join([f"recipe_type={type(self).__name__}", *shown])

    def __post_init__(self):
        assert getattr(self, "fp8_format", None) != Format.E5M2, "Pure E5M2 training is not supported."
        assert self.backward_override in _OVERRIDES, \
            f"backward_override must be one of {_OVERRIDES}; NVTE_BACKWARD_OVERRIDE sets its default."


def _shown(value) -> str:
    return value.name if isinstance(value, Format) else repr(value)


@dataclass(repr=False)
class DelayedScaling(Recipe):
    """One scale a tensor, from the amaxes of earlier steps:
    `max of the format / amax of the history / 2**margin`.

    amax_history_len steps are kept, at least 1. amax_compute_algo is "max" (of the history),
    "most_recent", or amax_history [steps, slots] -> amax [slots]; its row 0 is the newest.
    scaling_factor_compute_algo is None or (amax, scale, fp8_max, recipe) -> scale, all [slots]. With
    reduce_amax ranks share their amaxes. fp8_dpa: attention rounds its inputs; fp8_mha: attention gives
    and takes FP8 tensors, too.
    """
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = os.environ.get("NVTE_BACKWARD_OVERRIDE")

    def __post_init__(self):
        super().__post_init__()
        assert self.backward_override is None, "Delayed scaling only supports backward_override=None."
        assert self.amax_history_len >= 1, f"amax_history_len={self.amax_history_len} must be at least 1."
        assert self.amax_compute_algo in ("max", "most_recent") or callable(self.amax_compute_algo), \
            f'amax_compute_algo={self.amax_compute_algo!r} must be "max", "most_recent" or a function.'


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """One scale a tensor, from its own amax."""
    use_power_2_scales: bool = _is_set("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp = QParams(power_2_scale=use_power_2_scales)
    fp8_quant_fwd_weight = QParams(power_2_scale=use_power_2_scales)
    fp8_quant_bwd_grad = QParams(power_2_scale=use_power_2_scales)
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = os.environ.get("NVTE_BACKWARD_OVERRIDE")


@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """A power of two for each 32 neighbours, in both directions."""
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = os.environ.get("NVTE_BACKWARD_OVERRIDE")
    enable_2d_quantization: bool = False


@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """A scale for each block of 1 x 128 or 128 x 128. It has no attention, as TE has none."""
    use_f32_scales: bool = _is_set("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp = QParams(power_2_scale=not use_f32_scales)
    fp8_quant_fwd_weight = QParams(power_2_scale=not use_f32_scales)
    fp8_quant_bwd_grad = QParams(power_2_scale=not use_f32_scales)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = os.environ.get("NVTE_BACKWARD_OVERRIDE")

    def __post_init__(self):
        super().__post_init__()
        sides = {name: getattr(self, f"{name}_block_scaling_dim") for name in ("x", "w", "grad")}
        for name, dim in sides.items():
            assert dim in (1, 2), f"{name}_block_scaling_dim={dim}: only 1D or 2D blocks are supported."
        assert list(sides.values()).count(2) <= 1, "2D by 2D block gemm is not supported."
        for name in ("fprop", "dgrad", "wgrad"):
            assert getattr(self, f"fp8_gemm_{name}").use_split_accumulator, \
                f"Split accumulator required for {name}."
        assert not self.fp8_dpa and not self.fp8_mha, \
            "FP8 attention is not supported for Float8BlockScaling; NVTE_DPA_FP8_RECIPE gives attention " \
            "a recipe of its own."


@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """FP4 with an E4M3 scale for each 16 neighbours. Attention needs another recipe:
    NVTE_DPA_FP8_RECIPE."""
    disable_rht: bool = _is_set("NVTE_NVFP4_DISABLE_RHT")
    disable_stochastic_rounding: bool = _is_set("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    disable_2d_quantization: bool = _is_set("NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
    row_scaled_activation: bool = _is_set("NVTE_NVFP4_ROW_SCALED_ACTIVATION")
    nvfp4_4over6: str = os.environ.get("NVTE_NVFP4_4OVER6", "none")
    nvfp4_4over6_e4m3_use_256: str = os.environ.get("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all")
    nvfp4_4over6_err_mode: str = os.environ.get("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE").upper()
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = os.environ.get("NVTE_BACKWARD_OVERRIDE")

    def __post_init__(self):
        super().__post_init__()
        assert self.fp4_format == Format.E2M1, "Only E2M1 is supported for NVFP4 scaling."
        assert self.fp8_format == Format.E4M3, "Only E4M3 is supported for NVFP4 scaling."
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            assert getattr(self, name) in _SCOPES, f"{name}={getattr(self, name)!r} must be one of {_SCOPES}."
        assert self.nvfp4_4over6_err_mode in ("MAE", "MSE"), \
            f'nvfp4_4over6_err_mode={self.nvfp4_4over6_err_mode!r} must be "MAE" or "MSE".'
        rotated, flat = not self.disable_rht, not self.disable_2d_quantization
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=rotated)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=flat)
        self.fp4_quant_bwd_grad = QParams(random_hadamard_transform=rotated,
                                          stochastic_rounding=not self.disable_stochastic_rounding)


@dataclass(repr=False)
class CustomRecipe(Recipe):
    """qfactory gives a quantizer for each role of a tensor; linear layers alone would ask it."""
    qfactory: Callable
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = os.environ.get("NVTE_BACKWARD_OVERRIDE")
    quantization_alignment: int = 128

    def __post_init__(self):
        super().__post_init__()
        assert self.quantization_alignment > 0, \
            f"quantization_alignment={self.quantization_alignment} must be at least 1."
        assert callable(self.qfactory), f"qfactory={self.qfactory!r} must be a function of a role."
