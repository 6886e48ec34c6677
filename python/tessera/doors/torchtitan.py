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

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module

from .. import torch as _registry  # noqa: F401  registers the name "tessera"
from ..torch import context_parallel as cp
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


class ContextParallel(ParallelStyle):
    """For parallelize_module: torchtitan's VarlenAttention over documents that lie on several ranks. torchtitan's own
    context_parallel_degree refuses `varlen`: leave it at 1, and cut batches by shard().

    Modules keep their window, scale and out_transform, and compute in bf16 as torchtitan's do; they may be this door's
    or torchtitan's. Their attention_masks are not read: documents are those of shard(). keywords are those of
    tessera.torch.context_parallel.attention, such as exchange. Each rank's gradients of weights are its share.

    >>> style = ContextParallel()
    >>> parallelize_module(model, mesh["cp"], {"layers.*.attention.inner_attention": style})
    >>> positions, tokens, labels = style.shard(positions, tokens, labels)            # each batch
    >>> logits = model(tokens, positions=positions)
    """

    def __init__(self, **keywords):
        super().__init__()
        self.shards, self._mesh, self._keywords = None, None, keywords

    def shard(self, positions: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """This rank's rows of positions and of each tensor: [1, t, ...] of [b, s, ...], t by rank. A document begins
        where a row does and where positions are 0, which is read back from the device. ValueError: before
        parallelize_module, or where a rank would be without tokens."""
        if self._mesh is None:
            raise ValueError("tessera.torchtitan.ContextParallel.shard: must follow parallelize_module(model, mesh, "
                             '{"layers.*.attention.inner_attention": style})')
        begins = positions == 0
        begins[:, 0] = True
        starts = begins.flatten().nonzero()[:, 0].tolist()
        lengths, size = [b - a for a, b in zip(starts, [*starts[1:], positions.numel()])], self._mesh.size()
        for self.shards in (cp.Shards.balanced(lengths, size), cp.Shards.zigzag(lengths, size, align=1)):
            if all(map(self.shards.tokens, range(size))):
                break
        else:
            raise ValueError(f"tessera.torchtitan.ContextParallel.shard: positions.shape={list(positions.shape)}: "
                             f"leaves a rank of {size} without tokens; {2 * size} tokens or more would work")
        return [cp.shard(x.flatten(0, 1)[None], self.shards, self._mesh, dim=1) for x in (positions, *tensors)]

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, VarlenAttention):
            raise ValueError(f"tessera.torchtitan.ContextParallel: module={type(module).__name__}: must be a "
                             "VarlenAttention; of other modules use tessera.torch.context_parallel.ContextParallel")
        self._mesh = device_mesh

        def forward(q, k, v, *, attention_masks=None, scale=None, out_transform=None, enable_gqa=False):
            found = cp.attention(*(x[0].to(torch.bfloat16) for x in (q, k, v)), layout="thd", shards=self.shards,
                                 group=device_mesh, window=module.window_size, softmax_scale=scale,
                                 return_lse=out_transform is not None, **self._keywords)
            if out_transform is None:
                return found[None].to(q.dtype)
            return out_transform(found[0][None].to(q.dtype), found[1].T[None])
        module.forward = forward
        return module
