# SPDX-License-Identifier: Apache-2.0
"""What one call of tessera.torch.attention costs the host, on a problem of 1 x 1 x 16 x 16 whose
arithmetic is nothing, with PyTorch's scaled_dot_product_attention beside.

    python benchmarks/torch_host_cost.py [--device cuda] [--repeat 15]

Microseconds, the smallest of the repetitions, one thread. "four options" are causal, a window, a
softcap and a scale (SDPA beside has the first and the last); "both passes" end in the gradients of q,
k and v; "compiled" is torch.compile's program. Calls with tensors among their keywords follow, and what they cost
where the keywords are translated once ("prepared"). "inside" is the operator as a loop of TorchScript calls
it, on an empty batch: dispatcher, binding, plan and allocations, up to where a kernel would start. On a
GPU nothing is waited for.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial

import torch
from torch.nn import functional as F

import tessera.torch as tt
from tessera.torch._functions import prepared

OPTIONS = {"causal": True, "window": (8, 0), "softcap": 20.0, "softmax_scale": 0.3}
PLAIN = "in=q,k,v out=o,lse"
GOALS = {"end to end": 8.0, "end to end, with gradient": 14.0, "inside the operator": 5.0}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--calls", type=int, default=2000)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
    rows = measure(args.device, lambda function: fastest(function, args))
    print(f"{'us a call on ' + args.device:<46}{'tessera':>8}{'SDPA':>8}{'goal':>8}")
    for name, (ours, theirs) in rows.items():
        beside = f"{theirs:8.1f}" if theirs is not None else f"{'-':>8}"
        goal = f"{GOALS[name]:8.0f}" if name in GOALS else f"{'-':>8}"
        print(f"{name:<46}{ours:8.1f}{beside}{goal}")
    return rows


def measure(device: str, timed) -> dict[str, tuple[float, float | None]]:
    q, k, v = inputs = [torch.randn(1, 16, 1, 16, device=device) for _ in range(3)]
    transposed = [x.transpose(1, 2) for x in inputs]
    leaves, their_leaves = ([x.detach().clone().requires_grad_() for x in each]
                            for each in (inputs, transposed))

    def ours(*inputs):
        return tt.attention(*inputs)

    def ours_four(*inputs):
        return tt.attention(*inputs, **OPTIONS)

    def theirs(*inputs):
        return F.scaled_dot_product_attention(*inputs)

    def theirs_two(*inputs):
        return F.scaled_dot_product_attention(*inputs, is_causal=True, scale=OPTIONS["softmax_scale"])

    rows = {}
    for name, own, other in (("", ours, theirs), (", four options", ours_four, theirs_two)):
        compiled, other_compiled = torch.compile(own), torch.compile(other)
        for form, function, beside in (("end to end", own, other), ("compiled", compiled, other_compiled)):
            pairs = (function, inputs, leaves), (beside, transposed, their_leaves)
            rows[form + name] = tuple(timed(repeated(f, x)) for f, x, _ in pairs)
            rows[f"{form}, with gradient{name}"] = tuple(timed(repeated(f, x)) for f, _, x in pairs)
            rows[f"{form}, both passes{name}"] = tuple(timed(both_passes(f, x)) for f, _, x in pairs)

    for name, own, inputs in with_tensors(device):
        leaves = [x.clone().requires_grad_() for x in inputs]
        function = partial(tt.attention, **own)
        changing = [word for word, value in own.items() if isinstance(value, torch.Tensor)]
        run, given = prepared(changing, **own), [own[word] for word in changing]
        rows[name] = timed(repeated(function, inputs)), None
        rows[f"{name}, prepared"] = timed(repeated(run, (*inputs, *given))), None
        rows[f"{name}, with gradient"] = timed(repeated(function, leaves)), None
        rows[f"{name}, both passes"] = timed(both_passes(function, leaves)), None

    empty = [torch.randn(0, 16, 1, 16, device=device) for _ in range(3)]
    loop = scripted()
    with torch.no_grad(), tt._ops.below_autograd():
        rows["the operator, from Python"] = \
            timed(repeated(lambda: tt._ops.attention([q, k, v], [], PLAIN))), None
        rows["the operator, with its kernel"] = timed(lambda n: loop(q, k, v, n)), None
        rows["inside the operator"] = timed(lambda n: loop(*empty, n)), None
    return rows


def with_tensors(device: str):
    """(name, keywords, (q, k, v)) of the calls that training and serving make."""
    padded = [torch.randn(1, 16, 1, 16, device=device) for _ in range(3)]
    cu = torch.tensor([0, 16], dtype=torch.int32, device=device)
    yield "packed", dict(layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=16, max_seqlen_k=16,
                         causal=True), [x[0] for x in padded]
    ranges = torch.tensor([[[[0, 16]]]], dtype=torch.int32, device=device)
    yield "key ranges", dict(key_ranges=ranges), padded
    lengths, sink = torch.tensor([16], dtype=torch.int32, device=device), torch.zeros(1, device=device)
    yield "lengths and a sink", dict(causal=True, align="bottom_right", seqlens_k=lengths, sink=sink), padded


def both_passes(function, leaves):
    gradient = torch.ones_like(function(*leaves))

    def call():
        torch.autograd.grad(function(*leaves), leaves, gradient)
    return repeated(call)


def repeated(call, inputs=()):
    def run(n: int):
        for _ in range(n):
            call(*inputs)
    return run


def scripted():
    """n calls without Python between them; each takes the output of the last, or none would run."""
    unit = torch.jit.CompilationUnit("""
def loop(q, k, v, n: int):
    o = q
    for i in range(n):
        o, lse = torch.ops.tessera.attention([o, k, v], [], "in=q,k,v out=o,lse")
    return o
""")
    return unit.loop


def fastest(function, args) -> float:
    """The smallest time of one call, in microseconds, over args.repeat runs of args.calls."""
    function(args.calls // 10 + 1)
    times = []
    for _ in range(args.repeat):
        if args.device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        function(args.calls)
        times.append((time.perf_counter_ns() - start) / args.calls / 1e3)
    return min(times)


if __name__ == "__main__":
    main()
