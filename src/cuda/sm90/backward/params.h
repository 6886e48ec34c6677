// SPDX-License-Identifier: Apache-2.0
// Arguments of the three kernels of the backward pass, and the workspace between them.
//
// Rows of q are cut into blocks of tile_m. A block has a slot: those of sequence n begin at
// slot_of(n), so that packed sequences start blocks of their own and nobody on the host needs a
// length. The workspace has, per query head and slot, tile_m values of lse2 and of delta and a
// block of dQ sums.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include "cuda/common/params.h"
#include "cuda/sm90/forward/params.h"

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

// What the deterministic form needs: which tile is next, and whether sequences overlap, as they
// must not: then some tiles of keys may be missing, and nobody waits for a turn.
struct TurnOrder {
  int ticket, overlap;
};

constexpr int kMostTilesInParts = 256;  // of a head

// Tiles of packed keys start in an order of their own where a head has no more than so many slots
// for them (backward/schedule/slot_order.cuh): of more, the last ones matter little, and a CTA would
// sort them for longer than others have work beside it.
constexpr int kMostOrderedSlots = 1024;
constexpr int kSlotClasses = 128;  // of lengths, a thread each

constexpr int kRowsOfWarp = 16;  // keys that a warp has dK and dV of

struct BackwardParams {
  // TMA views (machine/tensormap.h). Ragged where rows can lie beyond a sequence: a weight of 0
  // does not protect from a NaN there.
  // Kernels with products of E4M3 read neither V nor O in 16 bits, and know no dbias.
  CUtensorMap q, k;
  union {
    CUtensorMap v, v8;
  };
  CUtensorMap grad_o;
  union {
    CUtensorMap o, q8;
  };
  CUtensorMap grad_k, grad_v;  // boxes of kRowsOfWarp rows
  union {
    CUtensorMap grad_bias;  // backward/fused/dbias.cuh: boxes of 64 queries and keys
    CUtensorMap k8;
  };
  Params problem;
  int reach_q, reach_k;  // of the maps of a side (machine/ragged.h)

  // Tiles of keys, in the order of the grid.
  int tiles;
  Divisor tiles_n, heads, heads_per_section, per_section;
  int longest_first;
  int first_of_last;      // CTAs before those of the last section, which may have more heads
  int last_head;          // key heads of the batch before it
  Divisor heads_of_last;  // key heads in it
  // The longest parts come first where several CTAs share a tile (backward/fused/share.cuh): the
  // i-th tile to begin is tile_at[i] of its head, and its parts are first_part[i] and those behind.
  // 0: each tile is one CTA's.
  int parts;         // of all tiles of a head
  int stored_parts;  // up to the last one of a tile that is shared
  int num_arrivals;  // counters
  uint16_t first_part[kMostTilesInParts + 1];
  uint8_t tile_at[kMostTilesInParts];
  // Sequence and first key of the tile that starts i-th of each head; ordered_slots of them, 0: they
  // start in the order of storage. The last_slots come by their own length.
  int2* key_tiles;
  int ordered_slots, last_slots;
  int sequences;  // that add to one dbias in this kernel: 1 or 2 (backward/fused/dbias.cuh)
  // Sections of tiles walk downwards and upwards in turn, packed ones all downwards: order_tiles().
  int alternates;
  int slots;        // of one head
  int heads_inner;  // a tile takes all heads of its group at one block, then the next block

  float* lse2;   // [hq, slots, tile_m] lse in units of log2; +inf where a row does not exist or is
                 // empty. Less by log2 of dropout's scale, so that P comes with it
  float* delta;  // [hq, slots, tile_m] rowsum(do o) - dlse, over dropout's scale; 0 there
  int in_quads;  // the order of both in a block, see place_in_quads()
  // Hulls of each [hq, slots]; null where neither key ranges nor segments are given.
  QueryHull* hulls;

  // The dense mask, packed (backward/score/pack_mask.h); null without one. A batch or head axis
  // that is broadcast has stride 0; strides count heads.
  const uint32_t*
      mask_bits;  // [heads, mask_pieces of 64 queries, mask_rows of 16 keys, 32 threads]
  const uint8_t* mask_states;  // [heads, mask_tiles of keys, mask_blocks of queries]
  int mask_pieces, mask_rows, mask_tiles, mask_blocks;
  int mask_stride_batch, mask_stride_head;

  float* part_sums;  // [heads, stored_parts] dK and dV, in the order of accumulators
  int* arrivals;     // [heads, stored_parts, warps of the owners] see backward/fused/share.cuh

  float* dq_sums;  // [hq, slots, sums of a block] in the order of accumulators; null: no dq

  // [hq, blocks of a sequence, tiles of keys, 2 owners] who has stored what dbias has of it; with
  // two sequences.
  int* bias_marks;

  // Deterministic form (backward/fused/turns.cuh).
  int* turns;  // [CTAs of a cluster, hq, slots] tiles that have added to a block
  TurnOrder* order;
  int upward_sections;  // sections, from the first on, that go upwards; packed: all or none

  // Kernels of kSegments: of each row of k as stored, in blocks of tile_m keys; see
  // Segments::find_spans().
  int2* spans;
  int span_slots;
  int* orders;  // of each slot, deterministic form, on the diagonal: see Segments::note_order()

  // Key heads of a section, where tiles clear sums for the section after theirs and convert those
  // of the section before (backward/fused/sections.cuh); 0: the small kernels do that for all.
  int ahead;
  int* counts;  // [2, batch, hk]

  // Products of E4M3 (backward/fused/rounded.cuh), null and 0 without them: those pieces of Rounded
  // that are not read by TMA.
  const uint8_t* rounded_grad_o;
  const float *q_scale, *do_scale, *k_scale, *v_scale, *row;
  int key_slots;  // scales of k, and of v, of a head
  // lse2 and delta are [hq, slots, 2, tile_m] there: behind those of a block stand as many factors,
  // of its scores and of its dP. 0: see above.
  int has_factors;
};
static_assert(sizeof(BackwardParams) <= 4096, "kernel arguments are 4 KB");

// The arguments of the kernels with products of E4M3.
struct RoundedBackwardParams : BackwardParams {
  CUtensorMap grad_o8;
};
static_assert(sizeof(RoundedBackwardParams) <= 32764, "since CUDA 12.1, which these rows may need");

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
