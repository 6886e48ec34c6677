# SPDX-License-Identifier: Apache-2.0
"""bench --against fa3:PATH: FlashAttention-3's Hopper kernels, as a library of PyTorch operators.

PATH is a shared library that registers torch.ops.flash_attn_3.fwd and .bwd, as FlashAttention-3
builds them without Python. What it was not built for, it refuses."""

from __future__ import annotations

from .pytorch import import_torch, tensor
from .workload import Unsupported, Workload, first_line, plain

# What fwd takes between v and the scale: new keys and values, lengths, pages, rotary tables, the
# scales of FP8. Sequences here are full, and have none of them.
_ABSENT = (None,) * 20


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
        for keyword in ("bias", "alibi_slopes", "sink", "keep", "drop", "key_ranges", "segment_ids",
                        "seqlens_q", "seqlens_k", "dropout_p", "page_table"):
            if kw.get(keyword) is not None and kw.get(keyword) != 0:
                raise Unsupported(f"fa3 has no {keyword}")
        q, k, v, do = (None if x is None else x.swapaxes(1, 2) for x in plain(w, "fa3"))
        if q.shape[1] != k.shape[1] and kw.get("causal") and kw.get("align") != "bottom_right":
            raise Unsupported("fa3 aligns a causal mask at the bottom right")
        q, k, v = (tensor(torch, x, w.device).contiguous() for x in (q, k, v))
        causal, (left, right) = bool(kw.get("causal")), kw.get("window") or (-1, -1)
        softcap, scale = kw.get("softcap") or 0.0, kw.get("softmax_scale") or q.shape[-1]**-0.5
        ops = torch.ops.flash_attn_3

        def forward():
            return ops.fwd(q, k, v, *_ABSENT, scale, causal, left, right, 0, softcap, True, None, 1,
                           None, 0)[:2]

        if do is None:
            return forward
        o, lse = forward()
        do = tensor(torch, do, w.device).contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))

        def backward():
            ops.bwd(do, q, k, v, o, lse, dq, dk, dv, None, None, None, None, None, None, scale,
                    causal, left, right, softcap, bool(kw.get("deterministic")), 0)
            return dq, dk, dv

        return backward
