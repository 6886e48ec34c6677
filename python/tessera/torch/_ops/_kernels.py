# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators through ctypes: merge and dropout_mask always, those of attention where
binding.cc was not built (it does the same in a twentieth of the time)."""

from __future__ import annotations

import ctypes

import torch

from ... import _lib, _utilities
from ..._call import Call
from .. import _describe, _tensors


def attention(inputs, sizes, text):
    call = Call.of(text)
    outputs = _describe.results_of(call, inputs)
    if "accumulate" in call.values:
        _describe.Description.of_call(call, inputs, sizes)  # says what is wrong
    attention_into(outputs, inputs, sizes, text)
    return outputs


attention_backward = attention


def attention_into(outputs, inputs, sizes, text):
    call = Call.of(text)
    if inputs[0].device.type != "cpu":
        raise _lib.Refused(f"tessera.{call.operation}: q.device={str(inputs[0].device)!r}: needs "
                           "the compiled binding; build tessera with torch installed")
    described = _describe.Description.of_call(call, inputs, sizes, outputs)
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
    return _utilities.merged(_tensors, list(zip(os, lses, strict=True)), tuple(_lib.FORMATS)[format_code], out_dtype)


def dropout_mask(rng_state, b, hq, sq, sk, dropout_p, q_start=None, k_start=None):
    return _utilities.masked(_tensors, b, hq, sq, sk, dropout_p, rng_state, q_start, k_start)
