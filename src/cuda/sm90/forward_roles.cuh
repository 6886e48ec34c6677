// SPDX-License-Identifier: Apache-2.0
// The roles of the forward kernel beside its consumers, which are in forward.cuh: they bring what a
// consumer is to compute with. Kernel: a Forward.
#pragma once

#include "cuda/sm90/blocks.cuh"
#include "cuda/sm90/output.cuh"
#include "cuda/sm90/params.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/schedule.cuh"
#include "cuda/sm90/smem_tile.cuh"
#include "cuda/sm90/tensormap.h"

namespace tessera::cuda::sm90 {

// The scheduler, one warp. Fills the ring of tiles. Tiles that see no key are finished here.
template <typename Element, typename Kernel>
__device__ __forceinline__ void schedule(const ForwardParams& a, typename Kernel::Work* works,
                                         PackedOrder& order, const typename Kernel::Shared shared) {
  const int lane = threadIdx.x % kWarp;
  int tiles = a.tiles;
  if (PackedOrder::covers(a.problem)) {
    tiles = min(order.template fill<Kernel::kTileM>(a.problem, lane), tiles / a.problem.hq) *
            a.problem.hq;
  }
  const auto barriers = shared.work_barriers();
  Ring<Kernel::kWorkStages> ring;
  Dispenser dispenser(a);  // lane 0's
  mbarrier_wait(barriers.empty(ring.stage), ring.phase ^ 1);
  while (true) {
    auto& work = works[ring.stage];  // all lanes write the same
    const int index = uniform(lane == 0 ? dispenser.next(tiles) : 0);
    const bool last = index >= tiles;
    work.last = last;
    if (!last) {
      Kernel::Schedule::decode(a, order, index, work);
      Output<Element>::prepare(a.problem, work);
      __syncwarp();
      if constexpr (Kernel::kListsBlocks)
        BlockList<Kernel::kTileM, Kernel::kTileN>::fill(a, work, lane);
      __syncwarp();
      if (work.begin >= work.end) {
        Output<Element>{a.problem, work}.store_nothing(Kernel::kTileM, lane);
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

// The producer, one thread.
template <typename Kernel>
__device__ __forceinline__ void produce(const ForwardParams& a, const typename Kernel::Work* works,
                                        const typename Kernel::Shared shared) {
  const auto k_barriers = shared.k_barriers(), v_barriers = shared.v_barriers();
  const auto work_barriers = shared.work_barriers();
  Ring<Kernel::kWorkStages> work_ring;
  Ring<Kernel::kTile.q_stages> q_ring;
  Ring<Kernel::kTile.stages> ring;
  Ring<1> bias_ring;
  // A box wholly outside a ragged map faults. Columns of v past dv may be anything: their o is
  // not stored. Those of q and k must be zeros, and their maps are plain.
  const int v_chunks = (a.problem.dv + kChunkColumns - 1) / kChunkColumns;
  for (;; work_ring.advance()) {
    work_barriers.wait(work_ring);
    const auto& work = works[work_ring.stage];
    if (work.last) return;
    const int begin = work.begin, end = work.end, head = work.head,
              kv_head = head / a.problem.group;
    const int q_batch = work.q.batch, q_row = work.q.first + work.m0;
    const int batch = work.k.batch, k_row = work.k.first;
    const int v_row = a.ragged_v ? kRagged - work.k.length : k_row;  // see tensormap.h
    const int v_shift = a.ragged_v ? k_row + work.k.length : 0;
    const int m0 = work.m0, n = work.n;
    if constexpr (!Kernel::kListsBlocks) work_barriers.release(work_ring);
    const auto load_q = [&] {
      for (int w = 0; w < Kernel::kConsumers; ++w) {
        const auto q_barriers = shared.q_barriers(w);
        q_barriers.acquire(q_ring, Kernel::QTile::kBytes);
        Kernel::QTile::load(shared.q(w, q_ring.stage), &a.q, q_barriers.full(q_ring.stage), head,
                            q_row + w * Kernel::kRows, 0, q_batch);
      }
      q_ring.advance();
    };
    // A second stage of queries is free long before a stage of keys; an only one is not.
    if (Kernel::kTile.q_stages > 1) load_q();
#pragma unroll 1
    for (int j = end - 1; j >= begin; j = block_before(work, j)) {
      k_barriers.acquire(ring, Kernel::KTile::kBytes);
      Kernel::KTile::load(shared.k(ring.stage), &a.k, k_barriers.full(ring.stage), kv_head,
                          k_row + j * Kernel::kTileN, 0, batch);
      if (Kernel::kTile.q_stages == 1 && j == end - 1) load_q();
      if constexpr (Kernel::kBiasBytes > 0) {
        if (Kernel::BlockFeatures::has_bias_tiles(a)) {
          for (int w = 0; w < Kernel::kConsumers; ++w) {
            shared.bias(w).load(a, bias_ring, n, head, m0 + w * Kernel::kRows, j * Kernel::kTileN);
          }
          bias_ring.advance();
        }
      }
      v_barriers.acquire(ring, v_chunks * Kernel::VTile::kChunkBytes);
      Kernel::VTile::load(shared.v(ring.stage), &a.v, v_barriers.full(ring.stage), kv_head,
                          v_row + j * Kernel::kTileN, v_shift, batch, v_chunks);
      ring.advance();
    }
    if constexpr (Kernel::kListsBlocks) work_barriers.release(work_ring);
  }
}

}  // namespace tessera::cuda::sm90
