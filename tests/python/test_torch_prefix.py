# SPDX-License-Identifier: Apache-2.0
"""attention_shared_prefix is attention over the joint keys."""

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
    monkeypatch.setattr(_prefix, "_pays", lambda *_: splits)
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
