# SPDX-License-Identifier: Apache-2.0
"""The keywords of attention: one row each, from which everything about a keyword comes.

The classes Keywords, Forward and Backward are the table. Static type checkers read them as the
keywords that a function takes (``**keywords: Unpack[Forward]``). At run time their rows say how a
value is checked and where in the C structs it goes (_args), what the text of a call says of it
(torch/_describe), what signatures and docstrings say of it (_documented). Order is that of the signatures.
"""

import dataclasses
import difflib
import functools
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from .. import _lib

Array = Any  # of the front end's library

# Array axis that holds tensor axis i, None where the tensor has an axis of extent 1 of its own.
ORDERS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3), "thd": (None, 0, 1, 2)}
SMOOTH = {"none": 0, "mean": _lib.SMOOTH_MEAN,
          "mean+hadamard": _lib.SMOOTH_MEAN | _lib.SMOOTH_HADAMARD}


def is_number(value) -> bool:
    """A real Python or NumPy number (ml_dtypes scalars included), not a boolean, not an array."""
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return False
    if isinstance(value, numbers.Complex):
        return isinstance(value, numbers.Real)
    return getattr(value, "shape", None) == () and type(value).__name__ in _lib.DTYPES and \
        type(value).__name__ != "bool"


# ---- kinds of rows ----

@dataclasses.dataclass(frozen=True, kw_only=True)
class Keyword:
    doc: str               # what it means, and when it is illegal
    default: Any = None
    refused: bool = False  # every backend still refuses it
    raw: bool = False      # of fp8 q alone
    lengths: bool = False  # says how long sequences are, and where they lie
    of_parts: bool = False  # of options: means the same to each part of the rows and keys as to the whole
    name: str = ""         # the table's, like the next
    type: Any = None

    def fill(self, a, value):
        """Puts an accepted value into the problem of `a`, _args.Arguments."""

    @property
    def form(self) -> str:
        """What a value may be, in the words of documents."""
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Keyword):
    """An array to write into; the operation describes it."""
    axes: str

    @property
    def form(self) -> str:
        return f"[{self.axes}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor(Keyword):
    """An array, or for two tensors a pair of them."""
    axes: str
    dtype: str
    tensors: tuple[str, ...] = ()         # of tessera_index; the keyword's name unless given
    broadcasts: bool = False              # axes may be missing on the left
    packs: tuple[str, ...] = ()           # for each tensor: "q" or "k", whose packed format lacks b
    blocks: bool = False                  # the last axis may be missing, and then the first
    shared: bool = False                  # one array stands for both tensors
    differentiable: bool = False
    flag: int = 0                         # set where it is given
    words: Mapping[str, int] = dataclasses.field(default_factory=dict)  # texts in its place -> flag

    @property
    def of_sequences(self) -> bool:
        """Whether it is small, and may have one part for each sequence."""
        return self.axes.startswith("b, h") and not self.has_rows

    @property
    def has_rows(self) -> bool:
        """Whether it has an axis of queries or keys."""
        return any(axis.startswith("s") for axis in self.axes.split(", "))

    @property
    def form(self) -> str:
        texts = "".join(f' or "{word}"' for word in self.words)
        pair = ", or a pair" if len(self.tensors) == 2 else ""
        return f"{self.dtype} [{self.axes}]{texts}{pair}"

    def fill(self, a, value):
        noun = f"a {a.adapter.noun}"
        if self.words and isinstance(value, str):
            a.problem.flags |= self.words[a.choice(self.name, value, tuple(self.words))]
            return
        if self.words and a.adapter.info(value) is None:
            texts = " or ".join(f'"{word}"' for word in self.words)
            raise a.error(self.name, value, f"must be {texts} or {noun} [{self.axes}]")
        a.problem.flags |= self.flag
        if len(self.tensors) == 1 or not isinstance(value, tuple):
            for i in range(len(self.tensors) if self.shared else 1):
                self._put(a, i, value, None)
            return
        if len(value) != 2:
            raise a.error(self.name, value, f"must be {noun} or a pair of them")
        for i, part in enumerate(value):
            if a.adapter.info(part) is None:
                raise a.error(f"{self.name}[{i}]", part, f"must be {noun}")
            self._put(a, i, part, i)

    def _put(self, a, i: int, value, part):
        rank = self.axes.count(",") + 1
        if self.broadcasts:
            a.put(self.tensors[i], self.name, value, axes=self.axes, pad=rank, part=part)
            return
        order = tuple(range(rank))
        if self.packs and a.packs(self.packs[i]):
            order = (None, *range(rank - 1))
        elif self.blocks:
            info = a.adapter.info(value)
            given = 0 if info is None else len(info.shape)
            if given > 3:
                raise a.error(f"{self.name}.shape", list(info.shape),
                              f"must have at most 3 axes, [{self.axes}]")
            order = order if given == 3 else (None,) * (2 - given) + (*range(given), None)
        a.put(self.tensors[i], self.name, value, order, axes=self.axes, part=part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option(Keyword):
    """A value that becomes flags and fields. encode() takes what was accepted, or None, and answers
    (flags, *fields), fields as far as there are any; torch.compile traces through it. decode(flags,
    *fields), 0 for those that there are not, is its inverse."""
    values: str                               # what it may be, in words
    check: Callable[[Any, str, Any], Any]     # (a, name, value) -> the value, or ValueError
    encode: Callable[[Any], tuple]
    decode: Callable[..., Any] | None = None  # None: it belongs to the front end
    fields: tuple[str, ...] = ()  # of tessera_problem or of _args.Arguments
    flag: int = 0                 # that says they are given, if one does

    @property
    def form(self) -> str:
        return self.values

    def fill(self, a, value):
        flags, *values = self.encode(self.check(a, self.name, value))
        a.problem.flags |= flags
        for field, encoded in zip(self.fields, values):
            a.set_field(field, encoded)


def _flag(flag: int, **row) -> Option:
    return Option(values="bool", check=lambda a, name, value: a.boolean(name, value),
                  encode=lambda on: (flag if on else 0,), decode=lambda flags: bool(flags & flag),
                  **{"default": False, **row})


def _switch(name: str, **row) -> Option:
    """A flag of the front end, which the core never sees."""
    return Option(values="bool", check=lambda a, name, value: a.boolean(name, value), default=False,
                  encode=lambda on: (0, bool(on)), fields=(name,), **row)


def _number(name: str, flag: int, **row) -> Option:
    """A number with a flag that says it is on: given, or not its default."""
    off = row.get("default")
    return Option(values="number", check=lambda a, name, value: a.number(name, value),
                  encode=lambda x: (0,) if x is None or x == off else (flag, x),
                  decode=lambda flags, x: x if flags & flag else None, fields=(name,), flag=flag, **row)


def _integer(name: str, flag: int, **row) -> Option:
    return Option(values="int", check=lambda a, name, value: a.integer(name, value),
                  encode=lambda n: (0,) if n is None else (flag, n),
                  decode=lambda flags, n: n if flags & flag else None, fields=(name,), flag=flag, **row)


def _lengths(axes: str, **row) -> Tensor:
    return Tensor(axes=axes, dtype="int32 or int64", lengths=True, **row)


def _word(flags: Mapping[str, int], **row) -> Option:
    """One of a few texts, each with its flags."""
    texts = tuple(flags)
    every = functools.reduce(operator.or_, flags.values())
    return Option(values=" or ".join(f'"{text}"' for text in texts),
                  check=lambda a, name, value: a.choice(name, value, texts),
                  encode=lambda text: (flags[text] if text else 0,),
                  decode=lambda given: next(
                      (text for text in texts if flags[text] and given & every == flags[text]), None),
                  **row)


def _dtype(name: str, **row) -> Option:
    return Option(values="dtype or its name", check=lambda a, name, value: a.dtype(name, value),
                  encode=lambda dtype: (0, dtype), fields=(name,), **row)


# ---- options with rules of their own ----

def _check_layout(a, name, value):
    formats = tuple(_lib.FORMATS)
    if isinstance(value, tuple) and len(value) == 2:
        a.layout_q, a.layout_kv = (a.choice(f"layout[{i}]", x, formats) for i, x in enumerate(value))
    elif isinstance(value, str) and value in formats:
        a.layout_q = a.layout_kv = value
    else:
        raise a.error(name, value, "must be " + ", ".join(f'"{f}"' for f in formats) +
                      ', or a pair such as ("bshd", "sbhd") for q and for k and v')
    return a.layout_q, a.layout_kv


def _encode_layout(layout):
    q, kv = layout if isinstance(layout, tuple) else (layout, layout)
    return 0, _lib.FORMATS[q or "bshd"], _lib.FORMATS[kv or "bshd"]


def _decode_layout(flags, format_q, format_kv):
    formats = tuple(_lib.FORMATS)
    return formats[format_q], formats[format_kv]


def _check_align(a, name, value):
    if is_number(value):
        return a.integer(name, value)
    if a.adapter.info(value) is None and (not isinstance(value, str) or value not in _lib.ALIGNS):
        raise a.error(name, value, 'must be "top_left" or "bottom_right", or the diagonal: an '
                      f"integer or a {a.adapter.noun} [b]")
    return value


def _encode_align(align):
    if align is None:
        return (0,)
    if isinstance(align, str):
        return 0, _lib.ALIGNS[align]
    return (0, _lib.ALIGN_GIVEN) if hasattr(align, "shape") else (0, _lib.ALIGN_GIVEN, align)


def _decode_align(flags, align, shift):
    if align == _lib.ALIGN_GIVEN:
        return shift
    return {code: name for name, code in _lib.ALIGNS.items()}.get(align)


def _check_backend(a, name, value):
    if not isinstance(value, str) or not 0 < len(value) < 16 or \
            not (value.isascii() and value.isprintable() and " " not in value):  # a word of a Call's text
        names = ", ".join(f'"{known}"' for known in _lib.backends())
        raise a.error(name, value, f"must be one of {names}")
    return value


def _check_margin(a, name, value):
    margin = a.integer(name, value)
    if not 0 <= margin < 2**31:
        raise a.error(name, margin, "must be 0 (none) or more multiprocessors")
    return margin


def _check_blocks(a, name, value):
    blocks = a.pair_of_integers(name, value, "(rows of q, keys)")
    if not all(0 <= block < 2**31 for block in blocks):
        raise a.error(name, blocks, "must not be negative")
    return blocks


# ---- the table ----

Format = Literal["bshd", "sbhd", "bhsd", "thd"]


class Keywords(TypedDict, total=False):
    """What attention and attention_backward take."""

    layout: Annotated[Format | tuple[Format, Format], Option(
        values='"bshd", "sbhd", "bhsd" or "thd", or a pair', default="bshd", check=_check_layout,
        encode=_encode_layout, decode=_decode_layout, fields=("format_q", "format_kv"),
        doc="Order of the axes of q, k, v and o. A pair gives the order of q and o, then that of k and v.")]
    softmax_scale: Annotated[float | None, _number(
        "softmax_scale", _lib.SOFTMAX_SCALE, of_parts=True,
        doc="Factor on q kᵀ, finite and >= 0. None is 1/sqrt(dqk).")]
    causal: Annotated[bool, _flag(
        _lib.CAUSAL, doc="Query i sees no key after key i + shift; align says what shift is.")]
    window: Annotated[tuple[int, int] | None, Option(
        values="(left, right)", check=lambda a, name, value: a.pair_of_integers(name, value, "(left, right)"),
        encode=lambda window: (0,) if window is None else (_lib.WINDOW, window[0], window[1]),
        decode=lambda flags, left, right: (left, right) if flags & _lib.WINDOW else None,
        fields=("window_left", "window_right"), flag=_lib.WINDOW,
        doc="Query i sees keys i + shift - left to i + shift + right, both included; align says what shift is. "
            "-1 means no bound on that side. With causal, right must be -1 or 0.")]
    align: Annotated[Literal["top_left", "bottom_right"] | int | Array | None, Option(
        values='"top_left" or "bottom_right"', check=_check_align, encode=_encode_align,
        decode=_decode_align, fields=("align", "shift"),
        doc='Where the diagonal lies: query i is at key i + shift. "top_left" is shift 0; "bottom_right" is shift '
            "len_k - len_q of each sequence. An integer, or an integer array [b], is the shift itself, within "
            "+-2^60. Must be given with causal, window or alibi_slopes, unless queries and keys are known to be "
            "equally many.")]
    seqlens_q: Annotated[Array | None, _lengths(
        "b",
        doc="How many queries of each sequence of a padded batch are real, 0 to sq. None: all. Illegal with thd.")]
    seqlens_k: Annotated[Array | None, _lengths(
        "b",
        doc="How many keys of each sequence of a padded batch, or in its pages, are real, 0 to sk. None: all. "
            "Illegal with thd. Must be given with page_table.")]
    cu_seqlens_q: Annotated[Array | None, _lengths(
        "b + 1",
        doc="Where each query sequence of a packed buffer begins, and last where the last one ends: it starts "
            "with 0 and never falls. Must be given with thd. With another layout the batch is 1, and its row is the "
            "packed buffer.")]
    cu_seqlens_k: Annotated[Array | None, _lengths(
        "b + 1", doc="As cu_seqlens_q, for keys.")]
    cu_seqlens_q_padded: Annotated[Array | None, _lengths(
        "b + 1",
        doc="Where each query sequence is stored, if there are gaps between sequences: start + length <= next "
            "start. The lengths are those of cu_seqlens_q, which must be given.")]
    cu_seqlens_k_padded: Annotated[Array | None, _lengths(
        "b + 1", doc="As cu_seqlens_q_padded, for keys.")]
    max_seqlen_q: Annotated[int | None, _integer(
        "max_seqlen_q", _lib.MAX_SEQLEN_Q, lengths=True,
        doc="An upper bound on the lengths of cu_seqlens_q, which must be given. Packed queries with a dense mask "
            "or bias need it.")]
    max_seqlen_k: Annotated[int | None, _integer(
        "max_seqlen_k", _lib.MAX_SEQLEN_K, lengths=True, doc="As max_seqlen_q, for keys.")]
    keep: Annotated[Array | None, Tensor(
        axes="b, hq, sq, sk", dtype="bool", tensors=("mask",), broadcasts=True,
        doc="Mask that broadcasts to these axes: True = visible. Illegal with drop or key_ranges.")]
    drop: Annotated[Array | None, Tensor(
        axes="b, hq, sq, sk", dtype="bool", tensors=("mask",), broadcasts=True, flag=_lib.MASK_DROP,
        doc="Mask that broadcasts to these axes: True = hidden. Illegal with keep or key_ranges.")]
    key_ranges: Annotated[Array | None, Tensor(
        axes="b|1, hq|1, sq|1, 2|4", dtype="int32", packs=("q",),
        doc="The keys that each query sees: one interval [start, end), or two, whose union counts. With thd "
            "[hq|1, t|1, 2|4]. Illegal with keep or drop.")]
    segment_ids: Annotated[Array | tuple[Array, Array] | None, Tensor(
        axes="b, s", dtype="int32", tensors=("segment_ids_q", "segment_ids_k"), packs=("q", "k"),
        shared=True,
        doc="A query sees only the keys with its own id. With thd [t]. One array serves queries and keys, which "
            "must then be equally many; a pair is for q and for k.")]
    bias: Annotated[Array | None, Tensor(
        axes="b, hq, sq, sk", dtype="q's dtype or float32", broadcasts=True, differentiable=True,
        doc="Is added to the scores; it broadcasts to these axes. -inf hides a key, and so does any value that "
            "brings its score to -2**24 or below, such as finfo.min or -1e9.")]
    bias_at: Annotated[Literal["post_scale", "pre_scale"], Option(
        values='"post_scale" or "pre_scale"', default="post_scale", of_parts=True,
        check=lambda a, name, value: a.choice(name, value, ("post_scale", "pre_scale")),
        encode=lambda at: (_lib.BIAS_PRE_SCALE if at == "pre_scale" else 0,),
        decode=lambda flags: "pre_scale" if flags & _lib.BIAS_PRE_SCALE else "post_scale",
        doc="Where bias is added: after softmax_scale and softcap, or before both.")]
    alibi_slopes: Annotated[Array | None, Tensor(
        axes="b, hq", dtype="float32 or q's dtype", broadcasts=True, differentiable=True,
        doc="ALiBi: slope * |i + shift - j| is subtracted from the score of query i and key j. [hq] serves all "
            "sequences.")]
    softcap: Annotated[float, _number(
        "softcap", _lib.SOFTCAP, default=0.0, of_parts=True,
        doc="A score x becomes softcap * tanh(x / softcap). Finite and >= 0; 0 turns it off.")]
    sink: Annotated[Literal["off_by_one"] | Array | None, Tensor(
        axes="hq", dtype="float32 or q's dtype", differentiable=True,
        words={"off_by_one": _lib.SINK_OFF_BY_ONE},
        doc='One more logit in the softmax of each row, with no value: it takes weight and adds nothing to o. '
            '"off_by_one" is a logit of 0.')]
    dropout_p: Annotated[float, _number(
        "dropout_p", _lib.DROPOUT, default=0.0, of_parts=True,
        doc="Probability, in [0, 1), that a weight is dropped. Needs rng_state.")]
    rng_state: Annotated[Array | tuple[int, ...] | list[int] | None, Tensor(
        axes="2|4", dtype="int64",
        doc="The state of dropout, (seed, offset): an array, or a tuple or list of integers. The same state gives the "
            "same mask. For a part of a larger problem pass (seed, offset, first, stride): head h of sequence n then "
            "takes the mask of head first + n * stride + h.")]
    page_table: Annotated[Array | tuple[Array, Array] | None, Tensor(
        axes="b, max_pages", dtype="int32", tensors=("page_table_k", "page_table_v"),
        doc="The pages of each sequence, in order. k and v are then pools [pages, page_size, hk, d]. A pair gives k "
            "and v a table each. Needs seqlens_k.")]
    k_scale: Annotated[Array | None, Tensor(
        axes="b, hk, nk", dtype="float32", blocks=True,
        doc="Factor on an fp8 k: one for all [], one a head [hk], or one a sequence and head [b, hk]; a third axis "
            "gives one a block of keys. Illegal for a k that is not fp8.")]
    v_scale: Annotated[Array | None, Tensor(
        axes="b, hk, nk", dtype="float32", blocks=True, doc="As k_scale, for v.")]
    q_start: Annotated[Array | None, _lengths(
        "b",
        doc="Position of the first query of each sequence, >= 0; None is 0. The diagonal, ALiBi and dropout count "
            "from there; so do dense masks and biases of packed sequences.")]
    k_start: Annotated[Array | None, _lengths(
        "b",
        doc="As q_start, for keys. key_ranges hold positions, too.")]
    windows: Annotated[Array | None, _lengths(
        "b, 2",
        doc="The left and right side of each sequence's own window, as window has them for all: -1 is no bound, and a "
            "right side of 0 is causal. Illegal with window and causal.")]
    q_scale: Annotated[Array | None, Tensor(
        axes="b, hq, nq", dtype="float32", blocks=True, raw=True,
        doc="Factor on an fp8 q, as k_scale.")]
    o_scale: Annotated[Array | None, Tensor(
        axes="1", dtype="float32", broadcasts=True, raw=True,
        doc="Factor of an fp8 o: an element is value / o_scale, rounded and saturated, so o * o_scale is the value.")]
    deterministic: Annotated[bool | None, _flag(
        _lib.DETERMINISTIC, default=True, of_parts=True, doc="The same call gives the same bits every time.")]
    batch_invariant: Annotated[bool, _flag(
        _lib.BATCH_INVARIANT, of_parts=True,
        doc="The result of a sequence has the same bits whatever else is in the batch. Illegal in the backward pass "
            "and with dropout.")]
    backend: Annotated[str | None, Option(
        values="str", check=_check_backend, of_parts=True, encode=lambda name: (0, name or ""),
        decode=lambda flags, name: name or None, fields=("backend",),
        doc="The backend that must run the call, a name of tessera.backends(); Refused if it cannot. None: the "
            "library chooses.")]
    allow_quadratic: Annotated[bool, _flag(
        _lib.ALLOW_QUADRATIC, of_parts=True,
        doc="Allows a call that needs memory of sq * sk elements. Its size is logged.")]
    accumulate: Annotated[bool, _flag(
        _lib.ACCUMULATE,
        doc="Adds this call to what the outputs hold. out= and lse= become the result over their keys and this "
            "call's keys together; a row whose lse is -inf holds no keys yet, and its o is not read. Gradients are "
            "added to the arrays of grads=. On GPUs cuda_sm80 runs it.")]
    sm_margin: Annotated[int, Option(
        values="int", default=0, check=_check_margin, of_parts=True, encode=lambda n: (0, n or 0),
        decode=lambda flags, n: n, fields=("sm_margin",),
        doc="How many multiprocessors of a GPU to leave to others, >= 0. It affects only kernels that take tile after "
            "tile on each multiprocessor.")]
    precision: Annotated[Literal["fp8"] | None, _word(
        {"fp8": _lib.FP8_PRODUCTS},
        doc='Rounds 16-bit q, k and v, and backward do, to E4M3 for the matrix products. Results stay in 16 bits. '
            'Refused with pages and accumulate. On CPUs it shows what rounding costs, and gains no time.')]
    smooth: Annotated[Literal["none", "mean", "mean+hadamard"] | None, _word(
        SMOOTH,
        doc='How q and k are smoothed before they are rounded, which changes no score: the mean of the keys is taken '
            'off k, and a Hadamard matrix turns q and k. None is "mean+hadamard". Needs precision="fp8".')]
    scale_block: Annotated[tuple[int, int] | None, Option(
        values="(rows of q, keys)", check=_check_blocks, encode=lambda blocks: (0, *(blocks or ())),
        decode=lambda flags, q, k: (q, k) if q or k else None, fields=("q_scale_block", "k_scale_block"), raw=True,
        doc="How many rows of q, and how many keys, share a scale; both >= 0.")]


class Single(Keywords, total=False):
    """What attention takes where it returns o alone."""

    out_dtype: Annotated[object, _dtype(
        "out_dtype", doc="dtype of o. None is q's dtype, or bfloat16 if q is fp8. With 16-bit q it may also be "
                         "float32; with fp8 q any but float64.")]
    out: Annotated[Array | None, Output(
        axes="b, sq, hq, dv",
        doc="Array to write o into; the call returns it. Its dtype is q's or out_dtype, its strides are free. It must "
            "not overlap another argument.")]
    lse: Annotated[Array | None, Output(
        axes="b, hq, sq",
        doc="The lse of what out holds, float32 and contiguous, with thd [hq, t]. The call overwrites it with the lse "
            "of the sum. Illegal without accumulate.")]


class Forward(Single, total=False):
    """What attention takes."""

    return_lse: Annotated[bool, _switch(
        "return_lse",
        doc="Also returns lse, float32 [b, hq, sq], with thd [hq, t]: the natural logarithm of the sum of exp(score) "
            "in each row, the sink included; -inf for a row that sees no key.")]
    return_amax: Annotated[bool, _switch(
        "return_amax", raw=True,
        doc="Also returns amax_o, float32 []: the largest |value| of o before scaling and rounding. For fp8 q "
            "only.")]
    return_max_logit: Annotated[bool, _switch(
        "return_max_logit", doc="Also returns the largest visible score of each head, float32 [hq].")]


class Backward(Keywords, total=False):
    """What attention_backward takes."""

    do_scale: Annotated[Array | None, Tensor(
        axes="b, hq, nq", dtype="float32", blocks=True, raw=True,
        doc="Factor on an fp8 do, as k_scale.")]
    dq_scale: Annotated[Array | None, Tensor(
        axes="1", dtype="float32", broadcasts=True, raw=True,
        doc="Factor of an fp8 dq, as o_scale.")]
    dk_scale: Annotated[Array | None, Tensor(
        axes="1", dtype="float32", broadcasts=True, raw=True,
        doc="Factor of an fp8 dk, as o_scale.")]
    dv_scale: Annotated[Array | None, Tensor(
        axes="1", dtype="float32", broadcasts=True, raw=True,
        doc="Factor of an fp8 dv, as o_scale.")]
    partial: Annotated[bool, _flag(
        _lib.PARTIAL,
        doc="This call is one part of the keys, and o and lse are the merged ones of all parts: a weight is "
            "exp(score - lse). The gradients of q of all parts add up to the whole.")]
    grad_dtype: Annotated[object, _dtype(
        "grad_dtype", doc="dtype of dq, dk and dv. None is the dtype of the inputs; if q is fp8, that of o if o has 16 "
                          "bits, else bfloat16. With 16-bit inputs it may also be float32; with fp8 "
                          "inputs 16 bits or fp8.")]
    return_amax: Annotated[bool, _switch(
        "return_amax", raw=True,
        doc="Also returns amax_dq, amax_dk and amax_dv, float32 []: the largest |value| of each gradient that was "
            "asked for, before scaling and rounding. For fp8 q only.")]


class Every(Forward, Backward, total=False):
    """What explain takes."""


def _rows(table) -> dict[str, Keyword]:
    rows = {}
    for name, hint in get_type_hints(table, include_extras=True).items():
        type_, row = get_args(hint)
        named = {"tensors": (name,)} if isinstance(row, Tensor) and not row.tensors else {}
        rows[name] = dataclasses.replace(row, name=name, type=type_, **named)
    return rows


SHARED, FORWARD, BACKWARD = _rows(Keywords), _rows(Forward), _rows(Backward)
ALL = FORWARD | BACKWARD
NUMBERS = tuple(name for name, row in ALL.items() if row.form == "number")
LENGTHS = tuple(name for name, row in ALL.items() if row.lengths)
DENSE = tuple(name for name, row in SHARED.items() if isinstance(row, Tensor) and row.axes == "b, hq, sq, sk")
DIFFERENTIABLE = ("q", "k", "v", *sorted(
    (name for name, row in SHARED.items() if isinstance(row, Tensor) and row.differentiable),
    key=_lib.INDEX.get))

PAIRED_LENGTHS = ("seqlens_q", "seqlens_k"), ("cu_seqlens_q", "cu_seqlens_k")  # may be one array, as a flag says


def same_lengths(get) -> int:
    """The flag of lengths of queries and keys that are one array. torch.compile traces it, and joined()."""
    for of_q, of_k in PAIRED_LENGTHS:
        if get(of_q) is not None and get(of_q) is get(of_k):
            return _lib.SAME_LENGTHS
    return 0


def joined(flags: int, has_bias: bool, get) -> int:
    """The flags of a call, of those that each of its keywords sets; `get` has its options."""
    if not has_bias:
        flags &= ~_lib.BIAS_PRE_SCALE
    if get("precision") is not None and get("smooth") is None:
        flags |= SMOOTH["mean+hadamard"]
    return flags


def check_names(function: str, given, table, hint: bool = True):
    """Raises what Python raises of keywords that are not in the table; hint: with the nearest that is."""
    for name in given:
        if name not in table:
            raise unexpected(function, name, table if hint else ())


# What other libraries call what a keyword here does, where the spelling does not lead there.
_ELSEWHERE = {theirs: ours.split() for ours, names in {
    "softmax_scale": "scale sm_scale attn_scale qk_scale scaling temperature",
    "keep drop bias": "mask attn_mask",
    "seqlens_k keep drop": "attention_mask key_padding_mask padding_mask",
    "bias": "attn_bias attention_bias position_bias core_attention_bias",
    "window": "window_size local_window_size sliding_window window_left",
    "seqlens_q": "query_seq_lengths seqused_q seq_len_q",
    "seqlens_k": "key_value_seq_lengths seqused_k seq_len_kv cache_seqlens seqlens seq_lens lengths key_lengths "
                 "kv_lengths",
    "cu_seqlens_q cu_seqlens_k": "cu_seqlens cu_seqlen",
    "cu_seqlens_k": "cu_seqlens_kv",
    "max_seqlen_k": "max_seqlen_kv",
    "page_table": "block_table block_tables",
    "alibi_slopes": "alibi use_alibi_mask",
    "softcap": "logits_soft_cap logit_cap attn_logit_softcapping",
    "sink": "s_aux attn_sink learnable_sink softmax_offset",
    "dropout_p": "p dropout dropout_rate dropout_prob attention_dropout",
    "rng_state": "seed rng generator dropout_rng rng_gen",
    "layout": "qkv_format qkv_layout tensor_layout format",
    "return_lse": "return_attn_probs return_softmax_lse return_residual generate_stats",
    "key_ranges segment_ids keep": "mask_mod block_mask",
    "bias alibi_slopes softcap": "score_mod",
}.items() for theirs in names.split()}
_NEEDLESS = {"enable_gqa": "k and v may have fewer heads than q without it",
             "num_gqa_groups": "k and v may have fewer heads than q without it"}


def unexpected(function: str, name: str, known) -> TypeError:
    """What Python raises of a keyword that a function does not have, with those of it that may be meant."""
    meant = [repr(ours) for ours in _ELSEWHERE.get(name, ()) if ours in known] or \
        [repr(near) for near in difflib.get_close_matches(name, known, 1)]
    hint = ""
    if name in _NEEDLESS and known:
        hint = f"; {_NEEDLESS[name]}"
    elif meant:
        hint = "; did you mean " + " or ".join(filter(None, (", ".join(meant[:-1]), meant[-1]))) + "?"
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
