#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in one go, on a machine that has one: build, conformance through C and
# PyTorch, exact properties, sanitizers, random sleeps, benches. Prints each stage's own summary lines, and
# fails if any command did.
#   tools/device_check.sh [STAGE...]     stages: build cases nightly torch properties sanitizer chaos bench (default: all)
set -uo pipefail
cd "$(dirname "$0")/.."
stages=${*:-build cases nightly torch properties sanitizer chaos bench}
export PYTHONPATH=$PWD/python PYTHONUNBUFFERED=1
failed=0

say() { printf '== %s\n' "$*"; }

# run SECONDS COMMAND...
run() { timeout -s KILL "$@" || { echo "FAILED ($?): ${*:2}"; failed=$((failed + 1)); }; }

# build FOLDER [OPTION...] [-- TARGET...]: says nothing but errors.
build() {
  local folder=$1 options=() log=build/${1##*/}.log; shift
  while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
  mkdir -p build
  cmake --preset cuda -B "$folder" "${options[@]}" >"$log" 2>&1 && cmake --build "$folder" ${2:+--target "${@:2}"} >>"$log" 2>&1 ||
    { grep -E "error|FAILED" "$log" | head -20; echo "FAILED: build of $folder, $log"; return 1; }
}

command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version --format=csv,noheader ||
  { echo "device_check: no GPU on this machine; it checks what only a GPU can"; exit 1; }

# check BACKEND FILE...: through C; "auto" leaves the choice to the library.
check() {
  local backend=$1; shift
  say "cases ${*##*/}, backend $backend, through C"
  [ "$backend" = auto ] && choice=() || choice=(--backend "$backend")
  run 240 build/cuda/tests/conformance/tessera_check_cases "$@" --cuda 0 --threads 0 "${choice[@]}"
}

for stage in $stages; do
  case $stage in
    build)
      say build
      start=$SECONDS
      build build/cuda || exit 1
      echo "built in $((SECONDS - start)) s on $(nproc) cores"
      ln -sfn cuda build/lib
      ls -lL build/lib/libtessera.so
      run 60 python3 tests/cuda/kernel_budget.py build/cuda ;;
    cases) for backend in auto cuda_sm90 cuda_sm80; do check $backend tests/cases/{smoke,ci}.cases; done ;;
    nightly) check auto tests/cases/nightly.cases ;;
    torch)
      say "smoke cases through tessera.torch"
      run 120 python3 -m tessera check --cases smoke --through torch --device cuda ;;
    properties)
      say "exact properties, streams, graphs, large problems"
      run 300 build/cuda/tests/cuda/tessera_cuda_properties ;;
    sanitizer)
      if ! command -v compute-sanitizer >/dev/null; then echo "compute-sanitizer: unavailable"; continue; fi
      for tool in memcheck initcheck synccheck racecheck; do
        say "compute-sanitizer $tool"
        # racecheck does not know what an mbarrier orders: the sm90 kernels have the chaos stage.
        [ $tool = racecheck ] && choice=(--backend cuda_sm80) || choice=()
        run 240 compute-sanitizer --tool $tool --error-exitcode 9 \
          build/cuda/tests/conformance/tessera_check_cases tests/cases/sanitizer.cases --cuda 0 "${choice[@]}"
      done ;;
    chaos)
      say "random sleeps before every arrival and wait (sm90): results, and repeats bit for bit"
      build build/chaos -DTESSERA_CHAOS=ON -- tessera_check_cases tessera_cuda_properties ||
        { failed=$((failed + 1)); continue; }
      run 240 build/chaos/tests/conformance/tessera_check_cases tests/cases/ci.cases --cuda 0 --threads 0
      run 240 build/chaos/tests/cuda/tessera_cuda_properties repeat streams ;;
    bench)
      for suite in hopper hopper_features; do
        say "bench --suite $suite"
        run 300 python3 -m tessera bench --suite $suite --device cuda --against cudnn,flex
      done ;;
    *) echo "device_check: no stage $stage"; exit 2 ;;
  esac
done
say "$failed commands failed"
[ $failed = 0 ]
