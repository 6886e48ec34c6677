// SPDX-License-Identifier: Apache-2.0
// What data masks leave of a walk over blocks: dense masks, key ranges and segments, looked at once
// before a kernel that walks keys under a tile of queries, or queries over a tile of keys.
//
// Segments and ranges are summed up for each block of the walked side (O(tokens)); a dense mask by
// a byte for each tile and block. blocks.cuh asks them.
#pragma once

#include "cuda/common/block_map.h"
#include "cuda/common/launch.h"

namespace tessera::cuda {

enum class Walked { kKeys, kQueries };

// Something for a map to say.
bool has_block_map(const Problem& problem);

// Workspace of map_blocks, a multiple of 256. tile: rows of the resident side, step: of a walked
// block.
int64_t block_map_bytes(const Problem& problem, Walked walked, int tile, int step);

// Queues what fills the map of a.problem in `workspace`.
Status map_blocks(const Problem& problem, const Params& params, Walked walked, int tile, int step,
                  void* workspace, BlockMap* map, cudaStream_t stream);

}  // namespace tessera::cuda
