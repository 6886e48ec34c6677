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
    """What attention_backward returns. A gradient that was not asked for is None. The others unpack in the order
    below, whatever the order of grads: dq, dk, dv = attention_backward(...)."""
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
    """Computes o = softmax(q kᵀ · softmax_scale + bias, masked) v.

    q is [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv] and o [b, sq, hq, dv]; hq is a multiple of hk. Pass
    layout="sbhd" or "bhsd" for another order of axes, "thd" for packed sequences [t, h, d].
    All have one dtype: float32, bfloat16 or float16, or float64 with backend="reference". k and v may be fp8 beside
    another q, or all three fp8. Returns o, or a tuple (o[, lse][, max_logit][, amax_o]) of what the keywords ask for.
    docs/semantics.md says exactly what is computed.

    >>> o = tessera.attention(q, k, v, causal=True)
    >>> o, lse = tessera.attention(q, k, v, window=(128, 0), align="top_left", return_lse=True)
    """
    keywords["q"], keywords["k"], keywords["v"] = q, k, v
    results = _prepared.of_keywords(_numpy, "attention", keywords).run(keywords)
    return results[0] if len(results) == 1 else tuple(results)


@documented(_keywords.BACKWARD, np.ndarray)
def attention_backward(do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray,
                       lse: np.ndarray, dlse: np.ndarray | None = None,
                       grads: tuple[str, ...] | dict[str, np.ndarray] = ("dq", "dk", "dv"),
                       **keywords: Unpack[_keywords.Backward]) -> Gradients[np.ndarray]:
    """Computes the gradients of attention from do, the gradient of o, and dlse, the gradient of lse.

    q, k, v, o and lse are those of the forward call, and the other keywords must be as they were there. do has o's
    shape, dlse lse's; dlse=None is 0. grads names the gradients to compute, of dq, dk, dv, dbias, dsink and
    dalibi_slopes. It may also map these names to arrays to write into, or with accumulate to add to; they have the
    shapes and dtypes of the inputs, and dq, dk and dv may be float32 if the inputs have 16 bits.

    >>> dq, dk, dv = tessera.attention_backward(do, q, k, v, o, lse, causal=True)
    >>> g = tessera.attention_backward(do, q, k, v, o, lse, bias=bias, grads=("dq", "dbias"))
    >>> g.dq, g.dbias
    """
    _keywords.check_names("attention_backward", keywords, _keywords.BACKWARD)
    keywords.update(q=q, k=k, v=v, do=do, o=o, lse=lse, dlse=dlse,
                    **_prepared.gradient_outputs(_numpy, grads))
    found = _prepared.of_keywords(_numpy, "attention_backward", keywords, backward=True)
    return Gradients(**dict(zip(found.results, found.run(keywords))))


def set_num_threads(n: int | None) -> None:
    """Limits each later call on NumPy arrays or Paddle tensors to n threads; None restores the library's default.
    ValueError: n is not a positive integer."""
    if n is not None and (isinstance(n, bool) or not isinstance(n, (int, np.integer)) or
                          not 1 <= n < 2**31):
        raise ValueError(f"tessera.set_num_threads: n={n}: must be a positive integer, or None for "
                         "the library's default")
    _prepared.set_num_threads(int(n or 0))
