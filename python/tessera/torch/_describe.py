# SPDX-License-Identifier: Apache-2.0
"""Three forms of one call: keywords (what users type), the arguments of an operator of the
dispatcher, and a tessera_problem.

An operator takes q, k, v, a list of the other INPUTS (tensors of enum tessera_index in its order, up to
the last that is given; empty, and not None, as vmap looks for its tensors in lists alone), then SCALARS:
flags, and the fields of _keywords that have a type in the dispatcher, in the order of the table. Scalars
have defaults, and a call says no more than it must: an argument that is said costs 0.15 us on its way
through PyTorch, one that is not 0.05.
Everything that can be wrong with a call is said by Call, which is _args on PyTorch tensors.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from .. import _args, _keywords, _lib
from . import _tensors

INPUTS = (*_lib.TENSORS[:_lib.INDEX["rng_state"] + 1], "q_start", "k_start", "shift")
# What operators take; other keywords belong to the front end, or are refused by every backend yet.
OPTIONS = {name: row for name, row in _keywords.SHARED.items() if isinstance(row, _keywords.Option)
           and row.decode and not row.refused and not row.raw}
TENSORS = {name: row for name, row in _keywords.SHARED.items() if isinstance(row, _keywords.Tensor)
           and row.tensors[0] in INPUTS}
TYPES = {"flags": "int", **{field: type for row in OPTIONS.values()
                            for field, type in row.fields.items() if type}}
SCALARS = tuple(TYPES)
ZEROS = tuple({"str": "", "float": 0.0}.get(type, 0) for type in TYPES.values())
MORE = 3                   # the place of the list
# In flags, beside those of the C structs: max_logit is wanted; and from these bits on, four of enum
# tessera_dtype each, what o, or dq, dk and dv, are to be (0: as their inputs).
MAX_LOGIT, OUT_DTYPE, GRAD_DTYPE = 1 << 32, 33, 37
DIFFERENTIABLE = tuple(map(INPUTS.index, _keywords.DIFFERENTIABLE))
GRADIENT_OF = {f"d{name}": name for name in _keywords.DIFFERENTIABLE}

# What scalars() and sort(), which are on the path of every call, need of the rows.
_ENCODERS = tuple((name, row.default, row.encode, row.num_scalars)
                  for name, row in OPTIONS.items())
_PLACES = {name: tuple(map(INPUTS.index, row.tensors)) for name, row in TENSORS.items()}
_FLAGS = {name: row.flag for name, row in TENSORS.items()}
_WORDS = {name: row.words for name, row in TENSORS.items() if row.words}
_SHIFT = INPUTS.index("shift")
_SHARED = {name for name, row in TENSORS.items() if row.shared}
_REFUSED = {name: row.default for name, row in _keywords.FORWARD.items()
            if row.refused or row.raw}
_REFUSED_NAMES = frozenset(_REFUSED)
_DTYPES = {code: getattr(torch, name) for name, code in _lib.DTYPES.items()}
_NO_INPUTS = (None,) * (len(INPUTS) - 3)
_LENGTHS = tuple(tuple(_PLACES[f"{kind}_{side}"][0] for side in "qk")
                 for kind in ("seqlens", "cu_seqlens"))


def sort(q, k, v, keywords: dict) -> tuple[list, dict, int]:
    """Keywords -> INPUTS, the keywords that are neither inputs nor refused, and the flags that inputs
    set. What has no place is put where the operator will not have it. torch.compile traces through
    it."""
    inputs, options, flags = [q, k, v, *_NO_INPUTS], {}, 0
    for name, value in keywords.items():
        if value is None:
            continue
        places = _PLACES.get(name)
        if name == "align" and isinstance(value, torch.Tensor):
            inputs[_SHIFT], options[name] = value, 0
            continue
        if places is None:
            if name not in _REFUSED:
                options[name] = value
            continue
        if name in _WORDS and isinstance(value, str) and value in _WORDS[name]:
            flags |= _WORDS[name][value]
            continue
        flags |= _FLAGS[name]
        first = places[0]
        if len(places) == 2 and isinstance(value, tuple) and len(value) == 2:
            inputs[first], inputs[places[1]] = value
        elif inputs[first] is not None:
            inputs[first] = inputs[first], value  # keep= and drop=
        else:
            inputs[first] = value
            if name in _SHARED:
                inputs[places[1]] = value
    for of_q, of_k in _LENGTHS:
        if inputs[of_q] is not None and inputs[of_q] is inputs[of_k]:
            flags |= _lib.SAME_LENGTHS
    return inputs, options, flags


def pack(inputs, scalars, max_logit=False, out_dtype=None, grad_dtype=None) -> tuple:
    """The arguments of an operator. torch.compile traces through it."""
    if max_logit:
        scalars = scalars[0] | MAX_LOGIT, *scalars[1:]
    for dtype, place in ((out_dtype, OUT_DTYPE), (grad_dtype, GRAD_DTYPE)):
        if dtype is not None:
            scalars = scalars[0] | _lib.DTYPES[str(dtype).rpartition(".")[2]] << place, *scalars[1:]
    last = len(inputs)
    while last > 3 and inputs[last - 1] is None:
        last -= 1
    return *inputs[:3], [*inputs[3:last]], *scalars


def trimmed(arguments: tuple) -> tuple:
    """What pack() answers for numbers that are known, less the defaults at the end."""
    last = len(arguments)
    while last > MORE + 1 and arguments[last - 1] == ZEROS[last - MORE - 2]:
        last -= 1
    return arguments[:last]


def unpack(arguments) -> tuple[list, tuple, bool]:
    """The arguments of an operator -> INPUTS, SCALARS, and whether max_logit is wanted. The dispatcher
    leaves defaults at the end out when it calls Python."""
    q, k, v, more, flags, *scalars = *arguments, *ZEROS[len(arguments) - MORE - 1:]
    inputs = [q, k, v, *more, *_NO_INPUTS[len(more):]]
    return inputs, (flags & ~MAX_LOGIT, *scalars), bool(flags & MAX_LOGIT)


def is_unbuilt(keywords: dict) -> bool:
    """Whether a keyword is given that operators do not take."""
    if _REFUSED_NAMES.isdisjoint(keywords):
        return False
    return any(keywords.get(name) is not None and keywords[name] is not default
               for name, default in _REFUSED.items())


def scalars(options: dict, flags: int = 0, has_bias: bool = True) -> tuple:
    """Keywords -> SCALARS, for keywords that problem() accepts, with the flags of sort().
    torch.compile traces through it."""
    fields = []
    for name, default, encode, count in _ENCODERS:
        value = options.get(name)
        own, *encoded = encode(default if value is None else value)
        flags |= own
        fields += encoded[:count]
    return (flags if has_bias else flags & ~_lib.BIAS_PRE_SCALE, *fields)


def keywords(inputs, values) -> dict:
    """The arguments of an operator -> keywords."""
    values = tuple(map(_tensors.hint, values))
    flags, given = values[0], {**dict(zip("qkv", inputs)), **_options_of(values)}
    for name, places in _PLACES.items():
        first = inputs[places[0]]
        if first is not None:
            pair = len(places) == 2 and inputs[places[1]] is not None
            given[name] = (first, inputs[places[1]]) if pair else first
    for name, words in _WORDS.items():
        for word, flag in words.items():
            if flags & flag:
                given[name] = word
    given.pop("keep" if flags & _lib.MASK_DROP else "drop", None)
    if inputs[_SHIFT] is not None:
        given["align"] = inputs[_SHIFT]
    return given


@functools.lru_cache(maxsize=1024)
def _options_of(values: tuple) -> dict:
    """SCALARS -> options; the same dict for the same scalars."""
    flags, *fields = values
    given = {}
    for name, row in OPTIONS.items():
        given[name] = row.decode(flags, *fields[:row.num_scalars])
        fields = fields[row.num_scalars:]
    given["partial"] = bool(flags & _lib.PARTIAL)
    given["out_dtype"] = result_dtype(flags, OUT_DTYPE, None)
    given["grad_dtype"] = result_dtype(flags, GRAD_DTYPE, None)
    return given


def result_dtype(flags: int, place: int, otherwise):
    """The dtype at OUT_DTYPE or GRAD_DTYPE of flags, `otherwise` where there is none."""
    code = flags >> place & 15
    return _DTYPES[code] if code else otherwise


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
        self.given = dict(given)
        self.outputs: dict[str, tuple] = {}  # name -> (shape, dtype, order)
        q, v = given["q"], given["v"]
        rows = _tensors.statistics_dtype(q)
        o_shape, lse_shape = _tensors.output_shape(q, v), _tensors.row_shape(q, a.layout_q)
        if backward is None:
            adds = _args.accumulates(a, given)
            self._forward_output(given.get("out"), o_shape, q.dtype, adds)
            if adds:
                a.put("lse", "lse", given["lse"], a.order_rows, axes="b, hq, sq", output=True)
            else:
                self._new("lse", lse_shape, rows, a.order_rows)
            if max_logit:
                hq = a.problem.tensor[_lib.INDEX["q"]].extent[2]
                self._new("max_logit", (hq,), rows, (0,))
            return
        self.given |= backward
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
            wide = a.grad_dtype and name in ("dq", "dk", "dv")
            dtype = getattr(torch, a.grad_dtype) if wide else of.dtype
            self._new(name, tuple(of.shape), dtype, order)

    def _forward_output(self, out, shape, q_dtype, adds):
        """o is new, or goes into `out`."""
        a = self.arguments
        dtype = getattr(torch, a.out_dtype) if a.out_dtype else q_dtype
        if out is None:
            self._new("o", shape, dtype, a.order_q)
            return
        a.put("o", "out", out, a.order_q, axes="b, sq, hq, dv", output=True)
        if out.dtype != dtype and (a.out_dtype or not adds):
            whose = "out_dtype" if a.out_dtype else "q's dtype"
            raise a.error("out.dtype", out.dtype, f"must be {whose}, {dtype}")

    def allocate(self) -> dict[str, torch.Tensor]:
        """New tensors for the outputs, described as they lie in memory."""
        a, new = self.arguments, {}
        for name, (shape, dtype, order) in self.outputs.items():
            if name == "o":
                new[name] = _tensors.empty_o(self.given["q"], self.given["v"], a.layout_q, dtype)
            elif name in GRADIENT_OF:
                new[name] = _tensors.empty_gradient(self.given[GRADIENT_OF[name]], name, dtype)
            else:
                new[name] = torch.empty(shape, dtype=dtype)
            a.put_new(name, str(dtype)[len("torch."):], shape, order, new[name].stride())
        return new

    def _new(self, name, shape, dtype, order):
        self.outputs[name] = shape, dtype, order
        self.arguments.put_new(name, str(dtype)[len("torch."):], _tensors.hints(shape), order)

    def scalars(self) -> tuple:
        """SCALARS."""
        a = self.arguments
        values = (getattr(a.problem if hasattr(a.problem, name) else a, name) for name in SCALARS)
        return tuple(value.decode() if isinstance(value, bytes) else value for value in values)

    def tensors(self):
        """(index, tensor) of everything given."""
        for source in self.arguments.sources:
            tensor = self.given[source.name]
            yield source.index, tensor if source.part is None else tensor[source.part]

    def buffers(self, num_threads: int) -> _lib.Buffers:
        a = self.arguments
        buffers = _lib.Buffers(struct_size=ctypes.sizeof(_lib.Buffers), num_threads=num_threads,
                               softmax_scale=a.softmax_scale, softcap=a.softcap,
                               dropout_p=a.dropout_p, sm_margin=a.sm_margin)
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
