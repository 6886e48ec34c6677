# SPDX-License-Identifier: Apache-2.0
"""TE's TransformerLayer: MultiheadAttention, a second one for decoders, and an MLP, with residuals.

    layer = TransformerLayer(1024, 4096, 16, attn_input_format="bshd", self_attn_mask_type="causal")
    out = layer(hidden_states)
"""

from __future__ import annotations

import contextlib

import torch
from torch.nn import functional as F

from .._names import missing
from . import _words
from ._linear import FastSetattr, Norm, NormMLP, device_of, in_autocast, unsupported
from .constants import CPLoadBalancingStrategy
from .attention.multi_head_attention import MultiheadAttention

__all__ = ["DropPath", "TransformerLayer"]
__getattr__ = missing(__name__)


class DropPath(torch.nn.Module):
    """Leaves whole samples out of a residual branch (Huang et al., arXiv:1603.09382); axis 0 counts
    them, as TE has it."""

    def __init__(self, drop_prob: float = 0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.drop_prob or not self.training:
            return x
        keep = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x / keep * torch.bernoulli(x.new_full(shape, keep))


class TransformerLayer(FastSetattr, torch.nn.Module):
    """x + attention(norm(x)), then + cross attention for layer_type="decoder", then + MLP(norm(x)).

    Parameters are `self_attention`, `inter_attention` of decoders, `layernorm_mlp` and, with output_layernorm,
    `layernorm`, each with TE's names inside. With apply_residual_connection_post_layernorm the residual is the
    output of the norm; parallel_attention_mlp adds attention and MLP of one input. Arguments that distribute a
    layer or make it FP8 raise NotImplementedErrors.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int,
                 num_gqa_groups: int | None = None, layernorm_epsilon: float = 1e-5,
                 hidden_dropout: float = 0.1, attention_dropout: float = 0.1, init_method=None,
                 output_layer_init_method=None, layer_number: int | None = None,
                 kv_channels: int | None = None, self_attn_mask_type: str = "causal",
                 window_size: tuple[int, int] | None = None,
                 bottom_right_diagonal: bool | None = None, softcap: float = 0.0,
                 enc_dec_attn_mask_type: str = "no_mask",
                 enc_dec_bottom_right_diagonal: bool | None = None,
                 enc_dec_window_size: tuple[int, int] | None = None, tp_group=None, tp_size: int = 1,
                 params_dtype: torch.dtype | None = None, get_rng_state_tracker=None,
                 fuse_wgrad_accumulation: bool = False, seq_length: int | None = None,
                 micro_batch_size: int | None = None, sequence_parallel: bool = False,
                 apply_residual_connection_post_layernorm: bool = False,
                 output_layernorm: bool = False, parallel_attention_mlp: bool = False,
                 layer_type: str = "encoder", drop_path_rate: float = 0.0,
                 set_parallel_mode: bool = False, fuse_qkv_params: bool = False,
                 rotary_pos_interleaved: bool = False,
                 zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True,
                 ub_tp_comm_overlap: bool = False, ub_overlap_ag: bool = True,
                 ub_overlap_rs: bool = True, ub_overlap_rs_dgrad: bool = False,
                 ub_bulk_dgrad: bool = True, ub_bulk_wgrad: bool = True, bias: bool = True,
                 activation: str = "gelu", activation_params: dict | None = None,
                 normalization: str = "LayerNorm", device="cuda",
                 attn_input_format: str = "sbhd", name: str | None = None,
                 qk_norm_type: str | None = None, qk_norm_eps: float = 1e-6,
                 qk_norm_before_rope: bool = False, softmax_type: str = "vanilla",
                 cp_group=None, cp_global_ranks=None, cp_stream=None, cp_comm_type: str = "p2p"):
        super().__init__()
        unsupported("TransformerLayer", tp_size=tp_size if tp_size > 1 else None,
                    sequence_parallel=sequence_parallel,
                    fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                    ub_tp_comm_overlap=ub_tp_comm_overlap)
        if layer_type not in ("encoder", "decoder"):
            raise ValueError(f'TransformerLayer: layer_type={layer_type!r}: must be "encoder" or "decoder"')
        if parallel_attention_mlp and (layer_type == "decoder" or output_layernorm or
                                       apply_residual_connection_post_layernorm):
            raise ValueError("TransformerLayer: parallel_attention_mlp=True: belongs to an encoder layer "
                             "without output_layernorm and apply_residual_connection_post_layernorm")
        self.layer_type, self.name = layer_type, name
        self.output_layernorm = output_layernorm
        self.residual_after_norm = apply_residual_connection_post_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.self_attn_mask_type, self.window_size = self_attn_mask_type, window_size
        self.enc_dec_attn_mask_type = enc_dec_attn_mask_type
        self.enc_dec_window_size = enc_dec_window_size
        self.hidden_dropout = _words.dropout(hidden_dropout)
        tracker = get_rng_state_tracker() if get_rng_state_tracker is not None else None
        self._dropout_ctx = tracker.fork if tracker is not None else contextlib.nullcontext

        factory = {"device": device_of(device), "dtype": params_dtype or torch.get_default_dtype()}
        norm = dict(normalization=normalization, zero_centered_gamma=zero_centered_gamma)
        init = dict(init_method=init_method, output_layer_init_method=output_layer_init_method)
        attention = dict(
            hidden_size=hidden_size, num_attention_heads=num_attention_heads,
            kv_channels=kv_channels, attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon, layer_number=layer_number,
            num_gqa_groups=num_gqa_groups, get_rng_state_tracker=get_rng_state_tracker,
            params_dtype=params_dtype, return_layernorm_output=self.residual_after_norm,
            fuse_qkv_params=fuse_qkv_params, qkv_weight_interleaved=qkv_weight_interleaved,
            bias=bias, device=device, qkv_format=attn_input_format, return_bias=True,
            qk_norm_type=qk_norm_type, qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope, softmax_type=softmax_type,
            rotary_pos_interleaved=rotary_pos_interleaved, cp_group=cp_group,
            cp_global_ranks=cp_global_ranks, cp_stream=cp_stream, cp_comm_type=cp_comm_type,
            softcap=softcap, **norm, **init)
        self.self_attention = MultiheadAttention(
            **attention, input_layernorm=not output_layernorm, attn_mask_type=self_attn_mask_type,
            window_size=window_size, bottom_right_diagonal=bottom_right_diagonal)
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                **attention, input_layernorm=True, attention_type="cross",
                attn_mask_type=enc_dec_attn_mask_type, window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal)
        self.layernorm_mlp = NormMLP(hidden_size, ffn_hidden_size, layernorm_epsilon,
                                     activation=activation,
                                     activation_params=activation_params, bias=bias, **init, **norm, **factory)
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0 else None
        self.layernorm = Norm(hidden_size, layernorm_epsilon, **norm, **factory) \
            if output_layernorm else None

    def set_tensor_parallel_group(self, tp_group):
        for attention in self._attentions():
            attention.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p",
                                   load_balancing_strategy=CPLoadBalancingStrategy.DUAL_CHUNK_SWAP):
        """As MultiheadAttention's, of each attention of the layer."""
        for attention in self._attentions():
            attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type,
                                                 load_balancing_strategy)

    def reset_fp8_meta_tensors(self):
        """Scales of one and no amaxes, for the attentions of the layer."""
        for attention in self._attentions():
            attention.core_attention.reset_fp8_meta_tensors()

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, self_attn_mask_type=None,
                window_size=None, bottom_right_diagonal=None, encoder_output=None,
                enc_dec_attn_mask=None, enc_dec_attn_mask_type=None, enc_dec_window_size=None,
                enc_dec_bottom_right_diagonal=None, is_first_microbatch=None,
                checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None,
                core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None,
                cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
                cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
                fast_zero_fill=True, pad_between_seqs=None, thd_attention_policies=None,
                thd_attention_policy_dispatch="auto", softcap=None):
        """hidden_states [s, b, hidden_size] (or as attn_input_format has it) -> the same shape.
        encoder_output, enc_dec_*, and cu_seqlens_kv and its like, belong to the cross attention of decoders; self
        attention has cu_seqlens_q for both sides. The other arguments are MultiheadAttention's, of both attentions.
        Under autocast the residual, and what comes back, have its dtype."""
        if self.layer_type == "decoder" and inference_params is not None and rotary_pos_emb is not None:
            raise NotImplementedError(
                "TransformerLayer: rotary_pos_emb beside inference_params, of a decoder: its cross attention keeps no "
                "cache that says at which position a step begins; call two MultiheadAttentions")
        hidden_states = in_autocast(hidden_states)
        common = dict(is_first_microbatch=is_first_microbatch,
                      checkpoint_core_attention=checkpoint_core_attention,
                      core_attention_bias_type=core_attention_bias_type,
                      core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes, softcap=softcap,
                      rotary_pos_emb=rotary_pos_emb, pad_between_seqs=pad_between_seqs)
        attended = self.self_attention(
            hidden_states, attention_mask, attn_mask_type=self_attn_mask_type,
            window_size=window_size, bottom_right_diagonal=bottom_right_diagonal,
            inference_params=inference_params, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_q,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_q_padded,
            max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_q,
            thd_attention_policies=thd_attention_policies,
            thd_attention_policy_dispatch=thd_attention_policy_dispatch, **common)
        if self.parallel_attention_mlp:
            mlp, mlp_bias, _ = self.layernorm_mlp(hidden_states)
            both = _with_bias(attended[0], attended[1]) + _with_bias(mlp, mlp_bias)
            return self._added(both, None, hidden_states)
        x = self._joined(attended, hidden_states)
        if self.layer_type == "decoder":
            x = self._joined(self.inter_attention(
                x, enc_dec_attn_mask, encoder_output, enc_dec_attn_mask_type, enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal, cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_kv=cu_seqlens_kv, cu_seqlens_q_padded=cu_seqlens_q_padded,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_q=max_seqlen_q,
                max_seqlen_kv=max_seqlen_kv, **common), x, whole=True)
        mlp, mlp_bias, normed = self.layernorm_mlp(x)
        x = self._added(mlp, mlp_bias, normed if self.residual_after_norm else x)
        return x if self.layernorm is None else self.layernorm(x)

    # ---- below: how ----

    def _attentions(self):
        return [module for module in self.modules() if isinstance(module, MultiheadAttention)]

    def _joined(self, attended, residual, whole: bool = False):
        """The outputs of an attention, added to the residual, or to what its norm gave."""
        output, bias, *normed = attended
        return self._added(output, bias, normed[0] if normed else residual, whole)

    def _added(self, x, bias, residual, whole: bool = False):
        """`whole` leaves no sample out: TE's cross attention has no drop path."""
        x = _with_bias(x, bias)
        if self.hidden_dropout and self.training:
            with self._dropout_ctx():
                x = F.dropout(x, self.hidden_dropout)
        return residual + (x if self.drop_path is None or whole else self.drop_path(x))


def _with_bias(x, bias):
    return x if bias is None else x + bias.to(x.dtype)
