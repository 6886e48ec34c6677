// SPDX-License-Identifier: Apache-2.0
// What follows from a row of stream/table.def: types, extents and shared memory of a CTA.
#pragma once

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/sm80/stream/tile.h"
#include "cuda/sm80/stream/work.cuh"

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
  struct Weights {  // of the parts of a unit
    float max[kMostParts][kRows];
    float2 total[kRows];  // maximum, sum
  };
  // Quads of parts that a thread has on their way as it sums, as many as there is room for behind
  // the weights.
  static constexpr int kRoom = (int(sizeof(Stage) * kTeams * kStages) - int(sizeof(Weights))) /
                               int(kThreads * sizeof(float4));
  static constexpr int kCopies = kRoom >= 32 ? 32 : kRoom >= 16 ? 16 : kRoom >= 8 ? 8 : 0;

  struct Copies {
    alignas(16) float4 of[kCopies > 0 ? kCopies : 1][kThreads];
  };
  struct NoCopies {};

  struct Storage {
    Element q[kRows * kQStride];
    float q_scale[kRows];  // what a row of q was divided by
    Start start;
    bool last;
    union {
      Stage ring[kTeams][kStages];
      Parts parts;
      struct {
        Weights weights;
        [[no_unique_address]] std::conditional_t<(kCopies > 0), Copies, NoCopies> copies;
      } merge;
    };
  };
};

}  // namespace tessera::cuda::sm80
