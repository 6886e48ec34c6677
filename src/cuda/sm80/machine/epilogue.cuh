// SPDX-License-Identifier: Apache-2.0
// What leaves the registers: rows of results.
#pragma once

#include "cuda/common/finish.cuh"
#include "cuda/sm80/machine/load.cuh"

namespace tessera::cuda::sm80 {

// A warp's fragment of 16 rows and kN columns, to a shared tile of kColumns, rounded to T; fp32 as
// split_tile would leave it.
template <typename T, int kColumns, int kN>
__device__ __forceinline__ void store_fragment(T* rows, const float (&c)[kN / 2]) {
  static_assert(kN == kColumns || !kSplits<T>);
  constexpr int kStride = kSmemStride<T, kColumns>;
  const SplitScale scale = scale_of_fragment<T, kN>(c);
#pragma unroll
  for (int e = 0; e < kN / 2; e += 2) {
    const int column = e / 4 * 8 + lane_minor();
    T* row = rows + (lane_major() + e / 2 % 2 * 8) * kStride;
    if constexpr (kSplits<T>) {
      uint32_t hi, lo;
      Mma<T>::split(c[e] * scale.f, c[e + 1] * scale.f, hi, lo);
      auto* halves = reinterpret_cast<uint32_t*>(row);
      halves[column / 2] = hi;
      halves[(kColumns + column) / 2] = lo;
    } else {
      *reinterpret_cast<uint32_t*>(row + column) = pack<T>(c[e], c[e + 1]);
    }
  }
  if (kSplits<T> && threadIdx.x % 32 == 0) rows[kColumns] = scale.inverse;
}

// Zeros in a thread's share of row `half`. What nobody sees must be 0 whatever was added up there,
// and a factor of 0 leaves NaN as it is.
template <int kCount>
__device__ __forceinline__ void clear_row(float (&c)[kCount], int half) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) c[4 * (i / 2) + 2 * half + i % 2] = 0;
}

// Columns [0, width) of a thread's share of row `half`, times factor, to element `at` on of base,
// in the type T or fp32. vector_bytes: what divides the row's address.
template <typename T, int kN>
__device__ __forceinline__ void store_row(void* base, int64_t at, int dtype, int vector_bytes,
                                          const float (&c)[kN / 2], int half, float factor,
                                          int width) {
  const bool fp32 = sizeof(T) == 4 || dtype == TESSERA_FP32;
  const bool pairs = vector_bytes >= (fp32 ? 8 : 4);
#pragma unroll
  for (int i = 0; i < kN / 8; ++i) {
    const int column = 8 * i + lane_minor();
    const float low = c[4 * i + 2 * half] * factor, high = c[4 * i + 2 * half + 1] * factor;
    if (pairs && column + 1 < width) {
      if (fp32) {
        *reinterpret_cast<float2*>(static_cast<float*>(base) + at + column) = {low, high};
      } else if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint32_t*>(static_cast<T*>(base) + at + column) = pack<T>(low, high);
      }
    } else {
      if (column < width) store_float(base, at + column, dtype, low);
      if (column + 1 < width) store_float(base, at + column + 1, dtype, high);
    }
  }
}

}  // namespace tessera::cuda::sm80
