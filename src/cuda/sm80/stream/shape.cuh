// SPDX-License-Identifier: Apache-2.0
// What follows from a row of stream/table.def: types, extents and shared memory of a CTA.
#pragma once

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/work/work.cuh"
#include "cuda/sm80/stream/tile.h"

namespace tessera::cuda::sm80 {

// Columns of a row of table.def, and what follows from them. T: the type of q and o.
template <typename T, int kBucket, int kTileRows, int kTileWarps, int kTileTeam, int kTileKeys,
          int kTileStages, bool kE4m3>
struct Stream {
  using Query = T;
  static constexpr bool kFp8 = kE4m3;
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

  struct Stage {
    alignas(16) char k[kKeys * kStride];
    alignas(16) char v[kKeys * kStride];
  };
  struct Parts {  // of the teams
    float o[kTeams][kRows][kD + 4];
    float max[kTeams][kRows], sum[kTeams][kRows];
  };
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
