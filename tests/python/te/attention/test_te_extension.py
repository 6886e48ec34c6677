# SPDX-License-Identifier: Apache-2.0
"""Attention and rotary embeddings of TE's extension: by place, by number, without autograd."""

import pytest

torch = pytest.importorskip("torch")

import tessera.te.transformer_engine_torch as tex  # noqa: E402
from tessera.te.pytorch.attention import rope  # noqa: E402
from tessera.te.pytorch.cpp_extensions import fused_attn as fused  # noqa: E402
from te_oracle import Problem, fresh_selection  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("fresh_selection")
WIDE = torch.float64 if torch.get_default_device().type == "cpu" else torch.float32  # of what rotate takes


@pytest.mark.parametrize("bias, kind", [("no_bias", "vanilla"), ("post_scale_bias", "learnable")])
def test_fused_attn_of_the_extension(bias, kind):
    p = Problem("causal", bias=bias, softmax=kind, groups=2)
    words = dict(qkv_layout="bshd_bshd_bshd", o_format="bshd", attn_bias_type=bias, attn_mask_type=p.mask,
                 softmax_type=kind, window_size=(-1, 0))
    tensors = dict(attn_bias=p.core_bias if bias != "no_bias" else None,
                   softmax_offset=p.offset if kind == "learnable" else None)
    want, aux = fused.fused_attn_fwd(True, p.sq, p.sk, None, None, p.q, p.k, p.v, p.q.dtype, 1, **tensors, **words)
    numbers = (fused.QKVLayout["bshd_bshd_bshd"], fused.QKVFormat["bshd"])
    said = fused.AttnBiasType[bias], fused.AttnMaskType[p.mask], fused.SoftmaxType[kind], [-1, 0], False
    none = fused.QKVFormat[None]
    out, *more = tex.fused_attn_fwd(
        p.sq, p.sk, True, None, 0.0, True, *numbers, none, *said, None, None, p.q, p.k, p.v, p.q.dtype, None, None,
        None, None, None, None, tensors["attn_bias"], tensors["softmax_offset"], None, 16, False, False)
    assert torch.equal(out, want) and torch.equal(more[0], aux[0]) and len(more) == len(aux)
    expected = fused.fused_attn_bwd(p.sq, p.sk, None, None, p.q, p.k, p.v, want, p.do, p.q.dtype, aux, 1,
                                    do_format="bshd", dqkv_layout="bshd_bshd_bshd", **words)
    grads = tex.fused_attn_bwd(
        p.sq, p.sk, None, 0.0, True, *numbers, fused.QKVFormat["bshd"], fused.QKVLayout["bshd_bshd_bshd"], none, none,
        *said, False, None, None, p.q, p.k, p.v, out, p.do, p.q.dtype, more, None, None, None, None, None, False)
    assert len(grads) == 5 and all(a is b is None or torch.equal(a, b) for a, b in zip(grads, expected))
    assert (grads[3] is None) == (bias == "no_bias")


@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "thd_thd_thd"])
def test_largest_logits_of_the_extension(layout):
    q = torch.randn(8, 2, 8) if layout.startswith("thd") else torch.randn(2, 4, 2, 8)
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    mask = "padding" if layout.startswith("thd") else "no_mask"
    *_, want = fused.fused_attn_fwd(True, 4, 4, cu, cu, q, q, q, q.dtype, 1, qkv_layout=layout, return_max_logit=True,
                                    o_format=layout.split("_")[0], attn_mask_type=mask)
    none = fused.QKVFormat[None]
    _, stats, largest, _ = tex.fused_attn_fwd(
        4, 4, True, None, 0.0, True, fused.QKVLayout[layout], fused.QKVFormat[layout.split("_")[0]], none, 0,
        fused.AttnMaskType[mask], 0, [-1, -1], False, cu, cu, q, q, q, q.dtype, *[None] * 9, 16, True, False)
    assert largest.shape == stats.shape
    assert torch.equal(largest.amax((0, 2) if largest.dim() == 3 else (0, 2, 3)), want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("word, start, cp", [("sbhd", False, (1, 0)), ("bshd", True, (1, 0)), ("thd", False, (2, 1))])
def test_rope_of_the_extension(word, start, cp, interleaved):
    lead = {"sbhd": (8, 2), "bshd": (2, 8), "thd": (16,)}[word]
    x, do = (torch.randn(*lead, 3, 12, dtype=WIDE) for _ in range(2))
    freqs = rope.RotaryPositionEmbedding(8, interleaved=interleaved)(64)
    cu = torch.tensor([0, 12, 32], dtype=torch.int32) if word == "thd" else None
    at = torch.tensor([3, 7], dtype=torch.int32) if start else None
    x.requires_grad_()
    want = rope.apply_rotary_pos_emb(x, freqs, word, at, interleaved, cu_seqlens=cu, cp_size=cp[0], cp_rank=cp[1])
    dx, = torch.autograd.grad(want, x, do)
    rest = freqs, at, fused.QKVFormat[word], interleaved, cu, *cp
    got = tex.fused_rope_forward(x, *rest)
    assert not got.requires_grad and torch.equal(got, want)
    torch.testing.assert_close(tex.fused_rope_backward(do, *rest), dx)


@pytest.mark.parametrize("word", ["sbhd", "bshd"])
def test_qkv_rope_of_the_extension(word):
    x = torch.randn(5, 2, 3, 4 * 8, dtype=WIDE, requires_grad=True)
    freqs, split = rope.RotaryPositionEmbedding(8)(8), [16, 8, 8]
    want = rope.apply_fused_qkv_rotary_pos_emb(x, freqs, freqs, split, word)
    grads = [torch.randn_like(each) for each in want]
    dx, = torch.autograd.grad(want, x, grads)
    number = fused.QKVFormat[word]
    for got, each in zip(tex.fused_qkv_rope_forward(x, freqs, freqs, None, split, number, False, 1, 0), want):
        assert torch.equal(got, each)
    torch.testing.assert_close(tex.fused_qkv_rope_backward(*grads, freqs, freqs, split, number, False, 1, 0), dx)
    with pytest.raises(ValueError, match="tensor_format='not_set'"):
        tex.fused_rope_forward(x, freqs, None, fused.QKVFormat[None], False, None, 1, 0)
