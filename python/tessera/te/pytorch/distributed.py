# SPDX-License-Identifier: Apache-2.0
"""The states of random generators that tensor-parallel ranks share, or do not share."""

from __future__ import annotations

import contextlib

import torch

from .._names import missing

__all__ = ["CudaRNGStatesTracker"]
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


def _generator() -> torch.Generator:
    if torch.cuda.is_available():
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator
