// SPDX-License-Identifier: Apache-2.0
// Lowest and highest segment id of each block of keys, so that a tile knows its blocks from one
// load each; and the interval of keys that each row sees, where it is one.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/tile.h"

namespace tessera::cuda::sm90 {

// Bytes of workspace: 8 a block and 8 a row.
int64_t segment_bytes(const Problem& problem, const ForwardTile& tile);

// Queues the search through a.problem's ids into workspace and points `a` to it. spans: the kernel
// can do with intervals.
Status find_segments(const Problem& problem, const ForwardTile& tile, bool spans, void* workspace,
                     ForwardParams& a, cudaStream_t stream);

}  // namespace tessera::cuda::sm90
