# SPDX-License-Identifier: Apache-2.0
"""TE's MultiheadAttention: projections round DotProductAttention, with TE's parameters.

    attention = MultiheadAttention(1024, 16, qkv_format="bshd", input_layernorm=True)
    out = attention(hidden_states)                                            # as hidden_states

It uses PyTorch's linear layers on one device: tensor and sequence parallelism, userbuffers and FP8 are refused by
name.
"""

from __future__ import annotations

import torch

from ..._names import missing
from .. import _words
from ..constants import CPLoadBalancingStrategy
from .._linear import FastSetattr, Linear, Norm, NormLinear, device_of, unsupported
from .dot_product_attention import DotProductAttention
from .dot_product_attention.context_parallel import Spread
from .rope import apply_rotary_pos_emb

__all__ = ["MultiheadAttention"]
__getattr__ = missing(__name__)


class _L2Norm(torch.nn.Module):
    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


class MultiheadAttention(FastSetattr, torch.nn.Module):
    """softmax(q kᵀ) v of projections of hidden_states [s, b, hidden_size] (qkv_format "bshd": [b, s, ..],
    "thd": [t, ..]), projected back.

    Parameters, as TE names them: `qkv` or, with input_layernorm, `layernorm_qkv`, of one weight in groups
    of heads (fuse_qkv_params; qkv_weight_interleaved: g · (q .. q k v), else all of q, of k, of v) or of
    `query_weight`, `key_weight`, `value_weight`; for attention_type="cross" `query_layer` or
    `layernorm_query`, and `key_value`; `proj`; `q_norm` and `k_norm` of qk_norm_type. The other arguments
    are DotProductAttention's and TE's, those of context parallelism (cp_group, ...) among them.
    """

    def __init__(self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None,
                 attention_dropout: float = 0.1, layernorm_epsilon: float = 1e-5, init_method=None,
                 output_layer_init_method=None, layer_number: int | None = None,
                 attn_mask_type: str = "causal", window_size: tuple[int, int] | None = None,
                 bottom_right_diagonal: bool | None = None, softcap: float = 0.0, tp_group=None,
                 tp_size: int = 1, num_gqa_groups: int | None = None,
                 fuse_wgrad_accumulation: bool = False, get_rng_state_tracker=None,
                 sequence_parallel: bool = False, params_dtype: torch.dtype | None = None,
                 return_bias: bool = False, return_layernorm_output: bool = False,
                 input_layernorm: bool = False, attention_type: str = "self",
                 set_parallel_mode: bool = False, fuse_qkv_params: bool = False,
                 zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True,
                 rotary_pos_interleaved: bool = False,
                 ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
                 ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False,
                 ub_bulk_wgrad: bool = False, bias: bool = True, normalization: str = "LayerNorm",
                 device="cuda", qkv_format: str = "sbhd", name: str | None = None,
                 qk_norm_type: str | None = None, qk_norm_eps: float = 1e-6,
                 qk_norm_before_rope: bool = False, seq_length: int | None = None,
                 micro_batch_size: int | None = None, softmax_type: str = "vanilla", cp_group=None,
                 cp_global_ranks=None, cp_stream=None, cp_comm_type: str = "p2p"):
        super().__init__()
        unsupported("MultiheadAttention", tp_size=tp_size if tp_size > 1 else None,
                    sequence_parallel=sequence_parallel,
                    fuse_wgrad_accumulation=fuse_wgrad_accumulation, ub_overlap_ag=ub_overlap_ag,
                    ub_overlap_rs=ub_overlap_rs, ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
                    ub_bulk_dgrad=ub_bulk_dgrad, ub_bulk_wgrad=ub_bulk_wgrad)
        if attention_type not in ("self", "cross"):
            raise ValueError(f'MultiheadAttention: attention_type={attention_type!r}: must be "self" or '
                             '"cross"')
        if layer_number is not None and layer_number < 1:
            raise ValueError(f"MultiheadAttention: layer_number={layer_number}: must be at least 1")
        self.attention_type, self.name = attention_type, name
        self.qkv_format = _words.qkv_format(qkv_format)
        self.layer_number = 1 if layer_number is None else layer_number
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.heads = num_attention_heads
        self.groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.kv_channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params

        factory = {"device": device_of(device), "dtype": params_dtype or torch.get_default_dtype()}
        self._projections(hidden_size, fuse_qkv_params, layernorm_epsilon, factory,
                          dict(bias=bias, init_method=init_method),
                          dict(normalization=normalization, zero_centered_gamma=zero_centered_gamma))
        self.core_attention = DotProductAttention(
            num_attention_heads, self.kv_channels, num_gqa_groups=self.groups,
            attention_dropout=attention_dropout, qkv_format=qkv_format,
            attn_mask_type=attn_mask_type, window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal, softcap=softcap,
            get_rng_state_tracker=get_rng_state_tracker, layer_number=self.layer_number,
            attention_type=attention_type, softmax_type=softmax_type)
        self.proj = Linear(num_attention_heads * self.kv_channels, hidden_size, bias,
                           output_layer_init_method, **factory)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.qk_norm_before_rope = qk_norm_before_rope
        self.q_norm, self.k_norm = (self._head_norm(qk_norm_type, qk_norm_eps, factory) for _ in range(2))

    def set_tensor_parallel_group(self, tp_group):
        """A group of one rank is none."""
        if tp_group is not None and torch.distributed.get_world_size(tp_group) > 1:
            unsupported("MultiheadAttention", tp_group=tp_group)

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p",
                                   load_balancing_strategy=CPLoadBalancingStrategy.DUAL_CHUNK_SWAP):
        """After this call, hidden_states hold this rank's rows of sequences on the ranks of cp_group, in TE's two
        chunks. Rotary embeddings use positions in the whole sequence. cp_group=None ends that."""
        spread = Spread.of(cp_group, cp_comm_type, load_balancing_strategy)
        self.cp_load_balancing_strategy = load_balancing_strategy
        self.cp_size, self.cp_rank = (1, 0) if spread is None else (spread.size, spread.rank)
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream,
                                                       cp_comm_type, load_balancing_strategy)

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, encoder_output=None,
                attn_mask_type=None, window_size=None, bottom_right_diagonal=None,
                is_first_microbatch=None, checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None,
                core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None,
                cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
                cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
                fast_zero_fill=True, pad_between_seqs=None, thd_attention_policies=None,
                thd_attention_policy_dispatch="auto", softcap=None):
        """Returns the output [.., hidden_size]; with return_bias also proj's bias, which then is not added; with
        return_layernorm_output also the output of the input's norm. encoder_output [sk, b, hidden_size] holds
        keys and values of "cross". rotary_pos_emb is freqs of RotaryPositionEmbedding, or a pair for q and k.
        is_first_microbatch is for FP8 weights, and has no effect."""
        if inference_params is not None and self.layer_number not in inference_params.cache_manager.cache:
            inference_params.allocate_memory(self.layer_number)
        q, k, v, normed = self._heads(hidden_states, encoder_output)
        if self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            q, k = self._rotated(q, k, rotary_pos_emb, inference_params,
                                 (cu_seqlens_q_padded if cu_seqlens_q_padded is not None else cu_seqlens_q,
                                  cu_seqlens_kv_padded if cu_seqlens_kv_padded is not None else
                                  cu_seqlens_kv))
        if not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        context = self.core_attention(
            q, k, v, attention_mask, attn_mask_type=attn_mask_type, window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv, cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv, checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
            inference_params=inference_params, pad_between_seqs=pad_between_seqs,
            thd_attention_policies=thd_attention_policies,
            thd_attention_policy_dispatch=thd_attention_policy_dispatch, softcap=softcap)
        outputs = [self.proj(context, not self.return_bias)]
        if self.return_bias:
            outputs.append(self.proj.bias)
        if self.input_layernorm and self.return_layernorm_output:
            outputs.append(normed)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    # ---- below: how ----

    def _projections(self, hidden_size: int, fuse: bool, eps: float, factory, linear, norm):
        q, kv = self.heads * self.kv_channels, self.groups * self.kv_channels
        widths = {"query": q, "key": kv, "value": kv}

        def projection(name: str, *parts: str, normed: bool):
            split = None if fuse or not normed and len(parts) == 1 else {part: widths[part] for part in parts}
            out = sum(widths[part] for part in parts)
            module = NormLinear(hidden_size, out, eps, split=split, **linear, **norm, **factory) \
                if normed else Linear(hidden_size, out, split=split, **linear, **factory)
            self.add_module(name, module)

        normed = self.input_layernorm
        if self.attention_type == "self":
            projection("layernorm_qkv" if normed else "qkv", *widths, normed=normed)
        else:
            projection("layernorm_query" if normed else "query_layer", "query", normed=normed)
            projection("key_value", "key", "value", normed=False)

    def _head_norm(self, kind: str | None, eps: float, factory):
        """The norm of each head of q or k, whose weight is never zero-centred, as TE has it."""
        if kind is None:
            return torch.nn.Identity()
        if kind == "L2Normalization":
            return _L2Norm(eps)
        if kind not in ("RMSNorm", "LayerNorm"):
            raise ValueError(f'MultiheadAttention: qk_norm_type={kind!r}: must be "L2Normalization", '
                             '"RMSNorm", "LayerNorm" or None')
        return Norm(self.kv_channels, eps, kind, **factory)

    def _heads(self, x, encoder_output):
        """q [.., heads, d], k, v [.., groups, d], and the input after its norm."""
        first = getattr(self, {("self", True): "layernorm_qkv", ("self", False): "qkv",
                               ("cross", True): "layernorm_query",
                               ("cross", False): "query_layer"}[self.attention_type,
                                                                self.input_layernorm])
        projected, normed = first(x) if self.input_layernorm else (first(x), x)
        if self.attention_type == "self":
            q, k, v = self._apart(projected, (self.heads // self.groups, 1, 1))
        else:
            if encoder_output is None:
                raise ValueError('MultiheadAttention: encoder_output=None: attention_type="cross" needs '
                                 "it: keys and values are projections of it")
            q = projected.unflatten(-1, (self.heads, self.kv_channels))
            k, v = self._apart(self.key_value(encoder_output), (1, 1))
        return q, k, v, normed

    def _apart(self, projected, counts: tuple[int, ...]):
        """One tensor [.., n · groups · d] -> one [.., heads, d] for each of `counts` heads a group."""
        d = self.kv_channels
        if self.qkv_weight_interleaved:
            parts = projected.unflatten(-1, (self.groups, sum(counts), d)).split(counts, -2)
            return [part.flatten(-3, -2) for part in parts]
        heads = projected.unflatten(-1, (-1, d))
        return heads.split([count * self.groups for count in counts], -2)

    def _rotated(self, q, k, rotary_pos_emb, inference_params, cu_seqlens):
        if self.cp_size > 1 and self.cp_load_balancing_strategy is CPLoadBalancingStrategy.NO_LOAD_BALANCE:
            raise _words.later("rotary_pos_emb", "...", "rotary embeddings of a rank's one chunk of a packed batch",
                        "use DUAL_CHUNK_SWAP, or tessera.torch.rotate with Shards.cut(..).positions(rank) and "
                        "DotProductAttention")
        freqs = rotary_pos_emb if isinstance(rotary_pos_emb, (tuple, list)) else (rotary_pos_emb,) * 2
        start = None if inference_params is None else \
            inference_params.starts(inference_params.rows(k, self.qkv_format))
        if inference_params is not None and self.qkv_format == "thd":
            cu_seqlens = (inference_params.cu_seqlens_q[:inference_params.batch_size + 1],) * 2
        return [apply_rotary_pos_emb(x, angles, self.qkv_format, start, self.rotary_pos_interleaved,
                                     True, lengths if self.qkv_format == "thd" else None,
                                     self.cp_size, self.cp_rank)
                for x, angles, lengths in zip((q, k), freqs, cu_seqlens)]
