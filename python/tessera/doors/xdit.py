# SPDX-License-Identifier: Apache-2.0
"""tessera among xDiT's attention backends:

    handle = tessera.doors.xdit.register()
    ... --attention_backend TESSERA, or get_runtime_state().set_attention_backend("tessera")
    handle.remove()

xDiT's enum of names is closed: register() adds a member to it, and remove() takes it away. A backend gets q, k
and v [b, h, s, d] and returns (o, lse [b, h, s]), which xDiT's ring attention merges. xDiT handles Ulysses and
the joint text around that call.
"""

from __future__ import annotations

from xfuser.core.distributed import attention_backend as host

from .._lib import Refused
from ..torch import _functions, _sdpa
from . import DOORS, _enum

TESTED = DOORS["xDiT"].tested
_NAME = "tessera.xdit"


class Handle:
    """The registered backend, until remove()."""

    def __init__(self, member):
        self.member = member

    def remove(self):
        """Takes the backend and its name away. First give another backend to a runtime state that uses it."""
        member, self.member = self.member, None
        if member is not None:
            host.ATTENTION_FUNCTION_REGISTRY.pop(member, None)
            _enum.remove(member)


def register() -> Handle:
    for name in ("AttentionBackendType", "register_attention_function", "ATTENTION_FUNCTION_REGISTRY"):
        if not hasattr(host, name):
            raise RuntimeError(f"{_NAME}: register(): {host.__name__} has no {name}; the door was made for xfuser "
                               f"{TESTED}; install that")
    member = _enum.add(host.AttentionBackendType, "TESSERA", "tessera")
    host.register_attention_function(member)(attention)
    return Handle(member)


def attention(query, key, value, dropout_p=0.0, is_causal=False, attention_kwargs=None):
    """(o [b, h, sq, d], lse [b, h, sq]), natural logarithms in fp32."""
    given = attention_kwargs or {}
    mask = given.get("attn_mask")
    if given.get("indices_k") is not None and mask is None:
        raise Refused(f"{_NAME}: attention_kwargs['indices_k']: packed keys are not built; give attn_mask, as for SDPA")
    if mask is not None and is_causal:
        raise Refused(f"{_NAME}: attn_mask and is_causal=True: one mask at a time; give one of them")
    keywords = {"layout": "bhsd", "softmax_scale": given.get("scale")}
    if is_causal:
        keywords.update(causal=True, align="top_left")
    if dropout_p:
        keywords["dropout_p"] = dropout_p
    if mask is not None:
        keywords.update(_sdpa._mask(mask, query, query.shape[:2]))
    return _functions.attention(*_sdpa._readable(query, key, value), return_lse=True, **keywords)
