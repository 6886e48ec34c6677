# SPDX-License-Identifier: Apache-2.0
"""Which of TE's three backends runs a call: TE's switches, architectures, and order of preference;
whether tessera's kernels can is asked of tessera.explain, whose reasons are the ones that print.

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
from ...._words import formats_of
from ....cpp_extensions._tables import FusedAttnBackend
from ....quantization import get_fp8_torch_dtype
from .._quantized import _fp8_state

NAMES = ("FlashAttention", "FusedAttention", "UnfusedDotProductAttention")
_FLASH, _FUSED, _UNFUSED = NAMES
_SWITCHES = {_FLASH: "NVTE_FLASH_ATTN", _FUSED: "NVTE_FUSED_ATTN", _UNFUSED: "NVTE_UNFUSED_ATTN"}
_VERSIONS = tuple(f"NVTE_FLASH_ATTN_V{n}" for n in (2, 3, 4))  # tessera's kernels stand for each
_SUB_BACKEND = "NVTE_FUSED_ATTN_BACKEND"
SWITCHES = (*_SWITCHES.values(), *_VERSIONS, _SUB_BACKEND, "NVTE_DEBUG", "NVTE_DEBUG_LEVEL", "TESSERA_TE_ORDER")
_COUNTED = (*_SWITCHES.values(), *_VERSIONS, _SUB_BACKEND, "NVTE_FP8_DPA_BWD",
            "NVTE_UnfusedDPA_Emulate_FP8")  # those of a selection that are numbers
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
           torch.float64: "fp64"}
_CACHE_DTYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
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
            None if fused_backend is None else FusedAttnBackend(fused_backend),
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
    if params.qkv_dtype not in _CACHE_DTYPES:
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
    if params.qkv_dtype not in _DTYPES:
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


def case_lines(params: AttentionParams) -> list[str]:
    """The problem as lines of tessera's case language: one for each pass that will run."""
    p = params
    if p.qkv_dtype not in _DTYPES:
        raise ValueError(f"qkv_dtype={p.qkv_dtype}: must be float16, bfloat16 or float32")
    words = [_DTYPES[p.qkv_dtype], f"b={max(p.batch_size, 1)}", f"sq={max(p.max_seqlen_q, 1)}",
             f"sk={max(p.max_seqlen_kv, 1)}", f"hq={p.num_heads}", f"hk={p.num_gqa_groups}",
             f"dqk={p.head_dim_qk}", f"dv={p.head_dim_v}", f"layout={_layout(p)}"]
    if p.inference_params is not None:
        words += _cache_words(p)
    mask = p.attn_mask_type
    bottom_right = mask.endswith("bottom_right") or \
        mask not in ("causal", "padding_causal") and p.bottom_right_diagonal is not False
    left, right = p.window_size or (-1, -1)
    bounded = "causal" in mask or (left, right) != (-1, -1)
    if "causal" in mask:
        words.append("causal")
    if left >= 0 or "causal" not in mask and right >= 0:
        words.append(f"window={left},{right}")
    if bounded or p.core_attention_bias_type == "alibi":
        words.append(f"align={'bottom_right' if bottom_right else 'top_left'}")
    if "padding" in mask or "t" in p.qkv_layout.split("_")[0]:
        words.append("lens=random:0" if p.max_seqlen_q == p.max_seqlen_kv else
                     "lens_q=random:0 lens_k=random:1")
    if p.pad_between_seqs:
        words.append("gaps=random:0")
    if mask == "arbitrary":
        words.append("keep=random:0.5/bhqk")
    grads = []
    if p.core_attention_bias_type == "alibi":
        slopes = p.alibi_slopes_shape
        words.append("alibi=bh" if slopes is not None and len(slopes) == 2 else "alibi")
    elif p.core_attention_bias_type != "no_bias":
        shape = p.core_attention_bias_shape or (1, 2, 2, 2)
        axes = "".join(axis for n, axis in zip(shape, "bhqk", strict=True) if n != 1)
        words.append(f"bias={p.core_attention_bias_type.removesuffix('_scale_bias')}/{axes or '1'}")
        grads += ["dbias"] * p.core_attention_bias_requires_grad
    if p.softcap:
        words.append(f"softcap={p.softcap:g}")
    if p.softmax_type != "vanilla":
        learnable = p.softmax_type == "learnable"
        words.append("sink=learnable" if learnable else "sink=off_by_one")
        grads += ["dsink"] * learnable
    if p.attention_dropout:
        words.append(f"dropout={p.attention_dropout:g}")
    if p.deterministic:
        words.append("deterministic")
    forward, backward = _fp8_words(p)
    lines = [" ".join(["fwd", *_replaced(words, forward)] + ["max_logit"] * p.return_max_logit)]
    if p.is_training if p.requires_backward is None else p.requires_backward:
        lines.append(" ".join(["bwd", *_replaced(words, backward)] +
                              [f"grads={','.join(grads)}"] * bool(grads)))
    return lines


def _replaced(words: list[str], fp8: list[str]) -> list[str]:
    """The words of a 16-bit problem, its dtype replaced."""
    return [fp8[0], *words[1:], *fp8[1:]] if fp8 else words


def _fp8_words(p) -> tuple[list[str], list[str]]:
    """(dtype, tokens) of FP8, of the forward and of the backward pass; [] is 16 bits."""
    used = _fp8_recipes(p)
    if not used:
        return [], []
    wide, dtype = not switch("NVTE_FP8_DPA_BWD", 1), _DTYPES[p.qkv_dtype]
    if len(used) == 2 and not (used[0].fp8_mha or p.fp8_output or wide):
        return [dtype, "precision=fp8"], [dtype, "precision=fp8"]
    q, grad = (_CACHE_DTYPES[get_fp8_torch_dtype(used[0], forward)] for forward in (True, False))
    scales = ["qscale=one", "kvscale=one"]
    return [q, *scales, f"o={dtype}"], [] if wide else [q, *scales, f"do={grad}", f"o={dtype}"]


def _cache_words(p: AttentionParams) -> list[str]:
    """Pages, and fp8 keys and values, of the caches of inference_params."""
    cache = p.inference_params
    words = [f"kv={_CACHE_DTYPES[cache.dtype]}"] if cache.dtype in _CACHE_DTYPES else []
    if p.qkv_layout.startswith("paged"):
        words.append(f"page={cache.page_size or cache.max_sequence_length}")
    return words


def _layout(p: AttentionParams) -> str:
    """qkv_layout, or its formats when q, k and v are not of one size, as one buffer needs it."""
    one_size = p.head_dim_qk == p.head_dim_v and ("3" not in p.qkv_layout or (
        p.max_seqlen_q, p.num_heads) == (p.max_seqlen_kv, p.num_gqa_groups))
    return p.qkv_layout if one_size else ",".join(formats_of(p.qkv_layout))


def _kernel_reasons(params) -> list[str]:
    """Why tessera's kernels cannot run this; empty if they can."""
    try:
        lines = case_lines(params)
    except ValueError as error:
        return [str(error)]
    for line in lines:
        reasons = _explained(line, _device(params))
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
