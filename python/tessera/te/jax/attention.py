# SPDX-License-Identifier: Apache-2.0
"""TE-JAX's functional attention.

    out = fused_attn((q, k, v), None, SequenceDescriptor.from_seqlens(lengths), seed,
                     AttnBiasType.NO_BIAS, AttnMaskType.PADDING_CAUSAL_MASK,
                     QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX,
                     scaling_factor=0.125, dropout_probability=0.0, is_training=True)

Shapes are [b, s, h, d], also for THD layouts, whose rows hold several sequences. docs/te.md says what differs
from TransformerEngine.
"""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from . import _context_parallel, _translate, _words
from . import cpp_extensions as tex
from ._enums import (AttnBiasType, AttnMaskType, AttnSoftmaxType, CPStrategy, QKVFormat, QKVLayout,
                     ReorderStrategy, canonicalize_attn_mask_type)
from ._reorder import inverse_reorder_causal_load_balancing, reorder_causal_load_balancing
from ._sequences import (SequenceDescriptor, make_swa_mask, run_length_fill,
                         run_length_fill_flattened)
from ._words import error, missing

__all__ = ["AttnBiasType", "AttnMaskType", "AttnSoftmaxType", "CPStrategy", "QKVFormat",
           "QKVLayout", "ReorderStrategy", "SequenceDescriptor", "canonicalize_attn_mask_type",
           "fused_attn", "fused_attn_thd", "inverse_reorder_causal_load_balancing",
           "is_fused_attn_kernel_available", "make_swa_mask", "reorder_causal_load_balancing",
           "run_length_fill", "run_length_fill_flattened"]
__getattr__ = missing(__name__)


def is_fused_attn_kernel_available(is_training, batch_size, q_dtype, kv_dtype, qkv_layout, attn_bias_type,
                                   attn_mask_type, softmax_type, dropout_probability, q_num_heads,
                                   kv_num_heads, q_max_seqlen, kv_max_seqlen, head_dim_qk,
                                   head_dim_v, window_size=None, return_max_logit=False,
                                   bottom_right_diagonal=None, bias_batch=None, bias_heads=None,
                                   bias_seqlen_q=None, bias_seqlen_kv=None, max_segments_per_seq=1):
    """Whether libtessera has a backend on JAX's device; if not, NVTE_DEBUG logs why. attn_mask_type says where
    the diagonal is."""
    return tex.FusedAttnHelper(
        is_training=is_training, batch_size=batch_size, q_dtype=q_dtype, kv_dtype=kv_dtype, qkv_layout=qkv_layout,
        attn_bias_type=attn_bias_type, attn_mask_type=attn_mask_type, softmax_type=softmax_type,
        dropout_probability=dropout_probability, q_num_heads=q_num_heads, kv_num_heads=kv_num_heads,
        q_max_seqlen=q_max_seqlen, kv_max_seqlen=kv_max_seqlen, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v,
        window_size=_words.window(window_size), return_max_logit=return_max_logit,
        bottom_right_diagonal=attn_mask_type.is_bottom_right() if bottom_right_diagonal is None else
        bottom_right_diagonal, bias_batch=bias_batch, bias_heads=bias_heads, bias_seqlen_q=bias_seqlen_q,
        bias_seqlen_kv=bias_seqlen_kv, max_segments_per_seq=max_segments_per_seq).is_fused_attn_kernel_available()


def fused_attn(qkv, bias, sequence_descriptor, seed, attn_bias_type, attn_mask_type, qkv_layout,
               softmax_type, scaling_factor, dropout_probability, is_training,
               max_segments_per_seq=1, window_size=None,
               context_parallel_strategy=CPStrategy.DEFAULT,
               context_parallel_causal_load_balanced=False, context_parallel_axis="",
               context_checkpoint_name="context", softmax_offset=None, stripe_size=None,
               score_mod=None, score_mod_bprop=None, score_mod_tensors=None,
               score_mod_bprop_tensors=None, return_max_logit=False):
    """Attention, differentiable in qkv, bias and softmax_offset.

    qkv                   a tuple: (qkv [b, s, 3, h, d],), (q [b, s, h, d], kv [b, s, 2, h, d]) or
                          (q, k, v), as qkv_layout says; float32, bfloat16 or float16
    bias                  broadcastable to [b, h, sq, skv], or None
    sequence_descriptor   a SequenceDescriptor, or for BSHD a mask broadcastable to [b, h, sq, skv],
                          True = hidden; read by padding masks only, which need it
    seed                  uint32, its first two words, or a JAX key; needed with dropout
    max_segments_per_seq  how many sequences a row of THD may hold; static
    window_size           (left, right) keys that a query sees; negative is unbounded
    softmax_offset        fp32 [1, h, 1, 1], for AttnSoftmaxType.LEARNABLE_SOFTMAX

    Returns [b, s, h, dv] of q's dtype, zero where there is no token; with return_max_logit a pair with the
    largest logit of each head, [h]. Outputs that gradients need are named context_checkpoint_name for
    jax.checkpoint's policies. ValueError: arguments that contradict one another. Refused: score_mod, a bias with
    THD, and for sequences that are split over devices what docs/te.md lists.
    """
    _words.no_score_mod("fused_attn", score_mod=score_mod, score_mod_bprop=score_mod_bprop,
                        score_mod_tensors=score_mod_tensors,
                        score_mod_bprop_tensors=score_mod_bprop_tensors)
    if not isinstance(sequence_descriptor, SequenceDescriptor):
        warnings.warn("fused_attn: a mask, or None, for sequence_descriptor is deprecated; pass a "
                      "SequenceDescriptor", DeprecationWarning, stacklevel=2)
        if max_segments_per_seq != 1:
            raise error("max_segments_per_seq", max_segments_per_seq, "must be 1 without a "
                        "SequenceDescriptor")
    config = tex.attention.config_of(
        attn_bias_type, attn_mask_type, softmax_type, qkv_layout, scaling_factor,
        dropout_probability, is_training, max_segments_per_seq, window_size,
        context_parallel_strategy, context_parallel_causal_load_balanced, context_parallel_axis,
        stripe_size, return_max_logit)
    if max_segments_per_seq > 1 and not config.is_thd:
        warnings.warn(f"fused_attn: max_segments_per_seq={max_segments_per_seq} has no effect with "
                      f"{config.qkv_layout.name}", UserWarning, stacklevel=2)
    words = _translate.rng_words(seed, config.dropout_p)
    axis = _context_parallel.axis_of(context_parallel_axis)
    if axis is not None and _context_parallel.goes_by_keys(config, bias):
        out, *max_logit = (checkpoint_name(x, context_checkpoint_name) for x in
                           _context_parallel.attention(config, axis, qkv, softmax_offset, words))
        return (out, *max_logit) if return_max_logit else out
    qkv, whole = tuple(qkv), None
    if axis is not None:
        whole = _context_parallel.Whole(config, axis, qkv, bias, sequence_descriptor)
        qkv, sequence_descriptor = whole.qkv, whole.sequences
    out, *max_logit = _fused_attn(config, context_checkpoint_name, qkv, bias, softmax_offset, sequence_descriptor,
                                  words)
    out = out if whole is None else whole.split(out)
    return (out, *max_logit) if return_max_logit else out


def fused_attn_thd(qkv, bias, q_seq_lens, kv_seq_lens, q_seq_offsets, kv_seq_offsets, seed,
                   attn_bias_type, attn_mask_type, qkv_layout, scaling_factor, dropout_probability,
                   is_training, max_segments_per_seq=1, window_size=None,
                   context_parallel_strategy=CPStrategy.DEFAULT,
                   context_parallel_causal_load_balanced=False, context_parallel_axis="",
                   softmax_offset=None, return_max_logit=False):
    """fused_attn of a THD layout by lengths [b, s] and offsets [b, s + 1]; TE has deprecated it."""
    warnings.warn("fused_attn_thd is deprecated; call fused_attn with a SequenceDescriptor",
                  DeprecationWarning, stacklevel=2)
    if not QKVLayout(qkv_layout).is_thd():
        raise error("qkv_layout", qkv_layout, "must be a THD layout; fused_attn takes the others",
                    "fused_attn_thd")
    descriptor = SequenceDescriptor.from_seqlens_and_offsets((q_seq_lens, kv_seq_lens),
                                                             (q_seq_offsets, kv_seq_offsets))
    softmax_type = AttnSoftmaxType.VANILLA_SOFTMAX if softmax_offset is None else \
        AttnSoftmaxType.LEARNABLE_SOFTMAX
    return fused_attn(qkv, bias, descriptor, seed, attn_bias_type, attn_mask_type, qkv_layout,
                      softmax_type, scaling_factor, dropout_probability, is_training,
                      max_segments_per_seq, window_size, context_parallel_strategy,
                      context_parallel_causal_load_balanced, context_parallel_axis,
                      softmax_offset=softmax_offset, return_max_logit=return_max_logit)


# tessera.jax.attention has gradients of its own; these save under the name that the caller gave.

@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused_attn(config, name: str, qkv, bias, softmax_offset, sequences, words):
    out, _, _, *max_logit = tex.attention.forward(config, qkv, bias, softmax_offset, sequences,
                                                  words)
    return out, *max_logit


def _forward(config, name: str, *arguments):
    qkv, bias, softmax_offset = arguments[:3]
    # As in tessera.jax: what is wanted may be in the shape of a residual, not in their structure.
    bits = sum(1 << i for i, x in enumerate((*qkv, bias, softmax_offset))
               if x is not None and x.perturbed)
    values = jax.tree.map(lambda x: x.value, arguments, is_leaf=lambda x: hasattr(x, "perturbed"))
    out, aux, words, *max_logit = (checkpoint_name(x, name)
                                   for x in tex.attention.forward(config, *values))
    return (out, *max_logit), (values[:4], words, out, aux, jnp.zeros((bits, 0), bool))


def _backward(config, name: str, residuals, cotangents):
    (qkv, bias, softmax_offset, sequences), words, out, aux, bits = residuals
    wanted = [bool(bits.shape[0] >> i & 1) for i in range(len(qkv) + 2)]
    wanted[-1] &= config.softmax_type == AttnSoftmaxType.LEARNABLE_SOFTMAX
    if isinstance(cotangents[0], SymbolicZero):
        wanted = [False] * len(wanted)
    dqkv, dbias, d_offset = tex.attention.backward(
        config, wanted, qkv, bias, softmax_offset, aux, words, out, cotangents[0], sequences)
    return dqkv, dbias, d_offset, None, None


_fused_attn.defvjp(_forward, _backward, symbolic_zeros=True)
