// SPDX-License-Identifier: Apache-2.0
// The loaders of keys and values that lie in pages: a warp each, of which each of the first lanes
// has a box of a block. forward/roles.cuh has those of tensors.
#pragma once

#include "cuda/sm90/forward/pages/params.h"
#include "cuda/sm90/forward/pages/rows.cuh"
#include "cuda/sm90/forward/roles.cuh"

namespace tessera::cuda::sm90 {

// Where the boxes of a tile's blocks lie, from the last block to the first. The pages of 32 boxes
// are looked up at a time, ahead of those that are used. A box that no row of the tile sees has no
// page: neither its rows nor the entry of its page is read.
// kTable: TESSERA_PAGE_TABLE_K or TESSERA_PAGE_TABLE_V, of page indices [batch, max_pages].
template <int kTileN, int kTable>
class PageWalk {
 public:
  static constexpr int kNoPage = -1;

  // seen: keys of sequence n that some row of the tile sees.
  __device__ __forceinline__ PageWalk(const PagedForwardParams& a, int n, const Interval& seen,
                                      int last_block, int lane)
      : a_(a), seen_(seen) {
    const int box = lane & ((1 << a.box_shift) - 1);
    const View& table = a.problem.tensor[kTable];
    table_ = static_cast<const int32_t*>(table.data) + n * table.stride[0];
    key_ = last_block * kTileN + box * a.box_keys;
    asked_ = key_ - (lane >> a.box_shift) * kTileN;
    from_ = kWarp + box;
    ask();
  }

  // Finds the lane's box of the next block.
  __device__ __forceinline__ void next() {
    if (from_ >= kWarp) {
      from_ -= kWarp;
      now_ = ahead_;
      asked_ -= (kWarp >> a_.box_shift) * kTileN;
      ask();
    }
    page = __shfl_sync(kAllLanes, now_, from_);
    first = a_.page_size.quotient(key_) * a_.page_size.divisor;
    row = key_ - first;
    from_ += 1 << a_.box_shift;
    key_ -= kTileN;
  }
  int page, row;  // row: of the page, where the box begins
  int first;      // the key at the page's row 0

 private:
  __device__ __forceinline__ void ask() {
    const Params& p = a_.problem;
    ahead_ = kNoPage;
    if (asked_ >= seen_.hi || asked_ + a_.box_keys <= seen_.lo) return;
    const int i = a_.page_size.quotient(asked_);
    if (i >= p.max_pages) return;
    const int page = __ldg(table_ + i * p.tensor[kTable].stride[1]);
    if (page < (kTable == TESSERA_PAGE_TABLE_K ? p.pages_k : p.pages_v)) ahead_ = page;
  }

  const PagedForwardParams& a_;
  const Interval seen_;
  const int32_t* table_;
  int key_;    // of the lane's box of the next block
  int asked_;  // of the box that the lane has looked up last
  int from_;   // the lane that has looked the next box up; kWarp and more: of the pages ahead
  int now_, ahead_;
};

// A tile's blocks, the last one first: bring(work, walk, stage, full) has the lane's boxes brought into a
// stage that is free. bytes: of a block.
template <TiledKernel Kernel, int kTable, int kStages, typename Bring>
__device__ __forceinline__ void load_pages(const PagedForwardParams& a,
                                           const typename Kernel::Work* works,
                                           const typename Kernel::Shared shared,
                                           const StageBarriers<kStages>& barriers, int bytes,
                                           const Bring& bring) {
  const int lane = threadIdx.x % kWarp;
  const auto tiles = shared.work_barriers();
  Ring<kStages> ring;
  for (Ring<Kernel::kWorkStages> tile;; tile.advance()) {
    tiles.wait(tile);
    const auto& work = works[tile.stage];
    if (work.last) return;
    wait_for_predecessors();
    PageWalk<Kernel::kTileN, kTable> walk(a, work.n, keys_seen<Kernel::kTileM>(work), work.end - 1,
                                          lane);
#pragma unroll 1
    for (int j = work.end - 1; j >= work.begin; --j) {
      walk.next();
      if (lane == 0) barriers.acquire(ring, bytes);
      __syncwarp();
      if (lane >> a.box_shift == 0) bring(work, walk, ring.stage, barriers.full(ring.stage));
      ring.advance();
    }
    __syncwarp();
    if (lane == 0) tiles.release(tile);
  }
}

template <TiledKernel Kernel>
__device__ __forceinline__ void load_paged_keys(const PagedForwardParams& a,
                                                const typename Kernel::Work* works,
                                                volatile int& blocks_loaded,
                                                const typename Kernel::Shared shared) {
  using Tile = typename Kernel::KTile;
  const Params& p = a.problem;
  const int lane = threadIdx.x % kWarp;
  int loaded = 0;
  if (a.box_keys == 0) {
    return copy_pages<Kernel, Tile, TESSERA_PAGE_TABLE_K>(a, works, shared, shared.k_barriers(),
                                                          shared.k(0), p.dqk, [&] {
                                                            if (lane == 0) blocks_loaded = ++loaded;
                                                          });
  }
  load_pages<Kernel, TESSERA_PAGE_TABLE_K>(
      a, works, shared, shared.k_barriers(), Tile::kBytes,
      [&](const auto& work, const auto& walk, int stage, uint32_t full) {
        const uint32_t to = shared.k(stage) + lane * a.box_keys * kChunkRowBytes;
        const int head = work.head / p.group;
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
          tma_load(to + chunk * Tile::kChunkBytes, &a.k, full, chunk * kChunkColumns, head,
                   walk.row, 0, walk.page);
        }
        if (lane == 0) blocks_loaded = ++loaded;
      });
}

// A box that lies wholly behind its sequence's end is brought from nowhere, by the map of k: it would
// be wholly outside of a ragged map, which faults.
template <TiledKernel Kernel>
__device__ __forceinline__ void load_paged_values(const PagedForwardParams& a,
                                                  const typename Kernel::Work* works,
                                                  const typename Kernel::Shared shared) {
  using Tile = typename Kernel::VTile;
  const Params& p = a.problem;
  const int lane = threadIdx.x % kWarp;
  const int chunks = chunks_of_values(p);
  if (a.box_keys == 0) {
    return copy_pages<Kernel, Tile, TESSERA_PAGE_TABLE_V>(a, works, shared, shared.v_barriers(),
                                                          shared.v(0), p.dv, [] {});
  }
  load_pages<Kernel, TESSERA_PAGE_TABLE_V>(
      a, works, shared, shared.v_barriers(), chunks * Tile::kChunkBytes,
      [&](const auto& work, const auto& walk, int stage, uint32_t full) {
        const uint32_t to = shared.v(stage) + lane * a.box_keys * kChunkRowBytes;
        const int size = a.page_size.divisor, length = min(work.k.length - walk.first, size);
        const bool exists = walk.page >= 0 && walk.row < length;
        const CUtensorMap* const map = exists ? &a.v : &a.k;
        const MapRow row = map_row(size, 0, length, walk.row);
        const int c2 = exists ? row.c2 : 0, c3 = exists ? row.c3 : 0;
        const int page = exists ? walk.page : walk.kNoPage;
        const int head = work.head / p.group;
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
          if (chunk >= chunks) break;
          tma_load(to + chunk * Tile::kChunkBytes, map, full, chunk * kChunkColumns, head, c2, c3,
                   page);
        }
      });
}

}  // namespace tessera::cuda::sm90
