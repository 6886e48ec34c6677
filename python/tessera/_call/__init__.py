# SPDX-License-Identifier: Apache-2.0
"""A call without its arrays and without extents, so that it stays as it is under vmap, on a shard and for
symbolic shapes; and its text, which call.h reads.

    in=q+k+v@2,bias pass=backward causal=True window_left=8 softcap=20.0 out=dq+dk+dv@2,dbias

Scalars are named as in core/problem/fields.def, and said where they are not zero, or where their flag is set.

What a call is on its way, and where:

    keywords     _keywords     what users type: a table, from which the rest follows; _documented writes it out
    Arguments    _args         keywords becoming a tessera_problem
    Call         this module   what is asked for, without arrays and extents, so that it can be kept, carried and mapped
    Description  _description  a Call with extents: the problem, and where its arrays are; what is wrong is said of it.
                               It is made of keywords, or of a Call and its operands
    Prepared     _prepared     a Description that the library has accepted, kept by its keywords and run by addresses:
                               for NumPy and Paddle; PyTorch's and JAX's bindings read what they run from the text
    Fold         _fold         several calls as one, for vmap; and the axes that shards may split
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from .. import _lib
from . import _keywords

FLAG, WORD, INTEGER, NUMBER, TEXT = "flag", "word", "integer", "number", "text"
_FORMATS = tuple(_lib.FORMATS)


class Field(NamedTuple):
    kind: str
    flag: int = 0                # that says it is given; 0: there is none
    words: tuple[str, ...] = ()  # by their numbers


_MEMBERS = {"pass": "pass_"}  # names that Python has words for
_WORDS = {"pass": ("forward", "backward"), "format_q": _FORMATS, "format_kv": _FORMATS,
          "align": ("none", *_lib.ALIGNS, "given")}


def _fields() -> dict[str, Field]:
    """The rows of core/problem/fields.def, of the structs' mirror and the keywords: the flags, and the scalars
    that options become."""
    types = dict((*_lib.Problem._fields_, *_lib.Buffers._fields_))
    kinds = {_lib.c_double: NUMBER, types["backend"]: TEXT}
    scalars = {field: row.flag for row in _keywords.ALL.values() if isinstance(row, _keywords.Option)
               for field in row.fields if field in types}
    fields = {"pass": Field(WORD, words=_WORDS["pass"])}
    fields |= {name: Field(FLAG, flag) for name, flag in _lib.FLAGS.items() if flag not in scalars.values()}
    for name, flag in scalars.items():
        words = _WORDS.get(name, ())
        fields[name] = Field(WORD, words=words) if words else Field(kinds.get(types[name], INTEGER), flag)
    return fields


FIELDS = _fields()  # texts have them in this order
_ROWS = tuple((name, _MEMBERS.get(name, name), field) for name, field in FIELDS.items())
ROWS = ("do", "o", "lse", "dlse")  # what the backward pass takes beside the inputs
GRADIENT_OF = {name: f"d{name}" for name in _keywords.DIFFERENTIABLE}
GRADIENTS = tuple(GRADIENT_OF.values())
INPUT_OF = {gradient: name for name, gradient in GRADIENT_OF.items()}


class Operand(NamedTuple):
    """One array of a call: a tensor, or with an axis >= 0 the tensors that are its items there."""
    tensors: tuple[str, ...]
    axis: int = -1
    dtype: str = ""  # of an output, unless the usual one

    def __str__(self):
        axis = f"@{self.axis}" if self.axis >= 0 else ""
        return "+".join(self.tensors) + axis + (f":{self.dtype}" if self.dtype else "")


class Place(NamedTuple):
    """Where a tensor is: an operand and, of its axis >= 0, the item."""
    operand: int
    axis: int
    item: int


@dataclasses.dataclass(frozen=True)
class Call:
    """`inputs` and `outputs` have for each array what Operand prints; `fields` are those of FIELDS that
    are said, in their order. Flags are True, words are texts."""
    operation: str  # of messages: "attention", "attention_backward", "explain"
    inputs: tuple[str, ...]
    fields: tuple[tuple[str, object], ...]
    outputs: tuple[str, ...]

    def __hash__(self):
        return self._hash

    @functools.cached_property
    def _hash(self):
        return hash((self.operation, self.inputs, self.fields, self.outputs))

    @functools.cached_property
    def text(self) -> str:
        words = ["in=" + ",".join(self.inputs)] if self.inputs else []
        words += [f"{name}={_written(value)}" for name, value in self.fields]
        return " ".join(words + ["out=" + ",".join(self.outputs)] * bool(self.outputs))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(text: str) -> Call:
        """The call of a text, with the operation of its pass."""
        inputs, outputs, fields = (), (), {}
        for word in text.split():
            name, _, value = word.partition("=")
            if name == "in":
                inputs = tuple(value.split(","))
            elif name == "out":
                outputs = tuple(value.split(","))
            else:
                fields[name] = _read(name, value)
        for array in (*inputs, *outputs):
            _operand(array)
        backward = fields.get("pass") == "backward"
        return Call("attention_backward" if backward else "attention", inputs,
                    tuple((name, fields[name]) for name in FIELDS if name in fields), outputs)

    # ---- what it says ----

    @functools.cached_property
    def values(self) -> dict[str, object]:
        return dict(self.fields)

    @property
    def is_backward(self) -> bool:
        return self.values.get("pass") == "backward"

    @functools.cached_property
    def flags(self) -> int:
        """enum tessera_flags."""
        flags = 0
        for name in self.values:
            flags |= FIELDS[name].flag
        return flags

    @property
    def layouts(self) -> tuple[str, str]:
        """The format of q, and that of k and v."""
        return self.values.get("format_q", _FORMATS[0]), self.values.get("format_kv", _FORMATS[0])

    @property
    def is_packed(self) -> bool:
        """Whether sequences of q, or of k and v, are packed: into an array without a batch, or into one row."""
        return "cu_seqlens_q" in self.places or "cu_seqlens_k" in self.places

    @property
    def is_paged(self) -> bool:
        return "page_table_k" in self.places

    @functools.cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The arrays that go in."""
        return tuple(map(_operand, self.inputs))

    @functools.cached_property
    def results(self) -> tuple[Operand, ...]:
        """The arrays that come out."""
        return tuple(map(_operand, self.outputs))

    @functools.cached_property
    def places(self) -> dict[str, Place]:
        """Where each tensor is among the operands."""
        return _places(self.operands)

    @functools.cached_property
    def places_of_results(self) -> dict[str, Place]:
        return _places(self.results)

    @functools.cached_property
    def likes(self) -> tuple[int | str, ...]:
        """For each gradient the operand that it is shaped like; for other results their tensor."""
        return tuple(self.places[INPUT_OF[name]].operand if name in INPUT_OF else name
                     for name in (result.tensors[0] for result in self.results))

    @functools.cached_property
    def spelling(self) -> dict[str, str]:
        """The library's name of each tensor -> the caller's keyword, for messages."""
        spelling = {}
        for row in _keywords.ALL.values():
            given = [name for name in getattr(row, "tensors", ()) if name in self.places]
            for i, name in enumerate(given):
                spelling[name] = row.name if len(given) == 1 else f"{row.name}[{i}]"
        if "mask" in spelling:
            spelling["mask"] = "drop" if "mask_drop" in self.values else "keep"
        return spelling

    @functools.cached_property
    def differentiable(self) -> tuple[int, ...]:
        """The operands that may have a gradient."""
        return tuple(i for i, operand in enumerate(self.operands) if operand.tensors[0] in GRADIENT_OF)

    def backward(self, wanted: tuple[int, ...], with_dlse: bool) -> Call:
        """The backward pass on (do, o, lse, [dlse,] *operands) that computes the gradients of the
        operands `wanted`."""
        rows = ROWS if with_dlse else ROWS[:-1]
        return Call("attention_backward", (*rows, *self.inputs), (("pass", "backward"), *self.fields),
                    tuple(str(gradient_of(self.operands[i])) for i in wanted))


def gradient_of(operand: Operand, dtype: str = "") -> Operand:
    return Operand(tuple(GRADIENT_OF[name] for name in operand.tensors), operand.axis, dtype)


def fields_of(problem: _lib.Problem, others) -> tuple[tuple[str, object], ...]:
    """The fields of a Call from a problem, and from what has the scalars of tessera_buffers; the latter's formats of
    arrays go before the problem's, which is thd where a row of a padded format is packed."""
    fields, flags = [], problem.flags
    for name, member, (kind, flag, words) in _ROWS:
        if flag and not flags & flag:
            continue
        value = True if kind == FLAG else getattr(others if hasattr(others, member) else problem, member)
        if value or flag:
            fields.append((name, words[value] if kind == WORD else value.decode() if kind == TEXT else
                           float(value) if kind == NUMBER else value))
    return tuple(fields)


def number_of(name: str, value, sizes):
    """The value of a field as tessera_problem has it; `sizes` are what a text calls $0, $1, ..."""
    field = FIELDS[name]
    if field.kind == WORD:
        return field.words.index(value)
    if field.kind == INTEGER and isinstance(value, str):
        return sizes[int(value[1:])]
    return value


# ---- texts ----


def _written(value) -> str:
    return value if isinstance(value, str) else repr(value)


def _read(name: str, value: str):
    field = FIELDS.get(name)
    if field is None:
        raise _error(name, value, "no such name; this version knows in, out, " + ", ".join(FIELDS))
    if field.kind == FLAG:
        if value != "True":
            raise _error(name, value, "must be True, or left out")
        return True
    if field.kind == WORD and value not in field.words:
        raise _error(name, value, "must be one of " + ", ".join(field.words))
    if field.kind in (WORD, TEXT) or field.kind == INTEGER and value.startswith("$"):
        return value
    try:
        return int(value) if field.kind == INTEGER else float(value)
    except ValueError:
        raise _error(name, value, "must be a number such as 20.0" if field.kind == NUMBER else
                     "must be an integer, or $i for one beside the text") from None


@functools.lru_cache(maxsize=1024)
def _operand(text: str) -> Operand:
    names, _, dtype = text.partition(":")
    names, _, axis = names.partition("@")
    tensors = tuple(names.split("+"))
    for name in tensors:
        if name not in _lib.INDEX:
            raise _error("in or out", name, "no such tensor; one of " + ", ".join(_lib.TENSORS))
    if dtype and dtype not in _lib.DTYPES:
        raise _error("out", text, "no such dtype; one of " + ", ".join(_lib.DTYPES))
    if len(tensors) > 1 and not axis:
        raise _error("in or out", text, "tensors of one array are items of an axis, as in k+v@2")
    return Operand(tensors, int(axis or -1), dtype)


def _places(operands) -> dict[str, Place]:
    return {name: Place(i, operand.axis, item if operand.axis >= 0 else 0)
            for i, operand in enumerate(operands) for item, name in enumerate(operand.tensors)}


def _error(name: str, value: str, rule: str) -> ValueError:
    return ValueError(f"tessera: the text of a call has {name}={value}: {rule}")
