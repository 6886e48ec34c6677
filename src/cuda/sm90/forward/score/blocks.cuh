// SPDX-License-Identifier: Apache-2.0
// Which blocks of keys a row tile needs when more than the band decides: dense masks, key ranges
// and segments leave blocks out. The scheduler warp finds out, in one of two ways. If each row sees
// one interval, as with one key range or with documents, it notes the interval of each row, and the
// tile is done like one under a band. Else each lane looks at a block, and notes two bits of it:
// whether it is live, and whether a mask hides some of it.
#pragma once

#include <climits>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/score/block_map.h"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/score/spans.cuh"

namespace tessera::cuda::sm90 {

// The first block of a sequence's keys in an array over the blocks of all (num_tile_slots,
// tile_of_slot).
__device__ __forceinline__ int slot_of_keys(const Params& p, const Rows& keys, int n, int tile_n) {
  if (!p.thd_k) return n * ((p.sk + tile_n - 1) / tile_n);
  return n == 0 ? 0 : keys.first / tile_n + n + 1;
}

// A tile with its live blocks. One of more than kMost blocks has no list: all of them are live, and
// masks may hide some of each.
struct ListedWork : Work {
  static constexpr int kWords = 32, kMost = 32 * kWords;
  // Block b: bit b % 32 of word (b - base) / 32. partial: a data mask hides some of its scores.
  uint32_t live[kWords], partial[kWords];
  int base;     // the block of the first bit: begin, rounded down to 32
  bool listed;  // the words above say something

  // The nearest live block left of b; begin - 1 if there is none.
  __device__ __forceinline__ int before(int b) const {
    if (!listed) return b - 1;
    for (--b; b >= begin;) {
      const uint32_t bits = live[(b - base) / 32] & ~0u >> (31 - b % 32);
      if (bits) return b - b % 32 + 31 - __clz(bits);
      b -= b % 32 + 1;
    }
    return begin - 1;
  }
  __device__ __forceinline__ bool is_partial(int b) const {
    return !listed || partial[(b - base) / 32] >> (b % 32) & 1;
  }
};

// A tile with its live blocks, or, where data masks leave each row one interval of keys, with those
// intervals. Made by kernels that have registers to find out.
struct SpannedWork : ListedWork {
  static constexpr int kMostRows = 128;  // of a tile
  bool spanned;               // intervals; no block between the first and the last is left out
  Interval spans[kMostRows];  // then: of each row of the tile, the band included
};

// Goes through the live blocks of a tile from right to left, with the bits of 32 of them in
// registers.
class BlockCursor {
 public:
  __device__ __forceinline__ explicit BlockCursor(const ListedWork& work) : work_(work) {}

  __device__ __forceinline__ void start() {
    begin_ = uniform(work_.begin);
    base_ = uniform(work_.base);
  }

  // The nearest live block left of b; begin - 1 if there is none.
  __device__ __forceinline__ int before(int b) {
    for (--b; b >= begin_;) {
      if (b / 32 != word_) load(b / 32);
      const uint32_t bits = live_ & ~0u >> (31 - b % 32);
      if (bits) return b - b % 32 + 31 - __clz(bits);
      b -= b % 32 + 1;
    }
    return begin_ - 1;
  }
  // True if masks hide part of a block that before() has found.
  __device__ __forceinline__ bool is_partial(int b) const { return partial_ >> (b & 31) & 1; }

 private:
  __device__ __forceinline__ void load(int word) {
    const bool listed = uniform(work_.listed);
    word_ = word;
    live_ = listed ? uniform(work_.live[word - base_ / 32]) : ~0u;
    partial_ = listed ? uniform(work_.partial[word - base_ / 32]) : ~0u;
  }

  const ListedWork& work_;
  int begin_ = 0, base_ = 0, word_ = -1;
  uint32_t live_ = 0, partial_ = 0;
};

// Walks over the live blocks of a tile, in a loop for each kind of them. Which block comes next,
// and of what kind it is, gets looked up while the products of the one before run: uniform
// registers are slow.
class BlockWalk {
 public:
  __device__ __forceinline__ explicit BlockWalk(const ListedWork& work)
      : work_(work), cursor_(work) {}

  __device__ __forceinline__ void look_ahead(int b) {
    next_ = uniform(cursor_.before(b));
    partial_ = cursor_.is_partial(next_);
    kind_ = next_ < begin_    ? kNone
            : is_cut()        ? kCut
            : !partial_       ? kClean
            : has_dense_mask_ ? kDense
                              : kCut;
  }
  __device__ __forceinline__ int next() const { return max(next_, begin_); }  // exists

  // Calls step(b, cut, partial, dense) for the blocks left of b; it looks ahead. cut: by the band.
  // dense: a dense mask hides some of the block, and nothing else does; its words have been asked
  // for, by load(b) or by the step before. has_dense_mask: a dense mask, and no other data masks.
  template <typename Load, typename Step>
  __device__ __forceinline__ void walk(int b, bool has_dense_mask, const Load& load,
                                       const Step& step) {
    cursor_.start();
    has_dense_mask_ = has_dense_mask;
    begin_ = uniform(work_.begin);
    clean_begin_ = uniform(work_.clean_begin);
    clean_end_ = uniform(work_.clean_end);
    look_ahead(b);
#pragma unroll 1
    while (kind_ != kNone) {
      if (kind_ == kDense) {
        load(next_);
#pragma unroll 1
        do {
          step(next_, false, true, true);
        } while (kind_ == kDense);
      } else if (kind_ == kClean) {
#pragma unroll 1
        do {
          step(next_, false, false, false);
        } while (kind_ == kClean);
      } else {
        step(next_, is_cut(), partial_, false);
      }
    }
  }

 private:
  enum Kind { kNone, kDense, kClean, kCut };

  __device__ __forceinline__ bool is_cut() const {
    return next_ < clean_begin_ || next_ >= clean_end_;
  }

  const ListedWork& work_;
  BlockCursor cursor_;
  bool has_dense_mask_ = false, partial_ = false;
  int begin_ = 0, clean_begin_ = 0, clean_end_ = 0, next_ = 0;
  Kind kind_ = kNone;
};

struct NoBlockWalk {
  __device__ explicit NoBlockWalk(const Work&) {}
  __device__ static void look_ahead(int) {}
  __device__ static int next() { return 0; }
};
template <bool kHas>  // whether the kernel walks by a list
using BlockWalkIf = std::conditional_t<kHas, BlockWalk, NoBlockWalk>;

// What a row of the tile sees, but for data masks that cut blocks.
__device__ __forceinline__ Interval keys_seen(const Work& work, int row) {
  return work.band.row(row);
}
__device__ __forceinline__ Interval keys_seen(const SpannedWork& work, int row) {
  return work.spanned ? work.spans[row - work.m0] : work.band.row(row);
}

// The same of row r of the tile where the band alone decides. A row that does not exist may see
// anything.
template <bool kBandAlone, typename AnyWork>
__device__ __forceinline__ Interval keys_of_tile_row(const AnyWork& work, int r) {
  if constexpr (!kBandAlone) return keys_seen(work, work.m0 + r);
  // Not lo(): d256 has no register left for the length beside the diagonal.
  const Band band = work.band.from(work.m0);
  return {band.first_key(r), band.hi(r)};
}

// The block that comes after b, from right to left; left of begin: none.
__device__ __forceinline__ int block_before(const Work&, int b) { return b - 1; }
__device__ __forceinline__ int block_before(const ListedWork& work, int b) {
  return work.before(b);
}
// True where a data mask hides some of the block's scores.
__device__ __forceinline__ bool is_partial(const Work&, int) { return false; }
__device__ __forceinline__ bool is_partial(const ListedWork& work, int b) {
  return work.is_partial(b);
}
__device__ __forceinline__ bool is_partial(const SpannedWork& work, int b) {
  return !work.spanned && work.is_partial(b);
}

template <int kTileM, int kTileN>
class BlockList {
 public:
  // Lists the blocks of a decoded tile and shrinks [begin, end) to those alive. Called by all lanes
  // of a warp.
  static __device__ __forceinline__ void fill(const ForwardParams& a, ListedWork& work, int lane) {
    const int begin = work.begin, end = work.end, base = begin & ~31;
    work.base = base;
    work.listed = end - base <= ListedWork::kMost;
    if (!work.listed) return;
    const RangeHull ranges = hull_of_ranges(a.problem, work, lane);
    const Keys segments = hull_of_segments(a.problem, work, lane);
    int first = end, last = begin;
    for (int start = base; start < end; start += kWarp) {
      const int block = start + lane;
      bool live = begin <= block && block < end;
      bool partial = false;
      if (live && a.mask_states) {
        const BlockState state = mask_state(a, work, block);
        live = state != kBlockHidden;
        partial |= state != kBlockFull;
      }
      if (live && a.problem.num_ranges) ranges.narrow(block, live, partial);
      if (live && a.problem.tensor[TESSERA_SEGMENT_IDS_Q].data) {
        narrow_to_segments(a, work, segments, block, live, partial);
      }
      const uint32_t live_bits = __ballot_sync(kAllLanes, live);
      work.live[(start - base) / 32] = live_bits;
      work.partial[(start - base) / 32] = __ballot_sync(kAllLanes, partial);
      if (live_bits) {
        first = min(first, start + __ffs(live_bits) - 1);
        last = start + 31 - __clz(live_bits);
      }
    }
    __syncwarp();
    work.begin = first;
    work.end = first < end ? last + 1 : first;
  }
  static __device__ __forceinline__ void fill(const ForwardParams& a, SpannedWork& work, int lane) {
    work.spanned = span(a, work, lane);
    if (work.spanned) {
      work.listed = false;
    } else {
      fill(a, static_cast<ListedWork&>(work), lane);
    }
  }

 private:
  // If each row sees one interval: notes them and shrinks the tile's blocks to what they hold.
  // False if one does not, and for dense masks and two ranges, of which that is not known.
  static __device__ __forceinline__ bool span(const ForwardParams& a, SpannedWork& work, int lane) {
    constexpr int kRows = kTileM / kWarp;
    static_assert(kTileM <= SpannedWork::kMostRows);
    const Params& p = a.problem;
    if (a.mask_states || p.num_ranges > 1 || work.begin >= work.end) return false;
    Interval* const keys = work.spans + lane;  // of rows `lane`, lane + 32, ... of the tile
    const int row0 = work.m0 + lane;
#pragma unroll
    for (int i = 0; i < kRows; ++i) keys[kWarp * i] = work.band.row(row0 + kWarp * i);
    if (p.num_ranges) {
      const View& ranges = p.tensor[TESSERA_KEY_RANGES];
#pragma unroll 2
      for (int i = 0; i < kRows; ++i) {
        const int row = existing(row0 + kWarp * i, work.q.length);
        const int* range = static_cast<const int*>(ranges.data) +
                           offset_of(ranges, work.q.batch, work.head, work.q.first + row);
        keys[kWarp * i] = meet(keys[kWarp * i], {range[0], range[ranges.stride[3]]});
      }
    }
    if (p.tensor[TESSERA_SEGMENT_IDS_Q].data) {
      const int2* spans = a.spans + int64_t{work.q.batch} * p.sq + work.q.first;
      bool found = true;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int2 span = spans[existing(row0 + kWarp * i, work.q.length)];
        found &= span.x != kNoSpan;
        keys[kWarp * i] = meet(keys[kWarp * i], {span.x, span.y});
      }
      if (!__all_sync(kAllLanes, found)) return false;
    }
    // Bounds over the rows that exist, of which one that sees nothing leaves no block clean.
    int lo = INT_MAX, hi = 0, clean_lo = 0, clean_hi = work.k.length;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Interval seen = keys[kWarp * i];
      const bool sees = seen.lo < seen.hi;
      if (!sees) keys[kWarp * i] = {0, 0};
      if (!work.exists(row0 + kWarp * i)) continue;
      clean_hi = sees ? min(clean_hi, seen.hi) : 0;
      if (sees) lo = min(lo, seen.lo), hi = max(hi, seen.hi), clean_lo = max(clean_lo, seen.lo);
    }
    lo = lowest(lo), hi = highest(hi), clean_lo = highest(clean_lo), clean_hi = lowest(clean_hi);
    work.begin = hi > 0 ? lo / kTileN : 0;
    work.end = (hi + kTileN - 1) / kTileN;
    work.clean_begin = (clean_lo + kTileN - 1) / kTileN;
    work.clean_end = clean_hi / kTileN;
    return true;
  }

  struct Keys {
    int lo, hi;
    __device__ __forceinline__ bool meets(int begin, int end) const {
      return lo < end && begin < hi;
    }
    __device__ __forceinline__ bool holds(int begin, int end) const {
      return lo <= begin && end <= hi;
    }
  };

  // What some row of the tile sees through range i lies in any[i]; all rows see the whole of
  // all[i].
  struct RangeHull {
    Keys any[2], all[2];
    __device__ __forceinline__ void narrow(int block, bool& live, bool& partial) const {
      const int begin = block * kTileN, end = begin + kTileN;
      live = any[0].meets(begin, end) || any[1].meets(begin, end);
      partial |= !all[0].holds(begin, end) && !all[1].holds(begin, end);
    }
  };

  static __device__ __forceinline__ RangeHull hull_of_ranges(const Params& p, const Work& work,
                                                             int lane) {
    RangeHull hull;
    for (int i = 0; i < 2; ++i) {
      hull.any[i] = {INT_MAX, INT_MIN};
      hull.all[i] = {INT_MIN, INT_MAX};
      if (i >= p.num_ranges) {
        hull.all[i] = {0, INT_MIN};
        continue;
      }
      const View& view = p.tensor[TESSERA_KEY_RANGES];
      for (int row = work.m0 + lane; row < work.m0 + kTileM; row += kWarp) {
        if (!work.exists(row)) continue;
        const int* range = static_cast<const int*>(view.data) +
                           offset_of(view, work.q.batch, work.head, work.q.first + row, 2 * i);
        const int lo = range[0], hi = range[view.stride[3]];
        hull.all[i] = {max(hull.all[i].lo, lo), min(hull.all[i].hi, hi)};
        if (lo < hi) hull.any[i] = {min(hull.any[i].lo, lo), max(hull.any[i].hi, hi)};
      }
      hull.any[i] = {lowest(hull.any[i].lo), highest(hull.any[i].hi)};
      hull.all[i] = {highest(hull.all[i].lo), lowest(hull.all[i].hi)};
    }
    return hull;
  }

  static __device__ __forceinline__ int segment_at(const Params& p, int index, const Rows& rows,
                                                   int row) {
    const View& view = p.tensor[index];
    return static_cast<const int*>(view.data)[offset_of(view, rows.batch, rows.first + row)];
  }

  // Lowest and highest id of the tile's rows, both inclusive.
  static __device__ __forceinline__ Keys hull_of_segments(const Params& p, const Work& work,
                                                          int lane) {
    Keys hull{INT_MAX, INT_MIN};
    if (!p.tensor[TESSERA_SEGMENT_IDS_Q].data) return hull;
    for (int row = work.m0 + lane; row < work.m0 + kTileM; row += kWarp) {
      if (!work.exists(row)) continue;
      const int id = segment_at(p, TESSERA_SEGMENT_IDS_Q, work.q, row);
      hull = {min(hull.lo, id), max(hull.hi, id)};
    }
    return {lowest(hull.lo), highest(hull.hi)};
  }

  static __device__ __forceinline__ void narrow_to_segments(const ForwardParams& a,
                                                            const Work& work, const Keys& rows,
                                                            int block, bool& live, bool& partial) {
    const int2 keys = a.segments[slot_of_keys(a.problem, work.k, work.n, kTileN) + block];
    live &= keys.x <= rows.hi && rows.lo <= keys.y;
    partial |= rows.lo != rows.hi || keys.x != rows.lo || keys.y != rows.lo;
  }

  static __device__ __forceinline__ BlockState mask_state(const ForwardParams& a, const Work& work,
                                                          int block) {
    const int64_t head = work.n * a.mask_stride_batch + work.head * a.mask_stride_head;
    const int64_t tile = head * a.mask_tiles + work.m0 / kTileM;
    return static_cast<BlockState>(a.mask_states[tile * a.mask_blocks + block]);
  }
};

}  // namespace tessera::cuda::sm90
