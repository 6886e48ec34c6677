// SPDX-License-Identifier: Apache-2.0
// What a program does before it uses AMX. Inlined everywhere, like all that the CPU's kernels
// include.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tessera {

// What ldtilecfg reads: eight tiles of 16 rows of 64 bytes.
struct alignas(64) WholeTiles {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// True if this machine multiplies bf16 on tiles and Linux lets this process: it saves tiles only for
// one that has asked, once for all of its threads.
[[gnu::always_inline]] inline bool may_use_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;  // of EDX, leaf 7
  constexpr int kRequest = 0x1023, kTileData = 18;        // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) && (d & kTile) &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace tessera
