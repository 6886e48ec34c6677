// SPDX-License-Identifier: Apache-2.0
// Arguments of the three kernels of the backward pass, and the workspace between them.
//
// Rows of q are cut into blocks of tile_m. A block has a slot: those of sequence n begin at
// slot_of(n), so that packed sequences start blocks of their own and nobody on the host needs a
// length. Per query head the workspace has for each slot tile_m values of lse2 and of delta and a
// block of dQ sums.
#pragma once

#include <cuda.h>

#include "cuda/common/params.h"
#include "cuda/sm90/params.h"

namespace tessera::cuda::sm90 {

struct BackwardParams {
  // TMA views (tensormap.h). Ragged where rows can lie beyond a sequence: a weight of 0 does not
  // protect from a NaN there.
  CUtensorMap q, k, v, grad_o, o;
  Params problem;
  int ragged_q, ragged_k;

  // Tiles of keys, in the order of the grid.
  int tiles;
  Divisor tiles_n, heads, heads_per_section, per_section;
  int longest_first;

  int slots;     // of one head
  float* lse2;   // [hq, slots, tile_m] lse in units of log2; +inf where a row does not exist or is
                 // empty
  float* delta;  // [hq, slots, tile_m] rowsum(do o) - dlse; 0 there
  float* dq_sums;  // [hq, slots, 8192] in the order of accumulators; null: no dq
};
static_assert(sizeof(BackwardParams) <= 4096, "kernel arguments are 4 KB");

// Slot of the first block of a sequence that is stored from row `start` on; sequences of a padded
// problem have `blocks` each.
TESSERA_HOST_DEVICE int first_slot_of(bool packed, int n, int start, int tile_m, int blocks) {
  return packed ? start / tile_m + n : n * blocks;
}
TESSERA_HOST_DEVICE int num_slots(bool packed, int extent, int batch, int tile_m) {
  const int blocks = (extent + tile_m - 1) / tile_m;
  return packed ? blocks + batch : blocks * batch;
}

}  // namespace tessera::cuda::sm90
