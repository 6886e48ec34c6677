// SPDX-License-Identifier: Apache-2.0
// The whole backward pass in one kernel: backward/dkdv.cuh with dQ, whose sums are added to in any
// order or in turn.
#pragma once

#include "cuda/sm80/backward/dkdv.cuh"

namespace tessera::cuda::sm80 {

template <typename T, typename Row>
Code make_fused() {
  constexpr Tile kTile = Row::kTile;
  constexpr int kBucket = kTile.bucket, kWarps = kTile.warps, kStep = kTile.step;
  constexpr bool kRich = Row::kFeatures == kGeneral;
  static_assert(kTile.row_tiles == 1 && Row::kFeatures == kLean);
  static_assert(holds<DkdvStorage<T, kBucket, kWarps, kStep, true>>(kTile));
  return {reinterpret_cast<const void*>(
              &backward_dkdv_kernel<T, kBucket, kBucket, kWarps, kStep, kRich, true>),
          reinterpret_cast<const void*>(&finish_dq_kernel<T, kBucket, kWarps, kStep>),
          reinterpret_cast<const void*>(
              &backward_dkdv_kernel<T, kBucket, kBucket, kWarps, kStep, kRich, true, true>)};
}

}  // namespace tessera::cuda::sm80
