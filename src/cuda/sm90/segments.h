// SPDX-License-Identifier: Apache-2.0
// Lowest and highest segment id of each block of keys, so that a tile knows its blocks from one
// load each.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm90/params.h"
#include "cuda/sm90/tiles.h"

namespace tessera::cuda::sm90 {

// Bytes of workspace: 8 a block.
int64_t segment_bytes(const Problem& problem, const ForwardTile& tile);

// Queues the search through a.problem's ids into workspace and points `a` to it.
Status find_segments(const ForwardTile& tile, void* workspace, ForwardParams& a,
                     cudaStream_t stream);

}  // namespace tessera::cuda::sm90
