// SPDX-License-Identifier: Apache-2.0
// Raw scores to exponents of 2.
#pragma once

#include "cuda/common/element.cuh"

namespace tessera::cuda::sm90 {

__device__ __forceinline__ float log2_scale(const Params& p) {
  return fmaxf(p.softmax_scale * kLog2e, kZeroScale);
}

}  // namespace tessera::cuda::sm90
