// SPDX-License-Identifier: Apache-2.0
// What the kernels for few rows and many keys are told of the work that they deal out among
// themselves (work.cuh). A unit is a tile of rows of a sequence and the heads that share it.
#pragma once

#include <climits>

#include "cuda/common/divisor.h"
#include "cuda/common/params.h"

namespace tessera::cuda {

// Units by steps of keys, which with what their beginnings cost are counted in 32 bits.
constexpr int64_t kMostCells = int64_t{1} << 28;

// A sequence's rows are one tile, of so many queries, and see all of its keys, and nothing is packed:
// what there is to do follows from the length of k alone.
inline bool is_whole(const Params& p, int queries) {
  const bool last_row_sees_all = p.window.right < 0 || p.bottom_right;
  return !p.thd_q && !p.thd_k && !p.tensor[TESSERA_SEQLENS_Q].data && p.sq > 0 && p.sq <= queries &&
         p.window.left < 0 && last_row_sees_all;
}

struct WorkArgs {
  Params params;
  int pack;          // query heads that share a tile; divides the group
  Divisor queries;   // of a tile
  Divisor beside;    // CTAs that take the same keys of a pack of heads each; 1: none do
  Divisor packs;     // of a sequence's heads, by `beside`
  Divisor packs_kv;  // of the heads that share k and v
  int whole;         // is_whole(), and parts may depend on the batch
  int units;         // at most, by shapes; of `beside` packs
  int most_runs;     // of as many CTAs that the workspace has slots for, two for each CTA
  int chunks;        // most parts of a unit where they may not depend on the batch; 0: they may
  int least_steps;   // of such a part
  // The least steps of a piece where each unit is cut on its own, as units may be that are few; 0:
  // runs are equal whatever units they cut.
  int least_apart;
  // Sequences of more queries have no units: another kernel computes them.
  int most_queries = INT_MAX;
};

}  // namespace tessera::cuda
