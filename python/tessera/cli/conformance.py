# SPDX-License-Identifier: Apache-2.0
"""The conformance suite's C door: a case line becomes tensors, a run, a judgement."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int32, c_int64, c_void_p

import numpy as np

from .. import _lib, _numpy

_Json = (c_int64, c_void_p, c_char_p, c_int64)


_library = _lib.load("libtessera_check.so")


def _declare(name, result, *arguments):
    function = getattr(_library, name)
    function.restype, function.argtypes = result, arguments
    return function


_new = _declare("tessera_case_new", c_void_p, c_char_p, c_void_p)
_free = _declare("tessera_case_free", None, c_void_p)
_problem = _declare("tessera_case_problem", c_void_p, c_void_p)
_buffers = _declare("tessera_case_buffers", c_void_p, c_void_p)
_json = _declare("tessera_case_json", *_Json)
_poison = _declare("tessera_case_poison_outputs", None, c_void_p)
_run = _declare("tessera_case_run", c_int32, c_void_p, c_char_p, c_void_p, c_int32, c_void_p)
_compare = _declare("tessera_case_compare", *_Json)
_probe_flops = _declare("tessera_probe_flops", c_double, c_int32, c_int32, c_double)
_probe_bandwidth = _declare("tessera_probe_bandwidth", c_double, c_int64, c_int32, c_double)

_NAMES = {code: name for name, code in _lib.DTYPES.items()}


class Case:
    """A case with its tensors; a context manager, whose arrays die with it.

    Raises ValueError for a line or a problem that is illegal. With as_bits, arrays of dtypes that NumPy needs
    the package ml_dtypes for are bits where it is not installed; else they are a ValueError."""

    def __init__(self, text: str, as_bits: bool = False):
        self._as_bits = as_bits
        error = _lib.error_of_thread()
        self._handle = _new(_lib.bytes_of(text), ctypes.addressof(error))
        if not self._handle:
            _lib.raise_error(error, "check")
        self.problem = _lib.Problem.from_address(_problem(self._handle))
        self.buffers = _lib.Buffers.from_address(_buffers(self._handle))
        self.spec = self._read(_json)
        self.text = self.spec["case"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        _free(self._handle)
        self._handle = None

    @property
    def is_backward(self) -> bool:
        return self.spec["pass"] == "bwd"

    def array(self, index: int) -> np.ndarray:
        """Tensor `index` of the problem, not copied, in the caller's order of axes."""
        tensor = self.problem.tensor[index]
        dtype = numpy_dtype(tensor.dtype, self._as_bits)
        axes = self.spec["axes"][str(index)]
        shape = [tensor.extent[axis] for axis in axes]
        strides = [tensor.stride[axis] * dtype.itemsize for axis in axes]
        address = self.buffers.data[index]
        if 0 in shape or not address:
            return np.empty(shape, dtype)
        size = sum((n - 1) * stride for n, stride in zip(shape, strides)) + dtype.itemsize
        memory = (ctypes.c_char * size).from_address(address)
        return np.ndarray(shape, dtype, memory, strides=strides)

    def group(self, name: str) -> dict[str, np.ndarray | tuple[np.ndarray, ...]]:
        """The arrays of "tensors", "backward" or "outputs", by keyword; pairs as tuples."""
        arrays = {}
        for keyword, index in self.spec.get(name, {}).items():
            pair = isinstance(index, list)
            arrays[keyword] = tuple(map(self.array, index)) if pair else self.array(index)
        return arrays

    def arguments(self) -> dict:
        """Everything to pass to tessera.attention: q, k, v and keywords."""
        arrays = self.group("tensors")
        for first, second in self.spec["same"]:
            arrays[second] = arrays[first]
        scalars = {name: tuple(value) if isinstance(value, list) else value
                   for name, value in self.spec["kwargs"].items()}
        if scalars.get("accumulate") and not self.is_backward:
            arrays["lse"] = self.group("outputs")["lse"]
        return {**arrays, **scalars}

    def poison_outputs(self):
        _poison(self._handle)

    def run(self, backend: str | None, device: _lib.Device, num_threads: int):
        """Through the C door. Raises as tessera.attention does."""
        error = _lib.error_of_thread()
        code = _run(self._handle, _lib.bytes_of(backend or ""), ctypes.addressof(device), num_threads,
                    ctypes.addressof(error))
        _lib.check(code, error, "check")

    def compare(self) -> dict:
        """The judgement of what is in the outputs now; see src/conformance/conformance.h."""
        return self._read(_compare)

    def _read(self, function) -> dict:
        return _lib.read_json(lambda buffer, capacity, _: function(self._handle, buffer, capacity),
                              "check")


def numpy_knows(case: Case) -> bool:
    """Whether every dtype of the case is NumPy's own."""
    return not any(_NAMES.get(tensor.dtype, "").startswith(("bfloat16", "float8"))
                   for tensor in case.problem.tensor)


def is_beyond_autograd(case: Case) -> bool:
    """Whether gradients are asked for of which autograd has no notion: of a part of a union, sums in place, in other
    dtypes, by a scale of do, or with their largest values."""
    return bool(case.arguments().keys() & {"partial", "accumulate", "grad_dtype", "do_scale"}) or \
        case.group("backward")["o"].dtype != case.arguments()["q"].dtype or \
        any(name.startswith("amax_") for name in case.group("outputs"))


class PeakProbe:
    """The fastest multiply-add loop, as one more contender of a timing."""

    def __init__(self, dtype: np.dtype, num_threads: int, seconds: float = 0.01):
        self._arguments = _lib.DTYPES[name_of(dtype)], num_threads, seconds
        self._rates: list[float] = []

    def run(self):
        self._rates.append(_probe_flops(*self._arguments))

    @property
    def tflops(self) -> float:
        return float(np.median(self._rates)) / 1e12


def bandwidth(num_threads: int) -> float:
    """Bytes per second read from memory."""
    return _probe_bandwidth(512 << 20, num_threads, 0.3)


class BandwidthProbe:
    """Reading memory that no cache holds, as one more contender of a timing."""

    def __init__(self, num_threads: int):
        self._num_threads = num_threads
        self._rates: list[float] = []

    def run(self):
        self._rates.append(_probe_bandwidth(256 << 20, self._num_threads, 0.02))

    @property
    def bytes_per_s(self) -> float:
        return float(np.median(self._rates))


def numpy_dtype(code: int, as_bits: bool = False) -> np.dtype:
    name = _NAMES[code]
    if not name.startswith(("bfloat", "float8")):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        if as_bits:
            return np.dtype([(name, np.uint16 if name == "bfloat16" else np.uint8)])
        raise ValueError(f"tessera.check: dtype={name}: NumPy needs the package ml_dtypes for it; "
                         "pip install ml_dtypes, or use --through c") from error
    return np.dtype(getattr(ml_dtypes, name))


def name_of(dtype: np.dtype) -> str:
    """The name of a dtype; of bits, that of what they stand for."""
    return dtype.names[0] if dtype.names else dtype.name


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 as another dtype, bits of bfloat16 included: those are cut off, which is enough for timing."""
    if dtype.names == ("bfloat16",):
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(dtype)
    if dtype.names:
        numpy_dtype(_lib.DTYPES[name_of(dtype)])  # says what is missing
    return x.astype(dtype)


class _Bits:
    """NumPy's adapter, for which bits have the dtype that they stand for."""

    def __getattr__(self, name):
        return getattr(_numpy, name)

    def info(self, x):
        info = _numpy.info(x)
        return info and info._replace(dtype=name_of(x.dtype))

    def dtype(self, name: str) -> np.dtype:
        return numpy_dtype(_lib.DTYPES[name], as_bits=True)


bits = _Bits()


class Placer:
    """NumPy arrays as another library's, by `convert`; one array given twice stays one. What is no
    array passes."""

    def __init__(self, convert):
        self.convert = convert
        self.seen: dict[int, tuple] = {}  # id -> the array, kept alive, and what it became

    def __call__(self, value):
        if isinstance(value, tuple):
            return tuple(map(self, value))
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in self.seen:
            self.seen[id(value)] = value, self.convert(value)
        return self.seen[id(value)][1]
