// SPDX-License-Identifier: Apache-2.0
// What the kernels for few rows are told beside the work that they deal out: where the parts of units
// lie that several CTAs have.
#pragma once

#include <vector_types.h>

#include "cuda/common/work/args.h"

namespace tessera::cuda {

struct PartsArgs : WorkArgs {
  Divisor page_size;             // 1: no pages
  uint64_t mark;                 // of this launch
  float* part_o;                 // [slots, rows of a unit, bucket], not divided by the sums
  float2* part_sums;             // [slots, rows of a unit]: maximum in units of log2, sum
  unsigned long long* counters;  // [slots]: of the parts of the unit whose part 0 goes there
};

}  // namespace tessera::cuda
