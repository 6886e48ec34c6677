// SPDX-License-Identifier: Apache-2.0
// Which row tiles a CTA computes, and which keys each of them needs.
//
// One warp of each CTA finds the tiles and puts them into a ring in shared memory; producer and
// consumers read them there. So lengths, offsets and masks are looked at once a tile and ahead of
// time, and tiles without work cost the tensor cores nothing.
#pragma once

#include <climits>

#include "cuda/common/score/score.cuh"
#include "cuda/common/sequence.cuh"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

struct Work {
  int last;  // there is no tile: the CTA is done
  int n, head;
  int m0;  // first row of the tile; the sequence's rows are below
  Rows q, k;
  Band band;
  int64_t o, lse;  // elements before row m0
  float slope;     // of ALiBi, see Features::slope_of()
  float sink;      // natural; -inf: none
  int part;        // of the tile's keys; 0 where they are not cut
  // The rest is what consumers read between two tiles, where all else waits for it: four words at a
  // time.
  //
  // Blocks of keys [begin, end) that some row of the tile sees; none where there is no tile. Every
  // row that exists sees the whole of blocks [clean_begin, clean_end).
  alignas(16) int begin;
  int end, clean_begin, clean_end;
  // Rows of the tile, counted from m0: those that exist, and those that are stored.
  alignas(16) int exists_lo;
  int exists_hi, owned_lo, owned_hi;

  __device__ __forceinline__ bool exists(int row) const { return 0 <= row && row < q.length; }
  __device__ __forceinline__ bool owns(int row) const {
    return q.owned_lo <= row && row < q.owned_hi;
  }
};

struct ScaledWork : Work {
  float k_scale, v_scale;  // what an E4M3 k and v of the tile's sequence and head were divided by
};

// The part of Work that a consumer's loops over key blocks need, in registers.
struct TileBlocks {
  int begin, end, clean_begin, clean_end;

  static __device__ __forceinline__ TileBlocks of(const Work& work) {
    const int4 range = *reinterpret_cast<const int4*>(&work.begin);
    return {uniform(range.x), uniform(range.y), uniform(range.z), uniform(range.w)};
  }
};

// sequence_of() where both sides are packed, by all lanes of a warp: a word of the tables each, so
// that one load finds all of them.
__device__ __forceinline__ Sequence packed_sequence(const Params& p, int n, int lane) {
  const bool next = lane & 1, is_length = lane & 2, of_keys = lane & 4;
  const int extent = of_keys ? p.sk : p.sq;
  const int padded = of_keys ? SideOfKeys::kPadded : SideOfQueries::kPadded;
  const int cu = of_keys ? SideOfKeys::kCuSeqlens : SideOfQueries::kCuSeqlens;
  const View& table = p.tensor[is_length || !p.tensor[padded].data ? cu : padded];
  int mine = static_cast<int>(integer_at(table, n + next));
  if (!is_length) mine = n + next >= p.batch ? extent : clamped(mine, 0, extent);
  const auto rows_of_side = [&](int first_lane, int side_extent, int longest) {
    const int start = __shfl_sync(kAllLanes, mine, first_lane);
    const int end = __shfl_sync(kAllLanes, mine, first_lane + 1);
    const int length =
        __shfl_sync(kAllLanes, mine, first_lane + 3) - __shfl_sync(kAllLanes, mine, first_lane + 2);
    return Rows{0, start, clamped(length, 0, min(side_extent - start, longest)),
                n == 0 ? -start : 0, end - start};
  };
  const Rows q = rows_of_side(0, p.sq, p.longest_q), k = rows_of_side(4, p.sk, p.longest_k);
  return {n, q, k, band_of(p, n, q.length, k.length)};
}

// The first slot of sequence n, whose rows are stored from `start` on (see tile_of_slot).
__device__ __forceinline__ int slot_of_start(int n, int start, int tile_rows) {
  return n == 0 ? 0 : start / tile_rows + n + 1;
}

// The sequence whose tiles stand at a slot, by all lanes of a warp: memory is asked
// once for each factor of 32 in the number of sequences.
template <typename Side>
__device__ __forceinline__ int sequence_of_slot(const Params& p, int slot, int tile_rows,
                                                int lane) {
  int lo = 0, hi = p.batch;  // the first slot of lo <= slot < that of hi
  while (hi - lo > 1) {
    const int step = (hi - lo + kWarp - 1) / kWarp, n = lo + lane * step;
    const bool begun = n < hi && slot_of_start(n, packed_start<Side>(p, n), tile_rows) <= slot;
    lo += (__popc(__ballot_sync(kAllLanes, begun)) - 1) * step;
    hi = min(lo + step, hi);
  }
  return lo;
}

// The first row of the tile at a slot of a sequence that packed_sequence() has found.
__device__ __forceinline__ int row_of_slot(const Params& p, int n, const Rows& rows, int extent,
                                           int slot, int tile_rows) {
  const int next = rows.first + rows.owned_hi;
  const int end = n + 1 < p.batch ? slot_of_start(n + 1, next, tile_rows)
                                  : num_tile_slots(true, extent, p.batch, tile_rows);
  const int tiles_before = n == 0 ? (rows.first + tile_rows - 1) / tile_rows : 0;
  return (end - 1 - slot - tiles_before) * tile_rows;
}

// The sequences of a packed problem in the order in which their tiles are handed out: longest
// first, so that no SM is left with a long tile at the end. It lies in shared memory and is filled
// by one warp. Problems of more than kMost sequences keep the order of storage.
struct PackedOrder {
  static constexpr int kMost = 128;
  alignas(16) int length[kMost], tiles[kMost];  // of each sequence: keys, row tiles
  int begin[kMost];                             // by rank: tiles of those before it
  uint8_t sequence[kMost];                      // and whose they are

  static __device__ __forceinline__ bool covers(const Params& p) {
    return p.thd_q && p.batch <= kMost;
  }

  // May come before the tables are there: what stands in their place is not looked at.
  static __device__ __forceinline__ void prefetch(const Params& p, int lane) {
    constexpr int kLine = 128;
    const int tables[] = {SideOfQueries::kCuSeqlens, SideOfQueries::kPadded, SideOfKeys::kCuSeqlens,
                          SideOfKeys::kPadded};
#pragma unroll
    for (const int index : tables) {
      const View& table = p.tensor[index];
      const int bytes = (p.batch + 1) * (table.dtype == TESSERA_INT32 ? 4 : 8);
      if (!table.data || table.stride[0] != 1 || lane * kLine >= bytes) continue;
      l2_prefetch(static_cast<const char*>(table.data) + lane * kLine);
    }
  }

  // How many tiles there are of a head; the host, which does not know lengths, counts some more.
  // Sequences of up to left_queries queries have none.
  template <int kTileM>
  __device__ __forceinline__ int fill(const Params& p, int lane, int left_queries = -1) {
    const int rounded = (p.batch + 3) & ~3;  // the rest comes last and has no tiles
    if (p.batch + lane < rounded) length[p.batch + lane] = -1, tiles[p.batch + lane] = 0;
#pragma unroll 1
    for (int n = lane; n < p.batch; n += kWarp) {
      // Loads first: nothing hides their latency but each other.
      const View& padded = p.tensor[SideOfQueries::kPadded];
      const View& starts = padded.data ? padded : p.tensor[SideOfQueries::kCuSeqlens];
      const int64_t start = integer_at(starts, n);
      const int64_t next = n + 1 < p.batch ? integer_at(starts, n + 1) : p.sq;
      length[n] = length_of<SideOfKeys>(p, n);
      const int first = clamped(start, 0, p.sq);
      const int rows = clamped(next, 0, p.sq) - first;               // with the gap behind them
      const int before = n > 0 ? 0 : (first + kTileM - 1) / kTileM;  // see tiles_before()
      tiles[n] = before + (max(rows, 0) + kTileM - 1) / kTileM;
      if (left_queries >= 0 && length_of<SideOfQueries>(p, n) <= left_queries) tiles[n] = 0;
    }
    __syncwarp();
    int of_all = 0;
#pragma unroll 1
    for (int n = lane; n < p.batch; n += kWarp) {
      int rank = 0, tiles_of_longer = 0;
      const int mine = length[n];
#pragma unroll 2
      for (int other = 0; other < rounded; other += 4) {
        const int4 lengths = *reinterpret_cast<const int4*>(length + other);
        const int4 counts = *reinterpret_cast<const int4*>(tiles + other);
        const auto add = [&](int i, int its_length, int its_tiles) {
          const bool first = its_length > mine || (its_length == mine && other + i < n);
          rank += first;
          tiles_of_longer += first ? its_tiles : 0;
        };
        add(0, lengths.x, counts.x), add(1, lengths.y, counts.y);
        add(2, lengths.z, counts.z), add(3, lengths.w, counts.w);
      }
      begin[rank] = tiles_of_longer;
      sequence[rank] = n;
      of_all += tiles[n];
    }
    __syncwarp();
    return __reduce_add_sync(kAllLanes, of_all);
  }

  // Tiles of rows that are stored before the first sequence.
  template <int kTileM>
  static __device__ __forceinline__ int tiles_before(const Params& p, int n) {
    return n > 0 ? 0 : (packed_start<SideOfQueries>(p, 0) + kTileM - 1) / kTileM;
  }

  // The last one that begins with the tile or before it. Called by all lanes of a warp.
  __device__ __forceinline__ int rank_of(int tile, int sequences, int lane) const {
    int rank = -1;
    for (int i = 0; i < sequences; i += kWarp) {
      const bool begun = i + lane < sequences && begin[i + lane] <= tile;
      rank += __popc(__ballot_sync(kAllLanes, begun));
    }
    return rank;
  }
};

// kHeads: of a tile; a.heads, a.tiles and sections count groups of so many heads.
template <int kTileM, int kTileN, int kHeads = 1>
struct Schedule {
  static __device__ __forceinline__ int groups_of_heads(const Params& p) { return p.hq / kHeads; }

  // The tile that stands at `index` in the order of all tiles, by all lanes of a warp. Causal
  // problems have the longest tiles first; the heads of a section stand side by side.
  static __device__ __forceinline__ void decode(const ForwardParams& a, const PackedOrder& order,
                                                int index, Work& work) {
    const Params& p = a.problem;
    const int lane = threadIdx.x % kWarp;
    const bool packed = p.thd_q && p.thd_k && p.tensor[SideOfQueries::kCuSeqlens].stride[0] != 0;
    if (PackedOrder::covers(p)) {
      decode_packed(a, order, index, lane, work);
    } else if (packed) {
      const int slot = index / groups_of_heads(p);
      work.n = sequence_of_slot<SideOfQueries>(p, slot, kTileM, lane);
      work.head = index - slot * groups_of_heads(p);
    } else if (p.thd_q) {
      const int slot = index / groups_of_heads(p);
      const TileOfRows tile = tile_of_slot<SideOfQueries>(p, slot, kTileM);
      work.n = tile.n;
      work.head = index - slot * groups_of_heads(p);
      work.m0 = tile.begin;
    } else {
      int head;  // of all sequences
      if (a.longest_first) {
        const int section = a.per_section.quotient(index);
        const int in_section = index - section * a.per_section.divisor;
        const int round = a.heads_per_section.quotient(in_section);
        work.m0 = (a.tiles_m.divisor - 1 - round) * kTileM;
        head = section * a.heads_per_section.divisor + in_section -
               round * a.heads_per_section.divisor;
      } else {
        head = a.tiles_m.quotient(index);
        work.m0 = (index - head * a.tiles_m.divisor) * kTileM;
      }
      work.n = a.heads.quotient(head);
      work.head = head - work.n * a.heads.divisor;
    }
    const Sequence sequence = packed ? packed_sequence(p, work.n, lane) : sequence_of(p, work.n);
    if (packed && !PackedOrder::covers(p)) {
      work.m0 = row_of_slot(p, work.n, sequence.q, p.sq, index / groups_of_heads(p), kTileM);
    }
    work.head *= kHeads;
    work.q = sequence.q;
    work.k = sequence.k;
    work.band = sequence.band;
    set_rows(work);
    set_blocks(work);
  }

  // Sequences by rank. Each has sections of heads whose keys fit in L2 together, and each section
  // begins with the last rows of all its heads.
  static __device__ __forceinline__ void decode_packed(const ForwardParams& a,
                                                       const PackedOrder& order, int index,
                                                       int lane, Work& work) {
    const Params& p = a.problem;
    const int rank = order.rank_of(a.heads.quotient(index), p.batch, lane);
    const int n = order.sequence[rank], tiles = order.tiles[n], length = max(order.length[n], 1);
    const int num_heads = groups_of_heads(p);
    const int in_sequence = index - order.begin[rank] * num_heads;
    int round = a.heads.quotient(in_sequence);
    work.n = n;
    work.head = in_sequence - round * num_heads;
    if (int64_t{length} * num_heads > a.keys_per_section) {  // more than one section
      const int per_section = max(a.keys_per_section / length, 1);
      const int section = in_sequence / (per_section * tiles);
      const int in_section = in_sequence - section * per_section * tiles;
      const int heads = min(per_section, num_heads - section * per_section);
      round = in_section / heads;
      work.head = section * per_section + in_section - round * heads;
    }
    work.m0 = (tiles - PackedOrder::tiles_before<kTileM>(p, n) - 1 - round) * kTileM;
  }

  static __device__ __forceinline__ void set_rows(Work& work) {
    work.exists_lo = -work.m0;
    work.exists_hi = work.q.length - work.m0;
    work.owned_lo = work.q.owned_lo - work.m0;
    work.owned_hi = work.q.owned_hi - work.m0;
  }

  static __device__ __forceinline__ void set_blocks(Work& work) {
    // Rows of the tile that exist.
    const int first = max(work.m0, 0), end = min(work.m0 + kTileM, work.q.length);
    const Interval some = work.band.keys(first, end), all = work.band.keys_of_all(first, end);
    const bool sees = !some.empty();
    work.begin = sees ? some.lo / kTileN : 0;
    work.end = sees ? (some.hi + kTileN - 1) / kTileN : 0;
    work.clean_begin = (all.lo + kTileN - 1) / kTileN;
    work.clean_end = all.hi / kTileN;
  }
};

// Hands out the tiles: CTA i starts with tile i and takes the next one that nobody has when it is
// about to run out. Called by one lane; in clusters whose CTAs have a tile together, of the first
// of them.
//
// The counter lies in the workspace, whose content is unknown at first. CTA 0 resets it and then
// sets the mark of this launch; the last CTA to finish removes the mark, because a graph launches
// again with the same one. Nobody waits in practice: the mark is there long before the first tile
// is done.
class Dispenser {
 public:
  // counter: in the workspace; null: every CTA has one tile.
  __device__ __forceinline__ Dispenser(TileCounter* counter, uint64_t mark, int ctas_of_tile = 1)
      : counter_(counter),
        mark_(mark),
        worker_(blockIdx.x / ctas_of_tile),
        workers_(gridDim.x / ctas_of_tile) {}

  // Called before the second tile, when nobody needs the counter of an earlier launch any more, and
  // by one lane: a count that another one stores late would hand out tiles twice.
  __device__ __forceinline__ void reset() const {
    if (!counter_ || worker_ != 0) return;
    counter_->next = workers_;
    counter_->finished = 0;
    __threadfence();
    store_mark(mark_);
  }

  // Index of the next of `tiles`; at or past their number when there is none, asked once.
  __device__ __forceinline__ int next(int tiles) {
    if (first_ && static_cast<int>(worker_) < tiles) {
      first_ = false;
      return worker_;
    }
    if (!counter_) return tiles;
    while (!marked_ && load_mark() != mark_) __nanosleep(100);
    marked_ = true;
    const int index = static_cast<int>(atomicAdd(&counter_->next, 1u));
    if (index >= tiles && atomicAdd(&counter_->finished, 1u) == workers_ - 1) store_mark(0);
    return index;
  }

 private:
  __device__ __forceinline__ void store_mark(uint64_t mark) const {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&counter_->mark), "l"(mark)
                 : "memory");
  }
  __device__ __forceinline__ uint64_t load_mark() const {
    uint64_t mark;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                 : "=l"(mark)
                 : "l"(&counter_->mark)
                 : "memory");
    return mark;
  }

  TileCounter* const counter_;
  const uint64_t mark_;
  const unsigned worker_, workers_;
  bool first_ = true, marked_ = false;
};

}  // namespace tessera::cuda::sm90
