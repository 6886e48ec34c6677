// SPDX-License-Identifier: Apache-2.0
// What lets a thread have several groups of its own copies (copy_async) under way.
#pragma once

#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// What the thread has started to copy since the last call is a group.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// All of the thread's groups are there but the last `left`, of which there are at most kMost.
template <int kMost>
__device__ __forceinline__ void copy_async_wait_but(int left) {
  if constexpr (kMost > 0) {
    if (left < kMost) return copy_async_wait_but<kMost - 1>(left);
  }
  asm volatile("cp.async.wait_group %0;" ::"n"(kMost) : "memory");
}

// Whether the phase of this parity has completed, for all lanes of a warp; does not wait.
__device__ __forceinline__ bool mbarrier_passed(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return __all_sync(kAllLanes, done);
}

}  // namespace tessera::cuda::sm90
