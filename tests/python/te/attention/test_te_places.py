# SPDX-License-Identifier: Apache-2.0
"""Arguments by place, as TransformerEngine 2.20.2 has them, of the backends' modules, and what else took other
arguments than its."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

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


def test_attributes_and_scales_of_layers():
    layer = TransformerLayer(32, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu",
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
