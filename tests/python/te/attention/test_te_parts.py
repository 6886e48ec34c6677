# SPDX-License-Identifier: Apache-2.0
"""Around tessera.te.pytorch.DotProductAttention: selection, utilities, cpp_extensions, names."""

import ctypes
import importlib
import logging
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import tessera.torch  # noqa: E402
from tessera.te.pytorch import DotProductAttention, InferenceParams, constants  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import _attention_backends, backends, utils  # noqa: E402
from tessera.te.pytorch import _explained  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention._choice import _questions, _selection  # noqa: E402
from tessera.te.pytorch.cpp_extensions import fused_attn as fused  # noqa: E402
from te_oracle import HEADS, Problem, fwd_args  # noqa: E402

VERSIONS = dict.fromkeys(("NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4"), "0")
SWITCHES = (*VERSIONS, "NVTE_UnfusedDPA_Emulate_FP8", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN",
            "NVTE_FUSED_ATTN_BACKEND", "NVTE_DEBUG", "NVTE_DEBUG_LEVEL")
FLASH, FUSED, UNFUSED = _selection.NAMES
FP8 = fused.FusedAttnBackend.FP8


@pytest.fixture(autouse=True)
def fresh(monkeypatch, one_device):
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    _attention_backends["backend_selection_requires_update"] = True


# ---- selection ----

# (parameters, switches, whether tessera's kernels fit) -> the backend, and reasons that are given
RULES = {
    "hopper prefers fused": (dict(device="sm90"), {}, True, FUSED, {}),
    "the cpu chooses as hopper": (dict(device="cpu"), {}, True, FUSED, {}),
    "ampere prefers flash": (dict(device="sm80"), {}, True, FLASH, {}),
    "ampere without flash": (dict(device="sm80"), dict(NVTE_FLASH_ATTN="0"), True, FUSED,
                             {FLASH: "NVTE_FLASH_ATTN=0"}),
    "hopper without fused": (dict(device="sm90"), dict(NVTE_FUSED_ATTN="0"), True, FLASH,
                             {FUSED: "NVTE_FUSED_ATTN=0"}),
    "turing": (dict(device="sm75"), {}, True, UNFUSED,
               {FLASH: "compute capability < sm80", FUSED: "compute capability < sm80"}),
    "kernels do not fit": (dict(device="sm90"), {}, False, UNFUSED, {FLASH: "why", FUSED: "why"}),
    "nothing fits": (dict(device="sm90"), dict(NVTE_UNFUSED_ATTN="0"), False, None,
                     {UNFUSED: "NVTE_UNFUSED_ATTN=0", FUSED: "why"}),
    "no version of flash": (dict(device="sm80"), VERSIONS, True, FUSED,
                            {FLASH: "NVTE_FLASH_ATTN_V3=0"}),
    "one version of flash": (dict(device="sm80"), {**VERSIONS, "NVTE_FLASH_ATTN_V3": "1"}, True,
                             FLASH, {}),
    "fp8": (dict(fp8=True), {}, True, FUSED, {name: "FP8 attention" for name in (FLASH, UNFUSED)}),
    "fp8 by emulation": (dict(fp8=True), dict(NVTE_FUSED_ATTN="0", NVTE_UnfusedDPA_Emulate_FP8="1"), True,
                         UNFUSED, {FUSED: "NVTE_FUSED_ATTN=0"}),
    "fp8 of fp32": (dict(fp8=True, qkv_dtype=torch.float32), {}, True, None, {FUSED: "float32: FP8 attention"}),
    "fp8 of a ring": (dict(fp8=True, context_parallel=True), {}, True, None,
                      {FUSED: "with context parallelism"}),
    "fp8 outside": (dict(fp8_output=True), {}, True, None, {FUSED: "fp8_output=True outside"}),
    "fp8 elsewhere": (dict(fp8=True, fp8_meta={"recipe": SimpleNamespace(fp8_dpa=False)}), {}, True,
                      FUSED, {}),
    "ring": (dict(context_parallel=True), {}, True, FUSED, {UNFUSED: "context parallelism"}),
    "cache": (dict(inference_params=InferenceParams(2, 16, 2, 8, is_paged=True, page_size=4),
                   qkv_layout="paged_kv_thd_bshd_bshd", attn_mask_type="padding_causal"), {}, True,
              FUSED, {}),
    "integers": (dict(qkv_dtype=torch.int8), {}, True, None,
                 {UNFUSED: "torch.int8", FUSED: "torch.int8"}),
}


@pytest.mark.parametrize("rule", RULES)
def test_selection(rule, monkeypatch):
    given, switches, fits, selected, reasons = RULES[rule]
    monkeypatch.setattr(_selection, "_explained", lambda question, device: () if fits else ("why",))
    monkeypatch.setattr(_selection, "backends", lambda: ["cuda_sm90", "cuda_sm80", "cpu"])
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    params = utils.AttentionParams(**{"device": "cpu", **given})
    chosen = _selection.select(params)
    assert chosen.selected == selected
    for name, text in reasons.items():
        assert any(text in reason for reason in chosen.reasons[name])
        assert not chosen.available[name]
    flash, version, use_fused, sub, unfused, available = utils.get_attention_backend(params)
    assert [flash, use_fused, unfused] == [selected == name for name in _selection.NAMES]
    assert available == [chosen.available[name] for name in _selection.NAMES]
    assert (version is None) == (not available[0]) and (sub is None) == (not available[1])


@pytest.mark.parametrize("device", ["cuda:0", "sm90", torch.device("cuda", 0)])
def test_a_build_without_cuda_refuses_cuda_tensors(device, monkeypatch):
    """Not even the unfused backend runs them, unless it was asked for."""
    monkeypatch.setattr(_selection, "backends", lambda: ["cpu", "reference"])
    monkeypatch.setattr(_selection, "_explained", lambda question, device: ("no CUDA backend",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    params = utils.AttentionParams(device=device)
    chosen = _selection.select(params)
    assert chosen.selected is None
    assert "no CUDA backend" in chosen.reasons[FUSED]
    assert "TESSERA_CUDA=ON" in chosen.reasons[UNFUSED][0]
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert _selection.select(params).selected is None
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert _selection.select(params).selected == UNFUSED


def test_a_backward_pass_counts_when_said(monkeypatch):
    monkeypatch.setattr(_selection, "_explained",
                        lambda question, device: ("why",) if question.backward else ())
    for training, backward, fits in ((True, None, False), (False, None, True), (False, True, False),
                                     (True, False, True)):
        params = utils.AttentionParams(device="cpu", is_training=training,
                                       requires_backward=backward)
        assert _selection.select(params).available[FUSED] == fits


def test_the_module_asks_through_utils(monkeypatch):
    """TE's users and tests put functions of their own there. Declared layouts are not looked for."""
    asked = []
    select = utils.get_attention_backend
    monkeypatch.setattr(utils, "get_qkv_layout", lambda *_: pytest.fail("the layout was declared"))
    monkeypatch.setattr(utils, "get_attention_backend", lambda p: (asked.append(p), select(p))[1])
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding")
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    module(qkv_layer=torch.randn(7, 3, 2, 8), cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=4,
           max_seqlen_kv=4)
    assert [params.qkv_layout for params in asked] == ["t3hd"]


@pytest.mark.parametrize("wanted, length, got", [("0", 512, 0), ("0", 513, 1), ("1", 64, 1),
                                                 ("2", 64, 1), (None, 64, 1)])
def test_sub_backend(wanted, length, got, monkeypatch):
    if wanted is not None:
        monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", wanted)
    params = utils.AttentionParams(max_seqlen_kv=length, device="cpu")
    assert utils.get_attention_backend(params)[3] == got


def test_fp64_goes_unfused_with_the_library_s_reason():
    chosen = _selection.select(utils.AttentionParams(qkv_dtype=torch.float64, device="cpu"))
    assert chosen.selected == UNFUSED
    assert any("cpu: q.dtype=fp64" in reason for reason in chosen.reasons[FUSED])
    q = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    module = DotProductAttention(2, 4, qkv_format="bshd", softmax_type="learnable")
    assert torch.autograd.gradcheck(lambda x: module(x, x, x), (q,))


FEATURES = [{}, dict(attn_mask_type="causal"), dict(window_size=(3, 4)),
            dict(attn_mask_type="padding_causal", window_size=(3, 0), attention_dropout=0.1),
            dict(attn_mask_type="arbitrary", softmax_type="learnable"), dict(deterministic=True),
            dict(core_attention_bias_type="post_scale_bias", core_attention_bias_shape=(1, 1, 1, 128)),
            dict(core_attention_bias_type="pre_scale_bias", core_attention_bias_shape=(2, 16, 128, 128)),
            dict(core_attention_bias_type="pre_scale_bias", core_attention_bias_shape=(1, 1, 1, 1), softcap=50.0),
            dict(core_attention_bias_type="alibi", alibi_slopes_shape=[1, 16], max_seqlen_kv=99),
            dict(core_attention_bias_type="alibi", softmax_type="off-by-one"),
            dict(attn_mask_type="padding", max_seqlen_kv=64, num_gqa_groups=4, head_dim_v=32),
            dict(return_max_logit=True, is_training=False), dict(return_max_logit=True)]


@pytest.mark.parametrize("given", FEATURES, ids=str)
@pytest.mark.parametrize("layout", ["sbhd_sbhd_sbhd", "bshd_bs2hd", "thd_thd_thd"])
def test_the_library_understands_every_question(given, layout):
    for question in _questions.questions(utils.AttentionParams(qkv_layout=layout, **given)):
        assert _explained.explained(question, "cpu") == ()


@pytest.mark.parametrize("shape, asked", [
    (None, (1, 16, 128, 128)), ((1, 1, 1, 9), (1, 1, 1, 128)), ((2, 3, 7, 9), (2, 16, 128, 128)),
    ((2, 1, 7, 1), (2, 1, 128, 1)), ((1, 1, 1, 1), (1, 1, 1, 1))])
def test_a_bias_has_a_shape(shape, asked):
    params = utils.AttentionParams(batch_size=2, core_attention_bias_type="post_scale_bias",
                                   core_attention_bias_shape=shape)
    forward, backward = _questions.questions(params)
    assert forward.given["bias"].shape == backward.given["bias"].shape == asked


def test_packed_layouts_are_understood():
    for layout in list(fused.QKVLayout)[:19]:
        asked = _questions.questions(utils.AttentionParams(qkv_layout=layout))
        assert [_explained.explained(question, "cpu") for question in asked] == [(), ()], layout


def test_switches_are_read_again_on_request(monkeypatch):
    module, q = DotProductAttention(2, 8), torch.randn(3, 1, 2, 8)
    module(q, q, q)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    module(q, q, q)
    assert _attention_backends["use_fused_attention"]
    _attention_backends["backend_selection_requires_update"] = True
    module(q, q, q)
    assert _attention_backends["use_flash_attention"]
    assert not _attention_backends["backend_selection_requires_update"]


def test_switch_that_is_no_number(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "no")
    with pytest.raises(ValueError, match="NVTE_FUSED_ATTN='no'"):
        utils.get_attention_backend(utils.AttentionParams(device="cpu"))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_log_lines(level, monkeypatch, caplog):
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", str(level))
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    q = torch.randn(3, 1, 2, 8)
    DotProductAttention(2, 8)(q, q, q)
    lines = [record.getMessage() for record in caplog.records]
    assert (lines.count("Running with FusedAttention backend (sub-backend 1)") == 1) == (level > 0)
    debug = ["Disabling FlashAttention due to NVTE_FLASH_ATTN=0",
             "Available backends = {FlashAttention=False, FusedAttention=True (sub-backend 1), "
             "UnfusedDotProductAttention=True}",
             "Selected backend = FusedAttention (sub-backend 1)"]
    assert [line for line in lines if line in debug] == (debug if level == 2 else [])
    assert any(line.startswith("Running with config={") for line in lines) == (level == 2)
    assert utils.AttentionLogging._is_logging_setup
    assert utils.AttentionLogging.fa_logger is logging.getLogger("DotProductAttention")


def test_unfused_says_what_it_materialises(monkeypatch, caplog):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    q = torch.randn(3, 1, 2, 8)
    DotProductAttention(2, 8)(q, q, q)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "72 bytes" in record.getMessage() and "NVTE_FUSED_ATTN=0" in record.getMessage()


def test_flash_version_compares_as_te_s():
    version = pytest.importorskip("packaging.version").Version
    assert utils.get_attention_backend(utils.AttentionParams(device="cpu"))[1] < version("3.0.0b")


def test_flash_attention_s_versions():
    flash = utils.FlashAttentionUtils
    assert flash.is_installed and flash.v2_1_plus and flash.v2_3_plus and flash.v2_7_0_plus
    assert not flash.v3_is_installed and not flash.v4_is_installed
    assert flash.fa3_version < flash.version


def test_what_the_machine_is(monkeypatch):
    from tessera.te.pytorch import get_device_compute_capability, is_bf16_available
    from tessera.te.pytorch.utils import get_cudnn_version
    assert get_device_compute_capability("cpu") == (9, 0)
    assert is_bf16_available() and is_bf16_available(return_reason=True) == (True, "")
    def absent(name, mode):
        raise OSError
    monkeypatch.setattr(ctypes, "CDLL", absent)
    for version, parts in ((8907, (8, 9, 7)), (90100, (9, 1, 0)), (92101, (9, 21, 1)), (None, (0, 0, 0))):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert get_cudnn_version() == parts


def test_the_version_is_that_of_the_cudnn_that_is_loaded(monkeypatch):
    from tessera.te.pytorch.utils import get_cudnn_version

    def loaded(name, mode):
        assert name == "libcudnn.so.9" and mode & os.RTLD_NOLOAD
        return library
    library = SimpleNamespace(cudnnGetVersion=lambda: 91900)
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92101)
    assert get_cudnn_version() == (9, 19, 0)


def test_the_submodule_is_found_from_the_top():
    import tessera.te

    assert tessera.te.pytorch.DotProductAttention is DotProductAttention
    with pytest.raises(AttributeError, match="attention only"):
        tessera.te.debug
    with pytest.raises(ImportError, match="attention only"):
        from tessera.te import debug  # noqa: F401


# ---- utilities ----

def laid_out(layout, tensors):
    """(q, k, v) with the strides of `layout`, from tensors in its formats."""
    q, k, v = (x.contiguous() for x in tensors)
    if "3" in layout:
        axis = -3 if "3hd" in layout else -2
        return torch.stack((q, k, v), axis).unbind(axis)
    if "2hd" in layout or "h2d" in layout:
        axis = -3 if "2hd" in layout else -2
        return q, *torch.stack((k, v), axis).unbind(axis)
    return q, k, v


@pytest.mark.parametrize("layout", list(fused.QKVLayout)[:15])
def test_layouts_are_recognised(layout):
    qkv_format = utils.get_qkv_format(layout)[0]
    shape = (3, 4, 5) if qkv_format == "thd" else (2, 3, 4, 5)
    given = laid_out(layout, [torch.zeros(shape)] * 3)
    found, *tensors, q_format, kv_format = utils.get_qkv_layout(*given, qkv_format)
    assert found == layout and q_format == kv_format == qkv_format
    assert all(x is y for x, y in zip(tensors, given))


def test_layout_of_strangers():
    x = torch.zeros(2, 3, 8, 5)
    q, k, v = x[:, :, :4], x[:, :, 4:], torch.zeros(2, 3, 4, 5)
    assert utils.get_qkv_layout(q, k, v, "bshd")[0] == "bshd_bshd_bshd"
    assert utils.get_qkv_layout(q, k, v, "bshd_2sbhd")[0] == "bshd_sbhd_sbhd"
    with pytest.raises(ValueError, match="key_layer.stride"):
        utils.get_qkv_layout(q, k.mT, v, "bshd")


@pytest.mark.parametrize("mask, window, expected", [
    ("causal", None, (-1, 0)), ("causal", (-1, -1), (-1, 0)), ("padding_causal", (4, 3), (4, 0)),
    ("causal_bottom_right", (4, 0), (4, 0)), ("no_mask", None, (-1, -1)),
    ("no_mask", (-1, 0), (-1, -1)), ("padding", (2, 3), (2, 3)), ("arbitrary", [5, 0], (5, 0))])
@pytest.mark.filterwarnings("ignore:window_size")
def test_check_set_window_size(mask, window, expected):
    assert utils.check_set_window_size(mask, window) == expected


def test_masks_of_lengths():
    cu_q, cu_kv = torch.tensor([0, 2, 6]).int(), torch.tensor([0, 3, 4]).int()
    masks = utils.get_padding_mask(2, cu_q, cu_kv, 4, 4, "cross")
    assert [mask.shape for mask in masks] == [(2, 1, 1, 4)] * 2
    assert torch.equal(utils.get_cu_seqlens(masks[0]), cu_q)
    assert torch.equal(utils.get_padding_mask(2, cu_q, max_seqlen_q=4), masks[0])
    kind, hidden, lens_q, lens_kv = utils.get_full_mask(4, 4, "padding", masks, (-1, 0), "cross")
    assert kind == "padding" and lens_q.tolist() == [2, 4] and lens_kv.tolist() == [3, 1]
    seen = [[j < lens_kv[n] and i < lens_q[n] and j <= i + lens_kv[n] - lens_q[n]
             for i in range(4) for j in range(4)] for n in range(2)]
    assert torch.equal(~hidden, torch.tensor(seen).view(2, 1, 4, 4))
    kind, hidden, *_ = utils.get_full_mask(2, 3, "causal", window_size=(0, 0))
    assert kind == "arbitrary" and (~hidden).nonzero()[:, 2:].tolist() == [[0, 0], [1, 1]]


def test_full_cu_seqlens_are_made_once():
    cpu = torch.device("cpu")
    cu_seqlens = utils.get_full_cu_seqlens(3, 5, cpu)
    assert cu_seqlens.tolist() == [0, 5, 10, 15] and cu_seqlens.dtype == torch.int32
    assert utils.get_full_cu_seqlens(3, 5, cpu) is cu_seqlens


def test_cu_seqlens_of_inference_can_be_trained_with():
    device = torch.get_default_device()
    with torch.inference_mode():
        made = utils.get_full_cu_seqlens(3, 11, str(device))
    cu = utils.get_full_cu_seqlens(3, 11, device)
    assert made.is_inference() and not cu.is_inference() and torch.equal(made, cu)
    q = torch.randn(33, 2, 8, requires_grad=True)
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding_causal")
    module(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu).sum().backward()
    assert q.grad.abs().sum() > 0


def test_alibi():
    cache = dict(utils._alibi_cache)
    slopes, bias = utils.get_alibi(cache, 3, 2, 4)
    assert slopes.tolist() == pytest.approx([1 / 16, 1 / 256, 1 / 4])
    assert bias.shape == (1, 3, 2, 4) and bias[0, 2, 0].tolist() == [-0.5, -0.25, 0, -0.25]
    lengths = torch.tensor([2, 1]), torch.tensor([2, 3])
    slopes, bias = utils.get_alibi(cache, 3, 2, 4, *lengths, torch.ones(2, 3), torch.float16)
    assert bias.dtype == torch.float16 and bias[1, 0, 0].tolist() == [-2, -1, 0, -1]
    assert cache["_alibi_bias"] is bias


def test_packing_and_unpacking():
    mask = torch.tensor([[False, False, True], [False, True, True]]).view(2, 1, 1, 3)
    cu_seqlens, indices = utils.get_cu_seqlens_and_indices(mask)
    assert cu_seqlens.tolist() == [0, 2, 3] and indices.flatten().tolist() == [0, 1, 3, 6, 6, 6]
    assert torch.equal(utils.get_indices(3, cu_seqlens), indices)
    x = torch.randn(2, 3, 2, 2, requires_grad=True)
    packed = utils.PackTensors.apply(indices, x.flatten(0, 1))
    thd = utils.ConvertBSHDtoTHD.apply(x, cu_seqlens)
    assert torch.equal(packed[:3], thd) and not packed[3:].any()
    expected = x.detach() * ~mask.view(2, 3, 1, 1)
    for back in (utils.UnpackTensor.apply(indices, 6, packed).view_as(x),
                 utils.ConvertTHDtoBSHD.apply(thd, cu_seqlens, 3)):
        assert torch.equal(back, expected)
        assert torch.equal(torch.autograd.grad(back.sum(), x, retain_graph=True)[0],
                           (~mask).float().view(2, 3, 1, 1).expand_as(x))


# ---- cpp_extensions ----

def problem_of(layout, **more):
    same = "3" in layout
    q_format, kv_format = (word if word != "bhsd" else "bshd" for word in (
        utils.get_qkv_format(layout, object())[1:]))
    extents = dict(sq=8, sk=8, lens_q=(5, 8), lens_k=(5, 8)) if same else {}
    p = Problem("padding_causal", q_format, **extents, **more)
    q = p.stored(p.q, p.lens_q)
    p.format = kv_format
    k, v = p.stored(p.k, p.lens_k), p.stored(p.v, p.lens_k)
    p.format = q_format
    if layout.startswith("bhsd"):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return p, kv_format, laid_out(layout, (q, k, v))


@pytest.mark.parametrize("layout", [layout for layout in fused.QKVLayout
                                    if not layout.startswith("paged")])
def test_fused_attn_forward_and_backward(layout):
    p, kv_format, (q, k, v) = problem_of(layout, bias="post_scale_bias", softmax="learnable",
                                         dropout=0.25)
    o_format = {"sbhd": "bshd", "bshd": "sbhd"}.get(p.format, "thd")
    first, again = (torch.Generator(q.device).manual_seed(1) for _ in range(2))
    lengths = p.sq, p.sk, p.cumulative(p.lens_q), p.cumulative(p.lens_k)
    options = dict(dropout=p.dropout, qkv_layout=layout, o_format=o_format,
                   attn_bias_type=p.bias, attn_mask_type=p.mask, softmax_type=p.softmax)
    offset = p.offset.view(1, HEADS, 1, 1)
    out, aux, max_logit = fused.fused_attn_fwd(
        True, *lengths, q, k, v, q.dtype, fused.FusedAttnBackend.cast("F16_arbitrary_seqlen"),
        p.core_bias, softmax_offset=offset, rng_gen=first,
        return_max_logit=True, **options)
    stats, rng_state, bias, sink = aux
    assert stats.shape == ((q.shape[0], HEADS, 1) if p.format == "thd" else (2, HEADS, p.sq, 1))
    assert bias is p.core_bias and sink is offset and rng_state.dtype == torch.int64
    state = torch.randint(2**63 - 1, (2,), generator=again)
    assert torch.equal(rng_state, state)
    keep = tessera.torch.dropout_mask(2, HEADS, p.sq, p.sk, p.dropout, state)
    expected = p.expected(keep)
    d_out = p.stored(p.do, p.lens_q).nan_to_num()
    dqkv_layout = "_".join((p.format, kv_format, kv_format))
    dq, dk, dv, dbias, doffset = fused.fused_attn_bwd(
        *lengths, q, k, v, out, d_out, q.dtype, aux, fused.FusedAttnBackend.cast(0),
        do_format=p.format, dqkv_layout=dqkv_layout, deterministic=True, **options)
    flip = o_format != p.format
    got = {"out": p.loaded(out.transpose(0, 1) if flip else out, p.lens_q, p.sq),
           "dq": p.loaded(dq, p.lens_q, p.sq), "dbias": dbias, "doffset": doffset.flatten(),
           "max_logit": max_logit}
    p.format = kv_format
    got.update(dk=p.loaded(dk, p.lens_k, p.sk), dv=p.loaded(dv, p.lens_k, p.sk))
    for name, value in got.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", [layout for layout in fused.QKVLayout
                                    if layout.startswith("paged")])
def test_fused_attn_with_pages(layout):
    q_format, kv_format = utils.get_qkv_format(layout, object())[1:]
    p = Problem("padding_causal_bottom_right", q_format, sq=3, sk=8, lens_q=(2, 3), lens_k=(8, 5))
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    pools = []
    for x in (p.k, p.v):
        pool = x.new_zeros(4, 4, *x.shape[2:])
        pool[table.long()] = x.unflatten(1, (2, 4))
        pools.append(pool if kv_format == "bshd" else pool.transpose(0, 1).contiguous())
    out, _ = fused.fused_attn_fwd(
        False, p.sq, p.sk, p.cumulative(p.lens_q), p.cumulative(p.lens_k),
        p.stored(p.q, p.lens_q), *pools, torch.float32, 1, page_table_k=table, page_table_v=table,
        qkv_layout=layout, o_format=q_format, attn_mask_type=p.mask)
    torch.testing.assert_close(p.loaded(out, p.lens_q, p.sq).double(), p.expected()["out"],
                               rtol=2e-5, atol=2e-5)


def test_fused_attn_func_is_differentiable():
    p = Problem("causal", bias="post_scale_bias", softmax="learnable", groups=2)
    leaves = {name: x.clone().requires_grad_() for name, x in (
        ("q", p.q), ("k", p.k), ("v", p.v), ("bias", p.core_bias), ("offset", p.offset))}
    q, k, v, bias, offset = leaves.values()
    out = backends.FusedAttnFunc.apply(q, k, v, bias, offset, fwd_args(
        max_seqlen_q=p.sq, max_seqlen_kv=p.sk, attn_scale=p.dqk ** -0.5, attn_bias_type=p.bias,
        attn_mask_type=p.mask, softmax_type=p.softmax, window_size=(-1, 0)))
    (out * p.do).sum().backward()
    expected = p.expected()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad.double(), expected[f"d{name}"], rtol=2e-5, atol=2e-5)


def test_fused_attn_func_gives_the_largest_logit_and_refuses_fp8():
    p = Problem("causal", max_logit=True)
    words = dict(max_seqlen_q=p.sq, max_seqlen_kv=p.sk, attn_scale=p.dqk ** -0.5, attn_mask_type=p.mask)
    q = p.q.clone().requires_grad_()
    out, max_logit = backends.FusedAttnFunc.apply(q, p.k, p.v, None, None, fwd_args(return_max_logit=True, **words))
    torch.testing.assert_close(max_logit.double(), p.expected()["max_logit"], rtol=2e-5, atol=2e-5)
    assert out.requires_grad and not max_logit.requires_grad
    with pytest.raises(ValueError, match="FusedAttnFunc: fp8=True"):
        backends.FusedAttnFunc.apply(q, p.k, p.v, None, None, fwd_args(fp8=True, **words))


def test_fp8_sub_backend_is_refused_by_name():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="fused_attention_backend='FP8'"):
        fused.fused_attn_fwd(True, 4, 4, None, None, q, q, q, q.dtype, FP8)
    with pytest.raises(ValueError, match="fused_attention_backend=FP8"):
        backends.FusedAttention()(q, q, q, fused_attention_backend=FP8)
    with pytest.raises(ValueError, match="qkv_layout='bhd3'"):
        fused.fused_attn_fwd(True, 4, 4, None, None, q, q, q, q.dtype, 1, qkv_layout="bhd3")


# ---- names ----

def test_te_s_numbers():
    assert [int(fused.QKVLayout[name]) for name in ("sb3hd", "thd_thd_thd", "bhsd_bhsd_bhsd")] == \
        [0, 14, 25]
    assert int(fused.QKVFormat["bhsd"]) == 7 and int(fused.AttnBiasType["alibi"]) == 3
    assert int(fused.SoftmaxType["learnable"]) == 2
    assert [fused.FusedAttnBackend[name] for name in ("No_Backend", "F16_max512", "FP8")] == \
        [-1, 0, 2]
    assert set(fused.AttnMaskType) == set(constants.AttnMaskTypes) - {"arbitrary"}


def test_where_te_1_had_its_names():
    from tessera.te.pytorch import attention
    assert attention._attention_backends is _attention_backends
    assert attention.get_attention_backend is utils.get_attention_backend
    assert constants.TE_DType[torch.bfloat16] == 6
    assert constants.TE_DType_To_Torch[constants.TE_DType[torch.float16]] == torch.float16
    assert list(fused.QKVLayout)[:-1] == list(constants.QKVLayouts)


@pytest.mark.parametrize("module", ["", ".attention", ".attention.dot_product_attention",
                                    ".attention.dot_product_attention.backends",
                                    ".attention.dot_product_attention.utils", ".constants",
                                    ".cpp_extensions", ".cpp_extensions.fused_attn", ".utils",
                                    ".distributed"])
def test_names_that_are_not_here_say_why(module):
    found = importlib.import_module(f"tessera.te.pytorch{module}")
    with pytest.raises(AttributeError, match="tessera has TE's attention only"):
        found.LayerNormLinear
    with pytest.raises(AttributeError, match="is in tessera.te.pytorch.quantization|yet; pass 16-bit"):
        found.DelayedScalingRecipeState
    with pytest.raises(ImportError, match="yet; call DotProductAttention.*score_mod="):
        exec(f"from tessera.te.pytorch{module} import FusedAttentionWithScoreModFunc")
    with pytest.raises(ImportError, match="attention only; import what is not attention from"):
        exec(f"from tessera.te.pytorch{module} import Linear")
    assert not hasattr(found, "Linear") and getattr(found, "Linear", None) is None


@pytest.mark.parametrize("line, instead", [
    ("attention.dot_product_attention.context_parallel import AttnFuncWithCPAndKVP2P",
     "attn_forward_func_with_cp"),
    ("attention.dot_product_attention.utils import mxfp8_quantize_fast_path", "16-bit"),
    ("attention.dot_product_attention import context_parallel as m; m.AttnFuncWithCPAndQKVOA2A",
     "attn_forward_func_with_cp"),
    ("attention.linear_attention import GatedDeltaNetAttention", "softmax attention only"),
    ("attention.fused_mla_q_uproj import FusedMLAQUpProjRopeQuant", "in 16 bits"),
    ("attention.dot_product_attention.backends import flash_attn_varlen_func", "take it from flash_attn"),
    ("attention.dot_product_attention.backends import FusedAttnBwdArgs", "keeps what its backward pass needs"),
    ("tensor import MXFP8Quantizer", "16-bit")])
def test_what_comes_later_says_what_to_use(line, instead):
    separator = "" if line.startswith(" ") else "."
    with pytest.raises((ImportError, AttributeError), match=f"yet; .*{instead}"):
        exec(f"from tessera.te.pytorch{separator}{line}")


# ---- the benchmarks run, and print what TE's print ----

PRINTED = {
    "benchmark_attention": (["--iterations", "1", "--warmup", "0", "--configs", "test_2"],
                            ["Running test_2 with cuDNN attention and flash-attention...",
                             "cuDNN fwd+bwd (ms)  flash-attn fwd+bwd (ms)"]),
    "example_attention": (["--config", "test_3"], ["Run cuDNN attention...",
                                                   "Run flash-attention...", "Test passed."]),
    "arbitrary_mask_to_post_scale_bias": ([], ["Run with post_scale_bias:",
                                               "Run with arbitrary mask:", "Test passed!"]),
}


@pytest.mark.parametrize("script", PRINTED)
def test_benchmark(script, monkeypatch, capsys):
    folder = Path(__file__).resolve().parents[4] / "benchmarks" / "te"
    arguments, lines = PRINTED[script]
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", [script, "--device", "cpu", "--reduce", "64", *arguments])
    runpy.run_path(str(folder / f"{script}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    at = [printed.find(line) for line in lines]
    assert -1 not in at and at == sorted(at), printed
