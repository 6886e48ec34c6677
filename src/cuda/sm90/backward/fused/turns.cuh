// SPDX-License-Identifier: Apache-2.0
// The order in which CTAs add to dq, so that its sums are the same bit for bit every time.
//
// Each block of dq sums has a counter in the workspace: how many tiles of keys have added to it.
// The tiles that see a block follow one another without gaps and add in the order of their keys, or
// in the opposite one, so that a tile knows which count is its turn. CTAs take their tiles by
// ticket: one waits only for tickets that others have taken before it, and those are running.
//
// The owners are to notice nothing of that. Warps that the CTA has anyway wait and tell for them,
// through a ring of slots, block i in slot s = i % kRing:
//
//   barrier    arrivals     says
//   ready[s]   1 (waiter)   the owners may add block i; with masks stored[s] says if anybody has
//   added[s]   a warp each  all warps of the owners have issued their additions
//   passed[s]  1 (passer)   slot s is free for block i + kRing
//
//   warp     waits for                  then
//   waiter   passed[s], counter = turn  ready[s]
//   passer   added[s]                   passed[s]; counter + 1, as a release: whoever reads it sees
//                                       what the owners have added
//   skipper  counter = turn             counter + 1, of blocks that masks leave out
//
// Where nothing is left out there are two passers, of every other block. The first to add to a
// block stores, which needs no zeros. A tile without masks computes where it is the first; under
// masks a counter is twice the turn, plus 1 where somebody has stored.
//
// Which order is a matter of speed. Tile j under a causal mask begins at the block of its own keys:
//
//   upwards    Tickets from the last tile to the first, walks from the first block to the last.
//              Tiles that start together stand two blocks apart, each behind the one that it
//              follows, and nobody ever waits. But the longest tiles come last.
//   downwards  Tickets from the first tile to the last, walks from the last block to the first: the
//              longest tiles come first, for the last section, and for problems without a diagonal.
#pragma once

#include <climits>

#include "cuda/sm90/backward/schedule/schedule.cuh"
#include "cuda/sm90/backward/score/blocks.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// Which tiles stand in line is known. backward/fused/sections.cuh has 5.
inline constexpr NamedBarrier kLineIsKnown{6};

// True for a row of backward/table.def that is deterministic.
template <typename Row>
inline constexpr bool kInTurn = Row::kTile.deterministic;

// Says of a tile with masks whether each block in [begin, end) is seen by tiles side by side, so
// that their turns are those under the band alone, and nobody has to pass on those of others.
struct TilesInLine {
  int known, begin, end;
};

// kLeavesOut: blocks may be left out by masks; such tiles always walk from the first block on.
// kInnerLoop: as in for_each_block(). kSlots: of the ring of barriers. kLines: masks are segments
// alone, and tiles may be in line.
template <int kTileM, int kTileN, int kOwnerWarps, bool kLeavesOut, InnerLoop kInnerLoop,
          int kSlots, bool kLines = false>
class Turns {
 public:
  static constexpr int kRing = kSlots, kBarriers = 3 * kRing;
  using Blocks = QueryBlocks<kTileM, kTileN, kLines>;

  // barriers: address of ready[kRing], added[kRing], passed[kRing]. stored: of kRing integers.
  // rank: in a pair of CTAs that add to columns of their own, by counters of their own.
  __device__ __forceinline__ Turns(uint32_t barriers, uint32_t stored, int rank = 0)
      : barriers_(barriers), stored_(stored), rank_(rank) {}

  // True if a counter, read when all is done, says that somebody has stored.
  static __device__ __forceinline__ bool has_sums(int counter) {
    return kLeavesOut ? counter & 1 : counter > 0;
  }

  __device__ __forceinline__ void init() const {
    for (int slot = 0; slot < kRing; ++slot) {
      mbarrier_init(ready(slot), 1);
      mbarrier_init(added(slot), kOwnerWarps);
      mbarrier_init(passed(slot), 1);
    }
  }

  // The first block that a tile walks, and the step to the next.
  static __device__ __forceinline__ int2 walk_of(const KeyTile& tile) {
    return kLeavesOut || tile.upwards ? int2{tile.begin, 1} : int2{tile.end - 1, -1};
  }
  // Blocks [x, y) of those that the tile walks are first added to by this tile.
  static __device__ __forceinline__ int2 first_of(const KeyTile& tile) {
    if (!tile.upwards) {
      // The walk starts at the first block that sees nothing of the tile before.
      const int row = tile.key0 == 0 ? 0 : max(tile.band.end(tile.key0 - 1), 0);
      return {(row + kTileM - 1) / kTileM, INT_MAX};
    }
    const int key = tile.key0 + kTileN, row = tile.band.first(key);  // of the next
    return {0, key >= tile.k.length || row >= tile.q.length ? INT_MAX : row / kTileM};
  }

  // ---- owners, by all lanes of a warp ----

  // any: there is a turn to wait for. A branch around the wait would cost registers: ptxas takes it
  // that threads go their own ways there, and keeps descriptors in vector registers, of which
  // owners have none left.
  __device__ __forceinline__ void wait(const Ring<kRing>& ring, bool any) const {
    mbarrier_wait_if(any, ready(ring.stage), ring.phase);
  }
  // True, under masks, if nobody has added to the block that has been waited for.
  __device__ __forceinline__ bool is_first(const Ring<kRing>& ring) const {
    return load_shared_word(stored_ + 4 * ring.stage) == 0;
  }
  __device__ __forceinline__ void done(const Ring<kRing>& ring, bool any) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0 && any) mbarrier_arrive(added(ring.stage));
  }

  // ---- the warps of the producer's warpgroup that have nothing else to do ----

  // Warp 1 waits, warp 2 passes; warp 3 passes too where the tile's blocks are known without
  // skipping any, and skips where masks leave some out. line: written by the first warp, which
  // others may read after wait_for_line(). kOnePasser: the last warp is busy otherwise.
  template <bool kOnePasser = false>
  __device__ __forceinline__ void serve(const BackwardParams& a, const KeyTile& tile,
                                        const TilesInLine& line = {}) const {
    const int warp = threadIdx.x / kWarp;
    if (warp == 0) return;
    if constexpr (kLines) wait_for_line();
    const bool in_line = !kLeavesOut || (kLines && line.known);
    if (warp == 1) waiter(a, tile, line);
    if constexpr (kLines) {  // one copy of the code: masks make it large
      if (warp == 2 || (warp == 3 && in_line)) passer(a, tile, line, in_line ? warp - 2 : kAlone);
    } else {
      if (warp == 2) passer(a, tile, line, in_line && !kOnePasser ? 0 : kAlone);
      if (warp == 3 && in_line && !kOnePasser) passer(a, tile, line, 1);
    }
    if (warp == 3 && !in_line && a.dq_sums) skipper(a, tile);
  }
  // Called by all warps that serve, and by the first one of their warpgroup.
  static __device__ __forceinline__ void wait_for_line() {
    named_barrier_sync(kLineIsKnown, kWarpgroup);
  }

 private:
  __device__ __forceinline__ uint32_t ready(int slot) const { return barriers_ + 8 * slot; }
  __device__ __forceinline__ uint32_t added(int slot) const {
    return barriers_ + 8 * (kRing + slot);
  }
  __device__ __forceinline__ uint32_t passed(int slot) const {
    return barriers_ + 8 * (2 * kRing + slot);
  }

  // How many tiles add to a block before this one.
  static __device__ __forceinline__ int turn_of(const KeyTile& tile, int block) {
    const int index = tile.key0 / kTileN;
    if (tile.upwards) {
      const int row = min((block + 1) * kTileM, tile.q.length) - 1;
      return (tile.band.hi(row) - 1) / kTileN - index;
    }
    return index - tile.band.lo(block * kTileM) / kTileN;
  }

  static constexpr int kAlone = 2;  // in place of the parity of blocks: of a passer of all

  __device__ __forceinline__ void waiter(const BackwardParams& a, const KeyTile& tile,
                                         const TilesInLine& line) const {
    wait_for_predecessors();  // zeros in the counters
    const bool waits = a.dq_sums && !a.order->overlap;
    Ring<kRing> ring;
    for_each_block(a, tile, line, [&](int* counter, int turn) {
      mbarrier_wait(passed(ring.stage), ring.phase ^ 1);
      int count;
      do {
        count = load_acquire(counter);
      } while ((kLeavesOut ? count >> 1 : count) != turn && waits);
      if constexpr (kLeavesOut) store_shared_word(stored_ + 4 * ring.stage, count & 1);
      mbarrier_arrive(ready(ring.stage));
      ring.advance();
    });
  }
  // Passes on the turns of every other block, so that two fences are under way: they take about as
  // long as a block.
  __device__ __forceinline__ void passer(const BackwardParams& a, const KeyTile& tile,
                                         const TilesInLine& line, int parity) const {
    Ring<kRing> ring;
    bool mine = parity != 1;
    for_each_block(a, tile, line, [&](int* counter, int turn) {
      if (mine) {
        mbarrier_wait(added(ring.stage), ring.phase);
        mbarrier_arrive(passed(ring.stage));
        if (a.dq_sums) store_release(counter, kLeavesOut ? 2 * (turn + 1) + 1 : turn + 1);
      }
      ring.advance();
      mine = parity == kAlone || !mine;
    });
  }

  // body(counter, turn) for each block that the owners add to, in their order, by one lane.
  template <typename Body>
  __device__ __forceinline__ void for_each_block(const BackwardParams& a, const KeyTile& tile,
                                                 const TilesInLine& line, const Body& body) const {
    const int group = a.problem.group;
    const bool leader = threadIdx.x % kWarp == 0;
    if (kLines && line.known) {
      for (int member = 0; leader && member < group; ++member) {
        int* const counters = counters_of(a, tile, member);
        for (int block = line.begin; block < line.end; ++block) {
          body(counters + block, turn_of(tile, block));
        }
      }
    } else if constexpr (kLeavesOut) {
      const Blocks blocks(a, tile);
      for (int member = 0; member < group; ++member) {
        int* const counters = counters_of(a, tile, member);
        for (int start = tile.begin; start < tile.end; start += kWarp) {
          uint32_t live = blocks.look(tile.kv_head * group + member, start).live;
          for (; leader && live; live &= live - 1) {
            const int block = start + __ffs(live) - 1;
            body(counters + block, turn_of(tile, block));
          }
          __syncwarp();
        }
      }
    } else if (leader) {
      const int2 walk = walk_of(tile);
      sm90::for_each_block<kInnerLoop>(
          a, group, tile.begin, tile.end, walk.x, walk.y, [&](int member, int block) {
            body(counters_of(a, tile, member) + block, turn_of(tile, block));
          });
    }
  }
  // A lane a block.
  __device__ __forceinline__ void skipper(const BackwardParams& a, const KeyTile& tile) const {
    wait_for_predecessors();
    if (a.order->overlap) return;
    const Blocks blocks(a, tile);
    const int group = a.problem.group, lane = threadIdx.x % kWarp;
    for (int member = 0; member < group; ++member) {
      int* const counters = counters_of(a, tile, member);
      for (int start = tile.begin; start < tile.end; start += kWarp) {
        const uint32_t live = blocks.look(tile.kv_head * group + member, start).live;
        const int block = start + lane, turn = turn_of(tile, block);
        bool waits = block < tile.end && !(live >> lane & 1);
        while (__any_sync(kAllLanes, waits)) {
          if (!waits) continue;
          const int count = load_acquire(counters + block);
          if (count >> 1 == turn) {
            store_release(counters + block, count + 2);
            waits = false;
          }
        }
      }
    }
  }
  __device__ __forceinline__ int* counters_of(const BackwardParams& a, const KeyTile& tile,
                                              int member) const {
    const int head = rank_ * a.problem.hq + tile.kv_head * a.problem.group + member;
    return a.turns + int64_t{head} * a.slots + tile.first_slot;
  }

  uint32_t barriers_, stored_;
  int rank_;
};

// The first block that a tile walks, and the step to the next. Order: a Turns<..>.
template <typename Row, typename Order>
__device__ __forceinline__ int2 walk_of(const KeyTile& tile) {
  if constexpr (kInTurn<Row>) return Order::walk_of(tile);
  return {tile.begin, 1};
}

}  // namespace tessera::cuda::sm90
