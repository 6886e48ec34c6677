# SPDX-License-Identifier: Apache-2.0
"""tessera among SGLang's attention backends, by an entry point of the group sglang.srt.plugins:

    python -m sglang.launch_server --model-path MODEL --attention-backend tessera
    SGLANG_PLUGINS=none python -m sglang.launch_server ...     # without the plugin: a name that no plugin has

SGLang calls register() in each of its processes. It adds a name to SGLang's lists, those of draft workers and of
deterministic inference too. The list of draft backends is closed, so it adds the name to their factory by
SGLang's hooks.
"""

from __future__ import annotations

import importlib

from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention import attention_registry as registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from . import DOORS

TESTED = DOORS["SGLang"].tested
NAME = "tessera"
FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
_LISTS = ("ATTENTION_BACKEND_CHOICES", "DRAFT_ATTENTION_BACKEND_CHOICES", "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
          "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND")
_registered: list[Handle] = []


class Handle:
    """The registered backend, until remove()."""

    def remove(self):
        """Takes the name away; the hook of the factory then does nothing."""
        if self not in _registered:
            return
        _registered.remove(self)
        registry.ATTENTION_BACKENDS.pop(NAME, None)
        for name in _LISTS:
            getattr(choices, name).remove(NAME)


def register() -> Handle:
    """What the entry point calls, once or more often."""
    if _registered:
        return _registered[0]
    for place, names in ((registry, ("register_attention_backend", "ATTENTION_BACKENDS")), (choices, _LISTS)):
        if missing := [name for name in names if not hasattr(place, name)]:
            raise changed(f"{place.__name__} has no {', '.join(missing)}")
    registry.register_attention_backend(NAME)(_create)
    for name in _LISTS:
        getattr(choices, name).append(NAME)
    if not any(hook is _draft for _, hook, *_ in HookRegistry._hooks[FACTORY]):
        HookRegistry.register(FACTORY, _draft, HookType.AROUND)
    _registered.append(Handle())
    return _registered[0]


def changed(what: str) -> RuntimeError:
    return RuntimeError(f"tessera.doors.sglang: {what}; the door was made for SGLang {TESTED}; install that, or leave "
                        "the plugin out of SGLANG_PLUGINS")


def _create(runner):
    return _backend().Backend(runner)


def _backend():
    """The module that does the work, imported where it was asked for."""
    return importlib.import_module(f"{__package__}.sglang_backend")


def _draft(original, factory, backend_name, backend_map, *arguments, stamps_children=False, **keywords):
    """DraftBackendFactory._create_backend with tessera in its list: a backend for each step of a draft, or one."""
    def ours():
        runner = factory.draft_model_runner
        if not stamps_children:
            return NAME, _create(runner)
        return NAME, _backend().Steps(runner, factory.topk, factory.speculative_num_steps)
    if _registered:
        backend_map = {**backend_map, NAME: ours}
    return original(factory, backend_name, backend_map, *arguments, stamps_children=stamps_children, **keywords)
