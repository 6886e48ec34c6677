# SPDX-License-Identifier: Apache-2.0
"""Paddle's own attention, as a peer of bench."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np

from .workload import Unsupported, Workload, dense_bias, dense_mask, is_plain_causal, plain


def peer(w: Workload):
    """A function that runs paddle.nn.functional.scaled_dot_product_attention, or its backward pass."""
    if w.device != "cpu":
        raise Unsupported("paddle is timed on the CPU")
    if importlib.util.find_spec("paddle") is None:
        raise Unsupported("paddle is not installed")
    if w.q.dtype.name not in ("float32", "float64"):
        raise Unsupported("paddle has no 16-bit attention on the CPU")
    import paddle
    from paddle.nn import functional as F
    paddle.set_device("cpu")
    if w.threads:
        paddle.base.core.set_num_threads(w.threads)
    kw = w.keywords
    if kw.get("softcap"):
        raise Unsupported("scaled_dot_product_attention has no softcap")
    q, k, v, do = plain(w, "scaled_dot_product_attention")  # [b, h, s, d]
    (b, hq, sq, _), sk = q.shape, k.shape[2]
    causal = is_plain_causal(kw, sq, sk) and sq == sk
    mask = dense_mask(dataclasses.replace(w, keywords=dict(kw, causal=None)) if causal else w,
                            b, hq, sq, sk)
    bias = dense_bias(w, sq, sk)
    if bias is not None and mask is not None:
        bias = np.where(mask, bias, np.array(-np.inf, bias.dtype)).astype(q.dtype)
    extra = bias if bias is not None else mask
    inputs = [paddle.to_tensor(np.ascontiguousarray(x.swapaxes(1, 2))) for x in (q, k, v)]
    extra = None if extra is None else paddle.to_tensor(np.ascontiguousarray(extra))
    options = dict(attn_mask=extra, is_causal=causal, dropout_p=kw.get("dropout_p", 0.0),
                   scale=kw.get("softmax_scale"))
    if not w.backward:
        def run():
            with paddle.no_grad():
                return F.scaled_dot_product_attention(*inputs, **options)
        return run
    inputs += [extra] if kw.get("bias") is not None else []
    for x in inputs:
        x.stop_gradient = False
    o = F.scaled_dot_product_attention(*inputs[:3], **options)
    gradient = paddle.to_tensor(np.ascontiguousarray(do.swapaxes(1, 2)))
    return lambda: paddle.grad(o, inputs, gradient, retain_graph=True)
