# SPDX-License-Identifier: Apache-2.0
"""merge, dropout_mask and alibi_slopes on NumPy arrays."""

from __future__ import annotations

import ctypes
import math

import numpy as np

from . import _args, _attention, _lib, _numpy


def merge(parts, *, layout="bshd"):
    """Attention over the union of disjoint key sets, from the (o, lse) of each.

    parts is a list of (o, lse), all of one shape and dtype. Returns a new (o, lse). A part's o is
    not read where its lse is -inf; a sink belongs to one part only.

    >>> o, lse = tessera.merge([(o1, lse1), (o2, lse2)])
    """
    a = _args.Arguments(_numpy, "merge")
    a.layout_q = a.choice("layout", layout, tuple(_lib.FORMATS))
    if not isinstance(parts, (list, tuple)) or not parts:
        raise a.error("parts", parts, "must be a list of at least one pair (o, lse)")
    o_index, lse_index = _lib.INDEX["o"], _lib.INDEX["lse"]
    n = len(parts)
    tensors = (_lib.Tensor * n)(), (_lib.Tensor * n)()
    pointers = (ctypes.c_void_p * n)(), (ctypes.c_void_p * n)()
    for i, part in enumerate(parts):
        if not isinstance(part, (list, tuple)) or len(part) != 2:
            raise a.error(f"parts[{i}]", part, "must be a pair (o, lse)")
        a.put("o", f"parts[{i}].o", part[0], a.order_q, axes="b, sq, hq, dv")
        a.put("lse", f"parts[{i}].lse", part[1], a.order_rows, axes="b, hq, sq")
        for side, index in enumerate((o_index, lse_index)):
            tensors[side][i] = a.problem.tensor[index]
            pointers[side][i] = _numpy.pointer(part[side])
    first_o, first_lse = parts[0]
    a.put_new("o", first_o.dtype.name, first_o.shape, a.order_q)
    a.put_new("lse", first_lse.dtype.name, first_lse.shape, a.order_rows)
    o = _numpy.empty("merge", "o", first_o.shape, first_o.dtype)
    lse = _numpy.empty("merge", "lse", first_lse.shape, first_lse.dtype)
    error = _lib.error_of_thread()
    context = _context()
    code = _lib.merge(n, _lib.FORMATS[layout], tensors[0], pointers[0], tensors[1], pointers[1],
                      ctypes.addressof(a.problem.tensor[o_index]), _numpy.pointer(o),
                      ctypes.addressof(a.problem.tensor[lse_index]), _numpy.pointer(lse),
                      _lib.CPU_ADDRESS, ctypes.addressof(context), ctypes.addressof(error))
    _lib.check(code, error, "merge")
    return o, lse


def dropout_mask(b, hq, sq, sk, dropout_p, rng_state) -> np.ndarray:
    """The mask that attention(dropout_p=, rng_state=) applies: bool [b, hq, sq, sk], True = kept.

    >>> keep = tessera.dropout_mask(2, 16, 128, 128, 0.1, rng_state=(seed, 0))
    """
    a = _args.Arguments(_numpy, "dropout_mask")
    extents = []
    for name, value in (("b", b), ("hq", hq), ("sq", sq), ("sk", sk)):
        extents.append(a.integer(name, value))
        if extents[-1] < 0:
            raise a.error(name, value, "must not be negative")
    if math.prod(extents) >= 2**63:
        raise a.error("b, hq, sq, sk", tuple(extents), "the mask must have fewer than 2^63 elements")
    p = a.number("dropout_p", dropout_p)
    state = _attention._rng_array("dropout_mask", rng_state)
    a.put("rng_state", "rng_state", state, (0,), axes="seed and offset")
    if state.dtype != np.int64 or state.shape != (2,):
        raise a.error("rng_state", f"{state.dtype}{list(state.shape)}", "must be int64 of shape [2]")
    state = np.ascontiguousarray(state)
    keep = _numpy.empty("dropout_mask", "keep", tuple(extents), np.bool_)
    error = _lib.error_of_thread()
    context = _context()
    code = _lib.dropout_mask(*extents, p, _numpy.pointer(state), _numpy.pointer(keep),
                             _lib.CPU_ADDRESS, ctypes.addressof(context), ctypes.addressof(error))
    _lib.check(code, error, "dropout_mask")
    return keep


def alibi_slopes(hq) -> np.ndarray:
    """The usual ALiBi slopes, fp32 [hq]: 2^(-8i/n) for a power of two n, i = 1..n; for other hq the
    series of the power of two below, then every other slope of the one above.

    >>> o = tessera.attention(q, k, v, alibi_slopes=tessera.alibi_slopes(16), align="top_left")
    """
    a = _args.Arguments(_numpy, "alibi_slopes")
    n = a.integer("hq", hq)
    if not 1 <= n < 2**31:
        raise a.error("hq", hq, "must be a positive number of heads")

    def series(count):
        return 2.0 ** (-8.0 / count * np.arange(1, count + 1))

    power = 1 << (n.bit_length() - 1)
    return np.concatenate([series(power), series(2 * power)[::2][:n - power]]).astype(np.float32)


def _context() -> _lib.Buffers:
    return _lib.Buffers(struct_size=ctypes.sizeof(_lib.Buffers),
                        num_threads=_attention._num_threads)
