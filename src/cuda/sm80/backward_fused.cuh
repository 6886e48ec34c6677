// SPDX-License-Identifier: Apache-2.0
// The whole backward pass in one kernel, its sums of dQ in any order or in turn: backward_dkdv.cuh
// with dQ.
#pragma once

#include "cuda/sm80/backward_dkdv.cuh"

namespace tessera::cuda::sm80 {

template <typename T, int kBucket, int kRowTiles, int kWarps, int kStep, unsigned kFeatures>
Kernel make_backward_fused(int dtype) {
  static_assert(kRowTiles == 1);
  return {
      Pass::backward_fused,
      kFeatures,
      dtype,
      kBucket,
      {kRowTiles, kWarps, kStep},
      sizeof(DkdvStorage<T, kBucket, kWarps, kStep, true>),
      reinterpret_cast<const void*>(&backward_dkdv_kernel<T, kBucket, kBucket, kWarps, kStep,
                                                          kFeatures == kEveryFeature, true>),
      reinterpret_cast<const void*>(&finish_dq_kernel<T, kBucket, kWarps, kStep>),
      reinterpret_cast<const void*>(&backward_dkdv_kernel<T, kBucket, kBucket, kWarps, kStep,
                                                          kFeatures == kEveryFeature, true, true>)};
}

}  // namespace tessera::cuda::sm80
