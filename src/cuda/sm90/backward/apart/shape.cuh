// SPDX-License-Identifier: Apache-2.0
// What the two kernels of backward/apart/kernels.h have in common. Both are persistent: a tile
// keeps 128 rows of two tensors, 64 for each consumer, and blocks of two others stream past, of 64
// rows (of 128 queries where dk and dv are made at d64).
//
//   warp 0          scheduler  a warp: finds the tiles, finishes those that see nothing
//   warp 1          carrier    a thread: what a tile keeps, by TMA, and its results, from the same
//                              place
//   warp 2, 3       streams    a thread each: the blocks of one tensor
//   warpgroup 1, 2  consumers  64 rows each; in turns on the tensor cores (forward/kernel.cuh), but
//   for dq
//                              at d64
//
//   barrier             arrivals                  says
//   work.full[s]        1                         the scheduler has described a tile
//   work.empty[s]       3 + 8 (loaders, warps)    nobody looks at it any more
//   kept[w].full[s]     1 + bytes                 what consumer w keeps of a tile has arrived
//   kept[w].empty[s]    4 (a warp each)           its results stand in that place, for TMA to read
//   stream[i].full[s]   1 + bytes                 a block has arrived, for dk and dv with its
//                                                 statistics
//   stream[i].empty[s]  2 (a thread a consumer)   both consumers have used it
#pragma once

#include <cstddef>

#include "cuda/sm90/backward/apart/params.h"
#include "cuda/sm90/backward/edges.cuh"
#include "cuda/sm90/backward/products.cuh"
#include "cuda/sm90/forward/frame.cuh"
#include "cuda/sm90/forward/roles.cuh"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/machine/pipeline.cuh"

namespace tessera::cuda::sm90 {

// What fits: of each stream, blocks of so many rows.
constexpr int stages_of_stream(int dim, int rows) { return dim == 128 ? 3 : 4 * 128 / rows; }

// The shape of either kernel, of head dims up to kDim, and where its things are in shared memory.
// AnyWork: a tile as the scheduler describes it. kRows: of a block that streams past. Extra: what
// only one of the kernels has there. kTurns: the consumers take turns on the tensor cores.
template <int kDim, int kRows, typename AnyWork, typename Extra, bool kTurns>
struct ApartShape {
  static constexpr int kConsumers = 2, kLoaders = 3, kWorkStages = 3;
  static constexpr int kTileM = kApartRows, kTileN = kRows;
  static constexpr int kKept = 2;  // tiles in shared memory
  static constexpr int kStages = stages_of_stream(kDim, kRows);
  static constexpr int kConsumerRegisters = 232,
                       kProducerRegisters = 3 * 168 - 2 * kConsumerRegisters;
  using Work = AnyWork;
  using Tile = SmemTile<kRowsOfBox, kDim>;  // of what is kept
  using Block = SmemTile<kTileN, kDim>;

  struct alignas(1024) SharedStorage {
    uint8_t kept[kConsumers][kKept][2][Tile::kBytes];
    uint8_t stream[2][kStages][Block::kBytes];
    uint64_t kept_barriers[kConsumers][2 * kKept];
    uint64_t stream_barriers[2][2 * kStages];
    uint64_t work_barriers[2 * kWorkStages];
    Work work[kWorkStages];
    Extra extra;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);

  struct Shared {
    uint32_t base;

    // i: which of the two tensors.
    __device__ __forceinline__ uint32_t kept(int consumer, int stage, int i) const {
      return base + offsetof(SharedStorage, kept) +
             ((consumer * kKept + stage) * 2 + i) * Tile::kBytes;
    }
    __device__ __forceinline__ uint32_t stream(int i, int stage) const {
      return base + offsetof(SharedStorage, stream) + (i * kStages + stage) * Block::kBytes;
    }
    __device__ __forceinline__ StageBarriers<kKept> kept_barriers(int consumer) const {
      return {base + uint32_t(offsetof(SharedStorage, kept_barriers)) + consumer * 16 * kKept};
    }
    __device__ __forceinline__ StageBarriers<kStages> stream_barriers(int i) const {
      return {base + uint32_t(offsetof(SharedStorage, stream_barriers)) + i * 16 * kStages};
    }
    __device__ __forceinline__ StageBarriers<kWorkStages> work_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, work_barriers))};
    }
    __device__ __forceinline__ uint32_t extra() const {
      return base + offsetof(SharedStorage, extra);
    }
    // Called by one thread.
    __device__ __forceinline__ void init() const {
      for (int w = 0; w < kConsumers; ++w) kept_barriers(w).init(kWarpgroup / kWarp);
      for (int i = 0; i < 2; ++i) stream_barriers(i).init(kConsumers);
      work_barriers().init(kLoaders + kConsumers * (kWarpgroup / kWarp));
      mbarrier_init_fence();
    }
  };

  // A block of a stream, from row `row` of a sequence on. It has several boxes only where a tile is
  // one chunk of columns wide: then their rows follow each other in shared memory.
  static __device__ __forceinline__ void load_block(uint32_t at, const CUtensorMap* map,
                                                    uint32_t barrier, int reach, const Rows& rows,
                                                    int head, int row) {
    static_assert(Block::kChunks == 1 || kTileN == kRowsOfBox);
#pragma unroll
    for (int i = 0; i < kTileN / kRowsOfBox; ++i) {
      const MapRow from = existing_row(reach, rows, row + i * kRowsOfBox);
      Tile::load(at + i * Tile::kBytes, map, barrier, head, from.c2, from.c3, rows.batch);
    }
  }

  static __device__ __forceinline__ void take_turn(int w) {
    if constexpr (kTurns) named_barrier_sync(turn_barrier(w), 2 * kWarpgroup);
  }
  static __device__ __forceinline__ void give_turn(int w) {
    if constexpr (kTurns) {
      named_barrier_arrive(turn_barrier((w + 1) % kConsumers), 2 * kWarpgroup);
    }
  }
};

// The carrier, one thread. Loads what each tile keeps, when the results of the tile before in the
// same place have left. load(work, w, stage, barrier): for consumer w. Place: a tile as far as
// store(place, w, stage) has to know it.
template <TiledKernel Kernel, typename Place, typename Load, typename Store>
__device__ __forceinline__ void carry(const typename Kernel::Work* works,
                                      const typename Kernel::Shared shared, const Load& load,
                                      const Store& store) {
  constexpr int kStages = Kernel::kKept;
  Place places[kStages];  // of the tiles in the stages, the oldest first
  int filled = 0;         // stages
  Ring<kStages> ring;
  const auto send = [&](const Place& place) {
    for (int w = 0; w < Kernel::kConsumers; ++w) {
      mbarrier_wait(shared.kept_barriers(w).empty(ring.stage), ring.phase ^ 1);
      store(place, w, ring.stage);
    }
    bulk_commit();
    bulk_wait_read();
  };
  Kernel::for_each_tile(works, shared, [&](const auto& work) {
    if (filled == kStages) send(places[0]);
    filled = min(filled + 1, kStages);
    for (int i = 1; i < kStages; ++i) places[i - 1] = places[i];
    places[kStages - 1] = Place(work);
    for (int w = 0; w < Kernel::kConsumers; ++w) {
      const auto barriers = shared.kept_barriers(w);
      barriers.acquire(ring, 2 * Kernel::Tile::kBytes);
      load(work, w, ring.stage, barriers.full(ring.stage));
    }
    ring.advance();
  });
  for (int i = 0; i < kStages; ++i, ring.advance()) {
    if (i + filled >= kStages) send(places[i]);
  }
}

// What a tile has made goes where what it kept was; the carrier stores it from there. results():
// writes a warp's rows there; it no longer looks at the tile's description, which is released.
template <int kWorkStages, int kKept, typename Results>
__device__ __forceinline__ void stage_results(int lane, const StageBarriers<kWorkStages>& works,
                                              const Ring<kWorkStages>& work,
                                              const StageBarriers<kKept>& kept, int stage,
                                              const Results& results) {
  __syncwarp();
  if (lane == 0) works.release(work);
  results();
  __syncwarp();
  if (lane == 0) mbarrier_arrive(kept.empty(stage));
}

// One tensor of a consumer's results, from its place in shared memory: rows from `row` of the
// tensor on, of which `rows` are to be stored. reach: of the map.
template <typename Tile>
__device__ __forceinline__ void store_kept(const CUtensorMap* map, uint32_t at, int reach,
                                           int columns, int head, int batch, int row, int rows) {
  if (rows <= 0) return;  // such a box would fault
  const MapRow to = map_row(reach, row, rows, 0);
#pragma unroll
  for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
    if (chunk * kChunkColumns >= columns) break;
    tma_store(map, at + chunk * Tile::kChunkBytes, chunk * kChunkColumns, head, to.c2, to.c3,
              batch);
  }
}

}  // namespace tessera::cuda::sm90
