// SPDX-License-Identifier: Apache-2.0
// Division by a number that the host knows.
#pragma once

#include <cstdint>

#include "core/mask/philox.h"  // TESSERA_HOST_DEVICE

namespace tessera::cuda {

// For dividends in [0, 2^31): one multiplication.
struct Divisor {
  int divisor;
  uint32_t factor, shift;

  static Divisor of(int divisor) {
    uint32_t shift = 0;
    while ((int64_t{1} << shift) < divisor) ++shift;
    const uint64_t factor = ((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor;
    return {divisor, static_cast<uint32_t>(factor), shift};
  }
  TESSERA_HOST_DEVICE int quotient(int x) const {
#ifdef __CUDA_ARCH__
    return static_cast<int>(__umulhi(static_cast<uint32_t>(x) * 2, factor) >> shift);
#else
    return x / divisor;
#endif
  }
};

}  // namespace tessera::cuda
