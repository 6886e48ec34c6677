# SPDX-License-Identifier: Apache-2.0
"""A case's tensors as NumPy arrays, without a copy, and its problem as keywords of the API."""

from __future__ import annotations

import ctypes

import numpy as np

from .. import _args, _lib

_NAMES = {code: name for name, code in _lib.DTYPES.items()}
_FORMATS = tuple(_lib.FORMATS)
_ALIGNS = {code: name for name, code in _lib.ALIGNS.items()}


def dtype_of(code: int) -> np.dtype:
    name = _NAMES[code]
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes
        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def array(problem: _lib.Problem, buffers: _lib.Buffers, name: str) -> np.ndarray | None:
    """The tensor `name` in the caller's order of axes; None when the problem has none. It lives as
    long as the case."""
    tensor = problem.tensor[_lib.INDEX[name]]
    if not tensor.dtype:
        return None
    dtype = dtype_of(tensor.dtype)
    order = _order(problem, name)
    shape = [0] * sum(axis is not None for axis in order)
    strides = list(shape)
    for i, axis in enumerate(order):
        if axis is not None:
            shape[axis] = tensor.extent[i]
            strides[axis] = tensor.stride[i] * dtype.itemsize
    address = buffers.data[_lib.INDEX[name]]
    if 0 in shape or not address:
        return np.empty(shape, dtype)
    size = sum((n - 1) * stride for n, stride in zip(shape, strides)) + dtype.itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=strides)


def _order(problem: _lib.Problem, name: str):
    paged = bool(problem.tensor[_lib.INDEX["page_table_k"]].dtype)
    layout_q, layout_kv = _FORMATS[problem.format_q], _FORMATS[problem.format_kv]
    key_side = name in ("k", "v", "dk", "dv", "segment_ids_k")
    packed = (layout_kv if key_side else layout_q) == "thd" and not (key_side and paged)
    if name in ("q", "o", "do", "dq"):
        return _args.ORDERS[layout_q]
    if key_side and not name.startswith("segment"):
        return _args.ORDERS["bshd" if paged else layout_kv]
    if name in ("lse", "dlse"):
        return _args.ROWS[packed]
    if name == "key_ranges":
        return _args.RANGES[packed]
    if name.startswith("segment_ids"):
        return _args.SEGMENTS[packed]
    if name in ("alibi_slopes", "dalibi_slopes", "k_scale", "v_scale"):
        one = problem.tensor[_lib.INDEX[name]].extent[0] == 1
        return (None, 0) if one else (0, 1)
    if name.startswith("page_table"):
        return (0, 1)
    return (0, 1, 2, 3) if name in ("bias", "dbias", "mask") else (0,)


def arguments(problem: _lib.Problem, buffers: _lib.Buffers) -> tuple[list, dict]:
    """([q, k, v], keywords) that say to tessera.attention what the problem says."""
    def tensor(name):
        return array(problem, buffers, name)

    flags = problem.flags
    layouts = _FORMATS[problem.format_q], _FORMATS[problem.format_kv]
    kw = {"layout": layouts[0] if layouts[0] == layouts[1] else layouts}
    for name in ("seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded",
                 "cu_seqlens_k_padded", "key_ranges", "bias", "alibi_slopes", "sink", "rng_state",
                 "k_scale", "v_scale"):
        kw[name] = tensor(name)
    if flags & _lib.SAME_LENGTHS:
        for kind in ("seqlens", "cu_seqlens"):
            kw[f"{kind}_k"] = kw[f"{kind}_q"]
    kw["drop" if flags & _lib.MASK_DROP else "keep"] = tensor("mask")
    for name, first, second in (("segment_ids", "_q", "_k"), ("page_table", "_k", "_v")):
        pair = tensor(name + first), tensor(name + second)
        kw[name] = pair if pair[1] is not None else pair[0]
    if flags & _lib.SINK_OFF_BY_ONE:
        kw["sink"] = "off_by_one"
    if flags & _lib.CAUSAL:
        kw["causal"] = True
    if flags & _lib.WINDOW:
        kw["window"] = problem.window_left, problem.window_right
    kw["align"] = _ALIGNS.get(problem.align)
    if flags & _lib.MAX_SEQLEN_Q:
        kw["max_seqlen_q"] = problem.max_seqlen_q
    if flags & _lib.MAX_SEQLEN_K:
        kw["max_seqlen_k"] = problem.max_seqlen_k
    if flags & _lib.BIAS_PRE_SCALE:
        kw["bias_at"] = "pre_scale"
    for flag, name in ((_lib.SOFTMAX_SCALE, "softmax_scale"), (_lib.SOFTCAP, "softcap"),
                       (_lib.DROPOUT, "dropout_p")):
        if flags & flag:
            kw[name] = getattr(buffers, name)
    for flag, name in ((_lib.DETERMINISTIC, "deterministic"),
                       (_lib.BATCH_INVARIANT, "batch_invariant"),
                       (_lib.ALLOW_QUADRATIC, "allow_quadratic")):
        kw[name] = bool(flags & flag)
    if problem.backend:
        kw["backend"] = problem.backend.decode()
    return [tensor("q"), tensor("k"), tensor("v")], \
        {name: value for name, value in kw.items() if value is not None}
