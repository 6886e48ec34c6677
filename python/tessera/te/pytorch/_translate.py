# SPDX-License-Identifier: Apache-2.0
"""One call in TE's words -> the keywords of tessera.torch.attention.

    TE                                      tessera
    sbhd, bshd, thd                         layout, one for q and one for k and v
    mask type, window, bottom_right         causal, window, align
    padding with cu_seqlens                 seqlens_q, seqlens_k; packed cu_seqlens_q, cu_seqlens_k
    padding with attention_mask             segment_ids: the hidden have a segment of their own; align by sequence
    arbitrary attention_mask                drop
    bias types, ALiBi                       bias, bias_at, alibi_slopes
    softcap                                 softcap; 0 is none
    softmax types                           sink

Nothing here looks at a value on the device, and nothing grows with sq * skv.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from ... import alibi_slopes
from ...torch._later import constant
from .. import _words as te_words
from . import _words


@dataclasses.dataclass
class Call:
    """What TE was called with. cu_seqlens_* and attention_mask matter to padding masks, and the
    latter to "arbitrary", as TE documents."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_format: str = "sbhd"
    kv_format: str = "sbhd"
    mask: str = "no_mask"                     # canonical
    window: tuple[int, int] = (-1, -1)        # checked
    bottom_right: bool = True
    attention_mask: torch.Tensor | tuple | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    page_table_k: torch.Tensor | None = None
    page_table_v: torch.Tensor | None = None
    bias_type: str = "no_bias"
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    softmax_scale: float | None = None
    softmax_type: str = "vanilla"
    softmax_offset: torch.Tensor | None = None
    deterministic: bool | None = False        # None follows PyTorch's
    return_max_logit: bool = False
    softcap: float = 0.0                      # 0: none

    def __post_init__(self):
        self.max_seqlen_q = _words.max_seqlen("max_seqlen_q", self.max_seqlen_q)
        self.max_seqlen_kv = _words.max_seqlen("max_seqlen_kv", self.max_seqlen_kv)

    @classmethod
    def of_layout(cls, q, k, v, qkv_layout: str, mask, window, bottom_right, **more) -> Call:
        """A call that names the layout, as backends and fused_attn_fwd are called."""
        mask = _words.mask_type(mask)
        q_format, kv_format = _words.formats_of(_words.qkv_layout(qkv_layout))
        if more.get("page_table_k") is not None and kv_format == "sbhd":
            k, v, kv_format = k.transpose(0, 1), v.transpose(0, 1), "bshd"  # as tessera's pools
        window = None if window is None or tuple(window) == (-1, -1) else window
        return cls(q, k, v, q_format, kv_format, mask, _words.check_set_window_size(mask, window),
                   _words.bottom_right(mask, bottom_right), **more)

    @property
    def packed(self) -> bool:
        return "thd" in (self.q_format, self.kv_format)

    @property
    def padded(self) -> bool:
        """Whether lengths count: packed tensors and pages have no other."""
        return "padding" in self.mask or self.packed or self.page_table_k is not None

    @property
    def masked(self) -> bool:
        """Whether padding is given by attention_mask."""
        return self.padded and (self.cu_seqlens_q is None or self.cu_seqlens_kv is None) and \
            not self.packed and self.attention_mask is not None

    def extent(self, axis: str, side: str = "q") -> int | None:
        """The extent of b, s or h; of a packed sequence it is not known."""
        x, layout = (self.q, self.q_format) if side == "q" else (self.k, self.kv_format)
        if axis in layout:
            return x.shape[layout.index(axis)]
        if axis == "b":
            cu_seqlens = self.cu_seqlens_q if side == "q" else self.cu_seqlens_kv
            return None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return self.max_seqlen_q if side == "q" else self.max_seqlen_kv

    def keywords(self, checked=False) -> dict:
        """Keywords of tessera.torch.attention but for dropout, or a ValueError. `checked` says that
        a call with tensors that look the same was accepted before."""
        if not checked:
            self._check_tensors()
        given = {"layout": (self.q_format, self.kv_format), "softmax_scale": self.softmax_scale, **self.band(),
                 "deterministic": self.deterministic, "return_max_logit": self.return_max_logit}
        self.cap(given)
        if self.masked:
            self._padding_by_mask(given)
        elif self.padded:
            self._lengths(given)
        if self.mask == "arbitrary":
            self._arbitrary(given)
        if self.page_table_k is not None:
            self._pages(given)
        self._scores(given)
        given |= self.sink()
        return given

    def _check_tensors(self):
        _words.tensors(query_layer=self.q, key_layer=self.k, value_layer=self.v,
                       cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_kv=self.cu_seqlens_kv,
                       cu_seqlens_q_padded=self.cu_seqlens_q_padded,
                       cu_seqlens_kv_padded=self.cu_seqlens_kv_padded,
                       core_attention_bias=self.bias, alibi_slopes=self.alibi_slopes,
                       softmax_offset=self.softmax_offset)
        if self.page_table_k is None:
            _words.shapes(self.q, self.k, self.v, self.q_format, self.kv_format)

    def cap(self, given):
        if self.softcap:
            given["softcap"] = self.softcap

    def band(self) -> dict:
        return te_words.band(self.mask, *self.window, self.bottom_right)

    def sink(self) -> dict:
        kind = self.softmax_type
        has_none = kind == "vanilla" or kind == "off-by-one" and self.softmax_offset is None
        return te_words.sink(kind, None if has_none else self._offset())

    def _lengths(self, given):
        by_name = "attn_mask_type" if "padding" in self.mask else "qkv_format"
        value = self.mask if "padding" in self.mask else "thd" if self.packed else "paged"
        why = f'{by_name}="{value}"' + ("" if self.packed else " without attention_mask")
        differed = diff = None
        for side, layout, lengths, name in (
                ("q", self.q_format, self.cu_seqlens_q, "cu_seqlens_q"),
                ("k", self.kv_format, self.cu_seqlens_kv, "cu_seqlens_kv")):
            lengths = _words.cu_seqlens(name, lengths, why)
            if layout == "thd":
                given[f"cu_seqlens_{side}"] = lengths
                given[f"max_seqlen_{side}"] = self.extent("s", "q" if side == "q" else "kv")
                starts = getattr(self, f"{name}_padded")
                if starts is not None and starts is not lengths:
                    given[f"{name.replace('kv', 'k')}_padded"] = \
                        _words.cu_seqlens(f"{name}_padded", starts, "pad_between_seqs=True")
                continue
            b = self.extent("b", side)
            if self.page_table_k is None and lengths.shape[0] != b + 1:
                raise _words.error(f"{name}.shape", list(lengths.shape),
                                   f"must be [batch_size + 1] = [{b + 1}]")
            if lengths is not differed:  # one tensor for both sides stays one
                differed, diff = lengths, lengths.diff()
            given[f"seqlens_{side}"] = diff

    def _padding_by_mask(self, given):
        """Hidden queries are segment 1 and hidden keys segment 2, so that neither meets anyone. No
        prefix is assumed."""
        hidden_q, hidden_k = self._hidden()
        given["segment_ids"] = hidden_q.to(torch.int32), hidden_k.to(torch.int32) * 2
        if isinstance(self.attention_mask, torch.Tensor):
            given["align"] = "top_left"  # as many keys as queries
            return
        diagonal = given["causal"] or "window" in given or self.bias_type == "alibi"
        if self.bottom_right and diagonal:  # of what is visible: each sequence has a diagonal of its own
            given["align"] = (~hidden_k).sum(1, dtype=torch.int32) - (~hidden_q).sum(1, dtype=torch.int32)

    def _hidden(self):
        """attention_mask as bool [b, sq] and [b, skv], True = hidden."""
        masks = self.attention_mask
        masks = (masks, masks) if isinstance(masks, torch.Tensor) else masks
        if not isinstance(masks, (tuple, list)) or len(masks) != 2:
            raise _words.error("attention_mask", type(masks).__name__, "must be a tensor "
                               "[b, 1, 1, s], or a pair for queries and for keys")
        hidden = []
        for mask, side in zip(masks, ("q", "kv")):
            b, s = self.extent("b", side), self.extent("s", side)
            self._boolean(mask)
            if mask.dim() != 4 or tuple(mask.shape) not in ((b, 1, 1, s), (1, 1, 1, s)):
                raise _words.error("attention_mask.shape", list(mask.shape),
                                   f'must be [{b}, 1, 1, {s}] for attn_mask_type="{self.mask}"')
            hidden.append(mask[:, 0, 0].expand(b, s))
        return hidden

    def _boolean(self, mask):
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            raise _words.error("attention_mask.dtype", getattr(mask, "dtype", type(mask).__name__),
                               "must be torch.bool, True = hidden")
        if mask.device != self.q.device:
            raise _words.error("attention_mask.device", str(mask.device),
                               f"must be query_layer's, {str(self.q.device)!r}")

    def _arbitrary(self, given):
        mask = self.attention_mask
        if mask is None:
            raise _words.error("attention_mask", None, 'attn_mask_type="arbitrary" needs it: bool, '
                               "broadcastable to [b, h, sq, skv], True = hidden")
        self._boolean(mask)
        _words.broadcastable("attention_mask", mask, self._dense(given, mask), "b, h, sq, skv")
        given["drop"] = mask

    def _dense(self, given, x) -> tuple:
        """[b, h, sq, skv]; of packed sequences x itself says how long they may be."""
        for side, axis, cu in (("q", -2, "cu_seqlens_q"), ("k", -1, "cu_seqlens_k")):
            if cu in given and given[f"max_seqlen_{side}"] is None and x.dim() == 4 and \
                    x.shape[axis] != 1:
                given[f"max_seqlen_{side}"] = x.shape[axis]
        return (self.extent("b"), self.extent("h"),
                given.get("max_seqlen_q") or self.extent("s"),
                given.get("max_seqlen_k") or self.extent("s", "kv"))

    def _pages(self, given):
        tables = self.page_table_k, self.page_table_v
        given["page_table"] = tables[0] if tables[1] is None else tables

    def _scores(self, given):
        if self.bias_type in ("no_bias", "alibi") and self.bias is not None:
            raise _words.error("core_attention_bias", list(self.bias.shape), "belongs to "
                               'core_attention_bias_type="post_scale_bias" or "pre_scale_bias"')
        if self.bias_type != "alibi" and self.alibi_slopes is not None:
            raise _words.error("alibi_slopes", list(self.alibi_slopes.shape),
                               'belongs to core_attention_bias_type="alibi"')
        if self.bias_type == "alibi":
            given["alibi_slopes"] = self._slopes()
        elif self.bias_type != "no_bias":
            if self.bias is None:
                raise _words.error("core_attention_bias", None, "core_attention_bias_type="
                                   f'"{self.bias_type}" needs it: [b|1, h|1, sq|1, skv]')
            _words.broadcastable("core_attention_bias", self.bias, self._dense(given, self.bias),
                                 "b, h, sq, skv")
            if self.bias.dtype not in (self.q.dtype, torch.float32):
                raise _words.error("core_attention_bias.dtype", self.bias.dtype,
                                   f"must be query_layer's, {self.q.dtype}, or float32")
            given |= te_words.bias(self.bias_type, self.bias)

    def _slopes(self) -> torch.Tensor:
        heads = self.extent("h")
        if self.alibi_slopes is None:
            return usual_slopes(heads, self.q.device)
        if tuple(self.alibi_slopes.shape) not in ((heads,), (self.extent("b"), heads)):
            raise _words.error("alibi_slopes.shape", list(self.alibi_slopes.shape),
                               f"must be [{heads}] or [{self.extent('b')}, {heads}]")
        return self.alibi_slopes.float()

    def _offset(self) -> torch.Tensor:
        heads = self.extent("h")
        offset = self.softmax_offset
        if offset is None or offset.numel() != heads:
            shape = None if offset is None else list(offset.shape)
            raise _words.error("softmax_offset.shape", shape, f'softmax_type="{self.softmax_type}" '
                               f"needs one number for each of {heads} heads")
        return offset.reshape(heads).float()


def usual_slopes(heads: int, device) -> torch.Tensor:
    """The usual ALiBi slopes, fp32 [heads]."""
    if torch.compiler.is_compiling():
        return torch.tensor(_slopes(heads), device=device)
    return _kept_slopes(heads, device)


@functools.lru_cache(maxsize=64)
def _kept_slopes(heads: int, device) -> torch.Tensor:
    return torch.tensor(_slopes(heads), device=device)


@constant
def _slopes(heads: int) -> list[float]:
    return alibi_slopes(heads).tolist()
