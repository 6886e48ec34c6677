// SPDX-License-Identifier: Apache-2.0
// wgmma of E4M3: D[64, N] (+)= A[64, 32] B[32, N] by one warpgroup, accumulators as those of 16 bits
// (machine/wgmma.cuh). Both operands are k-major; there is no other form. A step is 32 bytes of a
// row, so that tiles of bytes are SmemTiles of half as many columns.
//
// The accumulators are no fp32: of 32 products and the sum before, 13 bits behind the leading one
// of the largest are kept. Long sums are to be added up elsewhere.
//
// A registers of a step hold, of a thread's two rows, four neighbouring k each; accumulators hold
// pairs of columns in groups of eight. P becomes A without a shuffle where V^T has its keys in the
// order of fp8/transpose.h.
#pragma once

#include "cuda/sm90/machine/wgmma.cuh"

namespace tessera::cuda::sm90 {

template <int N>
struct WgmmaFp8;

// clang-format off
#define TESSERA_D36 TESSERA_D32 ", " "%32, %33, %34, %35"
#define TESSERA_D68 TESSERA_D64 ", " "%64, %65, %66, %67"
#define TESSERA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TESSERA_O36 TESSERA_O32, TESSERA_FOUR(32)
#define TESSERA_O68 TESSERA_O64, TESSERA_FOUR(64)
// clang-format on

#define TESSERA_WGMMA_FP8(N, ACCUMULATORS, r0, r1, r2, r3, r4, r5)                              \
  template <>                                                                                   \
  struct WgmmaFp8<N> {                                                                          \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b,        \
                                              int accumulate) {                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2                                     \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N                                       \
                   "k32.f32.e4m3.e4m3"                                                          \
                   " {" TESSERA_D##ACCUMULATORS                                                 \
                   "}, "                                                                        \
                   "%" #r0 ", %" #r1 ", p, 1, 1;\n}"                                            \
                   : TESSERA_O##ACCUMULATORS                                                    \
                   : "l"(a), "l"(b), "r"(accumulate));                                          \
    }                                                                                           \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, \
                                              int accumulate) {                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r5                                     \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N                                       \
                   "k32.f32.e4m3.e4m3"                                                          \
                   " {" TESSERA_D##ACCUMULATORS                                                 \
                   "}, "                                                                        \
                   "{%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", p, 1, 1;\n}"            \
                   : TESSERA_O##ACCUMULATORS                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));      \
    }                                                                                           \
  };
TESSERA_WGMMA_FP8(64, 32, 32, 33, 34, 35, 36, 37)
TESSERA_WGMMA_FP8(72, 36, 36, 37, 38, 39, 40, 41)
TESSERA_WGMMA_FP8(128, 64, 64, 65, 66, 67, 68, 69)
TESSERA_WGMMA_FP8(136, 68, 68, 69, 70, 71, 72, 73)

}  // namespace tessera::cuda::sm90
