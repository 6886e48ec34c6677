# SPDX-License-Identifier: Apache-2.0
"""The operators tessera::cp_attention and cp_attention_backward: those of tessera::attention, on one
rank's packed rows, told by a text what lies where and by names who takes part.

    cp_attention(inputs, sizes, call, spec, inner, outer)
        -> (o, lse, max_logit, rng, k, v and segment ids that were fetched)
    cp_attention_backward(inputs, kept, sizes, call, spec, inner, outer) -> gradients

What is not wanted, or not kept, is empty.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

from ..._call import ROWS, Call, _keywords
from ...context_parallel import schedule
from .. import _describe, _ops
from ..comm import Topology, to_all
from . import _check, _heads, _local
from ._driver import Driver
from ._spec import Spec, topology_of

_log = logging.getLogger("tessera.cp")
_LOGS = not {"cp", "all"}.isdisjoint(os.environ.get("TESSERA_LOG", "").split(","))

for _schema in ("cp_attention(Tensor[] inputs, SymInt[] sizes, str call, str spec, str inner, str outer) -> "
                f"({', '.join(['Tensor'] * 7)})",
                "cp_attention_backward(Tensor[] inputs, Tensor[] kept, SymInt[] sizes, str call, str spec, "
                "str inner, str outer) -> Tensor[]"):
    _ops._library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))


class _Run:
    """One pass of one call on this rank."""

    def __init__(self, inputs, sizes, text: str, spec: str, inner: str, outer: str):
        self.text, self.spec = spec, Spec.parse(spec)
        self.topology = topology_of(inner, outer, self.spec.exchange)
        self.call = Call.of(text)
        self.given = _describe.keywords(self.call, inputs, sizes)
        self.device = self.given["q"].device

    def agree(self, key: tuple):
        inputs = [(x.shape, x.dtype, x.device.type) if isinstance(x, torch.Tensor) else x for x in key]
        _check.agree((self.text, *inputs), self.topology, self.device,
                     lambda: _check.check(self.given, self.spec, self.topology),
                     lambda: _check.fields(self.given, self.spec))

    def kept(self) -> tuple:
        """New k, v and segment ids for the rows that this rank's queries see."""
        ids = self.given.get("segment_ids")
        return tuple(x.new_empty(shape) for x, shape in zip(
            (self.given["k"], self.given["v"], *([] if ids is None else [ids[1]])),
            _kept_shapes(self.spec, self.topology.rank, self.given["k"], self.given["v"])))

    def log(self, which: str):
        if _LOGS:
            _log.info("%s: rank %d of %d: %s, %d group(s) of kv heads, q%s k%s, %r", which,
                      self.topology.rank, self.topology.size, self.spec.exchange, self.spec.groups,
                      list(self.given["q"].shape), list(self.given["k"].shape), self.spec.shards_q)

    def problem(self, rng) -> _local.Problem:
        given = self.given
        ids = given.get("segment_ids")
        ids_q, ids_k = ids if isinstance(ids, tuple) else (ids, ids)
        dense = {name: given[name][(None,) * (4 - given[name].dim())]
                 for name in _keywords.DENSE if given.get(name) is not None}
        return _local.Problem(
            given["q"], given["k"], given["v"], dense, given.get("key_ranges"), ids_q, ids_k,
            given.get("alibi_slopes"), given.get("sink"), given.get("k_scale"), given.get("v_scale"),
            rng, {name: given.get(name) for name in _local.OPTIONS})

    def driver(self) -> tuple[list[_heads.Exchange] | None, Driver]:
        return _drivers(self.text, self.topology, self.given["q"].shape[1], self.given["k"].shape[1], self.device)

    def state(self):
        """The four words of dropout, the same on every rank, or None."""
        state = self.given.get("rng_state")
        if state is None or not self.given.get("dropout_p"):
            return None
        if state.numel() == 2:
            state = torch.cat([state, state.new_tensor([0, self.given["q"].shape[1]])])
        return self._first(state) if self.spec.draws else state

    def _first(self, x):
        """Rank 0's x on every rank."""
        for group in self.topology:
            if group.size > 1:
                x = to_all(group, x, [x.shape] * group.size)[0]
        return x

    def largest(self, x):
        """The largest of each element over all ranks."""
        for group in self.topology:
            if group.size > 1:
                x = torch.stack(to_all(group, x, [x.shape] * group.size)).amax(0)
        return x


@functools.lru_cache(maxsize=128)
def _drivers(text: str, topology: Topology, hq: int, hk: int, device: torch.device):
    """What exchanges heads, if anything does, and what exchanges keys."""
    spec = Spec.parse(text)
    if not spec.by_heads:
        return None, Driver(spec.exchange, spec.shards_q, spec.shards_k, spec.band, topology, spec.groups, device)
    inner = topology.inner.size
    heads = [_heads.Exchange(topology.inner, spec.shards_q, spec.shards_k, topology.outer.rank * inner, hq, hk, device,
                             part, spec.groups) for part in range(spec.groups)]
    nodes = [schedule.node_shards(shards, inner) for shards in (spec.shards_q, spec.shards_k)]
    return heads, Driver("ring" if spec.exchange == "heads+ring" else "keys", *nodes, spec.band,
                         Topology(topology.outer, topology.outer), 1, device)


def _told(one_pass):
    """The pass with the reason for what it raises, if ranks have parted ways before."""
    @functools.wraps(one_pass)
    def told(*arguments):
        try:
            return one_pass(*arguments)
        except RuntimeError:
            spec, *names = arguments[-3:]
            _check.tell(topology_of(*names, Spec.parse(spec).exchange))
            raise
    return told


@_told
def _forward(inputs, sizes, text, spec, inner, outer):
    run = _Run(inputs, sizes, text, spec, inner, outer)
    run.agree((*inputs, *sizes, text))
    run.log("forward")
    max_logit = "max_logit" in run.call.places_of_results
    with torch.no_grad():
        rng = run.state()
        problem = run.problem(rng)
        heads, driver = run.driver()
        kept = run.kept() if run.spec.saves else ()
        o, lse, peak = driver.forward(problem, max_logit, kept) if heads is None else \
            _heads.forward(heads, driver, problem, max_logit)
        peak = run.largest(peak) if max_logit else lse.new_empty(0)
    kept = *kept, *(lse.new_empty(0) for _ in range(3 - len(kept)))
    return o, lse, peak, lse.new_empty(0, dtype=torch.int64) if rng is None else rng.clone(), *kept


@_told
def _backward(inputs, kept, sizes, text, spec, inner, outer):
    run = _Run(inputs, sizes, text, spec, inner, outer)
    _check.tell(run.topology)
    run.log("backward")
    names = list(run.call.places_of_results)
    places = run.call.places
    do, o, lse, dlse = (inputs[places[name].operand] if name in places else None
                        for name in ROWS)
    with torch.no_grad():
        rng = run.given.get("rng_state") if run.given.get("dropout_p") else None
        problem = run.problem(rng)
        whole = [name for name in names if name not in ("dq", "dk", "dv")]
        sums = {name: torch.zeros(run.given[name[1:]].shape, dtype=torch.float32, device=run.device)
                for name in whole}
        dense = {name: x[(None,) * (4 - x.dim())] if name == "dbias" else x
                 for name, x in sums.items()}
        heads, driver = run.driver()
        rows = problem, do.contiguous(), o, lse, dlse, whole, dense
        found = driver.backward(*rows, kept) if heads is None else \
            _heads.backward(heads, driver, *rows)
    results = dict(zip(("dq", "dk", "dv"), found))
    results |= {name: x.to(run.given[name[1:]].dtype) for name, x in sums.items()}
    return [results[name].contiguous() for name in names]


for _name, _kernel in (("cp_attention", _forward), ("cp_attention_backward", _backward)):
    for _key in ("CPU", "CUDA"):
        _ops._library.impl(_name, _kernel, _key)

attention = torch.ops.tessera.cp_attention.default
attention_backward = torch.ops.tessera.cp_attention_backward.default


def _kept_shapes(spec: Spec, rank: int, k, v):
    rows = sum(run.length for run in schedule.needed(spec.shards_q, spec.shards_k, spec.band, rank))
    return (rows, *k.shape[1:]), (rows, *v.shape[1:]), (rows,)


@torch.library.register_fake("tessera::cp_attention", lib=_ops._library)
def _(inputs, sizes, text, spec, inner, outer):
    call, spec = Call.of(text), Spec.parse(spec)
    q, k, v = inputs[:3]
    ids = _ids(call, inputs)
    kept = [q.new_empty(0, dtype=torch.float32) for _ in range(3)]
    if spec.saves:
        shapes = _kept_shapes(spec, topology_of(inner, outer, spec.exchange).rank, k, v)
        kept = [none if x is None else x.new_empty(shape)
                for none, x, shape in zip(kept, (k, v, ids), shapes)]
    rows, hq = q.shape[:2]
    return (q.new_empty(rows, hq, v.shape[2]), q.new_empty((hq, rows), dtype=torch.float32),
            q.new_empty(hq if "max_logit" in call.places_of_results else 0, dtype=torch.float32),
            q.new_empty(4 if "dropout_p" in call.values else 0, dtype=torch.int64), *kept)


@torch.library.register_fake("tessera::cp_attention_backward", lib=_ops._library)
def _(inputs, kept, sizes, text, spec, inner, outer):
    return _describe.results_of(Call.of(text), inputs)


def _ids(call: Call, inputs):
    place = call.places.get("segment_ids_k")
    return None if place is None else inputs[place.operand]


class Attention(torch.autograd.Function):
    """cp_attention with its gradient; applied, like _ops.Attention, to what may have one and to a
    tuple of all arguments."""

    @staticmethod
    def of(inputs, sizes, text, *names):
        return Attention.apply(*(inputs[i] for i in Call.of(text).differentiable), (inputs, sizes, text, *names))

    @staticmethod
    def forward(ctx, *inputs):
        arguments = inputs[-1]
        with _ops.below_autograd():
            o, lse, max_logit, rng, *kept = output = attention(*arguments)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(max_logit, rng, *kept)
        ctx.save_for_backward(o, lse, rng, *kept, *arguments[0])
        ctx.values = arguments[1:]
        return output

    @staticmethod
    def backward(ctx, do, dlse, *_):
        o, lse, rng, *rest = ctx.saved_tensors
        kept, inputs = rest[:3], rest[3:]
        sizes, text, spec, inner, outer = ctx.values
        call = Call.of(text)
        if rng.numel():
            inputs[call.places["rng_state"].operand] = rng
        kept = kept[:2 + (_ids(call, inputs) is not None)] if Spec.parse(spec).saves else []
        needed = ctx.needs_input_grad[:-1]
        # Every rank takes part, whether or not its own loss depends on o.
        do = o.new_zeros(o.shape) if do is None else do
        wanted = tuple(i for i, is_needed in zip(call.differentiable, needed) if is_needed)
        rows = (do, o, lse) if dlse is None else (do, o, lse, dlse)
        results = iter(attention_backward([*rows, *inputs], kept, sizes, _ops.backward_text(
            text, wanted, dlse is not None), spec, inner, outer))
        return *(next(results) if is_needed else None for is_needed in needed), None


def _autograd(inputs, *arguments):
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return Attention.of(inputs, *arguments)
    with _ops.below_autograd():
        return attention(inputs, *arguments)


_ops._library.impl("cp_attention", _autograd, "Autograd")
