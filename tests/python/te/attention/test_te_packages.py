# SPDX-License-Identifier: Apache-2.0
"""The public flash-attn packages behind tessera.te's FlashAttention: used when asked for by name."""
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import tessera.torch  # noqa: E402
from dropins import normal  # noqa: E402
from tessera.te.pytorch import DotProductAttention  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import _attention_backends, backends  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention._choice import _packages  # noqa: E402


@pytest.fixture(autouse=True)
def fresh(one_device):
    _attention_backends["backend_selection_requires_update"] = True
    _packages._installed.cache_clear()
    yield
    _attention_backends["backend_selection_requires_update"] = True
    _packages._installed.cache_clear()


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


def _banded(q, k, v, unbounded, *, causal, window_size, **words):
    window = None if window_size == (unbounded, unbounded) else tuple(-1 if x is None else x for x in window_size)
    return tessera.torch.attention(q, k, v, causal=causal, window=window, align="bottom_right", **words)


def flash_attn_3_alike(calls):
    """A module with the functions of flash-attn 3."""
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
        calls.append("flash_attn_interface")
        return _banded(q, k, v, -1, causal=causal, window_size=window_size, softmax_scale=softmax_scale,
                       softcap=softcap)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                               seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None,
                               k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
                               softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                               return_attn_probs=False):
        calls.append("flash_attn_interface")
        return _banded(q, k, v, -1, causal=causal, window_size=window_size, softmax_scale=softmax_scale,
                       layout="thd", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)


def flash_attn_4_alike(calls):
    """A module with the functions of flash-attn 4: None is an unbounded side, and the answer a pair."""
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
                        softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, mask_mod=None):
        assert -1 not in window_size
        calls.append("flash_attn.cute")
        return _banded(q, k, v, None, causal=causal, window_size=window_size, softmax_scale=softmax_scale,
                       softcap=softcap), None

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                               seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False,
                               window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
                               pack_gqa=None, deterministic=False):
        assert -1 not in window_size
        calls.append("flash_attn.cute")
        return _banded(q, k, v, None, causal=causal, window_size=window_size, softmax_scale=softmax_scale,
                       layout="thd", cu_seqlens_q=cu_seqlens_q,
                       cu_seqlens_k=cu_seqlens_k), None
    return SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)


NEWER = {"flash_attn_interface": flash_attn_3_alike, "flash_attn.cute": flash_attn_4_alike}

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
        module.flash_attention = backends.FlashAttention(package=package)
        shape = {"sbhd": lambda n: (n, 2, 2, 8), "thd": lambda n: (n, 2, 8)}[layout]
        q, k = normal(*shape(5)), normal(*shape(sk), seed=0)
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


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("package", NEWER)
def test_newer_packages_by_name(package, layout, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, package, NEWER[package](calls))
    q, k = torch.randn(2, 6, 5, 8).split(3, 1)  # [2, 3, 5, 8], 5 heads
    words = dict(causal=True, window=(2, 0), align="bottom_right", softmax_scale=0.3)
    if layout == "thd":
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        cu = torch.tensor([0, 2, 6], dtype=torch.int32)
        words |= dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4)
    else:
        words |= dict(softcap=5.0)
    theirs = backends.FlashAttention(package=package)(q, k, k, layout=(layout, layout), **words)
    assert calls == [package]
    torch.testing.assert_close(theirs, tessera.torch.attention(q, k, k, layout=layout, **words))


# What TE takes of the packages that are installed.
@pytest.mark.parametrize("capability, installed, more, runs", [
    ((9, 0), _packages.NAMES, {}, "flash_attn_interface"),
    ((9, 0), ("flash_attn", "flash_attn.cute"), {}, "flash_attn.cute"),
    ((9, 0), ("flash_attn",), {}, "dense"),
    ((10, 0), _packages.NAMES, {}, "flash_attn.cute"),
    ((8, 0), _packages.NAMES, {}, "dense"),
    ((7, 5), _packages.NAMES, {}, None),
    ((9, 0), (), {}, None),
    ((9, 0), _packages.NAMES, dict(switch="NVTE_FLASH_ATTN_V3"), "flash_attn.cute"),
    ((9, 0), _packages.NAMES, dict(bias="alibi"), "dense"),  # of the second alone
    ((9, 0), _packages.NAMES, dict(softmax="learnable"), None),
    ((9, 0), _packages.NAMES, dict(head_dim=12), None),
    ((9, 0), _packages.NAMES, dict(dtype=torch.float32), None),
    ((9, 0), _packages.NAMES, dict(order=""), None),
])
def test_te_order_takes_the_package_that_te_would(capability, installed, more, runs, monkeypatch):
    calls = []
    makers = {"flash_attn": flash_attn_alike, **NEWER}
    for name in _packages.NAMES:
        monkeypatch.setitem(sys.modules, name, makers[name](calls) if name in installed else None)
    monkeypatch.setattr(_packages, "_capability", lambda q: capability)
    monkeypatch.setenv("TESSERA_TE_ORDER", more.get("order", "te"))
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    if "switch" in more:
        monkeypatch.setenv(more["switch"], "0")
    d = more.get("head_dim", 8)
    module = DotProductAttention(2, d, attn_mask_type="causal", softmax_type=more.get("softmax", "vanilla"))
    x = torch.randn(5, 2, 2, d, dtype=more.get("dtype", torch.bfloat16))
    alibi = dict(core_attention_bias_type="alibi") if "bias" in more else {}
    for _ in range(2):  # a plan that was kept asks again
        out = module(x, x, x, **alibi)
    assert calls == ([runs] * 2 if runs else [])
    monkeypatch.setenv("TESSERA_TE_ORDER", "")
    torch.testing.assert_close(out, module(x, x, x, **alibi))
    assert len(calls) == (2 if runs else 0)


def test_an_unknown_order_is_an_error(monkeypatch):
    monkeypatch.setenv("TESSERA_TE_ORDER", "flash")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    x = torch.zeros(3, 1, 2, 8)
    with pytest.raises(ValueError, match="TESSERA_TE_ORDER='flash': must be \"te\", or unset"):
        DotProductAttention(2, 8)(x, x, x)


@pytest.mark.parametrize("package, more, message", [
    ("flash_attn.cute", dict(alibi_slopes=torch.ones(2)), "alibi_slopes=Tensor: the package flash_attn.cute"),
    ("flash_attn.cute", dict(sink=torch.zeros(2)), "sink=Tensor"),
    ("flash_attn", dict(sink="off_by_one"), "sink='off_by_one': the package flash_attn cannot"),
    ("flash_attn", dict(causal=True, align="top_left"), "align='top_left'"),
    ("flash_attn", dict(seqlens_k=torch.ones(1)), "seqlens_k=Tensor"),
    ("flash_attn", dict(return_max_logit=True), "return_max_logit=True"),
    ("flash_attn_interface", dict(dropout_p=0.5), "dropout_p=0.5"),
    ("flash_attn_interface", {}, "is not installed"),
    ("flash_attn_5", {}, "must be one of flash_attn, flash_attn_interface, flash_attn.cute")])
def test_what_a_package_lacks_is_refused(package, more, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_alike([]))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    q, k = torch.zeros(1, 3, 2, 8), torch.zeros(1, 4, 2, 8)
    with pytest.raises((tessera.torch.Refused, ValueError), match=message):
        backends.FlashAttention(package=package)(q, k, k, layout=("bshd", "bshd"), **more)


# ---- FusedAttention(package="cudnn") ----

def _module_of_cudnn(**options):
    module = DotProductAttention(2, 8, attn_mask_type="causal", **options)
    module.fused_attention = backends.FusedAttention(package="cudnn")
    return module


@pytest.mark.parametrize("level", ["0", "2"])
def test_cudnn_by_name_is_the_backend_that_is_forced(level, monkeypatch):
    asked = []

    def attention(q, k, v, *, backend=None, **keywords):
        asked.append(backend)
        return tessera.torch.attention(q, k, v, **keywords)
    monkeypatch.setattr(backends, "attention", attention)
    monkeypatch.setattr(backends.fused_logger, "isEnabledFor", lambda _: level == "2")
    q = normal(5, 2, 2, 8)
    module = _module_of_cudnn()
    outs = [module(q, q, q) for _ in range(2)]  # of a plan that was kept, too
    assert asked == ["cudnn"] * 2
    direct = backends.FusedAttention(package="cudnn")(q, q, q, qkv_layout="sbhd_sbhd_sbhd")
    assert asked == ["cudnn"] * 3
    module.fused_attention = backends.FusedAttention()
    for out in (*outs, direct):
        assert torch.equal(out, module(q, q, q))
    assert asked[3:] == [None] * 3


def test_cudnn_by_name_says_why_it_does_not_run():
    q = torch.zeros(5, 2, 2, 8, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(tessera.torch.Refused, match=r'backend="cudnn" is forced(.|\n)*cudnn.*must be a CUDA device'):
        _module_of_cudnn()(q, q, q)


def test_a_package_of_cudnn_s_is_known():
    with pytest.raises(ValueError, match="FusedAttention: package='flash_attn': must be \"cudnn\", or None"):
        backends.FusedAttention(package="flash_attn")
    assert backends.FusedAttention(0.25, package="cudnn").softmax_scale == 0.25


def test_cudnn_by_name_is_refused_in_fp8():
    from tessera.te.common.recipe import DelayedScaling
    from tessera.te.pytorch import autocast

    q = torch.zeros(5, 2, 2, 16, dtype=torch.bfloat16)
    module = DotProductAttention(2, 16)
    module.fused_attention = backends.FusedAttention(package="cudnn")
    with autocast(enabled=True, recipe=DelayedScaling(fp8_dpa=True)), \
            pytest.raises(tessera.torch.Refused, match="package='cudnn': .*FP8 attention of packages"):
        module(q, q, q)


@pytest.mark.parametrize("name, backend", [("fused_attention", backends.FusedAttention(package="cudnn")),
                                           ("flash_attention", backends.FlashAttention(package="flash_attn"))])
def test_a_package_by_name_is_refused_over_ranks(name, backend, monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", str(int(name == "fused_attention")))
    q = torch.zeros(5, 2, 2, 8)
    module = DotProductAttention(2, 8)
    setattr(module, name, backend)
    module._spread = SimpleNamespace(size=2)
    with pytest.raises(tessera.torch.Refused, match=f"package='{backend.package}': .*context parallelism of packages"):
        module(q, q, q)
