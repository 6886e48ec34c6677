# SPDX-License-Identifier: Apache-2.0
"""The calls that TE's documentation writes, as it writes them, and the log lines that it shows."""

import pytest

torch = pytest.importorskip("torch")

import tessera.torch  # noqa: E402
from tessera.te.pytorch import DotProductAttention, constants  # noqa: E402
from tessera.te.pytorch.attention import _PrepareQKVForFA  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention.backends import (  # noqa: E402
    FlashAttention, FusedAttention, FusedAttnFunc, UnfusedDotProductAttention)
from tessera.te.pytorch.attention.dot_product_attention.utils import (  # noqa: E402
    AttentionLogging)
from tessera.te.pytorch.cpp_extensions.fused_attn import (  # noqa: E402
    FusedAttnBackend, fused_attn_bwd, fused_attn_fwd)
from te_oracle import HEADS, Problem, fwd_args, fresh_selection  # noqa: E402,F401

pytestmark = pytest.mark.usefixtures("fresh_selection")
BACKENDS = (FlashAttention, FusedAttention, UnfusedDotProductAttention)
LAYOUT = {"bshd": "bshd_bshd_bshd", "sbhd": "sbhd_sbhd_sbhd", "thd": "thd_thd_thd"}


def close(got, expected):
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


# ---- backends on their own ----

@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_without_arguments(backend):
    p = Problem("causal", sk=7, lens_k=(7, 7))
    q, k, v = p.q, p.k, p.v
    attn = backend()
    out = attn(query_layer=q, key_layer=k, value_layer=v, qkv_layout="bshd_bshd_bshd",
               attn_mask_type="causal")
    assert out.shape == (2, p.sq, HEADS * p.dv)
    close(out.unflatten(-1, (HEADS, p.dv)), p.expected()["out"])
    sbhd = attn(*(x.transpose(0, 1).contiguous() for x in (q, k, v)), attention_dropout=0.0)
    close(sbhd.unflatten(-1, (HEADS, p.dv)).transpose(0, 1), p.expected()["out"])


OPTIONS = {
    "documented": ({}, dict(attention_dropout=0.0, core_attention_bias=None, fp8_quantizer=None)),
    "bias": (dict(bias="post_scale_bias"), dict(fp8_quantizer=None)),
    "pre-scale bias": (dict(bias="pre_scale_bias"),
                       dict(core_attention_bias_type="pre_scale_bias")),
    "alibi": (dict(bias="alibi"), dict(core_attention_bias_type="alibi")),
    "window": (dict(window=(2, 0)), dict(window_size=(2, 0))),
    "no window": ({}, dict(window_size=(-1, -1), cp_comm_type="p2p", cp_group=None, fp8=False,
                           quantizers={}, fast_zero_fill=False, inference_params=None)),
    "dropout": (dict(dropout=0.25), dict(attention_dropout=0.25)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["causal", "padding_causal", "no_mask", "arbitrary"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_backend_s_options(option, mask, backend):
    features, given = OPTIONS[option]
    if mask in ("no_mask", "arbitrary") and "window" in features:
        given = dict(window_size=(2, 1))
        features = dict(window=(2, 1))
    p = Problem(mask, **features)
    if p.bias.endswith("scale_bias"):
        given = dict(given, core_attention_bias=p.core_bias)
    if p.padded:
        given = dict(given, cu_seqlens_q=p.cumulative(p.lens_q),
                     cu_seqlens_kv=p.cumulative(p.lens_k))
    if mask == "arbitrary":
        given = dict(given, attention_mask=p.hidden_pairs)
    torch.manual_seed(3)
    out = backend()(query_layer=p.q, key_layer=p.k, value_layer=p.v, qkv_layout=LAYOUT["bshd"],
                    attn_mask_type=mask, **given)
    keep = None
    if p.dropout:
        torch.manual_seed(3)
        state = torch.randint(2**63 - 1, (2,), dtype=torch.int64)
        keep = tessera.torch.dropout_mask(2, HEADS, p.sq, p.sk, p.dropout, state)
    close(out.unflatten(-1, (HEADS, p.dv)), p.expected(keep)["out"])


def test_te_s_constructors():
    p = Problem("causal", softmax="learnable", max_logit=True)
    offset = p.offset.view(1, HEADS, 1, 1)
    options = dict(attention_type="cross", layer_number=2, attention_dropout=0.5)
    for made in (UnfusedDotProductAttention(softmax_scale=0.25, **options),
                 FusedAttention(0.25, deterministic=True), FlashAttention(0.25, **options)):
        out = made.eval()(p.q, p.k, p.v, qkv_layout=LAYOUT["bshd"])
        expected = tessera.torch.attention(p.q, p.k, p.v, softmax_scale=0.25, causal=True,
                                           align="top_left")
        torch.testing.assert_close(out, expected.flatten(-2))
    for backend in BACKENDS:
        made = backend(softmax_type="learnable", return_max_logit=True)
        out, max_logit = made(p.q, p.k, p.v, qkv_layout=LAYOUT["bshd"], softmax_offset=offset)
        close(out.unflatten(-1, (HEADS, p.dv)), p.expected()["out"])
        close(max_logit, p.expected()["max_logit"])
    module = DotProductAttention(HEADS, p.dqk, softmax_scale=0.25, attention_dropout=0.5).eval()
    q = p.q.transpose(0, 1)
    k, v = (x.transpose(0, 1) for x in (p.k, p.v))
    torch.testing.assert_close(module.fused_attention(q, k, v, attn_mask_type="causal"),
                               module(q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given, error, message", [
    (dict(fp8_quantizer=object()), tessera.torch.Refused, "fp8_quantizer=object: .*16-bit"),
    (dict(fp8=True), tessera.torch.Refused, "fp8=bool: .*called on its own yet; call DotProductAttention"),
    (dict(inference_params=object()), tessera.torch.Refused, "inference_params=object.*page_table"),
    (dict(qkv_layout="bhd3"), ValueError, "qkv_layout='bhd3'.*sb3hd"),
    (dict(attn_mask_type="causual"), ValueError, "attn_mask_type='causual'"),
    (dict(attention_dropout=1.5), ValueError, "attention_dropout=1.5: must be in"),
    (dict(core_attention_bias_type="no_bias", core_attention_bias=torch.zeros(1, 1, 4, 4)),
     ValueError, "core_attention_bias=.*belongs to"),
    (dict(attn_mask_type="padding"), ValueError, "cu_seqlens_q=None"),
    (dict(attn_mask_type="causal", causal=True), TypeError, "causal=: is no keyword beside TE's")],
    ids=lambda part: ",".join(part) if isinstance(part, dict) else str(part))
def test_misuse_of_a_backend(backend, given, error, message):
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(error, match=message):
        backend()(q, q, q, **dict(dict(qkv_layout="bshd_bshd_bshd"), **given))


def test_today_s_spellings_stay():
    q = torch.randn(2, 5, 2, 8)
    expected = tessera.torch.attention(q, q, q, causal=True)
    for backend in (FlashAttention(), FusedAttention(), FlashAttention(None)):
        assert torch.equal(backend(q, q, q, causal=True), expected)
        assert torch.equal(backend(q, q, q, layout=("bshd", "bshd"), causal=True), expected)


def test_prepare_qkv_for_fa():
    qkv = torch.randn(5, 2, 4, 3, 8, requires_grad=True)
    for x, y in zip(_PrepareQKVForFA.apply(*qkv.unbind(-2)), qkv.unbind(-2)):
        assert x.is_contiguous() and torch.equal(x, y.transpose(0, 1))
    q, k, v = _PrepareQKVForFA.apply(*qkv.unbind(-2))
    grad, = torch.autograd.grad((q * 1 + k * 2 + v * 3).sum(), qkv)
    assert torch.equal(grad, torch.tensor([1., 2, 3]).view(3, 1).expand_as(grad))


# ---- fused_attn_fwd and fused_attn_bwd in upper case ----

def test_names_of_sub_backends():
    names = ("F16_max512", "F16_arbitrary", "FP8")
    assert [int(FusedAttnBackend[name]) for name in names] == [0, 1, 2]
    assert FusedAttnBackend["F16_arbitrary"] is FusedAttnBackend.F16_arbitrary_seqlen


@pytest.mark.parametrize("aux", ["named", "listed"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd", "given"])
def test_fused_attn_in_upper_case(layout, aux):
    p = Problem("padding", "bshd" if layout == "given" else layout)
    q, k, v, d_out = (p.stored(x, lens) for x, lens in (
        (p.q, p.lens_q), (p.k, p.lens_k), (p.v, p.lens_k), (p.do, p.lens_q)))
    lengths = dict(max_seqlen_q=p.sq, max_seqlen_kv=p.sk, cu_seqlens_q=p.cumulative(p.lens_q),
                   cu_seqlens_kv=p.cumulative(p.lens_k))
    if layout == "given":
        lengths["qkv_layout"] = "bshd_bshd_bshd"
    output, softmax_lse, rng_state = fused_attn_fwd(
        is_training=True, **lengths, Q=q, K=k, V=v, qkv_dtype=torch.float32,
        fused_attention_backend=FusedAttnBackend["F16_arbitrary"])
    expected = p.expected()
    close(p.loaded(output, p.lens_q, p.sq), expected["out"])
    assert softmax_lse.dtype == torch.float32 and rng_state.shape == (2,)
    given = dict(softmax_lse=softmax_lse, rng_state=rng_state) if aux == "named" else \
        dict(aux_ctx_tensors=[softmax_lse, rng_state])
    dq, dk, dv, dbias, doffset = fused_attn_bwd(
        **lengths, Q=q, K=k, V=v, O=output, dO=d_out, qkv_dtype=torch.float32, **given,
        fused_attention_backend=FusedAttnBackend["F16_arbitrary"])
    assert dbias is None and doffset is None
    close(p.loaded(dq, p.lens_q, p.sq), expected["dq"])
    close(p.loaded(dk, p.lens_k, p.sk), expected["dk"])
    close(p.loaded(dv, p.lens_k, p.sk), expected["dv"])


def test_fused_attn_in_upper_case_with_everything():
    p = Problem("causal", bias="post_scale_bias", softmax="learnable")
    offset = p.offset.view(1, HEADS, 1, 1)
    options = dict(max_seqlen_q=p.sq, max_seqlen_kv=p.sk, cu_seqlens_q=None, cu_seqlens_kv=None,
                   attn_mask_type="causal", attn_bias_type="post_scale_bias",
                   softmax_type="learnable", qkv_dtype=constants.TE_DType[torch.float32],
                   fused_attention_backend=FusedAttnBackend["F16_max512"], attn_bias=p.core_bias,
                   softmax_offset=offset)
    output, lse, rng_state, max_logit = fused_attn_fwd(is_training=True, Q=p.q, K=p.k, V=p.v,
                                                       return_max_logit=True, **options)
    expected = p.expected()
    close(output, expected["out"])
    close(max_logit, expected["max_logit"])
    grads = fused_attn_bwd(Q=p.q, K=p.k, V=p.v, O=output, dO=p.do, softmax_lse=lse,
                           rng_state=rng_state, **options)
    for name, grad in zip(("dq", "dk", "dv", "dbias"), grads):
        close(grad, expected[name])
    close(grads[4].flatten(), expected["doffset"])


@pytest.mark.parametrize("given, message", [
    (dict(K=None), "K='NoneType': must be a torch.Tensor"),
    (dict(qkv_dtype=torch.float16), "qkv_dtype=torch.float16: must be Q's, torch.float32"),
    (dict(fused_attention_backend=FusedAttnBackend["FP8"]), "fused_attention_backend='FP8'")],
    ids=str)
def test_misuse_of_upper_case(given, message):
    q = torch.zeros(1, 4, 2, 8)
    common = dict(dict(max_seqlen_q=4, max_seqlen_kv=4, cu_seqlens_q=None, cu_seqlens_kv=None, Q=q,
                       K=q, V=q, qkv_dtype=q.dtype, fused_attention_backend=1), **given)
    with pytest.raises(ValueError, match=message):
        fused_attn_fwd(is_training=True, **common)
    with pytest.raises(ValueError, match=message):
        fused_attn_bwd(**common, O=q, dO=q, softmax_lse=torch.zeros(1, 2, 4, 1))
    if not given.get("K", True):
        with pytest.raises(ValueError, match="softmax_lse='NoneType'"):
            fused_attn_bwd(**dict(common, K=q), O=q, dO=q)


# ---- log lines ----

def debug_lines(caplog):
    return [f"[{record.levelname} | {record.name}]: {record.getMessage()}"
            for record in caplog.records]


@pytest.mark.parametrize("level", ["1", "2"])
def test_log_lines_of_a_run(level, monkeypatch, caplog):
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", level)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    q = torch.randn(3, 1, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    DotProductAttention(2, 8)(q, q, q).sum().backward()
    wanted = ["[DEBUG | DotProductAttention]: Disabling FlashAttention due to NVTE_FLASH_ATTN=0",
              "[INFO | DotProductAttention]: Running with FusedAttention backend (sub-backend 1)",
              "[DEBUG | FusedAttnFunc]: Running forward in torch.bfloat16",
              "[DEBUG | FusedAttnFunc]: Running backward in torch.bfloat16"]
    lines = debug_lines(caplog)
    assert [line for line in lines if line in wanted] == (wanted if level == "2" else wanted[1:2])
    configs = [line for line in lines
               if line.startswith("[DEBUG | DotProductAttention]: Running with config={")]
    assert len(configs) == (level == "2")


def test_log_lines_of_fused_attn_func(monkeypatch, caplog):
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
    monkeypatch.setattr(AttentionLogging, "_is_logging_setup", False)
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    FusedAttnFunc.apply(q, q, q, None, None, fwd_args(max_seqlen_q=3, max_seqlen_kv=3,
                                                      attn_mask_type="causal")).sum().backward()
    assert debug_lines(caplog) == ["[DEBUG | FusedAttnFunc]: Running forward in torch.float32",
                                   "[DEBUG | FusedAttnFunc]: Running backward in torch.float32"]
