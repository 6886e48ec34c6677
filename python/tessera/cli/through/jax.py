# SPDX-License-Identifier: Apache-2.0
"""python -m tessera check --through jax: a case by tessera.jax.attention or attention_backward, in a
jitted program. JAX's arrays are dense: what a case says of strides and of `out` is not tried."""

from __future__ import annotations

import jax
import numpy as np

from ... import _lib
from ...jax import attention, attention_backward
from .. import case_lines
from ..conformance import Placer


def runner(args):
    """A function that computes a case's outputs into its own arrays, with x64 for fp64 and int64."""
    if args.threads is not None:
        raise case_lines.UsageError("--threads: JAX has its own; use taskset")
    try:
        device = jax.devices("cuda" if args.device == "cuda" else "cpu")[0]
    except RuntimeError as error:
        raise case_lines.UsageError(f"--device {args.device}: {error}") from error

    def in_x64(case):
        with jax.enable_x64(True):
            return run(case, args.backend, device)
    return in_x64


def run(case, backend: str | None, device):
    if case.arguments().get("accumulate"):
        raise _lib.Refused("tessera.check: accumulate: adds to what outputs hold, and JAX has none to give")
    outputs = case.group("outputs")
    case.poison_outputs()
    place = Placer(lambda x: jax.device_put(np.ascontiguousarray(x), device))
    given = dict(case.arguments(), backend=backend)
    arrays = {name: place(x) for name, x in given.items() if _is_array(x)}
    options = {name: x for name, x in given.items() if name not in arrays}
    if case.is_backward:
        # The error rule is about a backward pass that is given the reference's o and lse.
        arrays |= {name: place(x) for name, x in case.group("backward").items()}
        gradients = _jitted(attention_backward, arrays, {**options, "grads": tuple(case.spec["grads"])})
        results = {name: getattr(gradients, name) for name in outputs}
    else:
        results = _jitted(attention, arrays, {**options, "return_lse": "lse" in outputs})
        results = dict(zip(outputs, results if isinstance(results, tuple) else (results,)))
    for name, result in results.items():
        if result.shape != outputs[name].shape or result.dtype != outputs[name].dtype:
            raise ValueError(f"tessera.check: {name}: {result.dtype}{list(result.shape)} came back, not "
                             f"{outputs[name].dtype}{list(outputs[name].shape)}")
        outputs[name][...] = np.asarray(result)


def _jitted(function, arrays: dict, options: dict):
    """function(**arrays, **options) as one program, in which an array given twice is one."""
    leaves, tree = jax.tree.flatten(arrays)

    def program(unique):
        return function(**jax.tree.unflatten(tree, [unique[id(x)] for x in leaves]), **options)
    return jax.jit(program)({id(x): x for x in leaves})


def _is_array(x) -> bool:
    return isinstance(x, np.ndarray) or isinstance(x, tuple) and any(map(_is_array, x))
