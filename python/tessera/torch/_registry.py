# SPDX-License-Identifier: Apache-2.0
"""The name "tessera" in PyTorch's list of flash attention implementations; nothing changes until it is activated."""

from __future__ import annotations

try:
    from torch.nn.attention import register_flash_attention_impl
except ImportError:  # a PyTorch without the list
    register_flash_attention_impl = None


def _activate():
    from ..doors import flash_impl
    return flash_impl.Handle()


if register_flash_attention_impl is not None:
    register_flash_attention_impl("tessera", register_fn=_activate)
