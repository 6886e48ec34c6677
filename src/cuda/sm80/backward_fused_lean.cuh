// SPDX-License-Identifier: Apache-2.0
// The whole backward pass in one kernel, where its sums may be in any order:
// backward_dkdv_lean.cuh with dQ.
#pragma once

#include "cuda/sm80/backward_dkdv_lean.cuh"

namespace tessera::cuda::sm80 {

template <typename T, int kBucket, int kRowTiles, int kWarps, int kStep, bool kRich,
          int kStages = 1>
Kernel make_backward_fused_lean(int dtype) {
  Kernel kernel =
      make_backward_dkdv_lean<T, kBucket, kRowTiles, kWarps, kStep, kRich, kStages, true>(dtype);
  kernel.finish = reinterpret_cast<const void*>(&finish_dq_kernel<T, kBucket, kWarps, kStep>);
  return kernel;
}

}  // namespace tessera::cuda::sm80
