# SPDX-License-Identifier: Apache-2.0
"""Whether tessera's kernels can."""

from __future__ import annotations

import functools

from ... import _explain, _lib


@functools.lru_cache(maxsize=1024)
def explained(line: str, device: str) -> tuple[str, ...]:
    """reasons() of a case line."""
    return reasons(lambda: None, line, device)


def reasons(described, line: str | None, device: str) -> tuple[str, ...]:
    """Why no kernel of a device ("cpu", "cuda:0", "sm90") runs a case, or the arguments that described() returns;
    empty if one does."""
    kind, _, number = device.partition(":")
    if device == "cpu" or kind == "cuda":
        kind = _lib.CPU if device == "cpu" else _lib.CUDA
        target = _lib.Device(kind=kind, ordinal=int(number or 0))
    else:
        kind, arch = _explain._DEVICES[device]
        target = _lib.Device(kind=kind, arch=arch)
    try:
        answer = _explain._answer(described(), line, target)
    except ValueError as error:
        return (str(error),)
    if answer.backend is not None:
        return ()
    return tuple(f"{name}: {reason}" for name, texts in answer.reasons.items()
                 for reason in texts if name != "reference")
