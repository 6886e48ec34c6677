# SPDX-License-Identifier: Apache-2.0
"""Other ways to compute a case, for bench: each peer turns a Workload into a function to time, or
raises Unsupported with the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import warnings
from typing import Callable, Iterator

import numpy as np

from . import work


# Peers that are files: what stands before their path.
BUILD, FA3 = "build:", "fa3:"


class Unsupported(Exception):
    pass


@dataclasses.dataclass
class Workload:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray | None  # None: the forward pass
    keywords: dict
    threads: int | None
    device: str = "cpu"
    backend: str | None = None  # asked for by name
    gradients: tuple[str, ...] = ()
    dlse: bool = False  # a gradient of lse comes in, beside do
    # Sets of tensors that were drawn on the device, in turn, where arrays stand for shapes alone (decode_grid).
    drawn: Iterator[dict] | None = None

    @property
    def backward(self) -> bool:
        return self.do is not None


def prepare(name: str, workload: Workload) -> Callable[[], object]:
    """name: of PEERS, or build:PATH, another build of libtessera, or fa3:PATH, FlashAttention-3."""
    if workload.drawn is not None and name not in OF_DRAWN:
        raise Unsupported(f"{name}: takes data of the host, and a grid has none")
    if name.startswith(BUILD):
        from .other_build import Build
        return Build(name[len(BUILD):]).peer(workload)
    if name.startswith(FA3):
        from .fa3 import Library
        return Library(name[len(FA3):]).peer(workload)
    if name not in PEERS:
        raise Unsupported(f"no peer of this name; there are {', '.join(PEERS)}")
    if name not in OF_BITS:
        require_numpy_dtypes(workload, name)
    return PEERS[name](workload)


def require_numpy_dtypes(w: Workload, name: str):
    """Unsupported where NumPy lacks the dtypes: it would compute on their bits."""
    for x in (w.q, w.k, w.v, w.keywords.get("bias")):
        if x is not None and x.dtype.names:
            raise Unsupported(f"{name} needs the package ml_dtypes for {x.dtype.names[0]}: pip install ml_dtypes")


# ---- what peers without our keywords are given instead ----

_FORMATS = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}


def _bhsd(x, layout):
    return np.ascontiguousarray(x.transpose(_FORMATS[layout]))


def plain(w: Workload, name: str):
    """(q, k, v, do) as contiguous [b, h, s, d]; Unsupported for what has no such form."""
    kw = w.keywords
    layout = kw.get("layout", "bshd")
    layout_q, layout_k = layout if isinstance(layout, tuple) else (layout, layout)
    for keyword in ("page_table", "sink"):
        if kw.get(keyword) is not None:
            raise Unsupported(f"{name} has no {keyword}")
    if "thd" in (layout_q, layout_k):
        raise Unsupported(f"{name} has no packed sequences")
    if kw.get("bias_at") == "pre_scale":
        raise Unsupported(f"{name} has no bias before the scale")
    return (_bhsd(w.q, layout_q), _bhsd(w.k, layout_k), _bhsd(w.v, layout_k),
            None if w.do is None else _bhsd(w.do, layout_q))


def is_plain_causal(kw, sq, sk) -> bool:
    return bool(kw.get("causal")) and kw.get("window") is None and \
        (sq == sk or kw.get("align") == "top_left")


def dense_mask(w: Workload, b, hq, sq, sk) -> np.ndarray | None:
    """Dense [b|1, hq|1, sq, sk], True = visible; None when everything is."""
    kw = w.keywords
    names = ("causal", "window", "seqlens_q", "seqlens_k", "keep", "drop", "key_ranges",
             "segment_ids")
    if all(kw.get(name) is None for name in names):
        return None
    per_batch = any(kw.get(name) is not None for name in names[2:])
    mask = np.stack([work.visible(n, w.q, w.k, kw) for n in range(b if per_batch else 1)])
    return np.broadcast_to(mask, (len(mask), mask.shape[1], sq, sk))


def dense_bias(w: Workload, sq, sk) -> np.ndarray | None:
    """Post-scale bias and ALiBi as one dense array of at most 4 axes."""
    kw = w.keywords
    bias = kw.get("bias")
    if kw.get("alibi_slopes") is None:
        return bias
    require_numpy_dtypes(w, "ALiBi as a dense bias")
    slopes = np.atleast_2d(kw["alibi_slopes"])[:, :, None, None].astype(np.float32)
    shift = sk - sq if kw.get("align") == "bottom_right" else 0
    distance = np.abs(np.arange(sq)[:, None] + shift - np.arange(sk)).astype(np.float32)
    alibi = -slopes * distance
    return alibi.astype(w.q.dtype) if bias is None else (alibi + bias).astype(w.q.dtype)


# ---- PyTorch ----

def import_torch(w: Workload):
    """torch, with the workload's threads."""
    if importlib.util.find_spec("torch") is None:
        raise Unsupported("torch is not installed")
    import torch
    if w.threads:
        torch.set_num_threads(w.threads)
    return torch


def _tensor(torch, x, device="cpu"):
    if device != "cpu":
        return _tensor(torch, x).to(device)
    from . import conformance  # whose library explain does without
    name = conformance.name_of(x.dtype)
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        bits = torch.from_numpy(np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}"))
        return bits.view(getattr(torch, name))
    return torch.from_numpy(np.require(x, requirements=["C", "W"]))


def _gradient_function(torch, forward, inputs, do):
    """A function of the backward pass alone: the graph of one forward pass, used again."""
    for x in inputs:
        x.requires_grad_(True)
    o = forward()
    return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


def _torch_sdpa(w: Workload, kernel: str | None = None):
    """kernel: a member of SDPBackend, which then runs or refuses; None: the one that PyTorch picks."""
    torch = import_torch(w)
    if w.drawn is not None:
        from .decode_peers import sdpa
        return sdpa(w, lambda: _choice(kernel))
    kw = w.keywords
    if kw.get("softcap"):
        raise Unsupported("scaled_dot_product_attention has no softcap")
    q, k, v, do = plain(w, "scaled_dot_product_attention")
    (b, hq, sq, _), sk = q.shape, k.shape[2]
    causal = is_plain_causal(kw, sq, sk)
    others = dict(kw, causal=None) if causal else kw
    mask = dense_mask(dataclasses.replace(w, keywords=others), b, hq, sq, sk)
    bias = dense_bias(w, sq, sk)
    if bias is not None and (mask is not None or causal):
        require_numpy_dtypes(w, "a mask beside a bias")
        if mask is None:
            mask = dense_mask(w, b, hq, sq, sk)
        causal = False
        bias = np.where(mask, bias, np.array(-np.inf, bias.dtype)).astype(q.dtype)
    tq, tk, tv = (_tensor(torch, x, w.device) for x in (q, k, v))
    extra = bias if bias is not None else mask
    extra = None if extra is None else _tensor(torch, extra, w.device)
    options = dict(attn_mask=extra, is_causal=causal, dropout_p=kw.get("dropout_p", 0.0),
                   scale=kw.get("softmax_scale"), enable_gqa=hq != k.shape[1])

    def forward():
        with _choice(kernel):
            return torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, **options)

    if not w.backward:
        def run():
            with torch.no_grad():
                return forward()
        return run
    inputs = [tq, tk, tv] + ([extra] if kw.get("bias") is not None else [])
    return _gradient_function(torch, forward, inputs, _tensor(torch, do, w.device))


def _choice(kernel: str | None):
    if kernel is None:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel(getattr(SDPBackend, kernel))


def _torch_kernel(name: str, kernel: str):
    """One of PyTorch's fused kernels, by its member of SDPBackend."""
    def peer(w: Workload):
        if w.device != "cuda":
            raise Unsupported(f"{name} needs a GPU, and NumPy arrays are on the CPU")
        if w.backward and w.keywords.get("dropout_p"):
            # PyTorch 2.11: an illegal memory access, and the process is lost.
            raise Unsupported(f"{name} with dropout faults when its gradients are replayed in a graph")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why each of the other kernels is not used
                call = _torch_sdpa(w, kernel)
                call()
            return call
        except RuntimeError as error:
            raise Unsupported(f"{name} cannot: {first_line(error)}") from error
    return peer


def first_line(error) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _at(x, *indices):
    """An index for each axis of x, 0 where it is broadcast."""
    return tuple(i if n > 1 else 0 for i, n in zip(indices[-x.ndim:], x.shape))


def _torch_flex(w: Workload):
    torch = import_torch(w)
    kw = w.keywords
    for keyword in ("key_ranges", "seqlens_q", "seqlens_k"):
        if kw.get(keyword) is not None:
            raise Unsupported(f"FlexAttention: {keyword} is not translated by this bench")
    if kw.get("dropout_p"):
        raise Unsupported("FlexAttention has no dropout")
    if w.backward and w.device == "cpu":
        raise Unsupported("FlexAttention on the CPU has no backward pass")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    q, k, v, do = plain(w, "FlexAttention")
    (b, hq, sq, _), sk = q.shape, k.shape[2]
    shift = sk - sq if kw.get("align") == "bottom_right" else 0
    left, right = kw.get("window") or (-1, -1)
    right = 0 if kw.get("causal") else right
    softcap, slopes, ids = kw.get("softcap"), kw.get("alibi_slopes"), kw.get("segment_ids")
    tq, tk, tv = (_tensor(torch, x, w.device) for x in (q, k, v))
    slopes = None if slopes is None else _tensor(torch, np.atleast_2d(slopes), w.device)
    ids = None if ids is None else [_tensor(torch, x, w.device) for x in
                                    (ids if isinstance(ids, tuple) else (ids, ids))]
    bias, keep, drop = (None if kw.get(name) is None else _tensor(torch, kw[name], w.device)
                        for name in ("bias", "keep", "drop"))

    def visible(n, h, i, j):
        seen = (i + shift - left <= j) if left >= 0 else (j >= 0)
        if right >= 0:
            seen = seen & (j <= i + shift + right)
        if keep is not None:
            seen = seen & keep[_at(keep, n, h, i, j)]
        if drop is not None:
            seen = seen & ~drop[_at(drop, n, h, i, j)]
        return seen if ids is None else seen & (ids[0][n, i] == ids[1][n, j])

    def score(x, n, h, i, j):
        if softcap:
            x = softcap * torch.tanh(x / softcap)
        if slopes is not None:
            x = x - slopes[n if slopes.shape[0] > 1 else 0, h] * (i + shift - j).abs()
        return x if bias is None else x + bias[_at(bias, n, h, i, j)]

    def of_more_than_one(axis):
        masks = [x for x in (keep, drop) if x is not None and x.ndim >= 4 - axis]
        return any(x.shape[axis - 4] > 1 for x in masks)

    block_mask = None
    if left >= 0 or right >= 0 or not (ids is keep is drop is None):
        block_mask = create_block_mask(
            visible, b if ids is not None or of_more_than_one(0) else None,
            hq if of_more_than_one(1) else None, sq, sk, device=w.device)
    torch.compiler.reset()  # else the eighth problem finds the compiler's cache full and runs unfused
    compiled = torch.compile(flex_attention)
    options = dict(score_mod=score if softcap or not (slopes is bias is None) else None,
                   block_mask=block_mask, scale=kw.get("softmax_scale"),
                   enable_gqa=hq != k.shape[1])

    def forward():
        return compiled(tq, tk, tv, **options)

    def run():
        with torch.no_grad():
            return forward()

    try:
        if not w.backward:
            run()
            return run
        inputs = [tq, tk, tv] + ([bias] if bias is not None else [])
        call = _gradient_function(torch, forward, inputs, _tensor(torch, do, w.device))
        call()
        return call
    except Exception as error:  # the compiler's own errors are many; all mean "not here"
        raise Unsupported(f"FlexAttention does not compile this: {type(error).__name__}: "
                          f"{first_line(error)}") from error


# ---- FlashAttention ----

def _flash_attn_4(w: Workload):
    if w.device != "cuda":
        raise Unsupported("flash-attn-4 needs a GPU, and NumPy arrays are on the CPU")
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise Unsupported(f"flash-attn-4 is not installed: {first_line(error)}") from error
    torch = import_torch(w)
    kw = w.keywords
    for keyword in ("page_table", "sink", "bias", "alibi_slopes", "keep", "drop", "key_ranges",
                    "segment_ids", "seqlens_q", "seqlens_k", "cu_seqlens_q", "dropout_p"):
        given = kw.get(keyword)
        if given is not None and not (isinstance(given, (int, float)) and given == 0):
            raise Unsupported(f"flash-attn-4: {keyword} is not translated by this bench")
    q, k, v, do = (None if x is None else x.swapaxes(1, 2) for x in plain(w, "flash-attn-4"))
    if kw.get("causal") and q.shape[1] != k.shape[1] and kw.get("align") != "bottom_right":
        raise Unsupported("flash-attn-4 aligns a causal mask at the bottom right")
    inputs = [_tensor(torch, x, w.device) for x in (q, k, v)]
    window = tuple(None if side < 0 else side for side in kw.get("window") or (-1, -1))

    def forward():
        o = flash_attn_func(*inputs, causal=bool(kw.get("causal")), window_size=window,
                            softmax_scale=kw.get("softmax_scale"), softcap=kw.get("softcap") or 0.0)
        return o[0] if isinstance(o, tuple) else o

    def run():
        with torch.no_grad():
            return forward()

    try:
        call = run if do is None else \
            _gradient_function(torch, forward, inputs, _tensor(torch, do, w.device))
        call()
        return call
    except Exception as error:  # its compiler's own errors are many; all mean "not here"
        raise Unsupported(f"flash-attn-4 cannot: {type(error).__name__}: "
                          f"{first_line(error)}") from error


def _torch_matmul(w: Workload):
    torch = import_torch(w)
    kw = w.keywords
    if kw.get("softcap") or kw.get("dropout_p"):
        raise Unsupported("the unfused computation has no softcap and no dropout here")
    q, k, v, do = plain(w, "the unfused computation")
    (b, hq, sq, dqk), (hk, sk) = q.shape, k.shape[1:3]
    scale = dqk**-0.5 if kw.get("softmax_scale") is None else kw["softmax_scale"]
    mask, bias = dense_mask(w, b, hq, sq, sk), dense_bias(w, sq, sk)
    tq, tk, tv = (_tensor(torch, x, w.device) for x in (q, k, v))
    hidden = None if mask is None else _tensor(torch, ~mask, w.device)
    bias = None if bias is None else _tensor(torch, bias, w.device)

    def forward():
        rows = tq.reshape(b, hk, -1, dqk)
        x = (torch.matmul(rows, tk.transpose(2, 3)) * scale).reshape(b, hq, sq, sk)
        x = x if bias is None else x + bias
        x = x if hidden is None else x.masked_fill(hidden, -torch.inf)
        p = torch.softmax(x, -1).reshape(b, hk, -1, sk)
        return torch.matmul(p, tv).reshape(b, hq, sq, -1)

    if not w.backward:
        def run():
            with torch.no_grad():
                return forward()
        return run
    inputs = [tq, tk, tv] + ([bias] if kw.get("bias") is not None else [])
    return _gradient_function(torch, forward, inputs, _tensor(torch, do, w.device))


# ---- the unfused computation in NumPy ----

def _unfused(w: Workload):
    kw = w.keywords
    if kw.get("dropout_p"):
        raise Unsupported("the unfused computation has no dropout here")
    q, k, v, do = plain(w, "the unfused computation")
    (b, hq, sq, dqk), (hk, sk) = q.shape, k.shape[1:3]
    scale = kw.get("softmax_scale")
    scale = np.float32(dqk**-0.5 if scale is None else scale)
    mask, bias, cap = dense_mask(w, b, hq, sq, sk), dense_bias(w, sq, sk), kw.get("softcap")
    group = hq // hk

    def forward():
        q32 = q.astype(np.float32).reshape(b, hk, group * sq, dqk)
        k32, v32 = k.astype(np.float32), v.astype(np.float32)
        x = (q32 @ k32.swapaxes(2, 3)).reshape(b, hq, sq, sk) * scale
        if cap:
            x = np.float32(cap) * np.tanh(x / np.float32(cap))
        if bias is not None:
            x += bias
        if mask is not None:
            x = np.where(mask, x, np.float32(-np.inf))
        x -= np.maximum(x.max(-1, keepdims=True), np.finfo(np.float32).min)
        np.exp(x, out=x)
        total = x.sum(-1, keepdims=True)
        x /= np.where(total > 0, total, 1)
        o = x.reshape(b, hk, group * sq, sk) @ v32
        return o.reshape(b, hq, sq, -1).astype(q.dtype), x, q32, k32, v32

    if not w.backward:
        return lambda: forward()[0]
    if cap:
        raise Unsupported("the unfused backward pass has no softcap here")
    _, p, q32, k32, v32 = forward()
    p = p.reshape(b, hk, group * sq, sk)

    def backward():
        g = do.astype(np.float32).reshape(b, hk, group * sq, -1)
        dv = p.swapaxes(2, 3) @ g
        dp = g @ v32.swapaxes(2, 3)
        dp -= (p * dp).sum(-1, keepdims=True)
        dp *= p
        return (dp @ k32) * scale, (dp.swapaxes(2, 3) @ q32) * scale, dv
    return backward


def _paddle(w: Workload):
    from .paddle_peer import peer
    return peer(w)


def _decode(name: str):
    def peer(w: Workload):
        from . import decode_peers
        return getattr(decode_peers, name)(w)
    return peer


def _jax(implementation: str):
    def peer(w: Workload):
        from . import jax_peers
        return jax_peers.prepare(w, implementation)
    return peer


PEERS = {"torch": _torch_sdpa, "flex": _torch_flex, "matmul": _torch_matmul, "numpy": _unfused,
         "cudnn": _torch_kernel("cudnn", "CUDNN_ATTENTION"),
         "flash-attn-2": _torch_kernel("flash-attn-2", "FLASH_ATTENTION"),
         "efficient": _torch_kernel("efficient", "EFFICIENT_ATTENTION"),
         "flashinfer": _decode("flashinfer"), "flash": _decode("flash"),
         "flash-attn-4": _flash_attn_4, "paddle": _paddle,
         "jax-xla": _jax("xla"), "jax-cudnn": _jax("cudnn")}
OF_DRAWN = {"torch", "cudnn", "flash-attn-2", "efficient", "flashinfer", "flash"}
OF_BITS = set(PEERS) - {"numpy", "paddle", "jax-xla", "jax-cudnn"}  # PyTorch takes bits of bf16 and fp8 as they are
