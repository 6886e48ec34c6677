# SPDX-License-Identifier: Apache-2.0
"""Which of TE's three backends runs a call: TE's switches, architectures, and order of preference;
whether tessera's kernels can is asked of tessera.explain with the call that would run (_questions), whose
reasons are the ones that print.

FlashAttention and FusedAttention are both tessera's kernels, so they fit or fail together.
"""

from __future__ import annotations

import dataclasses

import torch

try:
    from packaging.version import Version  # what TE's users compare with
except ImportError:
    from torch.torch_version import TorchVersion as Version

from ...... import __version__, _lib, backends
from ......torch._later import constant
from ....._logging import AttentionLogging, logger, switch
from .....common.recipe import DelayedScaling
from ...._explained import explained as _explained
from ....cpp_extensions._tables import FusedAttnBackend
from ....quantization import get_fp8_torch_dtype
from .._quantized import _fp8_state
from ._questions import DTYPES, FP8, Rounded, questions

NAMES = ("FlashAttention", "FusedAttention", "UnfusedDotProductAttention")
_FLASH, _FUSED, _UNFUSED = NAMES
_SWITCHES = {_FLASH: "NVTE_FLASH_ATTN", _FUSED: "NVTE_FUSED_ATTN", _UNFUSED: "NVTE_UNFUSED_ATTN"}
_VERSIONS = tuple(f"NVTE_FLASH_ATTN_V{n}" for n in (2, 3, 4))  # tessera's kernels stand for each
_SUB_BACKEND = "NVTE_FUSED_ATTN_BACKEND"
SWITCHES = (*_SWITCHES.values(), *_VERSIONS, _SUB_BACKEND, "NVTE_DEBUG", "NVTE_DEBUG_LEVEL", "TESSERA_TE_ORDER")
_COUNTED = (*_SWITCHES.values(), *_VERSIONS, _SUB_BACKEND, "NVTE_FP8_DPA_BWD",
            "NVTE_UnfusedDPA_Emulate_FP8")  # those of a selection that are numbers
_MAX512 = 512  # the longest sequence of F16_max512

# The last selection, by TE's keys: callers may ask for a new one.
_attention_backends = {
    "attention_params": None,
    "use_flash_attention": None,
    "flash_attention_backend": None,
    "use_fused_attention": None,
    "fused_attention_backend": None,
    "use_unfused_attention": None,
    "backend_selection_requires_update": False,
}


@dataclasses.dataclass(eq=True)
class AttentionParams:
    """What a selection depends on. `device` is "cpu", "cuda:0", or for questions "sm80", "sm90",
    "sm100"; None is the current CUDA device, or the CPU where there is none."""
    qkv_type: type = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    nominal_dtype: torch.dtype | None = None  # of o, where qkv_dtype is float8
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    num_tokens_q: int = 0   # of packed tensors
    num_tokens_kv: int = 0
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool = True
    softcap: float = 0.0
    alibi_slopes_shape: torch.Size | list | None = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias_shape: tuple[int, int, int, int] | None = None  # (b, h, sq, skv)
    core_attention_bias_requires_grad: bool = True
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    cp_size: int = 1
    cp_size_a2a: int = 1
    deterministic: bool = False
    is_training: bool = True
    fp8: bool = False
    fp8_meta: dict | None = None
    inference_params: object = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    cuda_graph: bool = False
    num_splits: int = 1
    softmax_scale: float = 1.0
    fp8_output: bool = False
    checkpoint_core_attention: bool = False
    has_score_mod: bool = False
    has_score_mod_bprop: bool = False
    requires_backward: bool | None = None  # None is is_training
    device: torch.device | str | None = None
    padding: str = "lengths"  # said by one tensor of lengths, by "two lengths", by a "mask", or by "two masks"

    def __eq__(self, other):
        """Compares all fields, but of fp8_meta the recipes alone."""
        if not isinstance(other, AttentionParams):
            return NotImplemented
        mine, others = vars(self), vars(other)
        return mine == others or _comparable(mine) == _comparable(others)


@dataclasses.dataclass
class Selection:
    """`selected` is one of NAMES, or None; `available` those that could run, and `reasons` say of
    the others why not."""
    selected: str | None
    available: dict[str, bool]
    fused_backend: FusedAttnBackend | None
    reasons: dict[str, list[str]]


_FIELDS = tuple(field.name for field in dataclasses.fields(AttentionParams))
_FLASH_VERSION = Version(__version__)


def flash_version() -> Version:
    """The version of FlashAttention, which is tessera's."""
    return _FLASH_VERSION


def get_attention_backend(attention_params: AttentionParams | None = None):
    """(use_flash_attention, flash_attention_backend, use_fused_attention, fused_attention_backend,
    use_unfused_attention, available_backends): flags of which one is True at most, the version of
    FlashAttention, the sub-backend of FusedAttention, and a list of what each could do."""
    params = attention_params or AttentionParams()
    if torch.compiler.is_compiling():
        for name in _COUNTED:
            switch(name, 1)  # read here, a graph is guarded by it
        selected, available, fused_backend = _traced(*[getattr(params, name) for name in _FIELDS])
        available = list(available)
    else:
        chosen = select(params)
        selected, fused_backend = chosen.selected, chosen.fused_backend
        available = [chosen.available[name] for name in NAMES]
    return (selected == _FLASH, _FLASH_VERSION if available[0] else None, selected == _FUSED,
            None if fused_backend is None else FusedAttnBackend.cast(fused_backend),
            selected == _UNFUSED, available)


@constant
def _traced(*fields):
    """select() as torch.compile traces it: once for a graph, of constants and to constants."""
    chosen = select(AttentionParams(*fields))
    sub_backend = None if chosen.fused_backend is None else int(chosen.fused_backend)
    return chosen.selected, tuple(chosen.available[name] for name in NAMES), sub_backend


def select(params: AttentionParams) -> Selection:
    """Reads the switches again, chooses, and logs why."""
    AttentionLogging.setup_logging()
    config = {"tessera_version": __version__, "compute_capability": _architecture(params)}
    config.update((field.name, getattr(params, field.name)) for field in dataclasses.fields(params))
    logger.debug("Running with config=%s", config)
    reasons = why_not(params)
    for name, texts in reasons.items():
        for text in texts:
            logger.debug("Disabling %s due to %s", name, text)
    return _prefer(_nominal(params), reasons, _capability(params))


def _nominal(params: AttentionParams) -> AttentionParams:
    """FP8 tensors stand for 16-bit values, and are answered for as those."""
    if params.qkv_dtype not in FP8:
        return params
    return dataclasses.replace(params, qkv_dtype=params.nominal_dtype or torch.bfloat16)


def switched_off() -> dict[str, list[str]]:
    """For each of NAMES the switches that turn it off, as they are now."""
    reasons = {name: [] for name in NAMES}
    for name, variable in _SWITCHES.items():
        if not switch(variable, 1):
            reasons[name].append(f"{variable}=0")
    if not any([switch(variable, 1) for variable in _VERSIONS]):
        reasons[_FLASH].append(", ".join([f"{variable}=0" for variable in _VERSIONS]))
    return reasons


def why_not(params: AttentionParams) -> dict[str, list[str]]:
    """For each of NAMES what keeps it from running this; empty lists are backends that could."""
    params = _nominal(params)
    reasons = switched_off()
    asked_for_unfused = bool(reasons[_FLASH] and reasons[_FUSED])
    try:
        _fp8_recipes(params)
    except _lib.Refused as error:
        return {name: [*texts, str(error)] for name, texts in reasons.items()}
    capability = _capability(params)
    if capability < (8, 0):
        reasons[_FLASH].append("compute capability < sm80")
        reasons[_FUSED].append("compute capability < sm80")
    for flag, reason in (
            (params.fp8_output and not params.fp8, "fp8_output=True outside an FP8 region"),
            (params.has_score_mod_bprop and not params.has_score_mod, "score_mod_bprop without score_mod")):
        if flag:
            for name in NAMES:
                reasons[name].append(reason)
    if _fp8_recipes(params):
        _fp8_reasons(params, reasons)
    if params.context_parallel or params.cp_size > 1:
        reasons[_UNFUSED].append("context parallelism, which the others have")
    if params.qkv_dtype not in DTYPES:
        reasons[_UNFUSED].append(f"unsupported qkv_dtype = {params.qkv_dtype}")
    if not _has_kernels(_device(params)) and not asked_for_unfused:
        reasons[_UNFUSED].append("no kernel of this build being for CUDA: it would materialise the "
                                 "scores; build with TESSERA_CUDA=ON, or ask for it by "
                                 "NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0")
    kernels = _kernel_reasons(params)
    reasons[_FLASH] += [] if _fp8_recipes(params) else kernels
    reasons[_FUSED] += kernels
    return reasons


def _fp8_recipes(params) -> list:
    """The recipes by which attention runs, [] in 16 bits: an FP8 region whose recipe leaves attention alone
    is none."""
    if not params.fp8:
        return []
    meta = params.fp8_meta or {}
    if "local_recipes" in meta:
        return meta["local_recipes"]
    return _fp8_state.recipes_of(meta.get("recipe") or DelayedScaling(fp8_dpa=True))


def _fp8_reasons(params, reasons):
    reasons[_FLASH].append("FP8 attention, which FusedAttention has")
    if not switch("NVTE_UnfusedDPA_Emulate_FP8", 0):
        reasons[_UNFUSED].append("FP8 attention; NVTE_UnfusedDPA_Emulate_FP8=1 emulates it")
    if params.qkv_dtype not in (torch.float16, torch.bfloat16):
        reasons[_FUSED].append(f"qkv_dtype = {params.qkv_dtype}: FP8 attention rounds float16 and bfloat16")
    for flag, what in ((params.inference_params is not None, "inference_params"),
                       (params.context_parallel or params.cp_size > 1, "context parallelism")):
        if flag:
            for name in NAMES:
                reasons[name].append(f"FP8 attention with {what}, which tessera.te does not have yet; "
                                     "NVTE_DPA_FP8_RECIPE=F16 leaves attention in 16 bits")


def _has_kernels(device: str) -> bool:
    return device == "cpu" or any(name.startswith("cuda") for name in backends())


def _prefer(params, reasons, capability) -> Selection:
    available = {name: not texts for name, texts in reasons.items()}
    fused_backend = _sub_backend(params) if available[_FUSED] else None
    labels = {_FLASH: f"FlashAttention ({flash_version()})",
              _FUSED: f"FusedAttention (sub-backend {int(fused_backend or 0)})", _UNFUSED: _UNFUSED,
              None: "NoBackend"}
    logger.debug("Available backends = {%s}", ", ".join(
        f"{name}={available[name]}" + (labels[name].removeprefix(name) if available[name] else "")
        for name in NAMES))
    order = (_FUSED, _FLASH) if capability >= (9, 0) else (_FLASH, _FUSED)
    if available[_FLASH] and available[_FUSED]:
        logger.debug("Disabling %s to give %s preference for performance reasons", *order[::-1])
    selected = next((name for name in (*order, _UNFUSED) if available[name]), None)
    logger.debug("Selected backend = %s", labels[selected])
    if selected == _UNFUSED:
        scores = params.batch_size * params.num_heads * params.max_seqlen_q * params.max_seqlen_kv
        logger.warning("UnfusedDotProductAttention materialises the scores, %d bytes, since "
                       "FusedAttention is disabled due to %s", 4 * scores, reasons[_FUSED][0])
    return Selection(selected, available, fused_backend, reasons)


def _sub_backend(params) -> FusedAttnBackend:
    """NVTE_FUSED_ATTN_BACKEND=0 asks for F16_max512, where it applies."""
    if _fp8_recipes(params):
        return FusedAttnBackend.FP8
    short = max(params.max_seqlen_q, params.max_seqlen_kv) <= _MAX512
    if short and switch(_SUB_BACKEND, 1) == FusedAttnBackend.F16_max512:
        return FusedAttnBackend.F16_max512
    return FusedAttnBackend.F16_arbitrary_seqlen


def _roundings(p) -> tuple[Rounded | None, Rounded | None]:
    """What FP8 makes of the forward and of the backward pass; None is 16 bits."""
    used = _fp8_recipes(p)
    if not used:
        return None, None
    wide = not switch("NVTE_FP8_DPA_BWD", 1)
    if len(used) == 2 and not (used[0].fp8_mha or p.fp8_output or wide):
        return Rounded(products=True), Rounded(products=True)
    q, do = (get_fp8_torch_dtype(used[0], forward) for forward in (True, False))
    return Rounded(qkv=q), None if wide else Rounded(qkv=q, do=do)


def _kernel_reasons(params) -> list[str]:
    """Why tessera's kernels cannot run this; empty if they can."""
    try:
        asked = questions(params, *_roundings(params))
    except (ValueError, _lib.Refused) as error:
        return [str(error)]
    for question in asked:
        reasons = _explained(question, _device(params))
        if reasons:
            return list(reasons)
    return []


def _device(params) -> str:
    device = params.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return f"cuda:{torch.cuda.current_device()}" if str(device) == "cuda" else str(device)


def _capability(params) -> tuple[int, int]:
    """The CPU chooses as Hopper does."""
    device = _device(params)
    if device == "cpu":
        return 9, 0
    if device.startswith("sm"):
        return divmod(int(device[2:]), 10)
    return torch.cuda.get_device_capability(device)


def _architecture(params) -> str:
    major, minor = _capability(params)
    return "cpu" if _device(params) == "cpu" else f"sm{10 * major + minor}"


def _comparable(values: dict) -> dict:
    meta = values["fp8_meta"] or {}
    return {**values, "fp8_meta": (meta.get("recipe"), meta.get("local_recipes"))}
