// SPDX-License-Identifier: Apache-2.0
// backward_fused_lean.cuh with two buffers of dO, for devices whose shared memory holds them.
#pragma once

#include "cuda/sm80/backward_fused_lean.cuh"

namespace tessera::cuda::sm80 {

template <typename T, int kBucket, int kRowTiles, int kWarps, int kStep, unsigned kFeatures>
Kernel make_backward_fused_deep(int dtype) {
  return make_backward_fused_lean<T, kBucket, kRowTiles, kWarps, kStep, kFeatures, 2>(dtype);
}

}  // namespace tessera::cuda::sm80
