// SPDX-License-Identifier: Apache-2.0
//   segments [slots of blocks (slot_of_keys)]: (lowest id, highest id); lowest > highest in a block
//   without keys
#include <algorithm>
#include <climits>

#include "cuda/common/sequence.cuh"
#include "cuda/sm90/blocks.cuh"
#include "cuda/sm90/segments.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kThreads = 128;

struct FindParams {
  Params problem;
  int tile_n, slots;
  int2* segments;
};

// A warp a block.
__global__ void __launch_bounds__(kThreads) find(const __grid_constant__ FindParams a) {
  const Params& p = a.problem;
  const int slot = (blockIdx.x * kThreads + threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  if (slot >= a.slots) return;
  const TileOfRows block = tile_of_slot<SideOfKeys>(p, slot, a.tile_n);
  const Rows keys = rows_of<SideOfKeys>(p, block.n);
  if (block.begin < 0 || block.begin >= keys.length) return;
  const View& ids = p.tensor[TESSERA_SEGMENT_IDS_K];
  int lowest = INT_MAX, highest = INT_MIN;
  const int end = min(block.begin + a.tile_n, keys.length);
  for (int key = block.begin + lane; key < end; key += kWarp) {
    const int id = static_cast<const int*>(ids.data)[offset_of(ids, keys.batch, keys.first + key)];
    lowest = min(lowest, id), highest = max(highest, id);
  }
  lowest = __reduce_min_sync(kAllLanes, lowest);
  highest = __reduce_max_sync(kAllLanes, highest);
  if (lane > 0) return;
  const int first = slot_of_keys(p, keys, block.n, a.tile_n);
  a.segments[first + block.begin / a.tile_n] = {lowest, highest};
}

}  // namespace

int64_t segment_bytes(const Problem& problem, const ForwardTile& tile) {
  const Sizes s = sizes_of(problem);
  const int64_t batch = std::max<int64_t>(s.batch, 1), blocks = s.sk / tile.tile_n + 1;
  return 8 * (is_thd_k(problem) ? blocks + batch : blocks * batch);
}

Status find_segments(const ForwardTile& tile, void* workspace, ForwardParams& a,
                     cudaStream_t stream) {
  const Params& p = a.problem;
  const FindParams args{p, tile.tile_n, num_tile_slots(p.thd_k, p.sk, p.batch, tile.tile_n),
                        static_cast<int2*>(workspace)};
  a.segments = args.segments;
  const dim3 grid(static_cast<unsigned>((args.slots * kWarp + kThreads - 1) / kThreads));
  return launch_kernel("find_segments", reinterpret_cast<const void*>(&find), grid, kThreads, 0,
                       &args, stream);
}

}  // namespace tessera::cuda::sm90
