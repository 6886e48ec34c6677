# SPDX-License-Identifier: Apache-2.0
"""bench --against fa3:PATH: FlashAttention-3's Hopper kernels, as a library of PyTorch operators.

PATH is a shared library that registers torch.ops.flash_attn_3.fwd and .bwd, as FlashAttention-3
builds them without Python. What it was not built for, it refuses."""

from __future__ import annotations

import numpy as np

from .. import work
from .pytorch import import_torch, tensor
from .workload import Unsupported, Workload, first_line, plain, refuse

# cu_seqlens and the longest sequence, of queries and of keys.
_DENSE = (None,) * 4


def _inputs(w: Workload):
    """(q, k, v, do) as FlashAttention-3 has them, [b, s, h, d] or packed [t, h, d], and how they are packed."""
    kw = w.keywords
    if kw.get("layout") != "thd":
        return tuple(None if x is None else x.swapaxes(1, 2) for x in plain(w, "fa3")), _DENSE
    if kw.get("cu_seqlens_q_padded") is not None or kw.get("cu_seqlens_k_padded") is not None:
        raise Unsupported("fa3 has no gaps between packed sequences")
    if kw.get("causal") and kw.get("align") != "bottom_right" and kw["cu_seqlens_q"] is not kw["cu_seqlens_k"]:
        raise Unsupported("fa3 aligns a causal mask at the bottom right")
    cu = kw["cu_seqlens_q"], kw["cu_seqlens_k"]
    longest = (kw.get(f"max_seqlen_{side}") or int(np.diff(x).max()) for side, x in zip("qk", cu))
    return (w.q, w.k, w.v, w.do), (*(x.astype(np.int32) for x in cu), *longest)


class Library:
    """FlashAttention-3, loaded from a file."""

    def __init__(self, path: str):
        self.path = path

    def peer(self, w: Workload):
        """A function of one call of the workload."""
        torch = import_torch(w)
        if w.device != "cuda":
            raise Unsupported("fa3 needs a CUDA device")
        try:
            torch.ops.load_library(self.path)
            call = self._call(torch, w)
            call()
            torch.cuda.synchronize()
            return call
        except (OSError, RuntimeError, AttributeError) as error:
            raise Unsupported(f"fa3:{self.path} cannot: {first_line(error)}") from error

    @staticmethod
    def _call(torch, w: Workload):
        kw = w.keywords
        refuse(w, ("bias", "alibi_slopes", "sink", *work.DATA_MASKS, "seqlens_q", "seqlens_k", "dropout_p",
                   "page_table"), "fa3 has no {}")
        (q, k, v, do), packed = _inputs(w)
        if packed is _DENSE and q.shape[1] != k.shape[1] and kw.get("causal") and kw.get("align") != "bottom_right":
            raise Unsupported("fa3 aligns a causal mask at the bottom right")
        q, k, v = (tensor(torch, x, w.device).contiguous() for x in (q, k, v))
        cu_q, cu_k, longest_q, longest_k = (tensor(torch, x, w.device) if isinstance(x, np.ndarray) else x
                                            for x in packed)
        causal, (left, right) = bool(kw.get("causal")), kw.get("window") or (-1, -1)
        softcap, scale = kw.get("softcap") or 0.0, kw.get("softmax_scale") or q.shape[-1]**-0.5
        ops = torch.ops.flash_attn_3

        def forward():
            return ops.fwd(q, k, v, None, None, None, None, cu_q, cu_k, None, None, None, longest_q, longest_k,
                           *[None] * 9, scale, causal, left, right, 0, softcap, True, None, 1,
                           None, 0)[:2]

        if do is None:
            return forward
        o, lse = forward()
        do = tensor(torch, do, w.device).contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))

        def backward():
            ops.bwd(do, q, k, v, o, lse, dq, dk, dv, cu_q, cu_k, None, None, longest_q, longest_k, scale,
                    causal, left, right, softcap, bool(kw.get("deterministic")), 0)
            return dq, dk, dv

        return backward
