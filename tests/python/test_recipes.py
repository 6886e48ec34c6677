# SPDX-License-Identifier: Apache-2.0
"""docs/recipes.md, walked: a backend is a folder and two lines, in a copy of the sources."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "lib"

CMAKE = "tessera_room(dummy backend.cc)\n"
HEADER = """#pragma once
#include "core/backend.h"
namespace tessera::dummy {
const Backend& backend();
}
"""
SOURCE = """#include "dummy/backend.h"

#include <cstring>

namespace tessera::dummy {
namespace {

// Computes nothing but the right answer to sk = 0.
struct Zeros final : Plan {
  int64_t workspace_bytes(const Problem&, int) const override { return 0; }
  Status run(const Problem& p, const Buffers& b, const Device&) const override {
    const Tensor& o = p.tensor[TESSERA_O];
    std::memset(b.data[TESSERA_O], 0, o.extent[0] * o.extent[1] * o.extent[2] * o.extent[3] * 4);
    auto* lse = static_cast<float*>(b.data[TESSERA_LSE]);
    for (int64_t i = 0; i < o.extent[0] * o.extent[1] * o.extent[2]; ++i) lse[i] = -1.0f / 0.0f;
    return {};
  }
};

class Dummy final : public Backend {
 public:
  std::string_view name() const override { return "dummy"; }
  Support supports(const Problem& p, const Device& device) const override {
    Support support;
    support.require(device.kind == TESSERA_CPU, ReasonId::kDevice, Remedy::kDeviceCpu,
                    [] { return std::string("tensors are on a GPU"); });
    support.require(p.tensor[TESSERA_Q].dtype == TESSERA_FP32, ReasonId::kDtype, Remedy::kUseFp32,
                    [] { return std::string("dtype: must be fp32"); });
    support.require(p.tensor[TESSERA_K].extent[1] == 0, ReasonId::kSize, Remedy::kNone,
                    [] { return std::string("sk: must be 0"); });
    return support;
  }
  Problem canonical(const Problem& p) const override { return p; }
  Result<std::unique_ptr<Plan>> plan(const Problem&, const Device&) const override {
    return std::unique_ptr<Plan>(std::make_unique<Zeros>());
  }
};

}  // namespace

const Backend& backend() {
  static const Dummy dummy;
  return dummy;
}

}  // namespace tessera::dummy
"""


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True,
                          env=environment | {"PYTHONPATH": str(cwd / "python")})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def insert(path, before, line):
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, line + "\n" + before))


def link(tree):
    """libtessera as CMake links it, with the objects of untouched rooms taken from build/lib."""
    commands = run("ninja", "-C", "build", "-t", "commands", "libtessera.so", cwd=tree)
    line, = [line for line in commands.splitlines() if " -shared " in line]
    command = line.split("&&")[1]
    words = [str(BUILT / word) if word.endswith(".o") and not (tree / "build" / word).exists()
             else word for word in shlex.split(command)]
    assert sum(word.startswith(str(BUILT)) for word in words) > 20, command
    run(*words, cwd=tree / "build")
    library, = (tree / "build").glob("libtessera.so.*.*.*")
    (tree / "build" / "lib").mkdir()
    (tree / "build" / "lib" / "libtessera.so").symlink_to(library)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    if not all(map(shutil.which, ("cmake", "ninja"))) or not (BUILT / "build.ninja").exists():
        pytest.skip("needs CMake, ninja and a build in build/lib")
    run("cmake", "--build", BUILT, "--target", "tessera", cwd=ROOT)  # its objects are used below
    tree = tmp_path_factory.mktemp("recipe") / "tessera"
    for folder in ("src", "include", "cmake", "tools", "python/tessera"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "CMakeLists.txt", tree)

    (tree / "src" / "dummy").mkdir()
    for name, text in (("CMakeLists.txt", CMAKE), ("backend.h", HEADER), ("backend.cc", SOURCE)):
        (tree / "src" / "dummy" / name).write_text(text)
    backends = tree / "src" / "backends.cc"
    insert(backends, "#if TESSERA_WITH_CUDA\n#include", '#include "dummy/backend.h"')
    insert(backends, "    &cpu::backend(),", "    &dummy::backend(),")

    run("cmake", "-G", "Ninja", "-B", "build", "-S", ".", "-DCMAKE_BUILD_TYPE=Release",
        "-DTESSERA_TESTS=OFF", "-DTESSERA_TORCH=OFF", cwd=tree)
    run("cmake", "--build", "build", "--target", "tessera_dummy", "tessera_door", cwd=tree)
    link(tree)
    return tree


def explain(tree, case):
    answer, = json.loads(run(sys.executable, "-m", "tessera", "explain", "--json", case, cwd=tree))
    return {backend["name"]: backend for backend in answer["backends"]}


def test_explain_gives_the_new_backend_its_place_and_its_reasons(tree):
    backends = explain(tree, "bwd bf16 b=1 s=8 h=1 d=8")
    assert list(backends).index("dummy") == list(backends).index("cpu") - 1
    assert [reason["id"] for reason in backends["dummy"]["reasons"]] == ["dtype", "size"]


def test_the_new_backend_is_chosen_and_run(tree):
    code = ("import numpy as np, tessera; print(tessera.__file__); x = np.ones((1, 4, 2, 8), 'f');"
            "o, lse = tessera.attention(x, x[:, :0], x[:, :0], backend='dummy', return_lse=True);"
            "assert not o.any() and np.isneginf(lse).all()")
    assert str(tree) in run(sys.executable, "-c", code, cwd=tree)


def test_its_layers_are_in_order_and_wrong_ones_are_seen(tree):
    run(sys.executable, "tools/check_layers.py", cwd=tree)
    (tree / "src" / "dummy" / "wrong.h").write_text('#include "cpu/pool.h"\n')
    done = subprocess.run([sys.executable, "tools/check_layers.py"], cwd=tree, capture_output=True,
                          text=True)
    assert done.returncode == 1 and 'src/dummy/wrong.h includes "cpu/pool.h"' in done.stdout
