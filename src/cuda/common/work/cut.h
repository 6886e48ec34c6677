// SPDX-License-Identifier: Apache-2.0
// How a problem of few rows and many keys is cut, as far as shapes and the device tell; live
// lengths do the rest (work.cuh). No CUDA header.
#pragma once

#include "core/problem/problem.h"
#include "cuda/common/work/args.h"

namespace tessera::cuda {

// What a kernel takes at a time.
struct CutTile {
  int rows;        // of a unit: queries by heads
  int pack;        // heads that share it
  int step_keys;   // of a CTA
  int beside = 1;  // CTAs that take the same keys of a pack of heads each; divides the packs
  // Where parts of a unit may not depend on the batch: keys of one, and how many at most.
  int least_keys, most_parts;
};

struct Cut {
  CutTile tile;
  int64_t units = 0;  // at most
  int64_t chunks = 0, least_steps = 0;
  int64_t ctas = 0;   // of the grid, or as many as share units
  int64_t slots = 0;  // of parts
};

// Tiles of rows and the heads that share one.
int64_t units_of(const Problem& problem, int rows, int pack);

// ctas: as many as may run at a time in this call; most_ctas: in any, by which the workspace is cut.
Cut cut_of(const Problem& problem, const CutTile& tile, int64_t ctas, int64_t most_ctas);

// What work.cuh is told of it.
WorkArgs work_args(const Params& params, const Cut& cut);

}  // namespace tessera::cuda
