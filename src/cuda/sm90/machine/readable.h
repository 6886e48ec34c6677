// SPDX-License-Identifier: Apache-2.0
// What TMA can read, as far as shapes, strides and addresses tell. No CUDA header.
#pragma once

#include <cstdint>

#include "core/problem/problem.h"

namespace tessera::cuda::sm90 {

constexpr int64_t kMostStride = int64_t{1} << 39;  // elements; TMA strides are below 2^40 bytes

// True if TMA can read the bias at `base` as rows of keys in q's 16-bit type.
bool maps_bias(const Problem& problem, const void* base);

}  // namespace tessera::cuda::sm90
