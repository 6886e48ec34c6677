// SPDX-License-Identifier: Apache-2.0
// Launches over the sequences and heads of a dense mask.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem/problem.h"
#include "core/status.h"

namespace tessera::cuda::sm90 {

// body(first sequence, sequences) for each launch: sequences and heads of a mask share the last
// axis of a grid, which ends at 65535. Heads are fewer than that (backend.cc).
template <typename Body>
Status launch_by_sequences(const Tensor& mask, const Body& body) {
  constexpr int64_t kMostOfGrid = 65535;
  const int64_t step = kMostOfGrid / std::max<int64_t>(mask.extent[1], 1);
  for (int64_t first = 0; first < mask.extent[0]; first += step) {
    TESSERA_RETURN_IF_ERROR(body(first, std::min(step, mask.extent[0] - first)));
  }
  return {};
}

}  // namespace tessera::cuda::sm90
