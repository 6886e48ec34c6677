# SPDX-License-Identifier: Apache-2.0
"""What users call: keywords in, one operator of the dispatcher out.

Keywords that were seen before cost one look-up, where none of them is a tensor, and options beside
tensors another; shapes are the operator's business. When the operator fails, the call is described once
more by _args, which knows what to say and how the caller spelled it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from .. import _args, _explain, _keywords, _lib, _prepared
from .._attention import Gradients
from .._documented import documented
from . import _addresses, _describe, _nested, _ops, _tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MAX_KEPT = 512
_BIAS = _describe.INPUTS.index("bias")
_DETERMINISTIC = (None, "None follows torch.use_deterministic_algorithms.")
_RNG_STATE = (None, "None draws one from PyTorch's generator.")

AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that autocast changes
_FAILURES = (RuntimeError, TypeError, AttributeError, OverflowError)  # of an operator

# Keys hold the types of values too: 1, 1.0 and True are three.
_kept: dict[tuple, tuple] = {}   # a set of options -> SCALARS
_known: dict[tuple, tuple] = {}  # keywords without tensors -> (what the operator takes beside q, k and
                                 # v, return_lse, return_max_logit)


@documented(_keywords.FORWARD, torch.Tensor, deterministic=_DETERMINISTIC, rng_state=_RNG_STATE)
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Unpack[_keywords.Forward]
              ) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """softmax(q kᵀ · softmax_scale + bias, masked) v, differentiable.

    q [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv] -> o [b, sq, hq, dv], for
    layout="bshd"; "sbhd" and "bhsd" permute, "thd" is packed [t, h, d]. They share float32, bfloat16
    or float16 (float64 in the backend "reference"); k and v may be fp8, and, without gradients, q
    with them. hq is a multiple of hk. Jagged nested tensors [b, j, h, d] (layout="bhsd": [b, h, j, d]) are packed sequences, o is one too.
    Returns o[, lse][, max_logit]; gradients reach q, k, v, bias, sink and alibi_slopes, through o and
    lse. autocast casts q, k, v. `out` is for where no gradient is wanted. docs/semantics.md is the
    contract.

    >>> o = tessera.torch.attention(q, k, v, causal=True)
    >>> o, lse = tessera.torch.attention(q, k, v, window=(128, 0), align="top_left", return_lse=True)
    """
    if type(q) is not torch.Tensor and _nested.is_nested(q, k, v):
        return _nested.attention(attention, q, k, v, keywords)
    if torch.compiler.is_compiling():
        return _compiled(q, k, v, keywords)
    try:
        key = (torch.are_deterministic_algorithms_enabled(), *keywords.items(),
               *map(type, keywords.values()))
        known = _known.get(key)
    except TypeError:  # something unhashable
        key = known = None
    if known is None or torch._C._is_any_autocast_enabled():
        return _described(q, k, v, keywords, key)
    rest, want_lse, want_max_logit = known
    try:
        o, lse, max_logit = _ops.plain(q, k, v, *rest)
    except _FAILURES as error:
        if _is_fp8(q):  # which operators do not take
            return _described(q, k, v, keywords, None)
        _complete("attention", q, keywords)
        raise _diagnose("attention", {"q": q, "k": k, "v": v, **keywords}, error) from None
    return _returned(o, lse, max_logit, want_lse, want_max_logit) if want_lse or want_max_logit else o


def prepared(**keywords):
    """(q, k, v) -> attention(q, k, v, **keywords), for callers whose keywords were accepted before and
    hold no tensors: what attention looks up on every call is looked up once. It returns o, or
    (o, max_logit)."""
    inputs, options, flags = _describe.sort(None, None, None, {"deterministic": False, **keywords})
    want_max_logit = options.get("return_max_logit", False)
    scalars = _describe.scalars(options, flags, False)
    rest = _describe.trimmed(_describe.pack(inputs, scalars, want_max_logit, options.get("out_dtype")))[3:]

    def run(q, k, v):
        if torch._C._is_any_autocast_enabled():
            return attention(q, k, v, **keywords)
        try:
            o, _, max_logit = _ops.plain(q, k, v, *rest)
        except (RuntimeError, TypeError, AttributeError):
            return attention(q, k, v, **keywords)  # knows what to say
        return (o, max_logit) if want_max_logit else o
    return run


@documented(_keywords.BACKWARD, torch.Tensor, deterministic=_DETERMINISTIC)
def attention_backward(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       o: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None = None,
                       grads: tuple[str, ...] | dict[str, torch.Tensor] = ("dq", "dk", "dv"),
                       **keywords: Unpack[_keywords.Backward]) -> Gradients:
    """Gradients of attention from its o and lse, as tessera.attention_backward: for those who keep o
    and lse themselves, parts of a union (partial=True) above all. No autograd.

    q, k, v, o and lse are those of the forward call, do is of o's shape, dlse of lse's; None is 0.
    grads names what to compute (dq, dk, dv, dbias, dsink, dalibi_slopes), or maps names to tensors to
    write into, or with accumulate=True to add to; keywords are those of the forward call, and partial.
    Returns an object with a member for each gradient, None where it was not asked for.

    >>> g = tessera.torch.attention_backward(do, q, k, v, o, lse, causal=True)
    """
    _keywords.check_names("attention_backward", keywords, _keywords.BACKWARD)
    outputs = _prepared.gradient_outputs(_tensors, grads)
    _complete("attention_backward", q, keywords)
    given = dict(keywords, q=q, k=k, v=v)
    backward = {"do": do, "o": o, "lse": lse, **({} if dlse is None else {"dlse": dlse})}
    adds = keywords.get("accumulate")
    if adds:
        _refuse_adding("attention_backward", {**given, **backward, **outputs})
    if adds or _is_plain(q) and (q.device.type == "cpu" or _is_fp8(q)):  # operators allocate what they write
        results = _prepared.call(_addresses, "attention_backward", _prepared.describe_backward,
                                 {**given, **backward, **outputs})
        _written(outputs.values())
        return Gradients(*results)
    return _gradients_by_operator(given, backward, outputs)


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], *, layout: _keywords.Format = "bshd",
          out_dtype: torch.dtype | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint key sets, from the (o, lse) of each; differentiable.

    parts is a list of at least one (o, lse), all of one shape and dtype; layout is that of o, "bshd",
    "sbhd", "bhsd" or "thd". Returns a new (o, lse); o has the parts' dtype, or out_dtype, float32
    beside parts of 16 bits or the other way round. A part's o is not read where its lse is -inf; a
    sink belongs to one part only. ValueError: anything else.

    >>> o, lse = tessera.torch.merge([(o1, lse1), (o2, lse2)])
    """
    a = _args.Arguments(_tensors, "merge")
    a.layout_q = a.choice("layout", layout, tuple(_lib.FORMATS))
    if not isinstance(parts, (list, tuple)) or not parts:
        raise a.error("parts", parts, "must be a list of at least one pair (o, lse)")
    for i, part in enumerate(parts):
        if not isinstance(part, (list, tuple)) or len(part) != 2:
            raise a.error(f"parts[{i}]", part, "must be a pair (o, lse)")
        for x, name in zip(part, ("o", "lse")):
            if not isinstance(x, torch.Tensor):
                raise a.not_an_array(f"parts[{i}].{name}", x)
    dtype = None if out_dtype is None else getattr(torch, a.dtype("out_dtype", out_dtype))
    return _ops.merge([o for o, _ in parts], [lse for _, lse in parts], _lib.FORMATS[layout], dtype)


def dropout_mask(b: int, hq: int, sq: int, sk: int, dropout_p: float,
                 rng_state: torch.Tensor | tuple[int, ...] | list[int], *,
                 q_start: torch.Tensor | None = None, k_start: torch.Tensor | None = None
                 ) -> torch.Tensor:
    """The mask that attention(dropout_p=, rng_state=) applies: bool [b, hq, sq, sk], True = kept, on
    the device of rng_state.

    b, hq, sq and sk are the extents, >= 0; dropout_p is in [0, 1); rng_state is (seed, offset) or
    (seed, offset, first, stride), int64 or integers; q_start and k_start, int32 or int64 [b], are the
    positions of each sequence's first row and key, None: 0. ValueError: anything else.

    >>> keep = tessera.torch.dropout_mask(2, 16, 128, 128, 0.1, rng_state=(seed, 0))
    """
    a = _args.Arguments(_tensors, "dropout_mask")
    for name, value in (("b", b), ("hq", hq), ("sq", sq), ("sk", sk)):
        if not isinstance(value, torch.SymInt) and a.integer(name, value) < 0:
            raise a.error(name, value, "must not be negative")
    if type(rng_state) in (list, tuple):
        rng_state = _state("dropout_mask", rng_state, None)
    _args.mask_inputs(a, b, rng_state, {"q_start": q_start, "k_start": k_start})
    return _ops.dropout_mask(rng_state, b, hq, sq, sk, a.number("dropout_p", dropout_p), q_start,
                             k_start)


def explain(q: torch.Tensor | str, k: torch.Tensor | None = None, v: torch.Tensor | None = None, *,
            backward: bool = False, grads: tuple[str, ...] = ("dq", "dk", "dv"),
            dlse: torch.Tensor | None = None, device: str | None = None,
            **keywords: Unpack[_keywords.Every]) -> _explain.Explanation:
    """Which backend attention(q, k, v, **keywords) would use, or its backward pass, and why.

    Or explain(text) for a case line. keywords are those of attention, or with backward=True those of
    attention_backward, as are grads and dlse. device is that of q unless given: "cpu", "sm80", "sm90"
    or "sm100"; the hardware need not be there. Raises the ValueErrors that attention would raise.

    >>> print(tessera.torch.explain(q, k, v, causal=True))
    """
    if isinstance(q, str):
        return _explain.explain(q, k, v, backward=backward, dlse=dlse, device=device or "cpu",
                                **keywords)
    a = _args.Arguments(_tensors, "explain")
    backward = a.boolean("backward", backward)
    _keywords.check_names("explain", keywords,
                          _keywords.BACKWARD if backward else _keywords.FORWARD)
    _complete("explain", q, keywords)
    given = dict(keywords, q=q, k=k, v=v)
    if backward:
        more = {"do": None, "o": None, "lse": None, **({} if dlse is None else {"dlse": dlse})}
        call = _describe.Call("explain", given, more, grads)
    else:
        if dlse is not None:
            raise a.error("dlse", dlse, "belongs to the backward pass; give backward=True")
        call = _describe.Call("explain", given,
                              max_logit=a.boolean("return_max_logit", keywords.get("return_max_logit")))
    if q.device.type == "cpu":
        call.validate()
    target = _tensors.device(q) if device is None else _explain._device(a, device)
    return _explain._answer(call.arguments, None, target)


# ---- below: how ----

def _described(q, k, v, keywords: dict, key: tuple | None):
    """attention of keywords that are new, or hold tensors; `key` is theirs in _known."""
    given = {"q": q, "k": k, "v": v}
    if keywords.get("accumulate"):
        return _added(given, keywords)
    if _is_fp8(q) and _is_plain(q):
        return _of_fp8(given, keywords)
    inputs, options, flags, out = _sorted(q, k, v, keywords)
    want_max_logit = options.get("return_max_logit", False)
    try:
        scalars = _scalars(q, k, v, keywords, options, flags, inputs[_BIAS] is None)
        arguments = _describe.trimmed(
            _describe.pack(inputs, scalars, want_max_logit, options.get("out_dtype")))
        results = _apply(out, arguments)
    except _FAILURES as error:
        raise _diagnose("attention", {**given, **keywords}, error) from None
    wanted = options.get("return_lse", False), want_max_logit
    if key is not None and out is None and not any(x is not None for x in inputs[3:]):
        if len(_known) >= _MAX_KEPT:
            _known.clear()
        _known[key] = arguments[3:], *wanted
    return _returned(*results, *wanted)


@torch.compiler.disable(reason="attention(accumulate=True) writes into its arguments")
def _added(given: dict, keywords: dict):
    """attention(accumulate=True): `out` and `lse` are written where they are."""
    _keywords.check_names("attention", keywords, _keywords.FORWARD)
    _complete("attention", given["q"], keywords)
    given = {**given, **keywords}
    _refuse_adding("attention", given)
    if not _is_plain(given["q"]):
        _describe.Call("attention", given).prepare(torch.get_num_threads())  # knows what to say
    results = _prepared.call(_addresses, "attention", _prepared.describe_forward, given)
    _written((given["out"], given["lse"]))
    return results[0] if len(results) == 1 else tuple(results)


def _is_fp8(q) -> bool:
    return isinstance(q, torch.Tensor) and q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


@torch.compiler.disable(reason="attention of an fp8 q reaches tensors by their address")
def _of_fp8(given: dict, keywords: dict):
    """attention of an fp8 q, by addresses."""
    _keywords.check_names("attention", keywords, _keywords.FORWARD)
    _complete("attention", given["q"], keywords)
    given = {**given, **keywords}
    if torch.is_grad_enabled() and any(x.requires_grad for x in given.values() if isinstance(x, torch.Tensor)):
        raise _lib.Refused(f"tessera.attention: q.dtype={given['q'].dtype}: has no autograd, and a tensor here asks "
                           "for a gradient; use torch.no_grad() and tessera.torch.attention_backward")
    results = _prepared.call(_addresses, "attention", _prepared.describe_forward, given)
    _written((given.get("out"),))
    return results[0] if len(results) == 1 else tuple(results)


def _is_plain(q) -> bool:
    """Whether tensors may be reached by their address: anything that is wrong is said there too."""
    return not isinstance(q, torch.Tensor) or q.device.type in ("cpu", "cuda") and \
        type(q) in (torch.Tensor, torch.nn.Parameter) and not torch._C._are_functorch_transforms_active()


def _written(tensors):
    for x in tensors:
        if isinstance(x, torch.Tensor) and not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _refuse_adding(operation: str, given: dict):
    """accumulate=True writes where its tensors are, past autograd, and nobody may want a gradient."""
    if torch._C._are_functorch_transforms_active():
        raise _lib.Refused(f"tessera.{operation}: accumulate=True: has no rule for torch.func; call it "
                           "outside, or add parts up by tessera.torch.merge")
    if torch.is_grad_enabled() and any(x.requires_grad for x in given.values() if isinstance(x, torch.Tensor)):
        raise _lib.Refused(f"tessera.{operation}: accumulate=True: what is added up has no gradient, "
                           "and a tensor here asks for one; use torch.no_grad(), or tessera.torch.merge")


def _gradients_by_operator(given: dict, backward: dict, outputs: dict) -> Gradients:
    """attention_backward where only operators reach tensors; what is the caller's is copied into."""
    names = [name for name, output in outputs.items() if output is not None]
    call = _describe.Call("attention_backward", given, backward, names)
    call.prepare(torch.get_num_threads())
    inputs = dict.fromkeys(_describe.INPUTS)
    inputs |= {_lib.TENSORS[index]: tensor for index, tensor in call.tensors()
               if _lib.TENSORS[index] in inputs}
    bits = sum(1 << _args.GRADIENTS.index(name) for name in names)
    with _ops.below_autograd():
        results = _ops.attention_backward(
            *(backward.get(name) for name in ("do", "o", "lse", "dlse")), bits,
            *_describe.pack([*inputs.values()], call.scalars(), grad_dtype=call.arguments.grad_dtype))
        for i, name in enumerate(names):
            if outputs[name] is not _prepared.NEW:
                results[i] = outputs[name].copy_(results[i])
    return Gradients(**dict(zip(names, results)))


def _compiled(q, k, v, keywords: dict):
    """attention as torch.compile traces it."""
    if keywords.get("accumulate"):
        return _added({"q": q, "k": k, "v": v}, keywords)
    if _is_fp8(q):
        return _of_fp8({"q": q, "k": k, "v": v}, keywords)
    inputs, options, flags, out = _sorted(q, k, v, keywords)
    want_max_logit = options.get("return_max_logit", False)
    scalars = _describe.scalars(options, flags, inputs[_BIAS] is not None)
    q, k, v, more, *scalars = _describe.pack(inputs, scalars, want_max_logit, options.get("out_dtype"))
    # AOTInductor hands an empty list on as None, which is no list.
    results = _traced(out, (q, k, v, more or [None], *scalars))
    return _returned(*results, options.get("return_lse", False), want_max_logit)


def _sorted(q, k, v, keywords: dict):
    """(inputs, options, flags) of _describe.sort, and out."""
    _keywords.check_names("attention", keywords, _keywords.FORWARD)
    _complete("attention", q, keywords)
    if _describe.is_unbuilt(keywords):
        _check_unbuilt({"q": q, "k": k, "v": v, **keywords})
    inputs, options, flags = _describe.sort(q, k, v, keywords)
    if torch._C._is_any_autocast_enabled():
        _autocast(inputs)
    return inputs, options, flags, options.pop("out", None)


def _returned(o, lse, max_logit, want_lse: bool, want_max_logit: bool):
    if not want_lse and not want_max_logit:
        return o
    return (o,) + (lse,) * want_lse + (max_logit,) * want_max_logit


def _complete(operation: str, q, keywords: dict):
    """Gives `keywords` the front end's own defaults, and other spellings their one form."""
    if keywords.get("deterministic") is None:
        keywords["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if "window" in keywords and type(keywords["window"]) is list:
        keywords["window"] = tuple(keywords["window"])
    state = keywords.get("rng_state")
    if type(state) in (list, tuple):
        keywords["rng_state"] = _state(operation, state, q)
    elif state is None and keywords.get("dropout_p") and isinstance(q, torch.Tensor):
        if operation == "attention":
            keywords["rng_state"] = drawn_state(q.device)
        elif operation == "explain":
            keywords["rng_state"] = torch.zeros(2, dtype=torch.int64, device=q.device)


def drawn_state(device: torch.device) -> torch.Tensor:
    """An rng_state from PyTorch's generator, which a backward pass that computes it again gets again."""
    if not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or \
            not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)
    # Partitioners compute random operators again where they save little (activation_memory_budget), from
    # another state of the generator. In a checkpoint they restore the state.
    return checkpoint(_ops.rng_state, device, use_reentrant=False)


def _check_unbuilt(given: dict):
    """Raises what the core says of a call whose arguments operators do not take: Refused, unless they
    change nothing."""
    call = _describe.Call("attention", given, max_logit=bool(given.get("return_max_logit")))
    if given["q"].device.type == "cpu":
        call.validate()
    call.prepare(torch.get_num_threads())


def _traced(out, arguments):
    if out is None:
        return _ops.attention(*arguments)
    return out, *_ops.attention_out(out, *arguments)


def _apply(out, arguments):
    """The operator, past the dispatcher's autograd key where that is all it would decide."""
    if out is not None:
        return out, *_ops.attention_into(out, *arguments)
    if torch._C._are_functorch_transforms_active():
        return _ops.attention(*arguments)
    if _ops.needs_gradient(arguments[:3], arguments):
        return _ops.Attention.of(arguments)
    with _ops.below_autograd():
        return _ops.attention(*arguments)


def _scalars(q, k, v, keywords: dict, options: dict, *more) -> tuple:
    """SCALARS of `options` and `more` about the inputs, checked by _args unless they were seen before."""
    key = (*options.items(), *map(type, options.values()), *more)
    try:
        return _kept[key]
    except KeyError:
        pass
    except TypeError:  # something unhashable, which is illegal
        key = None
    scalars = _describe.Call("attention", {"q": q, "k": k, "v": v, **keywords}).scalars()
    if key is not None:
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        _kept[key] = scalars
    return scalars


def _diagnose(operation: str, given: dict, error: Exception) -> Exception:
    """What to raise for a call whose operator failed with `error`."""
    try:
        call = _describe.Call(operation, given, max_logit=bool(given.get("return_max_logit")))
        if given["q"].device.type == "cpu" and not torch._C._are_functorch_transforms_active():
            call.validate()
        call.prepare(torch.get_num_threads())
    except (ValueError, RuntimeError, MemoryError) as better:
        return better
    if "can't allocate memory" in str(error):
        return MemoryError(f"tessera.{operation}: the outputs do not fit in memory: {error}")
    return error


def _autocast(inputs: list):
    """q, k, v in autocast's dtype, and with them what must be in q's dtype or fp32."""
    q = inputs[0]
    if not isinstance(q, torch.Tensor) or not torch.is_autocast_enabled(q.device.type):
        return
    dtype = torch.get_autocast_dtype(q.device.type)
    for place in _describe.DIFFERENTIABLE:
        x = inputs[place]
        if isinstance(x, torch.Tensor) and x.dtype in AUTOCAST and (place < 3 or x.dtype != torch.float32):
            inputs[place] = x.to(dtype)


def _state(operation: str, rng_state, q):
    words = _args.rng_words(_args.Arguments(_tensors, operation), rng_state)
    device = q.device if isinstance(q, torch.Tensor) else None
    return torch.tensor(words, dtype=torch.int64, device=device)
