# SPDX-License-Identifier: Apache-2.0
"""What users call: keywords in, a Call and its operands out.

A call with options, dtypes and shapes that were seen before costs one look-up; others are described by
_args, which knows what to say."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, overload

import jax
import jax.numpy as jnp
import numpy as np

from .. import _explain, _lib
from .._call import _args, _keywords
from .._attention import Gradients
from .._call import GRADIENTS
from .._call._description import NEW, Description, operands_of, returned
from .._call._documented import documented
from . import _arrays, _binding, _call
from ._results import prepare, results_of, validate

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORWARD = {name: row for name, row in _keywords.FORWARD.items() if name not in ("out", "lse")}
BACKWARD = _keywords.BACKWARD
_DETERMINISTIC = (None, "None follows --xla_gpu_deterministic_ops and "
                  "--xla_gpu_exclude_nondeterministic_ops of XLA_FLAGS; the CPU always is.")
_RNG_STATE = (None, "A JAX key, typed or raw, uint32 [2] or [4], is taken too.")
_OPTIONS = {name for name, row in _keywords.ALL.items()
            if isinstance(row, _keywords.Option) and name != "align"}  # which may be an array
_MAX_KEPT = 512
_ASKED_DETERMINISTIC = any(
    f"--xla_gpu_{name}=true" in os.environ.get("XLA_FLAGS", "").split()
    for name in ("deterministic_ops", "exclude_nondeterministic_ops"))

_kept: dict[tuple, tuple] = {}  # -> a Description, and the operands whose values are looked at
# The tensors whose values libtessera looks at before it computes, on the CPU: core/validate/values.cc.
_READ = {*_keywords.LENGTHS, "shift", "page_table_k", "page_table_v", "sink", "alibi_slopes"}
jax.tree_util.register_dataclass(Gradients, [field.name for field in dataclasses.fields(Gradients)], [])


@overload
def attention(q: jax.Array, k: jax.Array, v: jax.Array,
              **keywords: Unpack[_keywords.Single]) -> jax.Array: ...

@overload
def attention(q: jax.Array, k: jax.Array, v: jax.Array,
              **keywords: Unpack[_keywords.Forward]) -> tuple[jax.Array, ...]: ...


@documented(FORWARD, jax.Array, deterministic=_DETERMINISTIC, rng_state=_RNG_STATE)
def attention(q: jax.Array, k: jax.Array, v: jax.Array, **keywords: Unpack[_keywords.Forward]
              ) -> jax.Array | tuple[jax.Array, ...]:
    """Computes o = softmax(q kᵀ · softmax_scale + bias, masked) v, differentiable.

    q is [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv] and o [b, sq, hq, dv]; hq is a multiple of hk. Pass
    layout="sbhd" or "bhsd" for another order of axes, "thd" for packed sequences [t, h, d].
    Each may be a tessera.jax.Slice of an interleaved array. All have one dtype: float32, bfloat16 or float16, or
    float64 with backend="reference". k and v may be fp8 beside another q; all three may be fp8 in calls without
    gradients.

    Returns o, or a tuple (o[, lse][, max_logit][, amax_o]) of what the keywords ask for. Gradients flow through o and
    lse to q, k, v, bias, sink and alibi_slopes. docs/semantics.md says exactly what is computed.

    >>> o = tessera.jax.attention(q, k, v, causal=True)
    >>> o, lse = tessera.jax.attention(q, k, v, window=(128, 0), align="top_left", return_lse=True)
    """
    given = _given("attention", q, k, v, keywords)
    hides_lse = _args.ask_for_lse(_arrays, given)
    described = _described("attention", given)
    return returned(_call.attention_of(described.call, *_operands(described, given)), hides_lse)


@documented(BACKWARD, jax.Array, deterministic=_DETERMINISTIC, rng_state=_RNG_STATE)
def attention_backward(do: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, o: jax.Array,
                       lse: jax.Array, dlse: jax.Array | None = None,
                       grads: tuple[str, ...] = ("dq", "dk", "dv"),
                       **keywords: Unpack[_keywords.Backward]) -> Gradients[jax.Array]:
    """Computes the gradients of attention, as tessera.attention_backward does. It is for programs that keep o and lse
    themselves, for example of parts of the keys (partial=True).

    q, k, v, o and lse are those of the forward call, and the keywords must be as they were there. do has o's shape,
    dlse lse's; dlse=None is 0. grads names the gradients to compute, of dq, dk, dv, dbias, dsink and dalibi_slopes.
    Returns an object with a member for each gradient, None if it was not asked for. If q, k and v are slices of one
    array, each of dq, dk and dv is the gradient of that whole array.

    >>> g = tessera.jax.attention_backward(do, q, k, v, o, lse, causal=True)
    """
    operation = "attention_backward"
    names = _gradient_names(operation, grads)
    given = _given(operation, q, k, v, keywords)
    rows = {"do": do, "o": o, "lse": lse, **({} if dlse is None else {"dlse": dlse})}
    given.update((name, _arrays.accepted(operation, name, x)) for name, x in rows.items())
    given.update(dict.fromkeys(names, NEW))
    described = _described(operation, given)
    results = _call.gradients_of(described.call, *_operands(described, given))
    places = described.call.places_of_results
    return Gradients(**{name: results[places[name].operand] for name in described.outputs})


def explain(q: jax.Array | str, k: jax.Array | None = None, v: jax.Array | None = None, *,
            backward: bool = False, grads: tuple[str, ...] = ("dq", "dk", "dv"),
            dlse: jax.Array | None = None, device: str | None = None,
            **keywords: Unpack[_keywords.Every]) -> _explain.Explanation:
    """Says which backend attention(q, k, v, **keywords) would use, or its backward pass, and why.

    explain(text) asks about a case line instead. keywords are those of attention. With backward=True they are those of
    attention_backward, and grads and dlse too. device is that of q unless given, or JAX's default for
    a traced q: "cpu", "sm80", "sm90" or "sm100"; the hardware need not be there. Arrays may be
    jax.ShapeDtypeStruct. Raises the ValueErrors that attention would raise.

    >>> print(tessera.jax.explain(q, k, v, causal=True))
    """
    if isinstance(q, str):
        return _explain.explain(q, k, v, backward=backward, dlse=dlse, device=device or "cpu",
                                **keywords)
    a = _args.Arguments(_arrays, "explain")
    backward = a.boolean("backward", backward)
    given = _given("explain", q, k, v, keywords, BACKWARD if backward else FORWARD)
    if backward:
        described = _described_backward(given, dlse, _gradient_names("explain", grads))
    elif dlse is None:
        described = _described("explain", {**given, "return_lse": True})
    else:
        raise a.error("dlse", dlse, "belongs to the backward pass; give backward=True")
    operands = _operands(described, given)
    described.arguments.problem, _ = _binding.describe(
        described.call, operands, results_of(described.call, operands))
    target = _device(q) if device is None else _explain._device(a, device)
    return _explain._answer(described.arguments, None, target)


# ---- below: how ----

def _given(operation: str, q, k, v, keywords: dict, table=None) -> dict:
    """The arguments of a call as Description takes them, by name; None is left out."""
    _keywords.check_names(operation, keywords,
                          table or (FORWARD if operation == "attention" else BACKWARD))
    given = {"q": q, "k": k, "v": v}
    given.update((name, value) for name, value in keywords.items() if value is not None)
    converted: dict[int, jax.Array] = {}  # one array given twice stays one
    for name, value in given.items():
        if isinstance(value, jax.ShapeDtypeStruct) and operation != "explain":
            raise _args.Arguments(_arrays, operation).error(name, value, f"must be a {_arrays.noun}")
        if name in _keywords.NUMBERS and isinstance(value, jax.Array) and value.ndim == 0 and \
                not _arrays.is_traced(value):
            given[name] = value.item()
        elif type(value) in (np.ndarray, list, tuple, _arrays.Slice) and \
                name not in ("rng_state", *_keywords.NUMBERS):
            if id(value) not in converted:
                converted[id(value)] = _arrays.accepted(operation, name, value)
            given[name] = converted[id(value)]
        elif name in _OPTIONS and _arrays.is_traced(value):
            raise _args.Arguments(_arrays, operation).error(
                name, value, "is traced; must be a Python value: close over it, or name it in "
                "static_argnames of jit")
    _arrays.index_parts(given)
    if "rng_state" in given:
        given["rng_state"] = _arrays.rng_words(operation, given["rng_state"])
    if "deterministic" not in given:
        given["deterministic"] = _ASKED_DETERMINISTIC
    return given


def _described(operation: str, given: dict) -> Description:
    """The call's description, after what is illegal by shapes and options was raised."""
    get = given.get
    try:
        key = (operation, *given, *map(_signature, given.values()),
               get("seqlens_q") is get("seqlens_k"), get("cu_seqlens_q") is get("cu_seqlens_k"),
               *(_arrays.array_of(get(x)) is _arrays.array_of(get(y)) for x, y in ("qk", "kv", "qv")))
        described, read = _kept.get(key, (None, ()))
    except TypeError:  # something unhashable, which is illegal
        key, described = None, None
    if described is None:
        if get("accumulate"):
            raise ValueError(f"tessera.{operation}: accumulate=True: adds to what outputs hold, and JAX has none to "
                             "give; tessera.jax.merge joins o and lse of parts, and + their gradients")
        described = Description(_arrays, operation, given, "do" in given)
        _check(described, _operands(described, given))
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        read = [place.operand for name, place in described.call.places.items() if name in _READ]
        _kept[key] = described, read
    if read:
        _validate(described, given, read)
    return described


def _described_backward(given: dict, dlse, names) -> Description:
    """Describes the backward pass of attention(**given), whose o, lse and do are still to come."""
    forward = {name: x for name, x in given.items() if name in FORWARD or name in ("q", "k", "v")}
    if "o_scale" in given:  # says that o is fp8, but not which
        forward["out_dtype"] = given["q"].dtype.name
    described = _described("explain", {**forward, "return_lse": True})
    o, lse = results_of(described.call, _operands(described, forward))[:2]
    wide = jax.ShapeDtypeStruct(o.shape, jnp.bfloat16 if _args.is_fp8(o.dtype.name) else o.dtype)
    do = jax.ShapeDtypeStruct(o.shape, given["q"].dtype) if "do_scale" in given else wide
    given.update({"do": do, "o": o, "lse": lse, **({} if dlse is None else {"dlse": dlse}),
                  **dict.fromkeys(names, NEW)})
    return _described("explain", given)


def _device(q) -> _lib.Device:
    """Where a call on q runs: q's device, or JAX's default."""
    x = _arrays.array_of(q)
    placed = isinstance(x, jax.Array) and not _arrays.is_traced(x)
    device = next(iter(x.devices())) if placed else jax.devices()[0]
    if device.platform == "cpu":
        return _lib.CPU_DEVICE
    arch, ordinal = _call.places([device])[0]
    return _lib.Device(kind=_lib.CUDA, ordinal=ordinal, arch=arch)


def _signature(x):
    """What of an argument decides the call; 1, 1.0 and True are three."""
    if isinstance(x, jax.Array):
        return x.shape, x.dtype
    if type(x) is tuple:
        return tuple(map(_signature, x))
    if isinstance(x, _arrays.Slice):
        return x.axis, x.index, x.array.shape, x.array.dtype
    if isinstance(x, _arrays.Words):
        return x.shape
    return type(x), x


def _operands(described: Description, given: dict) -> list[jax.Array]:
    return [_arrays.array_of(x) for x in operands_of(described.sources, given)]


def _check(described: Description, operands):
    """Raises the ValueError of shapes and options; whether a backend can is for the lowering."""
    described.validate_scalars()
    if _arrays.is_symbolic(operands):
        return
    try:
        prepare(described.call, operands, _lib.CPU_DEVICE, described.arguments.spelling)
    except _lib.Refused:
        pass


def _validate(described: Description, given: dict, read: list[int]):
    """Raises the ValueError of values, where they are at hand: an eager call on the CPU, which waits
    for what is read, as JAX may still compute it."""
    operands = _operands(described, given)
    if all(isinstance(x, jax.Array) and not _arrays.is_traced(x) and x.is_fully_addressable and
           [device.platform for device in x.devices()] == ["cpu"] for x in operands):
        jax.block_until_ready([operands[i] for i in read])
        validate(described.call, operands, [x.unsafe_buffer_pointer() for x in operands])


def _gradient_names(operation: str, grads) -> tuple[str, ...]:
    if not isinstance(grads, tuple) or not all(name in GRADIENTS for name in grads):
        raise _args.Arguments(_arrays, operation).error(
            "grads", grads, "must be a tuple of names of " + ", ".join(GRADIENTS))
    return tuple(name for name in GRADIENTS if name in grads)
