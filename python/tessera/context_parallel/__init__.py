# SPDX-License-Identifier: Apache-2.0
"""Context parallelism, as far as it is data: where positions lie, which rows travel, what it costs.

    shards = Shards.zigzag([131072], size=8)
    print(plan(shards, hq=32, hk=8, dqk=128, dv=128, causal=True))

NumPy only. tessera.torch.context_parallel computes by it; docs/context_parallel.md explains it.
"""

from .cost import Links, Option, Plan, plan
from .shards import Run, Shards

__all__ = ["Links", "Option", "Plan", "Run", "Shards", "plan"]
