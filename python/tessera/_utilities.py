# SPDX-License-Identifier: Apache-2.0
"""merge, dropout_mask and alibi_slopes on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from . import _lib, _numpy
from ._call import _args, _keywords, _prepared


def merge(parts: Sequence[tuple[np.ndarray, np.ndarray]], *, layout: _keywords.Format = "bshd",
          out_dtype: object = None) -> tuple[np.ndarray, np.ndarray]:
    """Combines the results of attention over disjoint sets of keys into the result over all of them.

    parts is a list of at least one (o, lse), all of one shape and dtype; layout is that of o, "bshd", "sbhd", "bhsd"
    or "thd". Returns a new (o, lse). o has the dtype of the parts, or out_dtype, which may be float32 for 16-bit
    parts and 16 bits for float32 parts. Rows of a part whose lse is -inf are not read. If there is a sink, give it to
    one part only. ValueError: anything else.

    >>> o, lse = tessera.merge([(o1, lse1), (o2, lse2)])
    """
    return merged(_numpy, parts, layout, out_dtype)


def merged(arrays, parts, layout, out_dtype=None):
    """merge of an array library."""
    a = _args.Arguments(arrays, "merge")
    a.layout_q = a.choice("layout", layout, tuple(_lib.FORMATS))
    _args.pairs_of(arrays, parts)
    o_index, lse_index = _lib.INDEX["o"], _lib.INDEX["lse"]
    n, first = len(parts), None
    tensors = (_lib.Tensor * n)(), (_lib.Tensor * n)()
    pointers = (ctypes.c_void_p * n)(), (ctypes.c_void_p * n)()
    for i, part in enumerate(parts):
        infos = (a.put("o", f"parts[{i}].o", part[0], a.order_q, axes="b, sq, hq, dv"),
                 a.put("lse", f"parts[{i}].lse", part[1], a.order_rows, axes="b, hq, sq"))
        first = first or infos
        for side, index in enumerate((o_index, lse_index)):
            tensors[side][i] = a.problem.tensor[index]
            pointers[side][i] = arrays.pointer(part[side])
    like, outputs = parts[0][0], []
    dtypes = (first[0].dtype if out_dtype is None else a.dtype("out_dtype", out_dtype), first[1].dtype)
    for name, dtype, info, order in zip(("o", "lse"), dtypes, first, (a.order_q, a.order_rows)):
        a.put_new(name, dtype, info.shape, order)
        outputs.append(arrays.empty("merge", name, info.shape, arrays.dtype(dtype), like))
    o, lse = outputs
    error = _lib.error_of_thread()
    device, context = arrays.device(like), context_of(arrays, like)
    code = _lib.merge(n, _lib.FORMATS[layout], tensors[0], pointers[0], tensors[1], pointers[1],
                      ctypes.addressof(a.problem.tensor[o_index]), arrays.pointer(o),
                      ctypes.addressof(a.problem.tensor[lse_index]), arrays.pointer(lse),
                      ctypes.addressof(device), ctypes.addressof(context), ctypes.addressof(error))
    _lib.check(code, error, "merge")
    return o, lse


def dropout_mask(b: int, hq: int, sq: int, sk: int, dropout_p: float,
                 rng_state: np.ndarray | tuple[int, ...] | list[int], *,
                 q_start: np.ndarray | None = None, k_start: np.ndarray | None = None
                 ) -> np.ndarray:
    """The mask that attention(dropout_p=, rng_state=) applies: bool [b, hq, sq, sk], True = kept.

    b, hq, sq and sk are the extents, >= 0; dropout_p is in [0, 1); rng_state is (seed, offset) or
    (seed, offset, first, stride), int64 or integers; q_start and k_start, int32 or int64 [b], are the
    positions of the first row and the first key of each sequence; None is 0. ValueError: anything else.

    >>> keep = tessera.dropout_mask(2, 16, 128, 128, 0.1, rng_state=(seed, 0))
    """
    return masked(_numpy, b, hq, sq, sk, dropout_p, rng_state, q_start, k_start)


def masked(arrays, b, hq, sq, sk, dropout_p, rng_state, q_start=None, k_start=None):
    """dropout_mask of an array library."""
    a = _args.Arguments(arrays, "dropout_mask")
    p = a.number("dropout_p", dropout_p)
    state = _prepared.rng_array(arrays, "dropout_mask", rng_state, None)
    extents = _args.mask_inputs(a, {"b": b, "hq": hq, "sq": sq, "sk": sk}, state,
                                {"q_start": q_start, "k_start": k_start})
    state, *starts = (None if x is None else arrays.int64(x) for x in (state, q_start, k_start))
    keep = arrays.empty("dropout_mask", "keep", extents, arrays.dtype("bool"), state)
    error = _lib.error_of_thread()
    device, context = arrays.device(state), context_of(arrays, state)
    code = _lib.dropout_mask_at(*extents, p, arrays.pointer(state), state.shape[0],
                                *(None if x is None else arrays.pointer(x) for x in starts),
                                arrays.pointer(keep), ctypes.addressof(device),
                                ctypes.addressof(context), ctypes.addressof(error))
    _lib.check(code, error, "dropout_mask")
    return keep


def alibi_slopes(hq: int) -> np.ndarray:
    """Returns the usual ALiBi slopes, fp32 [hq], for hq >= 1 query heads.

    If hq is a power of two, they are 2^(-8i/hq) for i = 1..hq. Otherwise they are the slopes of the power of two
    below, then every other slope of the power of two above. ValueError: hq is below 1.

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


def context_of(arrays, like) -> _lib.Buffers:
    """The threads and the stream of a call on arrays where `like` is."""
    context = _lib.Buffers(struct_size=ctypes.sizeof(_lib.Buffers), num_threads=_prepared.threads_of(arrays))
    if arrays.device(like).kind != _lib.CPU:
        context.stream = arrays.stream(like)
    return context
