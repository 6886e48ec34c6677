// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd/kernels.h"

#include <iterator>
#include <string_view>

#include "core/environment.h"
#include "core/machine/amx.h"

namespace tessera::cpu {

extern const Kernels kAmxKernels, kAvx512Bf16Kernels, kAvx512Kernels, kAvx2Kernels,
    kPortableKernels;

namespace {

struct Level {
  const Kernels* kernels;
  bool (*runs_here)();
};

// Builds of the portable kernels alone ask nothing: Clang 14 does not know all of these words.
#if defined(TESSERA_CPU_AVX2) || defined(TESSERA_CPU_AVX512) || defined(TESSERA_CPU_AVX512BF16)
// The builtin asks CPUID and, for wide registers, whether the system saves them (XGETBV).
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
[[maybe_unused]] bool has_avx512bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
}
#endif

#ifdef TESSERA_CPU_AMX
bool has_amx() { return has_avx512bf16() && may_use_amx(); }
#endif

// The levels that the build's option TESSERA_CPU_LEVELS names, best first.
constexpr Level kLevels[] = {
#ifdef TESSERA_CPU_AMX
    {&kAmxKernels, has_amx},
#endif
#ifdef TESSERA_CPU_AVX512BF16
    {&kAvx512Bf16Kernels, has_avx512bf16},
#endif
#ifdef TESSERA_CPU_AVX512
    {&kAvx512Kernels, has_avx512},
#endif
#ifdef TESSERA_CPU_AVX2
    {&kAvx2Kernels, has_avx2},
#endif
    {&kPortableKernels, [] { return true; }},
};

const Kernels& chosen() {
  if (const Kernels* forced = kernels_of(environment().cpu_isa.c_str())) return *forced;
  for (const Level& level : kLevels) {
    if (level.runs_here()) return *level.kernels;
  }
  return kPortableKernels;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& best = chosen();
  return best;
}

bool has_byte_tables() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
}

const Kernels* kernels_of(const char* name) {
  for (const Level& level : kLevels) {
    if (std::string_view(level.kernels->name) == name && level.runs_here()) return level.kernels;
  }
  return nullptr;
}

const Kernels* kernels_at(int index) {
  return index < static_cast<int>(std::size(kLevels)) ? kLevels[index].kernels : nullptr;
}

}  // namespace tessera::cpu
