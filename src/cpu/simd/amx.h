// SPDX-License-Identifier: Apache-2.0
// AMX: products of whole matrices of bf16, eight times the rate of vdpbf16ps and more.
//
// Eight tiles of 16 rows of 64 bytes. multiply<c, a, b>() is C += A B with
//
//   A  16 x 32 bf16     a row: 16 words of two neighbours in k
//   B  32 x 16 bf16     row k: for each column n the word (B[2 k][n], B[2 k + 1][n])
//   C  16 x 16 fp32
//
// Subnormal inputs and results are flushed; the sums of even and of odd k begin at 0, and both
// together are added to C. A finite element times 0 changes no bit.
#pragma once

#include "core/machine/amx.h"
#include "cpu/simd/avx512bf16.h"
#include "cpu/simd/kernels.h"

namespace tessera::cpu {

extern const Kernels kAvx512Bf16Kernels;

namespace {

struct Amx : Avx512Bf16 {
  using Wide = Amx;
  static constexpr bool kHasTiles = true;
  static const Kernels& below() { return kAvx512Bf16Kernels; }

  TESSERA_INLINE bool all_of(M lanes) { return lanes == 0xffff; }

  // Rows and columns of C, and elements of k in a row of A.
  static constexpr int kTile = 16, kDepth = 32;

  // All tiles whole. A thread configures its tiles before their first use, and gives them back, so
  // that its state is small again for whoever saves it. The instructions are volatile and name
  // memory: they stay in order with what reads and writes it.
  TESSERA_INLINE void begin_tiles() {
    const WholeTiles configuration;
    asm volatile("ldtilecfg %0" : : "m"(configuration));
  }
  TESSERA_INLINE void end_tiles() { asm volatile("tilerelease" : : : "memory"); }

  template <int kT>
  TESSERA_INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kT));
  }
  // Rows are `step` bytes apart.
  template <int kT>
  TESSERA_INLINE void load_tile(const void* p, int64_t step) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(step), "i"(kT) : "memory");
  }
  template <int kT>
  TESSERA_INLINE void store_tile(void* p, int64_t step) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(step), "i"(kT) : "memory");
  }
  template <int kC, int kA, int kB>
  TESSERA_INLINE void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};

}  // namespace
}  // namespace tessera::cpu
