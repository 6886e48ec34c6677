// SPDX-License-Identifier: Apache-2.0
// The order in which dbias.cuh does its work, which its two roles walk side by side.
#pragma once

#include "cuda/common/sequence.cuh"
#include "cuda/sm90/dbias_kernels.h"

namespace tessera::cuda::sm90 {

struct Visit {
  Sequence sequence;
  int head, key0;
  int begin, end;  // blocks of queries that see some key
};

// What a CTA does in one go.
struct DbiasItem {
  int bias_n, bias_head;
  int tile, tile_end;    // of keys
  int pair, pair_step;   // (sequence, head), counted through those that share an element
  int block, block_end;  // of queries
  int term;              // of the sums that dbias_sum adds
};

__device__ __forceinline__ DbiasItem item_of(const DbiasCut& cut, int index) {
  const int per_section = cut.items / cut.sections, in_section = cut.bias_rows / cut.sections;
  const int section = index / per_section;
  int rest = index - section * per_section;
  const int bias_row = section * in_section + rest % in_section;
  rest /= in_section;
  DbiasItem item;
  item.bias_n = bias_row / cut.extent[1];
  item.bias_head = bias_row % cut.extent[1];
  item.tile = 0;
  item.tile_end = cut.tiles_n;
  if (cut.extent[3] > 1) {
    item.tile = rest % cut.tiles_n;
    item.tile_end = item.tile + 1;
    rest /= cut.tiles_n;
  }
  item.term = cut.extent[2] > 1 ? 0 : rest;
  item.pair = rest % cut.pair_step;
  item.pair_step = cut.pair_step;
  item.block = rest / cut.pair_step * cut.group_size;
  item.block_end = min(item.block + cut.group_size, cut.tiles_m);
  return item;
}

// Calls the role's open, step and close for every visit, clear and finish around every sum. Blocks
// come last one first: all tiles of a causal problem see the last. kSlots: visits that may be open.
template <int kSlots, typename Role>
__device__ __forceinline__ void walk(const DbiasCut& cut, Role& role) {
  const int grid = gridDim.x;
  const bool by_block = cut.extent[2] > 1 && cut.extent[3] > 1;
  const int pairs = cut.sequences * cut.heads;
#pragma unroll 1
  for (int first = 0, round = 0; first < cut.items; first += grid, ++round) {
    // There and back again: who had a long item has a short one next.
    const int index = first + static_cast<int>(round % 2 ? grid - 1 - blockIdx.x : blockIdx.x);
    if (index >= cut.items) continue;
    const DbiasItem item = item_of(cut, index);
    const auto open = [&](int pair, int tile, int block, int block_end) {
      return role.open(item.bias_n + pair / cut.heads, item.bias_head + pair % cut.heads, tile,
                       block, block_end);
    };
    int resident_slot = 0;
    if (cut.resident) {
      resident_slot = role.ring.stage;
      for (int pair = 0; pair < pairs; ++pair) {
        open(pair, item.tile, item.block, item.block_end);
      }
    }
    const int sums = by_block ? item.block_end - item.block : 1;
#pragma unroll 1
    for (int i = 0; i < sums; ++i) {
      const int block_end = item.block_end - i, block = by_block ? block_end - 1 : item.block;
      role.clear();
#pragma unroll 1
      for (int pair = item.pair; pair < pairs; pair += item.pair_step) {
#pragma unroll 1
        for (int tile = item.tile; tile < item.tile_end; ++tile) {
          const int slot = Role::uniform(cut.resident ? (resident_slot + pair) % kSlots
                                                      : open(pair, tile, block, block_end));
          const Visit& visit = role.visits[slot];
          const int begin = Role::uniform(max(visit.begin, block));
#pragma unroll 1
          for (int m = Role::uniform(min(visit.end, block_end)) - 1; m >= begin; --m) {
            role.step(visit, slot, m);
          }
          if (!cut.resident) role.close();
        }
      }
      role.finish(item, block);
    }
    if (cut.resident) {
      for (int pair = 0; pair < pairs; ++pair) role.close();
    }
  }
}

}  // namespace tessera::cuda::sm90
