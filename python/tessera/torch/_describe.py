# SPDX-License-Identifier: Apache-2.0
"""Keywords (what users type) as the text of a Call and the tensors and integers beside it, which is what
operators take; and what the library says of them.

sort() and written() are on the path of every call that was not seen before, and torch.compile traces
through both. Everything that can be wrong with a call is said by Described, which is _args on PyTorch
tensors."""

from __future__ import annotations

import ctypes

import torch

from .. import _args, _call, _keywords, _lib, _prepared
from .._call import Call
from . import _tensors

OPTIONS = {name: row for name, row in _keywords.ALL.items()
           if isinstance(row, _keywords.Option) and row.decode}
TENSORS = {name: row for name, row in _keywords.ALL.items() if isinstance(row, _keywords.Tensor)}
GRADIENTS = tuple(_call.GRADIENT_OF.values())
_PLACED = {tensor: (row, i) for row in TENSORS.values() for i, tensor in enumerate(row.tensors)}
# What is no keyword's: q, k and v, the diagonals of align, and what the backward pass takes.
_OWN = frozenset(("q", "k", "v", "do", "o", "lse", "dlse", "shift"))
_untaken = [name for name in _lib.TENSORS
            if name not in {*_PLACED, *_OWN, *GRADIENTS, "max_logit"} and not name.startswith("amax_")]
if _untaken != ["keep_tail"]:  # of a call of the library's own alone
    raise ImportError(f"tessera.torch: no keyword gives the tensors {_untaken}")

# What written() and sort() need of the rows.
_ENCODERS = tuple((name, row.default, row.encode, row.fields) for name, row in OPTIONS.items())
_FIELDS = tuple((name, field.kind, field.flag, field.words) for name, field in _call.FIELDS.items())
_CHANGING = frozenset(("max_seqlen_q", "max_seqlen_k"))  # from batch to batch: never in a text
_NAMES = {name: row.tensors for name, row in TENSORS.items()}
_FLAGS = {name: row.flag for name, row in TENSORS.items()}
_WORDS = {name: row.words for name, row in TENSORS.items() if row.words}
_SHARED = {name for name, row in TENSORS.items() if row.shared}


def sort(q, k, v, keywords: dict) -> tuple[list, list, dict, int]:
    """Keywords -> the names of tensors in a text and the tensors, the keywords that are no tensors, and
    the flags that tensors set. What has no place is put where the operator will not have it."""
    names, tensors, options, flags = ["q", "k", "v"], [q, k, v], {}, 0
    for name, value in keywords.items():
        if value is None:
            continue
        if name == "align" and isinstance(value, torch.Tensor):
            names.append("shift")
            tensors.append(value)
            options[name] = _given_by_tensor
            continue
        own = _NAMES.get(name)
        if own is None:
            options[name] = value
            continue
        if name in _WORDS and isinstance(value, str) and value in _WORDS[name]:
            flags |= _WORDS[name][value]
            continue
        flags |= _FLAGS[name]
        if len(own) == 2 and isinstance(value, tuple) and len(value) == 2:
            names += own
            tensors += value
        elif name in _SHARED:
            names += own
            tensors += [value, value]
        else:
            names.append(own[0])
            tensors.append(value)
    for of_q, of_k in (("seqlens_q", "seqlens_k"), ("cu_seqlens_q", "cu_seqlens_k")):
        if keywords.get(of_q) is not None and keywords[of_q] is keywords.get(of_k):
            flags |= _lib.SAME_LENGTHS
    return names, tensors, options, flags


class _Shaped:
    shape = None


_given_by_tensor = _Shaped()  # stands for a tensor of diagonals, which is elsewhere


def written(names, options: dict, flags: int, outputs, backward: bool = False) -> tuple[list, str]:
    """The integers beside a text, and the text, for keywords that Described accepts, with the flags of
    sort(). While tracing every integer that may be symbolic is beside it, and at least one."""
    tracing = torch.compiler.is_compiling()
    values = {"pass": int(backward)}
    for name, default, encode, fields in _ENCODERS:
        value = options.get(name)
        own, *encoded = encode(default if value is None else value)
        flags |= own
        for field, one in zip(fields, encoded):
            values[field] = one
    if "bias" not in names:
        flags &= ~_lib.BIAS_PRE_SCALE
    if options.get("precision") is not None and options.get("smooth") is None:
        flags |= _keywords.SMOOTH["mean+hadamard"]
    sizes, words = [], ["in=" + ",".join(names)]
    for name, kind, flag, spelled in _FIELDS:
        if kind == _call.FLAG:
            if flags & flag:
                words.append(f"{name}=True")
            continue
        if name not in values or (flag and not flags & flag):
            continue
        value = values[name]
        if kind == _call.INTEGER:
            if tracing or name in _CHANGING:
                words.append(f"{name}=${len(sizes)}")
                sizes.append(value)
            elif value or flag:
                words.append(f"{name}={value}")
        elif kind == _call.NUMBER:
            words.append(f"{name}={float(value)!r}")
        elif value:
            words.append(f"{name}={value if kind == _call.TEXT else spelled[value]}")
    words.append("out=" + ",".join(outputs))
    return sizes, " ".join(words)


def keywords(call: Call, tensors, sizes) -> dict:
    """The keywords of a call."""
    given = dict(zip("qkv", (tensors[call.places[name].operand] for name in "qkv")))
    fields = {name: _number(name, value, sizes) for name, value in call.values.items()}
    table = _keywords.BACKWARD if call.is_backward else _keywords.FORWARD
    for name, row in OPTIONS.items():
        if name in table:
            given[name] = row.decode(call.flags, *(fields.get(field, 0) for field in row.fields))
    for name, row in TENSORS.items():
        parts = [tensors[call.places[tensor].operand] for tensor in row.tensors if tensor in call.places]
        if parts:
            given[name] = tuple(parts) if len(parts) == 2 else parts[0]
        for word, flag in row.words.items():
            if call.flags & flag:
                given[name] = word
    given.pop("keep" if call.flags & _lib.MASK_DROP else "drop", None)
    if "shift" in call.places:
        given["align"] = tensors[call.places["shift"].operand]
    return given


def _number(name: str, value, sizes):
    """The value of a field as tessera_problem has it."""
    field = _call.FIELDS[name]
    if field.kind == _call.WORD:
        return field.words.index(value)
    if field.kind == _call.INTEGER and isinstance(value, str):
        return _tensors.hint(sizes[int(value[1:])])
    return value


# ---- fake tensors, and kernels without the binding: what comes back ----

def results_of(call: Call, tensors) -> list[torch.Tensor]:
    """New tensors for what a call returns, or fake ones beside fake ones. Shapes are told here as well as
    in the library, where symbolic ones cannot go."""
    at = {name: tensors[place.operand] for name, place in call.places.items()}
    return [_result(call, at, result.tensors[0], result.dtype) for result in call.results]


def _result(call: Call, at: dict, name: str, dtype: str) -> torch.Tensor:
    q = at["q"]
    wide = getattr(torch, dtype) if dtype else None
    if name in GRADIENTS:
        of = at[name[1:]]
        if wide is None and of.dtype.itemsize == 1:
            wide = at["o"].dtype if at["o"].dtype.itemsize == 2 else torch.bfloat16
        return _tensors.empty_gradient(of, name, wide)
    if name == "o":
        usual = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
        return _tensors.empty_o(q, at["v"], call.layouts[0], wide or usual)
    rows = _tensors.statistics_dtype(q)
    if name == "lse":
        return q.new_empty(_tensors.row_shape(q, call.layouts[0]), dtype=rows)
    if name == "max_logit":
        return q.new_empty((q.shape[_args.ORDERS[call.layouts[0]][2]],), dtype=rows)
    return q.new_empty((), dtype=torch.float32)  # amax


# ---- what the library says ----

def readable(x):
    """x, or a copy whose last axis has stride 1."""
    return x if not isinstance(x, torch.Tensor) or not x.dim() or x.stride(-1) == 1 else x.contiguous()


class Described:
    """A problem with the tensors that it was described by."""

    def __init__(self, arguments: _args.Arguments, tensors: dict[int, torch.Tensor], outputs: dict):
        self.arguments = arguments
        self.tensors = tensors      # by enum tessera_index
        self.outputs = outputs      # that are not there yet: name -> (shape, dtype)

    @classmethod
    def of_keywords(cls, operation: str, given: dict, backward: bool = False) -> Described:
        """What users ask for: `given` maps keywords, q, k, v, and for the backward pass do, o, lse, dlse
        and gradients, to values; _prepared.NEW to tensors that are yet to come."""
        if not backward:  # which belong to the backward pass; callers look at names
            given = {name: value for name, value in given.items() if value is not None}
        describe = _prepared.describe_backward if backward else _prepared.describe_forward
        a, outputs = describe(_tensors, operation, given)
        tensors = {source.index: given[source.name] if source.part is None else
                   given[source.name][source.part] for source in a.sources}
        return cls(a, tensors, {output[1]: output[2:] for output in outputs if type(output) is tuple})

    @classmethod
    def of(cls, call: Call, tensors, sizes, outputs=None) -> Described:
        """What an operator was given; `outputs` are the caller's to write into."""
        a = _args.Arguments(_tensors, call.operation, call.is_backward)
        a.layout_q, a.layout_kv = call.layouts
        a.paged = call.is_paged
        a.problem.flags = call.flags
        for name, value in call.values.items():
            if name != "pass" and _call.FIELDS[name].kind != _call.FLAG:
                a.set_field(name, _number(name, value, sizes))
        at = {name: tensors[place.operand] for name, place in call.places.items()}
        if len(at) != len(call.inputs):
            raise a.error("drop", at.get("mask"), "keep and drop are one mask with two polarities; give one")
        if "do" in at:  # autograd makes strides of 0, which kernels get a copy of
            at["do"] = readable(at["do"])
        for name in sorted(at, key=lambda name: name not in "qkv"):
            _put(a, name, at[name])
        for i, result in enumerate(call.results):
            _put_result(a, result, at, None if outputs is None else outputs[i])
        a.spelling |= call.spelling
        if a.problem.flags & _lib.ACCUMULATE and outputs is None:
            raise a.error("accumulate", True, "adds to what outputs hold: must come with out= and lse=, or "
                          "grads={name: tensor}")
        a.describe_wanted()
        given = {_lib.INDEX[name]: x for name, x in at.items()}
        if outputs is not None:
            given |= {_lib.INDEX[result.tensors[0]]: x for result, x in zip(call.results, outputs)}
        return cls(a, given, {})

    def buffers(self, num_threads: int) -> _lib.Buffers:
        a = self.arguments
        buffers = _lib.Buffers(struct_size=ctypes.sizeof(_lib.Buffers), num_threads=num_threads,
                               softmax_scale=a.softmax_scale, softcap=a.softcap,
                               dropout_p=a.dropout_p, sm_margin=a.sm_margin)
        for index, tensor in self.tensors.items():
            buffers.data[index] = tensor.data_ptr()
        return buffers

    def validate(self):
        """Raises the ValueError of a call on real tensors on the CPU. Outputs get addresses that nothing
        ever reads."""
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
        given = dict(q=one, k=one.clone(), v=one.clone(), dropout_p=a.dropout_p, softcap=a.softcap,
                     rng_state=torch.zeros(2, dtype=torch.int64))
        if a.problem.flags & _lib.SOFTMAX_SCALE:
            given["softmax_scale"] = a.softmax_scale
        Described.of_keywords(a.operation, given).validate()

    def prepare(self) -> int:
        """The workspace's bytes. Raises ValueError or Refused for what shapes and options say."""
        information = _lib.Info(struct_size=ctypes.sizeof(_lib.Info))
        error = _lib.error_of_thread()
        a = self.arguments
        device = self._device()
        code = _lib.prepare(ctypes.addressof(a.problem), ctypes.addressof(device), torch.get_num_threads(),
                            ctypes.addressof(information), ctypes.addressof(error))
        _lib.check(code, error, a.operation, a.spelling)
        return information.workspace_bytes

    def check(self):
        """Raises what is wrong with a call on real tensors."""
        if self.tensors[0].device.type == "cpu" and not torch._C._are_functorch_transforms_active():
            self.validate()
        self.prepare()

    def run(self, buffers: _lib.Buffers):
        self._check(_lib.run, buffers)

    def _device(self) -> _lib.Device:
        return _tensors.device(self.tensors[_lib.INDEX["q"]])

    def _check(self, function, buffers):
        error = _lib.error_of_thread()
        a = self.arguments
        device = self._device()
        code = function(ctypes.addressof(a.problem), ctypes.addressof(device),
                        ctypes.addressof(buffers), ctypes.addressof(error))
        _lib.check(code, error, a.operation, a.spelling)


def _put(a: _args.Arguments, name: str, x):
    """Describes a tensor that goes in."""
    if name in _PLACED:
        row, i = _PLACED[name]
        if name == "mask":
            row = TENSORS["drop" if a.problem.flags & _lib.MASK_DROP else "keep"]
        return row._put(a, i, x, None)
    orders = {"q": (a.order_q, "b, sq, hq, dqk"), "k": (a.order_kv, a.axes_kv("dqk")),
              "v": (a.order_kv, a.axes_kv("dv")), "shift": ((0,), "b"),
              **dict.fromkeys(("do", "o"), (a.order_q, "b, sq, hq, dv")),
              **dict.fromkeys(("lse", "dlse"), (a.order_rows, "b, hq, sq"))}
    order, axes = orders[name]
    return a.put(name, "align" if name == "shift" else name, x, order, axes=axes)


def _put_result(a: _args.Arguments, result: _call.Operand, at: dict, given):
    """Describes a tensor that comes out: `given`, or a new one."""
    name, = result.tensors
    if name in GRADIENTS:
        a.grad_dtype = result.dtype or None
        return _prepared._gradient(a, name, _prepared.NEW if given is None else given, at.get(name[1:]))
    order = {"o": a.order_q, "lse": a.order_rows, "max_logit": (0,)}.get(name, (None,))
    if given is None:
        return a.want(name, order, result.dtype or None)
    a.put(name, "out" if name == "o" else name, given, order, axes="b, sq, hq, dv" if name == "o" else "b, hq, sq",
          output=True)
    if name != "o" or not result.dtype and a.problem.flags & _lib.ACCUMULATE:
        return None
    dtype, whose = (getattr(torch, result.dtype), "out_dtype") if result.dtype else \
        (torch.bfloat16, "that beside fp8 q") if at["q"].dtype.itemsize == 1 else (at["q"].dtype, "q's dtype")
    if given.dtype != dtype:
        raise a.error("out.dtype", given.dtype, f"must be {whose}, {dtype}")
    return None
