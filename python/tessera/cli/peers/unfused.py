# SPDX-License-Identifier: Apache-2.0
"""The unfused computation in NumPy."""

from __future__ import annotations

import numpy as np

from .workload import Unsupported, Workload, dense_bias, dense_mask, plain


def peer(w: Workload):
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
