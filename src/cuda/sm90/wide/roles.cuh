// SPDX-License-Identifier: Apache-2.0
// The roles of the forward kernel for wide heads beside its consumers, which are in
// wide/kernel.cuh: they bring what a consumer is to compute with.
#pragma once

#include <climits>

#include "cuda/sm90/forward/output.cuh"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/ragged.h"
#include "cuda/sm90/machine/smem_tile.cuh"
#include "cuda/sm90/wide/kernels.h"

namespace tessera::cuda::sm90 {

// A kernel of clusters that have a tile together: a Wide.
template <typename T>
concept ClusterKernel = requires {
  typename T::SharedStorage;
  typename T::Shared;
  typename T::Schedule;
  T::kCtas;
  T::kConsumers;
  T::kWorkStages;
  T::kTileM;
};

// Chunks of a tile that hold so many columns.
__device__ __forceinline__ int wide_chunks(int columns) {
  return (columns + kChunkColumns - 1) / kChunkColumns;
}

// One warp of each CTA fills the ring of tiles. Tiles that see no key are finished here. The CTAs
// of a cluster have the same tiles: the first one asks for them and tells the other.
template <typename Element, ClusterKernel Kernel>
__device__ __forceinline__ void schedule_wide(const ForwardParams& a,
                                              typename Kernel::SharedStorage& storage,
                                              const typename Kernel::Shared shared, int rank) {
  constexpr int kCtas = Kernel::kCtas;
  const int lane = threadIdx.x % kWarp;
  Dispenser dispenser(a.counter, a.mark, kCtas);  // lane 0's, of the first CTA
  if (rank == 0 && lane == 0) dispenser.reset();
  int tiles = a.tiles;
  if (PackedOrder::covers(a.problem)) {
    tiles =
        min(storage.order.template fill<Kernel::kTileM>(a.problem, lane), tiles / a.problem.hq) *
        a.problem.hq;
  }
  const auto tickets = shared.ticket_barriers();
  Ring<1> ticket_ring;
  const auto next = [&] {
    int index = 0;
    if (rank == 0) {
      if (lane == 0) {
        index = dispenser.next(tiles);
        if constexpr (kCtas > 1) {
          mbarrier_wait_for_cluster(tickets.empty(0), ticket_ring.phase ^ 1);
          store_in_cluster(address_in(1, shared.ticket()), index);
          mbarrier_arrive_in_cluster(address_in(1, tickets.full(0)));
        }
      }
      __syncwarp();
    } else {
      mbarrier_wait_for_cluster(tickets.full(0), ticket_ring.phase);
      index = load_shared_word(shared.ticket());
      __syncwarp();
      if (lane == 0) mbarrier_arrive_in_cluster(address_in(0, tickets.empty(0)));
    }
    ticket_ring.advance();
    return uniform(index);
  };
  const auto barriers = shared.work_barriers();
  Ring<Kernel::kWorkStages> ring;
  mbarrier_wait(barriers.empty(ring.stage), ring.phase ^ 1);
  while (true) {
    Work& work = storage.work[ring.stage];  // all lanes write the same
    const int index = next();
    const bool last = index >= tiles;
    work.last = last;
    if (!last) {
      Kernel::Schedule::decode(a, storage.order, index, work);
      Output<Element>::prepare(a.problem, work);
      __syncwarp();
      if (work.begin >= work.end) {
        if (rank == 0) Output<Element>{a.problem, work}.store_nothing(Kernel::kTileM, lane);
        __syncwarp();
        continue;
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.full(ring.stage));
    if (last) return;
    ring.advance();
    mbarrier_wait(barriers.empty(ring.stage), ring.phase ^ 1);
  }
}

// Queries, keys and values, by one thread. The coordinates of a tile are looked up once: with a
// load of the tile's description, or a division, for each box this thread is what paces the kernel.
template <ClusterKernel Kernel>
struct WideLoader {
  static constexpr int kCtas = Kernel::kCtas, kConsumers = Kernel::kConsumers;
  static constexpr int kStages = Kernel::kStages, kColumns = Kernel::kColumns;
  using QTile = typename Kernel::QTile;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;

  const ForwardParams& a;
  const typename Kernel::Shared shared;
  const int rank;
  Ring<kStages> ring;

  // One box of the stage; with two CTAs into both.
  __device__ __forceinline__ void load(const CUtensorMap* map, int offset, int column, int head,
                                       int row, int shift, int batch) const {
    const uint32_t to = shared.stage(ring.stage) + offset;
    const uint32_t full = shared.barriers().full(ring.stage);
    if constexpr (kCtas == 1) {
      tma_load(to, map, full, column, head, row, shift, batch);
    } else {
      tma_load_to_all<kCtas>(to, map, full, column, head, row, shift, batch);
    }
  }
  __device__ __forceinline__ void run(const Work* works) {
    const auto barriers = shared.barriers();
    const auto q_barriers = shared.q_barriers();
    const auto work_barriers = shared.work_barriers();
    const int chunks = wide_chunks(a.problem.dqk);
    const int boxes[kConsumers] = {
        min(wide_chunks(a.problem.dv), VTile::kChunks),
        min(wide_chunks(max(a.problem.dv - kColumns, 0)), VTile::kChunks)};
    Ring<1> q_ring;
    for (Ring<Kernel::kWorkStages> work_ring;; work_ring.advance()) {
      work_barriers.wait(work_ring);
      const Work& work = works[work_ring.stage];
      if (work.last) return;
      q_barriers.acquire(q_ring, chunks * QTile::kChunkBytes);
      QTile::load(shared.q(), &a.q, q_barriers.full(0), work.head,
                  work.q.first + work.m0 + rank * WideTile::kRows, 0, work.q.batch, chunks);
      q_ring.advance();
      const int head = work.head / a.problem.group, batch = work.k.batch;
      const int begin = work.begin, end = work.end, length = work.k.length;
      const int first_key = work.k.first;
      const MapRow first_value = map_row(a.reach_v, work.k.first, length, 0);
      const int last = a.reach_v ? length - 1 : INT_MAX;
      work_barriers.release(work_ring);
      // A box has the keys of one consumer; with two CTAs each loads one of the two.
      const auto keys = [&](int j) {
#pragma unroll 1
        for (int column = 0; column < chunks * kChunkColumns; column += kChunkColumns) {
          barriers.acquire(ring, KTile::kBytes);
#pragma unroll
          for (int box = 0; box < kConsumers / kCtas; ++box) {
            const int key = (box + rank) * WideTile::kKeys;
            load(&a.k, key * kChunkRowBytes, column, head, first_key + j * WideTile::kTileN + key,
                 0, batch);
          }
          ring.advance();
        }
      };
      // Columns past dv may be anything: their o is not stored. A box that lies wholly outside a
      // ragged map faults: one behind the sequence begins with its last row, and its weights are 0.
      const auto values = [&](int j) {
#pragma unroll 1
        for (int part = 0; part < Kernel::kParts; ++part) {
          const int row =
              first_value.c2 + min(j * WideTile::kTileN + part * WideTile::kValues, last);
#pragma unroll
          for (int half = 0; half < kConsumers; ++half) {
            barriers.acquire(ring, boxes[half] * VTile::kChunkBytes);
#pragma unroll
            for (int i = 0; i < VTile::kChunks; i += kCtas) {
              const int box = i + (kCtas == 1 ? 0 : rank ^ half);
              if (box >= boxes[half]) break;
              load(&a.v, box * VTile::kChunkBytes, half * kColumns + box * kChunkColumns, head, row,
                   first_value.c3, batch);
            }
            ring.advance();
          }
        }
      };
      keys(end - 1);
#pragma unroll 1
      for (int j = end - 1; j > begin; --j) {
        keys(j - 1);
        values(j);
      }
      values(begin);
    }
  }
};

}  // namespace tessera::cuda::sm90
