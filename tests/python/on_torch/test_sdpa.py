# SPDX-License-Identifier: Apache-2.0
"""tessera.torch.scaled_dot_product_attention beside torch.nn.functional's."""
import inspect
import sys
import types
import warnings
from pathlib import Path

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import tessera.torch as tt  # noqa: E402
from dropins import close, normal, same_gradients  # noqa: E402

THEIRS = F.scaled_dot_product_attention
Q, K, V = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)
KEEP = torch.arange(35).reshape(5, 7) % 3 > 0


@pytest.mark.parametrize("shapes, keywords", [
    ((Q, K, V), {}),
    ((Q, K, V), dict(is_causal=True)),
    ((Q, K, V), dict(scale=0.3)),
    ((Q, K, V), dict(scale=-0.3)),
    ((Q, K, V), dict(scale=torch.tensor(0.3))),
    ((Q, K, V), dict(attn_mask=KEEP)),
    ((Q, K, V), dict(attn_mask=KEEP.T.contiguous().T)),
    ((Q, K, V), dict(attn_mask=torch.zeros(5, 7, dtype=torch.bool))),
    ((Q, K, V), dict(attn_mask=causal_lower_right(5, 7))),
    ((Q, K, V), dict(attn_mask=causal_upper_left(5, 7))),
    ((Q[2:], K[2:], V[2:]), dict(attn_mask=KEEP)),
    ((Q[1:], K[1:], V[1:]), dict(attn_mask=KEEP.expand(3, 5, 7))),
    (((4, *Q), (4, *K), (4, *V)), dict(attn_mask=KEEP.expand(4, 1, 1, 5, 7))),
    (((4, *Q), K, V), {}),
    ((Q, (1, *K[1:]), (1, *V[1:])), {}),
    ((Q, K, (1, *V[1:])), {}),
    ((Q, K, (1, *V[1:])), dict(is_causal=True)),
    ((Q, (2, 1, 7, 8), (2, 1, 7, 4)), {}),
    (((2, 1, 5, 8), K, V), {}),
    (((2, 6, 5, 8), K, V), dict(enable_gqa=True)),
    (((2, 6, 5, 8), K, V), dict(enable_gqa=True, is_causal=True)),
    (((2, 6, 5, 8), (2, 3, 7, 8), (2, 2, 7, 4)), dict(enable_gqa=True)),
    (((2, 6, 5, 8), (2, 1, 7, 8), (2, 6, 7, 4)), dict(enable_gqa=True, is_causal=True)),
    (((6, 5, 8), (6, 7, 8), (1, 7, 4)), dict(enable_gqa=True, attn_mask=KEEP)),
    ((Q, K, V), dict(dropout_p=-1.0)),
    ((Q, K, V), dict(dropout_p=False)),
    ((Q, (2, 3, 0, 8), (2, 3, 0, 4)), {}),
    (((2, 3, 0, 8), K, V), {}),
], ids=str)
def test_agrees_with_gradients(shapes, keywords):
    inputs = [normal(*shape, grad=True, seed=i) for i, shape in enumerate(shapes)]
    ours, theirs = tt.scaled_dot_product_attention(*inputs, **keywords), THEIRS(*inputs, **keywords)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    close(ours, theirs)
    same_gradients(ours, theirs, inputs)


@pytest.mark.parametrize("scale", [True, False, 1, numpy.True_, numpy.float16(0.3), torch.tensor(True),
                                   torch.tensor(2)], ids=repr)
def test_a_scale_is_any_number(scale):
    q, k, v = (normal(*s, seed=i) for i, s in enumerate((Q, K, V)))
    for mask in (None, KEEP):
        close(tt.scaled_dot_product_attention(q, k, v, mask, scale=scale), THEIRS(q, k, v, mask, scale=scale))


HOLLOW = {"no heads": ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 4)), "no heads of three axes": ((0, 5, 8), (0, 7, 8),
          (0, 7, 4)), "heads of q alone": ((2, 0, 5, 8), (2, 1, 7, 8), (2, 1, 7, 4)),
          "nothing to compare": ((2, 3, 5, 0), (2, 3, 7, 0), V), "two axes": ((5, 0), (7, 0), (7, 4)),
          "five axes": ((2, 2, 3, 5, 0), (2, 2, 3, 7, 0), (2, 2, 3, 7, 4)), "no values": (Q, K, (2, 3, 7, 0)),
          "nothing": ((0, 0, 0, 0),) * 3}


@pytest.mark.parametrize("keywords", [{}, dict(is_causal=True), dict(attn_mask=KEEP), dict(scale=0.5),
                                      dict(enable_gqa=True)], ids=lambda keywords: " ".join(keywords))
@pytest.mark.parametrize("shapes", HOLLOW.values(), ids=HOLLOW)
def test_extents_of_zero(shapes, keywords):
    """No heads, and heads without elements, eager, autocast and as fake tensors."""
    inputs = [normal(*shape, grad=True, seed=i) for i, shape in enumerate(shapes)]
    if shapes[0][-2] == 0 and "attn_mask" in keywords:
        keywords = dict(attn_mask=KEEP[:0, :0])
    if len(shapes[0]) == 2:
        keywords = {name: value for name, value in keywords.items() if name != "enable_gqa"}  # an IndexError there
    ours, theirs = tt.scaled_dot_product_attention(*inputs, **keywords), THEIRS(*inputs, **keywords)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
    close(ours, theirs)
    if theirs.requires_grad:
        same_gradients(ours, theirs, inputs)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert tt.scaled_dot_product_attention(*inputs, **keywords).dtype == THEIRS(*inputs, **keywords).dtype
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tt.scaled_dot_product_attention(*(mode.from_tensor(x) for x in inputs), **keywords)
    assert fake.shape == theirs.shape


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7)])
def test_a_float_mask_has_a_gradient(shape):
    inputs = [normal(*s, grad=True, seed=i) for i, s in enumerate((Q, K, V, shape))]
    ours, theirs = tt.scaled_dot_product_attention(*inputs), THEIRS(*inputs)
    close(ours, theirs)
    same_gradients(ours, theirs, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_with_a_float32_mask(dtype):
    q, k, v = (normal(*s, dtype=dtype, seed=i) for i, s in enumerate((Q, K, V)))
    mask = normal(5, 7)
    close(tt.scaled_dot_product_attention(q, k, v, mask),
          THEIRS(q.float(), k.float(), v.float(), mask), 2e-2)


def test_strides_of_any_kind():
    q, k, v = (normal(*s[:2], s[3], s[2], seed=i).transpose(2, 3) for i, s in enumerate((Q, K, V)))
    close(tt.scaled_dot_product_attention(q, k, v), THEIRS(q, k, v))


IN_MEMORY = ["bhse", "bshe", "sbhe", "hbse", "shbe", "hsbe"]


def in_memory(order, b=2, h=3, s=5, e=8, fused=False, seed=0):
    """[b, h, s, e] with its axes in memory as in `order`; fused: a third of a projection's result."""
    size = dict(b=b, h=h, s=s, e=e)
    x = normal(*(size[axis] for axis in order), seed=seed)
    if fused:
        x = torch.cat([x, x, x], -1)[..., :e]
    return x.permute([order.index(axis) for axis in "bhse"]).requires_grad_()


@pytest.mark.parametrize("extents", [{}, dict(s=1), dict(h=1), dict(b=1), dict(b=1, s=1), dict(h=1, s=1)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", IN_MEMORY)
def test_results_have_the_strides_of_the_original(order, fused, extents):
    """o, and the gradients in their inputs' order, eager and as fake tensors say it."""
    q, k, v = (in_memory(order, fused=fused, seed=i, **extents) for i in range(3))
    theirs = THEIRS(q, k, v)
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
    for keywords in ({}, {"attn_mask": mask}, {"enable_gqa": True}, {"scale": -0.3}):
        ours = tt.scaled_dot_product_attention(q, k, v, **keywords)
        assert ours.stride() == theirs.stride()
    ours = tt.attention(q, k, v, layout="bhsd")
    close(ours, theirs)
    gradients = torch.autograd.grad(ours.sum(), (q, k, v))
    for gradient, x in zip(gradients, (q, k, v)):
        assert gradient.stride() == torch.empty_like(x).stride()
    same_gradients(tt.scaled_dot_product_attention(q, k, v), theirs, (q, k, v))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        fake = tt.scaled_dot_product_attention(*fakes)
    assert all(a == b or n == 1 for a, b, n in zip(fake.stride(), theirs.stride(), theirs.shape))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (4, 2, 3, 5, 8)])
def test_other_ranks_are_contiguous_as_the_originals(shape):
    order = (*range(len(shape) - 3), len(shape) - 2, len(shape) - 3, len(shape) - 1) if len(shape) > 2 else (0, 1)
    x = normal(*(shape[axis] for axis in order)).permute(order)
    assert tt.scaled_dot_product_attention(x, x, x).stride() == THEIRS(x, x, x).stride()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_tutorials_block_runs_under_the_patch(compiled):
    """PyTorch's tutorial views what attention returned, and copies nothing."""
    def block(x):
        b, s, d = x.shape
        q, k, v = (part.view(b, s, 2, d // 6).transpose(1, 2) for part in x.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y, y.transpose(1, 2).view(b, s, d // 3), y.transpose(1, 2).reshape(b, s, d // 3)

    torch._dynamo.reset()
    x = normal(2, 5, 48)
    expected = block(x)[1]
    with tt.patch_sdpa():
        y, viewed, reshaped = (torch.compile(block, fullgraph=True, backend="aot_eager") if compiled
                               else block)(x)
    close(viewed, expected)
    close(reshaped, expected)
    assert reshaped.data_ptr() == y.data_ptr()


def test_signature_is_the_original():
    theirs = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, " \
        "enable_gqa=False"
    ours = inspect.signature(tt.scaled_dot_product_attention)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in ours.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({theirs})"
    q, k, v = (normal(*s) for s in (Q, K, V))
    with pytest.raises(TypeError):
        tt.scaled_dot_product_attention(q, k, v, None, 0.0, False, 0.3)


def bad_calls():
    q, k, v = (normal(*s) for s in (Q, K, V))
    yield (q, k, v), dict(attn_mask=KEEP, is_causal=True), "attn_mask and is_causal"
    yield (q, k, v), dict(attn_mask=causal_lower_right(5, 7), is_causal=True), "CausalBias"
    yield (q, k, v), dict(attn_mask=KEEP.int()), r"attn_mask.dtype=torch.int32"
    yield (q, k, v), dict(attn_mask=KEEP.half()), r"attn_mask.dtype=torch.float16"
    yield (q, k, v), dict(attn_mask=torch.ones(4, 7, dtype=torch.bool)), r"attn_mask.shape"
    yield (q, k, v), dict(attn_mask=KEEP.expand(1, 2, 3, 5, 7)), "attn_mask.shape"
    yield (q[0], k[0], v[0]), dict(attn_mask=KEEP.expand(1, 3, 5, 7)), "attn_mask.shape"
    yield (q[0, 0], k[0, 0], v[0, 0]), dict(attn_mask=KEEP[None]), "attn_mask.shape"
    yield (q, k.half(), v), {}, "key.dtype"
    yield (q.int(), k.int(), v.int()), {}, "query.dtype=int32"
    yield (q[0, 0, 0], k, v), {}, r"query.dim\(\)=1"
    yield (normal(2, 6, 5, 8), k, v), {}, "query has 6 heads"
    yield (normal(2, 5, 5, 8), k, v), dict(enable_gqa=True), "query has 5 heads"
    yield (normal(2, 6, 5, 8), normal(2, 4, 7, 8), v[:, :2]), dict(enable_gqa=True), "key 4 and value 2"
    yield (normal(2, *Q), normal(2, *K), normal(2, *V)), dict(attn_mask=KEEP.expand(2, 5, 1, 5, 7)), \
        r"attn_mask.shape=.*the result, \[2, 2\]"
    yield (q[..., :4], k, v), {}, "key.shape"
    yield (q, k[:, :, :6], v), {}, "value.shape"
    yield (normal(3, 3, 5, 8), k, v), {}, "batch axes"
    yield (q, k, v), dict(dropout_p=1.5), "dropout_p=1.5"
    yield (q, k, v), dict(dropout_p=float("nan")), "dropout_p=nan"
    yield (q, k, v), dict(scale=float("inf")), "scale=inf"
    yield (q, k, v), dict(scale=-float("inf")), "scale=-inf"
    yield (q, k, v), dict(scale=torch.tensor(0.3, requires_grad=True)), "scale=Tensor: asks for a gradient"


@pytest.mark.parametrize("arguments, keywords, message", list(bad_calls()), ids=lambda x: x if
                         isinstance(x, str) else "")
def test_errors_are_named_and_of_the_type_that_pytorch_raises(arguments, keywords, message):
    with pytest.raises(RuntimeError, match=message) as caught:
        tt.scaled_dot_product_attention(*arguments, **keywords)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith("tessera.torch.scaled_dot_product_attention: ")


@pytest.mark.parametrize("name, values", [
    ("scale", ["0.3", 0.3j, [0.3], torch.tensor([0.3, 0.3])]), ("dropout_p", [None, "0.1", [0], torch.tensor([0.0])]),
    ("is_causal", [None, 1, "no", numpy.True_, torch.tensor(True)]), ("enable_gqa", [None, 1, torch.tensor(True)])])
def test_what_is_no_number_or_flag_is_a_type_error(name, values):
    q, k, v = (normal(*s) for s in (Q, K, V))
    for value in values:
        with pytest.raises(TypeError, match=f"argument '{name}'"):
            THEIRS(q, k, v, **{name: value})
        with pytest.raises(TypeError, match=f"tessera.torch.scaled_dot_product_attention: {name}=.*must be a"):
            tt.scaled_dot_product_attention(q, k, v, **{name: value})


def test_what_is_legal_and_not_built_is_refused():
    q, k, v = (normal(*s) for s in (Q, K, V))
    with pytest.raises(tt.Refused, match="dropout_p=1"):
        tt.scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    with pytest.raises(tt.Refused, match="fp64"):
        tt.scaled_dot_product_attention(q.double(), k.double(), v.double())
    with pytest.raises(TypeError, match="must be tensors"):
        tt.scaled_dot_product_attention([1.0], k, v)


def test_dropout_is_drawn_from_the_generator():
    q, k, v = (normal(*s) for s in (Q, K, V))
    torch.manual_seed(3)
    a = tt.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    b = tt.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(a, tt.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(a, b)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(dynamic):
    torch._dynamo.reset()
    inputs = [normal(*s, grad=True, seed=i) for i, s in enumerate((Q, K, V))]
    for keywords in (dict(is_causal=True), dict(attn_mask=KEEP)):
        compiled = torch.compile(lambda *x: tt.scaled_dot_product_attention(*x, **keywords),
                                 fullgraph=True, dynamic=dynamic, backend="aot_eager")
        close(compiled(*inputs), THEIRS(*inputs, **keywords))
        same_gradients(compiled(*inputs), THEIRS(*inputs, **keywords), inputs)


@pytest.mark.parametrize("dtypes, mask, keywords", [
    ("ffb", None, {}), ("ffb", torch.bool, {}), ("ffb", torch.float32, {}), ("bff", torch.bfloat16, {}),
    ("fff", torch.bfloat16, {}), ("fff", torch.float16, {}), ("bbb", torch.float16, {}), ("hfb", torch.bool, {}),
    ("ffb", None, dict(is_causal=True)), ("ffb", None, dict(scale=-0.3)), ("ffb", torch.bool, dict(enable_gqa=True)),
    ("fbb", None, dict(enable_gqa=True))], ids=str)
@pytest.mark.parametrize("function", [tt.scaled_dot_product_attention, lambda *x, **k: patched(*x, **k)],
                         ids=["named", "fallback"])
def test_autocast_casts_before_dtypes_are_compared(function, dtypes, mask, keywords):
    """As PyTorch: float32 q and k of a qk-norm beside bfloat16 v, a mask of another dtype than q's."""
    kinds = {"f": torch.float32, "b": torch.bfloat16, "h": torch.float16}
    heads = (6, 3, 3) if keywords.get("enable_gqa") else (3, 3, 3)
    q, k, v = (normal(2, h, 5, 8, dtype=kinds[x], seed=i) for i, (h, x) in enumerate(zip(heads, dtypes)))
    if mask is not None:
        mask = torch.ones(5, 5).tril().bool() if mask == torch.bool else normal(5, 5, dtype=mask)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        ours, theirs = function(q, k, v, mask, **keywords), THEIRS(q, k, v, mask, **keywords)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    close(ours, theirs, 2e-2)


def test_autocast_of_a_cpu_leaves_meta_tensors_alone():
    q, k, v = (torch.empty(s, device="meta") for s in (Q, K, V))
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        ours, theirs = (f(q, k, v, KEEP.to("meta")) for f in (tt.scaled_dot_product_attention, THEIRS))
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float32


def patched(*arguments, **keywords):
    with tt.patch_sdpa(fallback=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        return F.scaled_dot_product_attention(*arguments, **keywords)


# ---- __torch_function__ ----

class Counted(torch.Tensor):
    """A subclass that asks which function it is given to, as those of libraries do."""
    count = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        cls.count += function is F.scaled_dot_product_attention
        return super().__torch_function__(function, types, arguments, keywords or {})


@pytest.mark.parametrize("place", [0, 1, 2])
def test_subclasses_are_asked_under_a_patch(place):
    inputs = [normal(*shape, seed=i) for i, shape in enumerate((Q, K, V))]
    theirs = THEIRS(*inputs, KEEP, scale=0.3)
    inputs[place] = inputs[place].as_subclass(Counted)
    before = Counted.count
    with tt.patch_sdpa():
        ours = F.scaled_dot_product_attention(*inputs, KEEP, scale=0.3)
    assert Counted.count == before + 1 and type(ours) is Counted
    close(ours.as_subclass(torch.Tensor), theirs)


def test_modes_see_the_call():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            seen.append(function)
            return function(*arguments, **(keywords or {}))

    q, k, v = (normal(*s) for s in (Q, K, V))
    with Mode():
        ours = tt.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(ours, THEIRS(q, k, v, is_causal=True))
    assert tt.scaled_dot_product_attention in seen


@pytest.mark.parametrize("fallback", [False, True])
def test_symbolic_traces_under_a_patch(fallback):
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = [normal(*shape, grad=True, seed=i) for i, shape in enumerate((Q, K, V))]
    with tt.patch_sdpa(fallback=fallback):
        traced = torch.fx.symbolic_trace(function)
    assert tt.scaled_dot_product_attention in [node.target for node in traced.graph.nodes]
    close(traced(*inputs), function(*inputs))
    same_gradients(traced(*inputs), function(*inputs), inputs)


# ---- nested tensors ----

def jagged(lengths, h=2, d=8, grad=False, seed=0):
    return torch.nested.nested_tensor([normal(n, h, d, seed=seed + i) for i, n in enumerate(lengths)],
                                      layout=torch.jagged, requires_grad=grad)


@pytest.mark.parametrize("keywords", [{}, dict(scale=0.2)])
def test_jagged_agrees_with_gradients(keywords):
    q, k = jagged((3, 0, 5), grad=True), jagged((4, 2, 6), grad=True, seed=20)
    inputs = (q, k)
    for keys in (q, k):
        a, b = (f(q.transpose(1, 2), keys.transpose(1, 2), keys.transpose(1, 2), **keywords)
                for f in (tt.scaled_dot_product_attention, THEIRS))
        assert a.shape == q.transpose(1, 2).shape  # the same ragged extent
        a, b = (x.transpose(1, 2).values() for x in (a, b))
        close(a, b)
        cotangent = normal(*a.shape, seed=3)
        for x, y in zip(torch.autograd.grad(a, inputs[:1 + (keys is k)], cotangent),
                        torch.autograd.grad(b, inputs[:1 + (keys is k)], cotangent)):
            close(x.values(), y.values(), 1e-4)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_jagged_attention_is_each_sequence_alone(layout):
    x = jagged((3, 1, 5))
    bias = normal(1, 2, 5, 5)
    q = x if layout == "bshd" else x.transpose(1, 2)
    o, lse = tt.attention(q, q, q, layout=layout, causal=True, bias=bias, return_lse=True)
    o = o if layout == "bshd" else o.transpose(1, 2)
    ends = [0, 3, 4, 9]
    for i, alone in enumerate(x.unbind()):
        n = len(alone)
        expected, rows = tt.attention(*[alone[None]] * 3, causal=True, bias=bias[..., :n, :n],
                                      return_lse=True)
        close(o.unbind()[i], expected[0])
        close(lse[:, ends[i]:ends[i + 1]], rows[0])


def test_jagged_with_gaps():
    buffer = normal(2, 6, 2, 8)
    x = torch.nested.narrow(buffer, 1, torch.tensor([0, 1]), torch.tensor([3, 4]), layout=torch.jagged)
    o = tt.attention(x, x, x, causal=True)
    assert o.shape == x.shape
    for i, (start, n) in enumerate(((0, 3), (1, 4))):
        alone = buffer[i:i + 1, start:start + n]
        close(o.unbind()[i], tt.attention(alone, alone, alone, causal=True)[0])


def test_what_nested_tensors_cannot_say_is_named():
    x, other = jagged((3, 5)), jagged((3, 5))
    dense = normal(2, 5, 2, 8)
    for arguments, keywords, message in (
            ((x, dense, dense), {}, "must all be nested"), ((x, x, other), {}, "v=.*lengths of k"),
            ((x, x, x), dict(layout="bhsd"), "ragged in axis 2"),
            ((x, x, x), dict(layout="thd"), "layout='thd'"),
            ((x, x, x), dict(seqlens_k=torch.tensor([1, 2])), "seqlens_k.*lengths themselves")):
        with pytest.raises(ValueError, match=message):
            tt.attention(*arguments, **keywords)
    q = x.transpose(1, 2)
    with pytest.raises(RuntimeError, match="attn_mask: nested"):
        tt.scaled_dot_product_attention(q, q, q, KEEP)


@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_strided_nested_tensors(given):
    parts = [normal(n, 2, 8, seed=n) for n in (3, 5)]
    results = []
    for function in (tt.scaled_dot_product_attention, None):
        leaves = [part.clone().requires_grad_() for part in parts]
        nested = torch.nested.as_nested_tensor(leaves).transpose(1, 2)
        assert nested.is_nested and nested.layout is torch.strided
        outs = function(nested, nested, nested, **given).unbind() if function else \
            [THEIRS(*(x.transpose(0, 1)[None],) * 3, **given)[0] for x in leaves]
        results.append((*outs, *torch.autograd.grad(sum(o.square().sum() for o in outs), leaves)))
    for ours, theirs in zip(*results):
        close(ours, theirs)


# ---- TorchScript ----

def scripted(q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3)


@pytest.mark.parametrize("fallback", [False, True])
def test_scripts_under_a_patch(fallback):
    """TorchScript knows the operator, which is PyTorch's."""
    q = normal(*Q)
    with tt.patch_sdpa(fallback=fallback):
        script = torch.jit.script(scripted)
    close(script(q), scripted(q))
    assert "aten::scaled_dot_product_attention" in str(script.graph)


# ---- patch_sdpa ----

def test_patch_reaches_modules_and_comes_off():
    importer = types.ModuleType("an_importer")
    importer.attention = THEIRS
    sys.modules["an_importer"] = importer
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = normal(2, 5, 16)
    try:
        expected = layer(x, x, x, need_weights=False)[0]
        with tt.patch_sdpa():
            assert F.scaled_dot_product_attention is tt.scaled_dot_product_attention
            assert importer.attention is tt.scaled_dot_product_attention
            close(layer(x, x, x, need_weights=False)[0], expected)
            with pytest.raises(tt.Refused):
                F.scaled_dot_product_attention(*[normal(*Q).double()] * 3)
        assert F.scaled_dot_product_attention is THEIRS and importer.attention is THEIRS
    finally:
        del sys.modules["an_importer"]


def test_patch_for_good_and_undone():
    patch = tt.patch_sdpa()
    try:
        assert F.scaled_dot_product_attention is tt.scaled_dot_product_attention
    finally:
        patch.undo()
        patch.undo()
    assert F.scaled_dot_product_attention is THEIRS


def test_patch_with_a_fallback_warns_and_lets_pytorch_compute():
    inputs = [normal(*s).double() for s in (Q, K, V)]
    with tt.patch_sdpa(fallback=True):
        with pytest.warns(UserWarning, match="PyTorch computes it"):
            o = F.scaled_dot_product_attention(*inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            F.scaled_dot_product_attention(*[x.float() for x in inputs])
    close(o, THEIRS(*inputs))


def test_a_vision_transformer_trains_the_same(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "examples" / "torch")
    import vit
    curves = vit.main(["--steps", "3"])
    assert curves["tessera"] == pytest.approx(curves["PyTorch"], rel=1e-3)
    assert "of new pictures right" in capsys.readouterr().out
    assert F.scaled_dot_product_attention is THEIRS
