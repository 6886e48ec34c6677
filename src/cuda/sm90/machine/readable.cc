// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/machine/readable.h"

namespace tessera::cuda::sm90 {

bool maps_bias(const Problem& problem, const void* base) {
  const Tensor& bias = problem.tensor[TESSERA_BIAS];
  const auto accepts = [&](int axis) {
    const int64_t stride = bias.stride[axis];
    return bias.extent[axis] <= 1 || (stride % 8 == 0 && stride < kMostStride);
  };
  return bias.dtype == problem.tensor[TESSERA_Q].dtype && bias.extent[2] > 1 &&
         bias.stride[2] > 0 && bias.extent[3] > 1 && bias.stride[3] == 1 && accepts(0) &&
         accepts(1) && accepts(2) && reinterpret_cast<uintptr_t>(base) % 16 == 0;
}

}  // namespace tessera::cuda::sm90
