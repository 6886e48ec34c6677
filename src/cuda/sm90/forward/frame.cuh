// SPDX-License-Identifier: Apache-2.0
// What kernels have in common in which consumers keep tiles of queries while rings of K and V go
// past them.
#pragma once

#include <algorithm>
#include <cstddef>

#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// The barrier at which consumer w, of up to three, waits for its turn on the tensor cores.
constexpr __device__ __forceinline__ NamedBarrier turn_barrier(int w) {
  return NamedBarrier{1 + w};
}

// Heads of a tile: more than one, of which each consumer has as many as the others, where the column
// `heads` of its table says so.
template <typename Kernel>
constexpr int kHeadsOfTile = [] {
  if constexpr (requires { Kernel::kTile.heads; }) {
    return Kernel::kTile.heads;
  } else {
    return 1;
  }
}();
template <typename Kernel>
constexpr int kHeadsOfConsumer = std::max(kHeadsOfTile<Kernel> / Kernel::kConsumers, 1);
// The row of a tile, and its head of the tile's, that is row `row` of consumer w.
template <typename Kernel>
constexpr __device__ __forceinline__ int row_of(int w, int row = 0) {
  if (kHeadsOfConsumer < Kernel >> 1) return row % Kernel::kTileM;
  return kHeadsOfTile<Kernel> > 1 ? row : w * Kernel::kRows + row;
}
template <typename Kernel>
constexpr __device__ __forceinline__ int head_of(int w, int row = 0) {
  if (kHeadsOfTile<Kernel> == 1) return 0;
  return w * kHeadsOfConsumer<Kernel> + row / Kernel::kTileM;
}

// Addresses in shared memory, all from one uniform base (see uniform()). Storage has q, k, v, their
// barriers and those of the tiles that are described.
template <typename Kernel, typename Storage>
struct SharedRings {
  static constexpr auto kTile = Kernel::kTile;
  uint32_t base;

  __device__ __forceinline__ uint32_t q(int consumer, int stage) const {
    return base + offsetof(Storage, q) +
           (consumer * kTile.q_stages + stage) * Kernel::QTile::kBytes;
  }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return base + offsetof(Storage, k) + stage * Kernel::KTile::kBytes;
  }
  __device__ __forceinline__ uint32_t v(int stage) const {
    return base + offsetof(Storage, v) + stage * int{sizeof(Storage::v[0])};
  }
  __device__ __forceinline__ StageBarriers<kTile.q_stages> q_barriers(int consumer) const {
    return {base + uint32_t(offsetof(Storage, q_barriers)) + consumer * 16 * kTile.q_stages};
  }
  __device__ __forceinline__ StageBarriers<kTile.k_stages> k_barriers() const {
    return {base + uint32_t(offsetof(Storage, k_barriers))};
  }
  __device__ __forceinline__ StageBarriers<kTile.v_stages> v_barriers() const {
    return {base + uint32_t(offsetof(Storage, v_barriers))};
  }
  __device__ __forceinline__ StageBarriers<Kernel::kWorkStages> work_barriers() const {
    return {base + uint32_t(offsetof(Storage, work_barriers))};
  }
};

// Always true of an x that is not negative, but not known before x is. ptxas moves a wait for
// products up over arithmetic that does not depend on it, or leaves more before it than is
// written there. Behind a release that depends on x it stays behind x. The test is of bits:
// ptxas knows that an exponential has no sign.
__device__ __forceinline__ bool is_computed(float x) {
  constexpr int kMinusOne = 0xbf800000;
  return __float_as_int(x) != kMinusOne;
}

}  // namespace tessera::cuda::sm90
