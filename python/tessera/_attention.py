# SPDX-License-Identifier: Apache-2.0
"""attention and attention_backward on NumPy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar, overload

import numpy as np

from . import _numpy
from ._call import _keywords, _prepared
from ._call._documented import documented

if TYPE_CHECKING:
    from typing_extensions import Unpack


_Array = TypeVar("_Array")


@dataclasses.dataclass(frozen=True, slots=True)
class Gradients(Generic[_Array]):
    """What attention_backward returns; a gradient that was not asked for is None. Those that were unpack in this
    order, whatever the order of grads: dq, dk, dv = attention_backward(...)."""
    dq: _Array = None  # type: ignore[assignment]  # for those who asked it is none of None
    dk: _Array = None  # type: ignore[assignment]
    dv: _Array = None  # type: ignore[assignment]
    dbias: _Array | None = None
    dsink: _Array | None = None
    dalibi_slopes: _Array | None = None
    amax_dq: _Array | None = None
    amax_dk: _Array | None = None
    amax_dv: _Array | None = None

    def __iter__(self) -> Iterator[_Array]:
        return (x for name in self.__slots__ if (x := getattr(self, name)) is not None)


@overload
def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray,
              **keywords: Unpack[_keywords.Single]) -> np.ndarray: ...

@overload
def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray,
              **keywords: Unpack[_keywords.Forward]) -> tuple[np.ndarray, ...]: ...


@documented(_keywords.FORWARD, np.ndarray)
def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray,
              **keywords: Unpack[_keywords.Forward]) -> np.ndarray | tuple[np.ndarray, ...]:
    """softmax(q kᵀ · softmax_scale + bias, masked) v.

    q [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv] -> o [b, sq, hq, dv], for
    layout="bshd"; "sbhd" and "bhsd" permute, "thd" is packed [t, h, d]. They share float32, bfloat16
    or float16 (float64 in the backend "reference"); k and v may be fp8, and q with them. hq is a
    multiple of hk. Returns o[, lse][, max_logit][, amax_o]. docs/semantics.md is the contract.

    >>> o = tessera.attention(q, k, v, causal=True)
    >>> o, lse = tessera.attention(q, k, v, window=(128, 0), align="top_left", return_lse=True)
    """
    keywords["q"], keywords["k"], keywords["v"] = q, k, v
    results = _prepared.prepared(_numpy, "attention", keywords).run(keywords)
    return results[0] if len(results) == 1 else tuple(results)


@documented(_keywords.BACKWARD, np.ndarray)
def attention_backward(do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray,
                       lse: np.ndarray, dlse: np.ndarray | None = None,
                       grads: tuple[str, ...] | dict[str, np.ndarray] = ("dq", "dk", "dv"),
                       **keywords: Unpack[_keywords.Backward]) -> Gradients[np.ndarray]:
    """Gradients of attention, from its o and lse and the gradients do of o and dlse of lse.

    q, k, v, o and lse are those of the forward call, do is of o's shape, dlse of lse's; None is 0.
    grads names what to compute (dq, dk, dv, dbias, dsink, dalibi_slopes), or maps names to arrays
    to write into (with accumulate: to add to), of their inputs' shapes and dtypes; dq, dk, dv may be
    float32 beside 16-bit inputs. Every other keyword must be as it was in the forward call.

    >>> dq, dk, dv = tessera.attention_backward(do, q, k, v, o, lse, causal=True)
    >>> g = tessera.attention_backward(do, q, k, v, o, lse, bias=bias, grads=("dq", "dbias"))
    >>> g.dq, g.dbias
    """
    _keywords.check_names("attention_backward", keywords, _keywords.BACKWARD)
    keywords.update(q=q, k=k, v=v, do=do, o=o, lse=lse, dlse=dlse,
                    **_prepared.gradient_outputs(_numpy, grads))
    found = _prepared.prepared(_numpy, "attention_backward", keywords, backward=True)
    return Gradients(**dict(zip(found.results, found.run(keywords))))


def set_num_threads(n: int | None) -> None:
    """Use at most n threads in every call on NumPy arrays or Paddle tensors from now on; None: the
    library's default."""
    if n is not None and (isinstance(n, bool) or not isinstance(n, (int, np.integer)) or
                          not 1 <= n < 2**31):
        raise ValueError(f"tessera.set_num_threads: n={n}: must be a positive integer, or None for "
                         "the library's default")
    _prepared.set_num_threads(int(n or 0))
