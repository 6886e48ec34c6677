# SPDX-License-Identifier: Apache-2.0
"""FP8 regions, and the scales that live from step to step.

    with autocast(recipe=DelayedScaling(fp8_dpa=True)):
        out = attention(q, k, v)              # rounds by the scales of earlier steps, notes amaxes
    out.sum().backward()

Scales of the forward pass are renewed as the outermost region ends where gradients are enabled, those of
the backward pass at its end. The rule, for each slot of a state:

    amaxes are first the largest over the ranks, where the recipe says reduce_amax
    history     newest (row 0) is 0: stays; else row i takes row i + 1, the last the newest, row 0 is 0
    amax        "max": the largest of the history; "most_recent": the newest
    scale       max of the format / 2**margin / amax; FLT_MAX where that overflows; where amax is 0 or
                not finite the scale stays
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref

import torch

from ... import _lib
from .._names import missing
from .._words import DType
from ..common.recipe import (CustomRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format,
                             MXFP8BlockScaling, NVFP4BlockScaling, Recipe)
from ._explained import Question, explained
from .tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer, scale_of

__all__ = ["autocast", "fp8_autocast", "get_default_fp8_recipe", "get_default_recipe", "get_fp8_max",
           "get_fp8_te_dtype", "get_fp8_torch_dtype", "fp8_model_init", "is_fp8_available",
           "is_fp8_block_scaling_available",
           "is_mxfp8_available", "is_nvfp4_available", "quantized_model_init", "CustomRecipe", "DelayedScaling",
           "DelayedScalingRecipeState", "Float8BlockScaling", "Float8CurrentScaling",
           "Float8CurrentScalingRecipeState", "Format", "FP8GlobalStateManager", "MXFP8BlockScaling",
           "NVFP4BlockScaling", "Recipe", "RecipeState"]
__getattr__ = missing(__name__)


# ---- what a machine can ----

def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether tessera has a kernel for FP8 attention on the current CUDA device or, where there is none,
    on the CPU; with return_reason also why not, "" if it has. It is what `tessera.explain` answers."""
    return _answer(_fp8_support(_device()), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """False: see MXFP8."""
    return _answer((False, MXFP8), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """False: it is about linear layers, and TE has no attention for it."""
    return _answer((False, _LINEAR.format("Float8BlockScaling")), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """False: it is about linear layers, and TE has no attention for it."""
    return _answer((False, _LINEAR.format("NVFP4BlockScaling")), return_reason)


_LINEAR = "{} is a recipe of linear layers; NVTE_DPA_FP8_RECIPE=DelayedScaling or Float8CurrentScaling " \
    "gives attention one of its own"
MXFP8 = "a scale for every 32 values along the sum of a product has to be applied inside the product, " \
    "where Hopper's tensor cores would need an accumulator for each 32; DelayedScaling and " \
    "Float8CurrentScaling would work"


def _answer(support: tuple[bool, str], return_reason: bool):
    return support if return_reason else support[0]


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


@functools.lru_cache(maxsize=64)
def _fp8_support(device: str) -> tuple[bool, str]:
    given = {name: torch.empty(1, 128, 1, 128, dtype=torch.float8_e4m3fn, device="meta") for name in "qkv"}
    given |= {f"{name}_scale": torch.empty((), device="meta") for name in "qkv"}
    reasons = explained(Question(False, given), device)
    return not reasons, "; ".join(reasons)


# ---- formats ----

def get_default_fp8_recipe() -> Recipe:
    return DelayedScaling()


get_default_recipe = get_default_fp8_recipe


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """The format of tensors of the forward pass, or of gradients."""
    e4m3 = fp8_recipe.fp8_format == Format.E4M3 or fprop_tensor and fp8_recipe.fp8_format == Format.HYBRID
    return DType.kFloat8E4M3 if e4m3 else DType.kFloat8E5M2


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    e4m3 = get_fp8_te_dtype(fp8_recipe, fprop_tensor) == DType.kFloat8E4M3
    return torch.float8_e4m3fn if e4m3 else torch.float8_e5m2


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    values = fp8_recipe.fp8_format.value
    return values.max_fwd if fprop_tensor else values.max_bwd


# ---- states ----

class RecipeState:
    """What a recipe remembers of the tensors of one module and pass, and the quantizers for them."""

    @staticmethod
    def create(recipe: Recipe, *, mode: str, num_quantizers: int = 1, device=None) -> RecipeState:
        """The state of `recipe` for mode="forward" or "backward". ValueError: a recipe without one."""
        if recipe.delayed():
            return DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=num_quantizers, device=device)
        if recipe.float8_current_scaling():
            return Float8CurrentScalingRecipeState(recipe, mode=mode, num_quantizers=num_quantizers,
                                                   device=device)
        raise ValueError(f"RecipeState.create: recipe={type(recipe).__name__}: must be DelayedScaling or "
                         "Float8CurrentScaling")

    def __init__(self, recipe: Recipe, *, mode: str, num_quantizers: int = 1, device=None):
        if mode not in ("forward", "backward"):
            raise ValueError(f'{type(self).__name__}: mode={mode!r}: must be "forward" or "backward"')
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        self.dtype = get_fp8_te_dtype(recipe, mode == "forward")
        self.device = torch.device(_device() if device is None else device)
        self.group = self.registered_in = None

    def __getstate__(self):
        """Copies are registered where they run, by their own group."""
        return {**vars(self), "group": None, "registered_in": None}


class Float8CurrentScalingRecipeState(RecipeState):
    """Nothing: each tensor is its own scale."""

    def make_quantizers(self) -> list[Float8CurrentScalingQuantizer]:
        power_2 = self.recipe.use_power_2_scales
        return [Float8CurrentScalingQuantizer(self.dtype, self.device, force_pow_2_scales=power_2)
                for _ in range(self.num_quantizers)]


class DelayedScalingRecipeState(RecipeState):
    """scale: fp32 [num_quantizers], 1 at first. amax_history: fp32 [amax_history_len, num_quantizers], 0 at
    first, row 0 the step that goes on. Quantizers read and write views of them."""

    def __init__(self, recipe: DelayedScaling, *, mode: str, num_quantizers: int = 1, device=None):
        super().__init__(recipe, mode=mode, num_quantizers=num_quantizers, device=device)
        with torch.inference_mode(False):  # who trains later writes into them
            self.scale = torch.ones(num_quantizers, dtype=torch.float32, device=self.device)
            self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers, dtype=torch.float32,
                                            device=self.device)

    def make_quantizers(self) -> list[Float8Quantizer]:
        return [Float8Quantizer(self.scale[i:i + 1], self.amax_history[0, i:i + 1], self.dtype)
                for i in range(self.num_quantizers)]

    def refit(self, recipe: DelayedScaling, device=None):
        """Goes on under another recipe, or on another device; quantizers are to be made again. A longer
        history begins with zeros, a shorter one forgets what is oldest: row 1 and those after it."""
        with torch.inference_mode(False):
            self._refit(recipe, device)

    def _refit(self, recipe, device):
        device = self.device if device is None else torch.device(device)
        old, length = self.amax_history.to(device), recipe.amax_history_len
        if length != len(old):
            kept = min(len(old), length) - 1
            new = old.new_zeros(length, self.num_quantizers)
            new[0] = old[0]
            new[length - kept:] = old[len(old) - kept:]
            old = new
        self.amax_history, self.scale = old, self.scale.to(device)
        self.recipe, self.device = recipe, device
        self.dtype = get_fp8_te_dtype(recipe, self.mode == "forward")

    def update(self):
        """The rule of this module, in place."""
        _renew([self])

    def rule(self) -> tuple:
        """What states must share to be renewed together. Functions of a user see one state at a time."""
        r = self.recipe
        own = id(self) if callable(r.amax_compute_algo) or r.scaling_factor_compute_algo else None
        return r.amax_compute_algo, r.margin, r.fp8_format, len(self.amax_history), self.device, own


def _renew(states: list[DelayedScalingRecipeState]):
    """The rule of this module, in place, for states of one pass and one rule(): few kernels for many layers."""
    with torch.no_grad():
        recipe, largest_stored = states[0].recipe, get_fp8_max(states[0].recipe, states[0].mode == "forward")
        history = torch.cat([state.amax_history for state in states], 1)
        old = torch.cat([state.scale for state in states])
        amax = _amax(recipe.amax_compute_algo, history)
        if recipe.scaling_factor_compute_algo is not None:
            scale = recipe.scaling_factor_compute_algo(amax, old, largest_stored, recipe)
        else:
            scale = scale_of(amax, largest_stored * 2.0 ** -recipe.margin, old)
        rolled = history.roll(-1, 0)
        rolled[0] = 0
        history = torch.where(history[0] != 0, rolled, history)
        slots = [state.num_quantizers for state in states]
        torch._foreach_copy_([state.amax_history for state in states], history.split(slots, 1))
        torch._foreach_copy_([state.scale for state in states], scale.split(slots))


def _amax(algorithm, history: torch.Tensor) -> torch.Tensor:
    """What a scale is to fit, [slots]. NaN is no amax."""
    if callable(algorithm):
        return algorithm(history)
    if algorithm == "most_recent":
        return history[0]
    return history.nan_to_num(nan=0.0, posinf=torch.inf).amax(0)


# ---- regions ----

@dataclasses.dataclass
class _QuantizationState:
    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Recipe | None = None
    fp8_distributed_group: object = None
    fp8_parameters: bool = False
    is_first_fp8_module: bool = False
    autocast_depth: int = 0
    failed: bool = False   # an exception left a region: its amaxes are not used
    states: list = dataclasses.field(default_factory=list)  # functions that give a state, or None
    awaited_pass: int = -1  # of autograd: its end renews the scales
    recompute: object = None  # in a checkpoint: state -> the scale to round by, None being its own


_REGION = ("fp8_enabled", "fp8_calibration", "fp8_recipe", "fp8_distributed_group", "is_first_fp8_module")


class FP8GlobalStateManager:
    """Where FP8 stands: the region, and the states that are renewed at its end."""
    quantization_state = _QuantizationState()

    @classmethod
    def reset(cls):
        """Leaves every region, and forgets every state; modules register theirs when they run again."""
        cls.quantization_state = _QuantizationState()

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return is_fp8_available(True)

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        return is_mxfp8_available(True)

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        return is_fp8_block_scaling_available(True)

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        return is_nvfp4_available(True)

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.quantization_state.fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return cls.quantization_state.fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return cls.quantization_state.fp8_parameters

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True once for each outermost region."""
        first = cls.quantization_state.is_first_fp8_module
        cls.quantization_state.is_first_fp8_module = False
        return first

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The region's recipe, or the default one."""
        return cls.quantization_state.fp8_recipe or get_default_fp8_recipe()

    @classmethod
    def get_fp8_group(cls):
        """The ranks that share amaxes; None is all."""
        return cls.quantization_state.fp8_distributed_group

    @classmethod
    def get_autocast_state(cls) -> tuple:
        return tuple(getattr(cls.quantization_state, name) for name in _REGION)

    @classmethod
    def set_autocast_state(cls, state: tuple):
        for name, value in zip(_REGION, state):
            setattr(cls.quantization_state, name, value)

    get_fp8_autocast_state, set_fp8_autocast_state = get_autocast_state, set_autocast_state  # TE 1's names

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: torch.Tensor, group):
        """The largest over the ranks, in place."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group)

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict):
        """Registers the states in fp8_meta, once each, to be renewed in this order. Ranks must register
        alike. A module that is gone takes no part, unless other ranks would wait for it."""
        registry = cls.quantization_state
        for key in ("scaling_fwd", "scaling_bwd"):
            state = fp8_meta.get(key)
            if not isinstance(state, DelayedScalingRecipeState):
                continue
            state.group = fp8_meta.get("fp8_group")
            if state.registered_in is not registry:
                state.registered_in = registry
                shared = state.recipe.reduce_amax and _ranks(state.group) > 1
                registry.states.append(functools.partial(_itself, state) if shared else weakref.ref(state))

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True):
        """Renews the scales of the forward, or of the backward pass."""
        registry = cls.quantization_state
        alive = [(known, known()) for known in registry.states]
        registry.states = [known for known, state in alive if state is not None]
        groups: dict = {}
        for _, state in alive:
            if state is not None and (state.mode == "forward") == forward:
                reduces = state.recipe.reduce_amax and _ranks(state.group) > 1
                groups.setdefault((reduces, state.group), []).append(state)
        for (reduces, group), states in groups.items():
            if reduces:
                amaxes = torch.cat([state.amax_history[0] for state in states])
                cls.reduce_tensor_across_group_op_max(amaxes, group)
                for state, amax in zip(states, amaxes.split([len(state.scale) for state in states])):
                    state.amax_history[0].copy_(amax)
            rules: dict = {}
            for state in states:
                rules.setdefault(state.rule(), []).append(state)
            for alike in rules.values():
                _renew(alike)

    @classmethod
    def update_after_backward(cls):
        """Called within a backward pass: renews the scales of that pass as it ends, once."""
        registry, number = cls.quantization_state, torch._C._current_graph_task_id()
        if registry.awaited_pass == number:
            return
        registry.awaited_pass = number

        def done():
            if cls.quantization_state is registry:
                cls.reduce_and_update_fp8_tensors(forward=False)
        torch.autograd.Variable._execution_engine.queue_callback(done)

    @classmethod
    def autocast_enter(cls, enabled=False, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
        state = cls.quantization_state
        if fp8_recipe is not None and not isinstance(fp8_recipe, Recipe):
            raise ValueError(f"autocast: recipe={fp8_recipe!r}: must be a recipe of "
                             "tessera.te.common.recipe, or None")
        state.fp8_enabled, state.fp8_calibration = bool(enabled), bool(calibrating)
        state.fp8_recipe = get_default_fp8_recipe() if fp8_recipe is None else fp8_recipe
        state.fp8_distributed_group = fp8_group
        if state.autocast_depth == 0:
            state.is_first_fp8_module, state.failed = True, False
        state.autocast_depth += 1

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool = False):
        state = cls.quantization_state
        state.autocast_depth -= 1
        if enabled and state.autocast_depth == 0 and torch.is_grad_enabled() and not _graph and \
                not state.failed:
            cls.reduce_and_update_fp8_tensors(forward=True)

    # TE 1's names
    fp8_autocast_enter, fp8_autocast_exit = autocast_enter, autocast_exit


def computed_again(function):
    """`function`, whose later calls run in the FP8 region of the first call and with its scales, so that a
    checkpoint's backward pass computes the same as its forward pass. Later calls record no amaxes."""
    region, scales = FP8GlobalStateManager.get_autocast_state(), []
    calls = 0

    def run(*args, **kwargs):
        nonlocal calls
        manager, again, calls = FP8GlobalStateManager, calls > 0, calls + 1
        state, before = manager.quantization_state, manager.get_autocast_state()
        outer, given = state.recompute, iter(scales)

        def met(one):
            if again:
                return next(given)
            scale = None if outer is None else outer(one)  # checkpoints nest
            scales.append(one.scale.clone() if scale is None else scale)
            return scale
        state.recompute = met
        if again:
            manager.set_autocast_state(region)
        try:
            return function(*args, **kwargs)
        finally:
            state.recompute = outer
            if again:
                manager.set_autocast_state(before)
    return run


def forward_quantizers(quantizers: list, state: DelayedScalingRecipeState) -> list:
    """`quantizers` of a module's forward pass, or where a checkpoint computes it again some of the same kinds
    that round by the scales of the first time. `state` is that of the last of them."""
    recompute = FP8GlobalStateManager.quantization_state.recompute
    scale = None if recompute is None else recompute(state)
    if scale is None:
        return quantizers
    past = DelayedScalingRecipeState(state.recipe, mode="forward", num_quantizers=state.num_quantizers,
                                     device=state.device)
    past.scale = scale
    made = past.make_quantizers()
    return quantizers[:len(quantizers) - len(made)] + made


def _itself(state):
    return state


def _ranks(group) -> int:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size(group)


@contextlib.contextmanager
def autocast(enabled: bool = True, calibrating: bool = False, recipe: Recipe | None = None,
             amax_reduction_group=None, _graph: bool = False):
    """A region in which attention runs in FP8, if the recipe has fp8_dpa or fp8_mha. Regions nest.

    recipe is DelayedScaling() unless given. Ranks of amax_reduction_group (None: all) share amaxes. calibrating
    without enabled records amaxes of attention in 16 bits. If a device cannot run FP8 attention, the attention
    call says why. Linear layers of tessera.te stay in 16 bits.

    >>> with autocast(recipe=DelayedScaling(fp8_dpa=True)):
    ...     out = attention(q, k, v)
    """
    manager = FP8GlobalStateManager
    before = manager.get_autocast_state()
    manager.autocast_enter(enabled, calibrating, recipe, amax_reduction_group, _graph)
    state = manager.quantization_state
    try:
        yield
    except BaseException:
        state.failed = True
        raise
    finally:
        first = state.is_first_fp8_module
        manager.set_autocast_state(before)
        if state.autocast_depth > 1:
            manager.quantization_state.is_first_fp8_module = first
        if manager.quantization_state is state:
            manager.autocast_exit(enabled, _graph)


@contextlib.contextmanager
def quantized_model_init(enabled: bool = True, recipe: Recipe | None = None,
                         preserve_high_precision_init_val: bool = False):
    """A region that makes modules. Parameters here have the dtype that their module was given: enabled=True is
    Refused; enabled=False, as programs write it whose FP8 is a switch, changes nothing."""
    del recipe, preserve_high_precision_init_val
    if enabled:
        raise _lib.Refused("quantized_model_init: enabled=True: parameters are not kept in FP8; pass 16-bit "
                           "params_dtype and enabled=False")
    yield


fp8_model_init = quantized_model_init  # TE 1's name


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None,
                 fp8_group=None, _graph: bool = False):
    """autocast, by the names of TE 1."""
    with autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph):
        yield
