// SPDX-License-Identifier: Apache-2.0
// The tile iterator: blocks of a walk that anything shows, and whether all of a block is shown. The
// band has set the ends of the walk; here data masks leave blocks out.
//
// A warp looks at 32 blocks at a time, a lane a block; all warps of a CTA find the same.
#pragma once

#include <climits>

#include "cuda/common/element.cuh"
#include "cuda/common/score/block_map.h"
#include "cuda/common/sequence.cuh"

namespace tessera::cuda {

// The slot of a block of `step` rows of a sequence among those of its side: disjoint for any
// lengths.
template <typename Side>
__device__ int slot_of_block(const Params& p, int n, int first_row, int step, int block) {
  const int before =
      Side::packed(p) ? first_row / step + n : n * ((Side::extent(p) + step - 1) / step);
  return before + block;
}

__device__ inline bool meet(Hull a, Hull b) { return a.lo < b.hi && b.lo < a.hi; }
__device__ inline bool holds(Hull a, Hull b) { return a.lo <= b.lo && b.hi <= a.hi; }

__device__ inline Hull hull_of_warp(Hull x) {
  return {__reduce_min_sync(~0u, x.lo), __reduce_max_sync(~0u, x.hi)};
}

// Lowest and highest id of rows [begin, begin + count) of a side, by all lanes of a warp.
__device__ inline Hull hull_of_segments(const View& ids, const Rows& rows, int begin, int count) {
  Hull hull{INT_MAX, INT_MIN};
  for (int row = max(begin, 0) + static_cast<int>(threadIdx.x % 32);
       row < min(begin + count, rows.length); row += 32) {
    const int id = static_cast<const int*>(ids.data)[offset_of(ids, rows.batch, rows.first + row)];
    hull = {min(hull.lo, id), max(hull.hi, id)};
  }
  return hull_of_warp(hull);
}

// The hulls of the ranges of queries [begin, begin + count), by all lanes of a warp. start: of
// range_start().
__device__ inline RangeHulls hulls_of_ranges(const Params& p, const Rows& rows, int head, int begin,
                                             int count, int start) {
  const View& view = p.tensor[TESSERA_KEY_RANGES];
  RangeHulls hulls;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    hulls.any[i] = {INT_MAX, INT_MIN};
    hulls.all[i] = {INT_MAX, INT_MIN};
    if (i >= p.num_ranges) continue;
    Hull all{INT_MIN, INT_MAX};
    for (int row = max(begin, 0) + static_cast<int>(threadIdx.x % 32);
         row < min(begin + count, rows.length); row += 32) {
      const int* range = static_cast<const int*>(view.data) +
                         offset_of(view, rows.batch, head, rows.first + row, 2 * i);
      const int lo = key_of_position(range[0], start);
      const int hi = key_of_position(range[view.stride[3]], start);
      all = {max(all.lo, lo), min(all.hi, hi)};
      if (lo < hi) hulls.any[i] = {min(hulls.any[i].lo, lo), max(hulls.any[i].hi, hi)};
    }
    hulls.any[i] = hull_of_warp(hulls.any[i]);
    hulls.all[i] = {__reduce_max_sync(~0u, all.lo), __reduce_min_sync(~0u, all.hi)};
  }
  return hulls;
}

// Where a sequence begins in the dense mask, whose states are of one tile where an axis is one row.
struct MaskStart {
  int q, k;

  __device__ MaskStart(const Params& p, const Sequence& sequence)
      : q(dense_start<SideOfQueries>(p, sequence.n, sequence.q.length)),
        k(p.tensor[TESSERA_MASK].stride[3] == 0
              ? 0
              : dense_start<SideOfKeys>(p, sequence.n, sequence.k.length)) {}
};

// What is left of a block; narrowed by one kind of mask after the other.
struct BlockView {
  bool live, full;

  __device__ void narrow(BlockState state) {
    live &= state != kBlockHidden;
    full &= state == kBlockFull;
  }
  __device__ void narrow(const RangeHulls& rows, Hull keys) {
    live &= meet(rows.any[0], keys) || meet(rows.any[1], keys);
    full &= holds(rows.all[0], keys) || holds(rows.all[1], keys);
  }
  __device__ void narrow_segments(Hull a, Hull b) {
    live &= a.lo <= b.hi && b.lo <= a.hi;
    full &= a.lo == a.hi && b.lo == b.hi && a.lo == b.lo;
  }
};

// A tile of queries against blocks of keys; found by one warp, for the CTA to keep in shared
// memory.
struct KeyBlocks {
  int step, first_slot;  // rows of a block; of the sequence's blocks
  bool all_known;        // every data mask has its say here
  const Hull* summaries;
  Hull segments;      // of the tile
  RangeHulls ranges;  // of the tile
  bool has_ranges;
  const uint8_t* mask;  // of the tile

  // head: the first of `heads` that share the tile of `queries` queries.
  static __device__ KeyBlocks of(const BlockMap& map, const Params& p, const Sequence& sequence,
                                 int head, int heads, int query0, int queries) {
    KeyBlocks b{};
    b.step = map.step;
    b.first_slot = slot_of_block<SideOfKeys>(p, sequence.n, sequence.k.first, map.step, 0);
    b.summaries = map.segments;
    if (map.segments) {
      b.segments = hull_of_segments(p.tensor[TESSERA_SEGMENT_IDS_Q], sequence.q, query0, queries);
    }
    b.has_ranges = p.num_ranges > 0 && (heads == 1 || p.tensor[TESSERA_KEY_RANGES].stride[1] == 0);
    if (b.has_ranges) {
      b.ranges = hulls_of_ranges(p, sequence.q, head, query0, queries, range_start(p, sequence.n));
    }
    const MaskStart start(p, sequence);
    if (map.mask && (heads == 1 || map.mask_head == 0) && start.q % queries == 0 &&
        start.k % map.step == 0) {
      b.mask = map.mask + sequence.n * map.mask_batch + head * map.mask_head +
               (start.q + max(query0, 0)) / queries * map.mask_row + start.k / map.step;
    }
    b.all_known = (b.summaries || !p.tensor[TESSERA_SEGMENT_IDS_Q].data) &&
                  (b.has_ranges || p.num_ranges == 0) && (b.mask || !p.tensor[TESSERA_MASK].data);
    return b;
  }

  __device__ BlockView operator()(int block) const {
    BlockView view{true, all_known};
    if (summaries) view.narrow_segments(segments, summaries[first_slot + block]);
    if (has_ranges) view.narrow(ranges, {block * step, (block + 1) * step});
    if (mask) view.narrow(static_cast<BlockState>(mask[block]));
    return view;
  }
};

// Blocks of queries over a tile of keys, likewise.
struct QueryBlocks {
  int first_slot;
  bool all_known;
  const Hull* summaries;
  const RangeHulls* ranges;
  int64_t ranges_head;
  Hull segments, keys;  // of the tile
  const uint8_t* mask;  // of the tile, first head and block
  int64_t mask_head, mask_row;

  static __device__ QueryBlocks of(const BlockMap& map, const Params& p, const Sequence& sequence,
                                   int key0, int num_keys) {
    QueryBlocks b{};
    b.first_slot = slot_of_block<SideOfQueries>(p, sequence.n, sequence.q.first, map.step, 0);
    b.summaries = map.segments;
    b.ranges = map.ranges;
    b.ranges_head = map.ranges_head;
    b.keys = {key0, min(key0 + num_keys, sequence.k.length)};
    if (map.segments) {
      b.segments = hull_of_segments(p.tensor[TESSERA_SEGMENT_IDS_K], sequence.k, key0, num_keys);
    }
    // A page may begin anywhere in a tile of the mask, and so may a sequence with positions.
    const MaskStart start(p, sequence);
    if (map.mask && key0 >= 0 && (start.k + key0) % num_keys == 0 && start.q % map.step == 0) {
      b.mask = map.mask + sequence.n * map.mask_batch + (start.k + key0) / num_keys +
               start.q / map.step * map.mask_row;
      b.mask_head = map.mask_head;
      b.mask_row = map.mask_row;
    }
    b.all_known = (b.summaries || !p.tensor[TESSERA_SEGMENT_IDS_Q].data) &&
                  (b.ranges || p.num_ranges == 0) && (b.mask || !p.tensor[TESSERA_MASK].data);
    return b;
  }

  __device__ BlockView operator()(int head, int block) const {
    BlockView view{true, all_known};
    const int slot = first_slot + block;
    if (summaries) view.narrow_segments(segments, summaries[slot]);
    if (ranges) view.narrow(ranges[head * ranges_head + slot], keys);
    if (mask) view.narrow(static_cast<BlockState>(mask[head * mask_head + block * mask_row]));
    return view;
  }
};

// Live steps of a walk of `count` steps, in order. kLooks: without, every step is live and none is
// known to be full.
template <bool kLooks>
class BlockWalk {
 public:
  __device__ explicit BlockWalk(int count) : count_(count) {}

  // The next live step, or count. view_of(step) answers a BlockView; called by all lanes.
  template <typename ViewOf>
  __device__ __forceinline__ int next(const ViewOf& view_of) {
    if constexpr (!kLooks) {
      return min(next_++, count_);
    } else {
      while (live_ == 0) {
        if (next_ >= count_) return count_;
        const int step = next_ + static_cast<int>(threadIdx.x % 32);
        const BlockView view = step < count_ ? view_of(step) : BlockView{false, false};
        live_ = __ballot_sync(~0u, view.live);
        full_ = __ballot_sync(~0u, view.full);
        base_ = next_;
        next_ += 32;
      }
      const int bit = __ffs(live_) - 1;
      live_ &= live_ - 1;
      return base_ + bit;
    }
  }
  // True if no data mask hides anything of the step that next() gave last.
  __device__ __forceinline__ bool full(int step) const {
    return kLooks && step < count_ && (full_ >> (step - base_) & 1);
  }

 private:
  int count_, next_ = 0, base_ = 0;
  uint32_t live_ = 0, full_ = 0;
};

}  // namespace tessera::cuda
