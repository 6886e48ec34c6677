# SPDX-License-Identifier: Apache-2.0
"""What DotProductAttention remembers of FP8: recipes, scales and histories, and their place in a state
dict, which TE's and tessera's modules read from each other.

    slots      forward  2 q, k and v     3 o      8 P          backward  0 dq, dk and dv   3 do   5 dP

Under Float8CurrentScaling the last 3 (2) slots alone have a history, as TE has it for P (dP).
"""

from __future__ import annotations

import copy
import enum
import io
import os
import pickle

import torch

from ...... import _lib
from ....._logging import switch
from .....common import recipe as recipes
from .....common.recipe import DelayedScaling, Float8CurrentScaling, Format, Recipe
from .... import _words
from ...._linear import Stateful
from ....quantization import (MXFP8, DelayedScalingRecipeState, FP8GlobalStateManager, RecipeState,
                              forward_quantizers, get_fp8_max)

_SLOTS = {"scaling_fwd": (9, 3), "scaling_bwd": (6, 2)}  # of one recipe, and of P or dP beside another
_FORMATS = {"HYBRID": Format.HYBRID, "E4M3": Format.E4M3, "E5M2": Format.E5M2}
_RECIPES = ("", "F16", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling")


# ---- the recipe of attention ----

def recipes_of(recipe: Recipe) -> list[Recipe]:
    """What attention does in a region of `recipe`, NVTE_DPA_FP8_* heeded: [] is 16 bits, [DelayedScaling],
    or [Float8CurrentScaling, DelayedScaling], the latter for P and dP. Refused: a recipe without FP8
    attention that asks for it."""
    wanted = _wanted()
    if wanted == "F16":
        return []
    flags = {name: getattr(recipe, name, False) for name in ("fp8_dpa", "fp8_mha")}
    if wanted:
        flags["fp8_dpa"] |= bool(switch("NVTE_DPA_FP8_RECIPE_DPA", 0))
        flags["fp8_mha"] |= bool(switch("NVTE_DPA_FP8_RECIPE_MHA", 0))
    if not any(flags.values()):
        return []
    given = "DelayedScaling" if recipe.delayed() else "Float8CurrentScaling" \
        if recipe.float8_current_scaling() else type(recipe).__name__
    kind = wanted or given
    if kind not in ("DelayedScaling", "Float8CurrentScaling"):
        why = MXFP8 if kind == "MXFP8BlockScaling" else "it has no FP8 attention; leave fp8_dpa and fp8_mha " \
            "False, or set NVTE_DPA_FP8_RECIPE=DelayedScaling or Float8CurrentScaling"
        raise _lib.Refused(f"DotProductAttention: recipe={kind}: {why}")
    delayed = recipe if recipe.delayed() else _delayed(recipe, flags)
    if kind == "DelayedScaling":
        return [delayed]
    if recipe.float8_current_scaling():
        return [recipe, delayed]
    return [Float8CurrentScaling(fp8_format=delayed.fp8_format, **flags), delayed]


def _wanted() -> str:
    wanted = os.environ.get("NVTE_DPA_FP8_RECIPE", "")
    if wanted not in _RECIPES:
        raise ValueError(f"NVTE_DPA_FP8_RECIPE={wanted!r}: must be one of {_words.quoted(_RECIPES)}")
    return wanted


def _delayed(recipe: Recipe, flags: dict) -> DelayedScaling:
    """The recipe of P and dP, and of all tensors where DelayedScaling replaces another recipe."""
    name = os.environ.get("NVTE_DPA_FP8_FORMAT", "HYBRID")
    if name not in _FORMATS:
        raise ValueError(f"NVTE_DPA_FP8_FORMAT={name!r}: must be one of {_words.quoted(_FORMATS)}")
    return DelayedScaling(
        fp8_format=recipe.fp8_format if recipe.float8_current_scaling() else _FORMATS[name],
        amax_history_len=switch("NVTE_DPA_FP8DS_AMAX_HISTLEN", 1),
        amax_compute_algo=os.environ.get("NVTE_DPA_FP8DS_AMAX_ALGO", "most_recent"),
        reduce_amax=bool(switch("NVTE_DPA_FP8DS_REDUCE_AMAX", 1)), **flags)


# ---- the module ----

class Float8Module(Stateful):
    """A module with FP8 states. fp8_meta and quantizers have TE's keys; `fp8` says whether the last call
    computed in FP8."""

    def __init__(self):
        super().__init__()
        self.fp8_meta, self.quantizers = {"fp8_checkpoint": False}, {}
        self.fp8 = self.fp8_calibration = self.fp8_initialized = False

    @torch.compiler.disable
    def init_fp8_metadata(self, num_gemms: int = 1, device: torch.device | None = None):
        """Takes the recipe of the region, makes or fits states on `device` and their quantizers, and
        registers them. Attention's slots are those of three products, whatever num_gemms is. Refused, ValueError:
        as recipes_of."""
        region = FP8GlobalStateManager
        enabled, calibrating = region.is_fp8_enabled(), region.is_fp8_calibration()
        used = recipes_of(region.get_fp8_recipe()) if enabled or calibrating else []
        self.fp8, self.fp8_calibration = enabled and bool(used), calibrating and bool(used)
        meta = self.fp8_meta
        if not used:
            return
        meta["fp8_checkpoint"] = True
        meta["fp8_group"] = region.get_fp8_group()
        if not self.fp8_initialized or used != meta.get("local_recipes") or \
                device is not None and device != meta["scaling_fwd"].device:
            used = [copy.copy(recipe) for recipe in used]  # their owner may change them
            meta.update(recipe=used[-1], local_recipes=used, num_gemms=3,
                        global_recipe=region.get_fp8_recipe(),
                        fp8_max_fwd=get_fp8_max(used[-1], True), fp8_max_bwd=get_fp8_max(used[-1], False))
            self._fit_states(used, device)
            self.fp8_initialized = True
        region.add_fp8_tensors_to_global_buffer(meta)

    def reset_fp8_meta_tensors(self, fp8_meta_tensors=None):
        """Scales of one and no amaxes, or what get_fp8_meta_tensors gave."""
        for key in _SLOTS:
            state = self.fp8_meta.get(key)
            if isinstance(state, DelayedScalingRecipeState):
                scale, history = fp8_meta_tensors[key] if fp8_meta_tensors else (1.0, 0.0)
                state.scale.copy_(torch.as_tensor(scale))
                state.amax_history.copy_(torch.as_tensor(history))

    def get_fp8_meta_tensors(self) -> dict[str, list[torch.Tensor]] | None:
        """Copies of the scales and amaxes of each pass; None before the first FP8 call of delayed scaling."""
        states = {key: self.fp8_meta.get(key) for key in _SLOTS}
        if not all(isinstance(state, DelayedScalingRecipeState) for state in states.values()):
            return None
        return {key: [state.scale.clone(), state.amax_history.clone()] for key, state in states.items()}

    def forward_quantizers(self) -> list:
        """Those of one call, which asks once."""
        return forward_quantizers(self.quantizers["scaling_fwd"], self.fp8_meta["scaling_fwd"])

    def _fit_states(self, used: list[Recipe], device):
        """States of the recipes `used`, which keep what they know, and quantizers of them."""
        for key, (all_slots, last_slots) in _SLOTS.items():
            mode = "forward" if key == "scaling_fwd" else "backward"
            slots = all_slots if len(used) == 1 else last_slots
            state = self.fp8_meta.get(key)
            if state is not None and state.num_quantizers == slots:
                state.refit(used[-1], device)
            else:
                state = DelayedScalingRecipeState(used[-1], mode=mode, num_quantizers=slots, device=device)
                self.fp8_meta[key] = state
            others = [] if len(used) == 1 else RecipeState.create(
                used[0], mode=mode, num_quantizers=all_slots - last_slots,
                device=device).make_quantizers()
            self.quantizers[key] = others + state.make_quantizers()

    def __getstate__(self):
        """Copies and pickles make quantizers of their own states, where they run."""
        return {**self.__dict__, "quantizers": {}, "fp8_initialized": False,
                "fp8_meta": {key: x for key, x in self.fp8_meta.items() if key != "fp8_group"}}

    # ---- state dicts ----

    def get_extra_state(self) -> torch.Tensor:
        """uint8 [n], a pickle as TE writes it; what was loaded, or nothing, where FP8 was not used."""
        if not self.fp8_meta["fp8_checkpoint"] or "scaling_fwd" not in self.fp8_meta:
            return super().get_extra_state()
        state = {"recipe": self.fp8_meta["recipe"]}
        for key, name in (("scaling_fwd", "fwd"), ("scaling_bwd", "bwd")):
            state[f"scale_{name}"] = self.fp8_meta[key].scale.cpu()
            state[f"amax_history_{name}"] = self.fp8_meta[key].amax_history.cpu()
        state["extra_fp8_variables"] = {key: value for key, value in self.fp8_meta.items()
                                        if isinstance(value, (bool, int, float, str, tuple, list))}
        return _written(state)

    def set_extra_state(self, state):
        """Takes scales and histories of TE's, and of TE 1.6's states too. ValueError: what is no state, or
        of other shapes; pickles that hold more than data, unless NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1."""
        given, state = state, _read(state) or {}
        recipe, extra = state.get("recipe") or DelayedScaling(), state.get("extra_fp8_variables", {})
        found = {}
        for key, name in (("scaling_fwd", "fwd"), ("scaling_bwd", "bwd")):
            if "scale_fwd" in state:  # else the recipe has no histories
                found[key] = _checked(state, name, _SLOTS[key])
        if len({_SLOTS[key].index(len(scale)) for key, (scale, _) in found.items()}) > 1:
            raise _illegal("scale_bwd.shape", list(found["scaling_bwd"][0].shape),
                           "must be [6] beside scale_fwd [9], or [2] beside [3]")
        if found and not isinstance(recipe, DelayedScaling):
            raise _illegal("recipe", type(recipe).__name__, "must be DelayedScaling beside histories")
        if not isinstance(extra, dict):
            raise _illegal("extra_fp8_variables", type(extra).__name__, "must be a dict")
        super().set_extra_state(given)
        if not found:
            return
        self.fp8_meta.update(extra, recipe=recipe, fp8_checkpoint=True)
        for key, (scale, history) in found.items():
            mode = "forward" if key == "scaling_fwd" else "backward"
            known = DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=len(scale), device="cpu")
            known.scale, known.amax_history = scale, history
            self.fp8_meta[key] = known
        self.fp8_initialized = False  # the next region fits them to its recipe and device

    def _load_from_state_dict(self, state_dict, prefix, *more):
        old, new = f"{prefix}fused_attention._extra_state", f"{prefix}_extra_state"
        moved = state_dict.pop(old, None)  # where TE 1.6 kept it
        if moved is not None:
            state_dict.setdefault(new, moved)
        super()._load_from_state_dict(state_dict, prefix, *more)


# ---- pickles ----

_HOME, _TE_HOME = recipes.__name__, "transformer_engine.common.recipe"
_DATA = {(home, name): getattr(recipes, name) for home in (_HOME, _TE_HOME)
         for name in ("_FormatHelper", *recipes.__all__)}
_DATA["collections", "OrderedDict"] = dict
_DATA["torch._utils", "_rebuild_tensor_v2"] = torch._utils._rebuild_tensor_v2


def _illegal(name: str, value, rule: str) -> ValueError:
    return ValueError(f"DotProductAttention: _extra_state: {name}={value}: {rule}")


class _Pickler(pickle._Pickler):
    """Writes recipes under TE's names, so that TE reads them; TE need not be here. Protocol 3 names
    classes by plain lines."""

    def __init__(self, file):
        super().__init__(file, 3)

    def save_global(self, obj, name=None):
        if getattr(obj, "__module__", None) != _HOME:
            return super().save_global(obj, name)
        self.write(pickle.GLOBAL + f"{_TE_HOME}\n{obj.__qualname__}\n".encode())
        self.memoize(obj)


class _Reader(pickle.Unpickler):
    """Reads data: recipes, tensors, and what pickle builds itself."""

    def find_class(self, module, name):
        if (module, name) in _DATA:
            return _DATA[module, name]
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.2 writes members of enumerations
            return _member
        raise pickle.UnpicklingError(f"{module}.{name}")


class _AnyReader(pickle.Unpickler):
    """Reads whatever a pickle names, recipes as tessera's."""

    def find_class(self, module, name):
        known = _DATA.get((module, name))
        return super().find_class(module, name) if known is None else known


def _member(kind, name: str):
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"builtins.getattr of {kind!r}")
    return kind[name]


def _storage(data: bytes):
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _written(state: dict) -> torch.Tensor:
    file = io.BytesIO()
    try:
        _Pickler(file).dump(state)
    except (pickle.PicklingError, AttributeError) as error:
        raise _illegal("recipe", state["recipe"], "its functions must be ones that a module defines, to be "
                       f"saved: {error}") from None
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _read(state) -> dict | None:
    """The state in a state dict's entry; None of nothing."""
    if state is None or isinstance(state, torch.Tensor) and state.numel() == 0:
        return None
    if isinstance(state, io.BytesIO):  # TE before 1.8
        state.seek(0)
        return _trusted(lambda: torch.load(state, map_location="cpu", weights_only=True),
                        lambda: torch.load(state, map_location="cpu", weights_only=False))
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.dim() != 1:
        shown = f"{state.dtype}{list(state.shape)}" if isinstance(state, torch.Tensor) else type(state).__name__
        raise _illegal("type", shown, "must be a uint8 tensor [n], or of old checkpoints an io.BytesIO")
    data = state.detach().cpu().numpy().tobytes()
    return _trusted(lambda: _Reader(io.BytesIO(data)).load(), lambda: _AnyReader(io.BytesIO(data)).load())


def _trusted(safe, unsafe):
    reader = unsafe if switch("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", 0) else safe
    try:
        state = reader()
    except Exception as error:
        raise _illegal("pickle", f"{type(error).__name__}: {error}", "is no plain data; if you trust where "
                       "the checkpoint comes from, set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1") from None
    if state is not None and not isinstance(state, dict):
        raise _illegal("pickle", type(state).__name__, "must be a dict with scale_fwd, amax_history_fwd, "
                       "scale_bwd and amax_history_bwd")
    return state


def _checked(state: dict, name: str, slots: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale [slots], amax_history [steps, slots]) of one pass."""
    values = []
    for key, axes in ((f"scale_{name}", 1), (f"amax_history_{name}", 2)):
        x = state.get(key)
        if not isinstance(x, torch.Tensor) or x.dim() != axes or x.shape[-1] not in slots or \
                not x.numel() or not x.is_floating_point():
            shown = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            steps = "steps, " * (axes - 1)
            raise _illegal(f"{key}.shape", shown,
                           f"must be [{steps}{slots[0]}], or [{steps}{slots[1]}] of Float8CurrentScaling")
        values.append(x.float())
    scale, history = values
    if scale.shape[-1] != history.shape[-1]:
        raise _illegal(f"amax_history_{name}.shape", list(history.shape), f"must end with scale_{name}'s "
                       f"{scale.shape[-1]} slots")
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise _illegal(f"scale_{name}", scale.tolist(), "must be finite and > 0")
    return scale, history
