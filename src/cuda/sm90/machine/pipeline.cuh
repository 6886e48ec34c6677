// SPDX-License-Identifier: Apache-2.0
// A ring of shared-memory stages between one producer and those who read what it brings.
//
// Each stage has two barriers: full (1 arrival, the producer's, plus the bytes of its copies) and
// empty (as many arrivals as init() is told: of each reading warpgroup, warp or thread). Both sides
// walk the stages with a Ring of their own; the phase of a stage flips each time round. The first
// wait for full is for phase 0; the producer's first wait for empty must fall through, so it waits
// for the phase before.
#pragma once

#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ Ring next() const {
    Ring ring = *this;
    ring.advance();
    return ring;
  }
};

// The ring of a tensor that is walked in step with another: where both have as many stages, the
// other's, and the registers of its own one are free.
template <int kShared, int kOwn>
__device__ __forceinline__ const Ring<kOwn>& own_or_shared(const Ring<kShared>& shared,
                                                           const Ring<kOwn>& own) {
  if constexpr (kShared == kOwn) {
    return shared;
  } else {
    return own;
  }
}

// Addresses of the barriers of kStages stages: full[kStages], then empty[kStages].
template <int kStages>
struct StageBarriers {
  uint32_t address;

  __device__ __forceinline__ uint32_t full(int stage) const { return address + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return address + 8 * (kStages + stage);
  }

  __device__ __forceinline__ void init(int readers) const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), readers);
    }
  }
  // Producer: the stage is mine; `bytes` will arrive.
  __device__ __forceinline__ void acquire(const Ring<kStages>& ring, int bytes) const {
    mbarrier_wait(empty(ring.stage), ring.phase ^ 1);
    mbarrier_arrive_expect(full(ring.stage), bytes);
  }
  // Reader: the bytes are there.
  __device__ __forceinline__ void wait(const Ring<kStages>& ring) const {
    mbarrier_wait(full(ring.stage), ring.phase);
  }
  // Reader, by as many threads as init() was told: I shall not read the stage again.
  __device__ __forceinline__ void release(const Ring<kStages>& ring) const {
    mbarrier_arrive(empty(ring.stage));
  }
};

}  // namespace tessera::cuda::sm90
