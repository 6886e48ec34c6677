# SPDX-License-Identifier: Apache-2.0
"""JAX's adapter for _args, and what stands for an array in a call."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .. import _lib
from .._call import _args
from .._call._args import ArrayInfo

noun = "JAX array"


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
    """Item `index` of axis `axis` of an array, in the place of q, k or v: Slice(qkv, 2, 0) for q of
    an interleaved qkv [b, s, 3, h, d]. It is read where it lies, and gradients of slices of one
    array are written into one array."""
    array: jax.Array
    axis: int
    index: int

    @property
    def shape(self) -> tuple:
        return (*self.array.shape[:self.axis], *self.array.shape[self.axis + 1:])

    @property
    def dtype(self):
        return self.array.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Words:
    """The 32-bit words of an int64 rng_state, low word first: uint32 [4] or [8]."""
    array: jax.Array

    @property
    def shape(self) -> tuple:
        return (self.array.shape[0] // 2,)


def info(x) -> ArrayInfo | None:
    if isinstance(x, Words):
        return ArrayInfo("int64", x.shape, (1,), None, False)
    if not isinstance(x, (jax.Array, Slice, jax.ShapeDtypeStruct)):
        return None
    shape = extents(x.shape)
    return ArrayInfo(x.dtype.name, shape, _strides(shape), None, False)


def slice_of(x) -> tuple | None:
    """The array that a slice is an item of, the axis and the item."""
    return (x.array, x.axis, x.index) if isinstance(x, Slice) else None


def extents(shape) -> tuple[int, ...]:
    """Extents for a description; a symbolic one is described as 1."""
    return tuple(n if isinstance(n, int) else 1 for n in shape)


def _strides(shape):
    """The strides of a dense array; a slice's differ, which no rule of _args looks at."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(strides[::-1])


def array_of(x) -> jax.Array:
    """The array that is passed for an argument."""
    return x.array if isinstance(x, (Slice, Words)) else x


def is_traced(x) -> bool:
    return isinstance(x, jax.core.Tracer)


def is_symbolic(arrays) -> bool:
    return any(not isinstance(n, int) for x in arrays for n in x.shape)


def accepted(operation: str, name: str, value):
    """An argument as calls take it: NumPy arrays become JAX's, a list the tuple that it spells."""
    if isinstance(value, np.ndarray):
        return jnp.asarray(value)
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, tuple):
        return tuple(accepted(operation, name, part) for part in value)
    if isinstance(value, Slice):
        _check_slice(operation, name, value)
    return value


def _check_slice(operation: str, name: str, x: Slice):
    a = _args.Arguments(None, operation)
    if name not in ("q", "k", "v"):
        raise a.error(name, x, "only q, k and v may be slices; index the array")
    if not isinstance(x.array, jax.Array):
        raise a.error(f"{name}.array", x.array, f"must be a {noun}")
    rank = x.array.ndim
    if not isinstance(x.axis, int) or not 0 <= x.axis < rank - 1:
        raise a.error(f"{name}.axis", x.axis, f"must be an axis from 0 to {rank - 2}, as the last "
                      "one is head_dim")
    if not isinstance(x.index, int) or not 0 <= x.index < x.array.shape[x.axis]:
        raise a.error(f"{name}.index", x.index, f"must be from 0 to {x.array.shape[x.axis] - 1}")


def index_parts(given: dict):
    """Gives `given` plain arrays in the place of slices that are not, together, all of their array, each
    item once: only then can their gradients be written into one array."""
    slices = [x for x in (given["q"], given["k"], given["v"]) if isinstance(x, Slice)]
    for name in "qkv":
        x = given[name]
        if isinstance(x, Slice):
            items = sorted(other.index for other in slices
                           if other.array is x.array and other.axis == x.axis)
            if items != list(range(x.array.shape[x.axis])):
                given[name] = jax.lax.index_in_dim(x.array, x.index, x.axis, keepdims=False)


# ---- seeds ----

def rng_words(operation: str, value) -> Words:
    """rng_state as the words of a call. A JAX key, typed or raw, uint32 [2] or [4]: the first two words
    are the seed, the others the offset; int64 [2] or [4], or as many integers in a tuple or list."""
    a = _args.Arguments(None, operation)
    if isinstance(value, Words):
        return value
    if type(value) in (list, tuple):
        words = np.array(_args.rng_words(a, value), np.int64).view(np.uint32)
        return Words(jnp.asarray(words))
    if isinstance(value, np.ndarray):
        words = np.ascontiguousarray(value)
        value = words.view(np.uint32) if words.dtype == np.int64 else jnp.asarray(words)
        if isinstance(value, np.ndarray):
            return Words(_padded(a, jnp.asarray(value), (4, 8)))
    if not isinstance(value, jax.Array):
        raise a.error("rng_state", value, "must be a JAX key, two or four integers, or a JAX "
                      "array: uint32 [2] or [4], or int64 [2] or [4]")
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        if value.shape != ():
            raise a.error("rng_state.shape", list(value.shape), "must be one key, of shape []")
        return Words(_padded(a, jax.random.key_data(value), (2, 4)))
    if value.dtype == jnp.int64:
        if value.shape not in ((2,), (4,)):
            raise a.error("rng_state.shape", list(value.shape), "must be [2] or [4]")
        return Words(jax.lax.bitcast_convert_type(value, jnp.uint32).reshape(-1))
    if value.dtype != jnp.uint32:
        raise a.error("rng_state.dtype", value.dtype.name, "must be a key, uint32 or int64")
    return Words(_padded(a, value, (2, 4)))


def _padded(a, words, sizes):
    if words.ndim != 1 or words.shape[0] not in sizes:
        raise a.error("rng_state.shape", list(words.shape), f"must be [{sizes[0]}] or [{sizes[1]}]")
    return words if words.shape[0] >= 4 else jnp.concatenate([words, jnp.zeros(2, jnp.uint32)])


def dtype_named(name: str):
    return jnp.dtype(getattr(jnp, name))


INDEX = _lib.INDEX
