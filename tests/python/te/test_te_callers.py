# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's own callers of its extension, from PyPI's wheel, over tessera's: what they pass by place and
by number arrives. Its files are read into modules that find tessera.te as transformer_engine."""
import importlib
import pkgutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools" / "peers"))
import te_names  # noqa: E402

import tessera.te.transformer_engine_torch as tex  # noqa: E402
import tessera.torch  # noqa: E402


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    try:
        return zipfile.ZipFile(te_names.python_of(tmp_path_factory.mktemp("te")))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"PyPI's transformer_engine {te_names.VERSION} cannot be had: {error}")


@pytest.fixture
def theirs(wheel, monkeypatch):
    """A function of a file's path below transformer_engine/pytorch: the file as a module."""
    package = importlib.import_module("tessera.te")
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", tex)
    pytorch = importlib.import_module("tessera.te.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    for found in pkgutil.walk_packages(pytorch.__path__, "tessera.te.pytorch."):
        if "._" not in found.name:
            monkeypatch.setitem(sys.modules, found.name.replace("tessera.te", "transformer_engine", 1),
                                importlib.import_module(found.name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")

    def load(path):
        name = "transformer_engine.pytorch." + path.removesuffix(".py").replace("/", ".") + "_of_theirs"
        module = types.ModuleType(name)
        module.__package__ = name.rpartition(".")[0]
        exec(compile(wheel.read(f"transformer_engine/pytorch/{path}"), path, "exec"), module.__dict__)
        return module
    return load


@pytest.mark.parametrize("word, cp", [("sbhd", (1, 0)), ("bshd", (2, 1)), ("thd", (2, 0))])
def test_fused_rope(theirs, word, cp):
    rope = theirs("attention/rope.py")
    cu = torch.tensor([0, 8, 24, 32], dtype=torch.int32) if word == "thd" else None
    x = torch.randn({"sbhd": (16, 2, 3, 16), "bshd": (2, 16, 3, 16), "thd": (16, 3, 16)}[word])
    for interleaved in (False, True):
        freqs = rope.RotaryPositionEmbedding(16, 0.5, interleaved=interleaved)(64)
        found = []
        for fused in (False, True):  # in PyTorch, and by tex
            leaf = x.clone().requires_grad_()
            out = rope.apply_rotary_pos_emb(leaf, freqs, tensor_format=word, interleaved=interleaved, fused=fused,
                                            cu_seqlens=cu, cp_size=cp[0], cp_rank=cp[1])
            found.append((out, *torch.autograd.grad(out.square().sum() + out.sum(), leaf)))
        for plain, ours in zip(*found):
            torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("bias, kind, window", [("no_bias", "vanilla", (-1, -1)), ("no_bias", "learnable", (4, 0)),
                                                ("post_scale_bias", "vanilla", (-1, 0))])
def test_fused_attn(theirs, bias, kind, window):
    fused = theirs("cpp_extensions/fused_attn.py")
    q, k, v, do = (torch.randn(2, 8, 4, 16) for _ in range(4))
    score = torch.randn(1, 4, 8, 8) if bias != "no_bias" else None
    offset = torch.randn(1, 4, 1, 1) if kind == "learnable" else None
    cu = torch.tensor([0, 8, 16], dtype=torch.int32)
    backend = fused.FusedAttnBackend["F16_arbitrary_seqlen"]
    words = dict(attn_scale=0.2, qkv_layout="bshd_bshd_bshd", o_format="bshd", attn_bias_type=bias,
                 attn_mask_type="causal", softmax_type=kind, window_size=window, bottom_right_diagonal=False)
    out, aux, max_logit = fused.fused_attn_fwd(True, 8, 8, cu, cu, q, k, v, q.dtype, backend, score,
                                               softmax_offset=offset, return_max_logit=True, **words)
    *grads, = fused.fused_attn_bwd(8, 8, cu, cu, q, k, v, out, do, q.dtype, aux, backend, do_format="bshd",
                                   dqkv_layout="bshd_bshd_bshd", deterministic=True, **words)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *(x for x in (score, offset) if x is not None))]
    more = dict(bias=leaves[3]) if score is not None else dict(sink=leaves[3].view(-1)) if offset is not None else {}
    want, want_max = tessera.torch.attention(*leaves[:3], softmax_scale=0.2, causal=True, align="top_left",
                                             return_max_logit=True, **more,
                                             **({"window": (4, 0)} if window[0] >= 0 else {}))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(max_logit, want_max)
    for got, expected in zip((x for x in grads if x is not None), torch.autograd.grad(want, leaves, do), strict=True):
        torch.testing.assert_close(got, expected)
