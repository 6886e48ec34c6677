# SPDX-License-Identifier: Apache-2.0
"""examples/jax: the GPT trains to PyTorch's losses with the same weights, packed documents agree."""
import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

import jax_device  # noqa: E402, F401  (products in fp32)

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def load(path: str):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_")[:-3], EXAMPLES / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_losses_are_those_of_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    theirs, ours = load("torch/train_gpt.py"), load("jax/train_gpt.py")
    size = ["--width", "32", "--heads", "2", "--layers", "2", "--context", "32", "--batch", "4", "--steps", "12",
            "--lr", "2e-3"]  # what GPUs have other defaults of
    args = theirs.parse([*size, "--device", "cpu"])
    text = theirs.standard_library()
    torch.manual_seed(0)
    state = theirs.GPT(args.width, args.heads, args.layers, args.context, None).state_dict()
    np.savez(tmp_path / "weights.npz", **{name: x.numpy() for name, x in state.items()})
    starts = torch.randint(len(text) - args.context - 1, (args.steps, args.batch),
                           generator=torch.Generator().manual_seed(1))
    np.save(tmp_path / "starts.npy", starts.numpy())
    expected, _, _ = theirs.train("tessera", args, text)
    results = ours.main([*size, "--weights", str(tmp_path / "weights.npz"), "--starts",
                         str(tmp_path / "starts.npy"), "--mesh", "1,1"])
    for losses, _ in results.values():
        np.testing.assert_allclose(losses, expected, rtol=2e-4)
    assert expected[-1] < expected[0] - 0.2


def test_packed_documents_agree():
    worst, programs = load("jax/packed.py").main()
    assert worst < 1e-5 and programs == [1, 1, 1]
