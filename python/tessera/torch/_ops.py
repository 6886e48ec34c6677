# SPDX-License-Identifier: Apache-2.0
"""The operators tessera::* of PyTorch's dispatcher: schemas, and the rules of autograd, fake tensors
and vmap. Kernels are binding.cc's, or _kernels.py's where that was not built.

    attention(q, k, v, flags, ... backend, more) -> (o, lse, max_logit)
    attention_out(out, q, k, v, flags, ... backend, more) -> (lse, max_logit)
    attention_backward(do, o, lse, dlse?, grads, q, k, v, flags, ... backend, more) -> Tensor[]

_describe says what follows q, k and v. max_logit is empty unless flags ask for it; attention_backward
returns the gradients of the bits of `grads`, in the order of _describe.GRADIENT_OF.
"""

from __future__ import annotations

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from .. import _bindings, _lib
from . import _describe, _flops, _kernels, _tensors, _vmap

_DEFAULT = {"str": "''", "float": "0.0"}
_ARGUMENTS = ", ".join(
    ["Tensor q", "Tensor k", "Tensor v", "Tensor?[] more"] +
    [f"{type} {name}={_DEFAULT.get(type, 0)}" for name, type in _describe.TYPES.items()])
# Where `more` has what may have a gradient.
_LATER = tuple(place - 3 for place in _describe.DIFFERENTIABLE[3:])
_FORMAT_Q = _describe.SCALARS.index("format_q")

_library = torch.library.Library("tessera", "DEF")
for _schema in (f"attention({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
                f"attention_out(Tensor(a!) out, {_ARGUMENTS}) -> (Tensor, Tensor)",
                "attention_backward(Tensor do, Tensor o, Tensor lse, Tensor? dlse, int grads, "
                f"{_ARGUMENTS}) -> Tensor[]",
                "merge(Tensor[] o, Tensor[] lse, int format, ScalarType? out_dtype=None) -> "
                "(Tensor, Tensor)",
                "dropout_mask(Tensor rng_state, SymInt b, SymInt hq, SymInt sq, SymInt sk, "
                "float dropout_p, Tensor? q_start=None, Tensor? k_start=None) -> Tensor"):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
# An operator of its own: Inductor replaces PyTorch's random operators, and forgets what a checkpoint says.
_library.define("rng_state(Device device) -> Tensor",
                tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded))


has_binding = _bindings.load("torch", torch.ops.load_library)  # the compiled kernels
for _name in ("merge", "dropout_mask") if has_binding else \
        ("attention", "attention_out", "attention_backward", "merge", "dropout_mask"):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, getattr(_kernels, _name), _key)

_library.impl("rng_state", lambda device: torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device),
              "CompositeExplicitAutograd")

attention = torch.ops.tessera.attention.default
attention_out = torch.ops.tessera.attention_out.default
attention_backward = torch.ops.tessera.attention_backward.default
merge = torch.ops.tessera.merge.default
dropout_mask = torch.ops.tessera.dropout_mask.default
rng_state = torch.ops.tessera.rng_state.default


_flops.register(torch.ops.tessera)


# ---- fake tensors: shapes, and at trace time every error that shapes and options make ----

def _refuse(operation: str, inputs, values, out=None, **more):
    try:
        call = _describe.Call(operation, {**_describe.keywords(inputs, values), "out": out},
                              same_lengths=bool(values[0] & _lib.SAME_LENGTHS), **more)
    except _tensors.NoHint:
        return  # extents that only the run will know: it will check them
    with torch._C._DisableTorchDispatch():  # real tensors, amidst fake ones
        call.validate_scalars()
    call.prepare(torch.get_num_threads())


def _describe_backward(do, o, lse, dlse, wanted, *arguments):
    *call, _ = _describe.unpack(arguments)
    _refuse("attention_backward", *call, grads=_kernels.grads_of(wanted),
            backward={"do": None, "o": o, "lse": lse, **({} if dlse is None else {"dlse": dlse})})


@torch.library.register_fake("tessera::attention", lib=_library)
def _(*arguments):
    *call, max_logit = _describe.unpack(arguments)
    _refuse("attention", *call, max_logit=max_logit)
    q, _, v = arguments[:3]
    dtype = _describe.result_dtype(call[1][0], _describe.OUT_DTYPE, q.dtype)
    layout = tuple(_lib.FORMATS)[call[1][_FORMAT_Q]]
    return _tensors.empty_o(q, v, layout, dtype), *_row_outputs(*call, max_logit)


@torch.library.register_fake("tessera::attention_out", lib=_library)
def _(out, *arguments):
    *call, max_logit = _describe.unpack(arguments)
    _refuse("attention", *call, max_logit=max_logit, out=out)
    return _row_outputs(*call, max_logit)


def _row_outputs(inputs, values, max_logit):
    """lse and max_logit."""
    q, layout = inputs[0], tuple(_lib.FORMATS)[values[_FORMAT_Q]]
    rows = _tensors.statistics_dtype(q)
    heads = q.shape[-3] if layout == "bhsd" else q.shape[-2]
    return (q.new_empty(_tensors.row_shape(q, layout), dtype=rows),
            q.new_empty(heads if max_logit else 0, dtype=rows))


@torch.library.register_fake("tessera::attention_backward", lib=_library)
def _(do, o, lse, dlse, wanted, *arguments):
    _describe_backward(do, o, lse, dlse, wanted, *arguments)
    inputs, (flags, *_), _ = _describe.unpack(arguments)
    given = dict(zip(_describe.INPUTS, inputs))
    wide = _describe.result_dtype(flags, _describe.GRAD_DTYPE, None)
    return [_tensors.empty_gradient(given[_describe.GRADIENT_OF[name]], name, wide)
            for name in _kernels.grads_of(wanted)]


@torch.library.register_fake("tessera::merge", lib=_library)
def _(os, lses, format, out_dtype=None):
    return (torch.empty_like(os[0], dtype=out_dtype, memory_format=torch.contiguous_format),
            torch.empty_like(lses[0], memory_format=torch.contiguous_format))


@torch.library.register_fake("tessera::dropout_mask", lib=_library)
def _(rng_state, b, hq, sq, sk, dropout_p, q_start=None, k_start=None):
    return rng_state.new_empty((b, hq, sq, sk), dtype=torch.bool)


@torch.library.register_fake("tessera::rng_state", lib=_library)
def _(device):
    return torch.empty(2, dtype=torch.int64, device=device)


# ---- autograd ----

# Excludes the keys of autograd and no others: fake tensors, functionalization and vmap stay in force.
below_autograd = torch._C._AutoDispatchBelowAutograd


def _applied(function, *arguments):
    """`function` at the level of torch.func that the dispatcher has come to."""
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


_OTHER = "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"


def _no_forward_mode(ctx, *_):
    raise _lib.Refused("tessera.attention: forward-mode derivatives (torch.func.jvp, jacfwd, hessian) "
                       "do not exist yet; use torch.func.vjp, grad or jacrev, or PyTorch's attention: "
                       + _OTHER)


def _later(arguments) -> list:
    """What may have a gradient, beside q, k and v, as far as it is given."""
    more = arguments[_describe.MORE]
    return [more[place] for place in _LATER if place < len(more)]


class Attention(_SingleLevelFunction):
    """attention with its gradient. A Function, and not register_autograd, which looks through the
    schema on every call: 0.2 ms for one of this length. It is applied to what may have a gradient,
    and to a tuple of all arguments: PyTorch looks at each of its inputs several times."""
    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def of(arguments):
        return _applied(Attention, *arguments[:3], *_later(arguments), arguments)

    @staticmethod
    def forward(ctx, *inputs):
        arguments = inputs[-1]
        with below_autograd():
            o, lse, max_logit = output = attention(*arguments)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(max_logit)
        q, k, v, more, *ctx.values = arguments
        ctx.save_for_backward(o, lse, q, k, v, *more)
        return output

    @staticmethod
    def backward(ctx, do, dlse, _):
        o, lse, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad
        wanted = [i for i, is_needed in zip(_describe.DIFFERENTIABLE, needed) if is_needed]
        results = iter(_gradients(do, dlse, o, lse, inputs, ctx.values, wanted))
        return tuple(next(results) if is_needed else None for is_needed in needed)


def plain(*arguments):
    """attention, past the dispatcher's autograd key where that is all it would decide, of arguments
    without tensors beside q, k and v."""
    q, k, v, *_ = arguments
    if torch._C._are_functorch_transforms_active():
        return attention(*arguments)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled() or \
            has_duals():
        return Attention.apply(q, k, v, arguments)
    with below_autograd():
        return attention(*arguments)


def _gradients(do, dlse, o, lse, inputs, values, wanted) -> list:
    """The gradients of the inputs `wanted`, in their order; `inputs` are those that were given."""
    if (do is None and dlse is None) or not wanted:
        return [None] * len(wanted)
    if do is None:
        do = o.new_zeros(o.shape[-1]).expand(o.shape)
    bits = sum(1 << _describe.DIFFERENTIABLE.index(i) for i in wanted)
    arguments = (do, o, lse, dlse, bits, *inputs[:3], inputs[3:], *values)
    try:
        return _apply_backward(arguments)
    except _lib.Refused:
        raise
    except RuntimeError:
        _describe_backward(*arguments)
        raise


class AttentionBackward(_SingleLevelFunction):
    """attention_backward where a graph of it is made: its own gradient is refused when asked for."""
    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(ctx, *arguments):
        with below_autograd():
            return tuple(attention_backward(*arguments))

    @staticmethod
    def backward(ctx, *_):
        raise _lib.Refused("tessera.attention: create_graph=True: the gradient has no derivative of "
                           "its own yet; differentiate once, or use PyTorch's attention: " + _OTHER)


def _apply_backward(arguments):
    if torch._C._are_functorch_transforms_active():  # other levels may be below
        return attention_backward(*arguments)
    return _attention_backward_autograd(*arguments)


def has_duals() -> bool:
    """Whether tensors may carry tangents, which only a Function's jvp sees."""
    return forward_ad._current_level >= 0


def needs_gradient(tensors, arguments) -> bool:
    """Whether one of `tensors`, or of what `arguments` has beside q, k and v, asks for one."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
        for x in _later(arguments):
            if x is not None and x.requires_grad:
                return True
    return has_duals()


def _attention_autograd(*arguments):
    if needs_gradient(arguments[:3], arguments):
        return Attention.of(arguments)
    with below_autograd():
        return attention(*arguments)


def attention_into(out, *arguments):
    """attention_out as autograd lets it be called: nobody may want a gradient of it."""
    if torch._C._are_functorch_transforms_active() or needs_gradient((out, *arguments[:3]), arguments):
        raise _lib.Refused("tessera.attention: out=Tensor: what is written into it has no gradient, "
                           "and a tensor here asks for one; use torch.no_grad(), or leave out= out")
    with below_autograd():
        results = attention_out(out, *arguments)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return results


def _attention_backward_autograd(*arguments):
    if needs_gradient((*arguments[:4], *arguments[5:8]), arguments[5:]):
        return list(_applied(AttentionBackward, *arguments))
    with below_autograd():
        return attention_backward(*arguments)


_library.impl("attention", _attention_autograd, "Autograd")
_library.impl("attention_out", attention_into, "Autograd")
_library.impl("attention_backward", _attention_backward_autograd, "Autograd")


def _save_parts(ctx, inputs, output):
    os, lses, ctx.format, _ = inputs
    ctx.parts = len(os)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*os, *lses, *output)


def _merge_backward(ctx, do, dlse):
    """o = sum of w_i o_i with w_i = exp(lse_i - lse), so dlse_i = w_i (do . (o_i - o) + dlse)."""
    saved = ctx.saved_tensors
    os, lses, (o, lse) = saved[:ctx.parts], saved[ctx.parts:-2], saved[-2:]
    layout = tuple(_lib.FORMATS)[ctx.format]

    def as_o(x):  # the axes of lse, in the order of o's, and one for dv
        x = x.movedim(-2 if layout != "bhsd" else -1, -1) if layout != "bhsd" else x
        return (x.movedim(0, 1) if layout == "sbhd" else x).unsqueeze(-1)

    dos, dlses = [], []
    for o_i, lse_i in zip(os, lses):
        w = torch.where(lse_i == -torch.inf, 0.0, (lse_i - lse).exp())
        live = as_o(w) > 0
        if do is None:
            dos.append(None)
            row = torch.zeros_like(w)
        else:
            dos.append((as_o(w) * do).to(o_i.dtype))
            difference = torch.where(live, o_i.to(w.dtype) - o.to(w.dtype), 0.0)
            row = (difference * do).sum(-1)
            row = row.movedim(0, 1) if layout == "sbhd" else row
            row = row if layout == "bhsd" else row.movedim(-1, -2)
        dlses.append(w * (row if dlse is None else row + dlse))
    return dos, dlses, None, None


torch.library.register_autograd("tessera::merge", _merge_backward, setup_context=_save_parts,
                                lib=_library)


# ---- vmap ----

torch.library.register_vmap("tessera::attention", _vmap.rule(attention, ()), lib=_library)
torch.library.register_vmap("tessera::attention_backward",
                            _vmap.rule(attention_backward, ("do", "o", "lse", "dlse")),
                            lib=_library)
