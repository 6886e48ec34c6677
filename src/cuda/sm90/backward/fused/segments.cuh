// SPDX-License-Identifier: Apache-2.0
// Segments and nothing else: the kernels of kSegments. A key is seen by one interval of queries if
// those of each segment stand side by side, as a document's do. backward_rows finds these, once for
// all heads; a tile is then one under a band, whose owners leave out and mask for their own 64
// keys. Other segments are compared id by id, in the blocks that need it.
#pragma once

#include <climits>

#include "cuda/sm90/backward/edges.cuh"
#include "cuda/sm90/backward/fused/turns.cuh"
#include "cuda/sm90/backward/schedule/schedule.cuh"
#include "cuda/sm90/backward/score/blocks.cuh"
#include "cuda/sm90/backward/tile.h"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/score/spans.cuh"

namespace tessera::cuda::sm90 {

// True if a row of backward/table.def is of kernels of segments.
template <typename Row>
inline constexpr bool kIsOfSegments = (Row::kFeatures & kSegments) != 0;

// What the producer says of a block, bits.
enum SegmentRule {
  kRuleSpans = 1,   // each key is seen by an interval of queries, which is in shared memory
  kRuleCuts = 2,    // some key of owner 0 is hidden from some query; << 1: of owner 1
  kRuleHidden = 8,  // all keys of owner 0 are hidden from all queries; << 1: of owner 1
  kRuleCutsBoth = 3 * kRuleCuts,
  kRuleHidesBoth = 3 * kRuleHidden,
  kRuleBits = 5,  // how many there are: the block stands above them
};

// Blocks of queries [begin, end) that see some of a few keys; in [clean_begin, clean_end) every row
// that exists sees all of them.
struct BlocksOfKeys {
  int begin, end, clean_begin, clean_end;
};

// What the producer's warp finds of a tile, in shared memory.
template <int kTileN>
struct SegmentsOfTile {
  // The queries that see each key; or, if some key has no interval, {its id, 0}.
  Interval spans[kTileN];
  BlocksOfKeys of_owner[2];
  TilesInLine line;  // deterministic form

  // Blocks [x, y) that see some key of either owner, and those between them; none: y = 0.
  __device__ __forceinline__ int2 hull() const {
    return {min(of_owner[0].begin, of_owner[1].begin), max(of_owner[0].end, of_owner[1].end)};
  }
  __device__ __forceinline__ int rules(int block) const {
    int rules = kRuleSpans;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const BlocksOfKeys own = of_owner[w];
      rules |= (block < own.clean_begin || block >= own.clean_end ? kRuleCuts << w : 0) |
               (block < own.begin || block >= own.end ? kRuleHidden << w : 0);
    }
    return rules;
  }
};

__device__ __forceinline__ int segment_of(const View& ids, const Rows& rows, int row) {
  return static_cast<const int*>(
      ids.data)[offset_of(ids, rows.batch, rows.first + existing(row, rows.length))];
}

template <int kTileM, int kTileN>
class Segments {
 public:
  using OfTile = SegmentsOfTile<kTileN>;

  // Which queries have the segment of each key of a block of kTileM: the interval of them within
  // what the band leaves the block, or (-1, -1). Called by all threads of a warpgroup; slot: of
  // tile_of_slot().
  //
  // A round looks at all queries for those of one id; they are an interval if there are as many as
  // between the first and the last. The ids of the keys come in rising order; which is the least is
  // found by a round that looks at no query. The first id that is no interval ends it: its keys and
  // those of the ids above get (-1, -1). A tile with one such key compares ids, so that nobody asks
  // for the others.
  static __device__ __forceinline__ void find_spans(const BackwardParams& a, int slot) {
    struct Found {
      int count, lo, hi;  // queries with the id of the round: how many, the first, the last
      int next, more;     // least id of the keys above that one, and whether there is one
    };
    constexpr int kAtOnce = 16;  // loads in flight, of a thread
    __shared__ Found found[kWarpgroup / kWarp];
    const Params& p = a.problem;
    const int thread = threadIdx.x;
    const TileOfRows keys = tile_of_slot<SideOfKeys>(p, slot, kTileM);
    const Sequence sequence = sequence_of(p, keys.n);
    if (keys.begin < 0 || keys.begin >= sequence.k.length) return;
    const Interval queries = sequence.band.rows(keys.begin, keys.begin + kTileM);
    const int begin = queries.lo, end = queries.hi;
    const View& ids_q = p.tensor[TESSERA_SEGMENT_IDS_Q];
    const int key = keys.begin + thread;
    const bool exists = thread < kTileM && key < sequence.k.length;
    const int mine =
        segment_of(p.tensor[TESSERA_SEGMENT_IDS_K], sequence.k, exists ? key : keys.begin);
    int2* const to = a.spans + int64_t{sequence.k.batch} * p.sk + sequence.k.first + key;
    int id = 0;
#pragma unroll 1
    for (bool known = false;; known = true) {  // whether there is an id to look for
      const bool later = !known || mine > id;
      Found of{0, INT_MAX, -1, later ? mine : INT_MAX, later};
#pragma unroll 1
      for (int start = known ? begin + thread : end; start < end; start += kAtOnce * kWarpgroup) {
        int ids[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          ids[i] = segment_of(ids_q, sequence.q, min(start + i * kWarpgroup, end - 1));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int query = start + i * kWarpgroup;
          if (query < end && ids[i] == id) {
            ++of.count, of.lo = min(of.lo, query), of.hi = query;
          }
        }
      }
      of = {static_cast<int>(__reduce_add_sync(kAllLanes, of.count)), lowest(of.lo), highest(of.hi),
            lowest(of.next), __any_sync(kAllLanes, of.more)};
      if (thread % kWarp == 0) found[thread / kWarp] = of;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kWarpgroup / kWarp; ++i) {
        const Found other = found[i];
        of = i == 0 ? other
                    : Found{of.count + other.count, min(of.lo, other.lo), max(of.hi, other.hi),
                            min(of.next, other.next), of.more | other.more};
      }
      __syncthreads();
      const bool is_interval = of.count == 0 || of.count == of.hi - of.lo + 1;
      if (known && exists && (is_interval ? mine == id : mine >= id)) {
        *to = !is_interval ? int2{-1, -1} : of.count == 0 ? int2{0, 0} : int2{of.lo, of.hi + 1};
      }
      if (!of.more || !is_interval) return;
      id = of.next;
    }
  }

  // Notes how the ids of a block of queries follow each other, for is_of_documents(). Called by all
  // lanes of a warp.
  static __device__ __forceinline__ void note_order(const BackwardParams& a, const Rows& rows,
                                                    int row0, int slot) {
    const Params& p = a.problem;
    const View& ids_k = p.tensor[TESSERA_SEGMENT_IDS_K];
    const int first = segment_of(ids_k, rows, 0), last = segment_of(ids_k, rows, rows.length - 1);
    IdOrder order;
    for (int row = row0 + threadIdx.x % kWarp; row < min(row0 + kTileM, rows.length);
         row += kWarp) {
      const int id = segment_of(p.tensor[TESSERA_SEGMENT_IDS_Q], rows, row),
                next = segment_of(ids_k, rows, row + 1);
      const bool same = id == segment_of(ids_k, rows, row);
      order.rises &= same && (id <= next || (next < first && next == last));
      order.falls &= same && id >= next;
      order.breaks += id > next;
    }
    const int bits = order.of_warp();
    if (threadIdx.x % kWarp == 0) a.orders[slot] = bits;
  }
  // True if the sequence is one of documents, whose ids are those of the keys beside them and rise
  // or fall, but for one that may end the rising ones (padding). Each block of queries is then seen
  // by tiles side by side, from that of its own keys down. Called by all lanes of a warp.
  static __device__ __forceinline__ bool is_of_documents(const BackwardParams& a,
                                                         const KeyTile& tile) {
    if (!a.orders) return false;
    IdOrder order;
    for (int block = threadIdx.x % kWarp; block * kTileM < tile.q.length; block += kWarp) {
      const int bits = a.orders[tile.first_slot + block];
      order.rises &= bits & 1, order.falls &= bits >> 1 & 1, order.breaks += bits >> 2;
    }
    const int bits = order.of_warp();
    return (bits & 2) || ((bits & 1) && bits >> 2 <= 1);
  }

  // If each key of the tile is seen by an interval of queries: notes these, the band included, and
  // the blocks that each owner's keys need. Else, or without `tries`: notes the ids of the keys,
  // and returns false. Called by all lanes of a warp.
  static __device__ __forceinline__ bool find(const BackwardParams& a, const KeyTile& tile,
                                              bool tries, OfTile& of_tile) {
    constexpr int kRows = kTileN / kWarp, kOwners = BackwardTile::kOwners;
    const int lane = threadIdx.x % kWarp, key0 = tile.key0 + lane;
    Interval seen_of[kRows];
    bool found = tries;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      seen_of[i] = span_of(a, tile, key0 + kWarp * i);
      found &= seen_of[i].lo >= 0;
    }
    if (!__all_sync(kAllLanes, found)) {
#pragma unroll 1
      for (int i = 0; i < kRows; ++i) {
        const int id =
            segment_of(a.problem.tensor[TESSERA_SEGMENT_IDS_K], tile.k, key0 + kWarp * i);
        of_tile.spans[lane + kWarp * i] = {id, 0};
      }
      return false;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      of_tile.spans[lane + kWarp * i] = meet(tile.queries_of_key(key0 + kWarp * i), seen_of[i]);
    }
#pragma unroll 1  // few registers
    for (int w = 0; w < kOwners; ++w) {
      int lo = INT_MAX, hi = 0, clean_lo = 0, clean_hi = INT_MAX;
#pragma unroll
      for (int i = 0; i < kRows / kOwners; ++i) {
        const Interval seen = of_tile.spans[lane + kWarp * (w * kRows / kOwners + i)];
        clean_lo = max(clean_lo, seen.lo), clean_hi = min(clean_hi, seen.hi);
        if (seen.lo < seen.hi) lo = min(lo, seen.lo), hi = max(hi, seen.hi);
      }
      lo = lowest(lo), hi = highest(hi), clean_lo = highest(clean_lo), clean_hi = lowest(clean_hi);
      const int end = (hi + kTileM - 1) / kTileM;
      if (lane > 0) continue;
      of_tile.of_owner[w] = {hi > 0 ? lo / kTileM : INT_MAX, end, (clean_lo + kTileM - 1) / kTileM,
                             clean_hi >= tile.q.length ? end : max(clean_hi, 0) / kTileM};
    }
    return true;
  }

 private:
  struct IdOrder {
    int rises = 1, falls = 1, breaks = 0;

    __device__ __forceinline__ int of_warp() const {
      return __all_sync(kAllLanes, rises) | __all_sync(kAllLanes, falls) << 1 |
             static_cast<int>(__reduce_add_sync(kAllLanes, breaks)) << 2;
    }
  };

  static __device__ __forceinline__ Interval span_of(const BackwardParams& a, const KeyTile& tile,
                                                     int key) {
    if (key >= tile.k.length) return {0, 0};
    const int2 span = a.spans[int64_t{tile.k.batch} * a.problem.sk + tile.k.first + key];
    return {span.x, span.y};
  }
};

// P = 0 where the band or the segments hide a key of the owner from a query of the block. spanned:
// spans has intervals of queries, or else ids; spans: of the thread's first key. Called by all
// lanes.
template <int kTileM>
__device__ __forceinline__ void mask_segments(const BackwardParams& a, const KeyTile& tile, int key,
                                              int block, bool spanned, uint32_t spans,
                                              float (&S)[kTileM / 2]) {
  const int query = block * kTileM + 2 * (threadIdx.x % 4);  // of element 0
  const float2 of_key[2] = {load_shared_pair(spans), load_shared_pair(spans + 64)};
  uint32_t visible[2];
  if (spanned) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      visible[r] =
          element_bits(__float_as_int(of_key[r].x) - query, __float_as_int(of_key[r].y) - query);
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Interval queries = tile.queries_of_key(key + 8 * r);
      visible[r] = element_bits(queries.lo - query, queries.hi - query);
    }
    const View& ids = a.problem.tensor[TESSERA_SEGMENT_IDS_Q];
    int ids_q[kTileM / kWarp];
#pragma unroll
    for (int i = 0; i < kTileM / kWarp; ++i) {
      ids_q[i] = segment_of(ids, tile.q, block * kTileM + i * kWarp + threadIdx.x % kWarp);
    }
    const int ids_k[2] = {__float_as_int(of_key[0].x), __float_as_int(of_key[1].x)};
    uint32_t same[2];
    find_same_ids(ids_k, ids_q, kTileM, same);
    visible[0] &= same[0], visible[1] &= same[1];
  }
  zero_unseen(visible, S);
}

// Loads the blocks of a tile whose keys are seen by intervals, of every query head. Called by one
// lane.
template <GradientKernel Kernel, typename Loader>
__device__ __forceinline__ void load_spanned_blocks(int group,
                                                    const typename Kernel::SegmentsOf::OfTile& own,
                                                    Loader& loader) {
  const int2 hull = own.hull();
#pragma unroll 1
  for (int member = 0; member < group; ++member) {
#pragma unroll 1
    for (int block = hull.x; block < hull.y; ++block) {
      const int rules = own.rules(block);
      // Some blocks between those of one owner and those of the other may be nobody's. The other
      // warps of the deterministic form count them too.
      if (Kernel::kPassesTurns || (rules & kRuleHidesBoth) != kRuleHidesBoth) {
        loader.load_block(member, block, rules);
      }
    }
  }
}

// Loads the blocks that hulls of ids leave to the tile, of every query head. Called by a warp,
// whose first lane loads. Owners compare ids in those that are cut.
template <GradientKernel Kernel, typename Loader>
__device__ __forceinline__ void load_compared_blocks(const BackwardParams& a, const KeyTile& tile,
                                                     int group, bool leader, Loader& loader) {
  const typename Kernel::Blocks blocks(a, tile);
#pragma unroll 1
  for (int member = 0; member < group; ++member) {
#pragma unroll 1
    for (int start = tile.begin; start < tile.end; start += kWarp) {
      const auto bits = blocks.look(tile.kv_head * group + member, start);
      if (!leader) continue;
#pragma unroll 1
      for (uint32_t live = bits.live; live; live &= live - 1) {
        const int i = __ffs(live) - 1, block = start + i;
        const bool cut =
            bits.partial >> i & 1 || block < tile.clean_begin || block >= tile.clean_end;
        loader.load_block(member, block, cut ? kRuleCutsBoth : 0);
      }
    }
  }
}

// Loads the blocks that segments leave to the tile, of every query head. Called by a warp, whose
// first lane loads. Kernel: a Backward.
template <GradientKernel Kernel, typename Loader>
__device__ __forceinline__ void load_blocks_of_segments(const BackwardParams& a,
                                                        const KeyTile& tile,
                                                        typename Kernel::SegmentsOf::OfTile& own,
                                                        Loader& loader) {
  using Segments = typename Kernel::SegmentsOf;
  const int group = a.problem.group;
  const bool leader = threadIdx.x == 0, is_empty = tile.begin >= tile.end;
  // The other warps of the deterministic form must come to the same blocks: they do where segments
  // are documents, and are told so.
  const bool tries = !Kernel::kPassesTurns || Segments::is_of_documents(a, tile);
  const bool spanned = !is_empty && Segments::find(a, tile, tries, own);
  if constexpr (Kernel::kPassesTurns) {
    if (leader) {
      const int2 hull = own.hull();
      own.line = {spanned, hull.x, hull.y};
    }
    __syncwarp();
    Kernel::Order::wait_for_line();
  }
  if (is_empty) return;
  __syncwarp();
  if (spanned) {
    if (leader) load_spanned_blocks<Kernel>(group, own, loader);
  } else {
    load_compared_blocks<Kernel>(a, tile, group, leader, loader);
  }
}

}  // namespace tessera::cuda::sm90
