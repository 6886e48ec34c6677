// SPDX-License-Identifier: Apache-2.0
// The products of the backward kernels: batches of wgmma over whole tiles, issued and committed.
#pragma once

#include "cuda/sm90/smem_tile.cuh"
#include "cuda/sm90/wgmma.cuh"

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

}  // namespace tessera::cuda::sm90
