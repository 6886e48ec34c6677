# SPDX-License-Identifier: Apache-2.0
"""tessera as a kernel of Hugging Face's hub: the packed folder, loaded by `kernels` and by transformers themselves, in
processes that have no other tessera."""
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("kernels")

import door_examples  # noqa: E402
import tessera  # noqa: E402
from tessera.doors import hub_kernel  # noqa: E402


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    place = tmp_path_factory.mktemp("kernel")
    assert hub_kernel.pack(place) == place / "build" / "torch-universal"
    return place


def run(program: str, place: Path) -> str:
    """What `program` prints in a process whose only tessera is the one in `place`."""
    hides = ("import os, sys\n"
             "sys.path = [p for p in sys.path if not os.path.exists(p + '/tessera/_lib.py')]\n")
    done = subprocess.run([sys.executable, "-c", hides + program], capture_output=True, text=True, env={
        **os.environ, "LOCAL_KERNELS": f"someone/attention={place}", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_generates_the_same_tokens(packed):
    """transformers 5.24 wants a `kernels` newer than PyPI has (0.18.2): the bound is lifted, nothing else."""
    text = run("""if True:
        import copy, importlib.util
        assert importlib.util.find_spec("tessera") is None
        import torch, transformers.utils.import_utils as utils
        if not utils.is_kernels_available():
            utils.is_kernels_available.__wrapped__.__defaults__ = ("0.17.2", "0.19.0")
            utils.is_kernels_available.cache_clear()
        import transformers
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=97,
            max_position_embeddings=128, num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1,
            eos_token_id=2)
        models = []
        for name in ("eager", "someone/attention"):
            torch.manual_seed(0)
            models.append(transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=name).eval())
        eager, ours = models
        calls = []
        inner = transformers.AttentionInterface._global_mapping["someone/attention"]
        assert inner.__module__ == "tessera.hf", inner
        transformers.AttentionInterface._global_mapping["someone/attention"] = \\
            lambda *a, **k: calls.append(0) or inner(*a, **k)
        ids = torch.randint(3, 97, (2, 9))
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        kept = dict(attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert torch.equal(eager.generate(ids, **kept), ours.generate(ids, **kept))
        for model in models:
            model(ids, attention_mask=mask, labels=ids.masked_fill(mask.cumsum(-1) < 2, -100)).loss.backward()
        for a, b in zip(eager.parameters(), ours.parameters()):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)
        import tessera.torch
        print(tessera.__file__, tessera.torch._ops.has_binding, len(calls))
        """, packed)
    layers, tokens = 2, 6
    assert text.splitlines()[-1] == f"{packed}/build/torch-universal/tessera/__init__.py True {layers * (tokens + 1)}"


def test_the_example():
    text = door_examples.printed_alone("hub_kernel")
    theirs, ours, again = door_examples.rows(text, "tokens")
    assert theirs == ours == again
    assert door_examples.calls(text) == [0, 2 * 8, 0]  # layers, tokens
    assert "/build/torch-universal/tessera/__init__.py" in text.splitlines()[-1]


def test_another_version_in_the_process_is_one_error(packed, tmp_path):
    metadata = json.loads((packed / "build/torch-universal/metadata.json").read_text())
    assert metadata["tessera-version"] == tessera.__version__
    text = run("""if True:
        import kernels, sys, types
        sys.modules["tessera"] = types.ModuleType("tessera")
        sys.modules["tessera"].__version__ = "0.0.9"
        try:
            kernels.get_kernel("someone/attention", version=1)
        except ImportError as error:
            print(error)
        """, packed)
    assert "0.0.9 is imported already" in text and tessera.__version__ in text


def test_of_a_wheel(packed, tmp_path):
    wheel = tmp_path / "tessera_attention-9.8.7-py3-none-any.whl"
    inside = packed / "build" / "torch-universal"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (inside / "tessera").rglob("*"):
            archive.write(path, path.relative_to(inside))
        archive.writestr("tessera_attention-9.8.7.dist-info/METADATA", "")
    made = hub_kernel.pack(tmp_path / "place", wheel)
    assert json.loads((made / "metadata.json").read_text())["id"] == "_tessera_9_8_7"
    assert {p.relative_to(made) for p in made.rglob("*")} == {p.relative_to(inside) for p in inside.rglob("*")
                                                             if "__pycache__" not in p.parts}


def test_errors(packed, tmp_path, capsys):
    assert hub_kernel.main([str(packed)]) == 2
    assert "holds build/torch-universal already" in capsys.readouterr().err
    other = tmp_path / "numpy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("numpy/__init__.py", "")
    with pytest.raises(ValueError, match="must be a wheel of tessera-attention"):
        hub_kernel.pack(tmp_path / "a", other)
    empty = tmp_path / "tessera_attention-1-py3-none-any.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("tessera/__init__.py", "")
    with pytest.raises(ValueError, match="libtessera_torch.so"):
        hub_kernel.pack(tmp_path / "a", empty)
