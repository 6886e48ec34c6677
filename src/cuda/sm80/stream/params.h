// SPDX-License-Identifier: Apache-2.0
// What stream/kernel.cuh is told beside the work that it deals out.
#pragma once

#include <vector_types.h>

#include "cuda/common/work/args.h"

namespace tessera::cuda::sm80 {

struct StreamArgs : WorkArgs {
  Divisor page_size;              // 1: no pages
  uint64_t mark;                  // of this launch, not 0
  float* part_o;                  // [slots, rows of a tile, bucket], not divided by the sums
  float2* part_sums;              // [slots, rows of a tile]: maximum in units of log2, sum
  unsigned long long* announced;  // [slots]: the mark, where a part is there
};

}  // namespace tessera::cuda::sm80
