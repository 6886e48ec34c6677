# SPDX-License-Identifier: Apache-2.0
"""Arguments by place, as TransformerEngine 2.20.2 has them, of the backends' modules, and what else took other
arguments than its."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tessera.te.pytorch as te  # noqa: E402
from tessera.te.common import recipe as recipes  # noqa: E402
from tessera.te.pytorch import DotProductAttention, InferenceParams, TransformerLayer, autocast  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import backends, utils  # noqa: E402
from tessera._lib import Refused  # noqa: E402
from te_oracle import fresh_selection  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("fresh_selection")
RECORD = json.loads((Path(__file__).resolve().parents[4] / "docs" / "data" / "te_names.json").read_text())
THEIRS = RECORD["pytorch.attention.dot_product_attention.backends"]


# ---- the backends' modules ----

@pytest.mark.parametrize("name", ["FlashAttention", "FusedAttention"])
def test_places_are_te_s(name):
    theirs = [each.split("=")[0] for each in THEIRS[f"{name}.forward"].split(", ")]
    assert ["query_layer", "key_layer", "value_layer", *getattr(backends, name).PLACES] == theirs


def test_arguments_by_place():
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    layout = "bshd_bshd_bshd"
    want = backends.FusedAttention(0.3)(q, k, v, qkv_layout=layout, attn_mask_type="no_mask")
    flash = backends.FlashAttention(0.3, 0.0, torch.no_grad, "cross", 3, True)
    assert torch.equal(flash(q, k, v, None, layout, None, None, 5, 5, "no_mask"), want)
    assert (flash.attention_type, flash.layer_number, flash.deterministic) == ("cross", 3, True)
    made = backends.FusedAttention(0.3, 0.0, torch.no_grad, "self", 3, False, "off-by-one", True)
    out, max_logit = made(q, k, v, layout, None, None, None, None, 5, 5, "no_mask", None, (-1, -1), None, 1)
    assert made.softmax_type == "off-by-one" and out.shape == want.shape and max_logit.shape == (2,)
    unfused = backends.UnfusedDotProductAttention(0.3, "cross", 0.0, torch.no_grad, 3, "vanilla", False)
    for lead in ((), (utils._alibi_cache,)):  # TE's own call begins with the cache
        torch.testing.assert_close(unfused(*lead, q, k, v, layout, None, None, 5, 5, "no_mask"), want)


@pytest.mark.parametrize("placed, words, message", [
    ((None,) * 26, {}, "29 arguments by place: takes query_layer"),
    ((None, "bshd_bshd_bshd"), {"qkv_layout": "sbhd_sbhd_sbhd"}, "5 arguments by place and qkv_layout=")])
def test_too_many_places(placed, words, message):
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(TypeError, match=message):
        backends.FlashAttention()(q, q, q, *placed, **words)


def test_score_mod_of_a_backend_says_who_has_it():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(Refused, match="call DotProductAttention"):
        backends.FusedAttention()(q, q, q, qkv_layout="bshd_bshd_bshd", score_mod=lambda graph, score, tensors: score)


# ---- the rest ----

def test_transpose_to_bhsd_htd():
    x = torch.randn(3, 2, 4, 8)
    assert torch.equal(utils.transpose_to_bhsd_htd_pytorch(x, "sbhd"), x.permute(1, 2, 0, 3))
    assert torch.equal(utils.transpose_to_bhsd_htd_pytorch(x, "bshd"), x.transpose(1, 2))
    assert torch.equal(utils.transpose_to_bhsd_htd_pytorch(x[0], "thd"), x[0].transpose(0, 1))
    assert utils.transpose_to_bhsd_htd_pytorch(x, "bhsd") is x
    with pytest.raises(ValueError, match="src_format='thd'"):
        utils.transpose_to_bhsd_htd_pytorch(x, "thd")


def test_a_cache_is_made_by_the_model_s_sizes():
    with pytest.raises(ValueError, match="InferenceParams: head_dim_k=None"):
        InferenceParams(2, 16, 4)
    assert InferenceParams(2, 16, 4, 8).dtype == torch.get_default_dtype()


def test_recipes_have_te_s_fields():
    assert recipes.MXFP8BlockScaling(enable_2d_quantization=True).enable_2d_quantization
    assert recipes.CustomRecipe(print, recipes.Format.E4M3).fp8_format is recipes.Format.E4M3
    with pytest.raises(AssertionError, match="quantization_alignment=0"):
        recipes.CustomRecipe(print, quantization_alignment=0)
    with pytest.raises(AssertionError, match="nvfp4_4over6='some'"):
        recipes.NVFP4BlockScaling(nvfp4_4over6="some")
    with pytest.raises(AssertionError, match="nvfp4_4over6_err_mode='L1'"):
        recipes.NVFP4BlockScaling(nvfp4_4over6_err_mode="L1")


def test_what_te_has_at_the_top():
    theirs = ("CPLoadBalancingStrategy", "CudaRNGStatesTracker", "DType", "ManualOffloadSynchronizer",
              "mark_not_offload", "quantized_model_init", "fp8_model_init")
    assert all(name in te.__all__ and hasattr(te, name) for name in theirs)
    for region in (te.quantized_model_init, te.fp8_model_init):
        with region(enabled=False, recipe=recipes.DelayedScaling()):
            te.DotProductAttention(2, 8)
        with pytest.raises(Refused, match="quantized_model_init: enabled=True"), region():
            pass
    assert not te.quantization.FP8GlobalStateManager.is_fp8_enabled()


def test_tensors_are_saved_by_te_s_functions():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, stored):
            tensors, ctx.tensor_objects = te.prepare_for_saving(x, None, stored)
            ctx.save_for_backward(*tensors, x)
            return x * stored.dequantize()

        @staticmethod
        def backward(ctx, grad):
            (x, none, stored), rest = te.restore_from_func_ctx(ctx, return_saved_tensors=True)
            assert none is None and isinstance(stored, te.Float8Tensor) and torch.equal(rest[0], x)
            with pytest.raises(AttributeError, match="tensor_objects"):
                te.restore_from_func_ctx(ctx)
            return grad * stored.dequantize(), None

    x = torch.randn(4, 8, requires_grad=True)
    quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.DType.kFloat8E4M3)
    stored = quantizer(torch.randn(4, 8))
    Scaled.apply(x, stored).sum().backward()
    assert torch.equal(x.grad, stored.dequantize())
    assert te.restore_from_saved([None], (x,)) == [x]


def test_how_weights_are_drawn():
    weight = torch.empty(256, 256)
    assert te.utils.init_method_normal(0.5)(weight) is weight
    assert weight.std().item() == pytest.approx(0.5, rel=0.02)
    te.utils.scaled_init_method_normal(0.5, 8)(weight)
    assert weight.std().item() == pytest.approx(0.125, rel=0.02)
    assert te.utils.is_bf16_compatible()


def test_attributes_and_scales_of_layers():
    layer = TransformerLayer(32, 32, 2, hidden_dropout=0.0, attention_dropout=0.0,
                             params_dtype=torch.bfloat16)
    core = layer.self_attention.core_attention
    for module in (layer, layer.self_attention, core, backends.UnfusedDotProductAttention()):
        module.fast_setattr("colour", "red")
        assert module.colour == "red"
    assert core.get_fp8_meta_tensors() is None
    with autocast(recipe=recipes.DelayedScaling(fp8_dpa=True, amax_history_len=2)):
        layer(torch.randn(16, 2, 32, dtype=torch.bfloat16))
    state = core.fp8_meta["scaling_fwd"]
    assert state.amax_history.any()
    layer.reset_fp8_meta_tensors()
    assert (state.scale == 1).all() and not state.amax_history.any()


def test_scales_of_attention_are_reset():
    module = DotProductAttention(2, 16, qkv_format="bshd", attn_mask_type="causal")
    q = torch.randn(1, 16, 2, 16, dtype=torch.bfloat16)
    with autocast(recipe=recipes.DelayedScaling(fp8_dpa=True, amax_history_len=2)):
        module(q, q, q)
    kept = module.get_fp8_meta_tensors()
    assert kept["scaling_fwd"][0].ne(1).any()
    module.reset_fp8_meta_tensors()
    assert (module.fp8_meta["scaling_fwd"].scale == 1).all()
    module.reset_fp8_meta_tensors(kept)
    for key, (scale, history) in kept.items():
        assert torch.equal(module.fp8_meta[key].scale, scale)
        assert torch.equal(module.fp8_meta[key].amax_history, history)
