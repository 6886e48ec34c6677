# SPDX-License-Identifier: Apache-2.0
"""Where bench runs a case: which front end computes it there, how one call is repeated, what the
machine can do at most."""

from __future__ import annotations

import itertools
import os
import time

import numpy as np

from .._call import _prepared
from .._machine import cpu_model
from . import case_lines, work

_HALF = ("return_lse", "return_max_logit", "batch_invariant")  # keywords of the forward pass alone


def gradients(tokens) -> tuple[str, ...]:
    """What a bwd case asks for."""
    return ("dq", "dk", "dv") + tuple(name for token in tokens if token.startswith("grads=")
                                      for name in token[len("grads="):].split(","))


def in_turn(calls):
    """A function that is each of `calls` once, by turns."""
    if len(calls) == 1:
        return calls[0]
    turns = itertools.cycle(calls)

    def call():
        return next(turns)()
    if hasattr(calls[0], "wait"):
        call.wait = calls[0].wait
    return call


class Cpu:
    """NumPy arrays as tessera.attention takes them, bits included; peers get the same threads."""
    name = "cpu"
    explained_as = "cpu"
    cases_ahead = 0  # whose data is drawn while a case is timed

    def __init__(self, threads: int | None):
        self._threads = threads
        count = threads or len(os.sched_getaffinity(0))
        self.machine = f"{cpu_model()}, {count} thread{'' if count == 1 else 's'}"

    def problem(self, arguments: dict, tokens, backward: bool):
        """(o, do | None, a function of one call) of a case with these arguments."""
        from .. import _numpy
        from . import conformance
        has_bits = any(x.dtype.names for x in arguments.values() if isinstance(x, np.ndarray))
        arrays = conformance.bits if has_bits else _numpy

        def forward():
            given = arguments.copy()
            return _prepared.of_keywords(arrays, "attention", given).run(given)
        results = forward()
        if not backward:
            return results[0], None, forward
        o, lse = results[:2]
        do = np.random.default_rng(0).standard_normal(o.shape, np.float32)
        do = conformance.rounded(do, o.dtype)
        dlse = np.ones_like(lse) if "dlse" in tokens else None
        rest = {name: value for name, value in arguments.items() if name not in _HALF}

        def backward_pass():
            given = dict(rest, do=do, o=o, lse=lse, dlse=dlse,
                         **_prepared.gradient_outputs(arrays, gradients(tokens)))
            return _prepared.of_keywords(arrays, "attention_backward", given, True).run(given)
        return o, do, backward_pass

    def copies(self, read: int) -> int:
        return 1

    def drawn(self, case, backend: str | None):
        raise case_lines.UsageError("--grid: its tensors are drawn on a GPU; give --device cuda")

    def byte_rule(self, read: int, bytes_per_s: float, share: float) -> None:
        """Nothing: what a call costs beside reading depends on the machine."""

    def contender(self, call):
        """The function itself, called once: what cannot run says so before anything is timed."""
        call()
        return call

    def peak(self, dtype):
        """A contender that is the fastest multiply-add loop, with .tflops."""
        from . import conformance
        return conformance.PeakProbe(dtype, self._threads or 0)

    def bandwidth(self):
        """A contender that reads memory, with .bytes_per_s; None where there is none."""
        from . import conformance
        return conformance.BandwidthProbe(self._threads or 0)


class Cuda:
    """CUDA tensors through tessera.torch. A contender replays a CUDA graph of many calls, so that no
    host time is in it, on one stream that all share."""
    name = "cuda"
    cases_ahead = min(8, max(len(os.sched_getaffinity(0)) - 1, 1))
    _COLD_BYTES = 256 << 20  # between two readings: more than any cache holds
    _MAX_COPIES = 128
    _WINDOW_SECONDS = 0.01  # of one sample
    _MAX_CALLS = 200        # in one graph

    def __init__(self):
        try:
            import torch
        except ImportError as error:
            raise case_lines.UsageError("--device cuda: bench uses PyTorch there, and it is not "
                                        "installed") from error
        if not torch.cuda.is_available():
            raise case_lines.UsageError("--device cuda: PyTorch sees no CUDA device")
        self._torch = torch
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        self.explained_as = "sm{}{}".format(*torch.cuda.get_device_capability())
        self.machine = torch.cuda.get_device_name()

    def problem(self, arguments: dict, tokens, backward: bool):
        """(o, do | None as a NumPy array, a function of one call) of a case with these arguments."""
        from ..torch import attention
        from .through.torch import placer, to_numpy
        dtype, place = arguments["q"].dtype, placer("cuda")
        v_in_k = work.lies_in(arguments["v"], arguments["k"])
        arguments = {name: place(value) for name, value in arguments.items()}
        if v_in_k:
            arguments["v"] = arguments["k"][..., :arguments["v"].shape[-1]]
        if not backward:
            def forward():
                with self._torch.no_grad():
                    return attention(**arguments)
            o = forward()
            return o[0] if isinstance(o, tuple) else o, None, forward
        roots = [arguments[name[1:]].requires_grad_() for name in gradients(tokens)]
        results = attention(**arguments)
        results = results if isinstance(results, tuple) else (results,)
        do = self._torch.randn_like(results[0])
        outputs, grads = [results[0]], [do]
        if "dlse" in tokens:
            outputs.append(results[1])
            grads.append(self._torch.ones_like(results[1]))
        numpy_do = to_numpy(do.cpu(), dtype)
        return results[0], numpy_do, lambda: self._torch.autograd.grad(outputs, roots, grads,
                                                                       retain_graph=True)

    def drawn(self, case, backend: str | None):
        """(tensors, o, a function of one call) of a line of a grid."""
        from ..torch import attention
        try:
            tensors = case.tensors(self._torch, "cuda")
        except self._torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

        def forward():
            with self._torch.no_grad():
                return attention(**tensors, backend=backend)
        return tensors, forward(), forward

    def copies(self, read: int) -> int:
        """Sets of tensors of so many bytes that calls should take by turns."""
        return min(-(-self._COLD_BYTES // max(read, 1)), self._MAX_COPIES)

    def byte_rule(self, read: int, bytes_per_s: float, share: float) -> float:
        """Seconds that a call bound by memory may take: a launch, and reading at a share of its speed."""
        return 5e-6 + read / (share * bytes_per_s)

    def contender(self, call):
        """A function of .calls calls that returns when they have ended."""
        call()
        if hasattr(call, "wait"):
            return self._queued(call)
        calls = int(self._WINDOW_SECONDS / max(_seconds(self._torch, call), 1e-6))
        calls = min(max(calls, 1), self._MAX_CALLS)
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream):
            for _ in range(calls):
                call()
        graph.replay()
        replays = max(1, round(self._WINDOW_SECONDS / _seconds(self._torch, graph.replay)))

        def replay():
            for _ in range(replays):
                graph.replay()
            self._stream.synchronize()
        replay.calls = calls * replays
        replay.call = call  # the graph reads its tensors
        return replay

    def _queued(self, call):
        """A contender of another runtime, which cannot be captured: its calls queue on its own stream."""
        began = time.perf_counter()
        call.wait(call())
        calls = int(self._WINDOW_SECONDS / max(time.perf_counter() - began, 1e-6))
        calls = min(max(calls, 1), self._MAX_CALLS)

        def repeat():
            for _ in range(calls):
                result = call()
            call.wait(result)
        repeat.calls = calls
        return repeat

    def peak(self, dtype):
        """A contender that is PyTorch's matrix product of 8192, with .tflops."""
        return _Gemm(self._torch, dtype)

    def bandwidth(self):
        """A contender that is PyTorch's sum over 1 GiB, with .bytes_per_s."""
        return _Sum(self._torch)


def _seconds(torch, function) -> float:
    """How long the GPU takes for what the function queues."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


class _Gemm:
    _SIZE = 8192

    def __init__(self, torch, dtype):
        self._torch = torch
        kind = getattr(torch, np.dtype(dtype).name, torch.bfloat16)
        self._a = torch.randn(self._SIZE, self._SIZE, device="cuda").to(kind)
        self._rates: list[float] = []

    def run(self):
        def products():
            for _ in range(4):
                self._a @ self._a
        self._rates.append(4 * 2 * self._SIZE**3 / _seconds(self._torch, products))

    @property
    def tflops(self) -> float:
        return float(np.median(self._rates)) / 1e12


class _Sum:
    _BYTES = 1 << 30

    def __init__(self, torch):
        self._torch = torch
        self._x = torch.zeros(self._BYTES // 4, device="cuda")
        self._rates: list[float] = []

    def run(self):
        self._rates.append(self._BYTES / _seconds(self._torch, self._x.sum))

    @property
    def bytes_per_s(self) -> float:
        return float(np.median(self._rates))
