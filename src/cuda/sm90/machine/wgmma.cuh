// SPDX-License-Identifier: Apache-2.0
// wgmma: D[64, N] (+)= A[64, 16] B[16, N] by one warpgroup, 16-bit operands, fp32 accumulators.
//
// B comes from shared memory through a descriptor, A from shared memory or from registers. Products
// are asynchronous: fence() before the first of a batch, commit() after the last, wait<n>() until
// at most n batches are in flight. Accumulators may not be touched in between; pin() around the
// fence and the wait keeps the compiler's register moves on their side.
//
// Accumulator element e of lane l of warp w stands at
//   row 16 w + l / 4 + 8 (e / 2 % 2),   column 8 (e / 4) + 2 (l % 4) + e % 2,
// so elements 8 k .. 8 k + 7, rounded and packed in pairs, are the A registers of k16 step k.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tessera::cuda::sm90 {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kInFlight>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}
template <int N>
__device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i]));
}

// How an operand lies in shared memory: kMajorK with its k axis contiguous (Q and K), kMajorMN with
// its other axis contiguous (V as B).
enum Major { kMajorK = 0, kMajorMN = 1 };

// Descriptor of an operand in 128-byte-swizzled shared memory; byte distances. k-major: the leading
// distance is unused and the stride is between groups of 8 rows. mn-major: leading = to the next 64
// columns, stride = to the next 8 rows of k.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address, uint32_t leading,
                                                    uint32_t stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(stride >> 4) << 32 |
         static_cast<uint64_t>(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// The same without a swizzle, k-major: units of 16 bytes, those of eight rows one after the other.
// leading = to the next unit of a row, stride = to the next 8 rows.
__device__ __forceinline__ uint64_t unswizzled_descriptor(uint32_t address, uint32_t leading,
                                                          uint32_t stride) {
  return static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(leading >> 4) << 16 |
         (address & 0x3ffff) >> 4;
}

// Wgmma<Element, N>::ss and ::rs. One specialisation per type and N, from one macro: PTX wants
// every accumulator named.
template <typename Element, int N>
struct Wgmma;

// Accumulators by eights: their names in the text, and the operands.
// clang-format off
#define TESSERA_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TESSERA_D16 TESSERA_D8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define TESSERA_D24 TESSERA_D16 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define TESSERA_D32 TESSERA_D24 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_D40 TESSERA_D32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define TESSERA_D48 TESSERA_D40 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define TESSERA_D56 TESSERA_D48 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define TESSERA_D64 TESSERA_D56 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_D72 TESSERA_D64 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define TESSERA_D80 TESSERA_D72 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define TESSERA_D88 TESSERA_D80 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define TESSERA_D96 TESSERA_D88 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define TESSERA_D104 TESSERA_D96 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define TESSERA_D112 TESSERA_D104 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define TESSERA_D120 TESSERA_D112 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define TESSERA_D128 TESSERA_D120 ", " "%120, %121, %122, %123, %124, %125, %126, %127"
#define TESSERA_EIGHT(i)                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TESSERA_THIRTYTWO(i) TESSERA_EIGHT(i), TESSERA_EIGHT(i + 8), TESSERA_EIGHT(i + 16), TESSERA_EIGHT(i + 24)
// clang-format on

// r0 .. r7: operand numbers after the accumulators.
#define TESSERA_WGMMA(T, TYPE, N, ACCUMULATORS, r0, r1, r2, r3, r4, r5, r6, r7)                 \
  template <>                                                                                   \
  struct Wgmma<T, N> {                                                                          \
    template <Major kA, Major kB>                                                               \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b,        \
                                              int accumulate) {                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2                                     \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE              \
                   " {" TESSERA_D##ACCUMULATORS                                                 \
                   "}, "                                                                        \
                   "%" #r0 ", %" #r1 ", p, 1, 1, %" #r3 ", %" #r4 ";\n}"                        \
                   : TESSERA_O##ACCUMULATORS                                                    \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(int(kA)), "n"(int(kB)));              \
    }                                                                                           \
    template <Major kB>                                                                         \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, \
                                              int accumulate) {                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r5                                     \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE              \
                   " {" TESSERA_D##ACCUMULATORS                                                 \
                   "}, "                                                                        \
                   "{%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", p, 1, 1, %" #r6 ";\n}"  \
                   : TESSERA_O##ACCUMULATORS                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),       \
                     "n"(int(kB)));                                                             \
    }                                                                                           \
  };
#define TESSERA_WGMMA_TYPES(...)                    \
  TESSERA_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__) \
  TESSERA_WGMMA(__half, "f16", __VA_ARGS__)

// clang-format off
#define TESSERA_O16 TESSERA_EIGHT(0), TESSERA_EIGHT(8)
#define TESSERA_O32 TESSERA_THIRTYTWO(0)
#define TESSERA_O40 TESSERA_THIRTYTWO(0), TESSERA_EIGHT(32)
#define TESSERA_O48 TESSERA_THIRTYTWO(0), TESSERA_EIGHT(32), TESSERA_EIGHT(40)
#define TESSERA_O56 TESSERA_THIRTYTWO(0), TESSERA_EIGHT(32), TESSERA_EIGHT(40), TESSERA_EIGHT(48)
#define TESSERA_O64 TESSERA_THIRTYTWO(0), TESSERA_THIRTYTWO(32)
#define TESSERA_O72 TESSERA_THIRTYTWO(0), TESSERA_THIRTYTWO(32), TESSERA_EIGHT(64)
#define TESSERA_O80 TESSERA_THIRTYTWO(0), TESSERA_THIRTYTWO(32), TESSERA_EIGHT(64), TESSERA_EIGHT(72)
#define TESSERA_O88 TESSERA_THIRTYTWO(0), TESSERA_THIRTYTWO(32), TESSERA_EIGHT(64), TESSERA_EIGHT(72), TESSERA_EIGHT(80)
#define TESSERA_O96 TESSERA_THIRTYTWO(0), TESSERA_THIRTYTWO(32), TESSERA_THIRTYTWO(64)
#define TESSERA_O128 TESSERA_THIRTYTWO(0), TESSERA_THIRTYTWO(32), TESSERA_THIRTYTWO(64), TESSERA_THIRTYTWO(96)
// clang-format on
TESSERA_WGMMA_TYPES(32, 16, 16, 17, 18, 19, 20, 21, 22, 23)
TESSERA_WGMMA_TYPES(64, 32, 32, 33, 34, 35, 36, 37, 38, 39)
TESSERA_WGMMA_TYPES(80, 40, 40, 41, 42, 43, 44, 45, 46, 47)
TESSERA_WGMMA_TYPES(96, 48, 48, 49, 50, 51, 52, 53, 54, 55)
TESSERA_WGMMA_TYPES(112, 56, 56, 57, 58, 59, 60, 61, 62, 63)
TESSERA_WGMMA_TYPES(128, 64, 64, 65, 66, 67, 68, 69, 70, 71)
TESSERA_WGMMA_TYPES(144, 72, 72, 73, 74, 75, 76, 77, 78, 79)
TESSERA_WGMMA_TYPES(160, 80, 80, 81, 82, 83, 84, 85, 86, 87)
TESSERA_WGMMA_TYPES(176, 88, 88, 89, 90, 91, 92, 93, 94, 95)
TESSERA_WGMMA_TYPES(192, 96, 96, 97, 98, 99, 100, 101, 102, 103)
TESSERA_WGMMA_TYPES(256, 128, 128, 129, 130, 131, 132, 133, 134, 135)

}  // namespace tessera::cuda::sm90
