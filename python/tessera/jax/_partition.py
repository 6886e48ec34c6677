# SPDX-License-Identifier: Apache-2.0
"""Calls on a mesh. Two factors are split without communication: the batch (with its lengths, tables,
masks and ids) and the heads (with their sinks, slopes and scales). All else is whole on every shard;
a gradient that sums over a split factor is summed over its shards.

    axes of type Auto      custom_partitioning: XLA asks `partition` for the program of one shard
    axes of type Explicit  a shard_map that the operands' types say
    inside a shard_map     the call is one shard's already
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import _lib
from .._call import _fold
from .._call._args import is_fp8
from .._call import GRADIENTS, Call
from .._call._description import shape_of
from ._results import results_of

_log = logging.getLogger("tessera.sharding")
_BATCH, _HEADS = 0, 1


class Split(NamedTuple):
    """The mesh axes that a factor is split over."""
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


class Places:
    """Where each factor is in each operand and each result of a call on operands of these shapes."""

    def __init__(self, call: Call, shapes):
        self.call, self.shapes = call, [tuple(shape) for shape in shapes]
        self.axes = _fold.Axes(call.layouts, call.is_paged)
        q, k = shape_of(call, "q", self.shapes), shape_of(call, "k", self.shapes)
        batch = None if call.is_packed else q[self.axes.batch("q", len(q))]
        self.heads, self.heads_kv = q[self.axes.heads("q", len(q))], k[self.axes.heads("k", len(k))]
        self.extents = batch, self.heads
        self.operands = [self._of(operand.tensors[0], shape, operand.axis if operand.axis >= 0 else None)
                         for operand, shape in zip(call.operands, self.shapes)]
        structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]  # shapes alone matter
        self.result_shapes = [x.shape for x in results_of(call, structs)]
        self.results = [self.operands[like] if isinstance(like, int) else self._of(like, shape, None)
                        for like, shape in zip(call.likes, self.result_shapes)]
        self.q = call.places["q"].operand

    def _of(self, name: str, shape, hidden) -> tuple[int | None, int | None]:
        """(axis of the batch, axis of the heads), None where there is none to split."""
        letters = self.axes.letters(name, len(shape) - (hidden is not None))
        found = []
        for factor, letter in enumerate("bh"):
            axis = letters.index(letter) if letter in letters else None
            axis = axis if axis is None or hidden is None or axis < hidden else axis + 1
            extents = (self.extents[factor],)
            if factor == _HEADS and self.heads_kv > 1:
                extents = self.heads, self.heads_kv
            found.append(axis if axis is not None and shape[axis] in extents else None)
        return found[_BATCH], found[_HEADS]

    def spec_of(self, place, rank: int, split: Split) -> P:
        """The partition of an array that has the factors at `place`."""
        names = [None] * rank
        for axis, over in zip(place, split):
            if axis is not None and over:
                names[axis] = over
        return P(*names)

    def wanted(self, partition_specs) -> Split:
        """How the operands are split: as the first of them that is, q before all."""
        order = [self.q, *range(len(self.operands))]
        split = []
        for factor in (_BATCH, _HEADS):
            over = (_names(partition_specs[i], self.operands[i][factor]) for i in order)
            split.append(next(filter(None, over), ()))
        return Split(*split)

    def possible(self, split: Split, sizes) -> Split:
        """`split`, less what the extents do not allow."""
        batch, heads = (math.prod(sizes[name] for name in over) for over in split)
        if batch > 1 and (self.extents[_BATCH] is None or self.extents[_BATCH] % batch):
            split = split._replace(batch=())
        if heads > 1 and (self.heads % heads or self.heads_kv > 1 and self.heads_kv % heads or
                          set(split.heads) & set(split.batch) or self._rounds_sums()):
            _log.info("%s: hq=%d, hk=%d: heads are whole on every shard, as the mesh axes %s have %d",
                      self.call.operation, self.heads, self.heads_kv, split.heads, heads)
            split = split._replace(heads=())
        return split

    def _rounds_sums(self) -> bool:
        """Whether gradients that are sums over all heads are rounded to fp8, or their largest value is asked
        for, which only the whole sum has."""
        amax = {result.tensors[0] for result in self.call.results}
        return any(place[_HEADS] is None and (is_fp8(result.dtype) or f"amax_{result.tensors[0]}" in amax)
                   for result, place in zip(self.call.results, self.results)
                   if result.tensors[0] in GRADIENTS)

    def elsewhere(self, partition_specs) -> list[str]:
        """Operands that are split along an axis that is no factor."""
        return [self.call.operands[i].tensors[0] for i, (spec, place) in
                enumerate(zip(partition_specs, self.operands))
                if any(_names(spec, axis) for axis in range(len(spec)) if axis not in place)]


def _names(spec: P, axis: int | None) -> tuple[str, ...]:
    if axis is None or axis >= len(spec) or spec[axis] is None:
        return ()
    return spec[axis] if isinstance(spec[axis], tuple) else (spec[axis],)


# ---- one shard ----

def shard(call: Call, places: Places, split: Split, run, operands) -> list[jax.Array]:
    """The results of one shard, in a program whose axes `split` names; `places` are those of the whole.
    Results that lack a split factor are reduced over its shards."""
    if call.flags & _lib.DROPOUT and any(split):
        operands = list(operands)
        place = call.places["rng_state"].operand
        operands[place] = _counted(places, split, operands[place])
    results = run(*operands)
    for i, place in enumerate(places.results):
        lacking = tuple(name for axis, over in zip(place, split) if axis is None for name in over)
        if lacking and str(call.likes[i]).startswith(("max_logit", "amax")):  # which have no gradient
            results[i] = jax.lax.pmax(jax.lax.stop_gradient(results[i]), lacking)
        elif lacking:
            results[i] = jax.lax.psum(results[i], lacking)
    return results


def _counted(places: Places, split: Split, words):
    """Seed and offset with (first, stride), the number of this shard's first sequence and head in the
    whole, and of heads: the mask is then that of one device."""
    one = jnp.uint32(1)
    words = words if words.shape[0] == 8 else jnp.concatenate(
        [words, jnp.stack([0 * one, 0 * one, places.heads * one, 0 * one])])
    stride = words[6]
    for extent, over, step in zip(places.extents, split, (stride, one)):
        if over:
            own = extent // jax.lax.axis_size(over)
            words = words.at[4].add(jax.lax.axis_index(over).astype(jnp.uint32) * own * step)
    return words


# ---- axes of type Auto ----

def partitioned(call: Call, mesh_type, run):
    """run(*operands), to be partitioned by XLA; `mesh_type` is the mesh of the operands' types."""
    function = custom_partitioning(lambda *operands: run(*operands))

    def plan(operands):
        places = Places(call, [x.shape for x in operands])
        mesh, given = _decoded(places, mesh_type, operands)
        split = places.possible(places.wanted(given), mesh.shape)
        gathered = places.elsewhere(given)
        if gathered:
            _log.info("%s: %s split along an axis that is neither batch nor heads: gathered",
                      call.operation, ", ".join(gathered))
        return places, split, mesh

    def shardings(places, split, mesh, which):
        return [NamedSharding(mesh, places.spec_of(place, rank, split)) for place, rank in which]

    def partition(_, operands, results):
        places, split, mesh = plan(operands)
        mine = functools.partial(shard, call, places, split, run)
        return (mesh, lambda *operands: mine(operands),
                shardings(places, split, mesh, zip(places.results, (x.ndim for x in results))),
                tuple(shardings(places, split, mesh, zip(places.operands, (x.ndim for x in operands)))))

    def infer(_, operands, results):
        places, split, mesh = plan(operands)
        return shardings(places, split, mesh, zip(places.results, (x.ndim for x in results)))

    def rule(_, operands, results):
        return _rule(Places(call, [x.shape for x in operands]))

    function.def_partition(partition, infer, sharding_rule=rule)
    return function


def is_whole(mesh_type) -> bool:
    """True inside a shard_map that leaves no axis of more than one device to the partitioner: nothing is to be split.
    Of a mesh whose other axes have one device each, XLA tells custom_partitioning what JAX cannot read."""
    kinds = dict(zip(mesh_type.axis_names, mesh_type.axis_types))
    return AxisType.Manual in kinds.values() and all(
        mesh_type.shape[name] == 1 for name, kind in kinds.items() if kind == AxisType.Auto)


def _decoded(places: Places, mesh_type, operands) -> tuple[Mesh, list[P]]:
    """The mesh of a program, and how each operand is split over it. JAX knows no names where only some
    axes of a mesh are of type Auto: they are found by trying those of `mesh_type`."""
    sharding = next((x.sharding for x in operands if x.sharding is not None), None)
    if sharding is None:  # GSPMD asks before it knows any
        return Mesh(np.array(jax.devices()), ("devices",)), [P()] * len(operands)
    if isinstance(sharding, NamedSharding):
        return sharding.mesh, [P() if x.sharding is None else x.sharding.spec for x in operands]
    axes = {name: size for name, size, kind in zip(
        mesh_type.axis_names, mesh_type.axis_sizes, mesh_type.axis_types) if kind == AxisType.Auto} or \
        {"devices": sharding.num_devices}
    devices = sorted(sharding.device_set, key=lambda device: device.id)[:math.prod(axes.values())]
    mesh = Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))
    orders = [order for n in range(len(axes) + 1) for order in itertools.permutations(axes, n)]
    candidates = [Split(order[:n], order[n:]) for order in orders for n in range(len(order) + 1)]

    def same(sharding, theirs, shape):
        if mesh.size == theirs.num_devices:
            return sharding.is_equivalent_to(theirs, len(shape))
        return sharding.shard_shape(shape) == theirs.shard_shape(shape)  # inside other, manual axes

    def spec_of(x, place):
        if x.sharding is None:
            return P()
        specs = (places.spec_of(place, x.ndim, split) for split in candidates)
        return next((spec for spec in specs if divides(spec, x.shape) and
                     same(NamedSharding(mesh, spec), x.sharding, x.shape)), P())

    def divides(spec, shape):
        return all(n % math.prod(axes[name] for name in _names(spec, i)) == 0
                   for i, n in enumerate(shape))
    return mesh, list(map(spec_of, operands, places.operands))


def _rule(places: Places):
    """Shardy's: b is the batch, h the key-value heads, g their query heads; each other axis a factor of
    its own, which stays whole."""
    whole, grouped = [], places.heads_kv not in (1, places.heads)

    def text(place, shape):
        words = []
        for axis in range(len(shape)):
            if axis == place[_BATCH]:
                words.append("b")
            elif axis == place[_HEADS]:
                of_q = grouped and shape[axis] == places.heads
                if of_q and "g" not in whole:
                    whole.append("g")
                words.append("(h g)" if of_q else "h")
            else:
                whole.append(f"x{len(whole)}")
                words.append(whole[-1])
        return " ".join(words)
    left = ", ".join(map(text, places.operands, places.shapes))
    right = ", ".join(map(text, places.results, places.result_shapes))
    sizes = {"g": places.heads // places.heads_kv} if grouped else {}
    return f"{left} -> {right}", {"need_replication_factors": tuple(whole), **sizes}


# ---- axes of type Explicit ----

def explicit(call: Call, run, operands):
    """run(*operands), where the operands' types say how they are split over axes of type Explicit."""
    types = [jax.typeof(x) for x in operands]
    mesh = next((t.sharding.mesh for t in types if not t.sharding.mesh.empty), None)
    axes = () if mesh is None else tuple(
        name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)
    given = [t.sharding.spec for t in types]
    if not axes or not any(any(spec) for spec in given):
        return run(*operands)
    places = Places(call, [t.shape for t in types])
    split = places.wanted(given)
    _check(places, split, given, mesh)
    specs = [places.spec_of(place, t.ndim, split) for place, t in zip(places.operands, types)]
    operands = [x if own == new else jax.sharding.reshard(x, NamedSharding(mesh, new))
                for x, own, new in zip(operands, given, specs)]
    out_specs = [places.spec_of(place, x.ndim, split)
                 for place, x in zip(places.results, results_of(call, types))]
    return jax.shard_map(lambda *operands: shard(call, places, split, run, operands), mesh=mesh,
                         in_specs=tuple(specs), out_specs=out_specs, axis_names=set(axes))(*operands)


def _check(places: Places, split: Split, given, mesh):
    """Raises the ValueError of operands that only communication could bring together."""
    names = [operand.tensors[0] for operand in places.call.operands]

    def error(i, rule):
        return ValueError(f"tessera.{places.call.operation}: {names[i]}.sharding.spec={given[i]}: {rule}")
    for i, (spec, place) in enumerate(zip(given, places.operands)):
        for axis in range(len(spec)):
            over = _names(spec, axis)
            if over and axis not in place:
                raise error(i, "only the batch and the heads may be split; reshard it, or use "
                            "context parallelism for sequences")
            if over and over != split[place.index(axis)]:
                raise error(i, f"must be split as q is, over {split[place.index(axis)]}; reshard it")
    if places.possible(split, mesh.shape) != split:
        raise error(places.q, f"b={places.extents[_BATCH]}, hq={places.heads} and hk="
                    f"{places.heads_kv} must be multiples of their shards, or hk 1 where no gradient of k or v is in "
                    "fp8 or has an amax; reshard it")
