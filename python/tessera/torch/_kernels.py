# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators through ctypes: merge and dropout_mask always, attention and its
backward pass where binding.cc was not built (it does the same in a twentieth of the time)."""

from __future__ import annotations

import ctypes

import torch

from .. import _args, _lib
from . import _describe, _tensors


def attention(*arguments):
    *inputs, max_logit = _describe.unpack(arguments)
    call = _call("attention", *inputs, max_logit=max_logit)
    outputs = _run(call)
    return outputs["o"], outputs["lse"], \
        outputs["max_logit"] if max_logit else outputs["lse"].new_empty(0)


def attention_out(out, *arguments):
    *inputs, max_logit = _describe.unpack(arguments)
    outputs = _run(_call("attention", *inputs, out=out, max_logit=max_logit))
    return outputs["lse"], outputs["max_logit"] if max_logit else outputs["lse"].new_empty(0)


def attention_backward(do, o, lse, dlse, wanted, *arguments):
    *inputs, _ = _describe.unpack(arguments)
    if do.stride(-1) != 1:
        do = do.contiguous()
    backward = {"do": do, "o": o, "lse": lse}
    if dlse is not None:
        backward["dlse"] = dlse
    call = _call("attention_backward", *inputs, backward=backward, grads=grads_of(wanted))
    return list(_run(call).values())


def grads_of(wanted: int) -> tuple[str, ...]:
    """The names of the bits of `wanted`, dq first."""
    return tuple(name for i, name in enumerate(_describe.GRADIENT_OF) if wanted >> i & 1)


def merge(os, lses, format_code, out_dtype=None):
    layout = tuple(_lib.FORMATS)[format_code]
    a = _args.Arguments(_tensors, "merge")
    a.layout_q = layout
    o = torch.empty_like(os[0], dtype=out_dtype, memory_format=torch.contiguous_format)
    lse = torch.empty_like(lses[0], memory_format=torch.contiguous_format)
    n = len(os)
    described, addresses = [], []
    for tensors, out, name, order in ((os, o, "o", a.order_q), (lses, lse, "lse", a.order_rows)):
        table, pointers = (_lib.Tensor * (n + 1))(), (ctypes.c_void_p * (n + 1))()
        for i, tensor in enumerate((*tensors, out)):
            a.put(name, f"parts[{i}].{name}", tensor, order)
            table[i] = a.problem.tensor[_lib.INDEX[name]]
            pointers[i] = tensor.data_ptr()
        described.append(table)
        addresses.append(pointers)
    size = ctypes.sizeof(_lib.Tensor)
    device, context = _tensors.device(o), _context(o)
    error = _lib.error_of_thread()
    code = _lib.merge(n, format_code, described[0], addresses[0], described[1], addresses[1],
                      ctypes.addressof(described[0]) + n * size, o.data_ptr(),
                      ctypes.addressof(described[1]) + n * size, lse.data_ptr(),
                      ctypes.addressof(device), ctypes.addressof(context), ctypes.addressof(error))
    _lib.check(code, error, "merge")
    return o, lse


def dropout_mask(rng_state, b, hq, sq, sk, dropout_p, q_start=None, k_start=None):
    keep = torch.empty((b, hq, sq, sk), dtype=torch.bool, device=rng_state.device)
    state, *starts = (None if x is None else x.to(torch.int64).contiguous()
                      for x in (rng_state, q_start, k_start))
    device, context = _tensors.device(keep), _context(keep)
    error = _lib.error_of_thread()
    code = _lib.dropout_mask_at(b, hq, sq, sk, dropout_p, state.data_ptr(), state.numel(),
                                *(None if x is None else x.data_ptr() for x in starts),
                                keep.data_ptr(), ctypes.addressof(device),
                                ctypes.addressof(context), ctypes.addressof(error))
    _lib.check(code, error, "dropout_mask")
    return keep


def _context(tensor) -> _lib.Buffers:
    buffers = _lib.Buffers(struct_size=ctypes.sizeof(_lib.Buffers))
    if tensor.device.type == "cuda":
        buffers.stream = torch.cuda.current_stream(tensor.device).cuda_stream
    else:
        buffers.num_threads = torch.get_num_threads()
    return buffers


def _call(operation, inputs, values, out=None, **more) -> _describe.Call:
    return _describe.Call(operation, {**_describe.keywords(inputs, values), "out": out},
                          same_lengths=bool(values[0] & _lib.SAME_LENGTHS), **more)


def _run(call: _describe.Call) -> dict[str, torch.Tensor]:
    q = call.given["q"]
    if q.device.type != "cpu":
        raise _lib.Refused(f"tessera.{call.arguments.operation}: q.device={str(q.device)!r}: needs "
                           "the compiled binding; build tessera with torch installed")
    outputs = call.allocate()
    num_threads = torch.get_num_threads()
    size = call.prepare(num_threads)
    workspace = torch.empty(size + 63, dtype=torch.uint8)
    buffers = call.buffers(num_threads)
    for name, tensor in outputs.items():
        buffers.data[_lib.INDEX[name]] = tensor.data_ptr()
    buffers.workspace = -(-workspace.data_ptr() // 64) * 64
    buffers.workspace_bytes = size
    call.run(buffers)
    return outputs
