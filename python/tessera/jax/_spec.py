# SPDX-License-Identifier: Apache-2.0
"""A call without its arrays: what custom calls, rules of transformations and caches go by.

A Spec holds no extents, so it stays as it is under vmap, on a shard and for symbolic shapes."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import jax

from .. import _args, _keywords, _lib
from . import _arrays, _binding

DIFFERENTIABLE = {_lib.INDEX[name]: _lib.INDEX[f"d{name}"] for name in _keywords.DIFFERENTIABLE}
_WORDS = ("pass_", "flags", "align", "format_q", "format_kv", "window_left", "window_right",
          "max_seqlen_q", "max_seqlen_k", "q_scale_block", "k_scale_block", "shift")
_SCALARS = ("softmax_scale", "softcap", "dropout_p")
# The tensors whose values libtessera looks at before it computes, on the CPU: core/validate/values.cc.
_READ = {_lib.INDEX[name] for name in (
    *(f"{name}_{side}" for side in "qk" for name in ("seqlens", "cu_seqlens")),
    "cu_seqlens_q_padded", "cu_seqlens_k_padded", "q_start", "k_start", "shift",
    "page_table_k", "page_table_v", "sink", "alibi_slopes")}
_FORMATS = tuple(_lib.FORMATS)
_FLAGS = _WORDS.index("flags")


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static part of a call; binding.cc says how words, scalars and the tables of inputs and
    outputs read. `likes` has for each result the operand that it is shaped like, or for those of the
    forward pass the name of the tensor."""
    operation: str
    words: tuple[int, ...]
    scalars: tuple[float, ...]
    backend: str
    inputs: tuple[tuple[int, int, int, int], ...]
    outputs: tuple[tuple[int, int, int, int], ...]
    likes: tuple[int | str, ...]
    dtype: str | None                       # of o, or of dq, dk and dv, unless like their inputs
    spelling: tuple[tuple[str, str], ...]   # the library's name of a tensor -> the caller's

    def __hash__(self):
        return self._hash

    @functools.cached_property
    def _hash(self):
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def is_backward(self) -> bool:
        return self.words[0] == _lib.BACKWARD

    @property
    def flags(self) -> int:
        return self.words[_FLAGS]

    @property
    def layouts(self) -> tuple[str, str]:
        """The format of q, and that of k and v."""
        return _FORMATS[self.words[3]], _FORMATS[self.words[4]]

    @property
    def is_paged(self) -> bool:
        return self.place("page_table_k") is not None

    def place(self, tensor: str) -> tuple[int, int, int, int] | None:
        """The row of an input, by its name in tessera_index."""
        index = _lib.INDEX[tensor]
        return next((row for row in self.inputs if row[1] == index), None)

    def roles(self) -> list[tuple[str, int | None]]:
        """For each operand the tensor that it is, the first of several, and the axis of its slices."""
        roles = {}
        for operand, index, axis, _ in self.inputs:
            roles.setdefault(operand, (_lib.TENSORS[index], None if axis < 0 else axis))
        return [roles[operand] for operand in sorted(roles)]

    def shape_of(self, tensor: str, operands) -> tuple:
        operand, _, axis, _ = self.place(tensor)
        shape = tuple(operands[operand].shape)
        return shape if axis < 0 else (*shape[:axis], *shape[axis + 1:])

    def results(self, operands) -> list[jax.ShapeDtypeStruct]:
        """What comes back for arrays like `operands`."""
        wide = self.dtype and _arrays.dtype_named(self.dtype)
        results = []
        of_bias = {row[0] for row in self.outputs if row[1] > _lib.INDEX["dv"]}
        for number, like in enumerate(self.likes):
            if isinstance(like, int):
                of = operands[like]
                dtype = wide if wide and number not in of_bias else of.dtype
                results.append(jax.ShapeDtypeStruct(of.shape, dtype))
                continue
            q = self.shape_of("q", operands)
            q_dtype = operands[self.place("q")[0]].dtype
            rows = _arrays.statistics_dtype(q_dtype)
            if like == "o":
                shape = (*q[:-1], self.shape_of("v", operands)[-1])
                results.append(jax.ShapeDtypeStruct(shape, wide or q_dtype))
            elif like == "lse":
                results.append(jax.ShapeDtypeStruct(_arrays.row_shape(q, self.layouts[0]), rows))
            else:
                heads = _args.ORDERS[self.layouts[0]][2]
                results.append(jax.ShapeDtypeStruct((q[heads],), rows))
        return results

    def backward(self, wanted: tuple[int, ...], with_dlse: bool) -> Spec:
        """The backward pass on (do, o, lse, [dlse,] *operands) that computes the gradients of the
        operands `wanted`."""
        rows = ("do", "o", "lse", "dlse")[:4 if with_dlse else 3]
        first = len(rows)
        inputs = tuple((i, _lib.INDEX[name], -1, 0) for i, name in enumerate(rows)) + \
            tuple((operand + first, *row) for operand, *row in self.inputs)
        outputs = tuple((wanted.index(operand), DIFFERENTIABLE[index], axis, item)
                        for operand, index, axis, item in self.inputs
                        if operand in wanted and index in DIFFERENTIABLE)
        return dataclasses.replace(
            self, operation="attention_backward", words=(_lib.BACKWARD, *self.words[1:]), inputs=inputs,
            outputs=outputs, likes=tuple(operand + first for operand in wanted), dtype=None)

    # ---- what the library says ----

    def prepare(self, operands, device: _lib.Device) -> int:
        """The workspace's bytes; raises ValueError or Refused for what shapes and options say."""
        problem, _ = _binding.describe(self, operands, self.results(operands))
        information = _lib.Info(struct_size=ctypes.sizeof(_lib.Info))
        error = _lib.error_of_thread()
        code = _lib.prepare(ctypes.addressof(problem), ctypes.addressof(device), 0,
                            ctypes.addressof(information), ctypes.addressof(error))
        self._check(code, error)
        return information.workspace_bytes

    def validate(self, operands, pointers):
        """Raises the ValueError of a call on the CPU. Outputs get addresses that nothing reads."""
        problem, buffers = _binding.describe(self, operands, self.results(operands), pointers)
        for number, (_, index, _, _) in enumerate(self.outputs, 1):
            buffers.data[index] = number << 52
        error = _lib.error_of_thread()
        code = _lib.validate(ctypes.addressof(problem), _lib.CPU_ADDRESS, ctypes.addressof(buffers),
                             ctypes.addressof(error))
        self._check(code, error)

    def _check(self, code, error):
        _lib.check(code, error, self.operation, dict(self.spelling))


class Described:
    """Keywords as a Spec and the places of its operands."""

    def __init__(self, operation: str, given: dict, backward: dict | None = None,
                 grads: tuple[str, ...] = ()):
        a = self.arguments = _args.Arguments(_arrays, operation, backward is not None)
        _args.fill(a, given)
        if a.problem.flags & _lib.ACCUMULATE:
            raise a.error("accumulate", True, "adds to what outputs hold, and JAX has none to give")
        if backward is not None:
            self._put_backward(backward)
        # Operands in the order of tessera_index; slices of one array are one operand.
        self.sources: list[tuple[str, int | None]] = []
        operands, inputs = {}, []
        arrays = given | (backward or {})
        for source in sorted(a.sources, key=lambda source: source.index):
            value = arrays[source.name]
            value = value if source.part is None else value[source.part]
            sliced = isinstance(value, _arrays.Slice)
            if isinstance(value, jax.ShapeDtypeStruct) and operation != "explain":
                raise a.error(a.spelling[_lib.TENSORS[source.index]], value, f"must be a {_arrays.noun}")
            key = id(value.array) if sliced else source.index
            if key not in operands:
                operands[key] = len(operands)
                self.sources.append((source.name, source.part))
            inputs.append((operands[key], source.index, *((value.axis, value.index) if sliced
                                                          else (-1, 0))))
        self.read = sorted({operand for operand, index, *_ in inputs if index in _READ})
        outputs, likes = self._outputs(a, inputs, backward is not None, grads)
        words = [getattr(a.problem, field) for field in _WORDS] + [a.sm_margin]
        self.spec = Spec(
            operation, tuple(words), tuple(getattr(a, field) for field in _SCALARS),
            a.problem.backend.decode(), tuple(inputs), outputs, likes,
            a.grad_dtype if backward is not None else a.out_dtype, tuple(a.spelling.items()))

    def _put_backward(self, backward: dict):
        a = self.arguments
        for name in ("do", "o"):
            a.put(name, name, backward[name], a.order_q, axes="b, sq, hq, dv")
        for name in ("lse", "dlse"):
            if backward.get(name) is not None:
                a.put(name, name, backward[name], a.order_rows, axes="b, hq, sq")

    @staticmethod
    def _outputs(a, inputs, backward: bool, grads):
        if not backward:
            names = ("o", "lse") + ("max_logit",) * a.return_max_logit
            return tuple((i, _lib.INDEX[name], -1, 0) for i, name in enumerate(names)), names
        outputs, likes = [], []
        for name in grads:
            row = next((row for row in inputs if row[1] == _lib.INDEX[name[1:]]), None)
            if row is None:
                raise a.error("grads", name, f"{name[1:]} is not a given array, so it has no "
                              "gradient; leave it out")
            if row[0] not in likes:
                likes.append(row[0])
            outputs.append((likes.index(row[0]), _lib.INDEX[name], *row[2:]))
        return tuple(outputs), tuple(likes)
