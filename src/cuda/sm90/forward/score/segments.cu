// SPDX-License-Identifier: Apache-2.0
//   segments [slots of blocks (slot_of_keys)]: (lowest id, highest id); lowest > highest in a block
//   without keys
//   spans [rows of q as stored]: where the keys of the row's segment stand; kNoSpan where they do
//   not stand side by side
#include <algorithm>
#include <climits>

#include "core/count.h"
#include "cuda/common/sequence.cuh"
#include "cuda/sm90/forward/score/blocks.cuh"
#include "cuda/sm90/forward/score/segments.h"
#include "cuda/sm90/score/spans.cuh"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kThreads = 128;
constexpr int kSpanRows = 128, kSpanBlock = 128;  // queries of a warp; keys of a block

struct FindParams {
  Params problem;
  int tile_n, slots;
  int2* segments;
};

// A warp a block.
__global__ void __launch_bounds__(kThreads) find(const __grid_constant__ FindParams a) {
  const Params& p = a.problem;
  const int slot = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp,
            lane = threadIdx.x % kWarp;
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

struct SpanParams {
  Params problem;
  int slots;
  const int2* segments;
  int2* spans;
};

// A warp for kSpanRows queries, behind find().
__global__ void __launch_bounds__(kWarp) find_spans(const __grid_constant__ SpanParams a) {
  constexpr int kRows = kSpanRows / kWarp;
  const Params& p = a.problem;
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, blockIdx.x, kSpanRows);
  const Sequence sequence = sequence_of(p, tile.n);
  if (tile.begin < 0 || tile.begin >= sequence.q.length) return;
  const auto id_at = [&](int index, const Rows& rows, int row) {
    const View& ids = p.tensor[index];
    return static_cast<const int*>(ids.data)[offset_of(ids, rows.batch, rows.first + row)];
  };
  const int2* hulls = a.segments + slot_of_keys(p, sequence.k, tile.n, kSpanBlock);
  const auto hull_of = [&](int block) { return hulls[block]; };
  const auto id_of = [&](int key) { return id_at(TESSERA_SEGMENT_IDS_K, sequence.k, key); };
  const int blocks = (sequence.k.length + kSpanBlock - 1) / kSpanBlock;
  const SegmentFinder<kSpanBlock, decltype(hull_of), decltype(id_of)> finder(
      0, blocks, sequence.k.length, hull_of, id_of);
  const int row0 = tile.begin + threadIdx.x;
  int ids[kRows];
  int2 seen[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    ids[i] =
        id_at(TESSERA_SEGMENT_IDS_Q, sequence.q, existing(row0 + i * kWarp, sequence.q.length));
  }
  const bool found = find_segments_of_rows(finder, ids, [&](int i, Interval where) {
    seen[i] = {where.lo, where.hi};
  });
  int2* to = a.spans + int64_t{sequence.q.batch} * p.sq + sequence.q.first;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row0 + i * kWarp;
    if (row < sequence.q.length) to[row] = found ? seen[i] : int2{kNoSpan, kNoSpan};
  }
}

}  // namespace

Status find_segments(const Problem& problem, const ForwardTile& tile, bool spans, void* workspace,
                     ForwardParams& a, cudaStream_t stream) {
  const Params& p = a.problem;
  const FindParams args{p, tile.tile_n, num_tile_slots(p.thd_k, p.sk, p.batch, tile.tile_n),
                        static_cast<int2*>(workspace)};
  a.segments = args.segments;
  if (args.slots == 0) return {};  // no keys
  constexpr int kSlotsOfCta = kThreads / kWarp;
  const dim3 grid(static_cast<unsigned>((args.slots + kSlotsOfCta - 1) / kSlotsOfCta));
  TESSERA_RETURN_IF_ERROR(launch_kernel("find_segments", reinterpret_cast<const void*>(&find), grid,
                                        kThreads, 0, &args, stream));
  if (!spans || tile.tile_n != kSpanBlock) return {};
  auto* to =
      reinterpret_cast<int2*>(static_cast<char*>(workspace) + segment_hull_bytes(problem, tile));
  const SpanParams of_rows{p, num_tile_slots(p.thd_q, p.sq, p.batch, kSpanRows), a.segments, to};
  a.spans = to;
  if (of_rows.slots == 0) return {};
  return launch_kernel("find_spans", reinterpret_cast<const void*>(&find_spans),
                       dim3(static_cast<unsigned>(of_rows.slots)), kWarp, 0, &of_rows, stream);
}

}  // namespace tessera::cuda::sm90
