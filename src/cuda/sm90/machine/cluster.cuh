// SPDX-License-Identifier: Apache-2.0
// What CTAs of a cluster read of each other's shared memory; the rest of clusters is in ptx.cuh.
#pragma once

#include <cstdint>

namespace tessera::cuda::sm90 {

__device__ __forceinline__ int rank_in_cluster() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// from: an address_in() some CTA that has not ended.
__device__ __forceinline__ float4 load4_from_cluster(uint32_t from) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ float2 load2_from_cluster(uint32_t from) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(from)
               : "memory");
  return x;
}

}  // namespace tessera::cuda::sm90
