# SPDX-License-Identifier: Apache-2.0
"""docs/recipes.md, walked in copies of the sources: a backend is a folder and two lines; a
positional mask is 12 places, and no kernel changes; a keyword is a row."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import every_keyword
import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILT = ROOT / "build" / "lib"

CMAKE = "tessera_room(dummy backend.cc)\n"
HEADER = """#pragma once
#include "core/choose/backend.h"
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
    replace(path, before, line + "\n" + before)


def replace(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def copy_sources(tree, *more):
    for folder in ("src", "include", "cmake", "tools", "python", *more):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    return tree


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
    tree = copy_sources(tmp_path_factory.mktemp("recipe") / "tessera")
    (tree / "src" / "dummy").mkdir()
    for name, text in (("CMakeLists.txt", CMAKE), ("backend.h", HEADER), ("backend.cc", SOURCE)):
        (tree / "src" / "dummy" / name).write_text(text)
    backends = tree / "src" / "backends.cc"
    insert(backends, "#if TESSERA_WITH_CUDA\n#include", '#include "dummy/backend.h"')
    replace(backends, "&cpu::backend(),", "&dummy::backend(), &cpu::backend(),")

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


# A chunked mask: a query sees the keys of its chunk, floor(i / c) == floor(j / c); with causal up
# to itself.
# (file, lines that stand there, lines that are to stand there): one row a place.
CHUNKED = (
    ("include/tessera.h", "  int64_t reserved[FIELDS];  /* 0 */\n  tessera_tensor",
     "  int64_t chunk;  /* 0 = none */\n  int64_t reserved[FIELDS];  /* 0 */\n  tessera_tensor"),
    ("python/tessera/_lib.py", '("shift", c_int64), ("reserved", c_int64 * FIELDS)',
     '("shift", c_int64), ("chunk", c_int64), ("reserved", c_int64 * FIELDS)'),
    ("src/core/problem/fields.def", "TESSERA_INTEGER(buffers, sm_margin, 0)",
     "TESSERA_INTEGER(problem, chunk, 0)\nTESSERA_INTEGER(buffers, sm_margin, 0)"),
    ("src/core/validate/validate.cc", "  const bool alibi = given(p, TESSERA_ALIBI_SLOPES);\n",
     "  if (p.chunk < 0) return invalid(\"chunk=%\" PRId64 \": must be 0 (none) or more\", p.chunk);\n"
     "  const bool alibi = given(p, TESSERA_ALIBI_SLOPES);\n"),
    ("src/core/mask/band.h",
     "  Int left = -1, right = -1;  // -1 = unbounded; causal is right = 0\n\n"
     "  bool operator==(const BasicWindow&) const = default;\n  template <typename To>\n"
     "  TESSERA_HOST_DEVICE BasicWindow<To> as() const {\n"
     "    return {static_cast<To>(left), static_cast<To>(right)};",
     "  Int left = -1, right = -1;  // -1 = unbounded; causal is right = 0\n"
     "  Int chunk = 0;              // 0 = none\n\n"
     "  bool operator==(const BasicWindow&) const = default;\n  template <typename To>\n"
     "  TESSERA_HOST_DEVICE BasicWindow<To> as() const {\n"
     "    return {static_cast<To>(left), static_cast<To>(right), static_cast<To>(chunk)};"),
    ("src/core/mask/band.h",
     "Int hi(Int i) const { return clamp(shift + window.right + 1 + i); }\n"
     "  // lo(i) of a row that sees a key; of another it may lie past len_k.\n"
     "  TESSERA_HOST_DEVICE Int first_key(Int i) const { return greatest(shift - window.left + i, 0); }",
     "Int hi(Int i) const {\n    const Int p = i + shift, hi = p + window.right + 1, chunk = window.chunk;\n"
     "    const Int end = p < 0 ? 0 : (p / greatest(chunk, 1) + 1) * chunk;\n"
     "    return clamp(chunk > 0 ? least(hi, end) : hi);\n  }\n"
     "  // lo(i) of a row that sees a key; of another it may lie past len_k.\n"
     "  TESSERA_HOST_DEVICE Int first_key(Int i) const {\n    const Int p = i + shift, chunk = window.chunk;\n"
     "    const Int first = chunk > 0 && p > 0 ? p / chunk * chunk : 0;\n"
     "    return greatest(first, p - window.left);\n  }"),
    ("src/core/mask/band.h",
     "Int first(Int j) const { return greatest(j - shift - window.right, 0); }\n"
     "  TESSERA_HOST_DEVICE Int end(Int j) const { return least(j - (shift - window.left - 1), len_q); }",
     "Int first(Int j) const {\n    const Int first = greatest(j - shift - window.right, 0), chunk = window.chunk;\n"
     "    return chunk > 0 ? greatest(first, j / chunk * chunk - shift) : first;\n  }\n"
     "  TESSERA_HOST_DEVICE Int end(Int j) const {\n"
     "    const Int end = least(j - (shift - window.left - 1), len_q), chunk = window.chunk;\n"
     "    return chunk > 0 ? least(end, (j / chunk + 1) * chunk - shift) : end;\n  }"),
    ("src/core/mask/sequence.h", ".right = has(p, TESSERA_CAUSAL) ? 0 : side(p.window_right)}",
     ".right = has(p, TESSERA_CAUSAL) ? 0 : side(p.window_right),\n"
     "                     .chunk = static_cast<Int>(p.chunk)}"),
    ("src/conformance/reference/rows.h", "           (right_ < 0 || j - at <= right_);",
     "           (right_ < 0 || j - at <= right_) &&\n"
     "           (p_.chunk == 0 || (at >= 0 && at / p_.chunk == j / p_.chunk));"),
    ("src/core/case/case.h", "  bool window = false;\n",
     "  bool window = false;\n  int64_t chunk = 0;\n"),
    ("src/core/case/tokens.cc", '    flag<&Case::causal, TESSERA_CAUSAL>("causal", "causal"),\n',
     '    flag<&Case::causal, TESSERA_CAUSAL>("causal", "causal"),\n'
     '    count<&Case::chunk, &Problem::chunk>("chunk", "a number of keys of at least 1", "chunk=16"),\n'),
    ("python/tessera/_call/_keywords.py", "    seqlens_q: Annotated[",
     "    chunk: Annotated[int, Option(\n"
     '        values="int", default=0, check=lambda a, name, value: a.integer(name, value),\n'
     '        encode=lambda n: (0, n or 0), decode=lambda flags, n: n, fields=("chunk",),\n'
     '        doc="Query i sees no key outside its chunk of this many keys. 0: all.")]\n'
     "    seqlens_q: Annotated["),
)

# Dense, decoding, packed, pages, top-left and bottom-right, with a window, few rows and many; and
# the mask alone, whose diagonal and whose hidden keys nothing else tells of.
CHUNKED_CASES = """
fwd fp32 b=2 s=129 hq=4 hk=2 d=64 causal chunk=16
fwd bf16 b=1 s=257 h=3 d=80 causal window=20,0 chunk=48 softcap=20 max_logit
fwd bf16 b=3 sq=1 sk=600 hq=8 hk=2 d=128 causal align=bottom_right chunk=64 lens_k=random:4
fwd fp16 b=4 sq=5 sk=300 hq=8 hk=2 d=64 page=16 causal align=bottom_right chunk=7 lens_k=random:4
fwd fp32 b=4 s=257 h=4 d=65 layout=thd lens=random:2 gaps=3 causal chunk=100 dropout=0.2 seed=5
fwd fp32 b=1 sq=200 sk=130 h=2 d=32 causal align=bottom_right chunk=33 poison
fwd fp32 b=1 sq=130 sk=200 h=2 d=32 causal align=top_left chunk=1
bwd fp32 b=2 s=129 hq=6 hk=2 d=64 causal chunk=16 dlse
bwd bf16 b=2 sq=200 sk=170 hq=4 hk=1 d=72 causal align=bottom_right chunk=50 bias=post/q grads=dbias
bwd fp16 b=3 s=165 h=2 d=40 layout=thd lens=random:2 causal chunk=64
bwd fp32 b=3 sq=33 sk=65 hq=2 hk=1 d=32 page=7 lens_k=random:8 causal align=bottom_right chunk=8
fwd fp32 b=1 s=129 h=2 d=32 chunk=16
fwd fp32 b=2 sq=130 sk=200 h=2 d=32 align=bottom_right chunk=33 max_logit
fwd bf16 b=2 sq=200 sk=130 h=2 d=64 align=bottom_right chunk=33 poison
fwd fp16 b=4 sq=5 sk=300 hq=8 hk=2 d=64 page=16 align=bottom_right chunk=7 lens_k=random:4
fwd fp32 b=4 s=257 h=4 d=65 layout=thd lens=random:2 align=top_left chunk=100
bwd fp32 b=1 s=150 h=2 d=40 chunk=16 bias=post/q grads=dbias
bwd fp32 b=2 sq=150 sk=170 hq=4 hk=2 d=40 align=bottom_right chunk=50 bias=post/q grads=dbias poison
bwd bf16 b=2 sq=170 sk=90 hq=4 hk=2 d=64 align=bottom_right chunk=24 dlse
"""

# Band against the mask's rule, in 64 bits and in 32; and the field's way from a case to a Band.
CHUNKED_BAND = """
#include <algorithm>
#include <cstdio>
#include <tuple>

#include "conformance/conformance_case.h"
#include "core/mask/narrow.h"
#include "core/mask/sequence.h"

template <typename Int>
bool is_right(Int len_q, Int len_k, Int chunk, Int left, Int side, Int bottom_right) {
  const tessera::BasicBandRule<Int> rule{
      .bottom_right = bottom_right, .window = {.left = left, .right = side, .chunk = chunk}};
  const auto band = tessera::BasicBand<Int>::of(rule, len_q, len_k);
  bool right = rule.hides() == (chunk > 0 || left >= 0 || side >= 0);
  Int lo = 0, hi = 0;
  for (Int i = 0; i < len_q; ++i) {
    right &= lo <= band.lo(i) && hi <= band.hi(i);
    lo = band.lo(i), hi = band.hi(i);
    const Int p = i + (bottom_right ? len_k - len_q : 0);
    for (Int j = 0; j < len_k; ++j) {
      const bool visible = (side < 0 || j <= p + side) && (left < 0 || j >= p - left) &&
                           (chunk == 0 || (p >= 0 && p / chunk == j / chunk));
      right &= band.row(i).contains(j) == visible;
      right &= (band.first(j) <= i && i < band.end(j)) == visible;
      right &= band.rows(j, j + 1).contains(i) == visible;
    }
  }
  return right;
}

int main() {
  for (int len_q = 0; len_q < 12; ++len_q)
    for (int len_k = 0; len_k < 12; ++len_k)
      for (int chunk = 0; chunk < 8; ++chunk)
        for (int left = -1; left < 5; ++left)
          for (int side = -1; side < 3; ++side)
            for (int bottom_right = 0; bottom_right < 2; ++bottom_right)
              if (!is_right<int32_t>(len_q, len_k, chunk, left, side, bottom_right) ||
                  !is_right<int64_t>(len_q, len_k, chunk, left, side, bottom_right))
                return std::printf("%d %d %d %d %d %d\\n", len_q, len_k, chunk, left, side,
                                   bottom_right), 1;
  // On a GPU the band of positions is found in 64 bits and read in 32.
  const auto wide = tessera::Band::of({.bottom_right = 1, .window = {.chunk = 16}}, 30, 40);
  if (tessera::narrowed(wide).row(9).lo != 16 || tessera::narrowed(wide).row(9).hi != 32) return 2;
  for (const auto& [text, lo, hi] : {std::tuple{"s=40 causal chunk=16", 16, 21},
                                     std::tuple{"s=40 chunk=16", 16, 32},
                                     std::tuple{"sq=24 sk=40 align=bottom_right chunk=16", 32, 40}}) {
    auto made = tessera::ConformanceCase::create(std::string("fwd fp32 b=1 h=1 d=8 ") + text);
    if (!made.ok()) return 3;
    const auto c = std::move(made).value();
    const auto problem = tessera::normalised(c->problem());
    const auto row = tessera::sequence_of(problem, c->buffers(), 0).band.row(20);
    if (row.lo != lo || row.hi != hi) return std::printf("%s\\n", text), 4;
  }
  return 0;
}
"""

# The keyword, by itself and as cases pass it; and the mask's word in messages.
CHUNKED_CALLS = """
import numpy as np
import tessera
from tessera.cli.conformance import Case

x = np.random.default_rng(0).normal(size=(1, 48, 2, 8)).astype("f")
keep = np.arange(48)[:, None] // 16 == np.arange(48) // 16
np.testing.assert_allclose(tessera.attention(x, x, x, chunk=16), tessera.attention(x, x, x, keep=keep), atol=1e-6)
assert " chunk=16" in tessera.explain(x, x, x, chunk=16).headline
assert Case("fwd fp32 b=1 s=40 h=1 d=8 causal chunk=16").arguments()["chunk"] == 16
for wrong, said in ((dict(chunk=-1), "chunk=-1: must be 0"),
                    (dict(chunk=16, seqlens_k=np.array([9])), "the mask has a diagonal")):
    try:
        tessera.attention(x, x, x, **wrong)
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError(wrong)
"""

# One kernel of each pass: folder and row of its table, what makes it and where that is, and the
# names of the table's types.
CHUNKED_KERNELS = {
    "sm80": (("forward", "d64_lean", "make_lean", "lean", "Tile", "Code"),
             ("decode", "d64_lean", "make_decode", "decode", "Tile", "Code"),
             ("backward", "fused_d64_lean", "make_fused_lean", "fused_lean", "Tile", "Code")),
    "sm90": (("forward", "d64_lean_lone", "make_forward", "kernel", "ForwardTile", "ForwardCode"),
             ("backward/apart", "d64", "make_apart", "kernels", "ApartTile", "ApartCode")),
}


def kernels_of(backend, rows):
    """A CUDA source of these rows, as CMake writes them."""
    text = "".join(f'#include "cuda/{backend}/{folder}/{file}.cuh"\n' for folder, _, _, file, *_ in rows)
    text += f"namespace tessera::cuda::{backend} {{\n"
    for i, (folder, name, make, _, tile, code) in enumerate(rows):
        table = (ROOT / "src" / "cuda" / backend / folder / "table.def").read_text()
        features, columns = re.search(rf"ROW\({name}, (\w+), (.*?)\)", table, re.S).groups()
        text += (f"struct Row_{i} {{\n  static constexpr {tile} kTile{{{columns}}};\n"
                 f"  static constexpr uint32_t kFeatures = {features};\n}};\n"
                 f"extern const {code} code_{i};\n"
                 f"const {code} code_{i} = {make}<__half, Row_{i}>();\n")
    return text + "}\n"


def differing(tree):
    """Files of a copy that are not as in the sources."""
    files = (path.relative_to(tree) for folder in ("src", "include", "python")
             for path in (tree / folder).rglob("*") if path.is_file())
    return {str(path) for path in files if (tree / path).read_bytes() != (ROOT / path).read_bytes()}


@pytest.fixture(scope="module")
def chunked(tmp_path_factory):
    tree = copy_sources(tmp_path_factory.mktemp("chunked") / "tessera")
    header = (tree / "include" / "tessera.h").read_text()
    fields = int(re.search(r"int64_t reserved\[(\d+)\];  /\* 0 \*/\n  tessera_tensor", header)[1])
    for file, old, new in CHUNKED:
        replace(tree / file, old.replace("FIELDS", str(fields)),
                new.replace("FIELDS", str(fields - 1)))
    return tree


def test_a_chunked_mask_changes_what_the_recipe_names_and_no_kernel(chunked):
    recipe = (ROOT / "docs" / "recipes.md").read_text()
    recipe = recipe[recipe.index("## A positional mask"):recipe.index("## A tensor")]
    assert f"{len(CHUNKED)} places in {len({file for file, _, _ in CHUNKED})} files" in recipe
    changed = differing(chunked)
    assert changed == {file for file, _, _ in CHUNKED}
    for file in changed:
        assert f"`{file}`" in recipe or f"`{Path(file).name}`" in recipe, file


@pytest.mark.parametrize("folder", ["cpu", "cuda"])
def test_backends_ask_the_rule_of_a_band_alone(folder):
    for path in (ROOT / "src" / folder).rglob("*.*"):
        found = re.search(r"\w+\.window_(left|right)|TESSERA_(WINDOW|CAUSAL)\b", path.read_text())
        assert not found, f"{path.relative_to(ROOT)}: {found[0]}: a positional mask has more; ask band_rule_of()"


@pytest.mark.skipif(not all(map(shutil.which, ("cmake", "ninja", "c++"))),
                    reason="needs CMake, ninja and a compiler")
def test_a_chunked_mask_runs_on_the_cpu_as_in_the_reference(chunked, request):
    # Kernels of a release take twice as long to compile, and nobody waits for these. They are the same templates for
    # each instruction set.
    levels = "avx2;avx512;avx512bf16;amx" if request.config.getoption("--every-case") else ""
    run("cmake", "-G", "Ninja", "-B", "build", "-S", ".", "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DTESSERA_CPU_LEVELS={levels}", "-DTESSERA_TESTS=OFF", "-DTESSERA_TORCH=OFF",
        cwd=chunked)
    run("cmake", "--build", "build", "--target", "tessera", "tessera_check", cwd=chunked)
    tests = ROOT / "tests"

    def program(*sources):
        run("c++", "-std=c++20", "-O1", "-pthread", "-Isrc", "-Iinclude", f"-I{tests}", *sources,
            *(chunked / "build").rglob("*.o"), "-o", "program", "-ldl", cwd=chunked)

    (chunked / "band.cc").write_text(CHUNKED_BAND)
    program("band.cc")
    run("./program", cwd=chunked)
    (chunked / "chunked.cases").write_text(CHUNKED_CASES)
    program(tests / "conformance" / "check_cases.cc", tests / "conformance" / "random_cases.cc")
    said = run("./program", "chunked.cases", "--backend", "cpu", cwd=chunked)
    assert f"{len(CHUNKED_CASES.split(chr(10))) - 2} passed, 0 refused, 0 failed" in said
    (chunked / "build" / "lib").symlink_to(chunked / "build")
    run(sys.executable, "-c", CHUNKED_CALLS, cwd=chunked)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize(("backend", "architecture"), [("sm80", "sm_80"), ("sm90", "sm_90a")])
def test_kernels_of_a_gpu_compile_with_a_chunked_mask(chunked, backend, architecture):
    (chunked / f"{backend}.cu").write_text(kernels_of(backend, CHUNKED_KERNELS[backend]))
    run("nvcc", "-std=c++20", "-O1", f"-arch={architecture}", "-cubin", "-Isrc", "-Iinclude", "-diag-suppress=1427",
        "-o", f"{backend}.cubin", f"{backend}.cu", cwd=chunked)


@pytest.mark.skipif(not (BUILT / "libtessera.so").exists(), reason="needs a build in build/lib")
@pytest.mark.parametrize("module, library", [("tessera", "numpy"), ("tessera.torch", "torch"),
                                             ("tessera.jax", "jax.numpy")])
def test_a_keyword_is_one_row(tmp_path, module, library):
    """Paddle's is in test_paddle.py."""
    pytest.importorskip(library)
    every_keyword.add_a_row(tmp_path, module, library)
