# SPDX-License-Identifier: Apache-2.0
"""Keywords (what users type) as the text of a Call and the tensors and integers beside it, which is what
operators take; and what the library says of them.

sort() and written() are on the path of every call that was not seen before, and torch.compile traces
through both. Everything that can be wrong with a call is said by Description, which is _args on PyTorch
tensors."""

from __future__ import annotations

import functools

import torch

from .. import _call, _lib
from .._call import GRADIENTS, Call, _description, _keywords
from . import _tensors

OPTIONS = {name: row for name, row in _keywords.ALL.items()
           if isinstance(row, _keywords.Option) and row.decode}
TENSORS = {name: row for name, row in _keywords.ALL.items() if isinstance(row, _keywords.Tensor)}

# What written() and sort() need of the rows.
_ENCODERS = tuple((name, row.default, row.encode, row.fields) for name, row in OPTIONS.items())
_FIELDS = tuple((name, field.kind, field.flag, field.words) for name, field in _call.FIELDS.items())
CHANGING = tuple(name for name, row in OPTIONS.items() if row.lengths)  # from batch to batch: never in a text
_NAMES = {name: row.tensors for name, row in TENSORS.items()}
_FLAGS = {name: row.flag for name, row in TENSORS.items()}
_WORDS = {name: row.words for name, row in TENSORS.items() if row.words}
SHARED = frozenset(name for name, row in TENSORS.items() if row.shared)


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
        elif name in SHARED:
            names += own
            tensors += [value, value]
        else:
            names.append(own[0])
            tensors.append(value)
    return names, tensors, options, flags | _keywords.same_lengths(keywords.get)


class _Shaped:
    shape = None


_given_by_tensor = _Shaped()  # stands for a tensor of diagonals, which is elsewhere


def written(names, options: dict, flags: int, outputs, backward: bool = False) -> tuple[list, str]:
    """The integers beside a text, and the text, for keywords that Description accepts, with the flags of
    sort(). While tracing every integer that may be symbolic is beside it, and at least one."""
    tracing = torch.compiler.is_compiling()
    values = {"pass": int(backward)}
    for name, default, encode, fields in _ENCODERS:
        value = options.get(name)
        own, *encoded = encode(default if value is None else value)
        flags |= own
        for field, one in zip(fields, encoded):
            values[field] = one
    flags = _keywords.joined(flags, "bias" in names, options.get)
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
            if tracing or name in CHANGING:
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
    options, operands = _keywords_of(call, tuple(_tensors.hints(sizes)))
    given = {name: tensors[place[0]] if len(place) == 1 else tuple([tensors[i] for i in place])
             for name, place in operands}
    return {**options, **given}


@functools.lru_cache(maxsize=1024)
def _keywords_of(call: Call, sizes: tuple) -> tuple[dict, list[tuple[str, list[int]]]]:
    """Keywords that are no tensors, and where the others' tensors are."""
    fields = {name: _call.number_of(name, value, sizes) for name, value in call.values.items()}
    table = _keywords.BACKWARD if call.is_backward else _keywords.FORWARD
    options = {name: row.decode(call.flags, *(fields.get(field, 0) for field in row.fields))
               for name, row in OPTIONS.items() if name in table}
    operands = {name: [call.places[name].operand] for name in "qkv"}
    for name, row in TENSORS.items():
        parts = [call.places[tensor].operand for tensor in row.tensors if tensor in call.places]
        if parts:
            operands[name] = parts
        for word, flag in row.words.items():
            if call.flags & flag:
                options[name] = word
                operands.pop(name, None)
    for named in (options, operands):
        named.pop("keep" if call.flags & _lib.MASK_DROP else "drop", None)
    if "shift" in call.places:
        operands["align"] = [call.places["shift"].operand]
    return options, list(operands.items())


# ---- fake tensors, and kernels without the binding: what comes back ----

def results_of(call: Call, tensors) -> list[torch.Tensor]:
    """New tensors for what a call returns, or fake ones beside fake ones."""
    at = {name: tensors[place.operand] for name, place in call.places.items()}
    found = _description.results_of(call, [x.shape for x in tensors], list(map(_tensors.dtype_name, tensors)))
    return [_new(call, at, result.tensors[0], shape, getattr(torch, dtype))
            for result, (shape, dtype) in zip(call.results, found)]


def _new(call: Call, at: dict, name: str, shape, dtype: torch.dtype) -> torch.Tensor:
    if name in GRADIENTS:
        return _tensors.empty_gradient(at[name[1:]], name, dtype)
    if name == "o":
        return _tensors.empty_o(at["q"], at["v"], call.layouts[0], dtype)
    return at["q"].new_empty(shape, dtype=dtype)


# ---- what the library says ----

def readable(x):
    """x, or a copy whose last axis has stride 1."""
    return x if not isinstance(x, torch.Tensor) or not x.dim() or x.stride(-1) == 1 else x.contiguous()


class Description(_description.Description):
    """A problem with the tensors that it was described by, inputs and those of the caller's to write into,
    by enum tessera_index."""

    @classmethod
    def of_keywords(cls, operation: str, given: dict, backward: bool = False) -> Description:
        """What users ask for."""
        if not backward:  # which belong to the backward pass; callers look at names
            given = {name: value for name, value in given.items() if value is not None}
        self = cls(_tensors, operation, given, backward).describe_outputs(given)
        self.tensors = self.tensors_of(given)
        return self

    @classmethod
    def of_call(cls, call: Call, tensors, sizes, outputs=None) -> Description:
        """What an operator was given; `outputs` are the caller's to write into."""
        tensors = list(tensors)
        if "do" in call.places:  # autograd makes strides of 0, which kernels get a copy of
            tensors[call.places["do"].operand] = readable(tensors[call.places["do"].operand])
        self = cls.of(_tensors, call, tensors, _tensors.hints(sizes), outputs)
        self.tensors = self.tensors_of(tensors)
        if outputs is not None:
            self.tensors |= {_lib.INDEX[result.tensors[0]]: x for result, x in zip(call.results, outputs)}
        return self

    def check(self):
        """Raises what is wrong with a call on real tensors."""
        if self.tensors[0].device.type == "cpu" and not torch._C._are_functorch_transforms_active():
            self.validate(self.tensors)
        self.prepare(_tensors.device(self.tensors[0]), torch.get_num_threads())
