# SPDX-License-Identifier: Apache-2.0
"""TE-JAX's fused attention, forward and backward, without gradients of its own.

    out, softmax_aux, rng_state, max_logit = fused_attn_fwd(
        (q, k, v), bias, softmax_offset, descriptor, seed, ...)
    (dq, dk, dv), dbias, d_softmax_offset = fused_attn_bwd(
        (q, k, v), bias, softmax_offset, softmax_aux, rng_state, out, d_out, descriptor, ...)

softmax_aux is the fp32 log-sum-exp, [b, h, s, 1], of THD layouts [b * s, h, 1]; rng_state is uint32
[4], the words of the mask's seed and offset. Gradients of packed arrays are packed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .... import jax as tessera_jax
from .. import _context_parallel, _translate
from .._enums import AttnBiasType, AttnSoftmaxType, CPStrategy
from .._numbers import FusedAttnBackwardFFI, FusedAttnForwardFFI
from .._reorder import reorder_causal_dual_chunk_swap, reorder_causal_striped
from .._sequences import SequenceDescriptor
from .._translate import Config as _FusedAttnConfig
from .._words import missing
from ._helper import FusedAttnHelper, FusedAttnParams

__all__ = ["FusedAttnBwdPrimitive", "FusedAttnFwdPrimitive", "FusedAttnHelper", "FusedAttnParams",
           "adjust_cp_striped_window_size", "fused_attn_bwd", "fused_attn_fwd", "generate_cu_seqlen",
           "reorder_causal_dual_chunk_swap", "reorder_causal_striped"]
__getattr__ = missing(__name__)


def config_of(attn_bias_type, attn_mask_type, softmax_type, qkv_layout, scaling_factor,
              dropout_probability, is_training, max_segments_per_seq=1, window_size=None,
              context_parallel_strategy=CPStrategy.DEFAULT,
              context_parallel_causal_load_balanced=False, context_parallel_axis="",
              stripe_size=None, return_max_logit=False) -> _FusedAttnConfig:
    """The config that TE's arguments make."""
    deterministic = None if FusedAttnHelper.is_non_deterministic_allowed() else True
    return _FusedAttnConfig(
        attn_bias_type, attn_mask_type, softmax_type, qkv_layout, scaling_factor,
        dropout_probability, is_training, max_segments_per_seq, window_size,
        context_parallel_causal_load_balanced, context_parallel_axis, context_parallel_strategy,
        stripe_size, return_max_logit, deterministic)


def generate_cu_seqlen(actual_seqlen):
    """[b + 1] from 0 up; a negative length counts as 0."""
    return jnp.cumulative_sum(jnp.maximum(actual_seqlen, 0), include_initial=True)


def adjust_cp_striped_window_size(q_pos0, kv_pos0, cp_size, window_size):
    """(left, right) in steps of cp_size, of a window in tokens, between queries at q_pos0, q_pos0 + cp_size, ... and
    keys at kv_pos0, kv_pos0 + cp_size, ... Where the diagonal itself is hidden, left counts from behind it."""
    ahead = kv_pos0 - q_pos0
    left, right = (window_size[0] + ahead) // cp_size, (window_size[1] - ahead) // cp_size
    return max(left, 0) - (kv_pos0 > q_pos0), max(right, 0)


def fused_attn_fwd(qkv, bias, softmax_offset, sequence_descriptor, seed, attn_bias_type,
                   attn_mask_type, softmax_type, qkv_layout, scaling_factor, dropout_probability,
                   is_training, max_segments_per_seq, window_size=None,
                   context_parallel_strategy=CPStrategy.DEFAULT,
                   context_parallel_causal_load_balanced=False, context_parallel_axis="",
                   stripe_size=None, return_max_logit=False):
    """(out [b, s, h, dv], softmax_aux, rng_state, max_logit), the last [h], or [0] unless return_max_logit.
    Without training there is no dropout. sequence_descriptor may be a mask of what is hidden, or None."""
    config = config_of(attn_bias_type, attn_mask_type, softmax_type, qkv_layout, scaling_factor,
                       dropout_probability, is_training, max_segments_per_seq, window_size,
                       context_parallel_strategy, context_parallel_causal_load_balanced,
                       context_parallel_axis, stripe_size, return_max_logit)
    words = _translate.rng_words(seed, config.dropout_p)
    return _with_max_logit(*split_forward(config, qkv, bias, softmax_offset, sequence_descriptor, words))


def fused_attn_bwd(qkv, bias, softmax_offset, softmax_aux, rng_state, output, doutput,
                   sequence_descriptor, attn_bias_type, attn_mask_type, qkv_layout, softmax_type,
                   scaling_factor, dropout_probability, is_training, max_segments_per_seq,
                   window_size=None, context_parallel_strategy=CPStrategy.DEFAULT,
                   context_parallel_causal_load_balanced=False, context_parallel_axis="",
                   stripe_size=None):
    """(gradients of qkv, dbias, d_softmax_offset); None for what has none."""
    config = config_of(attn_bias_type, attn_mask_type, softmax_type, qkv_layout, scaling_factor,
                       dropout_probability, is_training, max_segments_per_seq, window_size,
                       context_parallel_strategy, context_parallel_causal_load_balanced,
                       context_parallel_axis, stripe_size)
    wanted = [True] * len(qkv) + [config.attn_bias_type != AttnBiasType.NO_BIAS,
                                  config.softmax_type == AttnSoftmaxType.LEARNABLE_SOFTMAX]
    return split_backward(config, wanted, qkv, bias, softmax_offset, softmax_aux, rng_state, output,
                          doutput, sequence_descriptor)


def split_forward(config: _FusedAttnConfig, qkv, bias, softmax_offset, sequences, words):
    """forward, of sequences that may be split over a mesh axis; softmax_aux is then of whole sequences."""
    axis = _context_parallel.axis_of(config.cp_axis)
    if axis is None:
        return forward(config, qkv, bias, softmax_offset, sequences, words)
    whole = _context_parallel.Whole(config, axis, qkv, bias, sequences)
    out, *rest = forward(config, whole.qkv, bias, softmax_offset, whole.sequences, words)
    return whole.split(out), *rest


def split_backward(config: _FusedAttnConfig, wanted, qkv, bias, softmax_offset, softmax_aux, words, output, doutput,
                   sequences):
    """backward, as split_forward is forward."""
    axis = _context_parallel.axis_of(config.cp_axis)
    if axis is None:
        return backward(config, wanted, qkv, bias, softmax_offset, softmax_aux, words, output, doutput, sequences)
    whole = _context_parallel.Whole(config, axis, qkv, bias, sequences)
    dqkv, *rest = backward(config, wanted, whole.qkv, bias, softmax_offset, softmax_aux, words, whole.joined(output),
                           whole.joined(doutput), whole.sequences)
    return tuple(None if x is None else whole.split(x) for x in dqkv), *rest


def forward(config: _FusedAttnConfig, qkv, bias, softmax_offset, sequences, words):
    """What fused_attn_fwd returns."""
    given = _translate.arguments(config, qkv, bias, softmax_offset, sequences, words)
    o, lse, *max_logit = tessera_jax.attention(**given, return_lse=True,
                                               return_max_logit=config.return_max_logit)
    b, s = qkv[0].shape[:2]
    aux = (lse.T if config.is_thd else lse)[..., None]
    return (o.reshape(b, s, *o.shape[-2:]), aux, words,
            *(x.astype(o.dtype) for x in max_logit))


def backward(config: _FusedAttnConfig, wanted, qkv, bias, softmax_offset, softmax_aux, words,
             output, doutput, sequences):
    """What fused_attn_bwd returns; `wanted` says for each of qkv, bias and softmax_offset whether
    its gradient is."""
    given = _translate.arguments(config, qkv, bias, softmax_offset, sequences, words)
    lse = softmax_aux[..., 0]
    if config.is_thd:
        lse = lse.reshape(-1, lse.shape[-1]).T
        output, doutput = (x.reshape(-1, *x.shape[2:]) for x in (output, doutput))
    # Which of qkv the gradients of q, k and v are in.
    of = {1: (0, 0, 0), 2: (0, 1, 1), 3: (0, 1, 2)}[len(qkv)]
    names = [name for name, i in zip(("dq", "dk", "dv"), of) if wanted[i]]
    names += ["dbias"] * wanted[-2] + ["dsink"] * wanted[-1]
    if not names:
        return (None,) * len(qkv), None, None
    grads = tessera_jax.attention_backward(doutput, o=output, lse=lse, grads=tuple(names), **given)
    dqkv = [None] * len(qkv)
    for name, i in zip(("dq", "dk", "dv"), of):
        if wanted[i]:
            dqkv[i] = getattr(grads, name).reshape(qkv[i].shape)
    d_offset = None
    if wanted[-1]:
        d_offset = grads.dsink.reshape(softmax_offset.shape).astype(softmax_offset.dtype)
    return tuple(dqkv), grads.dbias, d_offset


class _Primitive:
    """One of TE's primitives: `impl` on TE's operands, none of which is None."""
    multiple_results = True

    @classmethod
    def abstract(cls, *avals, config: _FusedAttnConfig):
        """The results of bind, as jax.ShapeDtypeStruct, for arrays like avals."""
        return jax.eval_shape(lambda *x: cls.impl(*x, config=config), *avals)

    @classmethod
    def bind(cls, *operands, config: _FusedAttnConfig):
        return cls.impl(*operands, config=config)


class FusedAttnFwdPrimitive(_Primitive):
    """Operands: q, k, v, bias, softmax_offset, seed, and of q and kv each seqlens, seq_offsets,
    segment_ids, segment_pos; of arrays that a call has not, zeros(0). Results as of
    fused_attn_fwd."""
    name = FusedAttnForwardFFI

    @staticmethod
    def impl(q, k, v, bias, softmax_offset, seed, *descriptor, config: _FusedAttnConfig):
        words = _translate.rng_words(_given(seed), config.dropout_p)
        return _with_max_logit(*split_forward(config, _qkv(config, q, k, v), _given(bias), _given(softmax_offset),
                                              _descriptor(descriptor), words))


class FusedAttnBwdPrimitive(_Primitive):
    """Operands: q, k, v, bias, softmax_offset, softmax_aux, rng_state, output, doutput, and the
    descriptor as of the forward pass. Results: dq, dk, dv, dbias, d_softmax_offset, zeros(0) for
    what a call has not."""
    name = FusedAttnBackwardFFI

    @staticmethod
    def impl(q, k, v, bias, softmax_offset, softmax_aux, rng_state, output, doutput, *descriptor,
             config: _FusedAttnConfig):
        qkv = _qkv(config, q, k, v)
        wanted = [True] * len(qkv) + [bias.size > 0, softmax_offset.size > 0 and
                                      config.softmax_type == AttnSoftmaxType.LEARNABLE_SOFTMAX]
        dqkv, dbias, d_offset = split_backward(
            config, wanted, qkv, _given(bias), _given(softmax_offset), softmax_aux, rng_state,
            output, doutput, _descriptor(descriptor))
        grads = (*dqkv, *(None,) * (3 - len(dqkv)), dbias, d_offset)
        return tuple(jnp.zeros(0, x.dtype) if grad is None else grad
                     for x, grad in zip((q, k, v, bias, softmax_offset), grads))


# TE has a pair of primitives for each exchange and order of context parallelism. Here a config says both, and one
# pair reads it.
FusedAttnFwdPrimitive.outer_primitive = FusedAttnFwdPrimitive
FusedAttnBwdPrimitive.outer_primitive = FusedAttnBwdPrimitive
FusedAttnCPWithAllGatherFwdPrimitive = FusedAttnCPStripedWithAllGatherFwdPrimitive = \
    FusedRingAttnFwdPrimitive = FusedRingAttnStripedFwdPrimitive = FusedAttnFwdPrimitive
FusedAttnCPWithAllGatherBwdPrimitive = FusedAttnCPStripedWithAllGatherBwdPrimitive = \
    FusedRingAttnBwdPrimitive = FusedRingAttnStripedBwdPrimitive = FusedAttnBwdPrimitive


def _with_max_logit(out, softmax_aux, rng_state, max_logit=None):
    return out, softmax_aux, rng_state, jnp.zeros(0, out.dtype) if max_logit is None else max_logit


def _given(x):
    return x if x.size else None


def _qkv(config: _FusedAttnConfig, *arrays) -> tuple:
    layout = config.qkv_layout
    return arrays[:1 if layout.is_qkvpacked() else 2 if layout.is_kvpacked() else 3]


def _descriptor(arrays) -> SequenceDescriptor | None:
    """The descriptor of q's and kv's seqlens, seq_offsets, segment_ids, segment_pos; None if all are empty."""
    pairs = list(zip(arrays[::2], arrays[1::2]))
    return SequenceDescriptor(*pairs) if any(x.size for x in arrays) else None
