# SPDX-License-Identifier: Apache-2.0
"""merge and dropout_mask on JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import _lib, _utilities
from .._call import _args, _keywords
from . import _arrays, _binding


def merge(parts: Sequence[tuple[jax.Array, jax.Array]], *, layout: _keywords.Format = "bshd",
          out_dtype: object = None) -> tuple[jax.Array, jax.Array]:
    """Combines the results of attention over disjoint sets of keys into the result over all of them; differentiable.

    parts is a list of at least one (o, lse), all of one shape and dtype; layout is that of o, "bshd", "sbhd", "bhsd"
    or "thd". Returns a new (o, lse). o has the dtype of the parts, or out_dtype, which may be float32 for 16-bit
    parts and 16 bits for float32 parts. Rows of a part whose lse is -inf are not read. If there is a sink, give it to
    one part only. ValueError: anything else.

    >>> o, lse = tessera.jax.merge([(o1, lse1), (o2, lse2)])
    """
    a = _args.Arguments(_arrays, "merge")
    a.layout_q = a.choice("layout", layout, tuple(_lib.FORMATS))
    os, lses = [], []
    for i, part in enumerate(_args.pairs_of(_arrays, parts)):
        o, lse = (_arrays.accepted("merge", name, x) for name, x in zip(("o", "lse"), part))
        a.put("o", f"parts[{i}].o", o, a.order_q, axes="b, sq, hq, dv")
        a.put("lse", f"parts[{i}].lse", lse, a.order_rows, axes="b, hq, sq")
        first_o = os[0] if os else o
        _check_part(a, i, o, lse, first_o)
        os.append(o)
        lses.append(lse)
    dtype = os[0].dtype.name if out_dtype is None else a.dtype("out_dtype", out_dtype)
    if dtype != os[0].dtype.name and {dtype, os[0].dtype.name} not in _CONVERTIBLE:
        raise a.error("out_dtype", dtype, f"must be {os[0].dtype.name}, as the parts, float32 beside parts of 16 bits, "
                      "or 16 bits beside float32 parts")
    return _merged(os, lses, layout, _arrays.dtype_named(dtype))


_CONVERTIBLE = ({"float32", "bfloat16"}, {"float32", "float16"})


def _check_part(a, i: int, o, lse, first_o):
    if o.dtype.name not in ("float32", "bfloat16", "float16", "float64"):
        raise a.error(f"parts[{i}].o.dtype", o.dtype.name,
                      "must be float32, bfloat16, float16 or float64")
    if o.shape != first_o.shape or o.dtype != first_o.dtype:
        raise a.error(f"parts[{i}].o", f"{o.dtype.name}{list(o.shape)}",
                      f"must be as the first, {first_o.dtype.name}{list(first_o.shape)}")
    shape, dtype = _args.statistic("lse", o.shape, o.dtype.name, a.layout_q)
    if lse.shape != shape or lse.dtype.name != dtype:
        raise a.error(f"parts[{i}].lse", f"{lse.dtype.name}{list(lse.shape)}",
                      f"must be {dtype}{list(shape)}")


def _merged(os, lses, layout: str, dtype):
    """o, of dtype, = sum of w_i o_i with w_i = exp(lse_i - lse). JAX's own functions, which every transformation
    and every mesh knows."""
    lse = jnp.stack(lses)
    peak = jnp.max(lse, axis=0)
    seen = peak > -jnp.inf
    # Rows that see nothing take a path of finite numbers, so that their gradients are 0.
    shifted = jnp.where(seen, lse - jax.lax.stop_gradient(jnp.where(seen, peak, 0)), -jnp.inf)
    weights = jnp.where(lse > -jnp.inf, jnp.exp(jnp.where(lse > -jnp.inf, shifted, 0)), 0)
    total = jnp.where(seen, weights.sum(0), 1)
    merged = jnp.where(seen, jnp.log(total) + jax.lax.stop_gradient(jnp.where(seen, peak, 0)),
                       -jnp.inf)
    o = 0
    for part, weight in zip(os, weights / total):
        weight = _as_o(weight, layout)
        o += jnp.where(weight > 0, part.astype(lse.dtype), 0) * weight
    return o.astype(dtype), merged


def _as_o(rows, layout: str):
    """The axes of lse in the order of o's, and one for dv."""
    if layout != "bhsd":
        rows = jnp.moveaxis(rows, -2, -1)
    return (jnp.moveaxis(rows, 0, 1) if layout == "sbhd" else rows)[..., None]


def dropout_mask(b: int, hq: int, sq: int, sk: int, dropout_p: float,
                 rng_state: jax.Array | tuple[int, ...] | list[int], *,
                 q_start: jax.Array | None = None, k_start: jax.Array | None = None) -> jax.Array:
    """The mask that attention(dropout_p=, rng_state=) applies: bool [b, hq, sq, sk], True = kept.

    b, hq, sq and sk are the extents, >= 0; dropout_p is in [0, 1); rng_state is what attention takes;
    q_start and k_start, int32 or int64 [b], are the positions of the first row and the first key of each
    sequence; None is 0. ValueError: anything else.

    >>> keep = tessera.jax.dropout_mask(2, 16, 128, 128, 0.1, rng_state=jax.random.key(0))
    """
    a = _args.Arguments(_arrays, "dropout_mask")
    p = a.number("dropout_p", dropout_p)
    words = _arrays.rng_words("dropout_mask", rng_state)
    starts = {"q_start": q_start, "k_start": k_start}
    starts = {name: _arrays.accepted("dropout_mask", name, x) for name, x in starts.items()}
    shape = _args.mask_inputs(a, {"b": b, "hq": hq, "sq": sq, "sk": sk}, words, starts)
    _utilities.dropout_mask(1, 1, 1, 1, p, (0, 0))  # says what is wrong with dropout_p
    operands = [words.array, *(_pairs(x) for x in starts.values() if x is not None)]
    given = sum(1 << i for i, x in enumerate(starts.values()) if x is not None)
    call = jax.ffi.ffi_call(_binding.DROPOUT_MASK, jax.ShapeDtypeStruct(shape, jnp.bool_),
                            vmap_method="sequential")
    return call(*operands, dropout_p=np.float64(p), starts=np.int32(given))


def _pairs(x):
    """Integers >= 0 as the words of int64, low word first."""
    if x.dtype == jnp.int64:
        return jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
    low = x.astype(jnp.uint32)
    return jnp.stack([low, jnp.zeros_like(low)], axis=1).reshape(-1)
