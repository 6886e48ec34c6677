// SPDX-License-Identifier: Apache-2.0
// The parts of validate() that live in files of their own. Each answers the first broken rule.
#pragma once

#include "core/problem.h"

namespace tessera {

// dtypes, shapes, byte sizes, strides and self-overlap of every tensor of a problem whose formats,
// presence of tensors and kinds of lengths are legal.
Status validate_tensors(const Problem& problem);

// Bytes from the first to past the last element fit in 63 bits, and so does every product of
// extents. Extents are not negative.
bool fits_in_memory(const Tensor& tensor, int rank);

}  // namespace tessera
