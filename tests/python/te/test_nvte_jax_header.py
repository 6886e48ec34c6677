# SPDX-License-Identifier: Apache-2.0
"""tessera_nvte_jax.h beside pybind11 itself: a module over it compiles, and its functions answer Python as those of
TransformerEngine's JAX extension do."""
import importlib.util
import math
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import tessera

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = ROOT / "build/lib"
SOURCE = Path(__file__).with_name("nvte_jax_module.cc")
PYTHON = Path(sysconfig.get_path("include"))

compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = [
    pytest.mark.skipif(compiler is None, reason="no C++ compiler in PATH"),
    pytest.mark.skipif(not (PYTHON / "Python.h").exists(), reason=f"no Python.h in {PYTHON}"),
    pytest.mark.skipif(not (LIBRARIES / "libtessera_nvte.so").exists(), reason="libtessera_nvte is not built"),
]


def include_of_pybind11() -> Path:
    """PyPI's, else the one inside PyTorch."""
    for package in ("pybind11", "torch"):
        found = importlib.util.find_spec(package)
        include = found and Path(found.origin).parent / "include"
        if include and (include / "pybind11/pybind11.h").exists():
            return include
    pytest.skip("pybind11 is not installed")


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    place = tmp_path_factory.mktemp("module") / f"nvte_jax_module{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = ["-I", ROOT / "include", "-isystem", include_of_pybind11(), "-isystem", PYTHON]
    libraries = [f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES.resolve()}", "-ltessera_nvte", "-ltessera"]
    subprocess.run([compiler, "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *include, SOURCE,
                    "-fvisibility=hidden", "-o", place, *libraries], check=True)
    spec = importlib.util.spec_from_file_location("nvte_jax_module", place)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def sizes(module, backward: bool, b, s, h, d, scale):
    """(shape, dtype) of a pass's workspace: causal, fp32, dense."""
    arguments = [b, 0, s, s, h, h, 0, d, d, scale, 0.0, module.Bias.NONE, module.Mask.CAUSAL, module.Softmax.VANILLA,
                 module.Layout.BSHD_BSHD_BSHD, module.DType.kFloat32, True]
    if backward:
        return module.get_fused_attn_bwd_workspace_sizes(*arguments, False, 1, -1, 0, False)
    return module.get_fused_attn_fwd_workspace_sizes(*arguments, 1, -1, 0, False)


def test_backends_are_values_of_the_enum(module):
    def backend(dtype):
        return module.get_fused_attn_backend(
            True, dtype, dtype, module.Layout.T3HD, module.Bias.NONE, module.Mask.CAUSAL, module.Softmax.VANILLA, 0.0,
            8, 8, 128, 128, 64, 64, -1, 0, False)
    assert backend(module.DType.kBFloat16) == module.Backend.ARBITRARY
    assert backend(module.DType.kInt32) == module.Backend.NONE


@pytest.mark.parametrize("backward", [False, True])
def test_sizes_are_tuples_of_a_shape_and_a_dtype(module, backward):
    answer = sizes(module, backward, 2, 64, 4, 32, 0.2)
    assert type(answer) is tuple and len(answer) == 2
    (count,), dtype = answer
    assert count >= 1 and dtype == module.DType.kByte


def test_a_forward_pass_runs_in_the_workspace(module):
    b, s, h, d = 2, 48, 3, 16
    scale = 1 / math.sqrt(d)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((b, s, h, d), np.float32) for _ in range(3))
    o, stats = np.full_like(q, np.nan), np.full((b, h, s, 1), np.nan, np.float32)
    cu_seqlens, rng_state = np.arange(b + 1, dtype=np.int32) * s, np.zeros(2, np.int64)
    shape, dtype = sizes(module, False, b, s, h, d, scale)
    workspace = np.zeros(shape, np.uint8)
    module.forward(b, s, h, d, scale, *(x.ctypes.data for x in (q, k, v, o, stats, cu_seqlens, rng_state, workspace)),
                   shape, dtype)
    expected_o, expected_lse = tessera.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(o, expected_o)
    np.testing.assert_array_equal(stats[..., 0], expected_lse)


def test_wrong_types_are_type_errors(module):
    with pytest.raises(TypeError, match="get_fused_attn_backend"):
        module.get_fused_attn_backend(True)
