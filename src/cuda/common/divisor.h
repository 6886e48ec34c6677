// SPDX-License-Identifier: Apache-2.0
// Division by a number that the host knows.
#pragma once

#include <cstdint>
#include <initializer_list>

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

// The largest divisor of n up to `most`, and the least from `least` (up to n) on. Their work is the
// root of n: counting up or down to it would be n of a batch that is prime.
inline int divisor_up_to(int n, int most) {
  int best = 1;
  for (int64_t i = 1; i * i <= n; ++i) {
    if (n % i != 0) continue;
    for (const int64_t divisor : {i, n / i}) {
      if (divisor <= most && divisor > best) best = static_cast<int>(divisor);
    }
  }
  return best;
}
inline int divisor_from(int n, int least) {
  int best = n;
  for (int64_t i = 1; i * i <= n; ++i) {
    if (n % i != 0) continue;
    for (const int64_t divisor : {i, n / i}) {
      if (divisor >= least && divisor < best) best = static_cast<int>(divisor);
    }
  }
  return best;
}

}  // namespace tessera::cuda
