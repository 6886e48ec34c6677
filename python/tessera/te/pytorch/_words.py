# SPDX-License-Identifier: Apache-2.0
"""TE's words, read: one canonical form each, and errors that name what the caller gave."""

from __future__ import annotations

import math
import numbers
import re
import warnings

import torch

from ... import _lib
from .._words import LAYOUTS, mask_of
from .constants import AttnBiasTypes, AttnMaskTypes, QKVFormats, SoftmaxTypes

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FORMAT = re.compile(r"[^bshdt]")


def error(name: str, value, rule: str) -> ValueError:
    return ValueError(f"DotProductAttention: {name}={value!r}: {rule}")


def later(name: str, value: str, feature: str, instead: str) -> _lib.Refused:
    """What is said of a part of TE that is not here yet."""
    return _lib.Refused(f"DotProductAttention: {name}={value}: tessera.te does not have {feature} "
                        f"yet; {instead}")


def one_rank(cp_group):
    """A group of one rank is none."""
    groups = cp_group if isinstance(cp_group, list) else [cp_group] if cp_group else []
    for group in groups:
        ranks = torch.distributed.get_world_size(group)
        if ranks > 1:
            raise later("cp_group", f"{ranks} ranks", "context parallelism",
                        "call DotProductAttention or attn_forward_func_with_cp")


def dropout(value) -> float:
    if not isinstance(value, numbers.Real) or not 0 <= value < 1:
        raise error("attention_dropout", value, "must be in [0, 1)")
    return value


def softcap(value) -> float:
    """0 is none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not (math.isfinite(value) and value >= 0):
        raise error("softcap", value, "must be finite and at least 0, and 0 turns it off")
    return float(value)


def quoted(words) -> str:
    return ", ".join(f'"{word}"' for word in words)


def mask_type(value) -> str:
    """As _words.mask_of of every framework."""
    name = mask_of(value)
    if name is None:
        raise error("attn_mask_type", value, f"must be one of {quoted(AttnMaskTypes)}")
    return name


def qkv_format(value) -> str:
    return _one_of("qkv_format", value, QKVFormats)


def qkv_layout(value) -> str:
    return _one_of("qkv_layout", value, LAYOUTS)


def bias_type(value) -> str:
    return _one_of("core_attention_bias_type", value, AttnBiasTypes)


def softmax_type(value) -> str:
    return _one_of("softmax_type", value, SoftmaxTypes)


def _one_of(name, value, words) -> str:
    if value not in words:
        raise error(name, value, f"must be one of {quoted(words)}")
    return value


def formats_of(layout: str) -> tuple[str, str]:
    """(q_format, kv_format) of a layout such as "sbhd_sb2hd" or "paged_kv_thd_bshd_bshd"."""
    parts = layout.removeprefix("paged_kv_").split("_")
    return _FORMAT.sub("", parts[0]), _FORMAT.sub("", parts[-1])


def bottom_right(mask: str, value) -> bool:
    """Where the diagonal ends: the causal masks say it by name, others default to bottom right."""
    if mask in ("causal", "padding_causal"):
        return False
    if mask.endswith("bottom_right") or value is None:
        return True
    return bool(value)


def check_set_window_size(attn_mask_type: str, window_size=None) -> tuple[int, int]:
    """The window that goes with a mask: causal masks end at the diagonal, with a warning when the
    window said otherwise; -1 is unbounded."""
    causal = "causal" in mask_type(attn_mask_type)
    if window_size is None:
        return (-1, 0) if causal else (-1, -1)
    ok = isinstance(window_size, (tuple, list)) and len(window_size) == 2 and \
        all(isinstance(n, int) and not isinstance(n, bool) and n >= -1 for n in window_size)
    if not ok:
        raise error("window_size", window_size, "must be a pair (left, right) of integers, each -1 "
                    "for unbounded or at least 0")
    left, right = window_size
    if causal and right != 0:
        warnings.warn(f"window_size should be (-1, 0) or (>=0, 0) for {attn_mask_type=}")
        return left, 0
    if not causal and (left, right) == (-1, 0):
        warnings.warn(f"window_size should be (-1, -1) or (>=0, >=0) for {attn_mask_type=}")
        return -1, -1
    return left, right


def tensors(**named):
    """Every given tensor is one, and on query_layer's device."""
    q = named["query_layer"]
    if q.device.type not in ("cpu", "cuda"):
        raise error("query_layer.device", str(q.device), "must be on the CPU or on a CUDA device")
    for name, x in named.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise error(name, type(x).__name__, "must be a torch.Tensor")
        if x is not None and x.device != q.device:
            raise error(f"{name}.device", str(x.device), "all tensors must be on one device; "
                        f"query_layer is on {str(q.device)!r}")


def shapes(q, k, v, q_format: str, kv_format: str):
    """query_layer, key_layer and value_layer fit together."""
    for name, x, layout in (("query_layer", q, q_format), ("key_layer", k, kv_format),
                            ("value_layer", v, kv_format)):
        if x.dtype not in FLOATS:
            raise error(f"{name}.dtype", x.dtype, "must be float16, bfloat16, float32 or float64")
        if x.dtype != q.dtype:
            raise error(f"{name}.dtype", x.dtype, f"must be query_layer's, {q.dtype}")
        if x.dim() != len(layout):
            raise error(f"{name}.shape", list(x.shape), f"must have the axes of qkv_format="
                        f'"{layout}"')
        if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
            raise error(f"{name}.stride(-1)", x.stride(-1), "must be 1; call contiguous()")
    if k.shape[:-1] != v.shape[:-1]:
        raise error("value_layer.shape", list(v.shape), "must be key_layer's, "
                    f"{list(k.shape)}, but for the head dim")
    if q.shape[-1] != k.shape[-1]:
        raise error("key_layer.shape", list(k.shape), "must end with query_layer's head dim, "
                    f"{q.shape[-1]}")
    if q_format != "thd" and kv_format != "thd" and \
            q.shape[q_format.index("b")] != k.shape[kv_format.index("b")]:
        raise error("key_layer.shape", list(k.shape), "must have query_layer's batch size, "
                    f"{q.shape[q_format.index('b')]}")


def cu_seqlens(name: str, x, why: str) -> torch.Tensor:
    if x is None:
        raise error(name, None, f"{why} needs it: int32 [batch_size + 1], from 0 to the number of "
                    "tokens")
    if x.dim() != 1 or x.shape[0] < 1 or x.dtype not in (torch.int32, torch.int64):
        raise error(name, f"{x.dtype}{list(x.shape)}", "must be int32 [batch_size + 1]")
    return x


def max_seqlen(name: str, value) -> int | None:
    """As an integer; a tensor is read, which on a GPU waits for it."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = int(value)
    if isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool):
        return value
    raise error(name, value, "must be an integer, or a tensor of one")


def broadcastable(name: str, x, extents: tuple, axes: str):
    """Each axis of x is 1 or that of `extents`, None being any."""
    fits = x.dim() == 4 and all(n in (1, extent) or extent is None
                                for n, extent in zip(x.shape, extents))
    if not fits:
        shown = ", ".join("?" if n is None else str(n) for n in extents)
        raise error(f"{name}.shape", list(x.shape),
                    f"must be broadcastable to [{axes}] = [{shown}]")
