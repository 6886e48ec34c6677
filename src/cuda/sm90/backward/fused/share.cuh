// SPDX-License-Identifier: Apache-2.0
// A tile of keys that several CTAs share. A tile is too large a unit of work where tiles are few,
// or the last ones long: a causal one of a group of heads walks every block of every head. Each of
// its parts takes an equal share of the group's heads, or of the blocks of queries, and sums dK and
// dV of its own. It leaves them in memory as they lie in registers, while the dQ of its last block
// is made. The one of two neighbours that comes later adds both up and goes on to the next pair;
// who has the sum of all stores dK and dV:
//
//   parts   0   1   2   3   4        pairs (0 1), (2 3), then (01 23), then (0123 4)
//
// dQ does not care: every (head, block) of a tile is one part's. What is added to what does not
// depend on who comes first, and nobody waits for anybody.
#pragma once

#include "cuda/sm90/backward/schedule/schedule.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// dK and dV of a warp's 16 keys. Warps do not know of each other: each counts its own arrivals.
// Kernel: a Backward.
template <typename Kernel>
class SharedSums {
 public:
  static constexpr int kOfK = Kernel::kTile.dqk / 2, kOfV = Kernel::kTile.dv / 2;  // of a thread

  // warp: of the tile's owners.
  __device__ __forceinline__ SharedSums(const BackwardParams& a, const KeyTile& tile, int warp)
      : a_(a), tile_(tile), warp_(warp) {}

  __device__ __forceinline__ void leave(const float (&dK)[kOfK], const float (&dV)[kOfV]) const {
    wait_for_predecessors();  // of this workspace
    store_sums(tile_.rank, dK, dV);
  }

  // True for the warp that has the sums of all parts in dK and dV. Called by all lanes, after
  // leave().
  __device__ __forceinline__ bool collect(float (&dK)[kOfK], float (&dV)[kOfV]) const {
    int mine = tile_.rank;  // the first of the parts that are added up here
    bool is_left = true;    // in memory
#pragma unroll 1
    for (int count = 1; count < tile_.parts; count *= 2) {
      const int other = mine ^ count;
      if (other < tile_.parts) {
        if (!is_left) store_sums(mine, dK, dV);
        if (!comes_second(max(mine, other))) return false;
        add_sums(other, dK, dV);
        is_left = false;
      }
      mine &= other;
    }
    return true;
  }

 private:
  // What this warp has stored is seen by who comes second, of the two that meet at a part.
  __device__ __forceinline__ bool comes_second(int part) const {
    __threadfence();
    __syncwarp();
    int before = 0;
    if (threadIdx.x % kWarp == 0) {
      const int place = tile_.place - tile_.rank + part;
      before = atomicAdd(a_.arrivals + place * Kernel::kOwnerWarps + warp_, 1);
    }
    before = __shfl_sync(kAllLanes, before, 0);
    __threadfence();
    return before != 0;
  }
  // This thread's first four.
  __device__ __forceinline__ float* sums_of(int part) const {
    const int64_t place = tile_.place - tile_.rank + part;
    return a_.part_sums + (place * Kernel::kOwnerWarps + warp_) * (kWarp * (kOfK + kOfV)) +
           4 * (threadIdx.x % kWarp);
  }
  __device__ __forceinline__ void store_sums(int part, const float (&dK)[kOfK],
                                             const float (&dV)[kOfV]) const {
    float* const to = sums_of(part);
    store(to, dK);
    store(to + kWarp * kOfK, dV);
  }
  __device__ __forceinline__ void add_sums(int part, float (&dK)[kOfK], float (&dV)[kOfV]) const {
    const float* const from = sums_of(part);
    add(from, dK);
    add(from + kWarp * kOfK, dV);
  }
  template <int kCount>
  static __device__ __forceinline__ void store(float* to, const float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      __stcg(reinterpret_cast<float4*>(to + kWarp * i), float4{d[i], d[i + 1], d[i + 2], d[i + 3]});
    }
  }
  template <int kCount>
  static __device__ __forceinline__ void add(const float* from, float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(from + kWarp * i));
      d[i] += x.x, d[i + 1] += x.y, d[i + 2] += x.z, d[i + 3] += x.w;
    }
  }

  const BackwardParams& a_;
  const KeyTile& tile_;
  const int warp_;
};

}  // namespace tessera::cuda::sm90
