# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4, the package flash_attn.cute."""

from __future__ import annotations

from .. import work
from .pytorch import import_torch, tensor, timed
from .workload import Unsupported, Workload, first_line, plain, refuse


def peer(w: Workload):
    if w.device != "cuda":
        raise Unsupported("flash-attn-4 needs a GPU, and NumPy arrays are on the CPU")
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise Unsupported(f"flash-attn-4 is not installed: {first_line(error)}") from error
    torch = import_torch(w)
    kw = w.keywords
    refuse(w, ("page_table", "sink", "bias", "alibi_slopes", *work.DATA_MASKS, "seqlens_q", "seqlens_k", "cu_seqlens_q",
               "dropout_p"), "flash-attn-4: {} is not translated by this bench")
    q, k, v, do = (None if x is None else x.swapaxes(1, 2) for x in plain(w, "flash-attn-4"))
    if kw.get("causal") and q.shape[1] != k.shape[1] and kw.get("align") != "bottom_right":
        raise Unsupported("flash-attn-4 aligns a causal mask at the bottom right")
    inputs = [tensor(torch, x, w.device) for x in (q, k, v)]
    window = tuple(None if side < 0 else side for side in kw.get("window") or (-1, -1))

    def forward():
        o = flash_attn_func(*inputs, causal=bool(kw.get("causal")), window_size=window,
                            softmax_scale=kw.get("softmax_scale"), softcap=kw.get("softcap") or 0.0)
        return o[0] if isinstance(o, tuple) else o

    try:
        call = timed(torch, w, forward, inputs, do)
        call()
        return call
    except Exception as error:  # its compiler's own errors are many; all mean "not here"
        raise Unsupported(f"flash-attn-4 cannot: {type(error).__name__}: "
                          f"{first_line(error)}") from error
