# SPDX-License-Identifier: Apache-2.0
"""What a selection of tessera.te asks the library is what then runs: the same tessera_problem, byte for byte."""

import pytest

torch = pytest.importorskip("torch")

from tessera.te.pytorch import DotProductAttention  # noqa: E402
from tessera.te.pytorch import _explained  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention._choice import _plans, _selection  # noqa: E402
from te_oracle import fresh_selection  # noqa: E402,F401

B, S, H, D = 3, 8, 4, 16
CU = torch.tensor([0, 3, 5, 8], dtype=torch.int32)  # packed: 8 tokens
LENGTHS = torch.tensor([0, 8, 11, 16], dtype=torch.int32)
STARTS = torch.tensor([0, 8, 16, 24], dtype=torch.int32)
HIDDEN = torch.zeros(B, 1, 1, S, dtype=torch.bool)
LENT = {"cu_seqlens_q": LENGTHS, "cu_seqlens_kv": LENGTHS}
PACKED = {"qkv_format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU, "max_seqlen_q": 3, "max_seqlen_kv": 3}

# (of the module, of the call); "buffer" is the layout of the one that q, k and v are views of
CALLS = {
    "plain": ({}, {}),
    "causal": ({"attn_mask_type": "causal"}, {}),
    "bottom right": ({"attn_mask_type": "causal_bottom_right"}, {"window_size": (4, 0)}),
    "window": ({"attn_mask_type": "no_mask"}, {"window_size": (2, 3)}),
    "window at the top left": ({"attn_mask_type": "no_mask"}, {"window_size": (2, 3), "bottom_right_diagonal": False}),
    "lengths": ({"attn_mask_type": "padding"}, LENT),
    "causal lengths": ({"attn_mask_type": "padding_causal"}, LENT),
    "lengths of two tensors": ({"attn_mask_type": "padding"}, {**LENT, "cu_seqlens_kv": LENGTHS.clone()}),
    "packed of two tensors": ({**PACKED, "attn_mask_type": "padding"}, {"cu_seqlens_kv": CU.clone()}),
    "a mask": ({"attn_mask_type": "padding"}, {"attention_mask": HIDDEN}),
    "two masks": ({"attn_mask_type": "padding"}, {"attention_mask": (HIDDEN, HIDDEN)}),
    "two masks and a window": ({"attn_mask_type": "padding_causal_bottom_right"},
                               {"attention_mask": (HIDDEN, HIDDEN), "window_size": (3, 0)}),
    "two masks and slopes": ({"attn_mask_type": "padding"},
                             {"attention_mask": (HIDDEN, HIDDEN), "core_attention_bias_type": "alibi"}),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, {"attention_mask": torch.zeros(B, H, S, S, dtype=torch.bool)}),
    "bias": ({}, {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, H, S, S)}),
    "bias of keys": ({}, {"core_attention_bias_type": "pre_scale_bias",
                          "core_attention_bias": torch.zeros(1, 1, 1, S)}),
    "alibi": ({"attn_mask_type": "causal"}, {"core_attention_bias_type": "alibi"}),
    "slopes": ({}, {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(B, H)}),
    "softcap": ({}, {"softcap": 20.0}),
    "sink": ({"softmax_type": "learnable"}, {}),
    "off by one": ({"softmax_type": "off-by-one"}, {}),
    "max_logit": ({"return_max_logit": True}, {}),
    "fewer heads": ({"num_gqa_groups": 2}, {}),
    "packed": ({**PACKED, "attn_mask_type": "padding_causal"}, {}),
    "packed with gaps": ({**PACKED, "attn_mask_type": "padding"},
                         {"cu_seqlens_q_padded": STARTS, "cu_seqlens_kv_padded": STARTS}),
    "bshd": ({"qkv_format": "bshd"}, {}),
    "one buffer": ({"buffer": "sb3hd"}, {}),
}
OF_MODULE = ("attn_mask_type", "softmax_type", "return_max_logit", "num_gqa_groups", "qkv_format")


@pytest.fixture(autouse=True)
def fresh(fresh_selection):  # noqa: F811
    _plans._plans.clear()


def tensors(own, buffer, packed):
    if buffer:
        return torch.randn(S, B, 3, H, D, requires_grad=True).unbind(2)
    shape = (24 if "cu_seqlens_q_padded" in packed else 8,) if own.get("qkv_format") == "thd" else \
        (B, S) if own.get("qkv_format") == "bshd" else (S, B)
    heads = H, *[own.get("num_gqa_groups", H)] * 2
    return [torch.randn(*shape, h, D, requires_grad=True) for h in heads]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_asked_is_what_runs(name, monkeypatch):
    own, given = CALLS[name]
    given = {**{key: x for key, x in own.items() if key not in (*OF_MODULE, "buffer")}, **given}
    module = DotProductAttention(H, D, attention_dropout=0.0,
                                 **{key: own[key] for key in OF_MODULE if key in own})
    asked, ran, keep = [], [], _plans.keep
    monkeypatch.setattr(_selection, "_explained", lambda question, _: (asked.append(question), ())[1])
    monkeypatch.setattr(_plans, "keep", lambda key, keywords: (ran.append(keywords), keep(key, keywords)))
    q, k, v = tensors(own, own.get("buffer"), given)
    module(q, k, v, **given)
    forward, backward = asked
    keywords = {key: x for key, x in ran[0].items() if x is not None}
    assert forward.given.keys() == keywords.keys() | {"q", "k", "v"}
    expected = _explained.Question(False, {"q": q, "k": k, "v": v, **keywords}).described()
    said = forward.described()
    assert said.call == expected.call
    assert bytes(said.arguments.problem) == bytes(expected.arguments.problem)
    assert backward.described().call.values.items() >= said.call.values.items()


def test_a_cache_is_asked_for_with_its_pages(monkeypatch):
    from tessera.te.pytorch import InferenceParams

    asked = []
    monkeypatch.setattr(_selection, "_explained", lambda question, _: (asked.append(question), ())[1])
    cache = InferenceParams(2, 16, 2, 8, is_paged=True, page_size=4)
    _selection.select(_selection.AttentionParams(
        device="cpu", batch_size=2, qkv_layout="paged_kv_thd_bshd_bshd", attn_mask_type="padding_causal",
        max_seqlen_q=4, max_seqlen_kv=16, is_training=False, inference_params=cache))
    question, = asked
    assert question.given["page_table"].shape == (2, 4) and question.given["k"].shape == (8, 4, 16, 64)
    assert question.described().call.is_paged


def test_words_that_make_no_call_are_a_reason():
    """What the call itself would raise."""
    chosen = _selection.select(_selection.AttentionParams(device="cpu", pad_between_seqs=True))
    assert any("needs packed sequences" in reason for reason in chosen.reasons["FusedAttention"])
