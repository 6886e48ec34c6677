# SPDX-License-Identifier: Apache-2.0
"""python -m tessera check --through paddle: a case by tessera.paddle.attention and autograd."""

from __future__ import annotations

import numpy as np
import paddle

from ...paddle import attention, attention_backward, _tensors
from .. import case_lines
from ..conformance import Placer, is_beyond_autograd

_INTEGERS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def runner(args):
    """A function that computes a case's outputs into its own arrays."""
    if args.threads is not None:
        from ... import set_num_threads
        set_num_threads(args.threads)
    if args.device == "cuda" and not paddle.is_compiled_with_cuda():
        raise case_lines.UsageError("--device cuda: this Paddle is built without CUDA")
    paddle.set_device("gpu" if args.device == "cuda" else "cpu")
    return lambda case: run(case, args.backend)


def run(case, backend: str | None):
    outputs = case.group("outputs")
    case.poison_outputs()
    place = Placer(to_paddle)
    arguments = {name: place(value) for name, value in case.arguments().items()}
    backward = {name: place(value) for name, value in case.group("backward").items()}
    in_place = {name: place(array) for name, array in outputs.items()} if case.spec["out"] else {}
    if not case.is_backward:
        results = attention(**arguments, out=in_place.get("o"), backend=backend)
        results = dict(zip(outputs, results if isinstance(results, tuple) else (results,)))
    elif in_place or is_beyond_autograd(case):  # autograd has no notion of outputs of the caller's either
        gradients = attention_backward(**backward, **arguments, backend=backend,
                                       grads=in_place or tuple(case.spec["grads"]))
        results = {name: getattr(gradients, name) for name in outputs}
    else:
        names = [name.removeprefix("d") for name in case.spec["grads"]]
        results = by_autograd(arguments, backward, names, backend)
        results = {f"d{name}": gradient for name, gradient in results.items()}
    for name, result in results.items():
        if tuple(result.shape) != outputs[name].shape:
            raise ValueError(f"tessera.check: {name}: {list(result.shape)} came back, not "
                             f"{list(outputs[name].shape)}")
        outputs[name][...] = to_numpy(result.detach(), outputs[name].dtype)


def by_autograd(arguments: dict, backward: dict, names, backend) -> dict:
    """Gradients of the arguments `names`, by Paddle's autograd."""
    for name in names:
        arguments[name].stop_gradient = False
    results = attention(**{**arguments, "return_lse": True}, backend=backend)
    # The error rule is about a backward pass that is given the reference's o and lse: they take the
    # place of those that autograd has saved.
    for saved, name in zip(results, ("o", "lse")):
        paddle.assign(backward[name], saved.detach())
    roots = list(zip(results, (backward["do"], backward.get("dlse"))))
    roots = [(x, dx) for x, dx in roots if dx is not None]
    gradients = paddle.grad([x for x, _ in roots], [arguments[name] for name in names],
                            [dx for _, dx in roots])
    return dict(zip(names, gradients))


def to_paddle(array: np.ndarray) -> paddle.Tensor:
    """A copy with the array's strides and all that lies between its elements."""
    name = array.dtype.name
    if array.size == 0:
        return paddle.empty(array.shape, dtype=name)
    plain = array.view(_INTEGERS[name]) if name in _INTEGERS else array
    strides = [stride // array.itemsize for stride in array.strides]
    flat = np.lib.stride_tricks.as_strided(
        plain, [sum((n - 1) * s for n, s in zip(array.shape, strides)) + 1], [array.itemsize])
    tensor = paddle.to_tensor(flat)
    tensor = tensor.view(name) if name in _INTEGERS else tensor
    return paddle.as_strided(tensor, list(array.shape), strides)


def to_numpy(tensor: paddle.Tensor, dtype: np.dtype) -> np.ndarray:
    name = _tensors.dtype_name(tensor.dtype)
    if name != dtype.name:
        raise ValueError(f"tessera.check: {name} came back, not {dtype.name}")
    if name in _INTEGERS:
        return tensor.contiguous().view(_INTEGERS[name]).numpy().view(dtype)
    return tensor.numpy()
