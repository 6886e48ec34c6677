# SPDX-License-Identifier: Apache-2.0
"""TE's names for axes of meshes. Attention itself needs none: tessera.jax splits its call over
batch and heads as its operands are split."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings

import jax
import numpy as np
from jax.sharding import PartitionSpec, get_abstract_mesh

from ._words import error, later, missing

BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
SEQLEN_CP_AXES = "nvte_seqlen_cp"
HEAD_AXES = "nvte_head"
HIDDEN_AXES = "nvte_hidden"
HIDDEN_TP_AXES = "nvte_hidden_tp"
JOINED_AXES = "nvte_joined"
W_NO_SHARD_AXES = "nvte_w_no_shard"
W_FSDP_AXES = "nvte_w_fsdp"
W_TP_AXES = "nvte_w_tp"
W_JOINED_AXES = "nvte_w_joined"

__getattr__ = missing(__name__)

with warnings.catch_warnings():  # JAX warns of what `with mesh:` fills
    warnings.simplefilter("ignore", DeprecationWarning)
    _THREAD = getattr(jax.interpreters.pxla, "thread_resources", None)


@dataclasses.dataclass
class MeshResource:
    """The mesh axis over which each kind of parallelism runs; None is none."""
    dp_resource: str | None = None    # data: the batch
    tp_resource: str | None = None    # tensors: heads and hidden units
    tpsp_resource: str | None = None  # tensors, and sequences between them
    fsdp_resource: str | None = None  # data, with weights split too
    pp_resource: str | None = None    # pipeline
    cp_resource: str | None = None    # context: sequences
    ep_resource: str | None = None    # experts


_resource: MeshResource | None = None


@contextlib.contextmanager
def global_shard_guard(resource: MeshResource | None):
    """Within it, global_mesh_resource() is `resource`."""
    global _resource
    before, _resource = _resource, resource
    try:
        yield
    finally:
        _resource = before


def global_mesh_resource() -> MeshResource:
    if _resource is None:
        raise error("mesh_resource", None, "is not set; wrap the program in `with "
                    "global_shard_guard(MeshResource(...)):`", "global_mesh_resource")
    if _size(_resource.tp_resource) > 1 and _size(_resource.tpsp_resource) > 1:
        raise error("tp_resource, tpsp_resource", (_resource.tp_resource, _resource.tpsp_resource),
                    "one of them must be None, or an axis of one device", "global_mesh_resource")
    return _resource


@contextlib.contextmanager
def autocast(enabled: bool = False, recipe=None, mesh_resource: MeshResource | None = None):
    """TE's region of quantization, which carries the mesh resource; FP8 is refused by name."""
    if enabled:
        raise later("enabled", True, "FP8 attention", "pass enabled=False and 16-bit arrays",
                    "autocast")
    with global_shard_guard(MeshResource() if mesh_resource is None else mesh_resource):
        yield


def fp8_autocast(enabled: bool = False, fp8_recipe=None,
                 mesh_resource: MeshResource | None = None):
    """autocast by its former name."""
    return autocast(enabled, fp8_recipe, mesh_resource)


# ---- the mesh ----

def _mesh():
    """That of `with mesh:` or of jax.set_mesh, perhaps empty."""
    if _THREAD is None or _THREAD.env.physical_mesh.empty:
        return get_abstract_mesh()
    return _THREAD.env.physical_mesh


def is_mesh_available() -> bool:
    return not _mesh().empty


def get_all_mesh_axes() -> tuple[str, ...]:
    return _mesh().axis_names


def num_of_devices() -> int:
    return len(jax.devices())


def get_num_devices_in_mesh(mesh=None) -> int:
    """1 without a mesh."""
    mesh = _mesh() if mesh is None else mesh
    return 1 if mesh.empty else int(np.prod(list(mesh.shape.values())))


def get_mesh_axis_size(axis: str | None, mesh=None) -> int:
    """1 for None."""
    mesh = _mesh() if mesh is None else mesh
    if axis is None:
        return 1
    if axis not in mesh.shape:
        raise error("axis", repr(axis), f"must be an axis of the mesh, {tuple(mesh.shape)}",
                    "get_mesh_axis_size")
    return mesh.shape[axis]


def get_mesh_axis_rank(axis: str, mesh=None):
    """This device's index along `axis`, within a shard_map; 0 without a mesh."""
    return 0 if mesh is None else jax.lax.axis_index(axis)


def get_mesh_axis_rank_host(axis: str, mesh) -> int:
    """The index along `axis` of this process's device, as a Python number."""
    if axis not in mesh.axis_names:
        raise error("axis", repr(axis), f"must be an axis of the mesh, {mesh.axis_names}",
                    "get_mesh_axis_rank_host")
    places = np.argwhere(mesh.devices == jax.local_devices()[0])
    if not len(places):
        raise error("mesh", mesh.axis_names, "must hold this process's first device",
                    "get_mesh_axis_rank_host")
    return int(places[0][mesh.axis_names.index(axis)])


def get_active_resource_axis(resource_name: str) -> str | None:
    """The mesh axis of a MeshResource's field, if there is a mesh with several devices along it."""
    if _resource is None or not is_mesh_available():
        return None
    axis = getattr(_resource, resource_name)
    return axis if _size(axis) > 1 else None


def tpsp_axis_size() -> int:
    return get_mesh_axis_size(global_mesh_resource().tpsp_resource)


def dp_or_fsdp_axis_size() -> int:
    resource = global_mesh_resource()
    return max(get_mesh_axis_size(resource.dp_resource), get_mesh_axis_size(resource.fsdp_resource))


def ep_axis_size() -> int:
    return get_mesh_axis_size(global_mesh_resource().ep_resource)


def _size(axis: str | None) -> int:
    return _mesh().shape.get(axis, 1)


# ---- constraints ----

def get_sharding_map_logic_axis_to_mesh_axis() -> dict[str, str | None]:
    """The mesh axis of each *_AXES; empty without a mesh, and inside a shard_map over all of it."""
    mesh = _mesh()
    if mesh.empty or set(get_abstract_mesh().manual_axes) == set(mesh.axis_names):
        return {}
    resource = global_mesh_resource()
    tensors = resource.tpsp_resource if _size(resource.tpsp_resource) > 1 else resource.tp_resource
    batch = resource.fsdp_resource if _size(resource.fsdp_resource) > 1 else resource.dp_resource
    return {BATCH_AXES: batch, SEQLEN_AXES: None, SEQLEN_TP_AXES: resource.tpsp_resource,
            SEQLEN_CP_AXES: resource.cp_resource, HEAD_AXES: tensors, HIDDEN_AXES: None,
            HIDDEN_TP_AXES: tensors, JOINED_AXES: None, W_NO_SHARD_AXES: None,
            W_FSDP_AXES: resource.fsdp_resource, W_TP_AXES: tensors, W_JOINED_AXES: None}


def get_padded_spec(spec, ndim: int) -> tuple:
    """`spec` with a None for each axis that it leaves out."""
    spec = () if spec is None else tuple(spec)
    if len(spec) > ndim:
        raise error("spec", spec, f"must have at most ndim={ndim} items", "get_padded_spec")
    return spec + (None,) * (ndim - len(spec))


def with_sharding_constraint(x, pspec: PartitionSpec | None):
    """jax.lax.with_sharding_constraint, but for axes that a shard_map has taken; x without a
    mesh."""
    if pspec is None or not is_mesh_available():
        return x
    taken = get_abstract_mesh().manual_axes
    spec = [_left(names, taken) for names in pspec]
    if not any(spec):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def _left(names, taken):
    if isinstance(names, tuple):
        return tuple(name for name in names if name not in taken) or None
    return None if names in taken else names


def with_sharding_constraint_by_logical_axes(x, logical_axis_names):
    """x constrained by flax's rules of logical axes, or without them by TE's *_AXES and the mesh
    resource. x itself where there are no names, or neither."""
    if not logical_axis_names:
        return x
    with contextlib.suppress(ImportError):
        from flax import linen
        if linen.get_logical_axis_rules():
            return linen.with_logical_constraint(
                x, tuple(logical_axis_names), fallback=linen.spmd.RulesFallback.AXIS_IS_UNSHARDED)
    rules = {} if _resource is None else get_sharding_map_logic_axis_to_mesh_axis()
    if len(logical_axis_names) != x.ndim:
        raise error("logical_axis_names", logical_axis_names, f"must have x.ndim={x.ndim} items",
                    "with_sharding_constraint_by_logical_axes")
    return with_sharding_constraint(x, PartitionSpec(*map(rules.get, logical_axis_names)))


# ---- sums over devices, within a shard_map ----

def lax_paral_op(x, ops, mesh_resource: str | None, mesh, **keywords):
    """ops(x, axis, ...) over a mesh axis; x for None."""
    if mesh_resource is None:
        return x
    get_mesh_axis_size(mesh_resource, mesh)
    return ops(x, mesh_resource, **keywords)


def all_reduce_sum_along_dp_fsdp(x, mesh):
    resource = global_mesh_resource()
    for axis in (resource.dp_resource, resource.fsdp_resource):
        x = lax_paral_op(x, jax.lax.psum, axis, mesh)
    return x


def all_reduce_sum_along_dp_fsdp_tpsp(x, mesh):
    x = lax_paral_op(x, jax.lax.psum, global_mesh_resource().tpsp_resource, mesh)
    return all_reduce_sum_along_dp_fsdp(x, mesh)


def all_reduce_max_along_all_axes_except_PP(x, mesh):
    for axis in mesh.axis_names:
        if axis != global_mesh_resource().pp_resource:
            x = lax_paral_op(x, jax.lax.pmax, axis, mesh)
    return x
