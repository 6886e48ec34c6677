# SPDX-License-Identifier: Apache-2.0
"""tessera among vLLM's attention backends, by an entry point of the group vllm.general_plugins:

    vllm serve MODEL --attention-backend TESSERA              # or LLM(MODEL, attention_backend="TESSERA")
    VLLM_PLUGINS= vllm serve MODEL                            # without the plugin

vLLM calls register() in each of its processes, which only adds a name to vLLM's list. vLLM's platform for CPUs
chooses CPU_ATTN whatever was asked for. There register() also makes it choose TESSERA when that was asked for,
and leaves everything else to vLLM's own choice.
"""

from __future__ import annotations

from vllm.v1.attention.backends import registry

from . import DOORS

TESTED = DOORS["vLLM"].tested
NAME = "TESSERA"
BACKEND = "tessera.doors.vllm_backend.Backend"
_registered: list[Handle] = []


class Handle:
    """The registered backend, until remove()."""

    def __init__(self, member, platform):
        self.member, self.platform = member, platform
        self.choice = vars(platform)["get_attn_backend_cls"] if platform else None

    def remove(self):
        """Takes the name away, for models that are built afterwards."""
        if self not in _registered:
            return
        _registered.remove(self)
        if self.platform:
            self.platform.get_attn_backend_cls = self.choice
        names = type(self.member)
        self.member.clear_override()
        del names._member_map_[NAME], names._value2member_map_[self.member.value]
        names._member_names_.remove(NAME)
        if NAME in vars(names):
            delattr(names, NAME)


def register() -> Handle:
    """What the entry point calls, once or more often."""
    if _registered:
        return _registered[0]
    names = registry.AttentionBackendEnum
    for place, name in ((registry, "register_backend"), (names, "register"), (names, "clear_override")):
        if not hasattr(place, name):
            raise changed(f"{place.__name__} has no {name}")
    registry.register_backend(NAME, BACKEND)
    handle = Handle(names[NAME], _platform_of_cpus())
    if handle.platform:
        handle.platform.get_attn_backend_cls = classmethod(_chosen(handle))
    _registered.append(handle)
    return handle


def changed(what: str) -> RuntimeError:
    return RuntimeError(f"tessera.doors.vllm: {what}; the door was made for vLLM {TESTED}; install that, or set "
                        "VLLM_PLUGINS= to run without it")


def _platform_of_cpus():
    """The class whose choice is fixed, where vLLM runs on a CPU."""
    from vllm.platforms import current_platform
    return type(current_platform) if current_platform.is_cpu() else None


def _chosen(handle: Handle):
    """get_attn_backend_cls that knows TESSERA."""
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, *arguments, **keywords):
        if selected_backend is not handle.member or handle not in _registered:
            return handle.choice.__get__(None, cls)(selected_backend, attn_selector_config, *arguments, **keywords)
        reasons = handle.member.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"Selected backend {handle.member} is not valid for this configuration. Reason: {reasons}")
        return handle.member.get_path()
    return get_attn_backend_cls
