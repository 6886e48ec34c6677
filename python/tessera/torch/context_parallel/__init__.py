# SPDX-License-Identifier: Apache-2.0
"""One sequence on many ranks, the answer of one: attention whose sequence axis is sharded over a group
of torch.distributed.

    shards = Shards.zigzag([131072], size=group.size())
    q, k, v = (shard(x, shards, group, dim=1) for x in (q, k, v))
    o = attention(q, k, v, shards=shards, group=group, causal=True)

docs/context_parallel.md explains shards, exchanges and what they cost.
"""

from ...context_parallel import Shards
from ._attention import attention, explain, prepare
from ._decode import decode
from ._sharding import merge, positions, shard, unshard
from ._style import ContextParallel

__all__ = ["ContextParallel", "Shards", "attention", "decode", "explain", "merge", "positions", "prepare",
           "shard", "unshard"]
