#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in one go, on a machine that has one: build, conformance of each CUDA
# backend through C and PyTorch, sanitizers, benches. Prints each stage's own summary lines.
#   tools/device_check.sh [STAGE...]     stages: build cases nightly torch sanitizer bench (default: all)
set -uo pipefail
cd "$(dirname "$0")/.."
stages=${*:-build cases nightly torch sanitizer bench}
export PYTHONPATH=$PWD/python PYTHONUNBUFFERED=1
failed=0

say() { printf '== %s\n' "$*"; }
run() { timeout -s KILL "$@" || { echo "FAILED ($?): ${*:2}"; failed=1; }; }
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version --format=csv,noheader ||
  { echo "device_check: no GPU on this machine; it checks what only a GPU can"; exit 1; }

check() {  # check BACKEND CASES THROUGH
  say "cases $2, backend $1, through $3"
  run 240 python3 -m tessera check --cases "$2" --backend "$1" --through "$3" --device cuda
}

for stage in $stages; do
  case $stage in
    build)
      say build
      if ! cmake --preset cuda -DTESSERA_TESTS=OFF >build-cuda.log 2>&1 ||
         ! cmake --build --preset cuda >>build-cuda.log 2>&1; then
        grep -E "error|FAILED" build-cuda.log | head -20; exit 1
      fi
      ln -sfn cuda build/lib
      ls -lL build/lib/libtessera.so ;;
    cases|nightly)
      files=(smoke ci)
      [ $stage = nightly ] && files=(nightly)
      for backend in cuda_sm80 cuda_sm90; do
        for cases in "${files[@]}"; do check $backend tests/cases/$cases.cases c; done
      done ;;
    torch)
      for backend in cuda_sm80 cuda_sm90; do check $backend tests/cases/smoke.cases torch; done ;;
    sanitizer)
      if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck synccheck; do
          say "compute-sanitizer $tool"
          run 240 compute-sanitizer --tool $tool --error-exitcode 9 python3 -m tessera check \
            "fwd bf16 b=2 s=129 hq=4 hk=2 d=64 causal poison" "bwd bf16 b=2 s=129 hq=4 hk=2 d=64 causal poison" \
            --through c --device cuda
        done
      else
        echo "compute-sanitizer: unavailable"
      fi ;;
    bench)
      say bench
      run 300 python3 -m tessera bench --suite te --device cuda --against torch ;;
    *) echo "device_check: no stage $stage"; exit 2 ;;
  esac
done
exit $failed
