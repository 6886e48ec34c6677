// SPDX-License-Identifier: Apache-2.0
// Rows of fp8 and 16-bit tensors as fp32, and back.
#pragma once

#include "core/problem/problem.h"

namespace tessera::cpu {

// Writes scale * value of every row inside its sequence to `to`, which has the tensor's extents and
// is contiguous; what lies outside is never read and left alone.
void widen_rows(const Problem& problem, const Buffers& buffers, int index, float* to);

// Rounds value / scale of every element to the tensor's dtype, saturating in fp8, from a contiguous
// `from` of its extents. The tensor's amax, where it is given, becomes the largest |value|, above
// which is NaN.
void narrow_rows(const Problem& problem, const Buffers& buffers, int index, const float* from);

}  // namespace tessera::cpu
