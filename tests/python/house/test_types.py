# SPDX-License-Identifier: Apache-2.0
"""What static type checkers say to those who call tessera: nothing of good code, and each mistake of bad code;
and the types of results.

Frameworks are stubs of a few lines, so that a run takes seconds and needs none of them."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera

PACKAGE = Path(__file__).resolve().parents[3] / "python"
STUB = """from typing import Any, Callable, TypeVar
_F = TypeVar("_F", bound=Callable[..., Any])
class {array}:
    @property
    def shape(self) -> tuple[int, ...]: ...
    def sum(self) -> "{array}": ...
def __getattr__(name: str) -> Any: ...
"""
# front end -> (module, the module of its arrays, the name of an array there)
FRONT_ENDS = {"numpy": ("tessera", "numpy", "ndarray"), "torch": ("tessera.torch", "torch", "Tensor"),
              "jax": ("tessera.jax", "jax", "Array"), "paddle": ("tessera.paddle", "paddle", "Tensor")}
GOOD = """import {module}
import {library}

def run(q: {library}.{array}, mask: {library}.{array}) -> {library}.{array}:
    o = {module}.attention(q, q, q, causal=True, window=(8, 0), align="top_left", keep=mask)
    o, lse = {module}.attention(q, q, q, layout=("bshd", "sbhd"), softcap=20.0, return_lse=True)
    dq, dk, dv = {module}.attention_backward(o, q, q, q, o, lse, causal=True)
    g = {module}.attention_backward(o, q, q, q, o, lse, grads=("dq", "dbias"), bias=mask)
    if g.dbias is not None:
        g.dbias.sum()
    why = {module}.explain(q, q, q, causal=True)
    text: str | None = why.backend
    return dq.sum() if text else g.dq.sum()

def shape(q: {library}.{array}) -> tuple[int, ...]:
    return {module}.attention(q, q, q, backend="cpu").shape
"""
BAD = """import {module}
import {library}

def run(q: {library}.{array}) -> None:
    {module}.attention(q, q, q, causel=True)  # WRONG
    {module}.attention("a", q, q)  # WRONG
    {module}.attention(q, q)  # WRONG
    {module}.attention(q, q, q, causal="yes")  # WRONG
    {module}.attention(q, q, q, layout="bhds")  # WRONG
    {module}.attention(q, q, q, window=3)  # WRONG
    {module}.attention(q, q, q).lse  # WRONG
    {module}.attention_backward(q, q, q, q, q)  # WRONG
    {module}.attention_backward(q, q, q, q, q, q, return_lse=True)  # WRONG
    {module}.attention_backward(q, q, q, q, q, q).dw  # WRONG
    {module}.explain(q, q, q, causel=True)  # WRONG
    {module}.explain(q, q, q).backends  # WRONG
    {module}.attentoin(q, q, q)  # WRONG
"""
# other library -> a good and a bad file of its names
OTHERS = {
    "flash_attn": ("""import torch
from tessera.flash_attn import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func,
                                flash_attn_varlen_func, flash_attn_with_kvcache)

def run(q: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    o = flash_attn_func(q, q, q, 0.0, None, causal=True, window_size=(8, 0), alibi_slopes=q)
    o = flash_attn_varlen_func(o, q, q, cu, cu, 16, 16, causal=True, block_table=cu)
    o, lse, weights = flash_attn_func(q, q, q, return_attn_probs=True)
    o, lse = flash_attn_with_kvcache(o, q, q, cache_seqlens=4, return_softmax_lse=True)
    if weights is not None:
        return weights
    return flash_attn_with_kvcache(flash_attn_kvpacked_func(o, lse), q, flash_attn_qkvpacked_func(q), cache_seqlens=cu)
""", """import torch
from tessera.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

def run(q: torch.Tensor, cu: torch.Tensor) -> None:
    flash_attn_func(q, q, q, causel=True)  # WRONG
    flash_attn_func("a", q, q)  # WRONG
    flash_attn_func(q, q)  # WRONG
    flash_attn_func(q, q, q, window_size=8)  # WRONG
    flash_attn_func(q, q, q).lse  # WRONG
    flash_attn_varlen_func(q, q, q, cu, cu)  # WRONG
    flash_attn_with_kvcache(q, q, q, cache_seqlens=[1, 2])  # WRONG
"""),
    "flash_attn_3": ("""import torch
from tessera.flash_attn_interface import Refused, flash_attn_func, flash_attn_varlen_func

def run(q: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    try:
        o, lse = flash_attn_func(q, q, q, return_attn_probs=True)
    except Refused:
        lse = q
    return flash_attn_varlen_func(flash_attn_func(q, lse, q, attention_chunk=4), q, q, cu, cu, 16, 16, seqused_k=cu)
""", """import torch
from tessera.flash_attn_interface import flash_attn_func

def run(q: torch.Tensor) -> None:
    flash_attn_func(q, q, q, dropout_p=0.1)  # WRONG
    flash_attn_func(q, q, q, softcap="20")  # WRONG
"""),
    "flash_attn_4": ("""import torch
from tessera.flash_attn.cute import flash_attn_func

def run(q: torch.Tensor) -> torch.Tensor:
    o, lse = flash_attn_func(q, q, q, causal=True, window_size=(4, None), learnable_sink=q, return_lse=True)
    return o if lse is None else lse
""", """import torch
from tessera.flash_attn.cute import flash_attn_func

def run(q: torch.Tensor) -> None:
    flash_attn_func(q, q, q, sink=q)  # WRONG
    flash_attn_func(q, q, q).shape  # WRONG
"""),
    "xformers_and_sdpa": ("""import torch
import tessera.xformers as xops
from tessera.torch import scaled_dot_product_attention

def run(q: torch.Tensor) -> torch.Tensor:
    o = xops.memory_efficient_attention(q, q, q, attn_bias=q, p=0.1)
    return scaled_dot_product_attention(o, q, q, is_causal=True)
""", """import torch
import tessera.xformers as xops
from tessera.torch import scaled_dot_product_attention

def run(q: torch.Tensor) -> None:
    xops.memory_efficient_attention(q, q, q, causal=True)  # WRONG
    scaled_dot_product_attention(q, q, q, causal=True)  # WRONG
    scaled_dot_product_attention(q, q)  # WRONG
"""),
    "jax_nn": ("""import jax
from tessera.jax.nn import dot_product_attention

def run(q: jax.Array) -> None:
    dot_product_attention(q, q, q, is_causal=True, local_window_size=(4, 0))
""", """import jax
from tessera.jax.nn import dot_product_attention

def run(q: jax.Array) -> None:
    dot_product_attention(q, q, q, causal=True)  # WRONG
    dot_product_attention(q, q)  # WRONG
"""),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with a good and a bad file of each front end, and stubs of the frameworks in stubs/."""
    folder = tmp_path_factory.mktemp("types")
    for name, (module, library, array) in FRONT_ENDS.items():
        stub = folder / "stubs" / library
        stub.mkdir(parents=True)
        (stub / "__init__.pyi").write_text(STUB.format(array=array))
        for kind, text in (("good", GOOD), ("bad", BAD)):
            (folder / f"{kind}_{name}.py").write_text(text.format(module=module, library=library, array=array))
    for name, (good, bad) in OTHERS.items():
        (folder / f"good_{name}.py").write_text(good)
        (folder / f"bad_{name}.py").write_text(bad)
    return folder


def wrong_lines(folder):
    """(file, line) of every mistake."""
    return {(path.name, number) for path in folder.glob("*.py")
            for number, line in enumerate(path.read_text().splitlines(), 1) if "# WRONG" in line}


def test_mypy(sources):
    pytest.importorskip("mypy")
    # What is installed has no stub here, is read for a minute and says nothing of these files.
    (sources / "mypy.ini").write_text(f"[mypy]\nmypy_path = {PACKAGE}:{sources}/stubs\nstrict = True\n"
                                      "follow_imports = silent\nno_site_packages = True\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--no-color-output",
                           *[path.name for path in sorted(sources.glob("*.py"))]],
                          cwd=sources, capture_output=True, text=True, timeout=300, check=False)
    found = {(name, int(line)) for name, line in re.findall(r"^(\w+\.py):(\d+): error:", done.stdout, re.M)}
    assert found == wrong_lines(sources), done.stdout + done.stderr


def test_pyright(sources):
    if shutil.which("pyright", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("pyright is not installed")
    (sources / "pyrightconfig.json").write_text(json.dumps(
        {"extraPaths": [str(PACKAGE)], "stubPath": "stubs", "include": ["*.py"], "typeCheckingMode": "standard"}))
    done = subprocess.run([sys.executable, "-m", "pyright", "--outputjson"], cwd=sources, capture_output=True,
                          text=True, timeout=300, check=False)
    said = json.loads(done.stdout)["generalDiagnostics"]
    found = {(Path(entry["file"]).name, entry["range"]["start"]["line"] + 1) for entry in said
             if entry["severity"] == "error"}
    assert found == wrong_lines(sources), said


@pytest.mark.parametrize("stub", sorted(PACKAGE.rglob("*.pyi")), ids=lambda path: path.parent.name)
def test_a_stub_has_the_names_and_defaults_of_its_module(stub):
    """Where a function has several forms, its first in the stub is that of the source."""
    def of(path):
        functions = {}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                given = node.args
                functions.setdefault(node.name, ([x.arg for x in [*given.args, *given.kwonlyargs]],
                                                 [ast.unparse(x).removeprefix("torch.") for x in given.defaults]))
        return functions
    described = of(stub)
    assert described == of(stub.with_suffix(".py")) and len(described) > 3


def test_gradients_unpack():
    """Those that were asked for, in the order of the members, whatever that of grads is."""
    q = k = v = np.zeros((2, 5, 4, 8), np.float32)
    o, lse = tessera.attention(q, k, v, return_lse=True)
    g = tessera.attention_backward(o, q, k, v, o, lse)
    dq, dk, dv = g
    assert dq is g.dq and dk is g.dk and dv is g.dv
    g = tessera.attention_backward(o, q, k, v, o, lse, grads=("dbias", "dk"), bias=np.zeros((1, 1, 5, 5), np.float32))
    dk, dbias = g
    assert dk is g.dk and dbias is g.dbias and g.dq is None
