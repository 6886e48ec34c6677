// SPDX-License-Identifier: Apache-2.0
// dbias inside of the fused backward kernel, for biases whose elements are summed over two
// sequences at most: dS is there, in registers.
//
// An owner writes its dS transposed, [64 queries][64 keys], to a tile of shared memory of its own,
// and idle warps send that to memory by TMA. The two sequences that share an element are tiles side
// by side in the grid, which walk the same blocks at the same time: what the one stores and reads
// is in the L2 when the other comes. Whichever has a block first stores it, says so, and the other
// adds to it. A sum of two does not depend on which.
//
//   barrier of an owner   arrivals          says
//   full                  4 (a warp each)   dS is staged
//   empty                 1                 what was sent has been read, at first the zeros: the
//                                           tile is free
//
//   mark of a block       0                 nobody has come
//                         1, 2              one or both have claimed it: the first is to store it
//                         5, 6              and has stored it
#pragma once

#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/schedule/schedule.cuh"
#include "cuda/sm90/backward/tile.h"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"

namespace tessera::cuda::sm90 {

// True if a row of backward/table.def sums dbias on the way.
template <typename Row>
inline constexpr bool kSumsBias = Row::kTile.sums_dbias;

// Staging of the first owner; that of the other is next to it.
struct BiasStaging {
  uint32_t tile, barriers;  // addresses in shared memory

  __device__ __forceinline__ BiasStaging of(int owner) const {
    return {tile + owner * SmemTile<64, 64>::kBytes, barriers + 16 * owner};
  }
  __device__ __forceinline__ uint32_t full() const { return barriers; }
  __device__ __forceinline__ uint32_t empty() const { return barriers + 8; }
  __device__ __forceinline__ void init() const {
    mbarrier_init(full(), kWarpgroup / kWarp);
    mbarrier_init(empty(), 1);
  }
};

template <typename Element>
class BiasGradient {
 public:
  static constexpr int kQueries = 64, kKeys = 64;
  using Tile = SmemTile<kQueries, kKeys>;

  // ---- an owner ----

  __device__ __forceinline__ explicit BiasGradient(const BiasStaging& staging)
      : staging_(staging) {}

  // dS: as the products take it, of the warp's 16 keys and the block's queries.
  __device__ __forceinline__ void stage(const uint32_t (&dS)[kQueries / 4]) {
    mbarrier_wait(staging_.empty(), phase_);
    phase_ ^= 1;
    const int lane = threadIdx.x % kWarp, row = lane % 8;
    const int unit = threadIdx.x % kWarpgroup / kWarp * 2 + lane / 8 % 2;
    const uint32_t to = Tile::unit(staging_.tile, lane / 16 * 8 + row, unit);
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i) {
      stmatrix_x4_transposed(to + i * 16 * kChunkRowBytes, dS + 4 * i);
    }
  }
  // Called by one lane of a warp, behind an async_proxy_fence() of all.
  __device__ __forceinline__ void signal_staged() const { mbarrier_arrive(staging_.full()); }

  // ---- the warps of the producer's warpgroup that have nothing else to do ----

  // Sends what the owners stage, and zeros in blocks that do not see the tile. kHasTurns: two of
  // the warps have turns to pass. walk: the first block and the step to the next.
  template <bool kHasTurns>
  static __device__ __forceinline__ void serve(const BackwardParams& a, const KeyTile& tile,
                                               BiasStaging staging, int2 walk) {
    const int warp = threadIdx.x / kWarp;
    if constexpr (kHasTurns) {
      if (warp == 3) send<2>(a, tile, staging, 0, walk);
    } else {
      if (warp >= 2) send<1>(a, tile, staging.of(warp - 2), warp - 2, walk);
    }
  }

 private:
  // Sends the tiles of owners [first, first + kOwners).
  template <int kOwners>
  static __device__ __forceinline__ void send(const BackwardParams& a, const KeyTile& tile,
                                              BiasStaging staging, int first, int2 walk) {
    const Sender sender(a, tile);
#pragma unroll
    for (int w = 0; w < kOwners; ++w) {
      for (int i = threadIdx.x % kWarp; i < Tile::kBytes / 16; i += kWarp) {
        store_shared(staging.of(w).tile + 16 * i, uint4{});
      }
    }
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % kWarp != 0) return;
    wait_for_predecessors();  // marks of nobody
#pragma unroll
    for (int w = 0; w < kOwners; ++w) sender.clear_unseen(staging.of(w).tile, first + w);
    bulk_wait_read();
#pragma unroll
    for (int w = 0; w < kOwners; ++w) mbarrier_arrive(staging.of(w).empty());

    int unsaid[kOwners];  // the mark of what has been stored last, which nobody knows yet
#pragma unroll
    for (int& mark : unsaid) mark = -1;
    uint32_t phase = 0;
    const int group = a.problem.group;
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
#pragma unroll 1
      for (int i = tile.begin, block = walk.x; i < tile.end; ++i, block += walk.y) {
#pragma unroll
        for (int w = 0; w < kOwners; ++w) {
          const int mark = sender.mark_of(member, block, first + w);
          const int found = mark >= 0 ? atomicAdd(a.bias_marks + mark, kClaimed) : 0;
          mbarrier_wait(staging.of(w).full(), phase);
          signal_stored(a, unsaid[w]);
          if (found != 0) {  // the other tile has claimed the block: until it has stored it
            if (found < kStored) {
              // Who waits has nothing that others may be waiting for.
#pragma unroll
              for (int& other : unsaid) signal_stored(a, other);
            }
            while (load_acquire(a.bias_marks + mark) < kStored) {
            }
            global_proxy_fence();  // before an addition by TMA to what TMA has stored
          }
          sender.send(staging.of(w).tile, member, block, first + w, found != 0);
          if (found == 0) unsaid[w] = mark;
          bulk_wait_read();
          mbarrier_arrive(staging.of(w).empty());
        }
        phase ^= 1;
      }
    }
#pragma unroll
    for (int& mark : unsaid) signal_stored(a, mark);
    bulk_wait();
  }

  // What is added to a mark.
  static constexpr int kClaimed = 1, kStored = 4;
  static_assert(2 * kClaimed < kStored);

  // Whoever reads the mark may add to what it stands for. Negative: there is nothing to say.
  static __device__ __forceinline__ void signal_stored(const BackwardParams& a, int& mark) {
    if (mark < 0) return;
    bulk_wait();
    add_release(a.bias_marks + mark, kStored);
    mark = -1;
  }

  struct Sender {
    const BackwardParams& a;
    const KeyTile& tile;
    int sequence;  // on the axis of dbias

    __device__ __forceinline__ Sender(const BackwardParams& params, const KeyTile& key_tile)
        : a(params),
          tile(key_tile),
          sequence(params.problem.tensor[TESSERA_DBIAS].stride[0] != 0 ? key_tile.n : 0) {}

    // Negative: nobody shares the block.
    __device__ __forceinline__ int mark_of(int member, int block, int w) const {
      if (a.sequences == 1) return -1;
      const int row = (tile.kv_head * a.problem.group + member) * blocks() + block;
      return (row * a.tiles_n.divisor + tile.key0 / (2 * kKeys)) * 2 + w;
    }
    __device__ __forceinline__ int blocks() const {
      return (a.problem.sq + kQueries - 1) / kQueries;
    }
    __device__ __forceinline__ void send(uint32_t from, int member, int block, int w,
                                         bool adds) const {
      const int key = tile.key0 + w * kKeys, query = block * kQueries;
      const int head = tile.kv_head * a.problem.group + member;
      if (key >= tile.k.length) return;
      if (adds) {
        tma_add(&a.grad_bias, from, key, head, query, 0, sequence);
      } else {
        tma_store(&a.grad_bias, from, key, head, query, 0, sequence);
      }
      bulk_commit();
    }
    // from: zeros. Each of the sequences that share an element clears its part.
    __device__ __forceinline__ void clear_unseen(uint32_t from, int w) const {
      const int end = tile.begin < tile.end ? tile.end : tile.begin;
#pragma unroll 1
      for (int member = 0; member < a.problem.group; ++member) {
#pragma unroll 1
        for (int block = a.sequences > 1 ? tile.n : 0; block < blocks(); block += a.sequences) {
          if (block < tile.begin || block >= end) send(from, member, block, w, false);
        }
      }
    }
  };

  const BiasStaging staging_;
  uint32_t phase_ = 0;
};

}  // namespace tessera::cuda::sm90
