// SPDX-License-Identifier: Apache-2.0
// Addresses in the shared memory of a CTA of a pair (backward/pair/kernel.cuh), and its barriers.
#pragma once

#include <cstddef>

#include "cuda/sm90/backward/fused/turns.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// Kernel: a BackwardPair.
template <typename Kernel>
struct PairShared {
  using Storage = typename Kernel::SharedStorage;
  using Order = typename Kernel::Order;
  static constexpr int kQStages = Kernel::kQStages, kGradOStages = Kernel::kGradOStages,
                       kBuffers = Kernel::kBuffers, kWarps = Kernel::kWarps;

  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base + offsetof(Storage, k); }
  __device__ __forceinline__ uint32_t v() const { return base + offsetof(Storage, v); }
  __device__ __forceinline__ uint32_t k_other() const { return base + offsetof(Storage, k_other); }
  __device__ __forceinline__ uint32_t q(int stage) const {
    return base + offsetof(Storage, q) + stage * Kernel::QTile::kBytes;
  }
  __device__ __forceinline__ uint32_t grad_o(int stage) const {
    return base + offsetof(Storage, grad_o) + stage * Kernel::GradOTile::kBytes;
  }
  __device__ __forceinline__ uint32_t ds(int buffer) const {
    return base + offsetof(Storage, ds) + buffer * Kernel::GradientTile::kBytes;
  }
  __device__ __forceinline__ uint32_t weights(int warp) const {
    return base + offsetof(Storage, weights) + warp * Kernel::Features::kPieceBytes;
  }
  __device__ __forceinline__ uint32_t kept(int thread) const {
    return base + offsetof(Storage, kept) + 4 * thread;
  }
  __device__ __forceinline__ uint32_t block(int stage) const {
    return base + offsetof(Storage, blocks) + 8 * stage;
  }
  __device__ __forceinline__ uint32_t mask(int stage) const {
    return base + offsetof(Storage, mask) + stage * Kernel::kMaskBytes;
  }
  // The interval of a key of the pair's tile.
  __device__ __forceinline__ uint32_t span(int key) const {
    return base + offsetof(Storage, spans) + 8 * key;
  }
  __device__ __forceinline__ uint32_t lse2(int stage) const {
    return base + offsetof(Storage, lse2) + stage * Kernel::kTileM * 4;
  }
  __device__ __forceinline__ uint32_t delta(int stage) const {
    return base + offsetof(Storage, delta) + stage * Kernel::kTileM * 4;
  }
  __device__ __forceinline__ uint32_t kv_barrier() const {
    return base + offsetof(Storage, kv_barrier);
  }
  __device__ __forceinline__ StageBarriers<kQStages> q_barriers() const {
    return {base + uint32_t(offsetof(Storage, q_barriers))};
  }
  __device__ __forceinline__ StageBarriers<kGradOStages> grad_o_barriers() const {
    return {base + uint32_t(offsetof(Storage, grad_o_barriers))};
  }
  __device__ __forceinline__ StageBarriers<1> weight_barriers() const {
    return {base + uint32_t(offsetof(Storage, weight_barriers))};
  }
  __device__ __forceinline__ StageBarriers<kBuffers> ds_barriers() const {
    return {base + uint32_t(offsetof(Storage, ds_barriers))};
  }

  __device__ __forceinline__ Order turns(int rank) const {
    return Order(base + uint32_t(offsetof(Storage, turn_barriers)),
                 base + uint32_t(offsetof(Storage, turn_stored)), rank);
  }
  __device__ __forceinline__ uint32_t ticket() const { return base + offsetof(Storage, ticket); }

  __device__ __forceinline__ void init() const {
    if constexpr (Kernel::kPassesTurns) turns(0).init();
    mbarrier_init(kv_barrier(), 1);
    const auto init_stages = [](const auto& barriers, int stages, int full, int empty) {
      for (int stage = 0; stage < stages; ++stage) {
        mbarrier_init(barriers.full(stage), full);
        mbarrier_init(barriers.empty(stage), empty);
      }
    };
    init_stages(q_barriers(), kQStages, 1, 2 * kWarps);
    init_stages(grad_o_barriers(), kGradOStages, 1, 2 * kWarps);
    init_stages(weight_barriers(), 1, kWarps, kWarps);
    init_stages(ds_barriers(), kBuffers, kWarps, 2 * Kernel::kCtas * kWarps);
    mbarrier_init_fence();
  }
};

}  // namespace tessera::cuda::sm90
