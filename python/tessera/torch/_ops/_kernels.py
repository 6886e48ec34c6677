# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators through ctypes: merge and dropout_mask always, those of attention where
binding.cc was not built (it does the same in a twentieth of the time)."""

from __future__ import annotations

import ctypes

import torch

from ... import _lib
from ..._call import Call, _args
from .. import _describe, _tensors


def attention(inputs, sizes, text):
    call = Call.of(text)
    outputs = _describe.results_of(call, inputs)
    if "accumulate" in call.values:
        _describe.Described.of_call(call, inputs, sizes)  # says what is wrong
    attention_into(outputs, inputs, sizes, text)
    return outputs


attention_backward = attention


def attention_into(outputs, inputs, sizes, text):
    call = Call.of(text)
    if inputs[0].device.type != "cpu":
        raise _lib.Refused(f"tessera.{call.operation}: q.device={str(inputs[0].device)!r}: needs "
                           "the compiled binding; build tessera with torch installed")
    described = _describe.Described.of_call(call, inputs, sizes, outputs)
    device, threads = _tensors.device(inputs[0]), torch.get_num_threads()
    size = described.prepare(device, threads)
    workspace = torch.empty(size + 63, dtype=torch.uint8)
    buffers = described.buffers(described.tensors, threads)
    buffers.workspace = -(-workspace.data_ptr() // 64) * 64
    buffers.workspace_bytes = size
    error = _lib.error_of_thread()
    code = _lib.run(ctypes.addressof(described.arguments.problem), ctypes.addressof(device),
                    ctypes.addressof(buffers), ctypes.addressof(error))
    _lib.check(code, error, call.operation, described.arguments.spelling)


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
