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


# What TransformerEngine's own tests of attention import, below transformer_engine: those of pytorch/utils.py,
# test_fused_rope.py, and in attention/ test_attention.py, test_kv_cache.py, test_cp_utils.py, run_attention_with_cp.py;
# and what Megatron-Core imports of graphs.
OF_SUITES = {
    "common.recipe": "DelayedScaling Float8CurrentScaling Format Recipe",
    "pytorch": "DotProductAttention InferenceParams MultiheadAttention QuantizedTensor Quantizer TransformerLayer "
               "autocast fp8_autocast fp8_model_init get_device_compute_capability is_bf16_available is_fp8_available "
               "make_graphed_callables quantized_model_init",
    "pytorch.attention": "DotProductAttention InferenceParams RotaryPositionEmbedding",
    "pytorch.attention.dot_product_attention": "_attention_backends",
    "pytorch.attention.dot_product_attention.context_parallel":
        "generate_positional_ids_for_cp get_batch_on_this_cp_rank get_cu_seqlens_on_cp_rank pad_thd_sequences_for_cp",
    "pytorch.attention.dot_product_attention.utils": "AttentionLogging AttentionParams FlashAttentionUtils "
                                                     "check_set_window_size get_attention_backend",
    "pytorch.attention.rope": "RotaryPositionEmbedding apply_fused_qkv_rotary_pos_emb apply_rotary_pos_emb",
    "pytorch.constants": "FP8BwdTensorIdx FP8FwdTensorIdx",
    "pytorch.cpp_extensions": "fused_attn_bwd fused_attn_fwd",
    "pytorch.cpp_extensions.fused_attn": "FusedAttnBackend TORCH_DType fused_attn_bwd fused_attn_fwd",
    "pytorch.distributed": "CudaRNGStatesTracker",
    "pytorch.fp8": "FP8GlobalStateManager fp8_autocast",
    "pytorch.graph": "is_graph_capturing restore_fp8_tensors save_fp8_tensors set_capture_end set_capture_start",
    "pytorch.module.base": "TransformerEngineBaseModule get_dummy_wgrad",
    "pytorch.quantization": "FP8GlobalStateManager get_fp8_te_dtype",
    "pytorch.quantized_tensor": "Quantizer prepare_for_saving restore_from_func_ctx",
    "pytorch.tensor.float8_tensor": "Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor",
    "pytorch.utils": "get_cudnn_version init_method_normal is_bf16_compatible scaled_init_method_normal",
}


@pytest.mark.parametrize("module", OF_SUITES)
def test_what_their_suites_import_is_here(module):
    ours = importlib.import_module(f"tessera.te.{module}")
    assert [name for name in OF_SUITES[module].split() if not hasattr(ours, name)] == []


def test_the_base_of_modules():
    """Programs ask for it by isinstance, and derive modules of their own from it."""
    from tessera.te.common.recipe import DelayedScaling
    from tessera.te.pytorch import DotProductAttention, autocast
    from tessera.te.pytorch.module.base import TransformerEngineBaseModule

    class Own(TransformerEngineBaseModule):
        def forward(self, x):
            self.init_fp8_metadata()
            return self.quantizers["scaling_fwd"][0](x).dequantize()

    assert isinstance(DotProductAttention(2, 8), TransformerEngineBaseModule)
    with autocast(enabled=True, recipe=DelayedScaling(fp8_dpa=True)):
        assert Own()(torch.tensor([1.0, 1.03])).tolist() == [1, 1]  # E4M3: the next is 1.125


def test_gradients_that_stand_for_those_in_main_grad():
    from tessera.te.pytorch.module.base import get_dummy_wgrad
    first, again = (get_dummy_wgrad([2, 3], torch.float16) for _ in range(2))
    assert first.shape == (2, 3) and first.dtype == torch.float16 and first.data_ptr() == again.data_ptr()
    first.fill_(1)
    assert not get_dummy_wgrad([2, 3], torch.float16, zero=True).any() and not first.any()
    others = get_dummy_wgrad([3, 2], torch.float16), get_dummy_wgrad([2, 3], torch.float32)
    assert first.data_ptr() not in [other.data_ptr() for other in others]
