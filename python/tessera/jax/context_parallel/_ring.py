# SPDX-License-Identifier: Apache-2.0
"""The ring: k and v go round the axis, one step ahead of attention.

    step    0              1                 2
    k, v    own            of rank - 1       of rank - 2       each from the device before
    calls   own keys       its keys          its keys          (o, lse) merged in, in this order

Every device computes its own queries on the keys that are there: a call for each pair of a run of
queries and a run of keys of which any rank sees something. Steps without such a pair are jumped over, so
that a window's keys come from neighbours only. In the backward pass fp32 dk and dv follow k and v one
call behind, and go home from the last step; dq adds up where it belongs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from .. import _arrays, _call, _functions
from ._rows import OPERATION, Rows, Slot, error, mine, slots_of

def is_compiled() -> bool:
    """Whether XLA compiles a ring: its compiler for CPUs dies of one in JAX 0.11.2 (0.10.2 does not), with or without
    the barriers below."""
    return jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11)


_ARRAYS = ("sink", "alibi_slopes", "rng_state")  # whose values a program takes


class _Part(NamedTuple):
    """A call: every rank's runs of queries in one slot, on the runs of keys in one slot of the rank whose
    keys are there. int32 tables have a row for each rank that computes."""
    q: slice              # of rows in the order of slots
    k: slice
    slot: Slot
    longest_k: int
    cu_seen: np.ndarray   # [ranks, b + 1]: lengths of the runs of keys, 0 where the queries see none
    cu_k: np.ndarray      # [ranks, b + 1]: where they lie
    start_k: np.ndarray   # [ranks, b]: their first positions


class _Step(NamedTuple):
    distance: int         # the keys are those of rank - distance
    parts: tuple[_Part, ...]


class Ring:
    """What is known of a call when a program is traced; called with q, k and v in the order of slots."""

    def __init__(self, axis, rows: Rows, rows_k: Rows, window: tuple[int, int], shifts: tuple[int, ...],
                 keywords: dict, want_max_logit: bool):
        self.axis, self.size, self.want_max_logit = axis, rows.shards.size, want_max_logit
        self.shifts, self.has_sink = shifts, "sink" in keywords
        self.keywords = {name: x for name, x in keywords.items() if name not in _ARRAYS}
        # Where nothing counts positions, kernels that know none may run.
        self.has_starts = window != (-1, -1) or "alibi_slopes" in keywords or bool(keywords.get("dropout_p"))
        self.steps = _steps(rows, rows_k, window, shifts)

    def __call__(self, q, k, v, keywords: dict) -> list[jax.Array]:
        """[o [n, hq, dv], lse [hq, n], max_logit [hq]?]"""
        arrays = {name: keywords[name] for name in _ARRAYS if name in keywords}
        if isinstance(arrays.get("sink"), str):
            _check_word(arrays.pop("sink"))
        if "sink" in arrays:
            arrays["sink"] = _checked_sink(jnp.asarray(arrays["sink"]), q)
        if "rng_state" in arrays:
            arrays["rng_state"] = _arrays.rng_words(OPERATION, arrays["rng_state"]).array
        operands, tree = jax.tree.flatten((q, k, v, arrays))
        _, *operands = _call.aligned([jax.lax.axis_index(self.axis), *operands])
        return _ring(self, *jax.tree.unflatten(tree, operands))

    def ahead(self, at: int, arrays):
        """The arrays as they are at the step after steps[at], or at home after the last one."""
        after = self.steps[at + 1].distance if at + 1 < len(self.steps) else self.size
        jump = after - self.steps[at].distance
        if jump % self.size == 0:
            return arrays
        around = [(rank, (rank + jump) % self.size) for rank in range(self.size)]
        return [jax.lax.ppermute(x, self.axis, around) for x in arrays]

    def keywords_of(self, part: _Part, arrays: dict) -> dict:
        """The keywords of a part in both passes. The sink is none of them: it is a part of its own."""
        own = functools.partial(mine, self.axis)
        keywords = {name: x for name, x in arrays.items() if name != "sink"}
        if "rng_state" in keywords:
            keywords["rng_state"] = _arrays.Words(keywords["rng_state"])
        if self.has_starts:
            shifts = jnp.asarray(self.shifts, jnp.int32) if len(set(self.shifts)) > 1 else self.shifts[0]
            keywords |= {"q_start": own(part.slot.start), "k_start": own(part.start_k), "align": shifts}
        return keywords | self.keywords | {
            "layout": "thd", "cu_seqlens_q": own(part.slot.cu), "cu_seqlens_k": own(part.cu_seen),
            "cu_seqlens_k_padded": own(part.cu_k), "max_seqlen_q": part.slot.longest,
            "max_seqlen_k": part.longest_k}


def _check_word(sink: str):
    if sink != "off_by_one":
        raise error("sink", repr(sink), 'must be "off_by_one" or an array [hq]')


def _checked_sink(sink, q):
    """The sink, after the ValueErrors that attention would raise, which is given none here."""
    if sink.shape != (q.shape[1],) or sink.dtype not in (jnp.float32, q.dtype):
        raise error("sink", f"{sink.dtype.name}{list(sink.shape)}",
                    f"must be [hq] = [{q.shape[1]}], of float32 or q's dtype, {q.dtype.name}")
    return sink


def _steps(rows: Rows, rows_k: Rows, window, shifts) -> tuple[_Step, ...]:
    """Those in which some rank sees something, and the first in any case: its call says what is wrong
    with a problem of no tokens, too."""
    steps = []
    ranks = np.arange(rows.shards.size)
    for distance in ranks:
        owner = (ranks - distance) % len(ranks)
        parts = []
        for q, slot in _slices(slots_of(rows)):
            for k, slot_k in _slices(slots_of(rows_k)):
                lengths, start = slot_k.lengths[owner], slot_k.start[owner]
                sees = _sees(slot.start, slot.lengths, start, lengths, window, np.array(shifts))
                if sees.any() or not (distance or q.start or k.start):
                    cu_seen = np.zeros_like(slot_k.cu)
                    np.cumsum(lengths * sees, axis=1, out=cu_seen[:, 1:])
                    parts.append(_Part(q, k, slot, slot_k.longest, cu_seen, slot_k.cu[owner], start))
        if parts:
            steps.append(_Step(int(distance), tuple(parts)))
    return tuple(steps)


def _slices(slots):
    begin = 0
    for slot in slots:
        yield slice(begin, begin + slot.extent), slot
        begin += slot.extent


def _sees(q, length_q, k, length_k, window, shift) -> np.ndarray:
    """Whether any of the queries from q sees any of the keys from k."""
    left, right = window
    sees = (length_q > 0) & (length_k > 0)
    if left >= 0:
        sees &= q + shift - left < k + length_k
    if right >= 0:
        sees &= q + length_q + shift + right > k
    return sees


# ---- both passes ----

@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, q, k, v, arrays: dict) -> list[jax.Array]:
    hq, exact = q.shape[1], _exact(q)
    sink = arrays.get("sink", 0 if ring.has_sink else -jnp.inf)  # a part like the others: o = 0, lse = sink
    lse = jnp.broadcast_to(jnp.asarray(sink, exact).reshape(-1, 1), (hq, len(q)))
    o, lse, peak = _call.aligned([jnp.zeros((*q.shape[:2], v.shape[2]), exact), lse,
                                  jnp.full(hq, -jnp.inf, exact), q])[:3]
    for at, step in enumerate(ring.steps):
        # Keys leave for the next device when attention on those before them is done, and not earlier:
        # a device never holds more than two ranks' keys.
        k, v, o, lse = jax.lax.optimization_barrier((k, v, o, lse))
        ahead = ring.ahead(at, [k, v]) if at + 1 < len(ring.steps) else (k, v)
        for part in step.parts:
            own = _functions.attention(q[part.q], k[part.k], v[part.k], return_lse=True,
                                       return_max_logit=ring.want_max_logit, **ring.keywords_of(part, arrays))
            both = _merged((o[part.q], lse[:, part.q]), own[:2])
            o, lse = o.at[part.q].set(both[0]), lse.at[:, part.q].set(both[1])
            peak = jnp.maximum(peak, own[2]) if ring.want_max_logit else peak
        k, v = ahead
    return [o.astype(q.dtype), lse, *[peak] * ring.want_max_logit]


def _forward(ring: Ring, *operands):
    q, k, v, arrays = jax.tree.map(lambda x: x.value, operands)
    results = _ring(ring, q, k, v, arrays)
    results[:2] = (checkpoint_name(x, "tessera_attention") for x in results[:2])
    # JAX keeps the structure of residuals between traces, so what is wanted is in a residual's shape.
    wants_slopes = "alibi_slopes" in arrays and operands[3]["alibi_slopes"].perturbed
    return results, (q, k, v, arrays, *results[:2], jnp.zeros((wants_slopes, 0), bool))


def _backward(ring: Ring, residuals, cotangents):
    q, k, v, arrays, o, lse, bits = residuals
    do, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents[:2])
    do = jnp.zeros_like(o) if do is None else do
    slopes = [arrays["alibi_slopes"]] if bits.shape[0] else []
    grads = ("dq", "dk", "dv") + ("dalibi_slopes",) * len(slopes)
    dq, dk, dv, *dslopes = _zeros([q, k, v, *slopes], q)
    for at, step in enumerate(ring.steps):
        k, v, dq, dk, dv = jax.lax.optimization_barrier((k, v, dq, dk, dv))
        ahead = ring.ahead(at, [k, v]) if at + 1 < len(ring.steps) else (k, v)
        # What the device before added to these keys' gradients travels while this one computes its own.
        arriving = ring.ahead(at - 1, [dk, dv]) if at else None
        dk, dv = _zeros([k, v], q)
        for part in step.parts:
            own = _functions.attention_backward(
                do[part.q], q[part.q], k[part.k], v[part.k], o[part.q], lse[:, part.q],
                None if dlse is None else dlse[:, part.q], grads, partial=True,
                **ring.keywords_of(part, arrays))
            dq, dk, dv = (total.at[rows].add(x.astype(total.dtype)) for total, rows, x in (
                (dq, part.q, own.dq), (dk, part.k, own.dk), (dv, part.k, own.dv)))
            dslopes = [x + own.dalibi_slopes.astype(x.dtype) for x in dslopes]
        if arriving:
            dk, dv = (x + y for x, y in zip(arriving, (dk, dv)))
        k, v = ahead
    dk, dv = ring.ahead(len(ring.steps) - 1, [dk, dv])
    rest = dict.fromkeys(arrays)
    if dslopes:
        rest["alibi_slopes"] = dslopes[0].astype(arrays["alibi_slopes"].dtype)
    if "sink" in arrays:
        rest["sink"] = _dsink(arrays["sink"], do, o, lse, dlse)
    return *(x.astype(y.dtype) for x, y in ((dq, q), (dk, k), (dv, v))), rest


_ring.defvjp(_forward, _backward, symbolic_zeros=True)


def _merged(total, part):
    """(o, lse) of two sets of keys together, exact as the first."""
    (o, lse), (o_part, lse_part) = total, part
    both = jnp.logaddexp(lse, lse_part)
    base = jnp.where(both > -jnp.inf, both, 0)

    def weighted(o, lse):
        return jnp.where(lse.T[..., None] > -jnp.inf, o, 0) * jnp.exp(lse - base).T[..., None]
    return weighted(o, lse) + weighted(o_part, lse_part), both


def _dsink(sink, do, o, lse, dlse):
    """The sum over rows of P (dlse - delta), with P = exp(sink - lse)."""
    change = -jnp.einsum("thd,thd->ht", *(x.astype(lse.dtype) for x in (do, o)))
    if dlse is not None:
        change += dlse
    seen = lse > -jnp.inf
    weight = jnp.exp(jnp.where(seen, sink.astype(lse.dtype)[:, None] - lse, -jnp.inf))
    return jnp.where(weight > 0, weight * change, 0).sum(1).astype(sink.dtype)


def _zeros(arrays, like) -> list[jax.Array]:
    """Sums that nothing was added to, varying over the mesh as `like` does."""
    return _call.aligned([*(jnp.zeros(x.shape, _exact(x)) for x in arrays), like])[:-1]


def _exact(x):
    return jnp.promote_types(x.dtype, jnp.float32)
