// SPDX-License-Identifier: Apache-2.0
// What data masks leave of a walk over blocks: dense masks, key ranges and segments, looked at once
// before a kernel that walks keys under a tile of queries, or queries over a tile of keys.
//
// Segments and ranges are summed up for each block of the walked side (O(tokens)); a dense mask by
// a byte for each tile and block. blocks.cuh asks them.
#pragma once

#include <climits>

#include "cuda/common/launch.h"

namespace tessera::cuda {

enum class Walked { kKeys, kQueries };

// [lo, hi) of keys, or lowest and highest segment id.
struct Hull {
  int lo, hi;
};

// Keys that some row of a block sees through range i, and that all its rows see.
struct RangeHulls {
  Hull any[2], all[2];
};

enum BlockState : uint8_t { kBlockHidden = 0, kBlockPartial = 1, kBlockFull = 2 };

// Null pointers: nothing of the kind, or not worth a look.
struct BlockMap {
  int step;                  // rows of a block
  int slots;                 // of blocks: see slot_of_block
  const Hull* segments;      // [slots], of the walked side; both ends inclusive
  const RangeHulls* ranges;  // [heads | 1, slots], walking queries
  int64_t ranges_head;       // slots, or 0
  const uint8_t* mask;       // [b | 1, heads | 1, tiles of queries, tiles of keys] BlockState
  int64_t mask_batch, mask_head, mask_row;  // strides; 0 where broadcast
};

// Something for a map to say.
bool has_block_map(const Problem& problem);

// Workspace of map_blocks, a multiple of 256. tile: rows of the resident side, step: of a walked
// block.
int64_t block_map_bytes(const Problem& problem, Walked walked, int tile, int step);

// Queues what fills the map of a.problem in `workspace`.
Status map_blocks(const Problem& problem, const Params& params, Walked walked, int tile, int step,
                  void* workspace, BlockMap* map, cudaStream_t stream);

}  // namespace tessera::cuda
