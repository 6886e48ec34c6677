# SPDX-License-Identifier: Apache-2.0
"""tessera as the core attention of Megatron-Core's layers:

    with tessera.doors.megatron.patch():                 # or patch() for good, and remove()
        spec = get_gpt_layer_local_spec(...)             # or ..._with_transformer_engine_spec
    model = GPTModel(config, spec, ...)

Megatron's functions that make specs take modules from one of two providers. patch() gives both providers another
core_attention() until you undo it; specs made in between keep tessera's. If you write specs yourself, use
LocalSpecProvider or TESpecProvider of this module.

Both modules have DotProductAttention's constructor and forward, on [s, b, h, d] and packed [t, h, d]. They treat
an attention_mask with a causal mask type differently: LocalDotProductAttention applies it too, as Megatron's own
DotProductAttention does; TEDotProductAttention ignores it, as TransformerEngine's does.

With context_parallel_size > 1, tensors hold this rank's two chunks of each sequence, as Megatron's batches do, and
cp_comm_type says what is exchanged (docs/context_parallel.md).
"""

from __future__ import annotations

import contextlib
import copy
import inspect

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions import transformer_engine_spec_provider as te_host
from megatron.core.models import backends as local_host
from megatron.core.transformer import dot_product_attention as host
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention

from .._lib import Refused
from ..te.pytorch.attention.dot_product_attention.context_parallel import Spread, host as read
from ..torch import _functions
from ..torch import context_parallel as cp
from . import DOORS

TESTED = DOORS["Megatron-Core"].tested
_NAME = "tessera.megatron"
_CAUSAL = frozenset({AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right})


class LocalDotProductAttention(host.DotProductAttention):
    """Megatron's DotProductAttention, with its parameters and checkpoints and with tessera's forward. It also
    takes packed sequences, biases and sequences on several ranks, and gives the largest logits."""
    ignores_mask = False  # of a causal mask type

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None,
                 softmax_scale=None, k_channels=None, v_channels=None, num_splits=None, cp_comm_type=None,
                 pg_collection=None):
        if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
            raise Refused(f"{_NAME}: fp8_dot_product_attention=True: is not built; leave it out")
        alone = copy.copy(config)  # Megatron's own constructor refuses several ranks
        alone.context_parallel_size = 1
        super().__init__(alone, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale,
                         cp_comm_type, pg_collection)
        self.config = config
        self.cp_comm_type = cp_comm_type or "p2p"
        self.spread = Spread.of(_groups(self.cp_comm_type, pg_collection), self.cp_comm_type) \
            if config.context_parallel_size > 1 else None
        if softmax_scale is None and k_channels is not None:
            self.softmax_scale = k_channels ** -0.5
        elif config.apply_query_key_layer_scaling:  # Megatron divides by it here and multiplies the scores again
            self.softmax_scale *= self.layer_number
        self.window = tuple(config.window_size) if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number) else None
        self.batch_invariant = num_splits == 1 or num_splits is None and config.batch_invariant_mode
        self.return_max_logit = config.qk_clip or config.log_max_attention_logit
        self.current_max_attn_logits = None
        self.dropout_p = self.attention_dropout.p
        self._plans = _functions.Plans()  # what calls of q, k and v alone were translated to

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None,
                packed_seq_params=None, num_splits=None):
        """[s, b, h * dv]; packed [t, h * dv]. On several ranks s and t are this rank's, and an attention_mask or
        attention_bias has this rank's queries and all keys."""
        spread = self._spread_of(packed_seq_params)
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if attention_mask is not None and self.ignores_mask and kind in _CAUSAL:
            attention_mask = None
        plan = None
        if attention_mask is attention_bias is packed_seq_params is self.softmax_offset is spread is None and \
                not (self.return_max_logit or self.dropout_p and self.training or torch.compiler.is_compiling()):
            sq = query.shape[0]
            plan = (kind, sq == 1, sq == key.shape[0], num_splits, self.training, self.softmax_scale, self.window,
                    self.config.deterministic_mode)
            if run := self._plans.get(plan):
                return run(query, key, value).flatten(-2)
        keywords = {"softmax_scale": self.softmax_scale, "deterministic": self.config.deterministic_mode}
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            keywords.update(_packed(packed_seq_params))
            one_length = packed_seq_params.cu_seqlens_q is packed_seq_params.cu_seqlens_kv
        else:
            keywords["layout"] = "sbhd"
            one_length = len(query) == len(key)
            if attention_mask is not None:
                keywords["drop"] = _hidden(attention_mask)
        self._band(keywords, kind, one_length or len(query) == 1)
        if attention_bias is not None:
            keywords["bias"] = attention_bias
        if self.softmax_offset is not None:
            keywords["sink"] = "off_by_one" if self.config.softmax_type == "off-by-one" else self.softmax_offset
        if (num_splits == 1 or num_splits is None and self.batch_invariant) and not self.training:
            keywords["batch_invariant"] = True
        if self.return_max_logit:
            keywords["return_max_logit"] = True
        if spread is not None:
            o = self._on_ranks(spread, query, key, value, keywords)
        else:
            if self.dropout_p and self.training:
                with self._generator():
                    keywords.update(dropout_p=self.dropout_p, rng_state=_functions.drawn_state(query.device))
            if plan is not None:
                self._plans[plan] = _functions.prepared(**keywords)
            o = _functions.attention(query, key, value, **keywords)
        if not self.return_max_logit:
            return o.flatten(-2)
        o, largest = o
        seen, largest = self.current_max_attn_logits, largest.detach()
        self.current_max_attn_logits = largest if seen is None else seen.maximum(largest)
        return o.flatten(-2)

    def _spread_of(self, p) -> Spread | None:
        """The ranks of a call: the module's, unless packed_seq_params name others."""
        if p is not None and p.cp_group is not None:
            return Spread.of(p.cp_group, self.cp_comm_type)
        if p is None or p.local_cp_size is None:
            return self.spread
        if p.local_cp_size != 1:
            raise Refused(f"{_NAME}: packed_seq_params.local_cp_size={p.local_cp_size}: needs a cp_group beside it")
        return None

    def _on_ranks(self, spread, query, key, value, keywords):
        """Attention of this rank's queries, of keywords of one rank's call."""
        for side, x in (("q", query), ("k", key)):
            lengths = keywords.pop(f"cu_seqlens_{side}", None)
            stored = keywords.pop(f"cu_seqlens_{side}_padded", lengths)
            keywords.pop(f"max_seqlen_{side}", None)
            if lengths is not None:
                shards = cp.Shards.te(read(stored), spread.size, read(lengths))
            else:
                whole = len(x) * spread.size
                shards = cp.Shards.te(range(0, (x.shape[1] + 1) * whole, whole), spread.size)
            keywords["shards" if side == "q" else "shards_k"] = shards
        if not (self.dropout_p and self.training):
            return cp.attention(query, key, value, group=spread.group, exchange=spread.exchange, **keywords)
        with self._generator():  # rank 0's state is everyone's
            return cp.attention(query, key, value, group=spread.group, exchange=spread.exchange,
                                dropout_p=self.dropout_p, **keywords)

    def _band(self, keywords: dict, kind, known: bool):
        """The diagonal: top left as both hosts have it, which is bottom right of as many keys as queries. One query
        beside a cache sees all of it."""
        causal = kind in _CAUSAL and keywords.get("drop") is None
        if self.window is not None:
            left, right = self.window
            keywords.update(window=(left, 0 if kind in _CAUSAL else right), align="bottom_right")
        elif kind is AttnMaskType.causal_bottom_right:
            keywords.update(causal=True, align="bottom_right")
        elif causal and not known:
            raise Refused(f"{_NAME}: attn_mask_type={kind.name}: needs as many keys as queries; "
                          "causal_bottom_right would work")
        elif causal:
            keywords.update(causal=True, align="bottom_right")

    def _generator(self):
        """Megatron's generator of what differs between ranks, as in its own DotProductAttention."""
        tracker = tensor_parallel.get_cuda_rng_tracker()
        return contextlib.nullcontext() if self.config.sequence_parallel or not tracker.is_initialized() else \
            tracker.fork()


class TEDotProductAttention(LocalDotProductAttention):
    """The same with TransformerEngine's meaning of masks."""
    ignores_mask = True


class LocalSpecProvider(local_host.LocalSpecProvider):
    def core_attention(self) -> type:
        return LocalDotProductAttention


class TESpecProvider(te_host.TESpecProvider):
    def core_attention(self) -> type:
        return TEDotProductAttention


class patch:
    """Gives Megatron's providers tessera's core_attention(), from here to remove(), or to the end of the block."""

    def __init__(self):
        _check()
        self._before = []
        for theirs, ours in ((local_host.LocalSpecProvider, LocalSpecProvider),
                             (te_host.TESpecProvider, TESpecProvider)):
            self._before.append((theirs, theirs.core_attention))
            theirs.core_attention = ours.core_attention

    def remove(self):
        """Gives the providers back their own core_attention()."""
        while self._before:
            provider, theirs = self._before.pop()
            provider.core_attention = theirs

    def __enter__(self) -> patch:
        return self

    def __exit__(self, *_):
        self.remove()


def _check():
    """Refuses a Megatron-Core whose DotProductAttention takes what the door does not know."""
    for method in ("__init__", "forward"):
        theirs, ours = (inspect.signature(getattr(owner, method)).parameters
                        for owner in (host.DotProductAttention, LocalDotProductAttention))
        if strange := [name for name in theirs if name not in ours]:
            raise RuntimeError(f"{_NAME}: patch(): DotProductAttention.{method} takes {', '.join(strange)}, which the "
                               f"door does not know; it was tested with megatron-core {TESTED}; install that")


def _groups(cp_comm_type: str, given):
    """The group of context parallelism, of a2a+p2p [a2a, p2p]: those given, or Megatron's."""
    if cp_comm_type == "a2a+p2p":
        return getattr(given, "hcp", None) or parallel_state.get_hierarchical_context_parallel_groups()
    return getattr(given, "cp", None) or parallel_state.get_context_parallel_group()


def _hidden(mask):
    if isinstance(mask, tuple):
        raise Refused(f"{_NAME}: attention_mask=tuple: masks of queries and of keys apart are not built; give one "
                      "[b, 1, sq, sk], True = hidden")
    return mask


def _packed(p) -> dict:
    """Keywords of PackedSeqParams."""
    keywords = {"layout": "thd", "cu_seqlens_q": p.cu_seqlens_q, "cu_seqlens_k": p.cu_seqlens_kv,
                "max_seqlen_q": p.max_seqlen_q, "max_seqlen_k": p.max_seqlen_kv}
    for side, starts, lengths in (("q", p.cu_seqlens_q_padded, p.cu_seqlens_q),
                                  ("k", p.cu_seqlens_kv_padded, p.cu_seqlens_kv)):
        if starts is not None and starts is not lengths and p.pad_between_seqs is not False:
            keywords[f"cu_seqlens_{side}_padded"] = starts
    return keywords
