# SPDX-License-Identifier: Apache-2.0
"""attention_shared_prefix is attention over the joint keys."""

import re

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
from tessera.torch import _prefix  # noqa: E402


def problem(b=3, sq=2, sp=24, sk=16, hq=4, hk=2, d=16):
    torch.manual_seed(0)
    q = torch.randn(b, sq, hq, d)
    prefix = torch.randn(2, 1, sp, hk, d)
    own = torch.randn(2, b, sk, hk, d)
    return q, prefix, own


@pytest.mark.parametrize("keywords", [
    {}, {"causal": True}, {"softcap": 2.0, "softmax_scale": 0.3}, {"sink": torch.tensor([0.5, -1, 2, 0])},
    {"seqlens_k": torch.tensor([16, 3, 9])}, {"causal": True, "seqlens_k": torch.tensor([2, 16, 7])}])
def test_is_attention_over_joint_keys(keywords):
    q, prefix, own = given = [x.requires_grad_() for x in problem()]
    joint = torch.cat((prefix.expand(-1, 3, -1, -1, -1), own), 2)
    lengths = {"seqlens_k": keywords["seqlens_k"] + 24} if "seqlens_k" in keywords else {}
    whole, whole_lse = tt.attention(q, *joint, return_lse=True, align="bottom_right",
                                    **{**keywords, **lengths})
    expected = torch.autograd.grad(whole.square().sum(), given)
    o, lse = tt.attention_shared_prefix(q, *prefix, *own, return_lse=True, **keywords)
    torch.testing.assert_close(o, whole, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=2e-6)
    got = torch.autograd.grad(o.square().sum(), given)
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_padding_rows_are_zero():
    q, prefix, own = problem()
    lengths = torch.tensor([2, 1, 0])
    o, lse = tt.attention_shared_prefix(q, *prefix, *own, seqlens_q=lengths, return_lse=True)
    for n, count in enumerate(lengths):
        assert not o[n, count:].any() and (lse[n, :, count:] == -torch.inf).all()
        assert bool(o[n, :count].all())


@pytest.mark.parametrize("splits", [False, True])
def test_pages(splits, monkeypatch):
    monkeypatch.setattr(_prefix._Gain, "pays", splits)
    q, prefix, own = problem()
    pool = torch.full((2, 12, 8, 2, 16), torch.nan)
    prefix_table = torch.tensor([[4, 11, 0]], dtype=torch.int32)
    table = torch.tensor([[1, 2], [3, 5], [6, 7]], dtype=torch.int32)
    pool[:, prefix_table[0].long()] = prefix[:, 0].unflatten(1, (3, 8))
    pool[:, table.long()] = own.unflatten(2, (2, 8))
    lengths = torch.tensor([16, 3, 9])
    expected = tt.attention_shared_prefix(q, *prefix, *own, seqlens_k=lengths, causal=True)
    o = tt.attention_shared_prefix(q, None, None, *pool, prefix_table=prefix_table, page_table=table,
                                   seqlens_k=lengths, causal=True)
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=2e-6)


def test_what_leans_on_positions_is_refused():
    q, prefix, own = problem()
    for name, value in (("window", (4, 0)), ("alibi_slopes", torch.ones(4)), ("dropout_p", 0.1),
                        ("bias", torch.ones(16))):
        with pytest.raises(tessera.Refused, match=f"attention_shared_prefix: {name}="):
            tt.attention_shared_prefix(q, *prefix, *own, **{name: value})
    with pytest.raises(TypeError, match="colour"):
        tt.attention_shared_prefix(q, *prefix, *own, colour=1)
    with pytest.raises(ValueError, match="align='top_left'"):
        tt.attention_shared_prefix(q, *prefix, *own, causal=True, align="top_left")
    with pytest.raises(ValueError, match="page_table=None"):
        tt.attention_shared_prefix(q, None, None, *own, prefix_table=torch.zeros(1, 1, dtype=torch.int32))


def pages(b, sp):
    """The arguments of a decode step of b sequences over sp pages of a prefix; shapes, no memory."""
    q = torch.empty(b, 1, 8, 64, device="meta", dtype=torch.bfloat16)
    k, v = (torch.empty(1, 16, 2, 64, device="meta", dtype=torch.bfloat16).expand(4096, -1, -1, -1) for _ in "kv")
    return (q, None, None, k, v), {
        "prefix_table": torch.zeros(1, sp, dtype=torch.int32, device="meta"), "causal": True,
        "page_table": torch.zeros(b, 4, dtype=torch.int32, device="meta"),
        "seqlens_k": torch.full((b,), 40, dtype=torch.int32, device="meta")}


@pytest.mark.parametrize("b, sp, parts, why", [
    (64, 128, True, r"takes 16.5 us at 4 TB/s, more than 10, and 256 rows share a key head, more than 16"),
    (64, 2, False, r"takes 0.258 us at 4 TB/s, no more than 10, and 256 rows"),
    (4, 4096, False, r"takes 25.2 us .* and 16 rows share a key head, no more than 16")])
def test_explained(b, sp, parts, why, monkeypatch):
    given, keywords = pages(b, sp)
    said = tt.explain_shared_prefix(*given, **keywords, device="cpu")
    assert said.parts == parts and re.search(why, said.why)
    assert list(said.calls) == (["prefix", "own keys"] if parts else ["joint keys"])
    assert all(each.backend for each in said.calls.values())
    first = next(iter(said.calls.values())).headline
    assert str(said).startswith("in two parts: " if parts else "in one call: ") and first in str(said)
    calls = []  # what attention_shared_prefix does is what was said

    def attention(q, k, v, **more):
        calls.append(q.shape[0])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        return (torch.empty_like(q), lse) if more.get("return_lse") else torch.empty_like(q)
    monkeypatch.setattr(_prefix, "attention", attention)
    monkeypatch.setattr(_prefix, "merge", lambda parts: parts[0])
    tt.attention_shared_prefix(*given, **keywords)
    assert calls == ([1, b] if parts else [b])


def test_explained_without_pages():
    q, prefix, own = problem()
    said = tt.explain_shared_prefix(q, *prefix, *own, causal=True)
    assert said.parts and "tensors of its own" in said.why and said.calls["prefix"].backend == "cpu"
    with pytest.raises(tessera.Refused, match="window="):
        tt.explain_shared_prefix(q, *prefix, *own, window=(4, 0))
    with pytest.raises(ValueError, match="page_table=None"):
        tt.explain_shared_prefix(q, None, None, *own, prefix_table=torch.zeros(1, 1, dtype=torch.int32))
