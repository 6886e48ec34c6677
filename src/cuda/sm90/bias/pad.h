// SPDX-License-Identifier: Apache-2.0
// A copy of a 16-bit bias with rows that begin at multiples of 16 bytes.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem/problem.h"

namespace tessera::cuda::sm90 {

// Queues the copy of `bias`, at `data`, to `to`, which is as with_padded_bias() has it and at `copy`.
// What lies behind the last key of a row becomes 0.
Status launch_pad_bias(const Tensor& bias, void* data, const Tensor& to, void* copy,
                       cudaStream_t stream);

}  // namespace tessera::cuda::sm90
