# SPDX-License-Identifier: Apache-2.0
"""The class behind SGLang's attention backend "tessera": sglang_plugin registers it, and SGLang makes one when
asked for it.

SGLang's pools are [tokens, hk, d]. req_to_token [requests, max context] says where each token of a request lies.
It is a page table for pages of one token; every page_size-th entry is a page table for pages of page_size tokens.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from sglang.srt.layers.attention import base_attn_backend as host
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from .._lib import Refused
from ..torch import attention
from .sglang_plugin import changed

_NAME = "tessera.doors.sglang"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

if missing := [name for name in ("init_forward_metadata_out_graph", "init_cuda_graph_state", "forward_decode",
                                 "forward_extend") if not hasattr(host.AttentionBackend, name)]:
    raise changed(f"AttentionBackend has no {', '.join(missing)}")


@dataclasses.dataclass
class Metadata:
    """Where the tokens of one batch of b requests lie."""
    cu_seqlens: torch.Tensor          # int32 [b + 1], of the new tokens
    seqlens_k: torch.Tensor           # int32 [b], with the new tokens
    longest: int                      # of the new tokens of a request, or more
    page_table: torch.Tensor          # int32 [b, max pages]
    swa_table: torch.Tensor | None    # the same, in the pool of layers with windows, where they have one of their own
    swa_loc: torch.Tensor | None      # where new tokens go in that pool


class Layer(NamedTuple):
    """What stays of a layer from call to call, while these are the same objects: the layer, k and v of the pool,
    [tokens, hk, d], and their scales."""
    layer: object
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    windowed: bool
    keywords: dict        # of attention()
    pools: tuple          # k and v as pages, [pages, page_size, hk, d]


class Backend(host.AttentionBackend):
    """Attention of a model, or of step `step` of a draft's chain, whose keys are `step` more than the batch says."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner, step: int = 0):
        super().__init__()
        if getattr(model_runner, "use_mla_backend", False):
            raise Refused(f"{_NAME}: latent attention (MLA) is not built; choose another --attention-backend")
        self.device, self.page_size, self.step = model_runner.device, model_runner.page_size, step
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = pool = model_runner.token_to_kv_pool
        self.max_context_len = model_runner.model_config.context_len
        self._translate = pool.translate_loc_from_full_to_swa if getattr(pool, "swa_layer_nums", 0) else None
        self._invariant = bool(getattr(model_runner.server_args, "enable_deterministic_inference", False))
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self.forward_metadata = self._graph = None
        self._layers: dict[int, Layer] = {}  # by id

    # ---- a batch ----

    def init_forward_metadata(self, forward_batch):
        lengths = forward_batch.seq_lens_cpu
        longest = self.max_context_len if lengths is None or not len(lengths) else int(lengths.max())
        self.forward_metadata = self._metadata(forward_batch, longest)

    def _metadata(self, batch, longest_k: int) -> Metadata:
        mode, b, spec = batch.forward_mode, batch.batch_size, batch.spec_info
        if mode.is_target_verify():
            if getattr(spec, "topk", 1) not in (None, 1):
                raise Refused(f"{_NAME}: speculative_eagle_topk={spec.topk}: trees of drafts are not built; use 1")
            longest = more = spec.draft_token_num
        else:
            longest, more = 1, self.step
        seqlens_k = (batch.seq_lens[:b] + more).int()
        if mode.is_decode_or_idle() or mode.is_target_verify():
            cu_seqlens = torch.arange(0, b * longest + 1, longest, dtype=torch.int32, device=self.device)
        else:
            new = batch.extend_seq_lens
            lengths = batch.extend_seq_lens_cpu
            longest = int(max(lengths)) if lengths is not None else int(new.max())
            cu_seqlens = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
        width = min(longest_k + more, self.req_to_token.shape[1])
        tokens = self.req_to_token[batch.req_pool_indices[:b], :width:self.page_size]
        swa = self._translate
        return Metadata(cu_seqlens, seqlens_k, longest, (tokens // self.page_size).int(),
                        None if swa is None else (swa(tokens) // self.page_size).int(),
                        None if swa is None or batch.out_cache_loc is None else swa(batch.out_cache_loc))

    # ---- CUDA graphs: tensors of one address, which each replay fills ----

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        pages = -(-self.req_to_token.shape[1] // self.page_size)
        self._graph = {name: torch.zeros(size, dtype=torch.int32, device=self.device) for name, size in (
            ("cu_seqlens", max_bs + 1), ("seqlens_k", max_bs), ("page_table", (max_bs, pages)),
            ("swa_table", (max_bs, pages)))}
        self._graph["swa_loc"] = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False):
        meta = self._metadata(forward_batch, self.max_context_len)
        for name, kept in self._graph.items():
            fresh = getattr(meta, name)
            if fresh is not None:
                place = kept[tuple(slice(n) for n in fresh.shape)]
                place.copy_(fresh)
                setattr(meta, name, place)
        self.forward_metadata = meta

    # ---- a layer ----

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **more):
        """[t, hq * dv], with k and v [t, hk, d] written to the pool."""
        if more:
            _refuse([f"{name}=" for name, value in more.items() if value is not None])
        meta = self.forward_metadata
        if save_kv_cache and k is not None:
            self._write(layer, forward_batch.out_cache_loc, k, v)
        known = self._known(layer)
        keywords = known.keywords
        if sinks is not None:
            keywords = {**keywords, "sink": sinks if sinks.dtype in (q.dtype, torch.float32) else sinks.float()}
        o = attention(q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), *known.pools, cu_seqlens_q=meta.cu_seqlens,
                      max_seqlen_q=meta.longest, seqlens_k=meta.seqlens_k,
                      page_table=meta.swa_table if known.windowed and meta.swa_table is not None else meta.page_table,
                      **keywords)
        return o.flatten(1)

    forward_decode = forward_extend

    def _known(self, layer) -> Layer:
        pool, index = self.token_to_kv_pool, layer.layer_id
        k, v = pool.get_key_buffer(index), pool.get_value_buffer(index)
        known = self._layers.get(id(layer))
        if known is None or known.layer is not layer or known.k is not k or known.v is not v or \
                known.k_scale is not layer.k_scale or known.v_scale is not layer.v_scale:
            known = self._layers[id(layer)] = self._look_at(layer, k, v)
        return known

    def _look_at(self, layer, k, v) -> Layer:
        _check(layer)
        window = layer.sliding_window_size
        windowed = window is not None and window > -1
        keywords = {"layout": "thd", "softmax_scale": layer.scaling, "softcap": layer.logit_cap or 0.0}
        if getattr(layer.attn_type, "value", layer.attn_type) != "encoder_only":
            keywords.update(causal=True, align="bottom_right")
            if windowed:
                keywords["window"] = (window, 0)
        if self._invariant:
            keywords["batch_invariant"] = True
        pools = tuple(buffer.unflatten(0, (-1, self.page_size)) for buffer in (k, v))
        if pools[0].dtype in _FP8:
            keywords.update(k_scale=self._scale(layer.k_scale), v_scale=self._scale(layer.v_scale))
        return Layer(layer, k, v, layer.k_scale, layer.v_scale, windowed, keywords, pools)

    def _write(self, layer, loc, k, v):
        loc = KVWriteLoc(loc, self.forward_metadata.swa_loc)
        if layer.k_scale is None:
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)
        else:  # which the pool divides by, in place
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k.clone(), v.clone(), layer.k_scale, layer.v_scale)

    def _scale(self, scale):
        return self._one if scale is None else scale.reshape(()).float()

    def support_triton(self):
        return False


def _check(layer):
    asked = []
    if layer.is_cross_attention:
        asked.append("is_cross_attention=True")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        asked.append(f"logit_capping_method={layer.logit_capping_method!r}")
    if layer.xai_temperature_len > 0:
        asked.append(f"xai_temperature_len={layer.xai_temperature_len}")
    _refuse(asked)


def _refuse(asked: list[str]):
    if asked:
        raise Refused(f"{_NAME}: {', '.join(asked)}: not built; choose another --attention-backend")


class Steps:
    """The backends of a draft worker: one for each step of its chain but the last, which only makes a token."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner, topk: int, steps: int):
        if topk != 1:
            raise Refused(f"{_NAME}: speculative_eagle_topk={topk}: trees of drafts are not built; use 1, or another "
                          "--speculative-draft-attention-backend")
        self.attn_backends = self.attn_backend_list = [Backend(model_runner, i + 1) for i in range(steps - 1)]
        self.forward_metadata = None

    def init_forward_metadata(self, forward_batch):
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False):
        from sglang.srt.model_executor import forward_batch_info as info
        inner = info.build_inner_fb_view(forward_batch, bs=forward_batch.batch_size,
                                         forward_mode=info.ForwardMode.DECODE, encoder_lens=forward_batch.encoder_lens)
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(inner, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch):
        """Nothing is left to do in a graph."""
