// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <time.h>

// What an answer about a problem may take, of any extents; sanitizers are slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kMostMilliseconds = 200;
#else
constexpr double kMostMilliseconds = 10;
#endif

// Time of this thread alone, so that other processes do not count.
inline double milliseconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}
