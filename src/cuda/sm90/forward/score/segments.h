// SPDX-License-Identifier: Apache-2.0
// Lowest and highest segment id of each block of keys, so that a tile knows its blocks from one
// load each; and the interval of keys that each row sees, where it is one.
#pragma once

#include <algorithm>

#include "core/count.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/tile.h"

namespace tessera::cuda::sm90 {

// Bytes of what blocks have, before what rows have: 8 a block.
inline int64_t segment_hull_bytes(const Problem& problem, const ForwardTile& tile) {
  const Sizes s = sizes_of(problem);
  const Count batch = std::max<int64_t>(s.batch, 1), blocks = s.sk / tile.tile_n + 1;
  return ((is_thd_k(problem) ? blocks + batch : blocks * batch) * 8).value();
}

// Bytes of workspace: 8 a block and 8 a row.
inline int64_t segment_bytes(const Problem& problem, const ForwardTile& tile) {
  const Sizes s = sizes_of(problem);
  const Count rows = Count{s.sq} * (is_thd_q(problem) ? 1 : std::max<int64_t>(s.batch, 1));
  return (segment_hull_bytes(problem, tile) + rows * 8).value();
}

// Queues the search through a.problem's ids into workspace and points `a` to it. spans: the kernel
// can do with intervals.
Status find_segments(const Problem& problem, const ForwardTile& tile, bool spans, void* workspace,
                     ForwardParams& a, cudaStream_t stream);

}  // namespace tessera::cuda::sm90
