# SPDX-License-Identifier: Apache-2.0
"""The classes behind vLLM's backend TESSERA: vllm_plugin registers them, and vLLM imports them when asked for the
backend.

A step is one packed batch of prompt chunks and of next tokens of other requests. do_kv_cache_update writes its
keys and values into the pages; forward reads each sequence through its row of the block table.

    kv_cache  [blocks, hk, block size, dqk + dv]   of any strides, which vLLM's layouts differ in
    query     [t, hq, dqk], output [t, hq, dv]     t may exceed the tokens of the batch: padding of graphs
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import ClassVar

import torch
import vllm.envs
from vllm.v1.attention import backend as host

from .._lib import Refused
from ..torch import append_kv, attention
from .vllm_plugin import NAME, changed

_NAME = "tessera.doors.vllm"
_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_ENCODERS = (host.AttentionType.ENCODER, host.AttentionType.ENCODER_ONLY)
_FIELDS = ("num_actual_tokens", "max_query_len", "query_start_loc", "seq_lens", "block_table_tensor", "causal")
_WORDS = {"layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
          "output_block_scale", "self"}


def _check():
    """One error for a vLLM that says more than this door knows."""
    if strange := set(inspect.signature(host.AttentionImpl.forward).parameters) - _WORDS:
        raise changed(f"AttentionImpl.forward takes {', '.join(sorted(strange))}, which the door does not know")
    fields = {field.name for field in dataclasses.fields(host.CommonAttentionMetadata)}
    if missing := [name for name in _FIELDS if name not in fields]:
        raise changed(f"CommonAttentionMetadata has no {', '.join(missing)}")


_check()


class Backend(host.AttentionBackend):
    """What this backend can, as vLLM asks."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "float16", "bfloat16", *_FP8]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(host.AttentionType)

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability is None or tuple(capability) >= (8, 0)


@dataclasses.dataclass
class Metadata:
    """Where the tokens of one batch lie, for one group of layers. The tensors are vLLM's own, which graphs are captured
    with."""
    tokens: int
    longest: int                # of the new tokens of a sequence, or more
    cu_seqlens: torch.Tensor    # int32 [b + 1], of the new tokens
    seqlens_k: torch.Tensor     # int32 [b], with the new tokens
    page_table: torch.Tensor    # int32 [b, max pages]
    causal: bool


class Builder(host.AttentionMetadataBuilder):
    _cudagraph_support: ClassVar = host.AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise Refused(f"{_NAME}: causal=Tensor: sequences of one batch are causal together, or none is; use "
                          "another attention backend for this model")
        return Metadata(common.num_actual_tokens, common.max_query_len, common.query_start_loc, common.seq_lens,
                        common.block_table_tensor, common.causal)


class Impl(host.AttentionImpl):
    """One layer's attention."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
                 kv_cache_dtype="auto", logits_soft_cap=None, attn_type=host.AttentionType.DECODER,
                 kv_sharing_target_layer_name=None, sinks=None, **more):
        if asked := [f"{name}={value!r}" for name, value in more.items() if value not in (None, False, -1)]:
            raise Refused(f"{_NAME}: {', '.join(asked)}: not known to tessera; use another attention backend")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._encodes = attn_type in _ENCODERS
        self._slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._keywords = {"layout": "thd", "softmax_scale": self.scale, "softcap": logits_soft_cap or 0.0}
        if sliding_window is not None:
            left = sliding_window - 1
            self._keywords.update(window=(left, left if self._encodes else 0), align="bottom_right")
        if vllm.envs.VLLM_BATCH_INVARIANT:
            self._keywords["batch_invariant"] = True
        self._seen = self._pools = None

    def _caches(self, kv_cache):
        """(k, v) [blocks, block size, hk, d], looked at once: a layer keeps its cache."""
        if kv_cache is not self._seen:
            if self.kv_cache_dtype in _FP8:
                pool = kv_cache.view(_FP8[self.kv_cache_dtype])
            else:
                pool = kv_cache
            sizes = self.head_size, pool.shape[-1] - self.head_size
            self._seen, self._pools = kv_cache, pool.transpose(1, 2).split(sizes, dim=-1)
        return self._pools

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """Writes key and value [t, hk, d] to the slots block * block size + place; a slot below 0 is padding."""
        if self._encodes or kv_cache.numel() == 0:
            return
        k_cache, v_cache = self._caches(kv_cache)
        if key.is_cuda:  # one launch, which reads the slots as they are
            from vllm._custom_ops import reshape_and_cache_flash
            reshape_and_cache_flash(key, value, k_cache, v_cache, slot_mapping, self.kv_cache_dtype, layer._k_scale,
                                    layer._v_scale)
            return
        size = k_cache.shape[1]
        kept = slot_mapping >= 0
        slots = slot_mapping.where(kept, 0)
        tokens = slots.shape[0]  # each is a sequence of its own, with one page
        append_kv(key[:tokens, None], value[:tokens, None], k_cache, v_cache, slots % size, seqlens_q=kept.int(),
                  page_table=(slots // size).int()[:, None], **self._scales(layer, (self.num_kv_heads,)))

    def _scales(self, layer, shape=()) -> dict:
        if self.kv_cache_dtype not in _FP8:
            return {}
        return {"k_scale": layer._k_scale.expand(shape), "v_scale": layer._v_scale.expand(shape)}

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None):
        """output, with the attention of the batch's tokens."""
        if output_scale is not None or output_block_scale is not None:
            raise Refused(f"{_NAME}: output_scale: an output that is quantized on its way is not built; turn the "
                          "fusion fuse_attn_quant off")
        meta = attn_metadata
        if meta is None:  # vLLM measures memory
            return output.fill_(0)
        tokens = meta.tokens
        q = _first(query, tokens)
        keywords = dict(self._keywords, cu_seqlens_q=meta.cu_seqlens, max_seqlen_q=meta.longest,
                        out=_first(output, tokens))
        if self._slopes is not None:
            self._slopes = self._slopes.to(query.device)
            keywords.update(alibi_slopes=self._slopes, align="bottom_right")
        if self.sinks is not None:
            keywords["sink"] = self.sinks if self.sinks.dtype in (query.dtype, torch.float32) else self.sinks.float()
        if self._encodes:
            attention(q, _first(key, tokens), _first(value, tokens), cu_seqlens_k=meta.cu_seqlens,
                      max_seqlen_k=meta.longest, **keywords)
            return output
        if meta.causal and self.attn_type != host.AttentionType.ENCODER_DECODER:
            keywords.update(causal=True, align="bottom_right")
        k_cache, v_cache = self._caches(kv_cache)
        attention(q, k_cache, v_cache, seqlens_k=meta.seqlens_k, page_table=meta.page_table, **keywords,
                  **self._scales(layer))
        return output


def _first(x, tokens: int):
    """x[:tokens], which takes a microsecond only where x has more."""
    return x if x.shape[0] == tokens else x[:tokens]
