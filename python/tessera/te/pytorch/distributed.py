# SPDX-License-Identifier: Apache-2.0
"""Checkpointing, which computes activations again in the backward pass; and states of random generators that
tensor-parallel ranks share, or do not share."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.utils import checkpoint as torch_checkpoint

from .._names import missing
from .quantization import FP8GlobalStateManager, computed_again

__all__ = ["CudaRNGStatesTracker", "checkpoint"]
__getattr__ = missing(__name__)


class CudaRNGStatesTracker:
    """Named states of PyTorch's generator, of the CUDA device or, where there is none, of the CPU.
    DotProductAttention(get_rng_state_tracker=) draws dropout's state from "model-parallel-rng".

    >>> tracker = CudaRNGStatesTracker()
    >>> tracker.add("model-parallel-rng", seed)
    """

    def __init__(self):
        self.reset()

    def reset(self):
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]):
        self.states_ = states

    def add(self, name: str, seed: int):
        """A state that begins as torch.manual_seed(seed) would."""
        if seed in self.seeds_:
            raise RuntimeError(f"CudaRNGStatesTracker.add: seed={seed}: was added before; two names "
                               "must not share one")
        if name in self.states_:
            raise RuntimeError(f"CudaRNGStatesTracker.add: name={name!r}: was added before")
        self.seeds_.add(seed)
        with self._kept():
            _generator().manual_seed(seed)
            self.states_[name] = _generator().get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng"):
        """Random numbers inside come from the named state, which goes on from there."""
        if name not in self.states_:
            raise KeyError(f"CudaRNGStatesTracker.fork: name={name!r}: was not added; "
                           f"{sorted(self.states_)} were")
        with self._kept():
            _generator().set_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = _generator().get_state()

    @staticmethod
    @contextlib.contextmanager
    def _kept():
        before = _generator().get_state()
        try:
            yield
        finally:
            _generator().set_state(before)


def checkpoint(function, *args, **kwargs):
    """Returns function(*args, **kwargs) without keeping its activations. The backward pass computes them again,
    with the same random numbers and, in an FP8 region, in that region with the same scales.

    TE's keywords are taken from kwargs: use_reentrant (default True: only gradients of args, by
    backward() alone; False: of everything, by torch.autograd.grad too), get_rng_state_tracker (a
    function that returns a CudaRNGStatesTracker, whose states are the same both times),
    distribute_saved_activations and tp_group; beside them preserve_rng_state, determinism_check, context_fn
    and debug of torch.utils.checkpoint. Everything else is the function's.
    NotImplementedError: distribute_saved_activations=True.
    """
    distributed, _ = kwargs.pop("distribute_saved_activations", False), kwargs.pop("tp_group", None)
    if distributed:
        raise NotImplementedError("checkpoint: distribute_saved_activations=True: tessera.te's layers run on one "
                                  "device; leave it at False")
    make_tracker = kwargs.pop("get_rng_state_tracker", None)
    tracker = None if make_tracker is None else make_tracker()
    own = {name: kwargs.pop(name) for name in ("determinism_check", "context_fn", "debug", "preserve_rng_state")
           if name in kwargs}
    own["use_reentrant"] = kwargs.pop("use_reentrant", True)
    run = functools.partial(function if tracker is None else _with_states(function, tracker), **kwargs)
    if FP8GlobalStateManager.is_fp8_enabled():
        run = computed_again(run)
    return torch_checkpoint.checkpoint(run, *args, **own)


def _with_states(function, tracker: CudaRNGStatesTracker):
    """`function`, which begins with the tracker's states of its first call; later calls leave the
    tracker as they found it."""
    first: list[dict] = []

    def run(*args, **kwargs):
        if not first:
            first.append(tracker.get_states())
            return function(*args, **kwargs)
        before = tracker.get_states()
        tracker.set_states(dict(first[0]))
        try:
            return function(*args, **kwargs)
        finally:
            tracker.set_states(before)
    return run


def _generator() -> torch.Generator:
    if torch.cuda.is_available():
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator
