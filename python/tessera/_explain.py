# SPDX-License-Identifier: Apache-2.0
"""explain: which backend would run a call, why the others would not, and what would change that."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from typing import TYPE_CHECKING

import numpy as np

from . import _lib, _numpy
from ._call import ROWS, _args, _keywords, _prepared
from ._call._description import NEW, Description

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DEVICES = {"cpu": (_lib.CPU, 0), "sm80": (_lib.CUDA, 80), "sm89": (_lib.CUDA, 89),
            "sm90": (_lib.CUDA, 90), "sm100": (_lib.CUDA, 100), "sm120": (_lib.CUDA, 120)}
_CARDS = {"sm80": "A100", "sm89": "RTX 40, L4", "sm90": "H100, H200", "sm100": "B200", "sm120": "RTX 50"}


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The answer of explain; print it for a table of all backends."""
    backend: str | None             # the one that would run
    reasons: dict[str, list[str]]   # of every backend in order; empty for those that could run
    workspace_bytes: int | None     # of the one that would run
    kernel: str | None              # names of the kernels it would run in, where they have names
    suggestion: str | None          # the nearest change that would help, when none would run
    answer: dict                    # all that the library said

    def to_json(self) -> str:
        return json.dumps(self.answer, indent=2)

    @property
    def headline(self) -> str:
        chosen = self.backend or "no backend supports this"
        if self.kernel:
            chosen += f" (kernel {self.kernel})"
        if self.backend and not self._backends[self.backend]["built"]:
            chosen += ", not in this build"
        return f"{self.answer['case']} on {self.answer['device']}: {chosen}"

    def rows(self) -> list[tuple[str, str]]:
        """(backend, what it says) of every backend: a row for each reason, why another is faster, its kernels."""
        rows = []
        for name, reasons in self.reasons.items():
            own = self._backends[name]
            # What a build lacks for other devices than this one would help nobody.
            is_for_others = any(reason["id"] == "device" for reason in own["reasons"])
            said = [reason["text"] for reason in own["reasons"] if not (is_for_others and reason["id"] == "not_built")]
            if name == self.backend:
                size = "" if self.workspace_bytes is None else \
                    f", with {self.workspace_bytes} bytes of workspace"
                said = [f"runs{size}" if self._backends[name]["built"] else
                        "would run; install the wheel that has it (docs/installation.md)"]
            elif not reasons:
                said = ["could run; another comes first"]
            if own["yields"]:
                said.append(f"yields: {own['yields']}")
            if own["kernel"]:
                said.append(f"kernel: {own['kernel']}")
            rows += [(name if i == 0 else "", text) for i, text in enumerate(said)]
        return rows

    @property
    def _backends(self) -> dict[str, dict]:
        return {entry["name"]: entry for entry in self.answer["backends"]}

    def __str__(self) -> str:
        rows = self.rows()
        width = max((len(name) for name, _ in rows), default=0)
        lines = [self.headline] + [f"  {name:{width}}  {text}" for name, text in rows]
        return "\n".join(lines + ([f"  try: {self.suggestion}"] if self.suggestion else []))

    __repr__ = __str__


def explain(q: np.ndarray | str, k: np.ndarray | None = None, v: np.ndarray | None = None, *,
            backward: bool = False,
            grads: tuple[str, ...] | dict[str, np.ndarray] = ("dq", "dk", "dv"),
            dlse: np.ndarray | None = None, device: str = "cpu",
            **keywords: Unpack[_keywords.Every]) -> Explanation:
    """Says which backend attention(q, k, v, **keywords) would use, or attention_backward, and why.

    explain(text) asks about a case line instead. keywords are those of attention. With backward=True they are those of
    attention_backward, and grads and dlse too. device is "cpu", "sm80" (A100), "sm89" (RTX 40,
    L4), "sm90" (H100, H200), "sm100" (B200) or "sm120" (RTX 50); the hardware need not be there. Raises the ValueErrors
    that attention would raise, and computes nothing.

    >>> print(tessera.explain(q, k, v, causal=True))
    >>> tessera.explain("bwd bf16 b=2 s=1024 h=16 d=128 causal", device="sm90").backend
    """
    return explained(_numpy, q, k, v, backward, grads, dlse, device, keywords)


def explained(arrays, q, k, v, backward, grads, dlse, device, keywords: dict) -> Explanation:
    """explain of an array library; `device` None is that of q."""
    checker = _args.Arguments(arrays, "explain")
    backward = checker.boolean("backward", backward)
    _keywords.check_names("explain", keywords,
                          _keywords.BACKWARD if backward else _keywords.FORWARD)
    if isinstance(q, str):
        if k is not None or v is not None or backward or dlse is not None or keywords:
            raise checker.error("q", q, "a case text says everything; give no other argument "
                                "but device")
        return _answer(None, q, _device(checker, "cpu" if device is None else device))
    target = None if device is None else _device(checker, device)
    given = {"q": q, "k": k, "v": v, **keywords}
    if "rng_state" in given:
        given["rng_state"] = _prepared.rng_array(arrays, "explain", given["rng_state"], q)
    if backward:
        given.update(dict.fromkeys(ROWS[:3], NEW), dlse=dlse)
        given.update(_prepared.gradient_outputs(arrays, grads))
    elif dlse is not None:
        raise checker.error("dlse", dlse, "belongs to the backward pass; give backward=True")
    described = Description(arrays, "explain", given, backward).describe_outputs(given)
    if not backward and getattr(arrays, "are_first_columns", lambda *_: False)(v, k):
        described.arguments.problem.flags |= _lib.V_IN_K  # as the operator finds when it runs
    own = arrays.device(q)
    if own.kind == _lib.CPU and arrays.info(q).device != "meta":  # where there are values
        described.validate(described.tensors_of(given))
    return _answer(described.arguments, None, target or own)


def _answer(a: _args.Arguments | None, text: str | None, target: _lib.Device) -> Explanation:
    problem = ctypes.addressof(a.problem) if a else None
    encoded = None
    if text is not None:
        if "\0" in text:
            raise ValueError(f"tessera.explain: q={text!r}: must be one line of text")
        encoded = _lib.bytes_of(text)
    answer = _lib.read_json(
        lambda buffer, capacity, error: _lib.explain(problem, encoded, ctypes.addressof(target),
                                                     buffer, capacity, error), "explain")
    suggestion = answer["suggestion"]
    return Explanation(backend=answer["backend"], reasons=answer["reasons"],
                       workspace_bytes=answer["workspace_bytes"], kernel=answer["kernel"],
                       suggestion=suggestion and suggestion["text"], answer=answer)


def _device(checker: _args.Arguments, device) -> _lib.Device:
    if not isinstance(device, str) or device not in _DEVICES:
        raise checker.error("device", device, 'must be "cpu" or ' + ", ".join(
            f'"{name}" ({cards})' for name, cards in _CARDS.items()))
    kind, arch = _DEVICES[device]
    return _lib.Device(kind=kind, arch=arch)
