# SPDX-License-Identifier: Apache-2.0
"""Every cache of transformers, and its continuous batching, on tessera beside eager: the same tokens."""
import functools
import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import signatures  # noqa: E402
import tessera  # noqa: E402
import tessera.hf  # noqa: E402
from tessera.hf import _continuous  # noqa: E402
from packaging.version import Version  # noqa: E402
from test_torch_hf import DECODER, MODELS, build, tokens  # noqa: E402
from transformers import cache_utils, masking_utils  # noqa: E402
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def built():
    return functools.cache(lambda name: build(MODELS[name]()))


class FourBits(cache_utils.QuantizedLayer):
    """A quantised layer without a package: 4 bits for each element, a scale for each row."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax(-1, keepdim=True) / 7 + 1e-9
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, quantized):
        return quantized[0] * quantized[1]


WAYS = [dict(prefill_chunk_size=5), dict(prefill_chunk_size=5, cache_implementation="static"),
        dict(num_beams=3), dict(prompt_lookup_num_tokens=3), dict(use_cache=False)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("cache", [*ALL_CACHE_IMPLEMENTATIONS, "fp8", "four bits", *WAYS], ids=str)
def test_every_cache_generates_eagers_tokens(built, name, cache):
    """Prompts beyond the windows; chunks of them, beams, drafts that are rejected."""
    eager, ours = built(name)
    ids = tokens(b=1 if "prompt_lookup_num_tokens" in cache else 2)

    def generate(model):
        given = cache if isinstance(cache, dict) else dict(cache_implementation=cache)
        if cache == "fp8":
            given = dict(past_key_values=transformers.QuantizedCache("fp8", model.config))
        elif cache == "four bits":
            layers = [FourBits(residual_length=5) for _ in range(model.config.num_hidden_layers)]
            given = dict(past_key_values=cache_utils.Cache(layers=layers))
        return model.generate(ids, max_new_tokens=12, do_sample=False, disable_compile=True, **given)
    try:
        expected = generate(eager)
    except (ValueError, ImportError, RuntimeError, AttributeError) as error:
        pytest.skip(f"eager cannot either: {str(error)[:90]}")
    assert torch.equal(generate(ours), expected)


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("lengths", [(6, *[1] * 6), (6, 3, 3)], ids=["tokens", "chunks"])
def test_a_window_of_one_key(lengths, pad):
    """DynamicCache keeps every key of such a window (it keeps [-1 + 1:]), and eager and SDPA see them all: a mask
    of one column broadcasts. Without a cache a query sees its own key alone, and so it does here with one."""
    eager, ours = build(transformers.MistralConfig(**DECODER, sliding_window=1))
    ids, cache, outs = tokens(s=sum(lengths)), transformers.DynamicCache(config=ours.config), []
    mask = (torch.arange(ids.shape[1]) >= torch.tensor([[0], [pad]])).long()
    with torch.no_grad():
        for part in ids.split(lengths, 1):
            seen = cache.get_seq_length() + part.shape[1]
            outs.append(ours(part, attention_mask=mask[:, :seen], past_key_values=cache).logits)
        expected = eager(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(torch.cat(outs, 1)[mask > 0], expected[mask > 0], atol=1e-5, rtol=1e-4)


# ---- continuous batching ----

batches = pytest.mark.skipif(Version(transformers.__version__) < Version("5.19.dev0"),
                             reason="transformers gives steps to others from 5.19 on")


def batched(model, prompts, **more):
    config = transformers.ContinuousBatchingConfig(
        num_blocks=24, max_batch_tokens=16, page_size=8, max_requests_per_batch=4, **more)
    given = transformers.GenerationConfig(max_new_tokens=7, do_sample=False, eos_token_id=2, pad_token_id=0)
    out = model.generate_batch(prompts, generation_config=given, continuous_batching_config=config)
    return [each.generated_tokens for _, each in sorted(out.items())]


@batches
@pytest.mark.parametrize("name", MODELS)
def test_continuous_batching(built, name, monkeypatch):
    """Prompts come in chunks beside sequences that generate; windows, caps and sinks included."""
    eager, ours = built(name)
    rng, shapes = random.Random(1), []
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randrange(2, 24))] for _ in range(6)]
    attention = _continuous.attention

    def spy(q, k, v, **keywords):
        assert "keep" not in keywords and "bias" not in keywords
        shapes.append((q.shape[0], len(keywords["cu_seqlens_q"]) - 1))
        return attention(q, k, v, **keywords)
    monkeypatch.setattr(_continuous, "attention", spy)
    with tessera.hf.continuous_batching(ours) as model:
        assert model is ours
        answers = batched(ours, prompts)
    for prompt, answer in zip(prompts, answers):
        alone = eager.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=7,
                               do_sample=False, eos_token_id=2, pad_token_id=0)
        assert answer == alone[0].tolist()[len(prompt):]
    assert max(tokens for tokens, _ in shapes) <= 16 and max(sequences for _, sequences in shapes) > 1
    assert any(tokens > sequences > 1 for tokens, sequences in shapes)  # a chunk beside other sequences
    assert ours.config._attn_implementation == "tessera"
    assert torch.equal(*(model.generate(tokens(), max_new_tokens=4, do_sample=False) for model in (eager, ours)))


@batches
def test_what_continuous_batching_needs(built):
    eager, ours = built("llama")
    lengths = torch.tensor([0, tokens().shape[1]], dtype=torch.int32)
    packed = dict(cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)  # of one row, and tokens() are two
    with pytest.raises(ValueError, match='attn_implementation="eager": must be "tessera"'):
        with tessera.hf.continuous_batching(eager):
            pass
    with pytest.raises(ValueError, match="tessera is not supported for continuous batching"):
        batched(ours, [[5, 6, 7]])  # transformers' own words
    with pytest.warns(FutureWarning, match="prefix is no longer needed"):
        model = transformers.AutoModelForCausalLM.from_config(MODELS["llama"](), attn_implementation="paged|tessera")
    assert model.config._attn_implementation == "tessera"
    with pytest.raises(ValueError, match="Could not find the currently requested flash attention"):
        transformers.AutoModelForCausalLM.from_config(MODELS["llama"](), attn_implementation=_continuous.NAME)
    with tessera.hf.continuous_batching(ours):
        for given in ({}, dict(attention_mask=torch.ones_like(tokens())), packed):
            with pytest.raises(tessera.Refused, match="call the model outside"):
                ours(tokens(), use_cache=False, **given)
    assert ours.config._attn_implementation == "tessera"


def test_continuous_batching_of_an_older_transformers_is_refused(built, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.18.1")
    with pytest.raises(tessera.Refused, match=r"transformers==5\.18\.1: gives steps to .*; 5\.19 or later would work"):
        with tessera.hf.continuous_batching(built("llama")[1]):
            pass


class Steps(torch.nn.Module):
    """A layer of a step, and what it tells the attention function."""
    layer_idx = 0

    def forward(self, rows=1, **more):
        x = torch.randn(rows, 2, 5, 8, generator=torch.Generator(torch.get_default_device()).manual_seed(0))
        lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
        given = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, **more}
        return _continuous.packed_attention(self, x, x, x, **given)[0]

    def update(self, key_states, value_states, layer_idx, kwargs):
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"]["full_attention"]
        self.reads = getattr(self, "reads", 0) + 1
        return key_states, value_states


def test_a_step_is_told_by_its_lengths():
    """The cache is read once, by the layer or by the attention function, whoever is handed it."""
    layer = Steps()
    table = {"full_attention": torch.tensor([0, 2, 5], dtype=torch.int32)}
    expected = layer()
    assert torch.equal(layer(cache=layer), expected) and not hasattr(layer, "reads")
    assert torch.equal(layer(cache=layer, cu_seq_lens_k=table), expected) and layer.reads == 1
    for given, why in ((dict(cu_seq_lens_k=table), "does not read"), (dict(cu_seq_lens_q=None), "outside"),
                       (dict(rows=2), "outside"), (dict(attention_mask=torch.ones(1, 1, 5, 5)), "outside"),
                       (dict(block_table=torch.zeros(1)), "block_table"), (dict(position_bias=torch.zeros(1)), "bias")):
        with pytest.raises(tessera.Refused, match=why):
            layer(**given)
    layer.is_causal = False
    with pytest.raises(tessera.Refused, match="sees both ways"):
        layer()


def test_masks_that_lengths_do_not_say():
    window = masking_utils.sliding_window_causal_mask_function(4)
    packed = masking_utils.packed_sequence_mask_function(torch.zeros(1, 4, dtype=torch.int32))
    for function in (masking_utils.causal_mask_function, window, masking_utils.and_masks(window, packed)):
        assert _continuous.no_mask(mask_function=function) is None
    for function, name in ((masking_utils.bidirectional_mask_function, "bidirectional_mask_function"),
                           (masking_utils.or_masks(window, packed), "or_masks"),
                           (masking_utils.and_masks(window, masking_utils.chunked_causal_mask_function(
                               5, torch.zeros(1))), "chunked_overlay")):
        with pytest.raises(tessera.Refused, match=name):
            _continuous.no_mask(mask_function=function)


def test_docstring_has_every_parameter():
    signatures.assert_described(tessera.hf.continuous_batching)
