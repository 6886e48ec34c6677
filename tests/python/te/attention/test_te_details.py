# SPDX-License-Identifier: Apache-2.0
"""TE's smaller promises: fields of AttentionParams, versions, tracing, gradients of off-by-one."""

import math

import pytest

torch = pytest.importorskip("torch")

from tessera.te.common import recipe  # noqa: E402
from tessera.te.pytorch import DotProductAttention, quantization  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import _attention_backends, _unfused, backends, utils  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention._choice import _selection  # noqa: E402
from tessera.te.pytorch.cpp_extensions import fused_attn as fused  # noqa: E402
from te_oracle import HEADS, Problem, fresh_selection  # noqa: E402,F401

pytestmark = pytest.mark.usefixtures("fresh_selection")


@pytest.mark.parametrize("given, reason", [
    (dict(has_score_mod=True, has_score_mod_bprop=True), None), (dict(has_score_mod_bprop=True), "without score_mod"),
    (dict(fp8_output=True), "FP8"), (dict(cp_size=2, context_parallel=True), None),
    (dict(cp_size=1, checkpoint_core_attention=True), None)], ids=str)
def test_what_a_selection_is_told(given, reason):
    chosen = _selection.select(utils.AttentionParams(device="cpu", **given))
    assert chosen.selected == (None if reason else "FusedAttention")
    for name in _selection.NAMES if reason else ():
        assert reason in chosen.reasons[name][0]


def test_the_module_tells_a_selection_of_checkpointing():
    q = torch.randn(3, 1, 2, 8)
    for checkpointing in (True, False):
        DotProductAttention(2, 8)(q, q, q, checkpoint_core_attention=checkpointing)
        params = _attention_backends["attention_params"]
        assert params.checkpoint_core_attention == checkpointing


def test_versions_of_flash_attention():
    flash = utils.FlashAttentionUtils
    assert flash.is_version_supported() and flash.is_version_supported(str(flash.version))
    assert not flash.is_version_supported("0.0.1") and not flash.is_version_supported("999")
    assert utils._get_supported_versions("2.1.1", "2.8") == ">= 2.1.1, <= 2.8"
    assert flash._get_supported_versions("1", "2") == ">= 1, <= 2"
    assert flash.is_version_supported("2.8.3", "2.1.1") and not flash.is_version_supported("2.1.0", "2.1.1")
    assert flash.is_version_supported("2.7", minimum_version="2.7.0")
    with pytest.raises(ValueError, match="minimum_version='two'"):
        flash.is_version_supported("2", "two")
    with pytest.raises(ValueError, match="version='two'"):
        flash.is_version_supported("two")


@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("switch", [None, "NVTE_FUSED_ATTN"])
def test_a_selection_is_traced(switch, made_inside, monkeypatch):
    if switch:
        monkeypatch.setenv(switch, "0")
    torch._dynamo.reset()
    given = dict(qkv_dtype=torch.float32, qkv_layout="bshd_bshd_bshd", device="cpu",
                 attn_mask_type="causal", window_size=(4, 0), max_seqlen_q=32)
    outside = utils.AttentionParams(**given)

    def ask(x):
        params = utils.AttentionParams(**given) if made_inside else outside
        flash, _, use_fused, sub, unfused, available = utils.get_attention_backend(params)
        if use_fused:
            x = x + int(sub)
        return x + 2 * flash + 4 * unfused + 8 * sum(available)

    x = torch.zeros(3)
    assert torch.equal(torch.compile(ask, fullgraph=True, backend="eager")(x), ask(x))
    assert utils.get_attention_backend(outside)[2] == (switch is None)


def test_a_compiled_selection_follows_the_switches(monkeypatch):
    """One compiled function, whose answer is eager's whenever it is called."""
    torch._dynamo.reset()
    params = utils.AttentionParams(qkv_dtype=torch.float32, qkv_layout="bshd_bshd_bshd", device="cpu")

    def ask(x):
        flash, _, use_fused, _, unfused, available = utils.get_attention_backend(params)
        return x + use_fused + 2 * flash + 4 * unfused + 8 * sum(available)

    compiled, x, answers = torch.compile(ask, fullgraph=True, backend="eager"), torch.zeros(1), set()
    for off in ((), ("NVTE_FUSED_ATTN",), ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN"), ("NVTE_FLASH_ATTN_V2",), ()):
        with monkeypatch.context() as environment:
            for name in off:
                environment.setenv(name, "0")
            answers.add(ask(x).item())
            assert torch.equal(compiled(x), ask(x))
    assert len(answers) == 3


def test_a_compiled_module_follows_the_switches(monkeypatch):
    torch._dynamo.reset()
    module = DotProductAttention(2, 8, qkv_format="bshd")
    compiled, q = torch.compile(module, fullgraph=True, backend="eager"), torch.randn(1, 3, 2, 8)
    expected = compiled(q, q, q)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(_unfused, "attention", lambda q, k, v, **_: 2 * v)
    assert torch.equal(compiled(q, q, q), 2 * q.flatten(-2)) and expected.shape == (1, 3, 16)


def test_names_where_te_has_them():
    manager = quantization.FP8GlobalStateManager
    for kind in ("mxfp8", "fp8_block_scaling", "nvfp4"):
        available, reason = getattr(manager, f"is_{kind}_available")()
        assert available is False and reason
    assert backends.UnfusedDotProductAttention()._alibi_cache is utils._alibi_cache


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_tensors_are_answered_for_as_bf16(dtype, fp8):
    given = dict(qkv_layout="bshd_bshd_bshd", device="cpu", fp8=fp8, attn_mask_type="causal",
                 fp8_meta={"recipe": recipe.DelayedScaling(fp8_dpa=True)} if fp8 else None)
    answer = utils.get_attention_backend(utils.AttentionParams(qkv_dtype=dtype, **given))
    assert answer == utils.get_attention_backend(utils.AttentionParams(qkv_dtype=torch.bfloat16, **given))
    assert answer[2]


@pytest.mark.parametrize("given", ["MXFP8BlockScaling", "NVFP4BlockScaling"])
def test_no_backend_for_recipes_without_attention(given, caplog):
    asked = getattr(recipe, given)()
    asked.fp8_dpa = True
    params = utils.AttentionParams(qkv_layout="bshd_bshd_bshd", device="cpu", fp8=True, fp8_meta={"recipe": asked})
    flash, _, fused, sub_backend, unfused, available = utils.get_attention_backend(params)
    assert not (flash or fused or unfused or any(available)) and sub_backend is None
    for reasons in _selection.select(params).reasons.values():
        assert any(given in reason for reason in reasons)


@pytest.mark.parametrize("off", [(), ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN")], ids=["fused", "unfused"])
@pytest.mark.parametrize("wanted", [True, False])
def test_off_by_one_has_a_gradient_when_asked_for(wanted, off, monkeypatch):
    for name in off:
        monkeypatch.setenv(name, "0")
    p = Problem("causal", softmax="learnable")
    p.offset.zero_()
    module = DotProductAttention(HEADS, p.dqk, qkv_format="bshd", softmax_type="off-by-one")
    module.softmax_offset.requires_grad = wanted
    q = p.q.clone().requires_grad_()
    out = module(q, p.k, p.v)
    (out.unflatten(-1, (HEADS, p.dv)) * p.do).sum().backward()
    expected = p.expected()
    torch.testing.assert_close(q.grad.double(), expected["dq"], rtol=2e-5, atol=2e-5)
    if not wanted:
        assert module.softmax_offset.grad is None
        return
    assert not dict(module.named_parameters())
    torch.testing.assert_close(module.softmax_offset.grad.double(), expected["doffset"],
                               rtol=2e-5, atol=2e-5)


def test_fused_attn_bwd_of_off_by_one():
    p = Problem("causal", softmax="off-by-one")
    p.offset.zero_()
    offset = p.offset.view(1, HEADS, 1, 1)
    options = dict(attn_scale=1 / math.sqrt(p.dqk), qkv_layout="bshd_bshd_bshd", o_format="bshd",
                   attn_mask_type="causal", softmax_type="off-by-one")
    lengths = p.sq, p.sk, None, None
    out, aux = fused.fused_attn_fwd(True, *lengths, p.q, p.k, p.v, p.q.dtype, 1,
                                    softmax_offset=offset, **options)
    assert aux[2] is offset
    *_, doffset = fused.fused_attn_bwd(*lengths, p.q, p.k, p.v, out, p.do, p.q.dtype, aux, 1,
                                       do_format="bshd", dqkv_layout="bshd_bshd_bshd", **options)
    p.softmax = "learnable"
    expected = p.expected()
    torch.testing.assert_close(out.double(), expected["out"], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(doffset.flatten().double(), expected["doffset"], rtol=2e-5,
                               atol=2e-5)
    out, aux = fused.fused_attn_fwd(True, *lengths, p.q, p.k, p.v, p.q.dtype, 1, **options)
    assert len(aux) == 2
    torch.testing.assert_close(out.double(), expected["out"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("off", [(), ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN")], ids=["fused", "unfused"])
@pytest.mark.parametrize("tokens_q, tokens_k", [(0, 0), (0, 3), (3, 0)])
def test_packed_sequences_without_tokens(tokens_q, tokens_k, off, monkeypatch):
    """No pair of tokens: the output and every gradient are zero, and no logit is the largest."""
    for name in off:
        monkeypatch.setenv(name, "0")
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding_causal", return_max_logit=True,
                                 softmax_type="learnable")
    q, k, v = (torch.randn(tokens, 2, 8, requires_grad=True) for tokens in (tokens_q, tokens_k, tokens_k))
    lengths = [torch.tensor([0, tokens], dtype=torch.int32) for tokens in (tokens_q, tokens_k)]
    for longest in ({}, {"max_seqlen_q": 5, "max_seqlen_kv": 5}):
        out, max_logit = module(q, k, v, cu_seqlens_q=lengths[0], cu_seqlens_kv=lengths[1], **longest)
        assert torch.equal(out, torch.zeros(tokens_q, 16)) and (max_logit == -math.inf).all()
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert not gradient.any()
