// SPDX-License-Identifier: Apache-2.0
// What follows from a row of stream/table.def: types, extents and shared memory of a CTA.
#pragma once

#include <type_traits>

#include "cuda/common/few/merge.cuh"
#include "cuda/sm80/stream/tile.h"

namespace tessera::cuda::sm80 {

// Columns of a row of table.def, and what follows from them. T: the type of q and o.
template <typename T, int kBucket, int kTileRows, int kTileWarps, int kTileTeam, int kTileKeys,
          int kTileStages, bool kE4m3>
struct Stream {
  using Query = T;
  static constexpr bool kFp8 = kE4m3, kE5m2 = false;
  using Element = std::conditional_t<kFp8, __half, T>;        // of the products
  using Stored = std::conditional_t<kFp8, __nv_fp8_e4m3, T>;  // of the cache
  static constexpr int kD = kBucket, kKeys = kTileKeys, kStages = kTileStages;
  static constexpr int kWarps = kTileWarps, kThreads = 32 * kWarps;
  static constexpr int kTeam = kTileTeam, kTeams = kWarps / kTeam;
  static constexpr int kRows = kTileRows, kGroups = kRows / kTeam / 8;  // of a warp
  static constexpr int kStepKeys = kTeams * kKeys;
  static constexpr int kStride = kD * sizeof(Stored) + 16;  // bytes of a row in a stage
  static constexpr int kQStride = kD + 8;                   // elements
  static_assert(kRows == 8 * kGroups * kTeam && kKeys % 16 == 0 && kKeys <= 32);

  static constexpr bool kKeepsHidden = false;  // zeros stand for what nobody sees
  static constexpr bool kKeepsQ = false;

  // How rows of K, V and q lie in shared memory (common/few/operands.cuh).
  static __device__ __forceinline__ uint32_t lane_address(uint32_t tile, int row, int unit) {
    return tile + row * kStride + unit * 16;
  }
  static __device__ __forceinline__ uint32_t at(uint32_t lanes, int unit) {
    return lanes + unit * 16;
  }
  static __device__ __forceinline__ uint32_t q_lane_address(uint32_t tile, int row, int unit) {
    return tile + row * kQStride * 2 + unit * 16;
  }
  static __device__ __forceinline__ uint32_t q_at(uint32_t lanes, int n, int unit) {
    return lanes + n * 8 * kQStride * 2 + unit * 16;
  }

  struct Stage {
    alignas(16) char k[kKeys * kStride];
    alignas(16) char v[kKeys * kStride];
  };
  using Parts = TeamParts<kTeams, kRows, kD>;
  struct Storage {
    Element q[kRows * kQStride];
    float q_scale[kRows];  // what a row of q was divided by
    bool last;
    union {
      Stage ring[kTeams][kStages];
      Parts parts;
    };
  };
};

}  // namespace tessera::cuda::sm80
