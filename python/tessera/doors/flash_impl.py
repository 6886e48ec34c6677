# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators of attention, computed by tessera: activate_flash_attention_impl("tessera") uses this
module.

It lays a kernel over PyTorch's own for each operator that scaled_dot_product_attention and varlen_attn end in, on
the CPU and on CUDA; Handle.remove() takes the kernels away. They run below autograd, whose formulas are
PyTorch's: an operator returns o, lse and dropout's state in PyTorch's shapes, and its backward operator gets them
again.

    flash, SDPA        [b, h, s, d], diagonal top-left
    flash, varlen      packed [t, h, d] or [b, s, h, d], bottom-right; windows, pages, ALiBi
    cuDNN, SDPA        as flash's, with a mask or bias
    cuDNN, varlen      packed [t, h, d], top-left, and bottom-right beside seqused_k
    for_cpu            what SDPA calls on a CPU: flash's, with a mask or bias
"""

from __future__ import annotations

import functools

import torch

from .._lib import Refused
from ..flash_attn import _translate as to
from ..torch import _describe, _functions, _ops, _sdpa
from . import DOORS

TESTED = DOORS["torch registry"].tested
_KEYS = ("CPU", "CUDA")


class Handle:
    """What activate_flash_attention_impl keeps until restore_flash_attention_impl() calls remove()."""

    def __init__(self):
        self._library = torch.library.Library("aten", "IMPL")
        try:
            for name, (kernel, keys) in _table().items():
                for key in keys:
                    self._library.impl(name, kernel, key)
        except Exception:
            self.remove()
            raise

    def remove(self):
        """Restores PyTorch's own kernels."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _table() -> dict:
    """Operators that this PyTorch has -> (kernel, keys)."""
    table = {}
    for name, (function, keys) in _KERNELS.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is not None:
            _check_interface(name, operator, function)
            table[name] = torch.compiler.disable(function), keys  # called by compiled code, not compiled itself
    if not table:
        raise _changed("it has none of the operators that the door serves")
    return table


def _check_interface(name: str, operator, function):
    """Refuses an operator whose arguments are not those that `function` takes, in their order."""
    code = function.__code__
    known = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
    theirs = [argument.name for argument in operator._schema.arguments]
    strange = [argument for argument in theirs if argument not in known]
    places = [known.index(argument) for argument in theirs if argument in known]
    if strange or places != sorted(places):
        raise _changed(f"aten::{name} takes {', '.join(strange or theirs)}, which the door does not know")


def _changed(what: str) -> RuntimeError:
    return RuntimeError(f'tessera.torch: activate_flash_attention_impl("tessera"): torch={torch.__version__}: {what}; '
                        f"it was tested with PyTorch {TESTED}, and tessera.torch.patch_sdpa() needs no registry")


# ---- the two passes ----

def _forward(q, k, v, dropout_p, keywords: dict):
    """(o, lse, dropout's state int64 [2] or None)."""
    state = None
    if dropout_p:
        state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)
        keywords.update(dropout_p=dropout_p, rng_state=state)
    with torch._C._DisableAutocast(), torch.no_grad():  # which are above this
        o, lse = _functions.attention(*_sdpa._readable(q, k, v), return_lse=True, **keywords)
    return o, lse, state


def _backward(do, q, k, v, o, lse, dropout_p, state, keywords: dict, grads=("dq", "dk", "dv")):
    if dropout_p:
        keywords.update(dropout_p=dropout_p, rng_state=state)
    with torch._C._DisableAutocast(), torch.no_grad():
        g = _functions.attention_backward(do, *_sdpa._readable(q, k, v), o, lse, grads=grads, **keywords)
    return g.dq, g.dk, g.dv


def _dense_forward(q, k, v, dropout_p, is_causal, scale, mask=None):
    """_forward of scaled_dot_product_attention's operators."""
    if scale is not None and scale < 0:
        return _dense_forward(-q, k, v, dropout_p, is_causal, -scale, mask)
    if mask is None and not dropout_p:
        try:
            o, lse = _ops.attention([q, k, v], _NO_SIZES, _text(is_causal, scale, _deterministic()))
            return o, lse, None
        except _functions._FAILURES:
            pass  # the longer way copies what cannot be read, or says what is wrong
    return _forward(q, k, v, dropout_p, {**_dense(is_causal, scale), **_masked(mask, q)})


def _dense_backward(do, q, k, v, o, lse, dropout_p, state, is_causal, scale, mask=None, into=None):
    """_backward of scaled_dot_product_attention's operators, `into` (dq, dk, dv) or new tensors."""
    if scale is not None and scale < 0:
        dq, dk, dv = _dense_backward(do, -q, k, v, o, lse, dropout_p, state, is_causal, -scale, mask, into)
        return dq.neg_(), dk, dv
    if mask is None and not dropout_p:
        text = _ops.backward_text(_text(is_causal, scale, _deterministic()), (0, 1, 2), False)
        try:
            if into is None:
                return tuple(_ops.attention_backward([do, o, lse, q, k, v], _NO_SIZES, text))
            _ops.attention_into_op(into, [do, o, lse, q, k, v], _NO_SIZES, text)
            return into
        except _functions._FAILURES:
            pass
    grads = ("dq", "dk", "dv") if into is None else dict(zip(("dq", "dk", "dv"), into))
    return _backward(do, q, k, v, o, lse, dropout_p, state, {**_dense(is_causal, scale), **_masked(mask, q)}, grads)


_NO_SIZES: list = []
_deterministic = torch.are_deterministic_algorithms_enabled


@functools.lru_cache(maxsize=512)
def _text(is_causal, scale, deterministic) -> str:
    """The text of a call of nothing but q, k and v."""
    names, _, options, flags = _describe.sort(None, None, None, {
        **_dense(is_causal, scale), "deterministic": deterministic})
    return _describe.written(names, options, flags, ["o", "lse"])[1]


def _dense(is_causal, scale) -> dict:
    """Keywords of scaled_dot_product_attention's operators."""
    keywords = {"layout": "bhsd", "softmax_scale": scale}
    if is_causal:
        keywords.update(causal=True, align="top_left")
    return keywords


def _masked(mask, query) -> dict:
    return {} if mask is None else _sdpa._mask(mask, query, query.shape[:2])


def _varlen(cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, window, seqused_k=None, block_table=None) -> dict:
    """Keywords of operators on [t, h, d], or without cum_seq_q on [b, s, h, d]."""
    keywords = {"softmax_scale": scale, **to.band(is_causal, [-1 if side is None else side for side in window])}
    if cum_seq_q is None:
        return {**keywords, "seqlens_k": seqused_k, "page_table": block_table}
    if cum_seq_k is None and (seqused_k is None or block_table is None):
        raise Refused("tessera.varlen_attn: cu_seq_k=None: only where block_table says the pages of keys, and "
                      "seqused_k how many there are; give cu_seq_k")
    return {**keywords, **to.packed(cum_seq_q, cum_seq_k, max_q, max_k, block_table, seqused_k)}


def _unsupported(operation: str, **given):
    for name, value in given.items():
        if value is not None and value is not False:
            raise Refused(f"tessera.{operation}: {name}={value if value is True else 'Tensor'}: is not built; "
                          "leave it out, or restore PyTorch's own by torch.nn.attention.restore_flash_attention_impl()")


def _descaled(query, key, q_descale, k_descale, v_descale) -> dict:
    """Scales [b, hk] of fp8 tensors; heads are the axis before the last but one, or before the last."""
    keywords = {"k_scale": k_descale, "v_scale": v_descale, "q_scale": q_descale}
    hq, hk = (x.shape[1 if x.dim() == 4 else -2] for x in (query, key))
    if q_descale is not None and q_descale.dim() and q_descale.shape[-1] == hk != hq:
        keywords["q_scale"] = q_descale.repeat_interleave(hq // hk, -1)
    return keywords


# ---- flash ----

def _flash_results(q, state):
    """rng_state, unused and debug_attn_mask in PyTorch's form: uint64 [2] and [], nothing in them without dropout."""
    seed = q.new_empty(2, dtype=torch.uint64) if state is None else state.view(torch.uint64)
    return seed, q.new_empty((), dtype=torch.uint64), q.new_empty(0)


def _flash_state(rng_state, dropout_p):
    return rng_state.view(torch.int64) if dropout_p else None


def flash_sdpa(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _unsupported("scaled_dot_product_attention", return_debug_mask=return_debug_mask)
    o, lse, state = _dense_forward(query, key, value, dropout_p, is_causal, scale)
    return o, lse, None, None, query.shape[2], key.shape[2], *_flash_results(query, state)


def flash_sdpa_quantized(query, key, value, q_descale=None, k_descale=None, v_descale=None, dropout_p=0.0,
                         is_causal=False, return_debug_mask=False, *, scale=None):
    _unsupported("scaled_dot_product_attention", return_debug_mask=return_debug_mask)
    keywords = {**_dense(is_causal, scale), **_descaled(query, key, q_descale, k_descale, v_descale)}
    o, lse, state = _forward(query, key, value, dropout_p, keywords)
    return o, lse, None, None, query.shape[2], key.shape[2], *_flash_results(query, state)


def flash_sdpa_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                        is_causal, philox_seed, philox_offset, *, scale=None):
    return _dense_backward(grad_out, query, key, value, out, logsumexp, dropout_p, _flash_state(philox_seed, dropout_p),
                           is_causal, scale)


def flash_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
                  scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
                  block_table=None, num_splits=None):
    _unsupported("varlen_attn", return_debug_mask=return_debug_mask)
    keywords = _varlen(cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, (window_size_left, window_size_right),
                       seqused_k, block_table)
    # One split is asked for so that a sequence's bits do not depend on the batch.
    o, lse, state = _forward(query, key, value, dropout_p, {
        **keywords, "alibi_slopes": alibi_slopes, "batch_invariant": num_splits == 1 and not dropout_p})
    return o, lse, *_flash_results(query, state)


def flash_forward_quantized(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                            return_debug_mask, q_descale=None, k_descale=None, v_descale=None, *, scale=None,
                            window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None):
    _unsupported("varlen_attn", return_debug_mask=return_debug_mask)
    keywords = _varlen(cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, (window_size_left, window_size_right),
                       seqused_k)
    o, lse, state = _forward(query, key, value, dropout_p, {
        **keywords, "alibi_slopes": alibi_slopes, **_descaled(query, key, q_descale, k_descale, v_descale)})
    return o, lse, *_flash_results(query, state)


def flash_forward_inplace(out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                          return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
                          seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None):
    _unsupported("varlen_attn_out", return_debug_mask=return_debug_mask)
    keywords = _varlen(cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, (window_size_left, window_size_right),
                       seqused_k, block_table)
    return _forward(query, key, value, 0.0, {
        **keywords, "alibi_slopes": alibi_slopes, "batch_invariant": num_splits == 1, "out": out})[1]


def flash_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                   is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None):
    keywords = _varlen(cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, (window_size_left, window_size_right))
    return _backward(grad_out, query, key, value, out, logsumexp, dropout_p, _flash_state(rng_state, dropout_p),
                     keywords)


# ---- cuDNN ----

def _cudnn_state(q, state):
    """philox_seed and philox_offset, int64 [] each."""
    if state is None:
        return q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)
    return state[0].clone(), state[1].clone()


def cudnn_sdpa(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
               return_debug_mask=False, *, scale=None):
    _unsupported("scaled_dot_product_attention", return_debug_mask=return_debug_mask)
    o, lse, state = _dense_forward(query, key, value, dropout_p, is_causal, scale, attn_bias)
    return o, lse[..., None], None, None, query.shape[2], key.shape[2], *_cudnn_state(query, state), None


def cudnn_sdpa_backward(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q,
                        cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None):
    state = torch.stack([philox_seed, philox_offset]) if dropout_p else None
    return _dense_backward(grad_out, query, key, value, out, logsumexp.squeeze(-1), dropout_p, state, is_causal, scale,
                           attn_bias)


def _cudnn_varlen(attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, seqused_k=None, block_table=None):
    _unsupported("varlen_attn", attn_bias=attn_bias)
    keywords = _varlen(cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, (None, None), seqused_k, block_table)
    return keywords if seqused_k is not None else {**keywords, "align": "top_left"}


def cudnn_forward(query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp, dropout_p=0.0,
                  is_causal=False, return_debug_mask=False, *, scale=None, seqused_k=None, block_table=None):
    _unsupported("varlen_attn", return_debug_mask=return_debug_mask)
    o, lse, state = _forward(query, key, value, dropout_p, _cudnn_varlen(
        attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, seqused_k, block_table))
    return o, lse, cum_seq_q, cum_seq_k, max_q, max_k, *_cudnn_state(query, state), None


def cudnn_forward_inplace(out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal=False, *, scale=None,
                          seqused_k=None, block_table=None):
    return _forward(query, key, value, 0.0, {"out": out, **_cudnn_varlen(
        None, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, seqused_k, block_table)})[1]


def cudnn_backward(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q,
                   cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None):
    state = torch.stack([philox_seed, philox_offset]) if dropout_p else None
    return _backward(grad_out, query, key, value, out, logsumexp, dropout_p, state, _cudnn_varlen(
        attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale))


# ---- what scaled_dot_product_attention calls on a CPU ----

def cpu_sdpa(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if dropout_p:  # PyTorch sends it to its math path
        raise Refused(f"tessera.scaled_dot_product_attention: dropout_p={dropout_p}: has no state in PyTorch's "
                      "operator for a CPU; use tessera.torch.scaled_dot_product_attention")
    o, lse, _ = _dense_forward(query, key, value, 0.0, is_causal, scale, attn_mask)
    return o, lse.transpose(1, 2).contiguous().transpose(1, 2)  # strides that a compiled graph counts on


def cpu_sdpa_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    grads = tuple(torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device)
                  for x in (query, key, value))  # strides that a compiled graph counts on
    return _dense_backward(grad_out, query, key, value, out, logsumexp.contiguous(), 0.0, None, is_causal, scale,
                           attn_mask, grads)


_KERNELS = {
    "_scaled_dot_product_flash_attention": (flash_sdpa, _KEYS),
    "_scaled_dot_product_flash_attention.quantized": (flash_sdpa_quantized, _KEYS),
    "_scaled_dot_product_flash_attention_backward": (flash_sdpa_backward, _KEYS),
    "_flash_attention_forward": (flash_forward, _KEYS),
    "_flash_attention_forward.quantized": (flash_forward_quantized, _KEYS),
    "_flash_attention_forward_no_dropout_inplace": (flash_forward_inplace, _KEYS),
    "_flash_attention_backward": (flash_backward, _KEYS),
    "_scaled_dot_product_cudnn_attention": (cudnn_sdpa, _KEYS),
    "_scaled_dot_product_cudnn_attention_backward": (cudnn_sdpa_backward, _KEYS),
    "_cudnn_attention_forward": (cudnn_forward, _KEYS),
    "_cudnn_attention_forward_no_dropout_inplace": (cudnn_forward_inplace, _KEYS),
    "_cudnn_attention_backward": (cudnn_backward, _KEYS),
    "_scaled_dot_product_flash_attention_for_cpu": (cpu_sdpa, ("CPU",)),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (cpu_sdpa_backward, ("CPU",)),
}
