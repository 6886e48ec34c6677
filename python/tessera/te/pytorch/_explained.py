# SPDX-License-Identifier: Apache-2.0
"""Whether tessera's kernels can."""

from __future__ import annotations

import dataclasses

from ... import _explain, _lib
from ..._call._description import Description
from ...torch import _tensors


@dataclasses.dataclass(frozen=True)
class Question:
    """One pass: what tessera._call._description.Description takes, with q, k and v."""
    backward: bool
    given: dict

    def described(self) -> Description:
        return Description(_tensors, "explain", dict(self.given), self.backward).describe_outputs(self.given)


def explained(question: Question, device: str) -> tuple[str, ...]:
    """Why no kernel of a device ("cpu", "cuda:0", "sm90") runs a pass; empty if one does."""
    kind, _, number = device.partition(":")
    if device == "cpu" or kind == "cuda":
        kind = _lib.CPU if device == "cpu" else _lib.CUDA
        target = _lib.Device(kind=kind, ordinal=int(number or 0))
    else:
        kind, arch = _explain._DEVICES[device]
        target = _lib.Device(kind=kind, arch=arch)
    try:
        answer = _explain._answer(question.described().arguments, None, target)
    except ValueError as error:
        return (str(error),)
    if answer.backend is not None:
        return ()
    return tuple(f"{name}: {reason}" for name, texts in answer.reasons.items()
                 for reason in texts if name != "reference")
