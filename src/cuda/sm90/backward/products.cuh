// SPDX-License-Identifier: Apache-2.0
// The products of the backward kernels: batches of wgmma over whole tiles, issued and committed;
// and where those of dQ are added.
#pragma once

#include "cuda/sm90/machine/smem_tile.cuh"
#include "cuda/sm90/machine/wgmma.cuh"

namespace tessera::cuda::sm90 {

// D = A B^T over all columns of both, which are k-major: S^T = K Q^T and dP^T = V dO^T. a, b:
// k_major() of tiles of the types A and B.
template <typename Element, typename A, typename B, int kColumns, int kCount>
__device__ __forceinline__ void issue_scores(float (&d)[kCount], uint64_t a, uint64_t b) {
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kColumns / kStepK; ++i) {
    Wgmma<Element, 2 * kCount>::template ss<kMajorK, kMajorK>(d, a + A::k_major_step(i),
                                                              b + B::k_major_step(i), i > 0);
  }
  wgmma_commit();
}

// D += A B over kSteps k16 steps, A in registers and B's rows in shared memory: dV += P^T dO and
// dK += dS^T Q. b: mn_major() of a tile of type B.
template <typename Element, typename B, int kSteps, int kCount>
__device__ __forceinline__ void issue_sum(float (&d)[kCount], const uint32_t (&a)[4 * kSteps],
                                          uint64_t b) {
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    Wgmma<Element, 2 * kCount>::template rs<kMajorMN>(d, a + 4 * i, b + B::mn_major_step(i), 1);
  }
  wgmma_commit();
}

// D = A B over kSteps k16 steps, B's rows in shared memory: dQ = dS K. a, b: k_major() or
// mn_major() of a tile of type A, as kMajor says, and mn_major() of one of type B.
template <typename Element, typename A, typename B, Major kMajor, int kSteps, int kCount>
__device__ __forceinline__ void issue_columns(float (&d)[kCount], uint64_t a, uint64_t b) {
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    Wgmma<Element, 2 * kCount>::template ss<kMajor, kMajorMN>(
        d, a + (kMajor == kMajorK ? A::k_major_step(i) : A::mn_major_step(i)),
        b + B::mn_major_step(i), i > 0);
  }
  wgmma_commit();
}

// Part w of a block of dQ to its sums. first: nothing has been added there, not even zeros.
template <bool kMayStore, int kColumns, int kCount>
__device__ __forceinline__ void add_dq(float* part, int w, const float (&dQ)[kCount], bool first) {
  // The second owner of 96 columns has 32.
  const int groups = kColumns == 96 && w == 1 ? 4 : kCount / 4;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    if (kColumns == 96 && i >= groups) break;
    float* const to = part + 4 * kWarpgroup * i;
    if constexpr (kMayStore) {
      store_or_add_to_global(first, to, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
    } else {
      add_to_global(to, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
    }
  }
}

}  // namespace tessera::cuda::sm90
