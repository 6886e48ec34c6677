// SPDX-License-Identifier: Apache-2.0
// Keys in V^T, counted alike by the rules, which have no CUDA header, and by the kernels.
#pragma once

#include <cstdint>

#include "core/count.h"
#include "core/mask/philox.h"  // TESSERA_HOST_DEVICE

namespace tessera::cuda::sm90 {

// Where the keys of a sequence stand in V^T: those of a packed side from a multiple of a block on,
// so that no block of one sequence has keys of another.
constexpr int kBlockOfKeys = 128;
TESSERA_HOST_DEVICE int transposed_start(bool packed, int first, int n) {
  return packed ? first / kBlockOfKeys * kBlockOfKeys + n * kBlockOfKeys : 0;
}
inline Count transposed_keys(bool packed, int64_t extent, int64_t batch) {
  constexpr int64_t kUnit = 16;  // of a load
  if (!packed) return Count{extent}.up_to(kUnit);
  return (Count{extent / kBlockOfKeys} + batch) * kBlockOfKeys;
}

}  // namespace tessera::cuda::sm90
