// SPDX-License-Identifier: Apache-2.0
// The loaders of keys and values in pages that no box of TMA fits: a warp each, which copies rows one
// by one. forward/pages/loaders.cuh has those of boxes.
//
// Eight lanes copy the 128 bytes that a chunk has of a row, so a warp four rows at a time. A lane looks up
// the pages of every 32nd key of a block, while the block before is copied, and the others get
// them by shuffles. A block is handed over when it is there, while the next one is on its way; a
// warp that has to wait for a stage or a tile first hands over what it has. What no row of the tile
// sees is zero, and neither its row nor the entry of its page is read. The fence that lets wgmma see
// copies is the consumers': a loader has no time for it.
#pragma once

#include "cuda/sm90/forward/pages/params.h"
#include "cuda/sm90/forward/roles.cuh"
#include "cuda/sm90/machine/copy_groups.cuh"

namespace tessera::cuda::sm90 {

// The keys that some row of a tile sees.
template <int kTileM>
__device__ __forceinline__ Interval keys_seen(const Work& work) {
  return work.band.keys(max(work.m0, 0), min(work.m0 + kTileM, work.q.length));
}

// How a warp's lanes share the copying of rows: the time of a block is the instructions of a copy.
struct RowCopies {
  static constexpr int kBytes = 16, kLanesOfRow = kChunkRowBytes / kBytes,
                       kRows = kWarp / kLanesOfRow;
  static constexpr uint32_t kNone = ~0u;  // a row that is zero
  int unit, row0;  // the lane's 16 bytes of a chunk's row, and the first of its rows

  static __device__ __forceinline__ RowCopies of(int lane) {
    return {lane % kLanesOfRow, lane / kLanesOfRow};
  }

  // at[i]: where row 32 i + lane begins, in units. columns: of a row; the others are zero. Of a row that is
  // zero the address is anything: nothing is read there.
  template <typename Tile, int kKeysOfLane>
  __device__ __forceinline__ void copy(const char* from, const uint32_t (&at)[kKeysOfLane],
                                       uint32_t to, int columns) const {
    // Units are swizzled over eight rows, of which a lane has two.
    constexpr int kRowsOfSwizzle = 2 * kRows;
    const uint32_t even = Tile::unit(to, row0, unit), odd = Tile::unit(to, row0 + kRows, unit);
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
#pragma unroll 1
      for (int r = 0; r < kWarp; r += kRowsOfSwizzle) {
        const int row = (i * kWarp + r) * kChunkRowBytes;
        const uint32_t first = __shfl_sync(kAllLanes, at[i], r + row0),
                       second = __shfl_sync(kAllLanes, at[i], r + row0 + kRows);
        copy_row<Tile>(from, first, even + row, columns);
        copy_row<Tile>(from, second, odd + row, columns);
      }
    }
  }

 private:
  template <typename Tile>
  __device__ __forceinline__ void copy_row(const char* from, uint32_t units, uint32_t to,
                                           int columns) const {
    const char* const source = from + int64_t{units} * kBytes;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const bool copies = units != kNone && chunk * kChunkColumns + unit * (kBytes / 2) < columns;
      copy_async(to + chunk * Tile::kChunkBytes, source + chunk * kChunkRowBytes,
                 copies ? kBytes : 0);
    }
  }
};

// The rows of a tile's blocks, from the last block to the first.
template <int kTileN, int kTable>
class PageRows {
 public:
  static constexpr int kKeysOfLane = kTileN / kWarp;

  __device__ __forceinline__ PageRows(const PagedForwardParams& a, int n, const Interval& seen,
                                      int last_block, int lane)
      : a_(a), seen_(seen), key_(last_block * kTileN + lane) {
    const View& table = a.problem.tensor[kTable];
    table_ = static_cast<const int32_t*>(table.data) + n * table.stride[0];
    ask();
  }

  // at[i]: where row 32 i + lane of the next block begins, in units of 16 bytes from the pool's begin.
  __device__ __forceinline__ void next(uint32_t (&at)[kKeysOfLane]) {
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int key = key_ + i * kWarp;
      const int row = key - a_.page_size.quotient(key) * a_.page_size.divisor;
      at[i] = pages_[i] < 0 ? RowCopies::kNone
                            : static_cast<uint32_t>(pages_[i]) * pool().page_units +
                                  static_cast<uint32_t>(row) * pool().row_units;
    }
    key_ -= kTileN;
    ask();
  }

 private:
  __device__ __forceinline__ const PagedForwardParams::Pool& pool() const {
    return kTable == TESSERA_PAGE_TABLE_K ? a_.keys : a_.values;
  }
  __device__ __forceinline__ void ask() {
    const Params& p = a_.problem;
    const int pages = kTable == TESSERA_PAGE_TABLE_K ? p.pages_k : p.pages_v;
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int key = key_ + i * kWarp;
      pages_[i] = -1;
      if (!seen_.contains(key)) continue;
      const int page =
          __ldg(table_ + a_.page_size.quotient(key) * static_cast<int>(p.tensor[kTable].stride[1]));
      if (page < pages) pages_[i] = page;
    }
  }

  const PagedForwardParams& a_;
  const Interval seen_;
  const int32_t* table_;
  int key_;  // the lane's first of the next block
  int pages_[kKeysOfLane];
};

// Copies all blocks of all tiles into the stages of a ring, a Tile each, the first of which is at
// `first` in shared memory. columns: how many a row has. on_block: called where a block is on its way.
template <TiledKernel Kernel, typename Tile, int kTable, int kStages, typename OnBlock>
__device__ __forceinline__ void copy_pages(const PagedForwardParams& a,
                                           const typename Kernel::Work* works,
                                           const typename Kernel::Shared shared,
                                           const StageBarriers<kStages>& barriers, uint32_t first,
                                           int columns, const OnBlock& on_block) {
  using Rows = PageRows<Kernel::kTileN, kTable>;
  const int lane = threadIdx.x % kWarp;
  const RowCopies copies = RowCopies::of(lane);
  const View& pool = a.problem.tensor[kTable == TESSERA_PAGE_TABLE_K ? TESSERA_K : TESSERA_V];
  const auto tiles = shared.work_barriers();
  Ring<kStages> ring;
  int on_their_way = 0;  // blocks, 0 or 1: that of the stage before the ring's
  const auto hand_over = [&](int left) {
    if (on_their_way <= left) return;
    left == 0 ? copy_async_wait_but<0>(0) : copy_async_wait_but<1>(1);
    __syncwarp();
    const int stage = (ring.stage + kStages - on_their_way) % kStages;
    if (lane == 0) mbarrier_arrive(barriers.full(stage));
    --on_their_way;
  };
  for (Ring<Kernel::kWorkStages> tile;; tile.advance()) {
    tiles.wait(tile);
    const auto& work = works[tile.stage];
    if (work.last) return;
    wait_for_predecessors();
    const char* from = static_cast<const char*>(pool.data) +
                       work.head / a.problem.group * pool.stride[2] * 2 +
                       copies.unit * RowCopies::kBytes;
    asm("" : "+l"(from));  // one pointer: from its parts each row would add them up
    Rows rows(a, work.n, keys_seen<Kernel::kTileM>(work), work.end - 1, lane);
#pragma unroll 1
    for (int j = work.end - 1; j >= work.begin; --j) {
      uint32_t at[Rows::kKeysOfLane];
      rows.next(at);
      const uint32_t empty = barriers.empty(ring.stage);
      if (!mbarrier_passed(empty, ring.phase ^ 1)) hand_over(0);
      mbarrier_wait(empty, ring.phase ^ 1);
      const uint32_t to = first + ring.stage * Tile::kBytes;
      copies.copy<Tile>(from, at, to, columns);
      copy_async_commit();
      ring.advance();
      ++on_their_way;
      on_block();
      hand_over(1);
    }
    hand_over(0);
    __syncwarp();
    if (lane == 0) tiles.release(tile);
  }
}

}  // namespace tessera::cuda::sm90
