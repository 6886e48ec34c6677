#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The package as users get it: the wheel (built by pip in < 60 s on 2 cores, library < 5 MB, needs
# NumPy alone), and the C library after `cmake --install`, used through pkg-config and CMake.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/package-test
passed=0
rm -rf "$work" build/wheel
mkdir -p "$work"
check() { passed=$((passed + 1)); printf 'ok %d - %s\n' "$passed" "$*"; }

python3 -m venv "$work/venv"
start=$(date +%s)
"$work/venv/bin/pip" install --quiet --disable-pip-version-check .
check "pip install . took $(($(date +%s) - start)) s"
cd "$work"
library=$("$work/venv/bin/python" -c 'import pathlib, tessera; print(pathlib.Path(tessera.__file__).parent / "libtessera.so")')
bytes=$(stat -c %s "$library")
[ "$bytes" -lt 5000000 ] || { echo "libtessera.so has $bytes bytes, 5000000 are allowed"; exit 1; }
check "libtessera.so has $bytes bytes"
"$work/venv/bin/python" -m tessera check "fwd fp32 b=2 s=33 h=2 d=40 causal" "bwd fp16 b=1 s=65 h=2 d=64"
check "python -m tessera check with NumPy alone"
cd - >/dev/null

cmake --install build/cpu --prefix "$work/prefix" >/dev/null
export PKG_CONFIG_PATH=$work/prefix/lib/pkgconfig:$work/prefix/lib/$(cc -dumpmachine)/pkgconfig
flags="-I$work/prefix/include -L$work/prefix/lib -ltessera"
if command -v pkg-config >/dev/null; then flags=$(pkg-config --cflags --libs tessera); fi
cc -std=c11 -Wall -Wextra -Werror -pedantic examples/c/attention.c -o "$work/attention" $flags
LD_LIBRARY_PATH=$work/prefix/lib:$work/prefix/lib/$(cc -dumpmachine) "$work/attention"
check "examples/c through pkg-config"
cmake -S examples/c -B "$work/cmake-example" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/cmake-example" >/dev/null
"$work/cmake-example/attention"
check "examples/c through find_package(tessera)"
echo "$passed passed, 0 failed"
