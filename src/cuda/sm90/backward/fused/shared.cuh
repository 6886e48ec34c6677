// SPDX-License-Identifier: Apache-2.0
// Addresses in the shared memory of the fused backward kernel, and its barriers.
#pragma once

#include <cstddef>

#include "cuda/sm90/backward/fused/dbias.cuh"
#include "cuda/sm90/backward/fused/turns.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// Kernel: a Backward.
template <typename Kernel>
struct BackwardShared {
  using Storage = typename Kernel::SharedStorage;
  using Order = typename Kernel::Order;

  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base + offsetof(Storage, k); }
  __device__ __forceinline__ uint32_t v() const { return base + offsetof(Storage, v); }
  __device__ __forceinline__ uint32_t q(int stage) const {
    return base + offsetof(Storage, q) + stage * Kernel::QTile::kBytes;
  }
  __device__ __forceinline__ uint32_t grad_o(int stage) const {
    return base + offsetof(Storage, grad_o) + stage * Kernel::GradOTile::kBytes;
  }
  __device__ __forceinline__ uint32_t ds(int buffer) const {
    return base + offsetof(Storage, ds) + buffer * Kernel::GradientTile::kBytes;
  }
  __device__ __forceinline__ BiasStaging bias_staging() const {
    return {base + uint32_t(offsetof(Storage, bias_sums)),
            base + uint32_t(offsetof(Storage, bias_barriers))};
  }
  __device__ __forceinline__ uint32_t lse2(int stage) const {
    return base + offsetof(Storage, lse2) + stage * Kernel::kStatistics * Kernel::kTileM * 4;
  }
  __device__ __forceinline__ uint32_t delta(int stage) const {
    return base + offsetof(Storage, delta) + stage * Kernel::kStatistics * Kernel::kTileM * 4;
  }
  // E4M3 lies in place of V in kernels that have products of it.
  __device__ __forceinline__ uint32_t v8() const { return v(); }
  __device__ __forceinline__ uint32_t k8() const { return v8() + Kernel::V8Tile::kBytes; }
  __device__ __forceinline__ uint32_t q8(int stage) const {
    return k8() + Kernel::K8Tile::kBytes + stage * Kernel::kRoundedBytes;
  }
  __device__ __forceinline__ uint32_t grad_o8(int stage) const {
    return q8(stage) + Kernel::Q8Tile::kBytes;
  }
  __device__ __forceinline__ uint32_t block(int stage) const {
    return base + offsetof(Storage, blocks) + 8 * stage;
  }
  __device__ __forceinline__ uint32_t mask(int stage) const {
    return base + offsetof(Storage, mask) + stage * Kernel::kMaskBytes;
  }
  __device__ __forceinline__ uint32_t spans() const { return base + offsetof(Storage, masks); }
  __device__ __forceinline__ uint32_t kv_barrier() const {
    return base + offsetof(Storage, kv_barrier);
  }
  __device__ __forceinline__ uint32_t q_barrier(int stage) const {
    return base + offsetof(Storage, q_barriers) + 8 * stage;
  }
  __device__ __forceinline__ uint32_t grad_o_barrier(int stage) const {
    return base + offsetof(Storage, grad_o_barriers) + 8 * stage;
  }
  __device__ __forceinline__ StageBarriers<Kernel::kGradientBuffers> ds_barriers() const {
    return {base + uint32_t(offsetof(Storage, ds_barriers))};
  }
  __device__ __forceinline__ uint32_t added_barrier() const {
    return base + offsetof(Storage, added_barrier);
  }
  __device__ __forceinline__ uint32_t sums_barrier() const {
    return base + offsetof(Storage, sums_barrier);
  }
  __device__ __forceinline__ Order turns() const {
    return Order(base + uint32_t(offsetof(Storage, turn_barriers)),
                 base + uint32_t(offsetof(Storage, turn_stored)));
  }

  // Called by one thread.
  __device__ __forceinline__ void init() const {
    mbarrier_init(kv_barrier(), 1);
    if constexpr (Kernel::kConverts) {
      mbarrier_init(added_barrier(), Kernel::kOwnerWarps);
      mbarrier_init(sums_barrier(), 1);
    }
    for (int stage = 0; stage < Kernel::kStages; ++stage) mbarrier_init(q_barrier(stage), 1);
    for (int stage = 0; stage < Kernel::kGradOStages; ++stage)
      mbarrier_init(grad_o_barrier(stage), 1);
    for (int buffer = 0; buffer < Kernel::kGradientBuffers; ++buffer) {
      mbarrier_init(ds_barriers().full(buffer), Kernel::kOwnerWarps);
      mbarrier_init(ds_barriers().empty(buffer), Kernel::kOwnerWarps);
    }
    if constexpr (Kernel::kSendsBias) {
      for (int owner = 0; owner < Kernel::kOwners; ++owner) bias_staging().of(owner).init();
    }
    if constexpr (Kernel::kPassesTurns) turns().init();
    mbarrier_init_fence();
  }
};

}  // namespace tessera::cuda::sm90
