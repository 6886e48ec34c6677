#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in one go, on a machine that has one: build, conformance through C and
# PyTorch, exact properties, sanitizers, random sleeps, benches. Prints each stage's own summary lines, and
# fails if any command did.
#   tools/device_check.sh [STAGE...]     stages: build cases nightly torch properties allocators
#                                        sanitizer chaos profile bench
#                                        (default: all, in that order; build must have been run once)
# torch, allocators and bench need a python3 with PyTorch and NumPy; allocators takes JAX too where it has CUDA. A
# sanitizer or profiler that cannot run is "unavailable".
set -uo pipefail
cd "$(dirname "$0")/.."
all="build cases nightly torch properties allocators sanitizer chaos profile bench"
stages=${*:-$all}
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
cases=build/cuda/tests/conformance/tessera_check_cases
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
    { grep -E -i -A 3 "error|FAILED" "$log" | head -20; echo "FAILED: build of $folder, $log"; return 1; }
}

for stage in $stages; do
  case " $all " in *" $stage "*) ;; *) echo "device_check: no stage $stage; must be one of $all"; exit 2 ;; esac
done
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version --format=csv,noheader ||
  { echo "device_check: no GPU on this machine; it checks what only a GPU can"; exit 1; }

if [ ! -x $cases ] && [ "${stages%% *}" != build ]; then
  echo "device_check: $cases is not there; begin with the stage build"; exit 1
fi

# check BACKEND FILE...: through C; "auto" leaves the choice to the library.
check() {
  local backend=$1; shift
  say "cases ${*##*/}, backend $backend, through C"
  [ "$backend" = auto ] && choice=() || choice=(--backend "$backend")
  run 240 "$cases" "$@" --cuda 0 --threads 0 "${choice[@]}"
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
      say "cases through tessera.torch"
      run 240 python3 -m tessera check --cases smoke --cases ci --through torch --device cuda
      if ! python3 -m pytest --version >/dev/null 2>&1; then echo "pytest: unavailable"; continue; fi
      say "graphs, streams, autograd of tessera.torch"
      run 240 python3 -m pytest -q -p no:cacheprovider tests/python/test_torch_{cuda,fp8}.py ;;
    properties)
      say "exact properties, streams, graphs, large problems"
      run 300 build/cuda/tests/cuda/tessera_cuda_properties ;;
    allocators)
      say "low and high addresses of our choosing"
      run 240 build/cuda/tests/cuda/tessera_cuda_properties addresses
      if ! python3 -m pytest --version >/dev/null 2>&1; then echo "pytest: unavailable"; continue; fi
      say "the allocators of PyTorch and JAX"
      run 240 python3 -m pytest -q -rs -p no:cacheprovider tests/python/test_allocators.py ;;
    sanitizer)
      # It says so if it may not attach to the device, and then has no summary of errors.
      if ! timeout -s KILL 60 compute-sanitizer "$cases" --cuda 0 tests/cases/smoke.cases --every 1000 2>&1 |
        grep -q "ERROR SUMMARY"; then
        echo "compute-sanitizer: unavailable"; continue
      fi
      for tool in memcheck initcheck synccheck racecheck; do
        say "compute-sanitizer $tool"
        # racecheck does not know what an mbarrier orders: the sm90 kernels have the chaos stage.
        [ $tool = racecheck ] && choice=(--backend cuda_sm80) || choice=()
        run 240 compute-sanitizer --tool $tool --error-exitcode 9 \
          "$cases" tests/cases/sanitizer.cases --cuda 0 "${choice[@]}"
      done
      say "compute-sanitizer memcheck, every fifth case of ci"
      run 240 compute-sanitizer --error-exitcode 9 "$cases" tests/cases/ci.cases --every 5 --cuda 0 ;;
    chaos)
      say "random sleeps before every arrival and wait (sm90): results, and repeats bit for bit"
      build build/chaos -DTESSERA_CHAOS=ON -- tessera_check_cases tessera_cuda_properties ||
        { failed=$((failed + 1)); continue; }
      run 240 build/chaos/tests/conformance/tessera_check_cases tests/cases/ci.cases --cuda 0 --threads 0
      run 240 build/chaos/tests/cuda/tessera_cuda_properties repeat streams ;;
    profile)
      if ! command -v ncu >/dev/null; then echo "ncu: unavailable"; continue; fi
      for pass in fwd bwd; do
        say "ncu: the first kernels of $pass bf16, 8192 keys"
        log=build/profile_$pass.log
        if timeout -s KILL 120 ncu --launch-count 3 --kernel-name 'regex:forward|backward|convert|statistics' \
          --section SpeedOfLight --section LaunchStats \
          python3 -m tessera bench --quick --device cuda "$pass bf16 b=2 s=8192 h=16 d=128 causal" >"$log" 2>&1; then
          grep -E "^  [a-z]|Duration|Elapsed Cycles|Compute \(SM\)|DRAM Throughput|Registers Per|Dynamic Shared" "$log"
        elif grep -q ERR_NV "$log"; then  # it may not read the counters
          echo "ncu: unavailable, $(grep -m 1 -o "ERR_NV[A-Z]*" "$log")"
        else
          tail -5 "$log"; echo "FAILED: ncu of $pass, $log"; failed=$((failed + 1))
        fi
      done ;;
    bench)
      for suite in hopper hopper_features; do
        say "bench --suite $suite"
        run 300 python3 -m tessera bench --suite $suite --device cuda --against cudnn,flex
      done ;;
  esac
done
say "$failed commands failed"
[ $failed = 0 ]
