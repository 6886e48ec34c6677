# SPDX-License-Identifier: Apache-2.0
"""Tables of rotary position embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import _numpy
from ._call import _args


def rope_table(max_pos: int, r: int, *, base: float = 10000.0,
               scaling: Mapping[str, Any] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of the angles p / base^(2i/r), fp32 [max_pos, r/2], for positions p and pairs i.

    r is the number of elements of a head that turn, even and >= 2. Angles are computed in fp64, so that
    they are right at any position. scaling stretches them, as transformers does, by the keys of its
    `rope_parameters`; "type" (or "rope_type") is one of

        "linear"    p / factor (Chen et al., arXiv:2306.15595)
        "dynamic"   base grows once max_pos exceeds max_position_embeddings
        "ntk"       base · factor^(r / (r - 2))
        "yarn"      Peng et al., arXiv:2309.00071: factor, original_max_position_embeddings, beta_fast,
                    beta_slow, mscale, mscale_all_dim, attention_factor, truncate
        "llama3"    factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
        "longrope"  Ding et al., arXiv:2402.13753: short_factor, long_factor [r/2], factor,
                    attention_factor, original_max_position_embeddings

    The attention factor of "yarn" and "longrope" is in the tables. ValueError: any other value, a key
    that is missing or that the type does not have.

    >>> cos, sin = tessera.rope_table(4096, 128, base=500000.0)
    """
    a = _args.Arguments(_numpy, "rope_table")
    max_pos, r = a.integer("max_pos", max_pos), a.integer("r", r)
    if max_pos < 0:
        raise a.error("max_pos", max_pos, "must not be negative")
    if r < 2 or r % 2:
        raise a.error("r", r, "must be even and at least 2: elements turn in pairs")
    base = a.number("base", base)
    if not (math.isfinite(base) and base > 0):
        raise a.error("base", base, "must be finite and above 0")
    frequency, factor = _Scaling(a, scaling, max_pos, r, base).result()
    angles = np.arange(max_pos, dtype=np.float64)[:, None] * frequency
    return tuple((factor * turn(angles)).astype(np.float32) for turn in (np.cos, np.sin))


class _Scaling:
    """The keys of `scaling`, each asked for once, and what they make of the frequencies."""

    def __init__(self, a: _args.Arguments, scaling, max_pos: int, r: int, base: float):
        if scaling is not None and not isinstance(scaling, Mapping):
            raise a.error("scaling", scaling, 'must be a dictionary such as {"type": "linear", '
                          '"factor": 2.0}')
        self.a, self.max_pos, self.r, self.base = a, max_pos, r, base
        self.left = dict(scaling or {"type": "default"})
        self.kind = self.left.pop("type", None) or self.left.pop("rope_type", None)
        self.left.pop("rope_type", None)
        self.left.pop("rope_theta", None)  # transformers keeps the base there; `base` is given

    def result(self) -> tuple[np.ndarray, float]:
        """Frequencies [r/2] and the factor on cos and sin."""
        if self.kind not in _KINDS:
            raise self.a.error('scaling["type"]', self.kind, "must be " + ", ".join(
                f'"{kind}"' for kind in _KINDS))
        result = _KINDS[self.kind](self)
        if self.left:
            name, value = next(iter(self.left.items()))
            raise self.a.error(f'scaling["{name}"]', value, f'is no key of type "{self.kind}"')
        return result

    def number(self, name: str, default=None, least: float = 0.0) -> float | None:
        value = self.left.pop(name, None)
        if value is None:
            return default
        value = self.a.number(f'scaling["{name}"]', value)
        if not (math.isfinite(value) and value > least):
            raise self.a.error(f'scaling["{name}"]', value, f"must be finite and above {least:g}")
        return value

    def needed(self, name: str) -> float:
        value = self.number(name)
        if value is None:
            raise self.a.error(f'scaling["{name}"]', None, f'type "{self.kind}" needs it')
        return value

    def stretch(self, original: float) -> float:
        """factor, or what max_position_embeddings is of the original length."""
        longest = self.number("max_position_embeddings", float(self.max_pos))
        return self.number("factor", longest / original)

    def frequencies(self, base: float | None = None) -> np.ndarray:
        return (base or self.base) ** (-np.arange(0, self.r, 2, dtype=np.float64) / self.r)

    # ---- the kinds ----

    def default(self):
        return self.frequencies(), 1.0

    def linear(self):
        return self.frequencies() / self.needed("factor"), 1.0

    def ntk(self):
        return self.frequencies(self._grown(self.needed("factor"))), 1.0

    def dynamic(self):
        longest = self.number("original_max_position_embeddings")
        longest = self.needed("max_position_embeddings") if longest is None else \
            self.number("max_position_embeddings", longest)
        factor = self.needed("factor")
        ratio = max(self.max_pos, longest) / longest
        return self.frequencies(self._grown(factor * ratio - (factor - 1))), 1.0

    def _grown(self, factor: float) -> float:
        if self.r == 2:
            raise self.a.error("r", self.r, f'must be above 2 with scaling type "{self.kind}"')
        return self.base * factor ** (self.r / (self.r - 2))

    def yarn(self):
        original = self.needed("original_max_position_embeddings")
        factor = self.stretch(original)
        mscale, all_dim = self.number("mscale"), self.number("mscale_all_dim")

        def attention(mscale=1.0):
            return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

        inferred = attention(mscale) / attention(all_dim) if mscale and all_dim else attention()
        low, high = (self._pair_that_turns(times, original)
                     for times in (self.number("beta_fast", 32.0), self.number("beta_slow", 1.0)))
        if self.left.pop("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.r - 1)
        ramp = np.clip((np.arange(self.r // 2) - low) / (high - low or 0.001), 0, 1)
        frequency = self.frequencies()
        return frequency / factor * ramp + frequency * (1 - ramp), \
            self.number("attention_factor", inferred)

    def _pair_that_turns(self, times: float, original: float) -> float:
        """The pair, as a real number, that turns so many times within the original length."""
        return self.r * math.log(original / (times * 2 * math.pi)) / (2 * math.log(self.base))

    def llama3(self):
        factor, original = self.needed("factor"), self.needed("original_max_position_embeddings")
        low, high = self.needed("low_freq_factor"), self.needed("high_freq_factor")
        frequency = self.frequencies()
        turns = original * frequency / (2 * math.pi)  # within the original length
        smooth = (turns - low) / (high - low)
        between = (1 - smooth) * frequency / factor + smooth * frequency
        return np.where(turns < low, frequency / factor,
                        np.where(turns > high, frequency, between)), 1.0

    def longrope(self):
        original = self.needed("original_max_position_embeddings")
        factor = self.stretch(original)
        inferred = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        short, long = self._list("short_factor"), self._list("long_factor")
        stretched = long if self.max_pos > original else short
        return self.frequencies() / stretched, self.number("attention_factor", inferred)

    def _list(self, name: str) -> np.ndarray:
        value = self.left.pop(name, None)
        if not isinstance(value, (list, tuple, np.ndarray)) or len(value) != self.r // 2:
            raise self.a.error(f'scaling["{name}"]', value, f"must be a list of r/2={self.r // 2} "
                               "factors")
        return np.asarray(value, np.float64)


_KINDS: dict[str, Callable[[_Scaling], tuple[np.ndarray, float]]] = {
    kind: getattr(_Scaling, kind)
    for kind in ("default", "linear", "dynamic", "ntk", "yarn", "llama3", "longrope")}
