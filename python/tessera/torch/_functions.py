# SPDX-License-Identifier: Apache-2.0
"""What users call: keywords in, one operator of the dispatcher out.

A set of options that was seen before costs one look-up; shapes are the operator's business. When the
operator fails, the call is described once more by _args, which knows what to say and how the caller
spelled it."""

from __future__ import annotations

import functools

import torch

from .. import _args, _explain, _lib
from . import _describe, _ops, _tensors


@functools.lru_cache(maxsize=512, typed=True)
def _kept(*options) -> list:
    """One list for each set of options, 1, 1.0 and True being three; holds SCALARS once known."""
    return []


def attention(q, k, v, *, layout="bshd", softmax_scale=None, causal=False, window=None, align=None,
              seqlens_q=None, seqlens_k=None, cu_seqlens_q=None, cu_seqlens_k=None,
              cu_seqlens_q_padded=None, cu_seqlens_k_padded=None, max_seqlen_q=None,
              max_seqlen_k=None, keep=None, drop=None, key_ranges=None, segment_ids=None, bias=None,
              bias_at="post_scale", alibi_slopes=None, softcap=0.0, sink=None, dropout_p=0.0,
              rng_state=None, page_table=None, k_scale=None, v_scale=None, return_lse=False,
              return_max_logit=False, deterministic=None, batch_invariant=False, backend=None,
              allow_quadratic=False, out=None):
    """softmax(q kᵀ · softmax_scale + bias, masked) v, differentiable.

    q [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv] -> o [b, sq, hq, dv], for
    layout="bshd"; "sbhd" and "bhsd" permute, "thd" is packed [t, h, d], a pair gives q and k/v
    layouts of their own. Returns o[, lse][, max_logit]; gradients reach q, k, v, bias, sink and
    alibi_slopes, through o and lse. dropout_p > 0 without rng_state draws one from PyTorch's
    generator. deterministic=None follows torch.use_deterministic_algorithms; autocast casts q, k, v.
    o is written into `out` where that is given, whatever its strides, and where no gradient is
    wanted. docs/semantics.md says what each keyword means and what is illegal (ValueError); Refused
    is raised when no backend can.

    >>> o = tessera.torch.attention(q, k, v, causal=True)
    >>> o, lse = tessera.torch.attention(q, k, v, window=(128, 0), align="top_left", return_lse=True)
    """
    if type(window) is list:
        window = tuple(window)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if rng_state is None:
        if dropout_p and isinstance(q, torch.Tensor):
            rng_state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    elif type(rng_state) in (list, tuple):
        rng_state = _state("attention", rng_state, q)
    if torch._C._is_any_autocast_enabled():
        q, k, v, bias, sink, alibi_slopes = _autocast(q, k, v, bias, sink, alibi_slopes)
    ids_q, ids_k = segment_ids if type(segment_ids) is tuple else (segment_ids, segment_ids)
    pages_k, pages_v = page_table if type(page_table) is tuple else (page_table, None)
    off_by_one = type(sink) is str
    tensors = (q, k, v, bias, keep if drop is None else drop, key_ranges, ids_q, ids_k,
               None if off_by_one else sink, alibi_slopes, seqlens_q, seqlens_k, cu_seqlens_q,
               cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded, pages_k, pages_v, k_scale,
               v_scale, rng_state)
    options = (layout, softmax_scale, causal, window, align, max_seqlen_q, max_seqlen_k, bias_at,
               softcap, dropout_p, deterministic, batch_invariant, backend, allow_quadratic,
               off_by_one, drop is not None, bias is not None,
               seqlens_q is seqlens_k and seqlens_q is not None or
               cu_seqlens_q is cu_seqlens_k and cu_seqlens_q is not None)
    if torch.compiler.is_compiling():
        o, lse, max_logit = _traced(out, (*tensors, *_describe.scalars(*options), return_max_logit))
    else:
        try:
            kept = _kept(*options, return_lse, return_max_logit)
        except TypeError:  # something unhashable, which is illegal
            kept = []
        try:
            if not kept:
                kept.append(_learn(locals()))
            o, lse, max_logit = _apply(out, (*tensors, *kept[0], return_max_logit))
        except (RuntimeError, TypeError, AttributeError, OverflowError) as error:
            raise _diagnose("attention", locals(), error) from None
    if not return_lse and not return_max_logit:
        return o
    return (o,) + (lse,) * return_lse + (max_logit,) * return_max_logit


def merge(parts, *, layout="bshd"):
    """Attention over the union of disjoint key sets, from the (o, lse) of each; differentiable.

    parts is a list of (o, lse), all of one shape and dtype. Returns a new (o, lse). A part's o is
    not read where its lse is -inf; a sink belongs to one part only.

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
                raise a.error(f"parts[{i}].{name}", x, f"must be a {_tensors.noun}")
    return _ops.merge([o for o, _ in parts], [lse for _, lse in parts], _lib.FORMATS[layout])


def dropout_mask(b, hq, sq, sk, dropout_p, rng_state):
    """The mask that attention(dropout_p=, rng_state=) applies: bool [b, hq, sq, sk], True = kept, on
    the device of rng_state.

    >>> keep = tessera.torch.dropout_mask(2, 16, 128, 128, 0.1, rng_state=(seed, 0))
    """
    a = _args.Arguments(_tensors, "dropout_mask")
    for name, value in (("b", b), ("hq", hq), ("sq", sq), ("sk", sk)):
        if not isinstance(value, torch.SymInt) and a.integer(name, value) < 0:
            raise a.error(name, value, "must not be negative")
    if type(rng_state) in (list, tuple):
        rng_state = _state("dropout_mask", rng_state, None)
    info = a.put("rng_state", "rng_state", rng_state, (0,), axes="seed and offset")
    if info.dtype != "int64" or info.shape != (2,):
        raise a.error("rng_state", f"{info.dtype}{list(info.shape)}", "must be int64 of shape [2]")
    return _ops.dropout_mask(rng_state, b, hq, sq, sk, a.number("dropout_p", dropout_p))


def explain(q, k=None, v=None, *, backward=False, grads=("dq", "dk", "dv"), dlse=None, device=None,
            **keywords):
    """Which backend attention(q, k, v, **keywords) would use, or its backward pass, and why.

    Or explain(text) for a case line. device is that of q unless given: "cpu", "sm80", "sm90" or
    "sm100"; the hardware need not be there. Raises the ValueErrors that attention would raise.

    >>> print(tessera.torch.explain(q, k, v, causal=True))
    """
    if isinstance(q, str):
        return _explain.explain(q, k, v, backward=backward, dlse=dlse, device=device or "cpu",
                                **keywords)
    a = _args.Arguments(_tensors, "explain")
    for name in keywords:
        if name not in _args.ARRAYS[3:] + _args.OPTIONS + ("return_lse", "return_max_logit", "out"):
            raise TypeError(f"explain() got an unexpected keyword argument {name!r}")
    if type(keywords.get("rng_state")) in (list, tuple):
        keywords["rng_state"] = _state("explain", keywords["rng_state"], q)
    elif keywords.get("dropout_p") and keywords.get("rng_state") is None and \
            isinstance(q, torch.Tensor):
        keywords["rng_state"] = torch.zeros(2, dtype=torch.int64, device=q.device)
    if keywords.get("deterministic") is None:
        keywords["deterministic"] = torch.are_deterministic_algorithms_enabled()
    given = dict(keywords, q=q, k=k, v=v)
    if a.boolean("backward", backward):
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
    q, k, v, bias = arguments[:4]
    sink, slopes = arguments[8:10]
    if torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or
            (bias is not None and bias.requires_grad) or
            (sink is not None and sink.requires_grad) or
            (slopes is not None and slopes.requires_grad)) or _ops.has_duals():
        return _ops.Attention.of(arguments)
    with _ops.below_autograd():
        return _ops.attention(*arguments)


def _learn(given: dict) -> tuple:
    """SCALARS of options that were not seen before, all checked by _args."""
    call = _describe.Call("attention", given)
    for name in ("return_lse", "return_max_logit"):
        call.arguments.boolean(name, given[name])
    return call.scalars()


def _diagnose(operation: str, given: dict, error: Exception) -> Exception:
    """What to raise for a call whose operator failed with `error`."""
    try:
        call = _describe.Call(operation, given, max_logit=given["return_max_logit"])
        if given["q"].device.type == "cpu" and not torch._C._are_functorch_transforms_active():
            call.validate()
        call.prepare(torch.get_num_threads())
    except (ValueError, RuntimeError, MemoryError) as better:
        return better
    if "can't allocate memory" in str(error):
        return MemoryError(f"tessera.{operation}: the outputs do not fit in memory: {error}")
    return error


def _autocast(q, *others):
    """q, k, v in autocast's dtype, and what must be in q's dtype or fp32 with them."""
    if not isinstance(q, torch.Tensor) or not torch.is_autocast_enabled(q.device.type):
        return (q, *others)
    dtype = torch.get_autocast_dtype(q.device.type)

    def cast(x, *kept):
        eligible = isinstance(x, torch.Tensor) and x.dtype in _CAST and x.dtype not in kept
        return x.to(dtype) if eligible else x

    k, v, *more = others
    return cast(q), cast(k), cast(v), *(cast(x, torch.float32) for x in more)


_CAST = (torch.float32, torch.bfloat16, torch.float16)


def _state(operation: str, rng_state, q):
    a = _args.Arguments(_tensors, operation)
    pair = a.pair_of_integers("rng_state", rng_state, "(seed, offset)")
    device = q.device if isinstance(q, torch.Tensor) else None
    return torch.tensor(pair, dtype=torch.int64, device=device)
