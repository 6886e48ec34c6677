# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache of both versions: it writes new keys into the cache, then queries attend to the cache.
A cache of rows is a pool whose pages are its rows, so cache_batch_idx is a page table."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..torch import append_kv, rotate
from ..torch._sdpa import IllegalArgument
from . import _translate as to


class New(NamedTuple):
    """Keys and values to write: [b, new, hk, d], or packed [t, hk, d] with cu_seqlens [b + 1]."""
    k: torch.Tensor | None
    v: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


class Rotary(NamedTuple):
    cos: torch.Tensor | None      # [positions, rotary_dim / 2], as sin
    sin: torch.Tensor | None
    interleaved: bool             # pairs (0, 1), (2, 3)...; otherwise (0, r/2), (1, r/2 + 1)...
    offsets: torch.Tensor | None  # [b], where the first new position is another than the length


class Cache(NamedTuple):
    seqlens: torch.Tensor | int | None
    batch_idx: torch.Tensor | None
    leftpad: torch.Tensor | None
    page_table: torch.Tensor | None
    spelling: str = "page_table"  # the caller's word for it
    selects_rows: bool = False    # batch_idx beside it says which of its rows are meant, as in version 3


class Queries(NamedTuple):
    """Packed queries [t, hq, d] have cu_seqlens [b + 1]."""
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None


@torch.no_grad()
def attend(name: str, q, k_cache, v_cache, *, new: New, rotary: Rotary, cache: Cache, causal, window_size,
           return_lse: bool, queries: Queries = Queries(), attention_chunk: int = 0, qv=None, **score):
    """out, or (out, lse). qv, which is not turned, is the part of q that attends to v."""
    packed = queries.cu_seqlens is not None
    batch = len(queries.cu_seqlens) - 1 if packed else q.shape[0]
    table, before = _pages(name, k_cache, cache, new, rotary, batch)
    start = before if cache.leftpad is None else before - cache.leftpad
    if rotary.offsets is not None:
        start = rotary.offsets
    after = before
    if new.k is not None:
        count = new.k.shape[1] if new.cu_seqlens is None else new.cu_seqlens.diff().to(torch.int32)
        _check_room(name, before, count, table.shape[1] * k_cache.shape[1])
        _append(new, _rotated(new.k, rotary, start, new.cu_seqlens, batch), k_cache, v_cache, before, table, score)
        after = before + count
    band = to.band(causal, window_size)
    q = _rotated(q, rotary, start, queries.cu_seqlens, batch, moves=causal or "window" in band)
    keywords = {"layout": "thd", "cu_seqlens_q": queries.cu_seqlens,
                "max_seqlen_q": queries.max_seqlen} if packed else {}
    if attention_chunk:
        keywords |= _chunks(q, queries, after, cache.leftpad, attention_chunk, batch)
    elif cache.leftpad is not None:  # a mask of keys alone, behind which a cache may hold anything
        places = torch.arange(table.shape[1] * k_cache.shape[1], device=q.device)
        keywords["keep"] = (places >= cache.leftpad[:, None])[:, None, None]
    if qv is not None:
        q, k_cache, v_cache = to.with_qv(q, k_cache, v_cache, qv)
    return to.attention(q, k_cache, v_cache, page_table=table, seqlens_k=after,
                        return_lse=return_lse, **band, **keywords, **score)


def _pages(name: str, k_cache, cache: Cache, new: New, rotary: Rotary, batch: int):
    """(page table [b, pages] int32, lengths [b] int32) of the cache as it is."""
    device = k_cache.device
    if (new.k is None) != (new.v is None):
        raise ValueError(f"tessera.{name}: k and v: give both or none")
    table = cache.page_table
    if table is not None and cache.batch_idx is not None:
        if not cache.selects_rows:
            raise ValueError(f"tessera.{name}: cache_batch_idx: a page table says where sequences are; "
                             "give one of them")
        table = table[cache.batch_idx.long()]
    if table is None:
        rows = cache.batch_idx
        if rows is None:
            rows = torch.arange(batch, device=device)
            if batch > k_cache.shape[0]:
                raise ValueError(f"tessera.{name}: k_cache.shape={list(k_cache.shape)}: must have a "
                                 f"row for each of {batch} sequences, or cache_batch_idx")
        table = rows.to(torch.int32)[:, None]
    if rotary.cos is not None and new.k is None:
        raise IllegalArgument(f"tessera.{name}: rotary_cos: turns new keys, and the queries that go with them; give "
                              "k and v, or turn q by tessera.torch.rotate")
    lengths = cache.seqlens
    _check_lengths(name, cache, table.shape[1] * k_cache.shape[1])
    if lengths is None:
        if new.k is not None:
            raise ValueError(f"tessera.{name}: cache_seqlens: must be given with k and v, which are "
                             "written after what is there")
        lengths = table.shape[1] * k_cache.shape[1]
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=device)
    return table, lengths.to(torch.int32)


def _tokens(x, cu_seqlens, batch: int):
    """(sequence, place in it) of each token of x, int64 [tokens], and how many a sequence has."""
    if cu_seqlens is None:
        n = x.shape[1]
        each = torch.arange(batch * n, device=x.device)
        return each // max(n, 1), each % max(n, 1), n
    sequence, places = to.sequence_of(cu_seqlens, x.shape[0])
    return sequence, (places - cu_seqlens[sequence]).long(), cu_seqlens.diff().to(torch.int32)


def _check_lengths(name: str, cache: Cache, capacity: int):
    """Lengths are of keys that have a place. On a GPU a tensor's values are not waited for."""
    lengths = cache.seqlens
    if isinstance(lengths, torch.Tensor):
        if lengths.device.type != "cpu" or not lengths.numel() or _is_traced(lengths):
            return
        least, most = map(int, lengths.aminmax())
    elif lengths is not None and not isinstance(lengths, (int, torch.SymInt)):
        raise ValueError(f"tessera.{name}: cache_seqlens={lengths!r}: must be an int32 tensor [b], or an int for all")
    else:
        least = most = 0 if lengths is None else lengths
    if least < 0 or most > capacity:
        where = "k_cache" if cache.page_table is None else cache.spelling
        raise IllegalArgument(f"tessera.{name}: cache_seqlens={least if least < 0 else most}: must be between 0 and "
                              f"{capacity}, the positions that {where} has for a sequence")


def _check_room(name: str, before, count, capacity: int):
    """Nothing is written unless all of it has a place; on a GPU what has none is left out."""
    if before.device.type != "cpu" or not len(before) or _is_traced(before):
        return
    end = int((before + count).max())
    if end > capacity or int(before.min()) < 0:
        raise ValueError(f"tessera.{name}: cache_seqlens: k and v would reach position {end - 1} of a sequence "
                         f"that has room for {capacity}; lengths begin at 0")


def _is_traced(x) -> bool:
    """Whether x has no values yet. tessera's operators check them when they run."""
    return torch.compiler.is_compiling() or torch._subclasses.fake_tensor.is_fake(x)


def _append(new: New, k, k_cache, v_cache, before, table, score):
    """k, which is new.k turned, and new.v go behind what the cache has."""
    scales = {}
    if k_cache.dtype.itemsize == 1:  # what is fp8 already goes in as it is, the rest divided by the scale
        ones = torch.ones(k_cache.shape[2], device=k_cache.device)
        scales = {name: ones if x.dtype.itemsize == 1 or score.get(name) is None else score[name]
                  for name, x in (("k_scale", k), ("v_scale", new.v))}
    k, v = (x.to(torch.bfloat16) if x.dtype.itemsize == 1 else x for x in (k, new.v))
    where = {} if new.cu_seqlens is None else {"layout": "thd", "cu_seqlens": new.cu_seqlens}
    append_kv(k, v, k_cache, v_cache, before, page_table=table, **where, **scales)


def _rotated(x, rotary: Rotary, start, cu_seqlens, batch: int, moves=True):
    """x with the first rotary_dim of each head turned by its position: the first token of a sequence is at
    `start`, the others behind it, or all of them there."""
    if rotary.cos is None:
        return x
    sequence, place, _ = _tokens(x, cu_seqlens, batch)
    position = (start[sequence] + (place if moves else 0)).view(x.shape[:-2])
    layout = "bshd" if cu_seqlens is None else "thd"
    turned = x.float() if x.dtype.itemsize == 1 else x  # fp8 is rounded once, as what is turned goes
    return rotate(turned, rotary.cos.float(), rotary.sin.float(), position, interleaved=rotary.interleaved,
                  layout=layout).to(x.dtype)


def _chunks(q, queries: Queries, after, leftpad, attention_chunk: int, batch: int) -> dict:
    """Keys from leftpad on, of the query's own chunk of positions."""
    sequence, place, count = _tokens(q, queries.cu_seqlens, batch)
    start = torch.zeros_like(after) if leftpad is None else leftpad
    start = start[sequence].long()
    count = count[sequence] if isinstance(count, torch.Tensor) else count
    positions = place + after[sequence] - start - count
    shape = (1, -1, 2) if queries.cu_seqlens is not None else (batch, 1, -1, 2)
    ranges = to.chunk_ranges(attention_chunk, positions, shape)["key_ranges"]
    return {"key_ranges": ranges + start.to(torch.int32).reshape(*shape[:-1], 1)}
