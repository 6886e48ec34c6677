// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <time.h>

// What an answer about a problem may take, of any extents: one that walks the tiles of 2^24 keys takes
// 5 to 25 ms, as the machine's neighbours allow, and one that walks more never ends. Sanitizers are
// slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kMostMilliseconds = 500;
#else
constexpr double kMostMilliseconds = 100;
#endif

// Time of this thread alone, so that other processes do not count.
inline double milliseconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}
