# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers on attn_implementation="tessera": each is right or refused by name."""
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import hf_models  # noqa: E402
import tessera  # noqa: E402
import tessera.hf  # noqa: E402
from tessera.hf import _masks, _models  # noqa: E402

# Attend by themselves: with our masks or none they were wrong, crashed, or said KeyError: 'tessera'.
REFUSED = ["bloom", "codegen", "gpt_neox_japanese", "xglm", "trocr", "mpt", "megatron-bert", "rembert",
           "roformer", "ibert", "mpnet", "convbert", "imagegpt", "falcon", "gptj", "gpt_neo", "git", "sam",
           "speecht5", "xlnet", "swinv2", "wavlm", "reformer"]
# One of a kind: encoders, decoders, both; windows, chunks, sinks, softcaps, latent and hybrid attention;
# pictures and sound.
RIGHT = ["bert", "llama", "gemma2", "gpt_oss", "gpt2", "modernbert", "bart", "t5", "vit", "whisper",
         "clip", "gemma3", "deepseek_v3", "qwen2_vl"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_attends_by_itself_is_refused(name):
    """Or it is right on tessera, once transformers has rewritten it: codegen and gptj in 5.24."""
    outcome = hf_models.compare(name)
    if outcome.kind == "right" and outcome.calls:
        pytest.skip(f"goes through the interface in transformers {transformers.__version__}, and is right")
    assert outcome.kind == "refused", outcome
    assert f'model_type="{name}' in outcome.why and 'attn_implementation="eager"' in outcome.why


@pytest.mark.parametrize("name", RIGHT)
def test_what_uses_the_interface_is_right(name):
    outcome = hf_models.compare(name)
    assert outcome.kind == "right" and outcome.calls, outcome
    assert {"forward", "gradients"} <= set(outcome.checks)


def test_every_architecture(request):
    """All of them, each in a process of its own; --hf-all (nightly)."""
    if not request.config.getoption("--hf-all"):
        pytest.skip("--hf-all: twenty minutes")
    import subprocess
    import sys
    from pathlib import Path
    tool = Path(__file__).resolve().parents[3] / "tools" / "sweep_hf.py"
    subprocess.run([sys.executable, tool, "--check"], check=True)


def small(cls, **more):
    return cls(vocab_size=97, hidden_size=32, num_attention_heads=4, **more)


def test_it_is_refused_in_whatever_way_it_is_asked_for(tmp_path):
    config = small(transformers.BloomConfig, n_layer=1)
    with pytest.raises(tessera.Refused, match="BloomForCausalLM.*BloomAttention"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera")
    config._attn_implementation = "eager"
    model = transformers.BloomForCausalLM(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(tessera.Refused, match="BloomForCausalLM"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="tessera")
    model.set_attn_implementation("tessera")  # transformers itself leaves it as it was, and says so
    assert model.config._attn_implementation == "eager"


def composite():
    encoder = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                     intermediate_size=48, image_size=32, patch_size=8)
    decoder = transformers.TrOCRConfig(vocab_size=97, d_model=32, decoder_layers=1, decoder_attention_heads=4,
                                       decoder_ffn_dim=48, cross_attention_hidden_size=32)
    return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)


def test_parts_of_a_composite_are_asked_one_by_one():
    with pytest.raises(tessera.Refused, match="TrOCR.*name_of_its_sub_config"):
        transformers.VisionEncoderDecoderModel._from_config(composite(), attn_implementation="tessera")
    model = transformers.VisionEncoderDecoderModel._from_config(
        composite(), attn_implementation={"": "tessera", "encoder": "tessera", "decoder": "eager"})
    with hf_models.counted() as calls:
        model(pixel_values=torch.zeros(2, 3, 32, 32), decoder_input_ids=torch.zeros(2, 5, dtype=torch.long))
    assert calls == ["ViTAttention"]


@pytest.mark.parametrize("mask", [None, "ones", "left", "holes"])
def test_a_model_that_the_check_let_by_cannot_use_our_masks(mask, monkeypatch):
    """Were Bloom's code not seen through, its first mask would still tell."""
    monkeypatch.setattr(_models, "why_not", lambda cls: "")
    model = transformers.BloomForCausalLM._from_config(small(transformers.BloomConfig, n_layer=1),
                                                       attn_implementation="tessera")
    ids = torch.arange(3, 15)[None].expand(2, -1)
    if mask is not None:
        mask = {"ones": torch.ones(2, 12), "left": torch.ones(2, 12).triu(-10),
                "holes": torch.tensor([[1.0, 0, 1] * 4] * 2)}[mask].long()
    with pytest.raises(tessera.Refused, match="of a mask"):
        model(ids, attention_mask=mask)


def test_a_mask_is_handed_on_but_not_computed_with():
    mask = _masks.attention_mask(batch_size=2, q_length=6, kv_length=6, allow_is_causal_skip=False)
    scores = torch.zeros(2, 4, 6, 6)
    for moved in (mask, mask[:, :, :, :6], mask.contiguous(), mask.to("cpu"), mask.expand(2, -1, -1, -1)):
        assert isinstance(moved, _masks.Mask) and moved.dtype == torch.int32
    for use in (lambda: scores + mask, lambda: mask + scores, lambda: torch.where(mask, scores, 0.0),
                lambda: scores.masked_fill(mask, 0.0), lambda: mask.to(torch.float32), lambda: mask == 0,
                lambda: scores.add_(mask), lambda: torch.cat([mask, mask]), lambda: mask.float()):
        with pytest.raises(tessera.Refused, match="of a mask"):
            use()
    assert type(mask.plain()) is torch.Tensor


def test_other_implementations_are_answered_as_before():
    config = small(transformers.BloomConfig, n_layer=1)
    assert transformers.BloomForCausalLM(config).config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="not supported"):
        transformers.BloomForCausalLM._from_config(config, attn_implementation="nobody's")
