// SPDX-License-Identifier: Apache-2.0
// Arguments of the three kernels of the backward pass, and the workspace between them.
//
// Rows of q are cut into blocks of tile_m. A block has a slot: those of sequence n begin at
// slot_of(n), so that packed sequences start blocks of their own and nobody on the host needs a
// length. Per query head the workspace has for each slot tile_m values of lse2 and of delta and a
// block of dQ sums.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include "cuda/common/params.h"
#include "cuda/sm90/params.h"

namespace tessera::cuda::sm90 {

// What a block of queries sees by its key ranges and segments. Some query sees what lies in any[i]
// through range i; all of them see the whole of all[i]. Segment ids are in [segment_lo,
// segment_hi].
struct alignas(16) QueryHull {
  struct Keys {
    int lo, hi;
  } any[2], all[2];
  int segment_lo, segment_hi, unused[2];
};

// Of the deterministic form: which tile is next, and whether sequences overlap, as they must not:
// then some tiles of keys may be missing, and nobody waits for a turn.
struct TurnOrder {
  int ticket, overlap;
};

constexpr int kRowsOfWarp = 16;  // keys that a warp has dK and dV of

struct BackwardParams {
  // TMA views (tensormap.h). Ragged where rows can lie beyond a sequence: a weight of 0 does not
  // protect from a NaN there.
  CUtensorMap q, k, v, grad_o, o;
  CUtensorMap grad_k, grad_v;  // boxes of kRowsOfWarp rows
  CUtensorMap grad_bias;       // backward_dbias.cuh: boxes of 64 queries and keys
  Params problem;
  int ragged_q, ragged_k;

  // Tiles of keys, in the order of the grid.
  int tiles;
  Divisor tiles_n, heads, heads_per_section, per_section;
  int longest_first;
  int sequences;    // that add to one dbias in this kernel: 1 or 2 (backward_dbias.cuh)
  int alternates;   // sections of tiles walk downwards and upwards in turn, see order_tiles()
  int slots;        // of one head
  int heads_inner;  // a tile takes all heads of its group at one block, then the next block

  float* lse2;   // [hq, slots, tile_m] lse in units of log2; +inf where a row does not exist or is
                 // empty. Less by log2 of dropout's scale, so that P comes with it
  float* delta;  // [hq, slots, tile_m] rowsum(do o) - dlse, over dropout's scale; 0 there
  int in_quads;  // the order of both in a block, see place_in_quads()
  // Of each [hq, slots]; null where neither key ranges nor segments are given.
  QueryHull* hulls;

  // The dense mask, packed (backward_pack_mask.h); null without one. A batch or head axis that is
  // broadcast has stride 0; strides count heads.
  const uint32_t*
      mask_bits;  // [heads, mask_pieces of 64 queries, mask_rows of 16 keys, 32 threads]
  const uint8_t* mask_states;  // [heads, mask_tiles of keys, mask_blocks of queries]
  int mask_pieces, mask_rows, mask_tiles, mask_blocks;
  int mask_stride_batch, mask_stride_head;

  float* dq_sums;  // [hq, slots, sums of a block] in the order of accumulators; null: no dq

  // [hq, blocks of a sequence, tiles of keys, 2 owners] who has stored what dbias has of it; with
  // two sequences.
  int* bias_marks;

  // Deterministic form (backward_turns.cuh).
  int* turns;  // [CTAs of a cluster, hq, slots] tiles that have added to a block
  TurnOrder* order;
  int upward_sections;  // sections, from the first on, that go upwards; packed: all or none

  // Kernels of kSegments: of each row of k as stored, see Segments::find_spans(). In blocks of
  // tile_m keys.
  int2* spans;
  int span_slots;
  int* orders;  // of each slot, in a fixed order on the diagonal: see Segments::note_order()

  // Key heads of a section whose sums the section before clears and the section after converts
  // (backward_sections.cuh); 0: the small kernels do that for all.
  int ahead;
  int* counts;  // [2, batch, hk]
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
