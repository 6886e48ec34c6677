# SPDX-License-Identifier: Apache-2.0
"""Forward and backward on a GPU beside cuDNN (through PyTorch), one feature at a time.

    PYTHONPATH=python python3 benchmarks/cuda_attention.py

bf16, inputs from a normal distribution. Forward: medians of CUDA-graph replays, so that no host time is
in them. Backward: medians of event timings around 20 calls of torch.autograd.grad, host time included.
TFLOP/s count 4 b h s² d, half of it under causal, and 2.5 times that backward.
"""

import argparse
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera.torch as tt

DEVICE, DTYPE = "cuda", torch.bfloat16
REPEATS, ROUNDS = 10, 5


def event_ms(work):
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def replayed_ms(call):
    """Median time of one call, from replays of a graph of REPEATS calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    return median(event_ms(graph.replay) / REPEATS for _ in range(ROUNDS))


def looped_ms(call):
    """Median time of one call, host included."""
    def loop():
        for _ in range(2 * REPEATS):
            call()
    loop()
    torch.cuda.synchronize()
    return median(event_ms(loop) / (2 * REPEATS) for _ in range(ROUNDS))


def cudnn(q, k, v, causal):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal,
                                              enable_gqa=q.shape[1] != k.shape[1])


def row(name, b, s, h, hk, d, causal=False, peer=False, visible=None, **features):
    """One line: tessera forward and backward, and cuDNN where it has the same problem.

    visible: scores that are seen, of one head of one sequence; default all of them, or half.
    """
    q, k, v = (torch.randn(b, s, heads, d, device=DEVICE, dtype=DTYPE) for heads in (h, hk, hk))
    flops = 4 * b * h * d * (visible or s * s * (0.5 if causal else 1))
    call = lambda: tt.attention(q, k, v, causal=causal, **features)
    with torch.no_grad():
        forward = replayed_ms(call)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = call()
    do = torch.randn_like(o)
    backward = looped_ms(lambda: torch.autograd.grad(o, inputs, do, retain_graph=True))
    cells = [f"{forward:8.4f} ms {flops / forward / 1e9:6.1f}",
             f"{backward:8.4f} ms {2.5 * flops / backward / 1e9:6.1f}"]
    if peer:
        inputs = [x.detach().transpose(1, 2) for x in (q, k, v)]
        ratio = replayed_ms(lambda: cudnn(*inputs, causal)) / forward
        inputs = [x.requires_grad_() for x in inputs]
        o = cudnn(*inputs, causal)
        do = torch.randn_like(o)
        ratio_backward = looped_ms(
            lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)) / backward
        cells = [f"{cells[0]} {ratio:5.2f} x cuDNN", f"{cells[1]} {ratio_backward:5.2f} x cuDNN"]
    print(f"{name:26s} fwd {cells[0]:36s} bwd {cells[1]}", flush=True)


def main():
    argparse.ArgumentParser(description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    a = torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE)
    print(f"{torch.cuda.get_device_name()}: bf16 GEMM of 8192 at "
          f"{2 * 8192**3 / replayed_ms(lambda: a @ a) / 1e9:.0f} TFLOP/s")

    row("test_0", 2, 512, 16, 16, 64, peer=True)
    row("test_1", 2, 2048, 16, 16, 128, True, peer=True)
    bias = torch.randn(1, 16, 2048, 2048, device=DEVICE, dtype=DTYPE)
    row("test_2: test_1 with bias", 2, 2048, 16, 16, 128, True, bias=bias)
    row("test_3", 2, 8192, 32, 4, 128, True, peer=True)

    base, s = (2, 8192, 16, 16, 128), 8192
    row("d128 8k causal", *base, True, peer=True)
    row("  ALiBi", *base, True, alibi_slopes=torch.rand(16, device=DEVICE), align="top_left")
    row("  softcap", *base, True, softcap=30.0)
    row("  dropout", *base, True, dropout_p=0.1)
    row("  sink", *base, True, sink=torch.randn(16, device=DEVICE))
    row("  window 1024", *base, True, window=(1023, 0), align="top_left",
        visible=s * 1024 - 1024 * 1023 / 2)
    documents = (torch.arange(s, device=DEVICE) // 1000).int().expand(2, s).contiguous()
    row("  documents of 1000", *base, True, segment_ids=documents, visible=8 * 1000 * 1001 / 2)
    row("  random boolean mask", *base, keep=torch.rand(1, 1, s, s, device=DEVICE) < 0.5)

    q = torch.randn(64, 1, 32, 128, device=DEVICE, dtype=DTYPE)
    k, v = torch.randn(2, 64, 8192, 4, 128, device=DEVICE, dtype=DTYPE)
    with torch.no_grad():
        ms = replayed_ms(lambda: tt.attention(q, k, v))
    print(f"decode b=64 hq=32 hk=4 8k keys d128: {ms:.4f} ms, {4 * k.numel() / ms / 1e9:.2f} TB/s")


if __name__ == "__main__":
    main()
