// SPDX-License-Identifier: Apache-2.0
// What a thread holds of an accumulator: of each of two rows the elements e = 0, 1, ..., which
// stand at columns 8 (e / 2) + e % 2 from its first one; the four threads of a quad share the rows.
#pragma once

#include "cuda/sm90/ptx.cuh"

namespace tessera::cuda::sm90 {

// How many elements of a row stand before `column`, counted from the thread's first one.
__device__ __forceinline__ int elements_before(int column) {
  return column <= 0 ? 0 : column / 8 * 2 + min(column % 8, 2);
}
__device__ __forceinline__ uint32_t low_bits(int n) {
  return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1;
}
// Bit e - 32 word: element e stands in columns [lo, hi).
__device__ __forceinline__ uint32_t element_bits(int lo, int hi, int word = 0) {
  return low_bits(elements_before(hi) - 32 * word) & ~low_bits(elements_before(lo) - 32 * word);
}

// x[i] of thread t of the quad becomes x[t] of thread i.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int thread) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = thread & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i | bit], bit);
      (upper ? x[i] : x[i | bit]) = got;
    }
  }
}

}  // namespace tessera::cuda::sm90
