# SPDX-License-Identifier: Apache-2.0
"""Shapes and dtypes of what a call returns, which three places know: the library (tessera_outputs), the PyTorch
binding, which must not take a microsecond for it (describe_new of describe.h), and Python for extents that may be
symbolic (results_of). They are asked for the same random calls."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import tessera.torch as tt  # noqa: E402
from tessera import _lib  # noqa: E402
from tessera._call import FIELDS, GRADIENT_OF, Call, Operand, _description  # noqa: E402
from tessera._call._args import ORDERS  # noqa: E402
from tessera.torch._tensors import dtype_name  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
FP8, WIDE = ("float8_e4m3fn", "float8_e5m2"), ("dq", "dk", "dv")
DTYPES = ("float32", "bfloat16", "float16", "float64", *FP8)


class Tensors(dict):
    def __repr__(self):  # what hypothesis prints for a failing example
        return ", ".join(f"{name}: {dtype_name(x)}{list(x.shape)}" for name, x in self.items())


def beside(dtype: str) -> list[str]:
    """What o and the gradients of an input may be, "" where the call does not say."""
    if dtype in FP8:
        return ["", "", "bfloat16", "float16", *FP8]
    return ["", "", dtype] + ["float32"] * (dtype in ("bfloat16", "float16"))


@st.composite
def calls(draw):
    """A forward Call, its tensors by their names, and what is drawn of the backward pass on them: which gradients are
    asked for, their dtype and whether their amax is."""
    def pick(*options):
        return draw(st.sampled_from(options))

    def ones(*shape, dtype="float32"):
        return torch.ones(shape).to(getattr(torch, dtype))

    def stored(shape, dtype):  # the axes but the last in any order in memory
        order = draw(st.permutations(range(len(shape) - 1)))
        x = ones(*(shape[axis] for axis in order), shape[-1], dtype=dtype)
        return x.permute(*(order.index(axis) for axis in range(len(shape) - 1)), len(shape) - 1)

    def laid_out(layout, b, s, h, d):
        order = [axis for axis in ORDERS[layout]]
        sizes = {axis: size for axis, size in zip(order, (b, s, h, d)) if axis is not None}
        return tuple(sizes[axis] for axis in sorted(sizes))

    dtype = pick(*DTYPES)
    is_fp8 = dtype in FP8
    keys = pick(*FP8) if is_fp8 else pick(dtype, dtype, *FP8) if dtype in ("bfloat16", "float16") else dtype
    values = pick(*FP8) if is_fp8 else keys
    layout_q, layout_kv = pick(*_lib.FORMATS), pick(*_lib.FORMATS)
    paged = pick(False, False, False, True)
    packed = layout_q == "thd", layout_kv == "thd" and not paged
    b, sq, sk, hk, dqk = pick(2, 1, 3, 0), pick(3, 1, 5, 0), pick(4, 1, 0), pick(1, 2), pick(8, 16)
    hq, dv = hk * pick(1, 2, 3), pick(dqk, dqk, 4)
    fields = {"format_q": layout_q, "format_kv": layout_kv, "backend": "reference"}  # which refuses least

    def rows(side, s):
        """Rows in memory: of packed sequences those of all."""
        if not packed[side]:
            return s
        lengths = draw(st.lists(st.integers(0, s), min_size=b, max_size=b))
        at[f"cu_seqlens_{'qk'[side]}"] = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        if pick(True, False):
            fields[f"max_seqlen_{'qk'[side]}"] = s
        return sum(lengths)

    at = {}
    q = stored(laid_out(layout_q, b, rows(0, sq), hq, dqk), dtype)
    if paged:
        k, v = stored((5, 2, hk, dqk), keys), stored((5, 2, hk, dv), values)
        at["page_table_k"] = torch.zeros((b, 3), dtype=torch.int32)
        at["seqlens_k"] = torch.full((b,), 4, dtype=torch.int64)
    else:
        t = rows(1, sk)
        k, v = (stored(laid_out(layout_kv, b, t, hk, d), name) for d, name in ((dqk, keys), (dv, values)))
    at = {"q": q, "k": k, "v": v, **at}
    beside_q = "float32" if is_fp8 else pick("float32", dtype)
    if pick(False, True):
        sizes = [b, hq, *(1 if side else s for s, side in zip((sq, 6 if paged else sk), packed))]
        sizes = [pick(size, 1) for size in sizes][pick(0, 1, 2, 3):]
        at["bias"] = ones(*sizes, dtype=beside_q)
    sink = pick(None, "tensor", "off_by_one")
    if sink == "tensor":
        at["sink"] = ones(hq, dtype=beside_q)
    elif sink:
        fields["sink_off_by_one"] = True
    if pick(False, False, True):
        at["alibi_slopes"] = ones(*pick((hq,), (b, hq), (1, hq)), dtype=beside_q)
        fields["align"] = "bottom_right"
    for name in ("q_scale", "k_scale", "v_scale") if is_fp8 else ():
        if pick(False, True):
            at[name] = ones(*pick((), (1,), (b, 1)))
    out_dtype = pick(*beside(dtype), *(["float32"] if is_fp8 else ()))
    if out_dtype in FP8:
        at["o_scale"] = ones()
    outputs = [Operand(("o",), dtype=out_dtype), *(Operand((name,)) for name in ("lse", "max_logit"))]
    outputs = outputs[:draw(st.integers(1, 3))] + [Operand(("amax_o",))] * (is_fp8 and pick(False, True))
    tensors = Tensors({name: at[name] for name in sorted(at, key=_lib.INDEX.get)})
    call = Call("attention", tuple(tensors), in_order(fields), tuple(map(str, outputs)))
    wanted = [name for name in tensors if name in GRADIENT_OF and pick(True, False)]
    grad_dtype = pick(*(name for name in beside(dtype) if all(name in beside(x) for x in (keys, values))))
    return call, tensors, wanted or ["q"], grad_dtype, is_fp8 and pick(False, True)


def in_order(fields: dict) -> tuple:
    return tuple((name, fields[name]) for name in FIELDS if name in fields
                 and fields[name] != "bshd")


def by_library(call: Call, tensors) -> list:
    a = tt._describe.Description.of_call(call, tensors, ()).arguments
    return [a.new(result.tensors[0]) for result in call.results]


def by_python(call: Call, tensors) -> list:
    return _description.results_of(call, [tuple(x.shape) for x in tensors], list(map(dtype_name, tensors)))


def strides(x) -> tuple:
    """Those that mean something."""
    return tuple(step for size, step in zip(x.shape, x.stride()) if size > 1) if x.numel() else ()


def agreed(call: Call, tensors: list, answers: collections.Counter):
    """The (shape, dtype) of what comes back, after all three have said the same."""
    expected = by_library(call, tensors)
    assert by_python(call, tensors) == expected, call.text
    fake = tt._describe.results_of(call, tensors)
    assert [(tuple(x.shape), dtype_name(x)) for x in fake] == expected, call.text
    answers[by_binding(call, tensors, expected, fake)] += 1
    return expected


def by_binding(call: Call, tensors, expected, fake) -> str:
    """Compares with the binding, which answers by running the call."""
    if not tt._ops.has_binding:
        return "no binding"
    operator = tt._ops.attention_backward if call.is_backward else tt._ops.attention
    q, k = (dtype_name(tensors[call.places[name].operand]) for name in "qk")
    try:
        with torch.no_grad():
            results = operator(tensors, [], call.text)
    except RuntimeError as error:
        assert call.is_backward and k in FP8 and q not in FP8, error  # what no CPU computes
        return "refused"
    assert [(tuple(x.shape), dtype_name(x)) for x in results] == expected, call.text
    assert list(map(strides, results)) == list(map(strides, fake)), call.text
    return f"{call.operation} of {q}"


def stacked(call: Call, names, tensors: dict, axis: int):
    """The call on one array that k and v are items of, and its operands' shapes and dtypes."""
    inputs = [str(Operand(("k", "v"), axis)) if name == "k" else name for name in names if name != "v"]
    outputs = [str(Operand(("dk", "dv"), axis, result.dtype) if result.tensors == ("dk",) else result)
               for result in call.results if result.tensors != ("dv",)]
    shapes = [grown(x.shape, axis) if name == "k" else tuple(x.shape) for name, x in tensors.items() if name != "v"]
    dtypes = [dtype_name(x) for name, x in tensors.items() if name != "v"]
    return dataclasses.replace(call, inputs=tuple(inputs), outputs=tuple(outputs)), shapes, dtypes


def grown(shape, axis: int) -> tuple:
    return (*shape[:axis], 2, *shape[axis:])


def check_stacked(call: Call, tensors: dict, expected: list):
    """That Python's rule says the same where k and v are items of one array, which JAX hands on as such."""
    if tensors["k"].shape != tensors["v"].shape or tensors["k"].dtype != tensors["v"].dtype or \
            ("dk" in call.places_of_results) != ("dv" in call.places_of_results):
        return
    axis = 2
    one, shapes, dtypes = stacked(call, call.inputs, tensors, axis)
    assert _description.results_of(one, shapes, dtypes) == [
        (grown(shape, axis), dtype) if result.tensors == ("dk",) else (shape, dtype)
        for result, (shape, dtype) in zip(call.results, expected) if result.tensors != ("dv",)], one.text


def test_the_three_rules_of_what_comes_back_agree(examples, relaxed):
    answers = collections.Counter()  # of the binding

    @settings(max_examples=2 * examples, **relaxed)
    @given(calls())
    def agree(drawn):
        call, tensors, wanted, grad_dtype, with_amax = drawn
        results = agreed(call, list(tensors.values()), answers)
        check_stacked(call, tensors, results)

        o, lse = (torch.ones(shape).to(getattr(torch, dtype)) for shape, dtype in by_library(
            dataclasses.replace(call, outputs=(call.outputs[0], "lse")), list(tensors.values())))
        rows = {"do": o, "o": o, "lse": lse}
        gradients = [GRADIENT_OF[name] for name in wanted]
        rows |= {f"{name}_scale": torch.ones(()) for name in gradients if grad_dtype in FP8 and name in WIDE}
        outputs = [str(Operand((name,), dtype=grad_dtype * (name in WIDE))) for name in gradients]
        outputs += [f"amax_{name}" for name in gradients if with_amax and name in WIDE]
        fields = {"pass": "backward", **call.values}
        inputs = {**tensors, **rows}
        inputs.pop("o_scale", None)
        backward = Call("attention_backward", tuple(inputs), in_order(fields), tuple(outputs))
        results = agreed(backward, list(inputs.values()), answers)
        check_stacked(backward, inputs, results)

    agree()
    if tt._ops.has_binding:
        computed = {f"{operation} of {dtype}" for operation in ("attention", "attention_backward") for dtype in DTYPES}
        assert computed == answers.keys() - {"refused"}, answers
