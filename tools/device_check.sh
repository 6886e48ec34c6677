#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in one go, on a machine that has one: build, conformance through C and
# PyTorch, exact properties, front ends, sanitizers, random sleeps, benches. Prints each stage's own summary
# lines, and fails if any command did. Logs, one a stage, are packed into $OUT or build, device_check.tar.gz.
#   tools/device_check.sh [STAGE...]     stages: build cases nightly torch properties allocators jax hf
#                                        ranks sanitizer chaos profile bench
#                                        (default: all, in that order; build must have been run once)
# torch, allocators, hf and bench need a python3 with PyTorch and NumPy, hf transformers too, jax a JAX that has
# CUDA; allocators takes JAX too where it has CUDA; ranks needs two GPUs. What cannot run is "unavailable".
set -uo pipefail
cd "$(dirname "$0")/.."
all="build cases nightly torch properties allocators jax hf ranks sanitizer chaos profile bench"
stages=${*:-$all}
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
cases=build/cuda/tests/conformance/tessera_check_cases
logs=build/device_check
failed=0

# log_to [FILE]: what follows is printed and written into FILE too; without one, only printed.
log_to() {
  exec >&3 2>&4
  [ -z "${tee:-}" ] || wait "$tee"
  tee=
  [ $# = 0 ] || { exec > >(tee "$1" >&3) 2>&1; tee=$!; }
}

pack() { log_to; tar -czf "${OUT:-build}/device_check.tar.gz" -C build device_check; }

# has PACKAGE...: whether python3 finds them.
has() { python3 -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "$@"; }

say() { printf '== %s\n' "$*"; }

# run SECONDS COMMAND...
run() { timeout -s KILL "$@" || { echo "FAILED ($?): ${*:2}"; failed=$((failed + 1)); }; }

# build FOLDER [OPTION...] [-- TARGET...]: says nothing but errors.
build() {
  local folder=$1 options=() log=$logs/build_${1##*/}.log; shift
  while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
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

mkdir -p "$logs"
exec 3>&1 4>&2
trap pack EXIT

for stage in $stages; do
  log_to "$logs/$stage.log"
  case $stage in
    build)
      say build
      start=$SECONDS
      build build/cuda || exit 1
      echo "built in $((SECONDS - start)) s on $(nproc) cores"
      ln -sfn cuda build/lib
      ls -lL build/lib/libtessera.so
      run 60 python3 tests/cuda/kernel_budget.py build/cuda ;;
    cases)
      for backend in auto cuda_sm90 cuda_sm80; do check $backend tests/cases/{smoke,ci}.cases; done
      if python3 -m tessera env 2>/dev/null | grep -qE "^build.backends.cudnn.available +True"; then
        check cudnn tests/cases/{smoke,ci}.cases
      else
        echo "cudnn: unavailable"
      fi ;;
    nightly) check auto tests/cases/nightly.cases ;;
    torch)
      say "cases through tessera.torch"
      run 240 python3 -m tessera check --cases smoke --cases ci --through torch --device cuda
      if ! python3 -m pytest --version >/dev/null 2>&1; then echo "pytest: unavailable"; continue; fi
      say "graphs, streams, autograd of tessera.torch"
      run 240 python3 -m pytest -q -p no:cacheprovider tests/python/on_torch/test_torch_{cuda,fp8}.py ;;
    properties)
      say "exact properties, streams, graphs, large problems"
      run 300 build/cuda/tests/cuda/tessera_cuda_properties
      say "TransformerEngine's C names on memory of the GPU"
      run 60 build/cuda/tests/nvte/nvte_gpu_test ;;
    allocators)
      say "low and high addresses of our choosing"
      run 240 build/cuda/tests/cuda/tessera_cuda_properties addresses
      if ! python3 -m pytest --version >/dev/null 2>&1; then echo "pytest: unavailable"; continue; fi
      say "the allocators of PyTorch and JAX"
      run 240 python3 -m pytest -q -rs -p no:cacheprovider tests/python/on_torch/test_allocators.py ;;
    jax)
      if ! has pytest hypothesis jax; then echo "jax, pytest, hypothesis: unavailable"; continue; fi
      export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
      if ! python3 -c 'import jax; jax.devices("cuda")' 2>/dev/null; then
        echo "JAX on CUDA: unavailable"; unset JAX_PLATFORMS XLA_PYTHON_CLIENT_PREALLOCATE; continue
      fi
      say "cases through tessera.jax"
      run 400 python3 -m tessera check --cases smoke --through jax --device cuda
      say "the tests of JAX; meshes of four (test_jax_sharding, test_jax_context_parallel, test_te_jax_mesh) are the CPU's"
      run 500 python3 -m pytest -q -rs -p no:cacheprovider tests/python/on_jax/test_jax.py tests/python/on_jax/test_jax_{nn,examples}.py \
        tests/python/te/on_jax/test_te_jax.py tests/python/te/on_jax/test_te_jax_{cases,flax,words}.py
      unset JAX_PLATFORMS XLA_PYTHON_CLIENT_PREALLOCATE ;;
    hf)
      if ! has pytest hypothesis torch transformers; then
        echo "transformers, torch, pytest, hypothesis: unavailable"; continue
      fi
      say "transformers and examples/serve on cuda"
      TESSERA_TEST_DEVICE=cuda run 500 python3 -m pytest -q -rs -p no:cacheprovider \
        tests/python/hf/test_torch_hf.py tests/python/hf/test_torch_hf_{models,serving}.py tests/python/hf/test_serve.py ;;
    ranks)
      if ! has pytest torch || [ "$(python3 -c 'import torch; print(torch.cuda.device_count() > 1)')" != True ]; then
        echo "two GPUs, torch, pytest: unavailable"; continue
      fi
      say "context parallelism over NCCL, a GPU for each rank"
      TESSERA_TEST_DEVICE=cuda run 500 python3 -m pytest -q -rs -p no:cacheprovider \
        tests/python/cp/test_cp_processes.py tests/python/te/attention/test_te_context_parallel.py ;;
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
        log=$logs/profile_$pass.log
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
log_to
say "$failed commands failed"
[ $failed = 0 ]
