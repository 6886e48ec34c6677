# SPDX-License-Identifier: Apache-2.0
"""attention and attention_backward on NumPy arrays.

A call with shapes, dtypes and options that were seen before skips all of _args: the problem, its
workspace size and a template of the buffers are kept in a bounded table, and only addresses and
outputs are new. Values are validated by the C core on every call.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np

from . import _args, _lib, _numpy

_MAX_PREPARED = 512
_DATA = _lib.Buffers.data.offset // 8
_WORKSPACE = _lib.Buffers.workspace.offset // 8
_Words = ctypes.c_uint64 * (ctypes.sizeof(_lib.Buffers) // 8)
_SEQLENS_Q, _CU_SEQLENS_Q = _args.ARRAYS.index("seqlens_q"), _args.ARRAYS.index("cu_seqlens_q")
_RNG_STATE, _WINDOW = _args.ARRAYS.index("rng_state"), _args.OPTIONS.index("window")

_prepared: dict = {}
_num_threads = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Gradients:
    """What attention_backward returns; a gradient that was not asked for is None."""
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dbias: np.ndarray | None = None
    dsink: np.ndarray | None = None
    dalibi_slopes: np.ndarray | None = None


def attention(q, k, v, *, layout="bshd", softmax_scale=None, causal=False, window=None, align=None,
              seqlens_q=None, seqlens_k=None, cu_seqlens_q=None, cu_seqlens_k=None,
              cu_seqlens_q_padded=None, cu_seqlens_k_padded=None, max_seqlen_q=None,
              max_seqlen_k=None, keep=None, drop=None, key_ranges=None, segment_ids=None, bias=None,
              bias_at="post_scale", alibi_slopes=None, softcap=0.0, sink=None, dropout_p=0.0,
              rng_state=None, page_table=None, k_scale=None, v_scale=None, return_lse=False,
              return_max_logit=False, deterministic=True, batch_invariant=False, backend=None,
              allow_quadratic=False, out=None):
    """softmax(q kᵀ · softmax_scale + bias, masked) v.

    q [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv] -> o [b, sq, hq, dv], for
    layout="bshd"; "sbhd" and "bhsd" permute, "thd" is packed [t, h, d], a pair gives q and k/v
    layouts of their own. Returns o[, lse][, max_logit]. docs/semantics.md says what each keyword
    means and what is illegal (ValueError); Refused is raised when no backend can.

    >>> o = tessera.attention(q, k, v, causal=True)
    >>> o, lse = tessera.attention(q, k, v, window=(128, 0), align="top_left", return_lse=True)
    """
    arrays = (q, k, v, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
              cu_seqlens_k_padded, keep, drop, key_ranges, segment_ids, bias, alibi_slopes, sink,
              _rng_array("attention", rng_state), page_table, k_scale, v_scale, out)
    options = (layout, softmax_scale, causal, window, align, max_seqlen_q, max_seqlen_k, bias_at,
               softcap, dropout_p, deterministic, batch_invariant, backend, allow_quadratic,
               return_lse, return_max_logit)
    results = _call("attention", _prepare_forward, arrays, options)
    return results[0] if len(results) == 1 else tuple(results)


def attention_backward(do, q, k, v, o, lse, dlse=None, grads=("dq", "dk", "dv"), *, layout="bshd",
                       softmax_scale=None, causal=False, window=None, align=None, seqlens_q=None,
                       seqlens_k=None, cu_seqlens_q=None, cu_seqlens_k=None,
                       cu_seqlens_q_padded=None, cu_seqlens_k_padded=None, max_seqlen_q=None,
                       max_seqlen_k=None, keep=None, drop=None, key_ranges=None, segment_ids=None,
                       bias=None, bias_at="post_scale", alibi_slopes=None, softcap=0.0, sink=None,
                       dropout_p=0.0, rng_state=None, page_table=None, k_scale=None, v_scale=None,
                       deterministic=True, batch_invariant=False, backend=None,
                       allow_quadratic=False) -> Gradients:
    """Gradients of attention, from its o and lse and the gradients do of o and dlse of lse.

    grads names what to compute (dq, dk, dv, dbias, dsink, dalibi_slopes), or maps names to arrays
    to write into. Every keyword must be as it was in the forward call.

    >>> g = tessera.attention_backward(do, q, k, v, o, lse, causal=True)
    >>> g.dq, g.dk, g.dv
    """
    outputs = tuple(_outputs(grads).values())
    arrays = (q, k, v, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
              cu_seqlens_k_padded, keep, drop, key_ranges, segment_ids, bias, alibi_slopes, sink,
              _rng_array("attention_backward", rng_state), page_table, k_scale, v_scale, do, o, lse,
              dlse, *outputs)
    options = (layout, softmax_scale, causal, window, align, max_seqlen_q, max_seqlen_k, bias_at,
               softcap, dropout_p, deterministic, batch_invariant, backend, allow_quadratic)
    return Gradients(*_call("attention_backward", _prepare_backward, arrays, options))


def set_num_threads(n: int | None):
    """Use at most n threads in every NumPy call from now on; None: the library's default."""
    global _num_threads
    if n is not None and (isinstance(n, bool) or not isinstance(n, (int, np.integer)) or
                          not 1 <= n < 2**31):
        raise ValueError(f"tessera.set_num_threads: n={n}: must be a positive integer, or None for "
                         "the library's default")
    _num_threads = int(n or 0)
    _prepared.clear()


# ---- the call ----

class Prepared:
    """A problem that was accepted, and how to fill the buffers of a call."""

    def __init__(self, arguments: _args.Arguments, outputs):
        buffers = _lib.Buffers(struct_size=ctypes.sizeof(_lib.Buffers), num_threads=_num_threads,
                               softmax_scale=arguments.softmax_scale, softcap=arguments.softcap,
                               dropout_p=arguments.dropout_p)
        self.operation = arguments.operation
        self.problem = arguments.problem
        self.address = ctypes.addressof(self.problem)
        self.template = bytes(buffers)
        self.outputs = outputs  # one per result: (word, name, shape, dtype), a position, or None
        self.spelling = arguments.spelling
        self.sources = []       # filled by _locate: (word, position in arrays, part)
        self.workspace_bytes = 0

    def locate(self, sources, positions: dict):
        self.sources = [(_DATA + s.index, positions[s.name], s.part) for s in sources]

    def prepare(self):
        information = _lib.Info(struct_size=ctypes.sizeof(_lib.Info))
        error = _lib.error_of_thread()
        code = _lib.prepare(self.address, _lib.CPU_ADDRESS, _num_threads,
                            ctypes.addressof(information), ctypes.addressof(error))
        _lib.check(code, error, self.operation, self.spelling)
        self.workspace_bytes = information.workspace_bytes

    def run(self, arrays) -> list:
        words, pointer = _Words.from_buffer_copy(self.template), _numpy.pointer
        for word, position, part in self.sources:
            array = arrays[position] if part is None else arrays[position][part]
            words[word] = pointer(array)
        results = []
        for output in self.outputs:
            if type(output) is tuple:
                word, name, shape, dtype = output
                array = _numpy.empty(self.operation, name, shape, dtype)
                words[word] = pointer(array)
                results.append(array)
            else:
                results.append(None if output is None else arrays[output])
        owner = None
        if self.workspace_bytes:
            words[_WORKSPACE], owner = _numpy.workspace(self.operation, self.workspace_bytes)
            words[_WORKSPACE + 1] = self.workspace_bytes
        error = _lib.error_of_thread()
        code = _lib.run(self.address, _lib.CPU_ADDRESS, ctypes.addressof(words),
                        ctypes.addressof(error))
        del owner  # the workspace lives until here
        if code:
            _lib.raise_error(error, self.operation, self.spelling)
        return results


def _call(operation: str, prepare, arrays, options) -> list:
    try:
        window = options[_WINDOW]
        key = (operation, tuple(map(_signature, arrays)), options, tuple(map(type, options)),
               None if window is None else repr(window), arrays[_SEQLENS_Q] is arrays[_SEQLENS_Q + 1],
               arrays[_CU_SEQLENS_Q] is arrays[_CU_SEQLENS_Q + 1])
        call = _prepared.get(key)
    except TypeError:  # not an array, or something unhashable: not kept, and perhaps illegal
        key = call = None
    if call is None:
        call = prepare(operation, arrays, options)
        call.prepare()
        if key is not None:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = call
    return call.run(arrays)


def _signature(x):
    """What of an argument decides the problem; TypeError for what is never kept."""
    if x is None:
        return None
    if type(x) is np.ndarray:
        return x.shape, x.strides, x.dtype, x.flags.writeable
    if type(x) is str or x is NEW:
        return x
    if type(x) is tuple:
        return tuple(map(_signature, x))
    raise TypeError


def _prepare_forward(operation: str, arrays, options) -> Prepared:
    given = dict(zip(_args.ARRAYS + ("out",), arrays))
    given.update(zip(_args.OPTIONS + ("return_lse", "return_max_logit"), options))
    a, outputs = describe_forward(operation, given)
    call = Prepared(a, outputs)
    call.locate(a.sources, {name: i for i, name in enumerate(_args.ARRAYS + ("out",))})
    return call


def _prepare_backward(operation: str, arrays, options) -> Prepared:
    names = _args.ARRAYS + ("do", "o", "lse", "dlse") + _args.GRADIENTS
    given = dict(zip(names, arrays))
    given.update(zip(_args.OPTIONS, options))
    a, outputs = describe_backward(operation, given)
    call = Prepared(a, outputs)
    call.locate(a.sources, {name: i for i, name in enumerate(names)})
    return call


# ---- outputs, and the inputs of the backward pass ----

def describe_forward(operation: str, given: dict):
    a = _args.Arguments(_numpy, operation)
    _args.fill(a, given)
    want_lse = a.boolean("return_lse", given.get("return_lse"))
    want_max_logit = a.boolean("return_max_logit", given.get("return_max_logit"))
    if given.get("out") is not None:
        info = a.put("o", "out", given["out"], a.order_q, axes="b, sq, hq, dv", output=True)
        outputs = [len(_args.ARRAYS)]
        if info.dtype != given["q"].dtype.name:
            raise a.error("out.dtype", info.dtype, f"must be q's dtype, {given['q'].dtype.name}")
    else:
        outputs = [new_output(a, "o", _output_shape(a), given["q"].dtype, a.order_q)]
    statistics = _statistics(given["q"])
    if want_lse:
        outputs.append(new_output(a, "lse", _row_shape(a), statistics, a.order_rows))
    if want_max_logit:
        hq = a.problem.tensor[_lib.INDEX["q"]].extent[2]
        outputs.append(new_output(a, "max_logit", (hq,), statistics, (0,)))
    return a, outputs


def describe_backward(operation: str, given: dict):
    a = _args.Arguments(_numpy, operation, backward=True)
    _args.fill(a, given)
    for name in ("do", "o"):
        if given.get(name) is NEW:
            new_output(a, name, _output_shape(a), given["q"].dtype, a.order_q)
        else:
            a.put(name, name, given.get(name), a.order_q, axes="b, sq, hq, dv")
    for name in ("lse", "dlse"):
        if given.get(name) is NEW:
            new_output(a, name, _row_shape(a), _statistics(given["q"]), a.order_rows)
        elif name == "lse" or given.get(name) is not None:
            a.put(name, name, given.get(name), a.order_rows, axes="b, hq, sq")
    orders = {"dq": (a.order_q, "b, sq, hq, dqk"), "dk": (a.order_kv, a.axes_kv("dqk")),
              "dv": (a.order_kv, a.axes_kv("dv")), "dsink": ((0,), "hq")}
    pads = {"dbias": (4, "b, hq, sq, sk"), "dalibi_slopes": (2, "b, hq")}
    outputs = []
    for position, name in enumerate(_args.GRADIENTS):
        output, of = given.get(name), given.get(name[1:])
        if output is None:
            outputs.append(None)
        elif output is NEW:
            if not isinstance(of, np.ndarray):
                raise a.error("grads", name, f"{name[1:]} is not a given array, so it has no "
                              "gradient; leave it out")
            order = orders[name][0] if name in orders else \
                (None,) * (pads[name][0] - of.ndim) + tuple(range(of.ndim))
            outputs.append(new_output(a, name, of.shape, of.dtype, order))
        else:
            if isinstance(of, np.ndarray) and _numpy.info(output) and output.shape != of.shape:
                raise a.error(f"{name}.shape", list(output.shape), f"must be the shape of "
                              f"{name[1:]}, {list(of.shape)}")
            order, axes, pad = None, "", 0
            if name in orders:
                order, axes = orders[name]
            else:
                pad, axes = pads[name]
            a.put(name, name, output, order, axes=axes, pad=pad, output=True)
            outputs.append(len(_args.ARRAYS) + 4 + position)
    return a, outputs


class _New:
    """Stands for an array that is contiguous and not there yet."""


NEW = _New()


def _outputs(grads) -> dict:
    """Gradient name -> array to write into, NEW, or None."""
    operation = "attention_backward"
    chosen = dict.fromkeys(_args.GRADIENTS)
    if isinstance(grads, dict):
        for name, array in grads.items():
            if name in chosen and not isinstance(array, np.ndarray):
                raise ValueError(f"tessera.{operation}: grads[{name!r}]={_args._text(array)}: must "
                                 "be a NumPy array to write into")
    elif not isinstance(grads, tuple):
        raise ValueError(f"tessera.{operation}: grads={_args._text(grads)}: must be a tuple of "
                         'names, such as ("dq", "dk", "dv"), or a dict of output arrays')
    for i, name in enumerate(grads):
        if not isinstance(name, str) or name not in chosen:
            raise ValueError(f"tessera.{operation}: grads[{i}]={_args._text(name)}: must be one of "
                             + ", ".join(_args.GRADIENTS))
        if chosen[name] is not None:
            raise ValueError(f"tessera.{operation}: grads[{i}]={_args._text(name)}: given twice")
        chosen[name] = grads[name] if isinstance(grads, dict) else NEW
    return chosen


def new_output(a: _args.Arguments, name: str, shape, dtype, order):
    shape = a.put_new(name, dtype.name, shape, order)
    return _DATA + _lib.INDEX[name], name, shape, dtype


def _output_shape(a: _args.Arguments):
    """o's shape in q's layout: q's axes, with v's head dim."""
    q, v = a.problem.tensor[_lib.INDEX["q"]], a.problem.tensor[_lib.INDEX["v"]]
    extents = [q.extent[0], q.extent[1], q.extent[2], v.extent[3]]
    shape = [0] * (3 if a.packed_q else 4)
    for i, axis in enumerate(a.order_q):
        if axis is not None:
            shape[axis] = extents[i]
    return shape


def _row_shape(a: _args.Arguments):
    """The shape of lse: [b, hq, sq], packed [hq, t]."""
    b, sq, hq = a.problem.tensor[_lib.INDEX["q"]].extent[:3]
    return (hq, sq) if a.packed_q else (b, hq, sq)


def _statistics(q) -> np.dtype:
    """The dtype of lse, dlse and max_logit."""
    return np.dtype(np.float64 if q.dtype == np.float64 else np.float32)


def _rng_array(operation: str, rng_state):
    """A list or tuple of (seed, offset) as an int64 array; anything else unchanged."""
    if type(rng_state) not in (list, tuple):
        return rng_state
    checker = _args.Arguments(_numpy, operation)
    return np.array(checker.pair_of_integers("rng_state", rng_state, "(seed, offset)"), np.int64)
