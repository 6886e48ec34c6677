# SPDX-License-Identifier: Apache-2.0
"""One sequence on many devices, the answer of one: attention whose sequence axis is sharded over an
axis of a JAX mesh.

    shards = Shards.zigzag([s] * b, mesh.shape["cp"])
    q, k, v = (shard(x, shards) for x in (q, k, v))                # whole arrays, in the shards' order
    o = unshard(sharded(mesh, "cp", shards=shards, causal=True)(q, k, v), shards)

Inside a shard_map, attention is what sharded wraps. docs/context_parallel.md explains shards, exchanges
and what they cost.
"""

from ...context_parallel import Shards
from ._attention import attention, sharded
from ._rows import positions, shard, unshard

__all__ = ["Shards", "attention", "positions", "shard", "sharded", "unshard"]
