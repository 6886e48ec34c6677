// SPDX-License-Identifier: Apache-2.0
// A band in 32 bits whose diagonal needs 64: what GPUs make of positions.
#pragma once

#include "core/mask/band.h"

namespace tessera {

// A band that was found in 64 bits, in 32: of a diagonal and sides anywhere, and at most kMostShift
// rows and keys. No key is so far from a row, so that what lies beyond may be cut, all alike to
// keep their order.
inline constexpr int32_t kMostShift = 1 << 29;

TESSERA_HOST_DEVICE BasicBand<int32_t> narrowed(const BasicBand<int64_t>& band) {
  const auto cut = [](int64_t diagonal) {
    constexpr int64_t kMost = kMostShift;
    return static_cast<int32_t>(diagonal < -kMost ? -kMost : diagonal > kMost ? kMost : diagonal);
  };
  const int32_t shift = cut(band.shift);
  BasicWindow<int32_t> window = band.window.as<int32_t>();
  window.left = shift - cut(band.shift - band.window.left);
  window.right = cut(band.shift + band.window.right) - shift;
  return {static_cast<int32_t>(band.len_q), static_cast<int32_t>(band.len_k), shift, window};
}

}  // namespace tessera
