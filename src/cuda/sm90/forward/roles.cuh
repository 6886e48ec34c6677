// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup of the forward kernel (forward/kernel.cuh): a warp that finds the tiles,
// and a thread each that loads queries, keys and values. The kernels of backward/apart/shape.cuh
// share schedule() and for_each_tile().
#pragma once

#include <type_traits>

#include "cuda/common/few/operands.cuh"
#include "cuda/common/finish.cuh"
#include "cuda/sm90/forward/frame.cuh"
#include "cuda/sm90/forward/output.cuh"
#include "cuda/sm90/forward/pages/params.h"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/forward/score/alibi.cuh"
#include "cuda/sm90/forward/score/blocks.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/ragged.h"
#include "cuda/sm90/machine/smem_tile.cuh"

namespace tessera::cuda::sm90 {

// A kernel that is fed by these roles: a Forward, or one of those of backward/apart/shape.cuh. Its
// tiles are in a ring of kWorkStages Work in shared memory, and its consumers compute them.
template <typename T>
concept TiledKernel = requires {
  typename T::Work;
  typename T::Shared;
  T::kWorkStages;
  T::kConsumers;
  T::kTileM;
  T::kTileN;
};
// One whose scheduler is schedule().
template <typename T>
concept ScheduledKernel = TiledKernel<T> && requires {
  typename T::Schedule;
  typename T::BlockFeatures;
  T::kListsBlocks;
};

// The scheduler asks for another tile when no more than this many blocks of keys, of the tiles that
// it has, are not yet being loaded. Late, because a tile that lies in hand for long is kept from a
// CTA that has none; but it takes some 4k clocks until a tile is known and its queries are there.
// Measured in docs/lab/2026-11-22-sm90-forward.md, the order of tiles.
constexpr int kBlocksAhead = 4;

// Whether a tile's keys are cut into parts.
template <typename Kernel>
constexpr bool kHasParts = [] {
  if constexpr (requires { Kernel::kTile.parts; }) {
    return Kernel::kTile.parts;
  } else {
    return false;
  }
}();
// Whether the loaders convert keys and values.
template <typename Kernel>
constexpr bool kConverts = [] {
  if constexpr (requires { Kernel::kTile.e4m3; }) {
    return Kernel::kTile.e4m3;
  } else {
    return false;
  }
}();
template <typename Element, typename Kernel>
using ResultOf = std::conditional_t<kHasParts<Kernel>, float, Element>;  // of o

template <typename Kernel, typename Arguments>
__device__ __forceinline__ int tile_of_part(const Arguments& a, int index) {
  if constexpr (kHasParts<Kernel>) {
    return a.parts.quotient(index);
  } else {
    return index;
  }
}

// Leaves of a tile's blocks those of one part.
__device__ __forceinline__ void leave_part(const PartsParams& a, int part, Work& work) {
  const int first = work.begin, blocks = work.end - first;
  work.part = part;
  work.begin = first + a.parts.quotient(blocks * part);
  work.end = first + a.parts.quotient(blocks * (part + 1));
  work.o += part * a.part_o;
  work.lse += part * a.part_lse;
  if (part > 0) work.sink = -kInfinity;
}

// Writes what the other roles are to know of the tile at `index` of the order into stage `stage` of
// the ring. Called by all lanes of a warp.
template <typename Element, ScheduledKernel Kernel, typename Arguments>
__device__ __forceinline__ void describe_tile(const Arguments& a, const PackedOrder& order,
                                              int index, typename Kernel::Work& work,
                                              const typename Kernel::Shared shared, int stage,
                                              int lane) {
  const int tile = tile_of_part<Kernel>(a, index);
  Kernel::Schedule::decode(a, order, tile, work);
  Output<Element>::prepare(a.problem, work);
  if constexpr (kHasParts<Kernel>) {
    __syncwarp();
    if (lane == 0) leave_part(a, index - tile * a.parts.divisor, work);
  }
  if constexpr (kConverts<Kernel>) {
    work.k_scale = k_scale_of(a.problem, work.n, work.head / a.problem.group);
    work.v_scale = v_scale_of(a.problem, work.n, work.head);
  }
  work.slope = Kernel::BlockFeatures::slope_of(a.problem, work);
  if constexpr (Kernel::kAddsByProducts) {
    work.choose_pivot(Kernel::kTileM, Kernel::kTileN);
    Kernel::Progression::fill_slopes(shared.slopes(stage), work.slope, lane);
  }
  __syncwarp();
  if constexpr (Kernel::kListsBlocks) {
    BlockList<Kernel::kTileM, Kernel::kTileN>::fill(a, work, lane);
  }
  __syncwarp();
}

// Sequences of up to so many queries are another kernel's; -1: there are none.
template <typename Arguments>
__device__ __forceinline__ int left_queries(const Arguments& a) {
  if constexpr (requires { a.step_queries; }) {
    return a.step_queries;
  } else {
    return -1;
  }
}

// The scheduler, one warp: fills the ring of tiles, and finishes those that see no key itself. The
// first tile of a dense problem is known from the kernel's arguments: lean kernels find it while
// the kernels before this one end.
template <typename Element, ScheduledKernel Kernel, typename Arguments>
__device__ __forceinline__ void schedule(const Arguments& a, typename Kernel::Work* works,
                                         PackedOrder& order, const volatile int& blocks_loaded,
                                         const typename Kernel::Shared shared) {
  const int lane = threadIdx.x % kWarp;
  const Params& p = a.problem;
  Dispenser dispenser(a.counter, a.mark);  // lane 0's
  bool may_touch_memory = false;
  if (PackedOrder::covers(p)) PackedOrder::prefetch(p, lane);
  // Once, before anything is read or written that the kernels before this one may use.
  const auto await_predecessors = [&] {
    if (may_touch_memory) return;
    wait_for_predecessors();
    if (lane == 0) dispenser.reset();
    may_touch_memory = true;
  };
  if (Kernel::kFeatures || p.thd_q || p.thd_k || p.tensor[TESSERA_SEQLENS_Q].data ||
      p.tensor[TESSERA_SEQLENS_K].data || p.tensor[TESSERA_SINK].data) {
    await_predecessors();
  }
  int tiles = a.tiles;
  if (PackedOrder::covers(a.problem)) {
    const int heads = a.problem.hq / kHeadsOfTile<Kernel>;
    tiles =
        min(order.template fill<Kernel::kTileM>(a.problem, lane, left_queries(a)), tiles / heads) *
        heads;
  }
  if constexpr (kHasParts<Kernel>) tiles *= a.parts.divisor;
  const auto barriers = shared.work_barriers();
  Ring<Kernel::kWorkStages> ring;
  int blocks_given = 0;
  mbarrier_wait(barriers.empty(ring.stage), ring.phase ^ 1);
  while (true) {
    auto& work = works[ring.stage];  // all lanes write the same
    while (blocks_given - blocks_loaded > kBlocksAhead) __nanosleep(200);
    const int index = uniform(lane == 0 ? dispenser.next(tiles) : 0);
    const bool last = index >= tiles;
    work.last = last;
    if (last) work.begin = work.end = 0;
    if (!last) {
      describe_tile<Element, Kernel>(a, order, index, work, shared, ring.stage, lane);
      if (left_queries(a) >= 0 && work.q.length <= left_queries(a)) continue;
      if (work.begin >= work.end) {
        await_predecessors();
        for (int head = 0; head < kHeadsOfTile<Kernel>; ++head) {
          const Output<ResultOf<Element, Kernel>> output{a.problem, work, head};
          output.store_nothing(Kernel::kTileM, lane);
        }
        __syncwarp();
        continue;
      }
      work.clean_begin = max(work.clean_begin, work.begin);
      work.clean_end = max(work.clean_end, work.begin);
      blocks_given += work.end - work.begin;
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.full(ring.stage));
    await_predecessors();
    if (last) return;
    ring.advance();
    mbarrier_wait(barriers.empty(ring.stage), ring.phase ^ 1);
  }
}

__device__ __forceinline__ bool is_first_lane() { return threadIdx.x % kWarp == 0; }

// The loaders of queries, keys and values: a thread each, so that none waits for a stage of
// another's. This does what they have in common.
template <TiledKernel Kernel, typename Load>
__device__ __forceinline__ void for_each_tile(const typename Kernel::Work* works,
                                              const typename Kernel::Shared shared,
                                              const Load& load) {
  const auto barriers = shared.work_barriers();
  for (Ring<Kernel::kWorkStages> ring;; ring.advance()) {
    barriers.wait(ring);
    const auto& work = works[ring.stage];
    if (work.last) return;
    wait_for_predecessors();
    load(work);
    barriers.release(ring);
  }
}

// Queries, and with o_by_tma the rows of o that the consumers have left in their place.
template <TiledKernel Kernel>
__device__ __forceinline__ void carry_queries(const ForwardParams& a,
                                              const typename Kernel::Work* works,
                                              const typename Kernel::Shared shared) {
  constexpr int kStages = Kernel::kTile.q_stages;
  struct Place {
    int head, batch, row, rows;  // row: of the tensor; rows: from there on that are to be stored
  };
  [[maybe_unused]] Place places[kStages];  // of the tiles in the stages, the oldest first
  [[maybe_unused]] int filled = 0;         // how many there are
  Ring<kStages> ring;
  const auto store = [&](const Place& tile) {
    const MapRow first = map_row(reach_of(a.problem.thd_q, a.problem.sq), tile.row, tile.rows, 0);
    for (int w = 0; w < Kernel::kConsumers; ++w) {
      mbarrier_wait(shared.q_barriers(w).empty(ring.stage), ring.phase ^ 1);
      const int row = row_of<Kernel>(w);
      if (row >= tile.rows) continue;  // such a box would fault
      for (int column = 0; column < a.problem.dv; column += kChunkColumns) {
        tma_store(&a.o,
                  shared.q(w, ring.stage) + column / kChunkColumns * Kernel::QTile::kChunkBytes,
                  column, tile.head + head_of<Kernel>(w), first.c2 + row, first.c3, tile.batch);
      }
    }
    bulk_commit();
    bulk_wait_read();  // then queries may come where o was
  };
  for_each_tile<Kernel>(works, shared, [&](const auto& work) {
    const int row = work.q.first + work.m0;
    if constexpr (Kernel::kTile.o_by_tma) {
      if (filled == kStages) store(places[0]);
      filled = min(filled + 1, kStages);
      for (int i = 1; i < kStages; ++i) places[i - 1] = places[i];
      places[kStages - 1] = {work.head, work.q.batch, row, work.q.owned_hi - work.m0};
    }
    for (int w = 0; w < Kernel::kConsumers; ++w) {
      const auto barriers = shared.q_barriers(w);
      barriers.acquire(ring, Kernel::QTile::kBytes);
      for (int i = 0; i < kHeadsOfConsumer<Kernel>; ++i) {
        const int first = i * Kernel::kTileM;  // of the consumer's rows
        Kernel::QTile::load(shared.q(w, ring.stage) + first * kChunkRowBytes, &a.q,
                            barriers.full(ring.stage), work.head + head_of<Kernel>(w, first),
                            row + row_of<Kernel>(w, first), 0, work.q.batch);
      }
    }
    ring.advance();
  });
  if constexpr (Kernel::kTile.o_by_tma) {
    for (int i = 0; i < kStages; ++i, ring.advance()) {
      if (i + filled >= kStages) store(places[i]);
    }
  }
}

// Keys, and tiles of a bias for each consumer. blocks_loaded: how many blocks of keys, of all tiles
// so far, are loaded or on their way; those that a mask leaves out count with the next one.
template <TiledKernel Kernel>
__device__ __forceinline__ void load_keys(const ForwardParams& a,
                                          const typename Kernel::Work* works,
                                          volatile int& blocks_loaded,
                                          const typename Kernel::Shared shared) {
  const auto barriers = shared.k_barriers();
  Ring<Kernel::kTile.k_stages> ring;
  int before = 0;  // blocks of the tiles before
  [[maybe_unused]] Ring<1> bias_ring;
  for_each_tile<Kernel>(works, shared, [&](const auto& work) {
    const int begin = work.begin, head = work.head, kv_head = head / a.problem.group;
    const int batch = work.k.batch, row = work.k.first;
#pragma unroll 1
    for (int i = work.end - 1; i >= begin; i = block_before(work, i)) {
      const int j = block_at(work, i);
      barriers.acquire(ring, Kernel::KTile::kBytes);
      Kernel::KTile::load(shared.k(ring.stage), &a.k, barriers.full(ring.stage), kv_head,
                          row + j * Kernel::kTileN, 0, batch);
      if constexpr (Kernel::kBiasBytes > 0) {
        if (Kernel::BlockFeatures::has_bias_tiles(a)) {
          for (int w = 0; w < Kernel::kConsumers; ++w) {
            shared.bias(w).load(a, bias_ring, work.n, head, work.m0 + w * Kernel::kRows,
                                j * Kernel::kTileN);
          }
          bias_ring.advance();
        }
      }
      ring.advance();
      blocks_loaded = before + work.end - i;
    }
    before += work.end - begin;
    blocks_loaded = before;
  });
}

// Chunks of columns that are brought of V. A box wholly outside a ragged map faults; columns past dv
// may be anything: their o is not stored. Those of q and k must be zeros, and their maps are plain.
__device__ __forceinline__ int chunks_of_values(const Params& p) {
  return (p.dv + kChunkColumns - 1) / kChunkColumns;
}

template <TiledKernel Kernel>
__device__ __forceinline__ void load_values(const ForwardParams& a,
                                            const typename Kernel::Work* works,
                                            const typename Kernel::Shared shared) {
  const auto barriers = shared.v_barriers();
  Ring<Kernel::kTile.v_stages> ring;
  const int chunks = chunks_of_values(a.problem);
  for_each_tile<Kernel>(works, shared, [&](const auto& work) {
    const int begin = work.begin, kv_head = work.head / a.problem.group, batch = work.k.batch;
    const MapRow row = map_row(a.reach_v, work.k.first, work.k.length, 0);
#pragma unroll 1
    for (int i = work.end - 1; i >= begin; i = block_before(work, i)) {
      const int j = block_at(work, i);
      barriers.acquire(ring, chunks * Kernel::VTile::kChunkBytes);
      Kernel::VTile::load(shared.v(ring.stage), &a.v, barriers.full(ring.stage), kv_head,
                          row.c2 + j * Kernel::kTileN, row.c3, batch, chunks);
      ring.advance();
    }
  });
}

// The CTA after its barriers are made: warpgroup 0 schedules and loads, a warp a role, the others
// compute. load_keys, load_values: what the warps do that load K and V.
template <typename Element, ScheduledKernel Kernel, typename Arguments, typename LoadKeys,
          typename LoadValues>
__device__ __forceinline__ void take_roles(const Arguments& a,
                                           typename Kernel::SharedStorage& in_shared,
                                           const typename Kernel::Shared shared, int warpgroup,
                                           const LoadKeys& load_keys,
                                           const LoadValues& load_values) {
  auto* works = in_shared.work;
  volatile int& loaded = in_shared.blocks_loaded;
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / kWarp);
    if (warp == 0) schedule<Element, Kernel>(a, works, in_shared.order, loaded, shared);
    if (warp == 1 && is_first_lane()) carry_queries<Kernel>(a, works, shared);
    if (warp == 2) load_keys(works, loaded);
    if (warp == 3) load_values(works);
  } else {
    registers_claim<Kernel::kConsumerRegisters>();
    wait_for_predecessors();
    Kernel::consumer(a, works, shared, warpgroup - 1);
  }
}

}  // namespace tessera::cuda::sm90
