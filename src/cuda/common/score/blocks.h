// SPDX-License-Identifier: Apache-2.0
// What data masks leave of a walk over blocks: dense masks, key ranges and segments, looked at once
// before a kernel that walks keys under a tile of queries, or queries over a tile of keys.
//
// Segments and ranges are summed up for each block of the walked side (O(tokens)); a dense mask by
// a byte for each tile and block, and where asked by a bit for each of its elements. blocks.cuh
// asks them.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/score/block_map.h"

namespace tessera::cuda {

enum class Walked { kKeys, kQueries };

// Something for a map to say.
bool has_block_map(const Problem& problem);

// Workspace of map_blocks, a multiple of 256. tile: rows of the resident side, step: of a walked
// block. with_bits: dense masks as bits too, where tiles of keys are multiples of 32.
int64_t block_map_bytes(const Problem& problem, Walked walked, int tile, int step,
                        bool with_bits = false);

// Queues what fills the map of a.problem in `workspace`.
Status map_blocks(const Problem& problem, const Params& params, Walked walked, int tile, int step,
                  void* workspace, BlockMap* map, cudaStream_t stream, bool with_bits = false);

}  // namespace tessera::cuda
