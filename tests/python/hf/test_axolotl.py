# SPDX-License-Identifier: Apache-2.0
"""axolotl's plugin, called as axolotl calls it, on rows as its collators pack them. BasePlugin is a stand-in, because
axolotl 0.19 wants packages for GPUs."""
import copy
import importlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tessera  # noqa: E402
from test_torch_hf import DECODER, MODELS, used  # noqa: E402, F401

DOCUMENTS = ((5, 6, 7, 8, 9), (10, 11, 12), (13, 14, 15, 16))


@pytest.fixture
def plugin(monkeypatch):
    modules = {name: types.ModuleType(name) for name in
               ("axolotl", "axolotl.integrations", "axolotl.integrations.base")}
    modules["axolotl.integrations.base"].BasePlugin = type("BasePlugin", (), {})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("tessera.hf.axolotl").Plugin()
    del sys.modules["tessera.hf.axolotl"]


def built(config, name="sdpa"):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name)


def packed(rows, length):
    """input_ids and position_ids of rows of documents; padding counts from 0, as a document of its own."""
    ids, positions = [], []
    for row in rows:
        left = length - sum(map(len, row))
        ids.append([*(x for each in row for x in each), *[0] * left])
        positions.append([i for each in [*map(len, row), left] for i in range(each)])
    return dict(input_ids=torch.tensor(ids), position_ids=torch.tensor(positions))


@pytest.mark.parametrize("rows", [(DOCUMENTS,), (DOCUMENTS[:2], DOCUMENTS[2:])], ids=["one row", "two"])
@pytest.mark.parametrize("name, given", [("llama", "sdpa"), ("gemma2", "eager")])
def test_packed_samples_are_as_alone(plugin, used, name, given, rows):  # noqa: F811
    alone, ours = (built(MODELS[name](), given) for _ in range(2))
    plugin.post_model_build(types.SimpleNamespace(attn_implementation=given), ours)
    logits = ours(**packed(rows, 16), use_cache=False).logits
    assert used and set(used) == {torch.int32}  # key ranges, of O(sequence) bytes
    found = [part for row, out in zip(rows, logits) for part in out[:sum(map(len, row))].split([*map(len, row)])]
    expected = [alone(torch.tensor([each])).logits[0] for each in DOCUMENTS]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-5, rtol=1e-4)
    for logits, model in ((found, ours), (expected, alone)):
        torch.cat(logits).square().mean().backward()
    for a, b in zip(ours.parameters(), alone.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["org/repo", "flash_attention_2", None])
def test_another_attention_is_an_error(plugin, name):
    model = built(transformers.LlamaConfig(**DECODER))
    with pytest.raises(ValueError, match=f"attn_implementation={name}: must be sdpa"):
        plugin.post_model_build(types.SimpleNamespace(attn_implementation=name), model)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_computes_attention_itself_is_refused(plugin):
    model = built(transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=97), "eager")
    with pytest.raises(tessera.Refused, match="BloomForCausalLM .* does not go through"):
        plugin.post_model_build(types.SimpleNamespace(attn_implementation="eager"), model)
