# SPDX-License-Identifier: Apache-2.0
"""The public flash-attn packages behind tessera.te's FlashAttention: used when asked for by name."""
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import tessera.torch  # noqa: E402
from tessera.te.pytorch import DotProductAttention  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import (  # noqa: E402
    _attention_backends, backends)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # as on a machine without
    _attention_backends["backend_selection_requires_update"] = True
    yield
    _attention_backends["backend_selection_requires_update"] = True


def flash_attn_alike(calls):
    """A module with the functions of flash-attn 2, which aligns causal to the bottom right."""
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
                        window_size=(-1, -1), alibi_slopes=None, deterministic=False):
        calls.append("dense")
        return tessera.torch.attention(q, k, v, softmax_scale=softmax_scale, causal=causal,
                                       align="bottom_right", alibi_slopes=alibi_slopes,
                                       window=None if window_size == (-1, -1) else window_size)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               softmax_scale=None, causal=False, deterministic=False):
        calls.append("packed")
        return tessera.torch.attention(q, k, v, layout="thd", softmax_scale=softmax_scale,
                                       causal=causal, align="bottom_right",
                                       cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return SimpleNamespace(flash_attn_func=flash_attn_func,
                           flash_attn_varlen_func=flash_attn_varlen_func)


PACKAGED = {
    "causal": dict(mask="causal"), "window": dict(window=(2, 0), mask="causal"),
    "alibi": dict(given=dict(core_attention_bias_type="alibi"), mask="causal_bottom_right"),
    "cross": dict(sk=9, mask="causal_bottom_right"), "thd": dict(layout="thd", mask="padding"),
}


@pytest.mark.parametrize("case", PACKAGED)
def test_a_public_package_by_name(case, monkeypatch):
    def run(package, *, mask, layout="sbhd", sk=5, window=None, given=None):
        module = DotProductAttention(2, 8, qkv_format=layout, attn_mask_type=mask,
                                     window_size=window, attention_type="cross")
        module.flash_attention = backends.FlashAttention(package)
        shape = {"sbhd": lambda n: (n, 2, 2, 8), "thd": lambda n: (n, 2, 8)}[layout]
        g = torch.Generator().manual_seed(0)
        q, k = torch.randn(shape(5), generator=g), torch.randn(shape(sk), generator=g)
        cu = torch.tensor([0, 2, 5], dtype=torch.int32)
        lengths = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=3, max_seqlen_kv=3)
        return module(q, k, k, **(lengths if layout == "thd" else {}), **(given or {}))
    calls = []
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_alike(calls))
    ours = run(None, **PACKAGED[case])
    assert not calls
    theirs = run("flash_attn", **PACKAGED[case])
    assert calls == ["packed" if case == "thd" else "dense"]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("package, more, message", [
    ("flash_attn", dict(sink="off_by_one"), "sink='off_by_one': the package flash_attn cannot"),
    ("flash_attn", dict(causal=True, align="top_left"), "align='top_left'"),
    ("flash_attn", dict(seqlens_k=torch.ones(1)), "seqlens_k=Tensor"),
    ("flash_attn", dict(return_max_logit=True), "return_max_logit=True"),
    ("flash_attn_interface", dict(dropout_p=0.5), "dropout_p=0.5"),
    ("flash_attn_interface", {}, "is not installed"),
    ("flash_attn_5", {}, "must be one of flash_attn, flash_attn_interface")])
def test_what_a_package_lacks_is_refused(package, more, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_alike([]))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    q, k = torch.zeros(1, 3, 2, 8), torch.zeros(1, 4, 2, 8)
    with pytest.raises((tessera.torch.Refused, ValueError), match=message):
        backends.FlashAttention(package)(q, k, k, layout=("bshd", "bshd"), **more)
