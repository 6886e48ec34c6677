// SPDX-License-Identifier: Apache-2.0
// Arguments of the dbias kernels.
#pragma once

#include <cuda.h>

#include "cuda/common/params.h"

namespace tessera::cuda::sm90 {

// How the work is cut into items, from shapes alone: what CTAs take one after the other.
struct DbiasCut {
  int extent[4];           // of the bias
  int bias_rows;           // extent[0] extent[1]
  int sequences, heads;    // that share an element of it: 1 where the axis is not broadcast
  int tiles_m, tiles_n;    // blocks of queries; tiles of keys
  int groups, group_size;  // of blocks of queries: an item has one group
  int pair_step;  // an item takes every pair_step-th (sequence, head) that shares an element
  int sections;   // bias rows that are done side by side
  int items;
  int resident;  // k and v of all that share an element stay in shared memory
};

struct DbiasParams {
  // TMA views as in the backward pass, with boxes of the tile's rows.
  CUtensorMap q, k, v, grad_o;
  CUtensorMap bias;                    // plain kernels: boxes of 64 keys and a block of queries
  int bias_of_sequence, bias_of_head;  // 0: there is one for all of them
  Params problem;
  DbiasCut cut;
  int reach_q, reach_k;
  int vectors;  // other kernels: nothing shapes the scores but the band and a bias that is read by
                // vectors

  View out;      // dbias, or dalibi_slopes with two axes more of extent 1
  float factor;  // of its elements
  int of_slopes;

  // Statistics of rows, as backward_rows leaves them: [hq, slots, tile_m].
  const float* lse2;
  const float* delta;
  int in_quads;  // their order, see place_in_quads()
  int slots, tile_m;

  float* partial;  // one query or key for all: [terms, bias rows, queries or keys]
};
static_assert(sizeof(DbiasParams) <= 4096, "kernel arguments are 4 KB");

}  // namespace tessera::cuda::sm90
