# SPDX-License-Identifier: Apache-2.0
"""What calls of attention_forward were translated to: a call whose words are known is one look-up, and keywords
of tessera.torch are neither made nor looked at again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..torch._functions import prepared

_MAX_KEPT = 512
_is_deterministic = torch._C._get_deterministic_algorithms
_NUMBERS = frozenset({type(None), int, float})
_LENGTHS = frozenset({type(None), int})
_NEW_EACH_TIME = ("key_ranges", "keep", "sink", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

# words -> (query.transpose(1, 2), key, value, *tensors) -> o. None instead of o: the call must be translated.
known: dict[tuple, Callable] = {}


def words(query, key, mask, kind, is_causal, sliding_window, cu_q, cu_k, max_q, max_k, scaling, softcap, sink):
    """(words, tensors): all that the keywords of a call without dropout, position_bias and seq_idx depend on, and
    its arguments that are new each time, in the order of _NEW_EACH_TIME. (None, ()) of a call that is always
    translated.

    `mask` is a plain tensor, and `kind` says whether transformers' patterns are behind it."""
    sq = query.shape[2]
    if type(sq) is not int or type(scaling) not in _NUMBERS or type(softcap) not in _NUMBERS or \
            type(sliding_window) not in _LENGTHS:  # torch.jit.trace makes tensors of extents
        return None, ()
    what, tensors = None, ()
    if mask is not None:
        what = mask.dtype
        is_known = kind is not None if what is torch.int32 else what is torch.bool and mask.shape[-1] == key.shape[2]
        if not is_known or cu_q is not None:
            return None, ()
        tensors = (mask,)
    if sink is not None:
        tensors += (sink,)
    if cu_q is not None or cu_k is not None:
        if type(max_q) not in _LENGTHS or type(max_k) not in _LENGTHS:
            return None, ()
        what = cu_q is cu_k, max_q is None, max_k is None
        tensors += (cu_q, cu_k, *(length for length in (max_q, max_k) if length is not None))
    return (what, is_causal, sliding_window, sq == 1, scaling, softcap, sink is None,
            _is_deterministic()), tensors


def keep(of: tuple, query, key, value, keywords: dict):
    """Remembers the keywords of a call that was accepted. A model that permutes what it has projected does so in every
    call: it is left to what makes copies."""
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        return
    if len(known) >= _MAX_KEPT:
        known.clear()
    layout = "bshd", "bhsd"  # o as models have it, k and v as they are
    given = {name: keywords[name] for name in _NEW_EACH_TIME if keywords.get(name) is not None}
    known[of] = prepared(tuple(given), _translate, deterministic=of[-1], layout=layout, **{**given, **keywords})


def _translate(*_) -> None:
    """Under autocast, and where the operator fails, of which attention says why."""
