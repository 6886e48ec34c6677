// SPDX-License-Identifier: Apache-2.0
// What each kernel is told beside the problem: how the host cut it into CTAs, and the workspace.
#pragma once

#include "cuda/common/params.h"
#include "cuda/common/score/block_map.h"

namespace tessera::cuda::sm80 {

struct ForwardArgs {
  Params params;
  BlockMap blocks;  // of keys
  int pack;         // query heads that share a tile; divides the group
  int dv_pieces;    // of output_columns columns
  int splits;       // parts of the keys, merged afterwards; 1: o and lse are final
  int section;   // tiles of so many heads, or packs of them, begin side by side (machine/place.cuh)
  int64_t rows;  // all stored rows of q, for the partial results
  float* partial_o;    // [splits, rows, hq, dv]
  float* partial_lse;  // [splits, rows, hq]
};

// Rows that one CTA makes the statistics of in the backward pass.
inline constexpr int kRowsOfStatistics = 64;

// The workspace of the backward pass: one float for each row and head, [b, hq, sq] as lse.
struct BackwardArgs {
  Params params;
  float* lse;    // in the units of logits (score.cuh); 0 where a row does not exist or is empty
  float* delta;  // rowsum(do o) - dlse; 0 there
  float* slope_rows;  // what each row gives to dalibi_slopes; null: not asked
};

struct DqArgs {
  BackwardArgs b;
  BlockMap blocks;  // of keys
  int section;      // tiles of so many heads begin side by side (machine/place.cuh)
  float below;      // an lse; read by Code::of_low, which leaves tiles out that have none below it
};

// Who adds to dQ in which order (backward/fused_dq.cuh). The turns stand behind it in memory.
struct DqOrder {
  int overlap;  // of sequences: some tiles of keys may be missing, and nobody waits
  int padding[3];
  int ticket;  // zero at first
  int more_padding[3];
};

enum DkdvOutput { kDk = 1, kDv = 2 };
struct DkdvArgs {
  BackwardArgs b;
  BlockMap blocks;   // of queries
  int outputs;       // DkdvOutput, what to write
  int pieces_k;      // of dk; where one CTA makes both, 1
  int pool;          // the tensor whose pages are walked, TESSERA_K or TESSERA_V; read with pages
  int tiles_a_page;  // read with pages
  float* dq_sums;    // of the fused kernel (backward/fused_dq.cuh); null: not asked
  int dq_slots;      // tiles of queries of a head
  DqOrder* order;    // null: dQ is summed in any order
  int* turns;        // with an order: [hq, dq_slots], zeros at first
  int section;       // tiles of so many key heads begin side by side (machine/place.cuh)
};

struct DbiasArgs {
  BackwardArgs b;
  int extent[4];  // of the bias
};

}  // namespace tessera::cuda::sm80
