// SPDX-License-Identifier: Apache-2.0
// Which blocks of queries a tile of keys needs when more than the band decides: dense masks, key
// ranges and segments leave blocks out. backward_rows notes what each block of queries sees; a warp
// of the main kernel looks. If segments are intervals it writes down which queries see each key,
// and the tile is as one under a band; else a lane looks at a block.
#pragma once

#include <climits>

#include "cuda/common/score/block_map.h"
#include "cuda/sm90/backward/schedule/schedule.cuh"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/score/spans.cuh"

namespace tessera::cuda::sm90 {

// What the producers of kernels that leave blocks out, and all rich ones, say of a stage, as two
// integers: the query head of the group, or -1 when there are no more blocks, and the block above
// bits of BlockMask or SegmentRule.
struct StagedBlock {
  int member, block_and_mask;

  __device__ __forceinline__ void store(uint32_t shared) const {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(member), "r"(block_and_mask)
                 : "memory");
  }
  // Loads it into uniform registers.
  static __device__ __forceinline__ StagedBlock load(uint32_t shared) {
    const float2 stage = load_shared_pair(shared);
    return {uniform_register(__float_as_int(stage.x)), uniform_register(__float_as_int(stage.y))};
  }
};

// kSegmentsAlone: there are neither dense masks nor key ranges.
template <int kTileM, int kTileN, bool kSegmentsAlone = false>
class QueryBlocks {
 public:
  // The hull of the block at row0 of a sequence, by all lanes of a warp.
  static __device__ __forceinline__ void note(const BackwardParams& a, const Rows& rows, int head,
                                              int row0, int64_t slot) {
    if (!a.hulls) return;
    const Params& p = a.problem;
    const int lane = threadIdx.x % kWarp;
    QueryHull hull{};
    hull.segment_lo = INT_MAX, hull.segment_hi = INT_MIN;
    for (int i = 0; i < 2; ++i) {
      hull.any[i] = {INT_MAX, INT_MIN};
      hull.all[i] =
          i < p.num_ranges ? QueryHull::Keys{INT_MIN, INT_MAX} : QueryHull::Keys{0, INT_MIN};
    }
    const View& ranges = p.tensor[TESSERA_KEY_RANGES];
    const View& segments = p.tensor[TESSERA_SEGMENT_IDS_Q];
    for (int row = row0 + lane; row < min(row0 + kTileM, rows.length); row += kWarp) {
      for (int i = 0; i < p.num_ranges; ++i) {
        const int* range = static_cast<const int*>(ranges.data) +
                           offset_of(ranges, rows.batch, head, rows.first + row, 2 * i);
        const int lo = range[0], hi = range[ranges.stride[3]];
        hull.all[i] = {max(hull.all[i].lo, lo), min(hull.all[i].hi, hi)};
        if (lo < hi) hull.any[i] = {min(hull.any[i].lo, lo), max(hull.any[i].hi, hi)};
      }
      if (segments.data) {
        const int id = static_cast<const int*>(
            segments.data)[offset_of(segments, rows.batch, rows.first + row)];
        hull.segment_lo = min(hull.segment_lo, id), hull.segment_hi = max(hull.segment_hi, id);
      }
    }
    for (int i = 0; i < 2; ++i) {
      hull.any[i] = {lowest(hull.any[i].lo), highest(hull.any[i].hi)};
      hull.all[i] = {highest(hull.all[i].lo), lowest(hull.all[i].hi)};
    }
    hull.segment_lo = lowest(hull.segment_lo), hull.segment_hi = highest(hull.segment_hi);
    if (lane == 0) a.hulls[slot] = hull;
  }

  // Bits of the blocks start .. start + 31: those that some key of the tile needs, and those where
  // a data mask hides some key from some query.
  struct Bits {
    uint32_t live, partial;
  };
  // The blocks of a tile whose keys are seen by one interval of queries each.
  struct Reach {
    int begin, end, clean_begin, clean_end;
    __device__ __forceinline__ Bits bits(int start) const {
      return {low_bits(end - start) & ~low_bits(begin - start),
              ~low_bits(clean_end - start) | low_bits(clean_begin - start)};
    }
  };
  // Finds which queries see each key of the tile, the band included, if these are intervals. Called
  // by all lanes of a warp; spans: one for each key.
  static __device__ __forceinline__ bool span(const BackwardParams& a, const KeyTile& tile,
                                              Interval* spans, Reach& reach) {
    constexpr int kRows = kTileN / kWarp;
    const Params& p = a.problem;
    const View& ids_q = p.tensor[TESSERA_SEGMENT_IDS_Q];
    const View& ids_k = p.tensor[TESSERA_SEGMENT_IDS_K];
    if (!ids_q.data || a.mask_states || p.num_ranges || tile.begin >= tile.end) return false;
    const int lane = threadIdx.x % kWarp, key0 = tile.key0 + lane;
    spans += lane;
    int ids[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      spans[kWarp * i] = tile.queries_of_key(key0 + kWarp * i);
      ids[i] = id_at(ids_k, tile.k, key0 + kWarp * i);
    }
    // Ids are the same for all heads.
    const QueryHull* hulls = a.hulls + int64_t{tile.kv_head} * p.group * a.slots + tile.first_slot;
    const auto hull_of = [&](int block) {
      return int2{hulls[block].segment_lo, hulls[block].segment_hi};
    };
    const auto id_of = [&](int query) { return id_at(ids_q, tile.q, query); };
    const SegmentFinder<kTileM, decltype(hull_of), decltype(id_of)> finder(
        tile.begin, tile.end, tile.q.length, hull_of, id_of);
    const bool found = find_segments_of_rows(finder, ids, [&](int i, Interval where) {
      spans[kWarp * i] = meet(spans[kWarp * i], where);
    });
    if (!found) return false;
    int lo = INT_MAX, hi = 0, clean_lo = 0, clean_hi = INT_MAX;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Interval seen = spans[kWarp * i];
      clean_lo = max(clean_lo, seen.lo), clean_hi = min(clean_hi, seen.hi);
      if (seen.lo < seen.hi) lo = min(lo, seen.lo), hi = max(hi, seen.hi);
    }
    lo = lowest(lo), hi = highest(hi), clean_lo = highest(clean_lo), clean_hi = lowest(clean_hi);
    reach.begin = hi > 0 ? lo / kTileM : 0;
    reach.end = (hi + kTileM - 1) / kTileM;
    reach.clean_begin = (clean_lo + kTileM - 1) / kTileM;
    reach.clean_end = clean_hi >= tile.q.length ? reach.end : max(clean_hi, 0) / kTileM;
    return true;
  }

  // Called by all lanes of a warp; lane 0 holds what next() returns.
  __device__ __forceinline__ QueryBlocks(const BackwardParams& a, const KeyTile& tile)
      : a_(a), tile_(tile) {
    const View& ids = a.problem.tensor[TESSERA_SEGMENT_IDS_K];
    if (!ids.data || tile.begin >= tile.end) return;  // keys of no use may lie before the tensor
    for (int key = tile.key0 + threadIdx.x % kWarp; key < min(tile.key0 + kTileN, tile.k.length);
         key += kWarp) {
      const int id =
          static_cast<const int*>(ids.data)[offset_of(ids, tile.k.batch, tile.k.first + key)];
      segment_lo_ = min(segment_lo_, id), segment_hi_ = max(segment_hi_, id);
    }
    segment_lo_ = lowest(segment_lo_), segment_hi_ = highest(segment_hi_);
  }

  __device__ __forceinline__ Bits look(int head, int start) const {
    const Params& p = a_.problem;
    const int block = start + static_cast<int>(threadIdx.x % kWarp);
    bool live = block < tile_.end;
    bool partial = false;
    if (!kSegmentsAlone && live && a_.mask_states) {
      const int64_t of_head = tile_.n * a_.mask_stride_batch + head * a_.mask_stride_head;
      const int key_tile = min(tile_.key0 / kTileN, a_.mask_tiles - 1),
                query_block = min(block, a_.mask_blocks - 1);
      const uint8_t state =
          a_.mask_states[(of_head * a_.mask_tiles + key_tile) * a_.mask_blocks + query_block];
      live = state != kBlockHidden;
      partial |= state != kBlockFull;
    }
    if (live && (kSegmentsAlone || a_.hulls)) {
      const QueryHull hull = a_.hulls[int64_t{head} * a_.slots + tile_.first_slot + block];
      const int begin = tile_.key0, end = min(begin + kTileN, tile_.k.length);
      if (!kSegmentsAlone && p.num_ranges) {
        bool meets = false, holds = false;
        for (int i = 0; i < 2; ++i) {
          meets |= hull.any[i].lo < end && begin < hull.any[i].hi;
          holds |= hull.all[i].lo <= begin && end <= hull.all[i].hi;
        }
        live = meets;
        partial |= !holds;
      }
      if (kSegmentsAlone || p.tensor[TESSERA_SEGMENT_IDS_Q].data) {
        live &= segment_lo_ <= hull.segment_hi && hull.segment_lo <= segment_hi_;
        partial |= hull.segment_lo != hull.segment_hi || segment_lo_ != hull.segment_lo ||
                   segment_hi_ != hull.segment_lo;
      }
    }
    return {__ballot_sync(kAllLanes, live), __ballot_sync(kAllLanes, partial)};
  }

 private:
  static __device__ __forceinline__ int id_at(const View& ids, const Rows& rows, int row) {
    return static_cast<const int*>(
        ids.data)[offset_of(ids, rows.batch, rows.first + existing(row, rows.length))];
  }

  const BackwardParams& a_;
  const KeyTile& tile_;
  int segment_lo_ = INT_MAX, segment_hi_ = INT_MIN;
};

}  // namespace tessera::cuda::sm90
