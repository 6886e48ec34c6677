# SPDX-License-Identifier: Apache-2.0
"""The C library, loaded by ctypes: the mirror of include/tessera.h and the translation of its errors.

Nothing here knows NumPy or any other array library. Struct mirrors and tables are checked against
the header by tests/python/library/test_mirror.py. Functions take addresses as plain integers, which is what
makes a call cheap; ctypes releases the GIL while the library runs.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import re
import threading
from ctypes import (CFUNCTYPE, POINTER, c_char, c_char_p, c_double, c_int32, c_int64, c_uint32,
                    c_uint64, c_void_p)
from pathlib import Path

OK, INVALID, REFUSED, OUT_OF_MEMORY, FAILED = range(5)
FORWARD, BACKWARD = 0, 1
CPU, CUDA = 0, 1

# dtype name, as NumPy, ml_dtypes, PyTorch, JAX and Paddle print it -> enum tessera_dtype
DTYPES = {
    "float32": 1, "bfloat16": 2, "float16": 3, "float64": 4, "float8_e4m3fn": 5, "float8_e5m2": 6,
    "bool": 7, "int32": 8, "int64": 9,
}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}
FORMATS = {"bshd": 0, "sbhd": 1, "bhsd": 2, "thd": 3}
ALIGNS = {"top_left": 1, "bottom_right": 2}
ALIGN_GIVEN = 3

# enum tessera_flags in lower case, in order.
FLAGS = {name: 1 << bit for bit, name in enumerate((
    "causal", "window", "mask_drop", "bias_pre_scale", "softmax_scale", "softcap", "dropout", "sink_off_by_one",
    "deterministic", "batch_invariant", "allow_quadratic", "same_lengths", "max_seqlen_q", "max_seqlen_k", "partial",
    "accumulate", "v_in_k", "fp8_products", "smooth_mean", "smooth_hadamard"))}
(CAUSAL, WINDOW, MASK_DROP, BIAS_PRE_SCALE, SOFTMAX_SCALE, SOFTCAP, DROPOUT, SINK_OFF_BY_ONE,
 DETERMINISTIC, BATCH_INVARIANT, ALLOW_QUADRATIC, SAME_LENGTHS, MAX_SEQLEN_Q, MAX_SEQLEN_K, PARTIAL,
 ACCUMULATE, V_IN_K, FP8_PRODUCTS, SMOOTH_MEAN, SMOOTH_HADAMARD) = FLAGS.values()

# enum tessera_index in lower case, in order.
TENSORS = (
    "q", "k", "v", "bias", "mask", "key_ranges", "segment_ids_q", "segment_ids_k", "sink",
    "alibi_slopes", "seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k",
    "cu_seqlens_q_padded", "cu_seqlens_k_padded", "page_table_k", "page_table_v", "k_scale",
    "v_scale", "rng_state", "o", "lse", "max_logit", "do", "dlse", "dq", "dk", "dv", "dbias",
    "dsink", "dalibi_slopes", "q_start", "k_start", "shift", "q_scale", "do_scale", "o_scale",
    "dq_scale", "dk_scale", "dv_scale", "amax_o", "amax_dq", "amax_dk", "amax_dv", "keep_tail",
    "windows",
)
INDEX = {name: i for i, name in enumerate(TENSORS)}


class Tensor(ctypes.Structure):
    _fields_ = [("dtype", c_int32), ("reserved", c_int32), ("extent", c_int64 * 4),
                ("stride", c_int64 * 4)]


class Problem(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("pass_", c_int32), ("flags", c_uint32),
                ("align", c_int32), ("format_q", c_int32), ("format_kv", c_int32),
                ("window_left", c_int64), ("window_right", c_int64), ("max_seqlen_q", c_int64),
                ("max_seqlen_k", c_int64), ("backend", c_char * 16), ("q_scale_block", c_int32),
                ("k_scale_block", c_int32), ("shift", c_int64), ("reserved", c_int64 * 4),
                ("tensor", Tensor * len(TENSORS))]


class Buffers(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("num_threads", c_int32), ("softmax_scale", c_double),
                ("softcap", c_double), ("dropout_p", c_double), ("stream", c_uint64),
                ("parallel_for", c_uint64), ("parallel_context", c_uint64), ("workspace", c_uint64),
                ("workspace_bytes", c_int64), ("sm_margin", c_int32), ("reserved_half", c_int32),
                ("interrupt", c_uint64), ("allocate", c_uint64), ("allocate_context", c_uint64),
                ("reserved", c_int64 * 2), ("data", c_uint64 * len(TENSORS))]


class Device(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("ordinal", c_int32), ("arch", c_int32), ("reserved", c_int32)]


class Info(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("workspace_bytes", c_int64),
                ("backend", c_char * 16)]


class Error(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("code", c_int32), ("message", c_char * 2048)]


# enum tessera_rotate_index and tessera_append_index in lower case, in order; arrays have room for more.
ROTATE_TENSORS = ("x", "y", "cos", "sin", "positions")
APPEND_TENSORS = ("k", "v", "k_cache", "v_cache", "seqlens", "cu_seqlens", "page_table", "k_scale",
                  "v_scale", "cos", "sin", "q", "q_out", "seqlens_q")
INTERLEAVED, INVERSE = 1 << 0, 1 << 1


def _arguments(room: int):
    """The fields of tessera_rotate_args and tessera_append_args."""
    return [("struct_size", c_uint32), ("format", c_int32), ("flags", c_uint32),
            ("reserved_half", c_int32), ("reserved", c_int64 * 4), ("tensor", Tensor * room),
            ("data", c_uint64 * room)]


class RotateArgs(ctypes.Structure):
    _fields_ = _arguments(8)


class AppendArgs(ctypes.Structure):
    _fields_ = _arguments(16)


class Refused(RuntimeError):
    """Legal, but no enabled backend can do it; the message lists every backend with its reasons."""


_EXCEPTIONS = {INVALID: ValueError, REFUSED: Refused, OUT_OF_MEMORY: MemoryError}


def raise_error(error: Error, operation: str, spelling: dict[str, str] | None = None):
    """Raises what error says, in the words of the Python API: the front door's operation gives way
    to `operation`, and a tensor at the head of the message to how the caller spelled it and its shape."""
    message = error.message.decode("utf-8", "replace")
    head, colon, rest = message.partition(": ")
    if colon and head.startswith(("tessera.", "tessera_")):
        message = rest
    field = re.match(r"\w+", message)
    if field and spelling and field[0] in spelling:
        message = spelling[field[0]] + message[field.end():]
    shape, equals, rest = message.partition("=")
    if spelling and shape.endswith(".shape") and shape in spelling:
        message = f"{shape}={spelling[shape]}, read as {rest}"
    raise _EXCEPTIONS.get(error.code, RuntimeError)(f"tessera.{operation}: {message}")


def load(name: str) -> ctypes.CDLL:
    """libtessera.so, or libtessera_check.so: beside this file in a wheel, in build/lib in a checkout."""
    package = Path(__file__).resolve().parent
    places = [package / name, package.parents[1] / "build" / "lib" / name]
    for place in places:
        if place.exists():
            try:
                return ctypes.CDLL(str(place))
            except OSError as error:
                raise ImportError(f"tessera: {place} does not load: {error}; rebuild it with "
                                  "`./dev build`, or reinstall tessera-attention") from error
    raise ImportError(f"tessera: {name} not found; looked at " +
                      " and ".join(map(str, places)) +
                      "; build it with `./dev build` in a source checkout, or install the wheel "
                      "with `pip install tessera-attention`")


LogCallback = CFUNCTYPE(None, c_void_p, c_char_p, c_char_p)
lib = load("libtessera.so")


def _declare(name: str, result, *arguments):
    function = getattr(lib, name)
    function.restype, function.argtypes = result, arguments
    return function


_address = c_void_p  # of a struct: an int, or a ctypes pointer
version = _declare("tessera_version", c_char_p)
outputs = _declare("tessera_outputs", c_int32, _address, POINTER(c_int32), c_int32, _address)
prepare = _declare("tessera_prepare", c_int32, _address, _address, c_int32, _address, _address)
run = _declare("tessera_run", c_int32, _address, _address, _address, _address)
validate = _declare("tessera_validate", c_int32, _address, _address, _address, _address)
explain = _declare("tessera_explain", c_int64, _address, c_char_p, _address, c_char_p, c_int64,
                   _address)
merge = _declare("tessera_merge", c_int32, c_int64, c_int32, POINTER(Tensor), POINTER(c_void_p),
                 POINTER(Tensor), POINTER(c_void_p), _address, c_void_p, _address, c_void_p,
                 _address, _address, _address)
sum_rows = _declare("tessera_sum_rows", c_int32, c_int64, c_void_p, c_int64, POINTER(c_void_p), _address, _address,
                    _address)
dropout_mask_at = _declare("tessera_dropout_mask_at", c_int32, c_int64, c_int64, c_int64, c_int64,
                           c_double, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, _address,
                           _address, _address)
rotate = _declare("tessera_rotate", c_int32, _address, _address, _address, _address)
append = _declare("tessera_append", c_int32, _address, _address, _address, _address)
backend_name = _declare("tessera_backend_name", c_char_p, c_int32)
describe = _declare("tessera_describe", c_int64, c_char_p, c_int64)
set_log = _declare("tessera_set_log", None, c_void_p, c_void_p)

CPU_DEVICE = Device(kind=CPU)
CPU_ADDRESS = ctypes.addressof(CPU_DEVICE)
_local = threading.local()


def bytes_of(text: str) -> bytes:
    """Text for the library, whose messages quote it: a lone surrogate, which UTF-8 lacks, as an escape."""
    return text.encode("utf-8", "backslashreplace")


def error_of_thread() -> Error:
    """This thread's error struct, ready for a call."""
    try:
        return _local.error
    except AttributeError:
        _local.error = Error(struct_size=ctypes.sizeof(Error))
        return _local.error


def check(code: int, error: Error, operation: str, spelling: dict[str, str] | None = None):
    if code != OK:
        raise_error(error, operation, spelling)


def read_json(call, operation: str):
    """The answer of a function that writes text into (buffer, capacity) and returns its bytes."""
    capacity = 4096
    while True:
        buffer = ctypes.create_string_buffer(capacity)
        error = error_of_thread()
        needed = call(buffer, capacity, ctypes.addressof(error))
        if needed < 0:
            raise_error(error, operation)
        if needed <= capacity:
            return json.loads(buffer.value.decode("utf-8"))
        capacity = needed


def description() -> dict:
    """tessera_describe: this build and this machine."""
    return read_json(lambda buffer, capacity, _: describe(buffer, capacity), "env")


def backends() -> list[str]:
    """Names of the backends of this build, in order of preference."""
    names = []
    while (name := backend_name(len(names))) is not None:
        names.append(name.decode())
    return names


def _connect_log():
    """TESSERA_LOG names topics: hand them to Python's logging, and show them if nobody listens."""
    logger = logging.getLogger("tessera")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO)
    topics = {}

    @LogCallback
    def forward(_, topic, message):
        name = topic.decode()
        target = topics.setdefault(name, logger.getChild(name))
        target.info("%s", message.decode("utf-8", "replace"))

    set_log(ctypes.cast(forward, c_void_p), None)
    atexit.register(set_log, None, None)  # a CUDA stream may log from a thread of its own
    return forward  # kept alive by the module


_log_callback = _connect_log() if os.environ.get("TESSERA_LOG") else None
