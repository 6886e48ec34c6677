// SPDX-License-Identifier: Apache-2.0
// What the kernels for latent attention are told beside the work that they deal out: plain data,
// passed by value as a __grid_constant__.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include "cuda/common/work/args.h"

namespace tessera::cuda::sm90 {

// How a unit has been cut, for those who sum its parts. In the workspace, whose content is unknown:
// it tells of a unit of this launch if it has the launch's mark, and if there are so many units; a
// graph launches again with the same mark and other lengths.
struct alignas(16) CutUnit {
  uint64_t mark;
  int parts, first_slot, next_slots;
  int n, row0, pack;
};

struct MlaArgs : WorkArgs {
  // q: boxes of a CTA's rows, heads by queries; k: boxes of `box_keys` keys of one head.
  CUtensorMap q, k;
  int pack_shift;     // pack = 2^pack_shift
  int box_keys;       // divides a block
  Divisor page_size;  // 1: no pages
  uint64_t mark;      // of this launch, not 0
  float* part_o;      // [slots, rows of a unit, dv], not divided by the sums
  float2* part_sums;  // [slots, rows of a unit]: maximum in units of log2, sum
  CutUnit* cut;       // [units]
  int* units_found;   // how many of them there are in this launch
};
static_assert(sizeof(MlaArgs) <= 4096, "kernel arguments are 4 KB");

}  // namespace tessera::cuda::sm90
