# SPDX-License-Identifier: Apache-2.0
"""score_mod of tessera.te.pytorch: callbacks that build a cuDNN graph, beside the same written out in fp64."""

import functools
import math

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tessera._lib import Refused  # noqa: E402
from tessera.te.pytorch import DotProductAttention  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import _score_mod, flex_attention  # noqa: E402
from te_oracle import fresh_selection  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("fresh_selection")
B, S, SK, H, D = 2, 7, 9, 4, 8
KINDS = flex_attention._import_cudnn_frontend().data_type


def number(value):
    return torch.full((1, 1, 1, 1), value)


def places(graph, score):
    return (graph.gen_index(input=score, axis=axis).set_data_type(KINDS.INT32) for axis in (2, 3))


def hidden(graph, score, keep):
    return graph.binary_select(input0=score, input1=number(-math.inf), mask=keep)


def causal(graph, score, tensors):
    row, column = places(graph, score)
    keep = graph.cmp_ge(input=row, comparison=column, compute_data_type=KINDS.BOOLEAN)
    keep.set_data_type(KINDS.BOOLEAN)
    return graph.binary_select(input0=score, input1=tensors["fill"], mask=keep)


def window(graph, score, _):
    row, column = places(graph, score)
    near = graph.cmp_le(graph.sub(row, column), number(2.0))
    ahead = graph.cmp_lt(column, graph.add(row, 2))
    return hidden(graph, score, graph.logical_and(near, ahead))


def strictly_before(graph, score, _):
    row, column = places(graph, score)
    return hidden(graph, score, graph.cmp_gt(input=row, comparison=column))


def not_the_last(graph, score, _):
    row, column = places(graph, score)
    far = graph.binary_select(input0=number(-1e30), input1=score, mask=graph.cmp_ge(column, number(6.5)))
    return hidden(graph, far, graph.cmp_lt(row, 5))


def softcap(graph, score, tensors):
    return graph.mul(graph.tanh(graph.div(a=score, b=tensors["cap"]).set_data_type(KINDS.FLOAT)), tensors["cap"])


def uneven_softcap(graph, score, _):
    return graph.mul(a=2.0, b=graph.tanh(input=graph.mul(3.0, score)))


def relative(graph, score, _):
    row, column = places(graph, score)
    return graph.add(a=score, b=graph.sub(a=row, b=column), compute_data_type=KINDS.FLOAT)


def per_head(graph, score, tensors):
    row, column = places(graph, score)
    return graph.add(score, graph.mul(graph.sub(column, row), tensors["slopes"]))


def alibi(graph, score, tensors):
    row, column = places(graph, score)
    distance = graph.abs(graph.sub(row, column))
    return graph.sub(a=softcap(graph, score, tensors), b=graph.mul(tensors["slopes"], distance))


def biases(graph, score, tensors):
    return causal(graph, graph.add(graph.add(graph.mul(score, 0.5), tensors["bias"]), tensors["columns"]), tensors)


def documents(graph, score, tensors):
    return hidden(graph, score, graph.cmp_eq(input=tensors["keys"], comparison=tensors["queries"]))


def given(graph, score, tensors):
    return hidden(graph, score, graph.logical_not(tensors["drop"]))


TENSORS = {
    "fill": number(-1e9), "cap": number(0.7), "slopes": torch.rand(1, H, 1, 1), "bias": torch.randn(1, H, S, SK),
    "columns": torch.randn(B, 1, 1, SK), "queries": torch.randint(3, (B, 1, S, 1)),
    "keys": torch.arange(SK).view(1, 1, 1, SK) % 3,
    "drop": torch.rand(B, 1, S, SK) < 0.3}
I, J = torch.arange(S)[:, None].double(), torch.arange(SK).double()
T = {name: x.double() if x.is_floating_point() else x for name, x in TENSORS.items()}


def hide(x, keep):
    return x.masked_fill(~keep, -math.inf)


# callback -> (what it means in fp64, keywords that it becomes)
MODS = {
    causal: (lambda x: hide(x, I >= J), {"causal", "align"}),
    window: (lambda x: hide(x, (I - J <= 2) & (J < I + 2)), {"window", "align"}),
    strictly_before: (lambda x: hide(x, I > J), {"key_ranges"}),
    not_the_last: (lambda x: hide(x, (J < 6.5) & (I < 5)), {"key_ranges"}),
    softcap: (lambda x: 0.7 * torch.tanh(x / 0.7), {"softcap"}),
    uneven_softcap: (lambda x: 2 * torch.tanh(3 * x), {"softcap"}),
    relative: (lambda x: x + I - J, {"bias"}),
    per_head: (lambda x: x + (J - I) * T["slopes"], {"bias"}),
    alibi: (lambda x: 0.7 * torch.tanh(x / 0.7) - T["slopes"] * (I - J).abs(), {"softcap", "alibi_slopes", "align"}),
    biases: (lambda x: hide(0.5 * x + T["bias"] + T["columns"], I >= J), {"bias", "causal", "align"}),
    documents: (lambda x: hide(x, T["queries"] == T["keys"]), {"segment_ids"}),
    given: (lambda x: hide(x, ~T["drop"]), {"drop"}),
}


@pytest.mark.parametrize("unfused", [False, True])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
@pytest.mark.parametrize("mod", MODS, ids=lambda mod: mod.__name__)
def test_agrees_with_what_the_graph_says(mod, qkv_format, unfused, monkeypatch):
    if unfused:
        monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
        monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    torch.manual_seed(0)
    leaves = [torch.randn(B, s, H, D, requires_grad=True) for s in (S, SK, SK)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = (x.transpose(1, 2) for x in wide)
    scores = MODS[mod][0](q @ k.mT * D ** -0.5)
    want = (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)
    module = DotProductAttention(H, D, qkv_format=qkv_format, attn_mask_type="no_mask")
    inputs = leaves if qkv_format == "bshd" else [x.transpose(0, 1).contiguous() for x in leaves]
    out = module(*inputs, score_mod=mod, score_mod_tensors=TENSORS).unflatten(-1, (H, D))
    out = out if qkv_format == "bshd" else out.transpose(0, 1)
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)
    do = torch.randn(out.shape)
    seen = torch.isfinite(scores).any(-1).transpose(1, 2)[..., None]
    out.backward(do)
    torch.where(seen, want, 0).backward(do.double())
    for x, y in zip(leaves, wide):
        torch.testing.assert_close(x.grad.double(), y.grad.nan_to_num(), rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("mod", MODS, ids=lambda mod: mod.__name__)
def test_becomes_keywords_of_its_feature(mod):
    q, k = torch.zeros(B, S, H, D), torch.zeros(B, SK, H, D)
    assert _score_mod.keywords(mod, TENSORS, None, None, q, k, "bshd", 1.0).keys() - {"softmax_scale"} == MODS[mod][1]


def test_one_row_and_column_are_no_numbers():
    """Ids and bool tensors of one element stay tensors; a bias that all scores share cancels."""
    q, k = torch.zeros(1, 1, H, D), torch.zeros(1, 1, H, D)
    one = torch.ones(1, 1, 1, 1)
    tensors = {"queries": one.int(), "keys": one.int(), "drop": one.bool(), "bias": one}
    for mod, names in ((documents, {"segment_ids"}), (given, {"drop"}),
                       (lambda graph, score, tensors: graph.add(tensors["bias"], score), set())):
        keywords = _score_mod.keywords(mod, tensors, None, None, q, k, "bshd", 1.0)
        assert keywords.keys() - {"softmax_scale"} == names


@pytest.mark.parametrize("mod, message", [
    (softcap, "div: by"), (causal, "binary_select: of the score and"),
    (lambda graph, score, tensors: graph.mul(tensors["cap"], score), "mul: of the score and")])
def test_a_capture_reads_no_number_on_the_gpu(mod, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        tensors = {name: torch.empty(1, 1, 1, 1, device="cuda") for name in ("cap", "fill")}
    q, k = torch.zeros(B, S, H, D), torch.zeros(B, SK, H, D)
    with pytest.raises(Refused, match=f"{message} a number on the GPU, which the capture of a CUDA graph cannot read"):
        _score_mod.keywords(mod, tensors, None, None, q, k, "bshd", 1.0)


@pytest.mark.skipif(torch.get_default_device().type != "cuda", reason="captures a CUDA graph")
def test_a_capture_takes_numbers_on_the_cpu():
    q = torch.randn(1, 5, 2, 8)
    module = DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="no_mask")
    call = functools.partial(module, q, q, q, score_mod=softcap, score_mod_tensors={"cap": number(0.7).cpu()})
    expected, graph = call(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    assert torch.equal(out, expected)


class Softcap:
    """TE's own example: the backward callback takes a node of the forward one."""

    def forward(self, graph, score, tensors):
        self.before = graph.div(a=score, b=tensors["cap"])
        return graph.mul(a=graph.tanh(input=self.before), b=tensors["cap"])

    def backward(self, graph, dp, tensors):
        return graph.div(graph.tanh_backward(loss=graph.mul(dp, tensors["cap"]), input=self.before), tensors["cap"])


def causal_backward(graph, dp, tensors):
    row, column = places(graph, dp)
    return graph.binary_select(input0=dp, input1=number(0.0), mask=graph.cmp_ge(row, column))


def test_backward_callbacks_that_agree_are_taken():
    x = torch.randn(1, 5, 2, 8)
    module = DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="no_mask")
    capped = Softcap()
    got = module(x, x, x, score_mod=capped.forward, score_mod_bprop=capped.backward, score_mod_tensors=TENSORS,
                 score_mod_bprop_tensors=TENSORS)
    assert torch.equal(got, module(x, x, x, score_mod=softcap, score_mod_tensors=TENSORS))
    module(x, x, x, score_mod=causal, score_mod_tensors=TENSORS, score_mod_bprop=causal_backward)
    module(x, x, x, score_mod=relative, score_mod_bprop=lambda graph, dp, _: dp)
    for mod, backward in ((capped.forward, lambda graph, dp, _: dp),
                          (lambda graph, x, _: graph.mul(x, 2.0), lambda graph, dp, _: dp),
                          (strictly_before, causal_backward)):
        with pytest.raises(Refused, match="score_mod_bprop: builds another gradient"):
            module(x, x, x, score_mod=mod, score_mod_tensors=TENSORS, score_mod_bprop=backward)


@pytest.mark.parametrize("mod, message", [
    (lambda graph, x, _: graph.exp(x), "score_mod: exp: tessera has no such step"),
    (lambda graph, x, _: graph.gen_index(input=x, axis=1), r"gen_index\(axis=1\)"),
    (lambda graph, x, t: graph.mul(x, t["bias"]), "mul: of the score and a tensor"),
    (lambda graph, x, t: graph.mul(graph.add(x, t["bias"]), 2.0), "mul: of the score, when something was added"),
    (lambda graph, x, _: graph.tanh(graph.tanh(x)), "tanh: of the score, where the scaled score"),
    (lambda graph, x, t: hidden(graph, x, graph.logical_not(graph.cmp_eq(t["queries"], t["keys"]))),
     "logical_not: of more"),
    (lambda graph, x, t: graph.binary_select(x, number(0.0), t["drop"]), "binary_select: of the score and a number"),
    (lambda graph, x, t: graph.sub(t["bias"], x), "sub: of the score from something")])
def test_other_graphs_are_refused_by_their_node(mod, message):
    q, k = torch.randn(B, S, H, D), torch.randn(B, SK, H, D)
    with pytest.raises(Refused, match=message):
        DotProductAttention(H, D, qkv_format="bshd", attn_mask_type="no_mask")(q, k, k, score_mod=mod,
                                                                              score_mod_tensors=TENSORS)


@pytest.mark.parametrize("words, call, message", [
    (dict(attn_mask_type="causal"), {}, "attn_mask_type='causal': must be 'no_mask' beside score_mod"),
    (dict(softcap=1.0), {}, "softcap=1.0: must be 0.0 beside score_mod"),
    (dict(return_max_logit=True), {}, "it beside return_max_logit"),
    ({}, dict(score_mod=None, score_mod_bprop=relative), "score_mod_bprop='function': belongs to score_mod"),
    ({}, dict(score_mod_bprop_tensors=TENSORS), "score_mod_bprop_tensors='dict': belongs to score_mod_bprop"),
    ({}, dict(score_mod_tensors=[1]), "score_mod_tensors=list: must be a dict")])
def test_what_cannot_stand_beside(words, call, message):
    x = torch.randn(1, 5, 2, 8)
    module = DotProductAttention(2, 8, **{"qkv_format": "bshd", "attn_mask_type": "no_mask", **words})
    with pytest.raises((ValueError, Refused), match=message):
        module(x, x, x, **{"score_mod": relative, **call})
