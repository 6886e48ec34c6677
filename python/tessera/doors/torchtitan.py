# SPDX-License-Identifier: Apache-2.0
"""tessera as the attention of torchtitan's models that are built for `varlen`:

    torchrun ... -m torchtitan.train --module llama3 --config llama3_debugmodel_varlen_attn \\
        --override.imports tessera.doors.torchtitan.attention

torchtitan imports what --override.imports names and replaces the parts of its configuration that this claims. Its own
VarlenAttention activates FlashAttention 3 on Hopper and 4 on Blackwell, whatever was active before; tessera's activates
"tessera" in PyTorch's registry (tessera.doors.flash_impl) on every device, and leaves the rest to torchtitan's.
"""

from __future__ import annotations

import dataclasses

from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module

from .. import torch as _registry  # noqa: F401  registers the name "tessera"
from . import DOORS

TESTED = DOORS["torchtitan"].tested


class Attention(VarlenAttention):
    """torchtitan's VarlenAttention, whose varlen_attn runs on tessera."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # VarlenAttention's would activate FlashAttention 3 or 4
        self.window_size = config.window_size
        if current_flash_attention_impl() != "tessera":
            activate_flash_attention_impl("tessera")


@override(target=VarlenAttention.Config, description="tessera's attention")
def attention(config: VarlenAttention.Config) -> Attention.Config:
    """What --override.imports names. RuntimeError: VarlenAttention is configured with more than this door knows."""
    known = {field.name for field in dataclasses.fields(Module.Config)} | {"window_size"}
    more = sorted({field.name for field in dataclasses.fields(config)} - known)
    if more:
        raise RuntimeError(f"tessera.doors.torchtitan: VarlenAttention.Config has {', '.join(more)}, which is not "
                           f"known here; the door was tested with torchtitan {TESTED}")
    return derive(config, Attention.Config)
