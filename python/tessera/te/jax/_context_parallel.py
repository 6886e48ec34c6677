# SPDX-License-Identifier: Apache-2.0
"""TE-JAX's context parallelism: which mesh axis splits sequences, and attention over it."""

from __future__ import annotations

import math

import jax
from jax.sharding import PartitionSpec

from ... import jax as tessera_jax
from ...jax import context_parallel
from ...jax.context_parallel import Shards
from ...jax.context_parallel._attention import counted
from . import _translate, sharding
from ._enums import AttnBiasType, CPStrategy
from ._words import error, later


def axis_of(context_parallel_axis: str = "") -> str | None:
    """The mesh axis over which sequences are split: the one that is named, or that of the mesh
    resource; None if one device holds them whole."""
    if not sharding.is_mesh_available():
        return None
    if context_parallel_axis:
        several = sharding.get_mesh_axis_size(context_parallel_axis) > 1
        return context_parallel_axis if several else None
    return sharding.get_active_resource_axis("cp_resource")


def refuse(strategy, axis: str, operation: str, instead: str):
    """What tessera.te cannot split over a mesh axis."""
    devices = sharding.get_mesh_axis_size(axis)
    raise later("context_parallel_axis", f"{axis!r} (context_parallel_strategy={strategy.name}, "
                f"{devices} devices)", "such context parallelism", instead, operation)


def attention(config: _translate.Config, axis: str, qkv, bias, softmax_offset, words):
    """(out,) or (out, max_logit) of whole arrays whose sequences are split over `axis`, and their
    batch and heads over the axes of the mesh resource, where they divide."""
    _check(config, axis, bias)
    q, k, v = (_array(x) for x in _translate.separate(qkv, config.qkv_layout))
    heads = q.shape[2]
    sink = _translate.sink_of(config, softmax_offset, heads)
    over_batch = _splitting(("dp_resource", "fsdp_resource"), axis, q.shape[0])
    over_heads = _splitting(("tp_resource", "tpsp_resource"), (axis, *over_batch), heads, k.shape[2])
    b = q.shape[0] // math.prod(map(sharding.get_mesh_axis_size, over_batch))
    keywords = {"softmax_scale": config.scaling_factor, **config.band(), "exchange": "keys",
                "deterministic": config.deterministic, "dropout_p": config.dropout_p or None,
                "return_max_logit": config.return_max_logit, "axis_name": axis,
                "shards": _shards(config, axis, b, q.shape[1]),
                "shards_k": _shards(config, axis, b, k.shape[1])}
    own = {} if sink is None or isinstance(sink, str) else {"sink": sink}
    if isinstance(sink, str):
        keywords["sink"] = sink

    def one(q, k, v, own, words):
        rng_state = None
        if config.dropout_p:  # the mask of one device
            first = _index(over_batch) * (b * heads) + _index(over_heads) * q.shape[2]
            rng_state = counted(words, first, heads)
        results = context_parallel.attention(q, k, v, rng_state=rng_state, **keywords, **own)
        if not config.return_max_logit:
            return results,
        peak = results[1].astype(q.dtype)
        return results[0], jax.lax.pmax(peak, over_batch) if over_batch else peak

    rows = PartitionSpec(over_batch or None, axis, over_heads or None)
    by_heads = PartitionSpec(over_heads or None)
    return jax.shard_map(
        one, mesh=sharding._mesh(), in_specs=(rows, rows, rows, by_heads, PartitionSpec()),
        out_specs=(rows, by_heads)[:1 + config.return_max_logit],
        axis_names={axis, *over_batch, *over_heads})(q, k, v, own, words)


def _check(config: _translate.Config, axis: str, bias):
    """Raises what is said of calls that do not fit."""
    host = "use tessera.jax.context_parallel, whose Shards hold lengths as host integers"
    what = (
        (config.cp_strategy == CPStrategy.RING,
         "use CPStrategy.ALL_GATHER or DEFAULT, whose result is the same"),
        (config.is_thd, host),
        (config.attn_mask_type.is_padding(), host),
        (config.stripe_size is not None, "leave stripe_size out"),
        (config.attn_bias_type != AttnBiasType.NO_BIAS or bias is not None, "leave the bias out"))
    for is_so, instead in what:
        if is_so:
            refuse(config.cp_strategy, axis, "fused_attn", f"with {_said(config)}, {instead}")


def _said(config: _translate.Config) -> str:
    stripe = "" if config.stripe_size is None else f", stripe_size={config.stripe_size}"
    return f"{config.qkv_layout.name}, {config.attn_mask_type.name}, {config.attn_bias_type.name}" + stripe


def _shards(config: _translate.Config, axis: str, b: int, s: int) -> Shards:
    """Chunks r and 2 size - 1 - r of 2 size, or r of size; of equal extent."""
    size = sharding.get_mesh_axis_size(axis)
    chunks = 2 * size if config.context_parallel_load_balanced else size
    if s % chunks:
        raise error("sequence length", s, f"must be a multiple of {chunks}, the chunks for {size} "
                    f"devices; tessera.jax.context_parallel takes any")
    if config.context_parallel_load_balanced:
        return Shards.te(range(0, b * s + 1, s) if s else [0] * (b + 1), size)
    return Shards.of([[(n, rank * (s // size), s // size) for n in range(b)] for rank in range(size)])


def _splitting(resources, taken, *extents) -> tuple[str, ...]:
    """The active axes of some resources, each once, as far as they divide the extents."""
    axes, shares = [], 1
    for axis in map(sharding.get_active_resource_axis, resources):
        size = sharding.get_mesh_axis_size(axis)
        if axis is None or axis in axes or axis in taken or any(n % (shares * size) for n in extents):
            continue
        axes.append(axis)
        shares *= size
    return tuple(axes)


def _index(axes: tuple[str, ...]):
    return jax.lax.axis_index(axes) if axes else 0


def _array(x) -> jax.Array:
    if isinstance(x, tessera_jax.Slice):
        return jax.lax.index_in_dim(x.array, x.index, x.axis, keepdims=False)
    return x
