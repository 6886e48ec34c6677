# SPDX-License-Identifier: Apache-2.0
"""A ParallelStyle: attention modules of a model whose sequences lie on several ranks, in the manner of
torch.distributed.tensor.parallel.parallelize_module and torchtitan."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ...context_parallel import Shards
from ._attention import attention

# What modules round scaled_dot_product_attention say in its words, and what that is here.
_WORDS = {"scale": "softmax_scale", "is_causal": "causal", "enable_gqa": None}


class ContextParallel(ParallelStyle):
    """For parallelize_module: a module whose forward(q, k, v, ...) is attention computes that of the whole
    sequences, from this rank's rows.

    q [b, hq, s, dqk], k [b, hk, s, dqk], v [b, hk, s, dv] -> o [b, hq, s, dv] with s this rank's rows, for
    layout="bhsd", which is what such modules take; "bshd", "sbhd" and "thd" as well. `shards` says where
    rows lie and may be set anew before each batch; one style serves all layers. Other keywords are
    those of tessera.torch.context_parallel.attention, for every call; scale, is_causal and enable_gqa
    of the module's own call come on top, as PyTorch's scaled_dot_product_attention has them, where they
    are not None. The mesh has one axis, or two, (outer, inner).

    Tokens, labels (shifted before) and positions are sharded by the caller: shard, positions. Each
    rank's gradients of weights are its share. ValueError: a module without forward(q, k, v), a call
    before shards are set, any other keyword of the module's call.

    >>> style = ContextParallel(causal=True)
    >>> parallelize_module(model, mesh["cp"], {"layers.*.attention.inner_attention": style})
    >>> style.shards = Shards.zigzag([8192] * b, mesh["cp"].size())          # each batch
    >>> loss = model(shard(ids, style.shards, mesh["cp"], dim=1))
    """

    def __init__(self, shards: Shards | None = None, *, layout: str = "bhsd", **keywords):
        super().__init__()
        self.shards, self.layout, self.keywords = shards, layout, keywords

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def forward(q, k, v, **given):
            return self._attend(device_mesh, q, k, v, given)
        module.forward = forward
        return module

    def _attend(self, mesh, q, k, v, given: dict):
        if self.shards is None:
            raise ValueError("tessera.context_parallel.ContextParallel: shards=None: must be set before a "
                             "batch: style.shards = Shards.zigzag(lengths, mesh.size())")
        words = dict(self.keywords)
        for name, value in given.items():
            if name not in _WORDS:
                raise ValueError(f"tessera.context_parallel.ContextParallel: {name}=...: is no keyword of "
                                 f"attention here; {', '.join(_WORDS)} are, and what is the same for "
                                 "every call belongs to the style")
            if _WORDS[name] and value is not None:
                words[_WORDS[name]] = value
        return attention(q, k, v, shards=self.shards, group=mesh, layout=self.layout, **words)
