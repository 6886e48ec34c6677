# SPDX-License-Identifier: Apache-2.0
"""What was decided about calls that were seen before: that they are legal, which backend runs them,
and, where no tensor but query, key and value takes part, their keywords."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os

import torch

from ......torch._functions import prepared
from ....._logging import logger
from . import _selection
from .. import utils as dpa_utils
from ._selection import _attention_backends

CHOSEN = ("use_flash_attention", "flash_attention_backend", "use_fused_attention",
          "fused_attention_backend", "use_unfused_attention")
_MOST = 1024  # plans; lengths that never come back must not fill the memory
_plans: dict[tuple, Plan] = {}


@dataclasses.dataclass
class Plan:
    keywords: dict | None  # None where they hold a call's own tensors
    kernels: object        # (q, k, v) -> what tessera.torch.attention gives, beside keywords
    backends: dict         # what _attention_backends held after the selection
    switches: tuple        # those that it read, and who selected


def key(q, k, v, tensors, words) -> tuple:
    """All that checks and a selection look at. Views of one buffer are told from others by their
    strides."""
    looks = tuple([None if x is None else _look(x) for x in tensors])
    _, cu_q, cu_kv, starts_q, starts_kv, *_ = tensors
    return (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype,
            v.dtype, q.device, k.device, v.device, looks, starts_q is cu_q, starts_kv is cu_kv,
            words)


def find(key: tuple) -> Plan | None:
    """The plan of `key`, with its selection in _attention_backends."""
    try:
        plan = _plans.get(key)
    except TypeError:  # a list, or an extent that only a trace knows
        return None
    if plan is None or _attention_backends["backend_selection_requires_update"]:
        return None
    if _attention_backends["attention_params"] is not plan.backends["attention_params"]:
        if logger.isEnabledFor(logging.INFO) or _switches() != plan.switches:
            return None  # a selection reads the switches and says what it does
        _attention_backends.update(plan.backends)
    return plan


def keep(key, keywords: dict):
    """After a selection."""
    if len(_plans) >= _MOST:
        _plans.clear()
    looks = key[12]
    own = any([look is not None for look in looks])
    own = own or any([isinstance(x, torch.Tensor) for x in keywords.values()])
    plan = Plan(None, None, dict(_attention_backends), _switches()) if own else \
        Plan(keywords, prepared(**keywords), dict(_attention_backends), _switches())
    with contextlib.suppress(TypeError):  # as in find
        _plans[key] = plan


def _look(x):
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.device, x.requires_grad
    return tuple(map(_look, x)) if isinstance(x, tuple) else x


def _switches() -> tuple:
    return (*[os.environ.get(name) for name in _selection.SWITCHES],
            dpa_utils.get_attention_backend)
