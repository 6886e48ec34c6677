# SPDX-License-Identifier: Apache-2.0
"""The text of a call as PyTorch's operators carry it: what keywords become, and what kernels make of it."""
import functools
import itertools
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402


DEVICE = torch.get_default_device()  # conftest.py sets it


def qkv(b=2, s=33, hk=4, dtype=torch.float32):
    return [torch.randn(b, s, h, 16, dtype=dtype) for h in (4, hk, hk)]


def needs_both_kernels():
    if not tt._ops.has_binding:
        pytest.skip("libtessera_torch.so was not built")
    if DEVICE.type != "cpu":
        pytest.skip("the kernels through ctypes are on the CPU")


def assert_same(results, expected):
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_both_kernels_agree():
    """The compiled binding and the one through ctypes, bit for bit."""
    needs_both_kernels()
    from tessera.torch._ops import _kernels
    q, k, v = qkv(b=3, hk=2, dtype=torch.bfloat16)
    given = dict(bias=torch.randn(4, 33, 33), sink=torch.randn(4), seqlens_k=torch.tensor([33, 0, 7]),
                 alibi_slopes=torch.rand(3, 4), softmax_scale=0.3, causal=True, align="bottom_right",
                 bias_at="pre_scale", softcap=20.0)
    names, tensors, options, flags = tt._describe.sort(q, k, v, given)
    outputs = ["o:float32", "lse", "max_logit"]
    arguments = tensors, *tt._describe.written(names, options, flags, outputs)
    forward = tt._ops.attention(*arguments)
    assert_same(forward, _kernels.attention(*arguments))
    o, lse, _ = forward
    call = tessera._call.Call.of(arguments[2])
    backward = call.backward(call.differentiable, True).text
    do, dlse = torch.randn_like(o)[..., :1].expand(o.shape), torch.randn_like(lse)
    rows = [do, o, lse, dlse, *tensors], arguments[1], backward
    assert_same(tt._ops.attention_backward(*rows), _kernels.attention_backward(*rows))
    mine, yours = ([torch.empty_like(x) for x in forward] for _ in range(2))
    tt._ops.attention_into(mine, *arguments)
    _kernels.attention_into(yours, *arguments)
    assert_same(mine, forward)
    assert_same(yours, forward)


@pytest.mark.parametrize("dv", [8, 4])
@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_both_kernels_lay_results_out_alike(order, dv):
    """In the order of q's axes in memory, and for gradients in that of their inputs; expanded ones too."""
    needs_both_kernels()
    from tessera.torch._ops import _kernels
    shape, back = [(2, 3, 5)[axis] for axis in order], [order.index(axis) for axis in range(3)]
    q, k, v = (torch.randn(*shape, d).permute(*back, 3) for d in (8, 8, dv))
    text = "in=q,k,v format_q=bhsd format_kv=bhsd out=o,lse"
    for k, v in ((k, v), (k[:, :1].expand_as(k), v[:, :1].expand_as(v))):
        arguments = [q, k, v], [], text
        ours, theirs = tt._ops.attention(*arguments), _kernels.attention(*arguments)
        backward = [torch.randn_like(ours[0]), *ours, q, k, v], [], tt._ops.backward_text(text, (0, 1, 2), False)
        for a, b in ((ours, theirs), (tt._ops.attention_backward(*backward), _kernels.attention_backward(*backward))):
            assert [x.stride() for x in a] == [x.stride() for x in b]
            assert_same(a, b)
        assert ours[0].permute(*order, 3).is_contiguous()


@pytest.mark.parametrize("text, message", [
    ("in=q,k,v,sink out=o,lse", "other tensors"), ("in=q,k,q out=o,lse", "twice"), ("in=q+k@1,v,v out=o,lse", "own"),
    ("in=q,k,v max_seqlen_q=$0 out=o,lse", "sizes"), ("in=q,k,v pass=backward out=dq", "pass"),
    ("in=q,k,v casual=True out=o,lse", "casual=True: no such name")])
def test_the_binding_refuses_other_texts(text, message):
    if not tt._ops.has_binding:
        pytest.skip("libtessera_torch.so was not built")
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        tt._ops.attention(qkv(), [], text)


def test_texts_do_not_leak():
    """PyTorch 2.11's own reader of strings keeps each of them."""
    q, k, v = qkv(b=1, s=1)
    text = "in=q,k,v " + " ".join(["causal=True"] * 400) + " out=o,lse"

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096
    for n in (500, 2000):
        before = resident()
        for _ in range(n):
            tt._ops.attention([q, k, v], [], text)
    assert resident() - before < 2000 * len(text) / 4


def test_text_is_what_the_arguments_say():
    """written() is on the way of every call, and _args says what is wrong with it: both know all keywords."""
    q, k, v = qkv()
    cu = torch.tensor([0, 20, 33], dtype=torch.int32)
    packed = dict(zip("qkv", (x[0] for x in qkv())), layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu)
    q8 = dict(zip("qkv", (x.to(torch.float8_e4m3fn) for x in (q, k, v))))
    cases = [dict(), dict(causal=True), dict(window=(3, 0), align="top_left"), dict(softcap=3.0),
             dict(softmax_scale=0.5, layout=("bshd", "bshd")), dict(backend="reference"), dict(sm_margin=3),
             dict(bias=torch.zeros(33, 33), bias_at="pre_scale"), dict(bias_at="pre_scale"),
             dict(drop=torch.zeros(33, 33, dtype=torch.bool)), dict(sink="off_by_one"),
             dict(dropout_p=0.5, rng_state=torch.zeros(2, dtype=torch.int64)),
             dict(batch_invariant=True, deterministic=True), dict(align="bottom_right"), dict(align=-3),
             dict(align=torch.tensor([1, 2]), causal=True), dict(seqlens_q=(n := torch.tensor([3, 4])), seqlens_k=n),
             {**packed, "max_seqlen_q": 20, "max_seqlen_k": 25}, dict(allow_quadratic=True),
             {**q8, "q_scale": torch.ones(2, 4, 33), "scale_block": (1, 0), "return_amax": True}]
    seen = set()
    for case in cases:
        given = {"deterministic": False, "q": q, "k": k, "v": v, **case}
        described = tt._describe.Description.of_keywords("attention", given)
        own = {name: x for name, x in given.items() if name not in "qkv"}
        names, tensors, options, flags = tt._describe.sort(*(given[name] for name in "qkv"), own)
        sizes, text = tt._describe.written(names, options, flags, tt._functions._outputs(given["q"], own))
        call = tessera._call.Call.of(text)
        fields = {name: sizes[int(x[1:])] if str(x).startswith("$") else x for name, x in call.fields}
        a = described.arguments
        assert fields == dict(tessera._call.fields_of(a.problem, a)), case
        assert {tessera._lib.INDEX[name]: id(x) for name, x in zip(names, tensors)} == \
            {index: id(x) for index, x in described.tensors.items()}, case
        again = tt._describe.Description.of_call(call, tensors, sizes)
        for mine, yours in zip(a.problem.tensor, again.arguments.problem.tensor):
            if mine.dtype:
                assert bytes(mine) == bytes(yours), case
        seen |= fields.keys()
    forward = {field for row in tessera._call._keywords.FORWARD.values() if getattr(row, "fields", ())
               for field in row.fields} & tessera._call.FIELDS.keys()
    assert forward - seen <= {"format_q", "format_kv", "k_scale_block"}


def test_no_keyword_is_ignored():
    """Each changes the text, or what comes back."""
    q, k, v = qkv()
    values = {"layout": "bhsd", "softmax_scale": 2.0, "window": (1, 1), "align": "top_left", "softcap": 2.0,
              "bias_at": "pre_scale", "dropout_p": 0.5, "backend": "cpu", "sm_margin": 1, "precision": "fp8",
              "smooth": "mean", "scale_block": (1, 1), "out_dtype": "float32", "max_seqlen_q": 1, "max_seqlen_k": 1}
    bias = {"bias": torch.zeros(33, 33)}
    for name, row in tessera._call._keywords.FORWARD.items():
        if isinstance(row, tessera._call._keywords.Output):
            continue  # goes beside the text

        def text(keywords):
            names, _, options, flags = tt._describe.sort(q, k, v, keywords)
            outputs = tt._functions._outputs(q, keywords)
            return tt._describe.written(names, options, flags, outputs), tt._functions._picked(outputs, keywords)
        value = q if isinstance(row, tessera._call._keywords.Tensor) else values.get(name, not row.default)
        base = {} if name == "bias" else bias
        assert text(base) != text({**base, name: value}), name


def test_numbers_may_be_tensors_without_axes():
    """They are read at each call; one that asks for a gradient would not get it."""
    q, k, v = qkv(s=5)
    for make in (torch.tensor, np.array, np.float32):
        same = tt.attention(q, k, v, softmax_scale=make(0.25), softcap=make(2.0))
        assert torch.equal(same, tt.attention(q, k, v, softmax_scale=0.25, softcap=2.0))
    scale = torch.tensor(0.25)
    for value in (0.25, 0.5):
        scale.fill_(value)
        assert torch.equal(tt.attention(q, k, v, softmax_scale=scale), tt.attention(q, k, v, softmax_scale=value))
    numpy = [x.cpu().numpy() for x in (q, k, v)]
    assert (tessera.attention(*numpy, softmax_scale=np.array(0.25)) ==
            tessera.attention(*numpy, softmax_scale=0.25)).all()
    scale.requires_grad_()
    for function in (tt.attention, functools.partial(tt.attention, causal=True)):
        with pytest.raises(ValueError, match="softmax_scale=Tensor: asks for a gradient.*multiply q"):
            function(q, k, v, softmax_scale=scale)
    with pytest.raises(ValueError, match="scale=Tensor: asks for a gradient"):
        tt.scaled_dot_product_attention(q, k, v, scale=scale)
    with pytest.raises(ValueError, match="softmax_scale=Tensor: must be a number"):
        tt.attention(q, k, v, softmax_scale=torch.ones(2))


@pytest.mark.parametrize("name, rule", [("dropout_p", "a number"), ("return_lse", "True or False"),
                                        ("return_amax", "True or False"), ("return_max_logit", "True or False")])
def test_arrays_are_no_options(name, rule):
    q, k, v = qkv(s=5)
    for value in (torch.ones(2), np.ones((2, 2), "float32"), torch.zeros(1), np.ma.masked_array([1, 2])):
        for function in (tt.attention, tt.explain):
            with pytest.raises(ValueError, match=f"{name}=.*: must be {rule}"):
                function(q, k, v, **{name: value})


def test_out_dtype_may_be_numpy_s_type():
    q, k, v = qkv(s=5, dtype=torch.float16)
    for dtype in (np.float32, np.dtype("float32"), "float32"):
        assert tt.attention(q, k, v, out_dtype=dtype).dtype == torch.float32


# ---- calls whose keywords were seen before ----

CU, LENGTHS = torch.tensor([0, 9, 33], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
KEEP = torch.arange(33 * 33).view(33, 33) % 3 != 0
PACKED = dict(layout="thd", cu_seqlens_q=CU, cu_seqlens_k=CU, max_seqlen_q=24, max_seqlen_k=30)
IDS = torch.arange(33, dtype=torch.int32).view(1, 33) // 10
DIFFERENT = {  # neighbours differ in one thing
    "keep": dict(keep=KEEP), "other keep": dict(keep=~KEEP), "drop": dict(drop=KEEP),
    "keep by heads": dict(keep=KEEP.expand(1, 4, 33, 33)),
    "keep, causal": dict(keep=KEEP, causal=True), "keep, not causal": dict(keep=KEEP, causal=False),
    "keep, scale": dict(keep=KEEP, softmax_scale=0.5), "keep, other scale": dict(keep=KEEP, softmax_scale=0.75),
    "keep, scale of a tensor": dict(keep=KEEP, softmax_scale=torch.tensor(0.5)),
    "keep, other scale of a tensor": dict(keep=KEEP, softmax_scale=torch.tensor(0.75)),
    "keep, lse": dict(keep=KEEP, return_lse=True), "keep, fp32": dict(keep=KEEP, out_dtype="float32"),
    "sink": dict(sink=torch.arange(4.0)), "parameter": dict(sink=torch.nn.Parameter(torch.arange(4.0))),
    "word": dict(sink="off_by_one"), "sink and keep": dict(sink=torch.arange(4.0), keep=KEEP),
    "keep and sink": dict(keep=KEEP, sink=torch.arange(4.0)),
    "bias": dict(bias=KEEP.float()), "early bias": dict(bias=KEEP.float(), bias_at="pre_scale", softmax_scale=0.5),
    "lengths of q and k": dict(seqlens_q=LENGTHS, seqlens_k=LENGTHS),
    "lengths apart": dict(seqlens_q=LENGTHS, seqlens_k=LENGTHS + 9), "lengths": dict(seqlens_k=LENGTHS),
    "diagonal": dict(seqlens_k=LENGTHS, causal=True, align="bottom_right"),
    "top left": dict(seqlens_k=LENGTHS, causal=True, align="top_left"),
    "shift": dict(seqlens_k=LENGTHS, causal=True, align=LENGTHS),
    "documents": dict(segment_ids=IDS), "pair": dict(segment_ids=(IDS, IDS)),
    "pair apart": dict(segment_ids=(IDS, IDS // 2)), "documents, keep": dict(segment_ids=IDS, keep=KEEP),
    "dropout": dict(keep=KEEP, dropout_p=0.5, rng_state=torch.tensor([3, 4])),
    "dropout by words": dict(keep=KEEP, dropout_p=0.5, rng_state=(3, 5)),
    "window": dict(keep=KEEP, window=(3, 2)), "listed window": dict(keep=KEEP, window=[3, 4]),
    "packed": PACKED, "packed apart": {**PACKED, "cu_seqlens_k": CU.clone()},
    "packed as": {**PACKED, "causal": True, "align": "top_left"}, "longer": {**PACKED, "max_seqlen_q": 33},
    "lengths the other way": {name: PACKED[name] for name in reversed(PACKED)},
    "of NumPy's length": {**PACKED, "max_seqlen_q": np.int64(24)},
    "of no length": {name: value for name, value in PACKED.items() if not name.startswith("max")},
}


@pytest.fixture
def nothing_known(monkeypatch):
    """Forgets all calls; what it gives does so again."""
    def forget():
        monkeypatch.setattr(tt._functions, "_known", {})
        monkeypatch.setattr(tt._functions, "_kept", {})
    forget()
    return forget


@pytest.fixture
def described(monkeypatch):
    """The keywords of calls that were not known."""
    calls, own = [], tt._functions._described
    monkeypatch.setattr(tt._functions, "_described", lambda q, k, v, keywords, *more: (
        calls.append(keywords), own(q, k, v, keywords, *more))[1])
    return calls


def results(name, inputs):
    """All that a call gives, and its gradients."""
    keywords = DIFFERENT[name]
    inputs = [x[0] if keywords.get("layout") == "thd" else x for x in inputs]
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = tt.attention(*inputs, **keywords)
    out = out if isinstance(out, tuple) else (out,)
    wanted = inputs + [x for x in keywords.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return *out, *torch.autograd.grad(out[0].float().square().sum(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_that_are_known_share_what_is_the_same_and_nothing_else(nothing_known, described, dtype):
    inputs, expected = qkv(b=1, dtype=dtype), {}
    for name in DIFFERENT:
        nothing_known()
        expected[name] = results(name, inputs)
    nothing_known()
    for _ in range(2):
        again = set()
        for name in DIFFERENT:
            del described[:]
            assert_same(results(name, inputs), expected[name])
            again |= {name} if described else set()
    # Numbers are read in each call, a state is made of words, pairs are taken apart; no dictionary has a list.
    assert again == {"keep, scale of a tensor", "keep, other scale of a tensor", "dropout by words", "pair",
                     "pair apart", "listed window", "of NumPy's length"}


def test_what_is_known_holds_no_tensor(nothing_known):
    q, k, v = qkv()
    keep = KEEP.clone()
    tt.attention(q, k, v, keep=keep)
    gone = weakref.ref(keep)
    del keep
    assert gone() is None and len(tt._functions._known) == 1


def test_determinism_and_autocast_are_asked_in_each_call(nothing_known, described, monkeypatch):
    q, k, v = qkv()
    texts, run = [], tt._functions._any_tensors
    for module, name in ((tt._functions, "_any_tensors"), (tt._ops, "any_tensors")):
        monkeypatch.setattr(module, name, lambda *given: (texts.append(given[-1]), run(*given))[1])
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for is_deterministic in (False, True) * 2:
            torch.use_deterministic_algorithms(is_deterministic)
            tt.attention(q, k, v, keep=KEEP)
            assert ("deterministic=True" in texts[-1]) is is_deterministic
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(described) == 2
    half = tt.attention(*[x.bfloat16() for x in (q, k, v)], keep=KEEP)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(tt.attention(q, k, v, keep=KEEP), half)
    assert tt.attention(q, k, v, keep=KEEP).dtype is torch.float32


def test_types_are_asked_in_each_call(nothing_known):
    """The type of q, as fp8 has no lse, and those of values."""
    q, k, v = qkv()
    fp8 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    for _ in range(2):
        tt.attention(*fp8, keep=KEEP, causal=True)
        o = tt.attention(q.requires_grad_(), k, v, keep=KEEP, causal=True)
        assert torch.autograd.grad(o.sum(), q)[0].shape == q.shape
        with pytest.raises(ValueError, match="causal=1: must be True or False"):
            tt.attention(q, k, v, keep=KEEP, causal=1)


@pytest.mark.parametrize("wrong", [(3.0, 0), (3, False)])
def test_a_tuple_is_known_with_the_types_in_it(nothing_known, wrong):
    q, k, v = qkv()
    o, lse = tt.attention(q, k, v, return_lse=True)
    for call in (lambda **window: tt.attention(q, k, v, **window),
                 lambda **window: tt.attention_backward(o, q, k, v, o, lse, **window)):
        for _ in range(2):
            call(window=(3, 0), align="top_left")
            with pytest.raises(ValueError, match=r"window\[.\]=.*: must be an integer"):
                call(window=wrong, align="top_left")


def test_few_calls_are_kept(nothing_known, monkeypatch):
    monkeypatch.setattr(tt._functions, "_MAX_KEPT", 3)
    q, k, v = qkv(s=5)
    for i in range(10):
        tt.attention(q, k, v, seqlens_k=torch.tensor([3, 5]), softmax_scale=1.0 + i)
        assert len(tt._functions._known) <= 3


WRONG = {"shape": dict(keep=KEEP[1:]), "dtype": dict(keep=KEEP.float()), "device": dict(keep=KEEP.to("meta")),
         "stride": dict(keep=KEEP.expand(2, 4, 33, 33)[..., ::2]), "axes": dict(keep=KEEP.expand(1, 1, 1, 33, 33)),
         "lengths": {**PACKED, "cu_seqlens_q": CU.flip(0)}, "count": {**PACKED, "cu_seqlens_k": CU[:2]},
         "longest": {**PACKED, "max_seqlen_q": -1}, "gradient": dict(sink=torch.zeros(3, requires_grad=True))}
RIGHT = {"keep": dict(keep=KEEP), "cu_seqlens_q": PACKED, "cu_seqlens_k": {**PACKED, "cu_seqlens_k": CU.clone()},
         "sink": dict(sink=torch.zeros(4))}


@pytest.mark.parametrize("wrong", [*WRONG, "value"])
def test_a_known_call_fails_as_a_new_one_does(nothing_known, described, wrong):
    if wrong == "lengths" and DEVICE.type == "cuda":
        pytest.skip("the host does not read lengths on a GPU")
    keywords = WRONG.get(wrong, RIGHT["keep"])
    inputs = qkv(b=1)
    if wrong == "value":
        inputs[2] = inputs[2][:, 1:]
    inputs = [x[0] if "layout" in keywords else x for x in inputs]

    def message():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            tt.attention(*inputs, **keywords)
        return type(caught.value), str(caught.value), caught.value.__cause__
    new = message()
    nothing_known()
    for right in RIGHT.values():
        tt.attention(*[x[0] if "layout" in right else x for x in qkv(b=1)], **right)
    del described[:]
    assert message() == new and not described
    tt.attention(*qkv(b=1), keep=KEEP)


def test_others_see_known_calls(nothing_known):
    """vmap, fake tensors, subclasses and torch.compile, each after a plain call of the same keywords."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    q, k, v = qkv()
    expected = tt.attention(q, k, v, keep=KEEP)
    mapped = torch.vmap(lambda q, k, v, keep: tt.attention(q, k, v, keep=keep), in_dims=(0, 0, 0, None))
    torch.testing.assert_close(mapped(q[:, None], k[:, None], v[:, None], KEEP)[:, 0], expected)
    with FakeTensorMode() as mode:
        fake = tt.attention(*map(mode.from_tensor, (q, k, v)), keep=mode.from_tensor(KEEP))
    assert fake.shape == expected.shape and type(fake) is not torch.Tensor

    class Named(torch.Tensor):
        pass
    assert torch.equal(tt.attention(q, k, v, keep=KEEP.as_subclass(Named)).as_subclass(torch.Tensor), expected)
    compiled = torch.compile(lambda *x, keep: tt.attention(*x, keep=keep), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, keep=KEEP), expected)
    traced = torch.jit.trace(lambda *x: tt.attention(*x[:3], keep=x[3]), (q, k, v, KEEP))
    assert torch.equal(traced(q, k, v, ~KEEP), tt.attention(q, k, v, keep=~KEEP))


# ---- one row of packed sequences ----

ROWS = {"bshd": lambda x: x, "sbhd": lambda x: x.transpose(0, 1), "bhsd": lambda x: x.transpose(1, 2)}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", ("bshd", "bhsd")])
def test_one_row_of_packed_sequences_is_thd(layout, compiled):
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in qkv(1, hk=2))
    cu = torch.tensor([0, 9, 9, 30], dtype=torch.int32)
    kw = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)
    of_q, of_k = (ROWS[form] for form in (layout if isinstance(layout, tuple) else (layout, layout)))

    def packed(q, k, v):
        return tt.attention(q[0], k[0], v[0], layout="thd", **kw)

    def row(q, k, v):
        o, lse = tt.attention(of_q(q), of_k(k), of_k(v), layout=layout, **kw)
        return of_q(o)[0], lse[0]  # of_q is its own inverse
    if compiled:
        row = torch.compile(row, fullgraph=True, backend="aot_eager")
    found = []
    for function in (packed, row):
        o, lse = function(q, k, v)
        found.append((o, lse, *torch.autograd.grad(o.square().sum() + lse.sum(), (q, k, v))))
    assert_same(*found)


def test_both_kernels_agree_on_one_row_of_packed_sequences():
    needs_both_kernels()
    from tessera.torch._ops import _kernels
    q, k, v = qkv(1, hk=2)
    given = dict(layout=("bhsd", "bshd"), **packed_given())
    names, tensors, options, flags = tt._describe.sort(q.transpose(1, 2), k, v, given)
    arguments = tensors, *tt._describe.written(names, options, flags, ["o", "lse"])
    assert_same(tt._ops.attention(*arguments), _kernels.attention(*arguments))


# ---- prepared calls ----

def packed_given(s=33, cut=9, same=True):
    cu = torch.tensor([0, cut, s], dtype=torch.int32)
    longest = max(cut, s - cut)
    return dict(cu_seqlens_q=cu, cu_seqlens_k=cu if same else cu.clone(), max_seqlen_q=longest, max_seqlen_k=longest)


@pytest.mark.parametrize("same", [True, False])
def test_prepared_takes_what_is_new_in_each_call(same):
    q, k, v = (x[0] for x in qkv(1))
    own = dict(layout="thd", causal=True, align="bottom_right", softmax_scale=0.3)
    given = packed_given(same=same)
    run = tt._functions.prepared(tuple(given), **given, **own)
    for cut in (9, 20, 3):
        given = packed_given(cut=cut, same=same)
        assert torch.equal(run(q, k, v, *given.values()), tt.attention(q, k, v, **given, **own))
        with torch.autocast(DEVICE.type, torch.bfloat16):
            assert torch.equal(run(q, k, v, *given.values()), tt.attention(q, k, v, **given, **own))


def test_prepared_keeps_lengths_that_do_not_change_and_no_tensor():
    q, k, v = (x[0] for x in qkv(1))
    given = packed_given()
    sink, lengths = torch.randn(4), [given.pop(name) for name in ("max_seqlen_q", "max_seqlen_k")]
    fixed = dict(layout="thd", max_seqlen_q=lengths[0], max_seqlen_k=lengths[1])
    run = tt._functions.prepared((*given, "sink"), **given, sink=sink, **fixed)
    gone = weakref.ref(sink)
    del sink
    assert gone() is None
    other = torch.randn(4, requires_grad=True)
    ours, theirs = (torch.autograd.grad(o.square().sum(), other)[0] for o in (
        run(q, k, v, *given.values(), other), tt.attention(q, k, v, **given, sink=other, **fixed)))
    assert torch.equal(ours, theirs)


def test_prepared_says_what_attention_says_or_leaves_it_to_another():
    q, k, v = qkv()
    run = tt._functions.prepared(("sink",), sink=torch.randn(4))
    with pytest.raises(ValueError, match="sink.shape"):
        run(q, k, v, torch.randn(3))
    run = tt._functions.prepared(("sink",), lambda *given: len(given), sink=torch.randn(4))
    assert run(q, k, v, torch.randn(3)) == 4


@pytest.mark.parametrize("changing", [(), ("sink",), ("keep", "sink"), ("sink", "keep", "max_seqlen_q"),
                                      ("max_seqlen_q", "max_seqlen_k", "sink", "keep"),
                                      ("sink", "keep", "softcap")])
def test_prepared_needs_every_tensor_named(changing):
    given = dict(sink=torch.randn(4), keep=torch.ones(33, 33, dtype=torch.bool), max_seqlen_q=33, max_seqlen_k=33)
    with pytest.raises(ValueError, match="changing"):
        tt._functions.prepared(changing, **given, softcap=2.0)
