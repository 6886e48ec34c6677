// SPDX-License-Identifier: Apache-2.0
// What stream/kernel.cuh is told beside the problem. A unit is a tile of rows and the heads that
// share it (work.cuh).
#pragma once

#include <vector_types.h>

#include "cuda/common/divisor.h"
#include "cuda/common/params.h"

namespace tessera::cuda::sm80 {

struct StreamArgs {
  Params params;
  int pack;           // query heads that share a tile; divides the group
  Divisor queries;    // of a tile
  Divisor packs;      // of a sequence's heads
  Divisor packs_kv;   // of the heads that share k and v
  Divisor page_size;  // 1: no pages
  int units;          // at most, by shapes
  int most_runs;      // CTAs that the workspace has slots for, two for each
  int chunks;         // most parts of a unit where they may not depend on the batch; 0: they may
  int least_steps;    // of such a part
  uint64_t mark;      // of this launch, not 0
  float* part_o;      // [slots, rows of a tile, bucket], not divided by the sums
  float2* part_sums;  // [slots, rows of a tile]: maximum in units of log2, sum
  unsigned long long* announced;  // [slots]: the mark, where a part is there
};

}  // namespace tessera::cuda::sm80
