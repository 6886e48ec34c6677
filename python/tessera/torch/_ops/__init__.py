# SPDX-License-Identifier: Apache-2.0
"""The operators tessera::* of PyTorch's dispatcher: schemas, and the rules of autograd, fake tensors
and vmap. Kernels are binding.cc's, or _kernels.py's where that was not built.

    attention(inputs, sizes, call) -> [o, lse, ...]
    attention_backward(inputs, sizes, call) -> gradients; do, o, lse and dlse are inputs like any other
    attention_into(outputs, inputs, sizes, call) -> (): either pass, into tensors of the caller's

`call` is the text of a Call, which names inputs, outputs and all that is not its default; `sizes` are the
integers that it calls $0, $1, ...
"""

from __future__ import annotations

import functools

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ... import _bindings, _lib
from ..._call import Call, _args
from .. import _describe, _later, _tensors
from . import _flops, _kernels, _vmap

_library = torch.library.Library("tessera", "DEF")
for _schema in ("attention(Tensor[] inputs, SymInt[] sizes, str call) -> Tensor[]",
                "attention_backward(Tensor[] inputs, SymInt[] sizes, str call) -> Tensor[]",
                "attention_into(Tensor(a!)[] outputs, Tensor[] inputs, SymInt[] sizes, str call) -> ()",
                "merge(Tensor[] o, Tensor[] lse, int format, ScalarType? out_dtype=None) -> "
                "(Tensor, Tensor)",
                "dropout_mask(Tensor rng_state, SymInt b, SymInt hq, SymInt sq, SymInt sk, "
                "float dropout_p, Tensor? q_start=None, Tensor? k_start=None) -> Tensor"):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
# An operator of its own: Inductor replaces PyTorch's random operators, and forgets what a checkpoint says. The device
# is a keyword, from which alone PyTorch 2.11 knows whose generator to restore.
_library.define("rng_state(*, Device device) -> Tensor",
                tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded))


has_binding = _bindings.load("torch", torch.ops.load_library)  # the compiled kernels
for _name in ("merge", "dropout_mask") if has_binding else \
        ("attention", "attention_backward", "attention_into", "merge", "dropout_mask"):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, getattr(_kernels, _name), _key)

_library.impl("rng_state", lambda *, device: torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device),
              "CompositeExplicitAutograd")

attention = torch.ops.tessera.attention.default
attention_backward = torch.ops.tessera.attention_backward.default
attention_into_op = torch.ops.tessera.attention_into.default
merge = torch.ops.tessera.merge.default
dropout_mask = torch.ops.tessera.dropout_mask.default
rng_state = torch.ops.tessera.rng_state.default


_later.when_imported("torch.utils.flop_counter", lambda: _flops.register(torch.ops.tessera))


# ---- fake tensors: shapes, and at trace time every error that shapes and options make ----

def _refuse(call: Call, inputs, sizes, outputs=None):
    try:
        described = _describe.Description.of_call(call, inputs, sizes, outputs)
    except _tensors.NoHint:
        return  # extents that only the run will know: it will check them
    described.validate_scalars()
    described.prepare(_tensors.device(inputs[0]), torch.get_num_threads())


def _fake(inputs, sizes, text):
    call = Call.of(text)
    _refuse(call, inputs, sizes)
    return _describe.results_of(call, inputs)


torch.library.register_fake("tessera::attention", _fake, lib=_library)
torch.library.register_fake("tessera::attention_backward", _fake, lib=_library)


@torch.library.register_fake("tessera::attention_into", lib=_library)
def _(outputs, inputs, sizes, text):
    _refuse(Call.of(text), inputs, sizes, outputs)


@torch.library.register_fake("tessera::merge", lib=_library)
def _(os, lses, format, out_dtype=None):
    return (torch.empty_like(os[0], dtype=out_dtype, memory_format=torch.contiguous_format),
            torch.empty_like(lses[0], memory_format=torch.contiguous_format))


@torch.library.register_fake("tessera::dropout_mask", lib=_library)
def _(rng_state, b, hq, sq, sk, dropout_p, q_start=None, k_start=None):
    return rng_state.new_empty((b, hq, sq, sk), dtype=torch.bool)


@torch.library.register_fake("tessera::rng_state", lib=_library)
def _(*, device):
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


class Attention(_SingleLevelFunction):
    """attention with its gradient. A Function, and not register_autograd, which looks through the
    schema on every call: 46 us. It is applied to what may have a gradient, as members of a list have
    none, and to a tuple of all arguments: PyTorch looks at each of its inputs several times."""
    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def of(tensors, sizes, text):
        return _applied(Attention, *(tensors[i] for i in Call.of(text).differentiable), (tensors, sizes, text))

    @staticmethod
    def forward(ctx, *inputs):
        tensors, ctx.sizes, ctx.text = inputs[-1]
        if tensors[0].dtype.itemsize == 1:
            raise _args.no_autograd(_tensors.dtype_name(tensors[0]), "tessera.torch", "torch.no_grad()")
        with below_autograd():
            outputs = attention(tensors, ctx.sizes, ctx.text)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[2:])
        ctx.save_for_backward(*outputs[:2], *tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, do, dlse, *_):
        o, lse, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad
        wanted = tuple(i for i, is_needed in zip(Call.of(ctx.text).differentiable, needed) if is_needed)
        results = iter(gradients(do, dlse, o, lse, tensors, ctx.sizes, ctx.text, wanted))
        return tuple(next(results) if is_needed else None for is_needed in needed)


def plain(q, k, v, sizes, text):
    """attention, past the dispatcher's autograd key where that is all it would decide, of no tensors
    beside q, k and v."""
    tensors = [q, k, v]
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None and _is_traced():
        return attention(tensors, sizes, text)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) or has_duals():
        return Attention.apply(q, k, v, (tensors, sizes, text))
    with below_autograd():
        return attention(tensors, sizes, text)


def any_tensors(tensors, sizes, text):
    """plain(), of any tensors."""
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None and _is_traced():
        return attention(tensors, sizes, text)
    if needs_gradient(tensors):
        return Attention.apply(*[tensors[i] for i in Call.of(text).differentiable], (tensors, sizes, text))
    with below_autograd():
        return attention(tensors, sizes, text)


def _is_traced() -> bool:
    """Whether torch.jit.trace looks on, which records operators as such, and Functions as Python."""
    if torch._C._get_tracing_state() is None:
        return False
    if torch.onnx.is_in_onnx_export():
        raise _lib.Refused("tessera.attention: torch.onnx.export: ONNX has no such operator; use torch.export.export, "
                           "which keeps it, or tessera.torch.scaled_dot_product_attention, which PyTorch's own "
                           "stands for in ONNX")
    return True


def gradients(do, dlse, o, lse, tensors, sizes, text, wanted: tuple[int, ...]) -> list:
    """The gradients of the tensors `wanted`, in their order."""
    if (do is None and dlse is None) or not wanted:
        return [None] * len(wanted)
    if any(torch._C._functorch.is_legacy_batchedtensor(x) for x in (do, dlse) if x is not None):
        raise _lib.Refused("tessera.attention: is_grads_batched=True, vectorize=True: PyTorch's vmap behind them takes "
                           "no rule for an operator of tessera's; use torch.func.jacrev or vjp, or leave it out")
    if do is None:
        do = o.new_zeros(o.shape[-1]).expand(o.shape)
    rows = (do, o, lse) if dlse is None else (do, o, lse, dlse)
    arguments = [*rows, *tensors], sizes, backward_text(text, wanted, dlse is not None)
    try:
        return _apply_backward(*arguments)
    except _lib.Refused:
        raise
    except RuntimeError:
        _refuse(Call.of(arguments[-1]), *arguments[:-1])
        raise


@functools.lru_cache(maxsize=1024)
def backward_text(text: str, wanted: tuple[int, ...], with_dlse: bool) -> str:
    return Call.of(text).backward(wanted, with_dlse).text


class AttentionBackward(_SingleLevelFunction):
    """attention_backward where a graph of it is made: its own gradient is refused when asked for."""
    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(ctx, *inputs):
        with below_autograd():
            return tuple(attention_backward(*inputs[-1]))

    @staticmethod
    def backward(ctx, *_):
        raise _lib.Refused("tessera.attention: create_graph=True: the gradient has no derivative of "
                           "its own yet; differentiate once, or use PyTorch's attention: " + _OTHER)


def _apply_backward(*arguments):
    if torch._C._are_functorch_transforms_active():  # other levels may be below
        return attention_backward(*arguments)
    return _attention_backward_autograd(*arguments)


def has_duals() -> bool:
    """Whether tensors may carry tangents, which only a Function's jvp sees."""
    return forward_ad._current_level >= 0


def needs_gradient(tensors) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return True
    return has_duals()


def _attention_autograd(tensors, sizes, text):
    if needs_gradient(tensors):
        return list(Attention.of(tensors, sizes, text))
    with below_autograd():
        return attention(tensors, sizes, text)


def _attention_backward_autograd(tensors, sizes, text):
    if needs_gradient(tensors):
        return list(_applied(AttentionBackward, *tensors, (tensors, sizes, text)))
    with below_autograd():
        return attention_backward(tensors, sizes, text)


def attention_into(outputs, tensors, sizes, text):
    """The operator as autograd lets it be called: nobody may want a gradient of it. The dispatcher sees no
    members of lists, and so bumps no versions."""
    if torch._C._are_functorch_transforms_active():
        raise _lib.Refused(f"tessera.{_written(text)}: has no rule for torch.func, which writes into nothing; "
                           "call it outside, leave it out, or add parts up by tessera.torch.merge")
    if needs_gradient((*outputs, *tensors)):
        raise _lib.Refused(f"tessera.{_written(text)}: what is written into has no gradient, and a tensor here "
                           "asks for one; use torch.no_grad(), leave it out, or add up by tessera.torch.merge")
    with below_autograd():
        attention_into_op(outputs, tensors, sizes, text)
    for x in outputs:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _written(text: str) -> str:
    call = Call.of(text)
    what = "accumulate=True" if "accumulate" in call.values else "grads={...}" if call.is_backward else "out=Tensor"
    return f"{call.operation}: {what}"


_library.impl("attention", _attention_autograd, "Autograd")
_library.impl("attention_into", attention_into, "Autograd")
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
    # As many as the dispatcher passed on, which leaves out a trailing default: where there are lists of tensors,
    # PyTorch 2.11 counts them.
    return dos, dlses, *[None] * (len(ctx.needs_input_grad) - 2)


torch.library.register_autograd("tessera::merge", _merge_backward, setup_context=_save_parts,
                                lib=_library)


# ---- vmap ----

torch.library.register_vmap("tessera::attention", _vmap.rule(attention), lib=_library)
torch.library.register_vmap("tessera::attention_backward", _vmap.rule(attention_backward), lib=_library)
