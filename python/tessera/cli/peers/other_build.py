# SPDX-License-Identifier: Apache-2.0
"""bench --against build:PATH: the same calls by another build of libtessera, through its C ABI.

Both builds compute on the same PyTorch tensors in one process, by turns, which is what a change of a
few percent needs to be seen."""

from __future__ import annotations

import ctypes

from .pytorch import import_torch
from .workload import Unsupported, Workload


class Build:
    """A libtessera.so beside the one that the package has loaded."""

    def __init__(self, path: str):
        from ... import _lib
        try:
            library = ctypes.CDLL(path)
            self.prepare, self.run = (_like(getattr(_lib, name), getattr(library, f"tessera_{name}"))
                                      for name in ("prepare", "run"))
        except (OSError, AttributeError) as error:
            raise Unsupported(f"build:{path} is no libtessera: {error}") from error

    def peer(self, w: Workload):
        """A function of one call of the workload."""
        torch = import_torch(w)
        from ..._call._description import NEW
        from ...torch._describe import Description
        from ..through.torch import placer
        place = placer(w.device)
        given = {name: place(value) for name, value in given_to_ours(w, torch).items()}
        call, o = self._caller(Description.of_keywords("attention", {**given, "return_lse": True}), w)
        if not w.backward:
            return call
        call()
        dlse = o["lse"].new_ones(o["lse"].shape) if w.dlse else None
        backward = {"do": place(w.do), "o": o["o"], "lse": o["lse"], "dlse": dlse,
                    **dict.fromkeys(w.gradients, NEW)}
        call, _ = self._caller(Description.of_keywords("attention_backward", given | backward, backward=True), w)
        return call

    def _caller(self, call, w: Workload):
        """A function that runs the call, and its outputs by name."""
        import torch

        from ... import _lib
        from ...torch import _tensors
        target, error = _tensors.device(call.tensors[_lib.INDEX["q"]]), _lib.error_of_thread()
        information = _lib.Info(struct_size=ctypes.sizeof(_lib.Info))
        problem, device, said = map(ctypes.addressof, (call.arguments.problem, target, error))
        threads = torch.get_num_threads()

        def check(code: int):
            _lib.check(code, error, call.arguments.operation, call.arguments.spelling)

        check(self.prepare(problem, device, threads, ctypes.addressof(information), said))
        outputs = {}
        for name in call.outputs:
            shape, dtype = call.arguments.new(name)
            outputs[name] = torch.empty(shape, dtype=_tensors.dtype(dtype), device=w.device)
        workspace = torch.empty(information.workspace_bytes, dtype=torch.uint8, device=w.device)
        buffers = call.buffers(call.tensors, threads)
        buffers.workspace, buffers.workspace_bytes = workspace.data_ptr(), workspace.numel()
        for name, tensor in outputs.items():
            buffers.data[_lib.INDEX[name]] = tensor.data_ptr()

        def run():
            if w.device == "cuda":  # a graph is captured on a stream of its own
                buffers.stream = torch.cuda.current_stream().cuda_stream
            check(self.run(problem, device, ctypes.addressof(buffers), said))
        run.kept = call, target, outputs, workspace  # what the addresses are of
        return run, outputs


def given_to_ours(w: Workload, torch) -> dict:
    """What the package's own call is given, the defaults of its front end included."""
    given = {"q": w.q, "k": w.k, "v": w.v, **w.keywords, "backend": w.backend}
    if w.device == "cuda":  # tessera.torch; NumPy's sums have a fixed order
        given.setdefault("deterministic", torch.are_deterministic_algorithms_enabled())
    return given


def _like(own, other):
    other.restype, other.argtypes = own.restype, own.argtypes
    return other
