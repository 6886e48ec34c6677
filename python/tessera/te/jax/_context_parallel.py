# SPDX-License-Identifier: Apache-2.0
"""TE-JAX's context parallelism: which mesh axis splits sequences, and attention over it, in one of two ways.

    by keys    tessera.jax.context_parallel, its `keys` or, for CPStrategy.RING, its `ring`: BSHD of full lengths,
               without a bias; whatever divides heads
    by heads   each device has some heads of whole sequences, in their own order, which is a call of one device:
               everything else, and what has no gradient of its own. XLA's partitioner moves the tokens.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import PartitionSpec

from ... import jax as tessera_jax
from ...jax import context_parallel
from ...jax.context_parallel import Shards
from ...jax.context_parallel._attention import counted
from ...jax.context_parallel._ring import is_compiled as ring_is_compiled
from . import _translate, sharding
from ._enums import AttnBiasType, CPStrategy, ReorderStrategy
from ._reorder import inverse_reorder_causal_load_balancing, reorder_causal_load_balancing
from ._sequences import SequenceDescriptor
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


def goes_by_keys(config: _translate.Config, bias) -> bool:
    return not config.is_thd and not config.attn_mask_type.is_padding() and bias is None and \
        config.attn_bias_type == AttnBiasType.NO_BIAS and config.stripe_size is None


# ---- by heads ----

class Whole:
    """A call on arrays whose sequences are split over `axis`, as one of one device: qkv, bias and sequences, whose
    tokens have their own order and whose heads are split; `split` of its results undoes both."""

    def __init__(self, config: _translate.Config, axis: str, qkv, bias, sequences):
        self.axis, self.size = axis, sharding.get_mesh_axis_size(axis)
        self.order = self._order(config)
        q, k, _ = _translate.separate(qkv, config.qkv_layout)
        heads, groups = q.shape[-2], k.shape[-2]
        over_heads = _splitting(("tp_resource", "tpsp_resource"), (axis,), heads, groups)
        devices = math.prod(map(sharding.get_mesh_axis_size, over_heads)) * self.size
        if heads % devices or groups % devices:
            self._refuse(config, f"heads={heads} and num_gqa_groups={groups} must be multiples of {devices} devices; "
                         "tessera.jax.context_parallel takes any, of lengths that the host knows")
        self.over_heads = over_heads
        self.over_batch = _splitting(("dp_resource", "fsdp_resource"), (axis, *over_heads), q.shape[0])
        if self.order and (bias is not None or not isinstance(sequences, SequenceDescriptor | None)):
            self._refuse(config, "a bias or a mask has rows and columns of sequences in their own order; leave "
                         "context_parallel_causal_load_balanced out, or give a SequenceDescriptor")
        self.qkv = tuple(self.joined(x) for x in qkv)
        self.bias, self.sequences = bias, self._descriptor(sequences, config.is_thd)

    def split(self, x):
        """x [b, s, h, d] in the devices' order, split as the call's arrays are."""
        if self.order:
            x = reorder_causal_load_balancing(x, *self.order[:1], self.size, 1, *self.order[1:])
        heads = (None,) * (x.ndim - 4) + (self.over_heads or None, None)
        return sharding.with_sharding_constraint(x, PartitionSpec(self.over_batch or None, self.axis, *heads))

    def joined(self, x):
        """split, undone."""
        heads = (None,) * (x.ndim - 4) + ((*self.over_heads, self.axis), None)
        x = sharding.with_sharding_constraint(x, PartitionSpec(self.over_batch or None, None, *heads))
        return self._ordered(x)

    def _ordered(self, x):
        if not self.order or not x.size:
            return x
        return inverse_reorder_causal_load_balancing(x, *self.order[:1], self.size, 1, *self.order[1:])

    def _descriptor(self, sequences, is_thd: bool):
        """Ids and positions lie as tokens do; lengths and offsets are of whole rows."""
        if not is_thd or not isinstance(sequences, SequenceDescriptor):
            return sequences
        return SequenceDescriptor(sequences.seqlens, sequences.seq_offsets, *(
            tuple(map(self._ordered, pair)) for pair in (sequences.segment_ids, sequences.segment_pos)))

    @staticmethod
    def _order(config: _translate.Config) -> tuple:
        if config.stripe_size is not None and not config.is_thd:
            raise error("stripe_size", config.stripe_size, f"must be None for {config.qkv_layout.name}, whose order is "
                        "ReorderStrategy.DualChunkSwap")
        if not config.context_parallel_load_balanced:
            return ()
        if config.is_thd:
            return ReorderStrategy.Striped, config.stripe_size
        return ReorderStrategy.DualChunkSwap,

    def _refuse(self, config: _translate.Config, rule: str):
        raise later("context_parallel_axis", f"{self.axis!r} (context_parallel_strategy={config.cp_strategy.name}, "
                    f"{self.size} devices)", f"such context parallelism with {_said(config)}", rule)


# ---- by keys ----

def attention(config: _translate.Config, axis: str, qkv, softmax_offset, words):
    """(out,) or (out, max_logit) of whole arrays whose sequences are split over `axis`, and their
    batch and heads over the axes of the mesh resource, where they divide."""
    q, k, v = (_array(x) for x in _translate.separate(qkv, config.qkv_layout))
    heads = q.shape[2]
    sink = _translate.sink_of(config, softmax_offset, heads)
    over_batch = _splitting(("dp_resource", "fsdp_resource"), axis, q.shape[0])
    over_heads = _splitting(("tp_resource", "tpsp_resource"), (axis, *over_batch), heads, k.shape[2])
    b = q.shape[0] // math.prod(map(sharding.get_mesh_axis_size, over_batch))
    exchange = "ring" if config.cp_strategy == CPStrategy.RING and ring_is_compiled() else "keys"
    keywords = {"softmax_scale": config.scaling_factor, **config.band(), "exchange": exchange,
                "deterministic": config.deterministic, "dropout_p": config.dropout_p or None,
                "return_max_logit": config.return_max_logit, "axis_name": axis,
                "shards": _shards(config, axis, b, q.shape[1]),
                "shards_k": _shards(config, axis, b, k.shape[1])}
    own = {} if isinstance(sink.get("sink"), str) else sink
    if not own:
        keywords |= sink

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


def _said(config: _translate.Config) -> str:
    return f"{config.qkv_layout.name}, {config.attn_mask_type.name}, {config.attn_bias_type.name}"


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
