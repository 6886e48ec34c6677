# SPDX-License-Identifier: Apache-2.0
"""TE's key and value caches for inference, padded and paged, on the CPU and on CUDA.

    params = InferenceParams(max_batch_size, max_sequence_length, num_heads_kv, head_dim_k, dtype)
    params.allocate_memory(layer_number)                   # once for each layer
    params.pre_step(OrderedDict({sequence_id: new_tokens}))  # once for each step
    out = attention(q, k, v, attn_mask_type="padding_causal", inference_params=params, ...)

A sequence that a step leaves out is finished, and its room is free again. The kernels see both caches as pools of
pages; a padded cache has one page a sequence. So nothing is copied when sequences come, go or change their order.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

import torch

from ....torch import append_kv
from ..._names import missing
from .. import _words

__all__ = ["InferenceParams", "KVCacheManager", "NonPagedKVCacheManager", "Page",
           "PagedKVCacheManager"]
__getattr__ = missing(__name__)


class KVCacheManager:
    """What a manager offers; custom_cache_manager= takes another class of these methods."""

    def __init__(self, *_, **__):
        self.cache: dict[int, tuple] = {}    # layer number -> (k_cache, v_cache)
        self.sequences: OrderedDict[int, int] = OrderedDict()  # id -> tokens, with this step's

    def allocate_memory(self, layer_number: int):
        self.cache[layer_number] = (None, None)

    def pre_step(self, step_dict: OrderedDict) -> OrderedDict:
        """{id: new tokens} -> {id: all tokens}, in the order of the step."""
        return self.sequences

    def step(self, layer_number: int, new_k, new_v, cu_new_seqlens, cu_cached_seqlens,
             qkv_format: str):
        """Appends; returns (k_cache, v_cache, page_table | None)."""
        return *self.cache[layer_number], None

    def reset(self):
        self.sequences = OrderedDict()


class _PoolManager(KVCacheManager):
    """Pages [pages, page_size, heads, head_dim] and a table int32 [max_batch_size, pages a sequence],
    whose first rows are the sequences of the step."""

    def __init__(self, total_num_pages: int, page_size: int, num_heads: int, head_dim_k: int,
                 dtype: torch.dtype, max_batch_size: int, max_seqlen: int,
                 head_dim_v: int | None = None):
        super().__init__()
        self.max_batch_size, self.max_seqlen = max_batch_size, max_seqlen
        self.num_heads, self.dtype = num_heads, dtype
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.total_num_pages, self.page_size = total_num_pages, page_size
        self.max_pages_per_seq = -(-max_seqlen // page_size)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.page_table = torch.zeros(max_batch_size, self.max_pages_per_seq, dtype=torch.int32,
                                      device=self.device)
        self.reset()

    def reset(self):
        super().reset()
        self._pages: dict[int, list[int]] = {}  # of each sequence
        self._free = list(range(self.total_num_pages - 1, -1, -1))
        self.page_table.zero_()

    def allocate_memory(self, layer_number: int):
        self.cache[layer_number] = tuple(
            torch.zeros(self.total_num_pages, self.page_size, self.num_heads, d, dtype=self.dtype,
                        device=self.device) for d in (self.head_dim_k, self.head_dim_v))

    def pre_step(self, step_dict: OrderedDict) -> OrderedDict:
        lengths = OrderedDict((id, self.sequences.get(id, 0) + new) for id, new in step_dict.items())
        for id, length in lengths.items():
            if length > self.max_seqlen:
                raise ValueError(f"InferenceParams: sequence {id} comes to {length} tokens: must be at "
                                 f"most max_sequence_length={self.max_seqlen}")
        self._reserve(lengths)
        self.sequences = lengths
        self._write_table(lengths)
        return lengths

    def _write_table(self, ids):
        """The first rows of the table: the pages of these sequences."""
        rows = [pages + [0] * (self.max_pages_per_seq - len(pages))
                for pages in (self._pages.get(id, []) for id in ids)]
        if rows:
            self.page_table[:len(rows)].copy_(_uploaded(rows, self.device), non_blocking=True)

    def _reserve(self, lengths: OrderedDict):
        """Frees the pages of sequences that are gone and takes those that are missing, or raises and
        changes nothing."""
        gone = [id for id in self._pages if id not in lengths]
        free = len(self._free) + sum(len(self._pages[id]) for id in gone)
        missing = {id: max(-(-length // self.page_size) - len(self._pages.get(id, ())), 0)
                   for id, length in lengths.items()}
        if sum(missing.values()) > free:
            wanting = [id for id, pages in missing.items() if pages]
            raise ValueError(f"InferenceParams: sequences {wanting} need {sum(missing.values())} pages of "
                             f"{self.page_size} tokens: {free} are free; finish a sequence, or give a larger "
                             "total_num_pages")
        for id in gone:
            self._free += reversed(self._pages.pop(id))
        for id, pages in missing.items():
            taken = [self._free.pop() for _ in range(pages)]
            self._pages.setdefault(id, []).extend(taken)

    def append(self, layer_number: int, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
        """Appends; returns (k_pool, v_pool, page_table [b, pages])."""
        if layer_number not in self.cache:
            raise ValueError(f"InferenceParams: layer_number={layer_number}: has no cache; call "
                             "allocate_memory(layer_number) first")
        k_pool, v_pool = self.cache[layer_number]
        b = _rows(len(self.sequences), new_k, qkv_format)
        table = self.page_table[:b]
        new = cu_new_seqlens[:b + 1]
        lengths = {"cu_seqlens": new} if qkv_format == "thd" else {"seqlens_q": new.diff()}
        with torch.no_grad():
            append_kv(new_k.detach(), new_v.detach(), k_pool, v_pool,
                      cu_cached_seqlens[:b + 1].diff() - new.diff(), layout=qkv_format,
                      page_table=table, **_scales(k_pool, new_k), **lengths)
        return k_pool, v_pool, table


class NonPagedKVCacheManager(_PoolManager):
    """Caches [max_batch_size, max_seqlen, heads, head_dim], a row a sequence for as long as it lives."""

    def __init__(self, max_batch_size: int, max_seqlen: int, num_heads: int, head_dim_k: int,
                 dtype: torch.dtype, head_dim_v: int | None = None):
        super().__init__(max_batch_size, max_seqlen, num_heads, head_dim_k, dtype, max_batch_size,
                         max_seqlen, head_dim_v)

    def step(self, layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
        """(k_cache [b, s, h, d], v_cache, None), a row a sequence in the order of the step: views where
        the rows of the cache are in that order already, copies where they are not."""
        k, v, table = self.append(layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens,
                                  qkv_format)
        rows = [self._pages[id][0] for id in self.sequences if self._pages[id]]
        if rows == list(range(len(self.sequences))):
            return k[:len(table)], v[:len(table)], None
        return k[table[:, 0].long()], v[table[:, 0].long()], None


class Page:
    """A page by its number, and whether a sequence has it."""

    def __init__(self, page_id: int, allocated: bool = False):
        self.page_id, self.allocated = page_id, allocated

    def allocate_page(self):
        self.allocated = True

    def deallocate_page(self):
        self.allocated = False


class PagedKVCacheManager(_PoolManager):
    """Caches [total_num_pages, page_size, heads, head_dim] and a page table. pre_step takes and frees pages. The
    methods here read the pages, or take and free some by hand."""

    step = _PoolManager.append

    @property
    def free_pages(self) -> list[Page]:
        return [Page(page) for page in reversed(self._free)]

    @property
    def allocated_pages(self) -> dict[int, list[Page]]:
        return {id: [Page(page, True) for page in pages] for id, pages in self._pages.items()}

    def has_free_page(self) -> bool:
        return bool(self._free)

    def get_sequence_count(self) -> int:
        return len(self.sequences)

    def get_sequence_lengths(self) -> list[int]:
        return list(self.sequences.values())

    def get_page_list(self, seq: int) -> list[int]:
        return list(self._pages.get(seq, ()))

    def get_page_count(self, seq: int) -> int:
        return len(self._pages.get(seq, ()))

    def get_page_table(self, sequences: list[int]) -> torch.Tensor:
        """int32 [max_batch_size, pages a sequence], its first rows now those of `sequences`."""
        self._write_table(sequences)
        return self.page_table

    def allocate_page(self, seq: int):
        if not self._free:
            raise RuntimeError(f"PagedKVCacheManager: seq={seq}: 0 of {self.total_num_pages} pages are free; "
                               "finish a sequence, or give a larger total_num_pages")
        self._pages.setdefault(seq, []).append(self._free.pop())

    def allocate_sequence(self, seq: int, context_len: int):
        for _ in range(-(-context_len // self.page_size)):
            self.allocate_page(seq)

    def deallocate_sequence(self, seq: int):
        self._free += reversed(self._pages.pop(seq, []))

    def print_cache(self):
        """Logs at level DEBUG who has which pages."""
        log = logging.getLogger("PagedKVCacheManager").debug
        used = self.total_num_pages - len(self._free)
        log("Cache status:")
        log("  total pages:     %s (used %s, free %s)", self.total_num_pages, used, len(self._free))
        log("  total sequences: %s", len(self.sequences))
        for i, (id, length) in enumerate(self.sequences.items()):
            log("  >> batch index %s: seq_id %s, num_tokens %s, num_pages %s, page_list %s", i, id, length,
                self.get_page_count(id), self.get_page_list(id))


class InferenceParams:
    """The caches that a model keeps between the steps of inference.

    They hold max_batch_size sequences of at most max_sequence_length tokens, with num_heads_kv heads of
    head_dim_k and head_dim_v (default head_dim_k) elements of `dtype` (default PyTorch's). With is_paged they have
    total_num_pages pages (default: as many as all sequences can need) of page_size tokens. qkv_format is that of the
    model. max_ctx_len bounds the new tokens of a sequence in a step. A torch.float8_e4m3fn cache has scales of 1.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int, num_heads_kv: int | None = None,
                 head_dim_k: int | None = None, dtype: torch.dtype | None = None, head_dim_v: int | None = None,
                 is_paged: bool = False, total_num_pages: int | None = None,
                 page_size: int | None = None, max_ctx_len: int | None = None,
                 qkv_format: str = "bshd", custom_cache_manager: type | None = None):
        for name, size in (("num_heads_kv", num_heads_kv), ("head_dim_k", head_dim_k)):
            if size is None:
                raise ValueError(f"InferenceParams: {name}=None: must be the model's, as the cache is made by it")
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k = num_heads_kv, head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.is_paged, self.page_size = is_paged, page_size
        self.max_ctx_len = max_sequence_length if max_ctx_len is None else max_ctx_len
        self.qkv_format = _words.qkv_format(qkv_format)
        self.cache_qkv_format = "bshd"
        self.input_qkv_format = self.qkv_format
        sizes = dict(num_heads=num_heads_kv, head_dim_k=head_dim_k, dtype=self.dtype,
                     max_batch_size=max_batch_size, max_seqlen=max_sequence_length,
                     head_dim_v=self.head_dim_v)
        if is_paged:
            sizes.update(total_num_pages=self._check_pages(total_num_pages), page_size=page_size)
        manager = custom_cache_manager or (PagedKVCacheManager if is_paged else
                                           NonPagedKVCacheManager)
        self.cache_manager = manager(**sizes)
        device = getattr(self.cache_manager, "device", None) or \
            torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.cu_seqlens_q = torch.zeros(max_batch_size + 1, dtype=torch.int32, device=device)
        self.cu_seqlens_kv = torch.zeros_like(self.cu_seqlens_q)
        self.reset()

    def _check_pages(self, total_num_pages: int | None) -> int:
        if not self.page_size or self.page_size < 1 or self.max_sequence_length % self.page_size:
            raise ValueError(f"InferenceParams: page_size={self.page_size}: must divide "
                             f"max_sequence_length={self.max_sequence_length}")
        self.total_num_pages = self.max_batch_size * (self.max_sequence_length // self.page_size) \
            if total_num_pages is None else total_num_pages
        return self.total_num_pages

    def reset(self):
        """Forgets all sequences; the memory stays."""
        self.sequences: OrderedDict[int, int] = OrderedDict()
        self.sequences_pre_step: OrderedDict[int, int] = OrderedDict()
        self.batch_size = 0
        self.max_seqlen_q = 0
        self.cache_manager.reset()

    def allocate_memory(self, layer_number: int):
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: OrderedDict):
        """Plans a step of {sequence id: new tokens}; sequences that it leaves out are finished.
        ValueError, with everything as it was: too many sequences or tokens, too few pages."""
        if len(step_dict) > self.max_batch_size:
            raise ValueError(f"InferenceParams: step_dict has {len(step_dict)} sequences: must be at most "
                             f"max_batch_size={self.max_batch_size}")
        for id, new in step_dict.items():
            if not 0 <= new <= self.max_ctx_len:
                raise ValueError(f"InferenceParams: step_dict[{id}]={new}: must be from 0 to "
                                 f"max_ctx_len={self.max_ctx_len}")
        self.sequences = self.cache_manager.pre_step(OrderedDict(step_dict))
        self.sequences_pre_step = OrderedDict((id, length - step_dict[id])
                                              for id, length in self.sequences.items())
        self.batch_size = len(step_dict)
        self.max_seqlen_q = max(step_dict.values(), default=0)
        for cu_seqlens, lengths in ((self.cu_seqlens_q, step_dict.values()),
                                    (self.cu_seqlens_kv, self.sequences.values())):
            cu_seqlens.copy_(_uploaded(_cumulated(lengths, self.max_batch_size), cu_seqlens.device),
                             non_blocking=True)

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """int32 [b]: tokens of each sequence before this step."""
        return torch.tensor(list(self.sequences_pre_step.values()), dtype=torch.int32,
                            device=self.cu_seqlens_q.device)

    def step(self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str):
        """Appends a layer's new keys and values, [b, s, h, d], [s, b, h, d] or [t, h, d]; returns
        (k_cache, v_cache, cu_seqlens_q, cu_seqlens_kv, max_sequence_length, qkv_format), the last as
        "thd_2bshd"."""
        self.input_qkv_format = _words.qkv_format(qkv_format)
        k, v, self._table = self._stepped(self.cache_manager.step, layer_number, new_k, new_v, qkv_format)
        merged = qkv_format if qkv_format == "bshd" else f"{qkv_format}_2bshd"
        return k, v, self.cu_seqlens_q, self.cu_seqlens_kv, self.max_sequence_length, merged

    def rows(self, x: torch.Tensor, qkv_format: str) -> int:
        """How many sequences x [b, s, ..], [s, b, ..] or [t, ..] has: those of this step, or more that have no tokens,
        where x has the shape of a graph that was captured with a full batch."""
        return _rows(self.batch_size, x, qkv_format)

    def starts(self, rows: int) -> torch.Tensor:
        """get_seqlens_pre_step() of so many sequences, from tensors that pre_step writes: a graph sees each step's."""
        return (self.cu_seqlens_kv.diff() - self.cu_seqlens_q.diff())[:rows]

    def append(self, layer_number: int, new_k, new_v, qkv_format: str):
        """step() as DotProductAttention wants it, of the b sequences of rows(): (k, v, page_table, cu_seqlens_q
        [b + 1], cu_seqlens_kv [b + 1]), page_table None where a custom manager has none."""
        manager = self.cache_manager
        k, v, table = self._stepped(getattr(manager, "append", manager.step), layer_number, new_k, new_v,
                                    qkv_format)
        cut = slice(0, self.rows(new_k, qkv_format) + 1)
        return k, v, table, self.cu_seqlens_q[cut], self.cu_seqlens_kv[cut]

    def _stepped(self, step, layer_number: int, new_k, new_v, qkv_format: str):
        """(k, v, page_table | None) of a manager's step; TE's give two, or three, by version."""
        k, v, *table = step(layer_number, new_k, new_v, self.cu_seqlens_q, self.cu_seqlens_kv, qkv_format)
        if table or not self.is_paged:
            return k, v, table[0] if table else None
        return k, v, self.cache_manager.page_table[:self.rows(new_k, qkv_format)]

    def convert_paged_to_nonpaged(self, layer_number: int):
        """(k, v) [b, max_sequence_length, h, d] of the sequences of this step, as copies."""
        table = self.cache_manager.page_table[:self.batch_size].long()
        return tuple(cache[table].flatten(1, 2) for cache in self.cache_manager.cache[layer_number])


def _rows(sequences: int, x: torch.Tensor, qkv_format: str) -> int:
    return max(sequences, 0 if qkv_format == "thd" else x.shape[qkv_format.index("b")])


def _cumulated(lengths, most: int) -> list[int]:
    """[0, a, a + b, ...], filled up to most + 1 with the last."""
    total, cumulated = 0, [0]
    for length in lengths:
        total += length
        cumulated.append(total)
    return cumulated + [total] * (most + 1 - len(cumulated))


def _uploaded(values, device) -> torch.Tensor:
    """int32 on its way to `device`, without a wait."""
    on_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int32, pin_memory=on_cuda)


def _scales(pool, new) -> dict:
    if pool.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return {}
    ones = new.new_ones(pool.shape[2], dtype=torch.float32)
    return {"k_scale": ones, "v_scale": ones}
