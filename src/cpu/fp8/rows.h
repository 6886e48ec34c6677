// SPDX-License-Identifier: Apache-2.0
// Rows of fp8 and 16-bit tensors as fp32, and back.
#pragma once

#include "core/problem/problem.h"

namespace tessera::cpu {

// Writes scale * value of every row inside its sequence to `to`, which has the tensor's extents and
// is contiguous; what lies outside is never read and left alone.
void widen_rows(const Problem& problem, const Buffers& buffers, int index, float* to);

// Writes scale * the `count` elements behind element `at` of a tensor.
void widen_row(const void* data, int64_t at, int32_t dtype, float scale, int64_t count, float* to);

// Rounds value / scale of every element to the tensor's dtype, saturating in fp8, from rows of its
// extents that lie `step` elements apart. The tensor's amax, where it is given, becomes the largest
// |value|, above which is NaN.
void narrow_rows(const Problem& problem, const Buffers& buffers, int index, const float* from,
                 int64_t step);

}  // namespace tessera::cpu
