# SPDX-License-Identifier: Apache-2.0
"""What is checked before anything is exchanged: this rank's tensors, and that all ranks ask for the
same. What one rank refuses, all refuse, with one text."""

from __future__ import annotations

import json

import torch

from ... import _lib
from ..._call import _args, _keywords
from .. import _describe, _tensors
from ..comm import Topology
from . import _calls
from ._calls import Said
from ._local import TENSORS
from ._spec import KEYWORDS, Spec

OPERATION = "context_parallel.attention"
_MAX_KEPT = 4096
_ROWS = {name: _keywords.SHARED[name] for name in TENSORS}
_OF_SEQUENCES = tuple(name for name, row in _ROWS.items() if row.of_sequences)
_agreed: dict[tuple, tuple] = {}  # calls that every rank has agreed to -> (what it said, its Calls), oldest first


def agree(key: tuple, topology: Topology, device: torch.device, check, fields):
    """Runs check() and compares fields() with all ranks, once for each key; on the CPU, where ranks
    can be asked without waiting for a device, at every call. Raises the same error everywhere."""
    key = (*key, topology.inner.name, topology.outer.name, topology.rank)
    said, calls = _agreed.get(key, (None, None))
    if said is not None and not _compares_always(device):
        if calls is not None:
            if calls.differing is not None:
                _raise(calls.differing)
            calls.passed(said)
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"tessera.{OPERATION}: a CUDA graph is being captured, and this call was never "
                         "made: call context_parallel.prepare, or make the call once, before")
    refusal = None
    if said is None:
        try:
            check()
        except (ValueError, TypeError, _lib.Refused) as error:
            refusal = [type(error).__name__, str(error)]
        said = Said.of(_text(refusal, fields))
    calls = None if _compares_always(device) else _calls.of(topology, device)
    texts = _gathered(said, topology, device) if calls is None else calls.differing or calls.ask(said)
    if refusal and not texts:
        texts = [said.text]
    if texts:
        _raise(texts)
    while len(_agreed) >= _MAX_KEPT:
        _agreed.pop(next(iter(_agreed)))
    _agreed[key] = said, calls


def _compares_always(device: torch.device) -> bool:
    return device.type == "cpu"


def _gathered(said: Said, topology: Topology, device) -> list[bytes] | None:
    """The texts of all ranks if they differ."""
    everyone = topology.gather(said.digest, device, fixed=True)
    return None if all(x == said.digest for x in everyone) else topology.gather(said.text, device)


def tell(topology: Topology):
    """Raises what was found, if it was, in calls that some ranks had passed."""
    calls = _calls.known(topology)
    if calls is not None and calls.differing is not None:
        _raise(calls.differing)


def _text(refusal, fields) -> bytes:
    said = {"refuses": refusal} if refusal else {"refuses": None, **fields()}
    return json.dumps(said, sort_keys=True, default=str).encode()


def _raise(texts: list[bytes]):
    """The error that what the ranks said makes."""
    said = [json.loads(x) for x in texts]
    for rank, one in enumerate(said):
        if one["refuses"]:
            kind, text = one["refuses"]
            error = {"Refused": _lib.Refused, "TypeError": TypeError}.get(kind, ValueError)
            raise error(f"{text} (on rank {rank})")
    for name in sorted(set().union(*said)):
        first = said[0].get(name)
        for rank, one in enumerate(said):
            if one.get(name) != first:
                own = _short(one.get(name))
                raise ValueError(f"tessera.{OPERATION}: {name}={own}: rank {rank} passes {name}={own}, "
                                 f"rank 0 {_short(first)}; all ranks must pass the same")
    raise ValueError(f"tessera.{OPERATION}: ranks are at different calls")


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def fields(given: dict, spec: Spec) -> dict:
    """What must be equal on all ranks: everything but numbers of tokens."""
    found = {"shards": str(spec.shards_q.text), "shards_k": str(spec.shards_k.text),
             "exchange": spec.exchange, "groups_of_heads": spec.groups,
             "save_gathered": spec.saves, "causal": spec.band.right == 0,
             "window": [spec.band.left, spec.band.right], "align": list(spec.band.shifts)}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            whole = name in _ROWS and not _ROWS[name].has_rows
            shape = list(value.shape) if whole else list(value.shape[1:]) if name in "qkv" else \
                value.dim()
            found[name] = [str(value.dtype), shape]
        elif isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
            found[name] = [str(x.dtype) for x in value]
        elif name not in ("backend", *KEYWORDS):
            found[name] = value
    return found


def check(given: dict, spec: Spec, topology: Topology):
    """This rank's part of a call: rows of its tensors, and all that semantics.md says of the rest."""
    a = _args.Arguments(_tensors, OPERATION)
    rank, shards = topology.rank, (spec.shards_q, spec.shards_k)
    for one, name in zip(shards, ("shards", "shards_k")):
        if one.size != topology.size:
            raise a.error(f"{name}.size", one.size, f"must be the size of the group, {topology.size}")
    if len(spec.shards_q.lengths) != len(spec.shards_k.lengths):
        raise a.error("shards_k", repr(spec.shards_k), "must be of as many sequences as shards, "
                      f"{len(spec.shards_q.lengths)}")
    for name, one in (("q", shards[0]), ("k", shards[1]), ("v", shards[1])):
        x = given[name]
        if x.dim() != 3:
            raise a.error(f"{name}.shape", list(x.shape), "must have the axes [t, h, d]")
        if x.shape[0] != one.extents[rank]:
            raise a.error(f"{name}.shape[0]", x.shape[0],
                          f"rank {rank} holds {one.extents[rank]} tokens of {one!r}")
    for name in _keywords.DENSE:
        if given.get(name) is not None:
            _check_dense(a, name, given[name], spec, rank)
    _check_rest(given, spec, rank)


def _check_dense(a, name, x, spec: Spec, rank: int):
    """[b|1, hq|1, rows of a sequence|1, sk|1]: rows by q's shard, all columns."""
    shape = (1,) * (4 - x.dim()) + tuple(x.shape)
    b, rows = len(spec.shards_q.lengths), _rows_of_sequence(spec, rank)
    longest = max(spec.shards_k.lengths, default=0)
    if x.dim() > 4 or shape[0] not in (1, b) or shape[2] != 1 and shape[2] < rows or \
            shape[3] != 1 and shape[3] < longest:
        raise a.error(f"{name}.shape", list(x.shape), f"must broadcast to [b={b}, hq, rows of a "
                      f"sequence on this rank >= {rows}, keys of the whole sequence >= {longest}]")
    if shape[2] > 1 and not spec.shards_q.in_order:
        raise a.error(f"{name}.shape", list(x.shape), f"has rows, so that {spec.shards_q!r} must "
                      "store sequence after sequence")
    if shape[2] > 1 and spec.by_heads:
        raise a.error("exchange", spec.exchange, f"{name} has rows, which are not exchanged, being "
                      'O(s²); use exchange="keys" or "ring"')


def _rows_of_sequence(spec: Spec, rank: int) -> int:
    if not spec.shards_q.in_order:
        return 1
    return int(spec.shards_q.extents_of_sequences(rank).max(initial=0))


def _check_rest(given: dict, spec: Spec, rank: int):
    """A local call that has what a whole one would: heads, dtypes, options."""
    q, k = given["q"], given["k"]
    cu = [torch.tensor([0, x.shape[0]], dtype=torch.int32, device=x.device) for x in (q, k)]
    rest = {name: x for name, x in given.items() if name not in (*_keywords.DENSE, *_keywords.LENGTHS, *KEYWORDS)}
    b = len(spec.shards_q.lengths)
    for name in _OF_SEQUENCES:
        x = given.get(name)
        if x is not None and x.dim() == 2:
            if x.shape[0] not in (1, b):
                raise _args.Arguments(_tensors, OPERATION).error(
                    f"{name}.shape", list(x.shape), f"must be of {b} sequences")
            x = x[:1]
        rest[name] = x
    if given.get("rng_state") is not None:
        rest["rng_state"] = given["rng_state"][:2]
    if q.dtype.itemsize == 1:
        raise _lib.Refused(f"tessera.{OPERATION}: q.dtype={_tensors.dtype_name(q)}: does not travel; use bfloat16")
    call = _describe.Description.of_keywords(OPERATION, {**rest, "layout": "thd", "cu_seqlens_q": cu[0],
                                                         "cu_seqlens_k": cu[1], "align": "top_left"})
    if q.device.type == "cpu" and q.shape[0] and k.shape[0]:
        call.validate(call.tensors)
    call.prepare(_tensors.device(q), torch.get_num_threads())
