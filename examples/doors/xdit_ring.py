# SPDX-License-Identifier: Apache-2.0
# example (torch xfuser): a door: tessera among xDiT's attention backends, with the lse that its ring merges
"""Call xDiT's attention functions as its sequence parallelism does, tessera's and PyTorch's: on all keys at once, and
on two parts of them whose results lse merges, as in a ring of two ranks. xDiT's pipelines need GPUs; there, register()
and pass --attention_backend TESSERA.

    ./dev example doors/xdit_ring                       (seconds on a CPU)
    ./dev example doors/xdit_ring --device cuda
"""
import argparse

import torch
from xfuser.core.distributed.attention_backend import ATTENTION_FUNCTION_REGISTRY, AttentionBackendType

from tessera.doors import xdit


def attend(name, *qkv):
    """(o, lse) of the backend of this name, and the calls of tessera's operators."""
    with torch.profiler.profile() as profile:
        o, lse, *_ = ATTENTION_FUNCTION_REGISTRY[AttentionBackendType[name]](*qkv, dropout_p=0.0, is_causal=False)
    return o, lse, sum(event.count for event in profile.key_averages() if event.key.startswith("tessera::"))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args(argv).device
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 10, 16).to(device) for _ in range(3))  # [b, h, s, d]
    theirs, _, calls = attend("SDPA_MATH", q, k, v)
    print(f"PyTorch  calls of tessera {calls}")

    handle = xdit.register()
    ours, _, calls = attend("TESSERA", q, k, v)
    print(f"tessera  calls of tessera {calls}  differs by {(ours - theirs).abs().max():.1e}")
    parts = [attend("TESSERA", q, *keys) for keys in zip(k.chunk(2, 2), v.chunk(2, 2))]
    weights = torch.stack([lse for _, lse, _ in parts]).softmax(0).unsqueeze(-1)
    merged = sum(weight * o for weight, (o, *_) in zip(weights, parts))
    print(f"tessera, two parts of the keys  differs by {(merged - theirs).abs().max():.1e}")

    handle.remove()
    print("removed:", "TESSERA" not in AttentionBackendType.__members__)


if __name__ == "__main__":
    main()
