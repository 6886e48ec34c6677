# SPDX-License-Identifier: Apache-2.0
# A part of ./dev: the stages of `test`, which every change must pass, and of which `nightly` has more.

run_ctest() {
  local preset=$1; shift
  say "ctest, preset $preset"
  summarised "ctest-$preset" ctest --test-dir build/"$preset" --output-on-failure --no-tests=error -j "$(nproc)" "$@"
}

test_core() { have_gtest || apt_install libgtest-dev; build cpu core_tests; run_ctest cpu -L core "$@"; }
test_cpu() { have_gtest || apt_install libgtest-dev; build cpu; run_ctest cpu "$@"; }

# The tests under a sanitizer run the best level alone, and another one takes it a core-minute to compile.
test_sanitizer() {
  have_gtest || apt_install libgtest-dev
  local preset=$1 levels=("-DTESSERA_CPU_LEVELS=$(cpu_levels)"); shift
  build "$preset"
  run_ctest "$preset" -L sanitize "$@"
}

test_fuzz() {
  if (install_fuzzer); then fuzz 60; else say "no libFuzzer of clang: the fuzzers are skipped"; fi
}

# Without a GoogleTest of the target: the case files, and the C program.
test_aarch64() {
  install_aarch64
  build aarch64 tessera_nvte tessera_jax tessera_check c_api_test tessera_check_cases
  run_ctest aarch64 -R '^(c_api|cases_smoke|cases_ci_part)$' "$@"
}

test_aarch64_wheel() {
  wheel --platform aarch64
  summarised package-aarch64 tools/package_test.sh aarch64 build/dist/aarch64/*.whl
}

# What the tests of Python load.
build_for_python() { built tessera_check tessera_nvte tessera_jax tessera_torch || build cpu; }

test_python() {
  setup_torch
  build_for_python
  setup_demo
  setup_tests
  install types mypy "pyright[nodejs]"
  install notebooks nbclient ipykernel
  say "pytest"
  # NumPy's own threads would spin on the cores that tessera's threads compute on.
  OPENBLAS_NUM_THREADS=1 summarised pytest "$venv/bin/python" -m pytest -n 2 --dist worksteal \
    --ignore=tests/python/on_jax --ignore=tests/python/te/on_jax "$@"
}

# XLA's compiler is most of the time of JAX's tests: by day it leaves LLVM's optimisations out, which takes two thirds of
# it; what XLA itself rewrites stays.
xla_flags=--xla_backend_optimization_level=0

# Meshes are of virtual devices, which are made when a process starts.
test_jax() {
  has_jax || { say "JAX needs Python 3.11 or later: its tests are skipped"; return; }
  setup_torch
  setup_jax
  setup_tests
  build_for_python
  say "pytest, JAX"
  XLA_FLAGS=$xla_flags summarised jax "$venv/bin/python" -m pytest -n 2 --dist worksteal tests/python/on_jax tests/python/te/on_jax "$@"
  # Devices wait for each other in collectives: two programs at once could hold each other's threads.
  XLA_FLAGS="--xla_force_host_platform_device_count=4 $xla_flags" JAX_CPU_ENABLE_ASYNC_DISPATCH=false \
    summarised jax-mesh "$venv/bin/python" -m pytest tests/python/on_jax/test_jax_sharding.py \
    tests/python/on_jax/test_jax_context_parallel.py "$@"
}

test_paddle() {
  build cpu tessera tessera_check
  local venv=$venv_paddle
  has_paddle || { say "no Paddle for this Python: its tests are skipped"; return; }
  setup_paddle
  setup_tests
  say "pytest, Paddle"
  summarised pytest-paddle "$venv/bin/python" -m pytest -n 2 --dist worksteal \
    tests/python/on_paddle tests/python/te/on_paddle "$@"
}

# What `all` leaves to `nightly`, as the summary of both says.
of_nightly="each case of pytest and ctest, every architecture of \
transformers, 20000 random examples, the thread sanitizer, CUDA code of every GPU and the wheel of a release, hosts, newest"

test_nightly() {
  nightly=(-DTESSERA_NIGHTLY=ON)
  xla_flags=
  test_cpu
  test_sanitizer asan
  test_sanitizer tsan
  if (install_aarch64); then test_aarch64; fi
  test_python --every-case --examples 20000 --hf-all
  test_jax --every-case --te-jax-all
  test_paddle --every-case
  test_hosts
  test_package
  if have_aarch64; then test_aarch64_wheel; fi
  test_newest
  test_cuda
  summary "nightly: $of_nightly"
}

# The tests of docs/integrations.md.
test_hosts() {
  setup_torch
  setup_tests
  build_for_python
  local host venv=$venv
  for host in kernels trl diffusers xfuser megatron torchtitan deepspeed; do setup_host $host; done
  say "pytest, hosts"
  OPENBLAS_NUM_THREADS=1 summarised hosts "$venv/bin/python" -m pytest tests/python/doors/test_doors.py \
    tests/python/doors/test_flash_impl.py tests/python/doors/test_hub_kernel.py tests/python/doors/test_trl.py \
    tests/python/doors/test_te_plugin.py tests/python/doors/test_diffusers.py tests/python/doors/test_comfyui.py \
    tests/python/doors/test_xdit.py tests/python/doors/test_megatron.py tests/python/doors/test_sglang.py \
    tests/python/doors/test_torchtitan.py tests/python/doors/test_deepspeed.py \
    tests/python/doors/test_accelerate_cp.py "$@"
  setup_host vllm
  say "pytest, vLLM"
  OPENBLAS_NUM_THREADS=1 summarised vllm "$venv/bin/python" -m pytest tests/python/doors/test_vllm.py "$@"
}

# What is newer on PyPI than tests/versions.txt, under the tests of Hugging Face's models, in an environment that has
# only the newer packages and finds the others in build/venv. It warns: nobody else's release stops ours.
test_newest() {
  setup_torch
  setup_tests
  local name latest newer=()
  for name in transformers torch; do
    latest=$("$venv/bin/python" -m pip index versions --retries 1 "$name" 2>/dev/null |
      sed -n "1s/^$name (\(.*\))$/\1/p") || true
    [ -z "$latest" ] || grep -qxF "$name==$latest" "$versions" || newer+=("$name==$latest")
  done
  [ ${#newer[@]} != 0 ] || { say "newest: PyPI has nothing newer than $versions: skipped"; return 0; }
  build_for_python
  say "pytest, newest: ${newer[*]}"
  run_newest "$(site_packages)" "$@" ||
    summary "WARNING: newest: ${newer[*]} did not pass (build/newest.log); what counts are those of $versions"
}

# run_newest TESTED ARGS...: each step by &&, as `set -e` does not hold left of ||.
run_newest() {
  local venv=$root/build/venv-newest tested=$1; shift
  setup_python && echo "$tested" >"$(site_packages)/tested.pth" &&
    pip_install "${newer[@]}" &&
    OPENBLAS_NUM_THREADS=1 summarised newest timeout 900 "$venv/bin/python" -m pytest -n 2 --dist worksteal \
      tests/python/hf/test_torch_hf*.py "$@"
}

# The package as users get it, away from the sources: the C library, the wheel, and the wheel that the sdist makes.
test_package() {
  build cpu tessera tessera_check tessera_nvte  # before the wheel, which lays the same build out as a package
  setup_demo
  say "the package, as users install it"
  summarised package-c tools/package_test.sh prefix build/cpu
  wheel --cpu
  summarised package-wheel tools/package_test.sh wheel build/dist/cpu/*.whl
  summarised package-sdist tools/package_test.sh sdist build/dist/cpu/raw/*.whl
}

test_docs() {
  docs
  say "$(find build/site -name '*.html' | wc -l) pages, every link and anchor checked"
  (install_browser) || say "no browser: no page is opened"
  install site-tests pytest playwright
  say "pages in a browser, pictures in build/screenshots"
  summarised site "$venv/bin/python" -m pytest tests/site
}

test_cuda() {
  has_nvcc || return 0
  cuda_tests cuda "$@"
  wheel
  summarised package-cuda tools/package_test.sh wheel build/dist/*.whl
}

# Every kernel is compiled once, for the GPU with the fewest instructions. A machine with a GPU runs them, and has them all.
test_cuda_by_day() {
  has_nvcc || return 0
  if command -v nvidia-smi >/dev/null; then test_cuda "$@"; return; fi
  cuda_tests cuda_day "$@"
  wheel --day
  summarised package-cuda tools/package_test.sh wheel build/dist/day/*.whl
}

# cuda_tests PRESET: what test_cpu has not built and run.
cuda_tests() {
  local preset=$1; shift
  have_gtest || apt_install libgtest-dev
  setup_torch
  build "$preset" tessera tessera_nvte tessera_torch tessera_cuda_properties tessera_order_test tessera_slot_order_test \
    tessera_cache_test tessera_work_test tessera_driver_test tessera_cudnn_test nvte_gpu_test
  run_ctest "$preset" -L cuda "$@"
}

test_all() {
  cache_compilers
  stage fmt --check
  # Debian's and pip's locks are for one process: what the stages beside need is there before they begin.
  have_gtest || apt_install libgtest-dev
  setup_build
  local others=("test_sanitizer asan")
  if (install_aarch64); then others=(test_aarch64 "${others[@]}"); else say "no compiler for aarch64: its tests are skipped"; fi
  beside "${others[@]}"
  stage setup_torch
  stage test_cpu
  stage test_python
  stage test_jax
  stage test_paddle
  stage test_docs
  stage test_package
  join
  if have_aarch64; then stage test_aarch64_wheel; fi  # takes PyTorch's headers, and what test_aarch64 has compiled
  stage test_fuzz
  stage test_cuda_by_day
  summary "left to ./dev test nightly: $of_nightly"
  say "all tests passed"
}

# test [WHAT... [ARGS]]: stages by name, in their order; each gets the arguments behind the names.
test_stages=(all core cpu python jax paddle asan tsan fuzz aarch64 docs package cuda hosts newest nightly)
is_test_stage() { case " ${test_stages[*]} " in *" $1 "*) ;; *) return 1 ;; esac; }
tests() {
  local what asked=()
  [ $# != 0 ] || set -- all
  is_test_stage "$1" || { usage; die "test $1: must be of ${test_stages[*]}"; }
  while [ $# != 0 ] && is_test_stage "$1"; do asked+=("$1"); shift; done
  for what in "${asked[@]}"; do
    case $what in
      aarch64) test_aarch64 "$@"; [ $# != 0 ] || test_aarch64_wheel ;;
      asan|tsan) test_sanitizer "$what" "$@" ;;
      *) "test_$what" "$@" ;;
    esac
  done
}
