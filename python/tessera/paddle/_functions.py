# SPDX-License-Identifier: Apache-2.0
"""What users call: keywords in, one call of the C library out, under a PyLayer where a gradient is
wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import paddle

from .. import _explain, _utilities
from .._call import _args, _keywords, _prepared
from .._attention import Gradients
from .._call._documented import documented
from . import _autograd, _static, _tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DETERMINISTIC = (None, "None follows FLAGS_cudnn_deterministic.")
_RNG_STATE = (None, "None draws one from Paddle's generator.")


@overload
def attention(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor,
              **keywords: Unpack[_keywords.Single]) -> paddle.Tensor: ...

@overload
def attention(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor,
              **keywords: Unpack[_keywords.Forward]) -> tuple[paddle.Tensor, ...]: ...


@paddle.jit.not_to_static
@documented(_keywords.FORWARD, paddle.Tensor, deterministic=_DETERMINISTIC, rng_state=_RNG_STATE)
def attention(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor,
              **keywords: Unpack[_keywords.Forward]) -> paddle.Tensor | tuple[paddle.Tensor, ...]:
    """Computes o = softmax(q kᵀ · softmax_scale + bias, masked) v, with gradients.

    q is [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv] and o [b, sq, hq, dv]; hq is a multiple of hk. Pass
    layout="sbhd" or "bhsd" for another order of axes, "thd" for packed sequences [t, h, d].
    All have one dtype: float32, bfloat16 or float16, or float64 with backend="reference". k and v may be fp8 beside
    another q; all three may be fp8 in calls without gradients. amp.auto_cast casts q, k and v.

    Returns o, or a tuple (o[, lse][, max_logit][, amax_o]) of what the keywords ask for. Gradients flow through o and
    lse to q, k, v, bias, sink and alibi_slopes. `out` is for calls without gradients. docs/semantics.md says exactly
    what is computed.

    >>> o = tessera.paddle.attention(q, k, v, causal=True)
    >>> o, lse = tessera.paddle.attention(q, k, v, window=(128, 0), align="top_left", return_lse=True)
    """
    given = {"q": q, "k": k, "v": v, **_completed("attention", q, keywords)}
    dtype = _tensors.autocast_dtype()
    if dtype is not None:
        _autocast(given, getattr(paddle, dtype))
    if not paddle.in_dynamic_mode():
        return _static.attention(given)
    wanted = _wanted(given)
    if wanted:
        _check_differentiable(given)
        return _autograd.attention(given, wanted)
    results = _prepared.of_keywords(_tensors, "attention", given).run(given)
    return results[0] if len(results) == 1 else tuple(results)


@documented(_keywords.BACKWARD, paddle.Tensor, deterministic=_DETERMINISTIC)
def attention_backward(do: paddle.Tensor, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor,
                       o: paddle.Tensor, lse: paddle.Tensor, dlse: paddle.Tensor | None = None,
                       grads: tuple[str, ...] | dict[str, paddle.Tensor] = ("dq", "dk", "dv"),
                       **keywords: Unpack[_keywords.Backward]) -> Gradients[paddle.Tensor]:
    """Computes the gradients of attention without autograd, as tessera.attention_backward does. It is for programs
    that keep o and lse themselves, for example of parts of the keys (partial=True).

    q, k, v, o and lse are those of the forward call, and the keywords must be as they were there. do has o's shape,
    dlse lse's; dlse=None is 0. grads names the gradients to compute, of dq, dk, dv, dbias, dsink and dalibi_slopes, or
    maps these names to tensors to write into. Returns an object with a member for each gradient, None if it was not
    asked for.

    >>> g = tessera.paddle.attention_backward(do, q, k, v, o, lse, causal=True)
    """
    _keywords.check_names("attention_backward", keywords, _keywords.BACKWARD)
    given = dict(_completed("attention_backward", q, keywords), q=q, k=k, v=v, do=do, o=o, lse=lse,
                 dlse=dlse, **_prepared.gradient_outputs(_tensors, grads))
    found = _prepared.of_keywords(_tensors, "attention_backward", given, backward=True)
    return Gradients(**dict(zip(found.results, found.run(given))))


def merge(parts: Sequence[tuple[paddle.Tensor, paddle.Tensor]], *, layout: _keywords.Format = "bshd",
          out_dtype: object = None) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Combines the results of attention over disjoint sets of keys into the result over all of them; differentiable.

    parts is a list of at least one (o, lse), all of one shape and dtype; layout is that of o, "bshd", "sbhd", "bhsd"
    or "thd". Returns a new (o, lse). o has the dtype of the parts, or out_dtype, which may be float32 for 16-bit
    parts and 16 bits for float32 parts. Rows of a part whose lse is -inf are not read. If there is a sink, give it to
    one part only. ValueError: anything else.

    >>> o, lse = tessera.paddle.merge([(o1, lse1), (o2, lse2)])
    """
    if paddle.is_grad_enabled() and _is_pairs(parts):
        tensors = [x for part in parts for x in part]
        if not all(x.stop_gradient for x in tensors):
            return _autograd.Merge.apply(layout, out_dtype, *tensors)
    return _utilities.merged(_tensors, parts, layout, out_dtype)


def dropout_mask(b: int, hq: int, sq: int, sk: int, dropout_p: float,
                 rng_state: paddle.Tensor | tuple[int, ...] | list[int], *,
                 q_start: paddle.Tensor | None = None, k_start: paddle.Tensor | None = None
                 ) -> paddle.Tensor:
    """The mask that attention(dropout_p=, rng_state=) applies: bool [b, hq, sq, sk], True = kept, on
    the device of rng_state.

    b, hq, sq and sk are the extents, >= 0; dropout_p is in [0, 1); rng_state is (seed, offset) or
    (seed, offset, first, stride), int64 or integers; q_start and k_start, int32 or int64 [b], are the
    positions of the first row and the first key of each sequence; None is 0. ValueError: anything else.

    >>> keep = tessera.paddle.dropout_mask(2, 16, 128, 128, 0.1, rng_state=(seed, 0))
    """
    return _utilities.masked(_tensors, b, hq, sq, sk, dropout_p, rng_state, q_start, k_start)


def alibi_slopes(hq: int) -> paddle.Tensor:
    """Returns the usual ALiBi slopes, fp32 [hq], for hq >= 1 query heads, as tessera.alibi_slopes does.

    >>> o = tessera.paddle.attention(q, k, v, alibi_slopes=tessera.paddle.alibi_slopes(16))
    """
    return paddle.to_tensor(_utilities.alibi_slopes(hq))


def explain(q: paddle.Tensor | str, k: paddle.Tensor | None = None, v: paddle.Tensor | None = None, *,
            backward: bool = False,
            grads: tuple[str, ...] | dict[str, paddle.Tensor] = ("dq", "dk", "dv"),
            dlse: paddle.Tensor | None = None, device: str | None = None,
            **keywords: Unpack[_keywords.Every]) -> _explain.Explanation:
    """Says which backend attention(q, k, v, **keywords) would use, or its backward pass, and why.

    explain(text) asks about a case line instead. keywords are those of attention. With backward=True they are those of
    attention_backward, and grads and dlse too. All tensors may be paddle.static.InputSpec. device is that of q unless
    given, or Paddle's: "cpu", "sm80" (A100), "sm89" (RTX 40, L4), "sm90" (H100, H200), "sm100" (B200) or "sm120" (RTX
    50); the hardware need not be there. Raises the ValueErrors that attention would raise.

    >>> print(tessera.paddle.explain(q, k, v, causal=True))
    """
    if not isinstance(q, str):
        _completed("explain", q, keywords)
    arrays = _static.Specs if isinstance(q, paddle.static.InputSpec) else _tensors
    return _explain.explained(arrays, q, k, v, backward, grads, dlse, device, keywords)


# ---- below: how ----

def _completed(operation: str, q, keywords: dict) -> dict:
    """`keywords`, with the front end's own defaults in them."""
    if keywords.get("deterministic") is None:
        keywords["deterministic"] = _tensors.is_deterministic()
    if type(keywords.get("window")) is list:
        keywords["window"] = tuple(keywords["window"])
    if keywords.get("rng_state") is None and keywords.get("dropout_p"):
        if operation == "attention":
            keywords["rng_state"] = _tensors.random_words(q)
        elif operation == "explain":
            keywords["rng_state"] = (0, 0)
    return keywords


def _wanted(given: dict) -> tuple[str, ...]:
    """Names of the arguments that want gradients."""
    if not paddle.is_grad_enabled():
        return ()
    return tuple(name for name in _keywords.DIFFERENTIABLE
                 if isinstance(given.get(name), paddle.Tensor) and not given[name].stop_gradient)


def _check_differentiable(given: dict):
    """What is for calls without gradients."""
    for name in ("out", "batch_invariant"):
        if given.get(name) is not None and given[name] is not False:
            raise _args.Arguments(_tensors, "attention").error(
                name, given[name], "is for calls in which no gradient is wanted; use "
                "paddle.no_grad(), or leave it out")


def _autocast(given: dict, dtype):
    """q, k, v in autocast's dtype, and with them what must be in q's dtype or fp32."""
    for name in _keywords.DIFFERENTIABLE:
        x = given.get(name)
        if isinstance(x, (paddle.Tensor, _static.Value)) and _tensors.dtype_name(x.dtype) in _CAST \
                and x.dtype != dtype and (name in ("q", "k", "v") or x.dtype != paddle.float32):
            given[name] = x.astype(dtype)


_CAST = ("float32", "bfloat16", "float16")


def _is_pairs(parts) -> bool:
    return isinstance(parts, (list, tuple)) and all(
        isinstance(part, (list, tuple)) and len(part) == 2 and
        all(isinstance(x, paddle.Tensor) for x in part) for part in parts)
