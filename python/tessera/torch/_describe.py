# SPDX-License-Identifier: Apache-2.0
"""Three forms of one call: keywords (what users type), the arguments of an operator of the
dispatcher, and a tessera_problem.

An operator takes the tensors of enum tessera_index up to rng_state, in that order, then SCALARS.
Everything that can be wrong with a call is said by problem(), which is _args on PyTorch tensors.
"""

from __future__ import annotations

import ctypes

import torch

from .. import _args, _lib
from . import _tensors

INPUTS = _lib.TENSORS[:_lib.INDEX["rng_state"] + 1]
SCALARS = ("flags", "align", "format_q", "format_kv", "window_left", "window_right",
           "max_seqlen_q", "max_seqlen_k", "backend", "softmax_scale", "softcap", "dropout_p")
GRADIENT_OF = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsink": "sink",
               "dalibi_slopes": "alibi_slopes"}
_FORMATS, _ALIGNS = tuple(_lib.FORMATS), {code: name for name, code in _lib.ALIGNS.items()}
_FLAGS = {"causal": _lib.CAUSAL, "deterministic": _lib.DETERMINISTIC,
          "batch_invariant": _lib.BATCH_INVARIANT, "allow_quadratic": _lib.ALLOW_QUADRATIC}


def scalars(layout, softmax_scale, causal, window, align, max_seqlen_q, max_seqlen_k, bias_at,
            softcap, dropout_p, deterministic, batch_invariant, backend, allow_quadratic,
            off_by_one, drop, bias, same_lengths) -> tuple:
    """Keywords -> SCALARS, for keywords that problem() accepts. The last four say whether
    sink="off_by_one", drop= and bias= are given, and whether one array gives both sides' lengths.
    torch.compile traces through this."""
    format_q, format_kv = layout if isinstance(layout, tuple) else (layout, layout)
    left, right = (0, 0) if window is None else window
    flags = 0
    for flag, on in ((_lib.CAUSAL, causal), (_lib.WINDOW, window is not None),
                     (_lib.MASK_DROP, drop), (_lib.BIAS_PRE_SCALE, bias and bias_at == "pre_scale"),
                     (_lib.SOFTMAX_SCALE, softmax_scale is not None), (_lib.SOFTCAP, softcap),
                     (_lib.DROPOUT, dropout_p), (_lib.SINK_OFF_BY_ONE, off_by_one),
                     (_lib.DETERMINISTIC, deterministic), (_lib.BATCH_INVARIANT, batch_invariant),
                     (_lib.ALLOW_QUADRATIC, allow_quadratic), (_lib.SAME_LENGTHS, same_lengths),
                     (_lib.MAX_SEQLEN_Q, max_seqlen_q is not None),
                     (_lib.MAX_SEQLEN_K, max_seqlen_k is not None)):
        if on:
            flags |= flag
    return (flags, _lib.ALIGNS[align] if align else 0, _lib.FORMATS[format_q],
            _lib.FORMATS[format_kv], left, right, max_seqlen_q or 0, max_seqlen_k or 0,
            backend or "", softmax_scale or 0.0, softcap or 0.0, dropout_p or 0.0)


def keywords(inputs, values) -> dict:
    """The arguments of an operator -> keywords."""
    given = dict(zip(INPUTS, inputs))
    at = dict(zip(SCALARS, map(_tensors.hint, values)))
    flags = at["flags"]
    given["drop" if flags & _lib.MASK_DROP else "keep"] = given.pop("mask")
    for name, first, second in (("segment_ids", "_q", "_k"), ("page_table", "_k", "_v")):
        pair = given.pop(name + first), given.pop(name + second)
        given[name] = pair[0] if pair[1] is None else pair
    if flags & _lib.SINK_OFF_BY_ONE:
        given["sink"] = "off_by_one"
    given.update({name: bool(flags & flag) for name, flag in _FLAGS.items()})
    given["layout"] = _FORMATS[at["format_q"]], _FORMATS[at["format_kv"]]
    given["align"] = _ALIGNS.get(at["align"])
    given["bias_at"] = "pre_scale" if flags & _lib.BIAS_PRE_SCALE else "post_scale"
    given["window"] = (at["window_left"], at["window_right"]) if flags & _lib.WINDOW else None
    for name, flag in (("softmax_scale", _lib.SOFTMAX_SCALE), ("softcap", _lib.SOFTCAP),
                       ("dropout_p", _lib.DROPOUT), ("max_seqlen_q", _lib.MAX_SEQLEN_Q),
                       ("max_seqlen_k", _lib.MAX_SEQLEN_K)):
        given[name] = at[name] if flags & flag else None
    given["backend"] = at["backend"] or None
    return given


class Call:
    """A problem with the tensors that it was described by. `backward` is None, or maps do, o, lse
    and dlse to tensors, or to None for those that are yet to come; `grads` names the gradients
    wanted. `same_lengths` overrides what the identity of the length tensors says."""

    def __init__(self, operation: str, given: dict, backward: dict | None = None, grads=(),
                 max_logit=False, same_lengths=False):
        a = self.arguments = _args.Arguments(_tensors, operation, backward is not None)
        _args.fill(a, given)
        if same_lengths:
            a.problem.flags |= _lib.SAME_LENGTHS
        self.given = given
        self.outputs: dict[str, tuple] = {}  # name -> (shape, dtype)
        q, v = given["q"], given["v"]
        rows = _tensors.statistics_dtype(q)
        o_shape, lse_shape = _tensors.output_shape(q, v), _tensors.row_shape(q, a.layout_q)
        if backward is None:
            self._forward_output(given.get("out"), o_shape, q.dtype)
            self._new("lse", lse_shape, rows, a.order_rows)
            if max_logit:
                hq = a.problem.tensor[_lib.INDEX["q"]].extent[2]
                self._new("max_logit", (hq,), rows, (0,))
            return
        self.given = {**given, **backward}
        for name, shape, dtype, order, axes in (
                ("do", o_shape, q.dtype, a.order_q, "b, sq, hq, dv"),
                ("o", o_shape, q.dtype, a.order_q, "b, sq, hq, dv"),
                ("lse", lse_shape, rows, a.order_rows, "b, hq, sq"),
                ("dlse", lse_shape, rows, a.order_rows, "b, hq, sq")):
            if backward.get(name) is not None:
                a.put(name, name, backward[name], order, axes=axes)
            elif name in backward:
                self._new(name, shape, dtype, order)
        orders = {"dq": a.order_q, "dk": a.order_kv, "dv": a.order_kv, "dsink": (0,)}
        for name in grads:
            of = given.get(GRADIENT_OF[name])
            if _tensors.info(of) is None:
                raise a.error("grads", name, f"{GRADIENT_OF[name]} is not a given tensor, so it "
                              "has no gradient; leave it out")
            rank = 4 if name == "dbias" else 2
            order = orders.get(name) or (None,) * (rank - of.dim()) + tuple(range(of.dim()))
            self._new(name, tuple(of.shape), of.dtype, order)

    def _forward_output(self, out, shape, dtype):
        """o is new, or goes into `out`."""
        a = self.arguments
        if out is None:
            self._new("o", shape, dtype, a.order_q)
            return
        a.put("o", "out", out, a.order_q, axes="b, sq, hq, dv", output=True)
        if out.dtype != dtype:
            raise a.error("out.dtype", out.dtype, f"must be q's dtype, {dtype}")

    def _new(self, name, shape, dtype, order):
        self.outputs[name] = shape, dtype
        self.arguments.put_new(name, str(dtype)[len("torch."):], _tensors.hints(shape), order)

    def scalars(self) -> tuple:
        """SCALARS."""
        a = self.arguments
        p = a.problem
        return (p.flags, p.align, p.format_q, p.format_kv, p.window_left, p.window_right,
                p.max_seqlen_q, p.max_seqlen_k, p.backend.decode(), a.softmax_scale, a.softcap,
                a.dropout_p)

    def tensors(self):
        """(index, tensor) of everything given."""
        for source in self.arguments.sources:
            tensor = self.given[source.name]
            yield source.index, tensor if source.part is None else tensor[source.part]

    def buffers(self, num_threads: int) -> _lib.Buffers:
        a = self.arguments
        buffers = _lib.Buffers(struct_size=ctypes.sizeof(_lib.Buffers), num_threads=num_threads,
                               softmax_scale=a.softmax_scale, softcap=a.softcap,
                               dropout_p=a.dropout_p)
        for index, tensor in self.tensors():
            buffers.data[index] = tensor.data_ptr()
        return buffers

    def validate(self):
        """Raises the ValueError of a call on real tensors. Outputs get addresses that nothing ever
        reads."""
        buffers = self.buffers(0)
        nowhere = 1 << 52
        for index, tensor in enumerate(self.arguments.problem.tensor):
            if tensor.dtype and not buffers.data[index]:
                buffers.data[index] = nowhere
                nowhere += 1 << 52
        self._check(_lib.validate, buffers)

    def validate_scalars(self):
        """The part of validate() that is left when tensors have no values: softmax_scale, softcap
        and dropout_p, beside a problem of one query and one key."""
        one = torch.zeros(1, 1, 1, 1)
        a = self.arguments
        Call(a.operation, dict(
            q=one, k=one.clone(), v=one.clone(), dropout_p=a.dropout_p, softcap=a.softcap,
            rng_state=torch.zeros(2, dtype=torch.int64),
            softmax_scale=a.softmax_scale if a.problem.flags & _lib.SOFTMAX_SCALE else None,
        )).validate()

    def prepare(self, num_threads: int) -> int:
        """The workspace's bytes. Raises ValueError or Refused for what shapes and options say."""
        information = _lib.Info(struct_size=ctypes.sizeof(_lib.Info))
        error = _lib.error_of_thread()
        a = self.arguments
        device = _tensors.device(self.given["q"])
        code = _lib.prepare(ctypes.addressof(a.problem), ctypes.addressof(device), num_threads,
                            ctypes.addressof(information), ctypes.addressof(error))
        _lib.check(code, error, a.operation, a.spelling)
        return information.workspace_bytes

    def run(self, buffers: _lib.Buffers):
        self._check(_lib.run, buffers)

    def _check(self, function, buffers):
        error = _lib.error_of_thread()
        a = self.arguments
        device = _tensors.device(self.given["q"])
        code = function(ctypes.addressof(a.problem), ctypes.addressof(device),
                        ctypes.addressof(buffers), ctypes.addressof(error))
        _lib.check(code, error, a.operation, a.spelling)
