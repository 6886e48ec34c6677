# SPDX-License-Identifier: Apache-2.0
"""What users call: keywords in, one operator of the dispatcher out.

Keywords that were seen before cost one look-up, whatever tensors are among them, and those that must be
completed another; shapes are the operator's business. When the operator fails, the call is described once
more by _args, which knows what to say and how the caller spelled it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import torch
from torch.utils.checkpoint import checkpoint

from .. import _explain, _lib
from .._call import ROWS, _args, _keywords, _prepared
from .._attention import Gradients
from .._call._description import WIDE
from .._call._documented import documented
from . import _describe, _dtensor, _later, _nested, _ops, _tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MAX_KEPT = 512
_DETERMINISTIC = (None, "None follows torch.use_deterministic_algorithms.")
_RNG_STATE = (None, "None draws one from PyTorch's generator.")
AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that autocast changes
_NO_SIZES: list = []
_LENGTHS = _describe.CHANGING  # beside a text, in this order
_ASKED = "dropout_p", "return_lse", "return_amax", "return_max_logit"  # whether they are on, before all is checked

_FAILURES = (RuntimeError, TypeError, AttributeError, OverflowError)  # of an operator
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))  # and no other subclass
_is_autocast, _is_deterministic = torch._C._is_any_autocast_enabled, torch._C._get_deterministic_algorithms
_plain, _any_tensors = _ops.plain, _ops.any_tensors

# Keys hold the types of values too: 1, 1.0 and True are three.
_kept: dict[tuple, str] = {}     # options, and the names of tensors -> the text of the call
_known: dict[tuple, tuple] = {}  # _key -> (the text of the call, _picked)


@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              **keywords: Unpack[_keywords.Single]) -> torch.Tensor: ...

@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              **keywords: Unpack[_keywords.Forward]) -> tuple[torch.Tensor, ...]: ...


@documented(_keywords.FORWARD, torch.Tensor, deterministic=_DETERMINISTIC, rng_state=_RNG_STATE)
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Unpack[_keywords.Forward]
              ) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Computes o = softmax(q kᵀ · softmax_scale + bias, masked) v, with autograd.

    q is [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv] and o [b, sq, hq, dv]; hq is a multiple of hk. Pass
    layout="sbhd" or "bhsd" for another order of axes, "thd" for packed sequences [t, h, d].
    Jagged nested tensors [b, j, h, d] (with layout="bhsd" [b, h, j, d]) are packed sequences too, and o is then nested.
    All have one dtype: float32, bfloat16 or float16, or float64 with backend="reference". k and v may be fp8 beside
    another q; all three may be fp8 in calls without gradients. autocast casts q, k and v.

    Returns o, or a tuple (o[, lse][, max_logit]) of what the keywords ask for. Gradients flow through o and lse to q,
    k, v, bias, sink and alibi_slopes. `out` is for calls without gradients. docs/semantics.md says exactly what is
    computed.

    >>> o = tessera.torch.attention(q, k, v, causal=True)
    >>> o, lse = tessera.torch.attention(q, k, v, window=(128, 0), align="top_left", return_lse=True)
    """
    if type(q) is not torch.Tensor or type(k) is not torch.Tensor:
        if _nested.is_nested(q, k, v):
            return _nested.attention(attention, q, k, v, keywords)
        if _dtensor.are(q, k, v):
            is_drawn = keywords.get("rng_state") is None
            _complete("attention", q, keywords)
            return _dtensor.attention(attention, q, k, v, keywords, is_drawn)
    if torch.compiler.is_compiling():
        return _compiled(q, k, v, keywords)
    tensors, sizes = [q, k, v], []
    key = None if _is_autocast() else _key(q, keywords, tensors, sizes)
    try:
        known = _known.get(key)
    except TypeError:  # something unhashable
        key = known = None
    if known is None:
        return _described(q, k, v, keywords, key, tensors, sizes)
    text, picked = known
    try:
        results = _plain(q, k, v, sizes, text) if len(tensors) == 3 else _any_tensors(tensors, sizes, text)
    except _FAILURES as error:
        _complete("attention", q, keywords)
        raise _diagnose("attention", {"q": q, "k": k, "v": v, **keywords}, error) from None
    return results[0] if picked is None else tuple([results[i] for i in picked])


def prepared(changing: Sequence[str] = (), otherwise=None, **keywords):
    """(q, k, v, *given) -> attention(q, k, v, **keywords), for callers whose keywords were accepted before: what
    attention looks up on every call is looked up once. It returns what attention does.

    The keywords `changing` name what each call gives anew: all tensors among the keywords, which are those of one call
    here, in their order, and after them max_seqlen_q and max_seqlen_k, both or neither. `otherwise`, attention unless
    given, gets the same arguments under autocast and where the operator fails: it knows what to say. q and k are
    torch.Tensor itself, no nested tensors or DTensors."""
    keywords = {"deterministic": False, **keywords}
    names, tensors, options, flags = _describe.sort(None, None, None, keywords)
    n = len(tensors) - 3
    lengths = [name for name in _LENGTHS if keywords.get(name) is not None]
    has_lengths = len(changing) > n
    if [id(keywords[name]) for name in changing[:n]] != [id(x) for x in tensors[3:]] or \
            has_lengths and list(changing[n:]) != lengths:
        raise ValueError(f"tessera.prepared: changing={changing}: must name all tensors in the order of keywords, then "
                         "lengths, both or neither")
    outputs = _outputs(None, keywords)
    picked = _picked(outputs, keywords)
    sizes, text = _describe.written(names, options, flags, outputs)
    fixed = {name: value for name, value in keywords.items() if name not in changing}
    del keywords, tensors, options  # which hold tensors of one call

    def ordinary(q, k, v, *given):
        return attention(q, k, v, **fixed, **dict(zip(changing, given)))
    otherwise = otherwise or ordinary

    def run(q, k, v, *given):
        if _is_autocast():
            return otherwise(q, k, v, *given)
        try:
            results = _any_tensors([q, k, v, *given[:n]], [*given[n:]], text) if has_lengths else \
                _any_tensors([q, k, v, *given], sizes, text)
        except _FAILURES:
            return otherwise(q, k, v, *given)
        return results[0] if picked is None else tuple([results[i] for i in picked])

    def run_plain(q, k, v):
        if _is_autocast():
            return otherwise(q, k, v)
        try:
            results = _plain(q, k, v, sizes, text)
        except _FAILURES:
            return otherwise(q, k, v)
        return results[0] if picked is None else tuple([results[i] for i in picked])
    return run if changing else run_plain


class Plans(dict):
    """What a module keeps of its calls, functions of prepared() among them. Its copies and pickles are empty: such a
    function has neither, and a module fills them again."""

    def __reduce__(self):
        return Plans, ()


@documented(_keywords.BACKWARD, torch.Tensor, deterministic=_DETERMINISTIC)
def attention_backward(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       o: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None = None,
                       grads: tuple[str, ...] | dict[str, torch.Tensor] = ("dq", "dk", "dv"),
                       **keywords: Unpack[_keywords.Backward]) -> Gradients[torch.Tensor]:
    """Computes the gradients of attention without autograd, as tessera.attention_backward does. It is for programs that
    keep o and lse themselves, for example of parts of the keys (partial=True).

    q, k, v, o and lse are those of the forward call, and the keywords must be as they were there. do has o's shape,
    dlse lse's; dlse=None is 0. grads names the gradients to compute, of dq, dk, dv, dbias, dsink and dalibi_slopes, or
    maps these names to tensors to write into, or with accumulate=True to add to. Returns an object with a member for
    each gradient, None if it was not asked for.

    >>> g = tessera.torch.attention_backward(do, q, k, v, o, lse, causal=True)
    """
    _keywords.check_names("attention_backward", keywords, _keywords.BACKWARD, hint=not torch.compiler.is_compiling())
    _dtensor.refuse("attention_backward", do, q, k, v, o, lse)
    _complete("attention_backward", q, keywords)
    chosen = _prepared.gradient_outputs(_tensors, grads)
    do = _describe.readable(do)
    written = [x for x in chosen.values() if x is not None] if isinstance(grads, dict) else []
    found = [name for name, x in chosen.items() if x is not None]
    names, tensors, options, flags = _describe.sort(q, k, v, keywords)
    rows = [(name, x) for name, x in zip(ROWS, (do, o, lse, dlse)) if name != "dlse" or x is not None]
    names, tensors = [name for name, _ in rows] + names, [x for _, x in rows] + tensors
    amax = [f"amax_{name}" for name in found if name in WIDE] if keywords.get("return_amax") else []
    wide = _dtype_of(keywords.get("grad_dtype"))
    outputs = [name + wide if name in WIDE else name for name in found] + amax
    given = {**keywords, **dict(zip(ROWS, (do, o, lse, dlse))), "q": q, "k": k, "v": v, **chosen}
    results = _backward(names, tensors, options, flags, outputs, given, written)
    return Gradients(**dict(zip(found + amax, results)))


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], *, layout: _keywords.Format = "bshd",
          out_dtype: torch.dtype | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines the results of attention over disjoint sets of keys into the result over all of them; differentiable.

    parts is a list of at least one (o, lse), all of one shape and dtype; layout is that of o, "bshd", "sbhd", "bhsd"
    or "thd". Returns a new (o, lse). o has the dtype of the parts, or out_dtype, which may be float32 for 16-bit
    parts and 16 bits for float32 parts. Rows of a part whose lse is -inf are not read. If there is a sink, give it to
    one part only. ValueError: anything else.

    >>> o, lse = tessera.torch.merge([(o1, lse1), (o2, lse2)])
    """
    form, dtype = _merged_as(layout, out_dtype)
    for i, part in enumerate(_args.pairs_of(_tensors, parts)):
        for x, name in zip(part, ("o", "lse")):
            if not isinstance(x, torch.Tensor):
                raise _args.Arguments(_tensors, "merge").not_an_array(f"parts[{i}].{name}", x)
    return _ops.merge([o for o, _ in parts], [lse for _, lse in parts], form, dtype)


@_later.constant  # looks at words alone, by what torch.compile cannot trace
def _merged_as(layout, out_dtype) -> tuple[int, torch.dtype | None]:
    a = _args.Arguments(_tensors, "merge")
    a.layout_q = a.choice("layout", layout, tuple(_lib.FORMATS))
    return _lib.FORMATS[layout], None if out_dtype is None else getattr(torch, a.dtype("out_dtype", out_dtype))


def dropout_mask(b: int, hq: int, sq: int, sk: int, dropout_p: float,
                 rng_state: torch.Tensor | tuple[int, ...] | list[int], *,
                 q_start: torch.Tensor | None = None, k_start: torch.Tensor | None = None
                 ) -> torch.Tensor:
    """The mask that attention(dropout_p=, rng_state=) applies: bool [b, hq, sq, sk], True = kept, on
    the device of rng_state.

    b, hq, sq and sk are the extents, >= 0; dropout_p is in [0, 1); rng_state is (seed, offset) or
    (seed, offset, first, stride), int64 or integers; q_start and k_start, int32 or int64 [b], are the
    positions of the first row and the first key of each sequence; None is 0. ValueError: anything else.

    >>> keep = tessera.torch.dropout_mask(2, 16, 128, 128, 0.1, rng_state=(seed, 0))
    """
    a = _args.Arguments(_tensors, "dropout_mask")
    extents = {"b": b, "hq": hq, "sq": sq, "sk": sk}
    known = {name: value for name, value in extents.items() if not isinstance(value, torch.SymInt)}
    if type(rng_state) in (list, tuple):
        rng_state = _state("dropout_mask", rng_state, None)
    _args.mask_inputs(a, known, rng_state, {"q_start": q_start, "k_start": k_start})
    return _ops.dropout_mask(rng_state, b, hq, sq, sk, a.number("dropout_p", dropout_p), q_start,
                             k_start)


def explain(q: torch.Tensor | str, k: torch.Tensor | None = None, v: torch.Tensor | None = None, *,
            backward: bool = False, grads: tuple[str, ...] = ("dq", "dk", "dv"),
            dlse: torch.Tensor | None = None, device: str | None = None,
            **keywords: Unpack[_keywords.Every]) -> _explain.Explanation:
    """Says which backend attention(q, k, v, **keywords) would use, or its backward pass, and why.

    explain(text) asks about a case line instead. keywords are those of attention. With backward=True they are those of
    attention_backward, and grads and dlse too. device is that of q unless given: "cpu", "sm80" (A100),
    "sm89" (RTX 40, L4), "sm90" (H100, H200), "sm100" (B200) or "sm120" (RTX 50); the hardware need not be there. Raises
    the ValueErrors that attention would raise.

    >>> print(tessera.torch.explain(q, k, v, causal=True))
    """
    if not isinstance(q, str):
        _dtensor.refuse("explain", q, k, v)
        _complete("explain", q, keywords)
    elif device is None:
        device = "cpu"
    return _explain.explained(_tensors, q, k, v, backward, grads, dlse, device, keywords)


# ---- below: how ----

def _key(q, keywords: dict, tensors: list, sizes: list) -> tuple:
    """All that the text of a call depends on. Adds the tensors among the keywords to `tensors` and the lengths to
    `sizes`, in the order of _describe.sort and written."""
    key = [_is_deterministic(), getattr(q, "dtype", None)]
    for name, value in keywords.items():
        kind = type(value)
        if kind in _TENSORS:
            tensors.append(value)
            if name in _describe.SHARED:
                tensors.append(value)
            key.append(name)
        elif kind is int and name in _LENGTHS:
            sizes.insert(_LENGTHS.index(name), value)
            key.append(name)
        else:
            key += name, kind, value
            if kind is tuple:
                key += map(type, value)
    if len(tensors) > 4:
        given = keywords.get
        key += [given(of_q) is given(of_k) for of_q, of_k in _keywords.PAIRED_LENGTHS]
    return tuple(key)


def _described(q, k, v, keywords: dict, key: tuple | None, found: list, lengths: list):
    """attention of keywords that are new, or must be completed; `key` is theirs in _known, beside the tensors and
    lengths that it found."""
    if _complete("attention", q, keywords):
        key = None  # the tensor's value may be another in the next call
    names, tensors, options, flags = _sorted(q, k, v, keywords)
    given = {**keywords, **{name: x for name, x in zip(names, tensors) if name in _keywords.DIFFERENTIABLE}}
    into = keywords.get("out"), keywords.get("lse")
    outputs = _outputs(q, keywords)
    try:
        sizes, text = _call(names, options, flags, outputs, into, q,
                            lambda: _describe.Description.of_keywords("attention", given))
        if into[0] is None:
            results = _ops.any_tensors(tensors, sizes, text)
        else:
            results = _into(q, outputs, keywords)
            _ops.attention_into(results, tensors, sizes, text)
    except _FAILURES as error:
        raise _diagnose("attention", given, error) from None
    picked = _picked(outputs, keywords)
    # It finds not all that _complete makes and _describe.sort takes apart; such calls come here again.
    if key is not None and into[0] is None and list(map(id, found)) == list(map(id, tensors)) and lengths == sizes:
        if len(_known) >= _MAX_KEPT:
            _known.clear()
        _known[key] = text, picked
    return results[0] if picked is None else tuple([results[i] for i in picked])


def _compiled(q, k, v, keywords: dict):
    """attention as torch.compile traces it."""
    _complete("attention", q, keywords)
    names, tensors, options, flags = _sorted(q, k, v, keywords)
    outputs = _outputs(q, keywords)
    sizes, text = _describe.written(names, options, flags, outputs)
    picked = _picked(outputs, keywords)
    if keywords.get("out") is None:
        if keywords.get("lse") is not None:
            raise ValueError("tessera.attention: lse: is what accumulate=True adds to; give both, or "
                             "return_lse=True for a new one")
        results = _ops.attention(tensors, sizes, text)
    else:
        results = _into(q, outputs, keywords)
        _ops.attention_into_op(results, tensors, sizes, text)
    return results[0] if picked is None else tuple([results[i] for i in picked])


def _sorted(q, k, v, keywords: dict):
    """_describe.sort after autocast."""
    # A search for the nearest would break a graph that is traced.
    _keywords.check_names("attention", keywords, _keywords.FORWARD, hint=not torch.compiler.is_compiling())
    names, tensors, options, flags = _describe.sort(q, k, v, keywords)
    if torch._C._is_any_autocast_enabled():
        _autocast(names, tensors)
    return names, tensors, options, flags


def _outputs(q, keywords: dict) -> list[str]:
    """What attention writes: o, lse, and what the keywords ask for. lse is there for autograd, which
    fp8 q does not have: kernels that need not sum it are faster. torch.compile traces through it."""
    outputs = ["o" + _dtype_of(keywords.get("out_dtype"))]
    if getattr(q, "dtype", torch.float32).itemsize > 1 or keywords.get("return_lse") or keywords.get("lse") is not None:
        outputs.append("lse")
    if keywords.get("return_max_logit"):
        outputs.append("max_logit")
    if keywords.get("return_amax"):
        outputs.append("amax_o")
    return outputs


def _picked(outputs: list[str], keywords: dict) -> tuple[int, ...] | None:
    """Which of the outputs attention returns; None: o alone, not in a tuple."""
    places = [i for i, name in enumerate(outputs) if name != "lse" or keywords.get("return_lse")]
    return tuple(places) if len(places) > 1 else None


def _dtype_of(dtype) -> str:
    """What an output's name in a text has behind it."""
    return "" if dtype is None else ":" + str(getattr(dtype, "__name__", dtype)).rpartition(".")[2]  # NumPy's are types


def _into(q, outputs: list[str], keywords: dict) -> list[torch.Tensor]:
    """The outputs of a call with out=: the caller's, and new ones."""
    layout = keywords.get("layout") or "bshd"
    layout = layout[0] if isinstance(layout, tuple) else layout
    written = [keywords["out"]]
    for name in outputs[1:]:
        if name == "lse" and keywords.get("lse") is not None:
            written.append(keywords["lse"])
        else:
            shape, dtype = _args.statistic(name, q.shape, _tensors.dtype_name(q), layout)
            written.append(q.new_empty(shape, dtype=getattr(torch, dtype)))
    return written


def _call(names, options: dict, flags: int, outputs, written, q, describe) -> tuple[list, str]:
    """The integers beside the text of a call, and the text, checked by describe() unless such a call was
    seen before; `written` are the caller's tensors to write into."""
    sizes = [options[name] for name in _LENGTHS if name in options]
    fixed = {name: value for name, value in options.items() if name not in _UNFIXED}
    dtypes = [getattr(x, "dtype", None) for x in written if x is not None]
    try:
        key = (*names, *outputs, flags, *fixed.items(), *map(_types, fixed.values()), *map(type, sizes),
               *(name for name in _UNFIXED if name in options), *([q.dtype, *dtypes] if dtypes else ()))
        return sizes, _kept[key]
    except KeyError:
        pass
    except TypeError:  # something unhashable, which is illegal
        key = None
    with _untraced():
        describe()
    sizes, text = _describe.written(names, options, flags, outputs, "do" in names)
    if key is not None:
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        _kept[key] = text
    return sizes, text


def _types(value):
    """That of an option, or those in a tuple of them."""
    return tuple(map(type, value)) if type(value) is tuple else type(value)


@contextlib.contextmanager
def _untraced():
    """Without torch.jit.trace, for which extents are tensors and every look at one is an operator."""
    state = torch._C._get_tracing_state()
    if state is None:
        yield
        return
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)


_UNFIXED = (*_LENGTHS, "out", "lse")  # of options, what no text has


def _backward(names, tensors, options, flags, outputs, given: dict, written) -> list:
    """What attention_backward computes."""
    q = given["q"]
    new_amax = [q.new_empty((), dtype=torch.float32) for name in outputs if name.startswith("amax_")] \
        if written else []
    if torch.compiler.is_compiling():
        sizes, text = _describe.written(names, options, flags, outputs, True)
        if not written:
            return _ops.attention_backward(tensors, sizes, text)
        _ops.attention_into_op(written + new_amax, tensors, sizes, text)
        return written + new_amax
    operation = "attention_backward"
    try:
        sizes, text = _call(names, options, flags, outputs, written, q, lambda: _describe.Description.of_keywords(
            operation, given, backward=True))
        if not written:
            with _ops.below_autograd():
                return _ops.attention_backward(tensors, sizes, text)
        _ops.attention_into(written + new_amax, tensors, sizes, text)
        return written + new_amax
    except _FAILURES as error:
        raise _diagnose(operation, given, error, backward=True) from None


def _complete(operation: str, q, keywords: dict) -> bool:
    """Gives `keywords` the front end's own defaults, and other spellings their one form. True: a number was read
    from a tensor."""
    if keywords.get("deterministic") is None:
        keywords["deterministic"] = torch.are_deterministic_algorithms_enabled()
    for name in () if torch.compiler.is_compiling() else _ASKED:  # a graph's numbers have no attributes
        if getattr(keywords.get(name), "ndim", 0):  # the truth of an array is no answer
            _keywords.ALL[name].check(_args.Arguments(_tensors, operation), name, keywords[name])
    read = False
    for name in _keywords.NUMBERS:
        if isinstance(keywords.get(name), torch.Tensor):
            keywords[name], read = number(operation, name, keywords[name]), True
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
    return read


def number(operation: str, name: str, x: torch.Tensor):
    """The value of a tensor without axes, which a GPU is waited for; others are for the checks to refuse."""
    if x.requires_grad and x.dim() == 0:
        raise ValueError(f"tessera.{operation}: {name}=Tensor: asks for a gradient, which it does not have; multiply q "
                         f"by it instead, with {name}=1.0, or detach() it")
    return x.item() if x.dim() == 0 else x


def drawn_state(device: torch.device) -> torch.Tensor:
    """An rng_state from PyTorch's generator, which a backward pass that computes it again gets again."""
    if not torch.compiler.is_dynamo_compiling() or _tensors.is_exporting() or \
            not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)
    # Partitioners compute random operators again where they save little (activation_memory_budget), from
    # another state of the generator. In a checkpoint they restore the state.
    return checkpoint(_ops.rng_state, device=device, use_reentrant=False)


def _diagnose(operation: str, given: dict, error: Exception, backward: bool = False) -> Exception:
    """What to raise for a call whose operator failed with `error`."""
    if isinstance(error, _lib.Refused):
        return error
    try:
        with _untraced():
            _describe.Description.of_keywords(operation, given, backward).check()
    except (ValueError, RuntimeError, MemoryError) as better:
        return better
    if "can't allocate memory" in str(error):
        return MemoryError(f"tessera.{operation}: the outputs do not fit in memory: {error}")
    return error


def _autocast(names: list, tensors: list):
    """q, k, v in autocast's dtype, and with them what must be in q's dtype or fp32."""
    dtype = _tensors.autocast_dtype(tensors[0]) if isinstance(tensors[0], torch.Tensor) else None
    if dtype is None:
        return
    for i, (name, x) in enumerate(zip(names, tensors)):
        if name in _keywords.DIFFERENTIABLE and isinstance(x, torch.Tensor) and x.dtype in AUTOCAST and \
                (i < 3 or x.dtype != torch.float32):
            tensors[i] = x.to(dtype)


def _state(operation: str, rng_state, q):
    # torch.compile cannot trace through Arguments, which hold a C structure.
    words = list(rng_state) if torch.compiler.is_compiling() and len(rng_state) in (2, 4) else \
        _args.rng_words(_args.Arguments(_tensors, operation), rng_state)
    device = q.device if isinstance(q, torch.Tensor) else None
    return torch.tensor(words, dtype=torch.int64, device=device)
