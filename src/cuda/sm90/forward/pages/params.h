// SPDX-License-Identifier: Apache-2.0
// Kernel arguments of the forward rows whose keys are cut into parts or lie in pages.
#pragma once

#include "cuda/sm90/forward/params.h"

namespace tessera::cuda::sm90 {

// Tiles whose keys are cut, where there are too few of them for all multiprocessors. o and lse of
// ForwardParams are those of part 0: fp32, in the workspace. The parts of a tile follow each other in the
// order of tiles.
struct PartsParams : ForwardParams {
  Divisor parts;             // of each tile
  int64_t part_o, part_lse;  // elements from one part to the next
};

// The maps `k` and `v` of ForwardParams are of the pools: a box is the keys that a page and a block have in
// common; where no box fits, rows are copied one by one. The map of v is ragged with the reach of a
// page, so that what stands behind the end of a sequence in its last page stays there; that of k is
// plain. Both page tables are there.
struct PagedForwardParams : PartsParams {
  Divisor page_size;
  int box_keys;   // a power of two; 0: no box fits
  int box_shift;  // 2^box_shift boxes make a block
  struct Pool {
    uint32_t page_units, row_units;  // from one to the next, in units of 16 bytes
  } keys, values;                    // read where no box fits
  // Sequences of up to so many queries are left to the kernels for decoding; -1: none are.
  int step_queries = -1;
};
static_assert(sizeof(PagedForwardParams) <= 4096, "kernel arguments are 4 KB");

}  // namespace tessera::cuda::sm90
