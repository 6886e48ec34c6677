# SPDX-License-Identifier: Apache-2.0
"""Calls of tessera.te's module that look alike are decided about once, and never wrongly."""

import functools
import os
import sys

import pytest

torch = pytest.importorskip("torch")

import tessera.torch  # noqa: E402
from tessera.te.pytorch import DotProductAttention  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import _attention_backends, utils  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention._choice import _plans  # noqa: E402
from te_oracle import fresh_selection  # noqa: E402,F401


@pytest.fixture(autouse=True)
def fresh(fresh_selection):  # noqa: F811
    _plans._plans.clear()


def counted(monkeypatch):
    """What get_attention_backend was asked, so far."""
    asked, select = [], utils.get_attention_backend
    monkeypatch.setattr(utils, "get_attention_backend", lambda p: (asked.append(p), select(p))[1])
    return asked


def test_a_second_call_is_not_checked_again(monkeypatch):
    module, q = DotProductAttention(2, 8), torch.randn(3, 1, 2, 8)
    expected = module(q, q, q)
    monkeypatch.setattr(DotProductAttention, "_params", lambda *_: pytest.fail("checked again"))
    assert torch.equal(module(q, q, q), expected)
    assert torch.equal(DotProductAttention(2, 8)(q, q, q), expected)


def test_shapes_by_turns_are_selected_once(monkeypatch):
    asked = counted(monkeypatch)
    module, short, long = DotProductAttention(2, 8), torch.randn(3, 1, 2, 8), torch.randn(5, 1, 2, 8)
    for _ in range(4):
        module(short, short, short)
        assert _attention_backends["attention_params"].max_seqlen_q == 3
        module(long, long, long)
        assert _attention_backends["attention_params"].max_seqlen_q == 5
    assert [params.max_seqlen_q for params in asked] == [3, 5]


def test_shapes_by_turns_read_the_switches(monkeypatch):
    module, short, long = DotProductAttention(2, 8), torch.randn(3, 1, 2, 8), torch.randn(5, 1, 2, 8)
    module(short, short, short)
    module(long, long, long)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    module(long, long, long)
    assert _attention_backends["use_fused_attention"]  # the last selection stands
    module(short, short, short)
    assert _attention_backends["use_flash_attention"]
    monkeypatch.delenv("NVTE_FUSED_ATTN")
    module(long, long, long)
    assert _attention_backends["use_fused_attention"]


def test_selections_are_logged_each_time(monkeypatch, caplog):
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "1")
    module, short, long = DotProductAttention(2, 8), torch.randn(3, 1, 2, 8), torch.randn(5, 1, 2, 8)
    for _ in range(2):
        module(short, short, short)
        module(long, long, long)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["Running with FusedAttention backend (sub-backend 1)"] * 4


def plain(q, k, v, **keywords):
    keywords = {"causal": True, "align": "top_left", "layout": "bshd", **keywords}
    return tessera.torch.attention(q, k, v, **keywords).flatten(-2)


CHANGES = {
    "softmax_scale": (0.5, dict(softmax_scale=0.5)),
    "window_size": ((1, 0), dict(window=(1, 0))),
    "attn_mask_type": ("causal_bottom_right", dict(align="bottom_right")),
    "softmax_type": ("off-by-one", dict(sink="off_by_one")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_s_settings_may_change(name):
    value, keywords = CHANGES[name]
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 5, 2, 8)
    module = DotProductAttention(2, 8, qkv_format="bshd")
    torch.testing.assert_close(module(q, k, k), plain(q, k, k))
    setattr(module, name, value)
    torch.testing.assert_close(module(q, k, k), plain(q, k, k, **keywords))


def test_dropout_is_drawn_for_each_call():
    q = torch.randn(1, 8, 2, 8)
    module = DotProductAttention(2, 8, qkv_format="bshd", attention_dropout=0.5)
    a, b = module(q, q, q), module(q, q, q)
    assert not torch.equal(a, b)
    torch.testing.assert_close(module.eval()(q, q, q), plain(q, q, q))
    assert not torch.equal(module.train()(q, q, q), module(q, q, q))


def test_values_of_tensors_count():
    q, cu = torch.randn(9, 2, 8), [torch.tensor([0, n, 9], dtype=torch.int32) for n in (2, 6)]
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding_causal",
                                 softmax_type="learnable")
    for _ in range(2):
        for lengths in cu:
            module.softmax_offset.data.normal_()
            got = module(q, q, q, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=7,
                         max_seqlen_kv=7)
            torch.testing.assert_close(got, plain(
                q, q, q, layout="thd", cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=7,
                max_seqlen_k=7, sink=module.softmax_offset))
    slopes = [torch.tensor([0.5, 0.25]), torch.tensor([0.125, 0.75])]
    module, q = DotProductAttention(2, 8, qkv_format="bshd"), torch.randn(1, 5, 2, 8)
    for x in (*slopes, *slopes):
        torch.testing.assert_close(
            module(q, q, q, core_attention_bias_type="alibi", alibi_slopes=x),
            plain(q, q, q, alibi_slopes=x))


def test_a_tensor_s_maximum_is_read_each_time():
    q, module = torch.randn(9, 2, 8), DotProductAttention(2, 8, qkv_format="thd")
    cu, longest = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor(5)
    for value in (5, 9):
        longest.fill_(value)
        module(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest,
               max_seqlen_kv=longest)
        assert _attention_backends["attention_params"].max_seqlen_q == value


@pytest.mark.parametrize("other, message", [
    (lambda q: q.half(), "key_layer.dtype=torch.float16"),
    (lambda q: q[:, :, :1], "value_layer.shape=.*must be key_layer"),
    (lambda q: q.mT.contiguous().mT, "key_layer.stride"),
    (lambda q: q[0], "key_layer.shape"), (lambda q: q.to("meta"), "key_layer.device"),
    (lambda q: None, "key_layer='NoneType'")])
def test_what_differs_is_checked(other, message):
    q = torch.randn(1, 5, 2, 8)
    module = DotProductAttention(2, 8, qkv_format="bshd")
    for _ in range(2):
        module(q, q, q)
        with pytest.raises(ValueError, match=message):
            module(q, other(q), q)


def test_hooks_and_replacements_of_a_backend_run(monkeypatch):
    q, seen = torch.randn(3, 1, 2, 8), []
    module = DotProductAttention(2, 8)
    expected = module(q, q, q)
    handle = module.fused_attention.register_forward_hook(lambda *_: seen.append("hook"))
    assert torch.equal(module(q, q, q), expected) and seen == ["hook"]
    handle.remove()

    class Other(torch.nn.Module):
        def forward(self, q, k, v, **keywords):
            seen.append("other")
            return q
    module.fused_attention = Other()
    assert torch.equal(module(q, q, q), q.flatten(-2)) and seen == ["hook", "other"]


def test_autocast_and_gradients_of_a_second_call():
    q = torch.randn(1, 3, 2, 8)
    module = DotProductAttention(2, 8, qkv_format="bshd")
    module(q, q, q)
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        assert module(q, q, q).dtype == torch.bfloat16
    leaf = q.clone().requires_grad_()
    got, = torch.autograd.grad(module(leaf, leaf, leaf).sum(), leaf)
    expected, = torch.autograd.grad(plain(leaf, leaf, leaf).sum(), leaf)
    torch.testing.assert_close(got, expected)
    got = torch.func.vmap(lambda x: module(x, x, x))(torch.stack((q, 2 * q)))
    torch.testing.assert_close(got[1], module(2 * q, 2 * q, 2 * q))


def test_max_logit_of_a_second_call():
    q = torch.randn(1, 3, 2, 8)
    module = DotProductAttention(2, 8, qkv_format="bshd", return_max_logit=True)
    for a, b in zip(module(q, q, q), module(q, q, q)):
        assert torch.equal(a, b)


def test_plans_are_bounded_and_need_a_comparable_key(monkeypatch):
    monkeypatch.setattr(_plans, "_MOST", 3)
    module = DotProductAttention(2, 8, qkv_format="bshd")
    for n in range(1, 9):
        q = torch.randn(1, n, 2, 8)
        module(q, q, q)
        assert len(_plans._plans) <= 3
    for _ in range(2):
        torch.testing.assert_close(module(q, q, q, window_size=[2, 0]), plain(q, q, q, window=(2, 0)))


@pytest.mark.parametrize("wrong", [(2.0, 0), (2, False)])
def test_a_window_is_known_with_its_types(wrong):
    module, q = DotProductAttention(2, 8, qkv_format="bshd"), torch.randn(1, 5, 2, 8)
    for _ in range(2):
        module(q, q, q, window_size=(2, 0))
        with pytest.raises(ValueError, match="window_size=.*: must be a pair"):
            module(q, q, q, window_size=wrong)


def test_the_module_costs_little_beside_tessera_torch(request):
    """Counted in calls of Python and C functions, which a busy machine does not change. A default device would be in
    the way of each of PyTorch's."""
    q = torch.randn(1, 16, 1, 16)
    if "TESSERA_TEST_DEVICE" in os.environ:
        request.addfinalizer(functools.partial(torch.set_default_device, os.environ["TESSERA_TEST_DEVICE"]))
        torch.set_default_device(None)
    module = DotProductAttention(1, 16, qkv_format="bshd")

    def calls(function):
        function(), function()
        events = []
        sys.setprofile(lambda frame, event, arg: events.append(event))
        function()
        sys.setprofile(None)
        return events.count("call") + events.count("c_call")

    assert calls(lambda: module(q, q, q)) < calls(lambda: plain(q, q, q)) + 30
