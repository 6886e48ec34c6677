# SPDX-License-Identifier: Apache-2.0
"""python -m tessera check --through torch: a case by tessera.torch.attention and autograd."""

from __future__ import annotations

import numpy as np
import torch

from ...torch import attention, attention_backward
from .. import case_lines
from ..conformance import Placer, is_beyond_autograd, name_of


def runner(args):
    """A function that computes a case's outputs into its own arrays."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise case_lines.UsageError("--device cuda: PyTorch sees no CUDA device")
    return lambda case: run(case, args.backend, args.device)


def run(case, backend: str | None, device: str = "cpu"):
    outputs = case.group("outputs")
    case.poison_outputs()
    place = placer(device)
    arguments = {name: place(value) for name, value in case.arguments().items()}
    adds = bool(arguments.get("accumulate"))
    into = {name: place(array) for name, array in outputs.items()} if adds else {}
    if adds and not case.is_backward:
        arguments["out"] = into["o"]
    if case.is_backward and is_beyond_autograd(case):
        backward = {name: place(value) for name, value in case.group("backward").items()}
        gradients = attention_backward(**backward, **arguments, grads=into or tuple(case.spec["grads"]),
                                       backend=backend)
        for name in outputs:
            outputs[name][...] = to_numpy(getattr(gradients, name).cpu(), outputs[name].dtype)
        return
    with_gradient = [name[1:] for name in outputs] if case.is_backward else []
    for name in with_gradient:
        arguments[name].requires_grad_()
    want_lse = case.is_backward or "lse" in outputs
    results = attention(**{**arguments, "return_lse": want_lse}, backend=backend)
    if not case.is_backward:
        results = dict(zip(outputs, results if isinstance(results, tuple) else (results,)))
    else:
        backward = {name: place(value) for name, value in case.group("backward").items()}
        # The error rule is about a backward pass that is given the reference's o and lse: they
        # take the place of those that autograd has saved.
        for saved, name in zip(results, ("o", "lse")):
            saved.data.copy_(backward[name])
        roots = list(zip(results, (backward["do"], backward.get("dlse"))))
        roots = [(x, dx) for x, dx in roots if dx is not None]
        gradients = torch.autograd.grad([x for x, _ in roots],
                                        [arguments[name] for name in with_gradient],
                                        [dx for _, dx in roots])
        results = dict(zip(outputs, gradients))
    for name, result in results.items():
        if tuple(result.shape) != outputs[name].shape:
            raise ValueError(f"tessera.check: {name}: {list(result.shape)} came back, not "
                             f"{list(outputs[name].shape)}")
        outputs[name][...] = to_numpy(result.detach().cpu(), outputs[name].dtype)


def placer(device: str) -> Placer:
    """Arrays as tensors of the same strides on `device`."""
    return Placer(lambda array: to_torch(array).to(device))


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The same memory, ml_dtypes' types and bits of them included."""
    dtype = getattr(torch, name_of(array.dtype))
    plain = array.view(f"i{array.dtype.itemsize}") if array.dtype.kind == "V" or \
        array.dtype.name.startswith(("bfloat", "float8")) else array
    strides = [stride // array.itemsize for stride in array.strides]
    if array.size == 0:
        return torch.empty_strided(array.shape, strides, dtype=dtype)
    flat = np.lib.stride_tricks.as_strided(
        plain, [sum((n - 1) * s for n, s in zip(array.shape, strides)) + 1], [array.itemsize])
    return torch.as_strided(torch.from_numpy(flat).view(dtype), array.shape, strides)


def to_numpy(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    if str(tensor.dtype) != f"torch.{name_of(dtype)}":
        raise ValueError(f"tessera.check: {tensor.dtype} came back, not {name_of(dtype)}")
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        integers = torch.int16 if tensor.element_size() == 2 else torch.int8
        return tensor.view(integers).numpy().view(dtype)
    return tensor.numpy()
