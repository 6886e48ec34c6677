# SPDX-License-Identifier: Apache-2.0
"""One call as JAX's transformations see it, from the outside in:

    jit                  ours, so that an eager call is one program
    shard_map            for axes of type Explicit (_partition)
    custom_vjp           the backward pass is a call of its own, for the gradients that are wanted
    custom_vmap          one call for all examples (_vmap)
    custom_partitioning  batch and heads are split over a mesh without communication (_partition)
    the primitive        is lowered to the custom call of its platform; only here a platform is known,
                         so only here a backend may refuse
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _lib
from .._call import GRADIENT_OF, Call, _args
from . import _arrays, _binding, _partition, _vmap
from ._results import prepare, results_of

_ARCHS = (80, 89, 90, 100, 120)  # of CUDA devices, where none is at hand

# ---- the primitive ----

_call_p = Primitive("tessera_attention")
_call_p.multiple_results = True


@_call_p.def_abstract_eval
def _(*avals, call: Call):
    first = avals[0]
    everywhere = NamedSharding(first.sharding.mesh, PartitionSpec())
    return [first.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=everywhere)
            for x in results_of(call, avals)]


@_call_p.def_impl
def _(*operands, call: Call):
    with jax.disable_jit(False):
        return jax.jit(functools.partial(_call_p.bind, call=call))(*operands)


def _lower_cpu(ctx, *operands, call: Call):
    if not _arrays.is_symbolic(ctx.avals_in):
        prepare(call, ctx.avals_in, _lib.CPU_DEVICE)
    return _custom_call(ctx, operands, call)


def _lower_cuda(ctx, *operands, call: Call):
    if _arrays.is_symbolic(ctx.avals_in):
        raise _lib.Refused(f"tessera.{call.operation}: q.shape=symbolic: on CUDA the workspace must be "
                           "known when a program is lowered; give constant shapes")
    size = _workspace(call, ctx.avals_in, places(assigned(ctx.module_context)))
    workspace = jax.core.ShapedArray((size,), np.dtype(np.uint8))
    return _custom_call(ctx.replace(avals_out=[*ctx.avals_out, workspace]), operands, call)[:-1]


def _lower_elsewhere(ctx, *_, call: Call):
    raise _lib.Refused(f"tessera.{call.operation}: platform={ctx.module_context.platforms[0]!r}: must "
                       "be cpu or cuda")


def _custom_call(ctx, operands, call: Call):
    return jax.ffi.ffi_lowering(_binding.ATTENTION)(ctx, *operands, call=call.text)


mlir.register_lowering(_call_p, _lower_elsewhere)
mlir.register_lowering(_call_p, _lower_cpu, platform="cpu")
mlir.register_lowering(_call_p, _lower_cuda, platform="cuda")


def assigned(context) -> tuple:
    """The devices that a program is lowered for; () if nothing says which."""
    axis = context.axis_context
    mesh = getattr(axis, "mesh", None)  # inside shard_map
    if isinstance(mesh, Mesh):
        return tuple(mesh.devices.flat)
    return getattr(axis, "device_assignment", None) or ()


def places(devices) -> list[tuple[int, int]]:
    """(compute capability, 90 for 9.0; ordinal in this process) of every CUDA device among
    `devices`, or of all that are here if there is none. A device of another process or of a topology
    gives the devices here that have its architecture; if there are none, and where no device is
    known at all, only the architecture says something."""
    try:
        here = {x: (_arch(x), x.local_hardware_id) for x in jax.local_devices(backend="cuda")}
    except RuntimeError:
        here = {}
    found = set()
    for device in [x for x in devices if hasattr(x, "compute_capability")] or here:
        if device in here:
            found.add(here[device])
        else:
            arch = _arch(device)
            found.update([x for x in here.values() if x[0] == arch] or [(arch, 0)])
    return sorted(found) or [(arch, 0) for arch in _ARCHS]


def _arch(device) -> int:
    return int(device.compute_capability.replace(".", ""))


def _workspace(call: Call, operands, places) -> int:
    """Bytes that are enough on each of the places; refuses what all of them refuse."""
    sizes, refusals = [], []
    for arch, ordinal in places:
        try:
            device = _lib.Device(kind=_lib.CUDA, ordinal=ordinal, arch=arch)
            sizes.append(prepare(call, operands, device))
        except _lib.Refused as refusal:
            refusals.append(refusal)
    if not sizes:
        raise refusals[0]
    return max(sizes)


# ---- examples and shards ----

def apply(call: Call, operands) -> list[jax.Array]:
    """The results of the call, without gradients."""
    operands = aligned(operands)
    run = jax.custom_batching.custom_vmap(_partitioned(call, jax.typeof(operands[0]).sharding.mesh))
    run.def_vmap(functools.partial(_vmap.rule, apply, call))
    return run(*operands)


@functools.lru_cache(maxsize=1024)
def _partitioned(call: Call, mesh):
    run = functools.partial(_call_p.bind, call=call)
    return run if _partition.is_whole(mesh) else _partition.partitioned(call, mesh, run)


def aligned(operands) -> list[jax.Array]:
    """The operands, varying over the same manual axes of a mesh. Where one is made to vary, its
    gradient becomes the sum over the axis."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*varying)
    return [x if own == union else jax.lax.pcast(x, tuple(union - own), to="varying")
            for x, own in zip(operands, varying)]


# ---- gradients ----

@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: Call, *operands):
    return apply(call, operands)


def _attention_forward(call: Call, *operands):
    values = [x.value for x in operands]
    q = values[call.places["q"].operand].dtype.name
    if _args.is_fp8(q) and any(x.perturbed for x in operands):
        raise _args.no_autograd(q, "tessera.jax", "jax.lax.stop_gradient")
    wanted = sum(1 << i for i, x in enumerate(operands) if x.perturbed)
    results = _once(call, *values)
    results[:2] = (checkpoint_name(x, "tessera_attention") for x in results[:2])
    # JAX caches this function's jaxpr for each set of perturbed inputs, but keeps the structure of the
    # residuals of the last trace: what is wanted may be in the shape of a residual only.
    return results, (values, *results[:2], jnp.zeros((wanted, 0), bool))


def _attention_backward(call: Call, residuals, cotangents):
    operands, o, lse, bits = residuals
    wanted = tuple(i for i, operand in enumerate(call.operands)
                   if operand.tensors[0] in GRADIENT_OF and bits.shape[0] >> i & 1)
    do, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents[:2])
    gradients = [None] * len(operands)
    if wanted and not (do is None and dlse is None):
        do = jnp.zeros_like(o) if do is None else do
        rows = (do, o, lse) + (() if dlse is None else (dlse,))
        backward = call.backward(wanted, dlse is not None)
        for i, gradient in zip(wanted, gradients_of(backward, *rows, *operands)):
            gradients[i] = gradient
    return tuple(gradients)


_attention.defvjp(_attention_forward, _attention_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _once(call: Call, *operands):
    """A call that is the end of differentiation: of a backward pass, or of the forward pass in a
    program that was differentiated."""
    return apply(call, operands)


def _no_second_derivative(call: Call, *_):
    raise _lib.Refused(f"tessera.{call.operation}: the gradient has no derivative of its own yet; "
                       "differentiate once")


_once.defvjp(_no_second_derivative, _no_second_derivative)


# ---- what front ends call ----

def attention_of(call: Call, *operands) -> list[jax.Array]:
    """[o, lse?, max_logit?, amax_o?]"""
    try:
        return _attention_of(call, *operands)
    except TypeError as error:  # JAX's own, which names nothing
        if "forward-mode" not in str(error):
            raise
        raise _lib.Refused("tessera.attention: forward-mode derivatives (jax.jvp, jacfwd) do not exist yet; "
                           "use jax.grad, vjp or jacrev, or jax.nn.dot_product_attention") from None


@functools.partial(jax.jit, static_argnums=0)
def _attention_of(call: Call, *operands) -> list[jax.Array]:
    return _partition.explicit(call, lambda *own: _attention(call, *aligned(own)), operands)


@functools.partial(jax.jit, static_argnums=0)
def gradients_of(call: Call, *operands) -> list[jax.Array]:
    """The gradients of a Call of the backward pass."""
    return _partition.explicit(call, lambda *own: _once(call, *aligned(own)), operands)
