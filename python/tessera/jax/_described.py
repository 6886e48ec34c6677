# SPDX-License-Identifier: Apache-2.0
"""Keywords as a Call and its arrays, and what the library says of it for arrays of some shapes."""

from __future__ import annotations

import ctypes

import jax

from .. import _args, _lib
from .._call import Call, Operand, fields_of, gradient_of
from . import _arrays, _binding

# The tensors whose values libtessera looks at before it computes, on the CPU: core/validate/values.cc.
_READ = {
    *(f"{name}_{side}" for side in "qk" for name in ("seqlens", "cu_seqlens")),
    "cu_seqlens_q_padded", "cu_seqlens_k_padded", "q_start", "k_start", "shift",
    "page_table_k", "page_table_v", "sink", "alibi_slopes"}


class Described:
    """Keywords as a Call, and where the arrays of its operands are among them."""

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
        operands: dict[object, dict[int, str]] = {}  # array -> item -> tensor
        axes = []
        arrays = given | (backward or {})
        for source in sorted(a.sources, key=lambda source: source.index):
            value = arrays[source.name]
            value = value if source.part is None else value[source.part]
            tensor = _lib.TENSORS[source.index]
            if isinstance(value, jax.ShapeDtypeStruct) and operation != "explain":
                raise a.error(a.spelling[tensor], value, f"must be a {_arrays.noun}")
            sliced = isinstance(value, _arrays.Slice)
            key = (id(value.array), value.axis) if sliced else source.index
            if key not in operands:
                operands[key] = {}
                axes.append(value.axis if sliced else -1)
                self.sources.append((source.name, source.part))
            operands[key][value.index if sliced else 0] = tensor
        inputs = [Operand(tuple(items[i] for i in sorted(items)), axis)
                  for items, axis in zip(operands.values(), axes)]
        self.read = [i for i, operand in enumerate(inputs) if not _READ.isdisjoint(operand.tensors)]
        outputs = self._gradients(a, inputs, grads) if backward is not None else self._results(a)
        self.call = Call(operation, tuple(map(str, inputs)), fields_of(a.problem, a),
                         tuple(map(str, outputs)))

    def _put_backward(self, backward: dict):
        a = self.arguments
        for name in ("do", "o"):
            a.put(name, name, backward[name], a.order_q, axes="b, sq, hq, dv")
        for name in ("lse", "dlse"):
            if backward.get(name) is not None:
                a.put(name, name, backward[name], a.order_rows, axes="b, hq, sq")

    @staticmethod
    def _results(a) -> list[Operand]:
        names = ("lse",) + ("max_logit",) * a.return_max_logit
        return [Operand(("o",), dtype=a.out_dtype or ""), *(Operand((name,)) for name in names)]

    @staticmethod
    def _gradients(a, inputs, grads) -> list[Operand]:
        """Those of the arrays that `grads` names a tensor of."""
        outputs = []
        for name in grads:
            of = next((operand for operand in inputs if name[1:] in operand.tensors), None)
            if of is None:
                raise a.error("grads", name, f"{name[1:]} is not a given array, so it has no "
                              "gradient; leave it out")
            wide = a.grad_dtype if name in ("dq", "dk", "dv") else None
            gradient = gradient_of(of, wide or "")
            if gradient not in outputs:
                outputs.append(gradient)
        return outputs


def shape_of(call: Call, tensor: str, operands) -> tuple:
    place = call.places[tensor]
    shape = tuple(operands[place.operand].shape)
    return shape if place.axis < 0 else (*shape[:place.axis], *shape[place.axis + 1:])


def results_of(call: Call, operands) -> list[jax.ShapeDtypeStruct]:
    """What comes back for arrays like `operands`."""
    results = []
    for result, like in zip(call.results, call.likes):
        wide = result.dtype and _arrays.dtype_named(result.dtype)
        if isinstance(like, int):
            of = operands[like]
            results.append(jax.ShapeDtypeStruct(of.shape, wide or of.dtype))
            continue
        q = shape_of(call, "q", operands)
        q_dtype = operands[call.places["q"].operand].dtype
        rows = _arrays.statistics_dtype(q_dtype)
        if like == "o":
            shape = (*q[:-1], shape_of(call, "v", operands)[-1])
            results.append(jax.ShapeDtypeStruct(shape, wide or q_dtype))
        elif like == "lse":
            results.append(jax.ShapeDtypeStruct(_arrays.row_shape(q, call.layouts[0]), rows))
        else:
            heads = _args.ORDERS[call.layouts[0]][2]
            results.append(jax.ShapeDtypeStruct((q[heads],), rows))
    return results


# ---- what the library says ----

def prepare(call: Call, operands, device: _lib.Device) -> int:
    """The workspace's bytes; raises ValueError or Refused for what shapes and options say."""
    problem, _ = _binding.describe(call, operands, results_of(call, operands))
    information = _lib.Info(struct_size=ctypes.sizeof(_lib.Info))
    error = _lib.error_of_thread()
    code = _lib.prepare(ctypes.addressof(problem), ctypes.addressof(device), 0,
                        ctypes.addressof(information), ctypes.addressof(error))
    _lib.check(code, error, call.operation, call.spelling)
    return information.workspace_bytes


def validate(call: Call, operands, pointers):
    """Raises the ValueError of a call on the CPU. Outputs get addresses that nothing reads."""
    problem, buffers = _binding.describe(call, operands, results_of(call, operands), pointers)
    for number, tensor in enumerate(call.places_of_results, 1):
        buffers.data[_lib.INDEX[tensor]] = number << 52
    error = _lib.error_of_thread()
    code = _lib.validate(ctypes.addressof(problem), _lib.CPU_ADDRESS, ctypes.addressof(buffers),
                         ctypes.addressof(error))
    _lib.check(code, error, call.operation, call.spelling)
