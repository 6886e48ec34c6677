// SPDX-License-Identifier: Apache-2.0
// dq of short sequences, by tiles of 128 queries, as the forward pass is made:
//
//   S = Q K^T    dP = dO V^T    P = exp2(c S - lse2)    dS = P (dP - delta)    dQ += dS K
//
// A tile keeps Q and dO; its O comes first in the streams of K and V, half in each. delta is the
// diagonal of dO O^T, made by the same products as dP: where a row sees one key o is a row of v,
// and dP - delta must be exactly 0. lse2 and delta of every row are left for the kernel of dk and
// dv.
//
// A consumer issues dQ of a block with S and dP of the next, and that of the last one with dO O^T
// of the next tile.
#pragma once

#include <climits>

#include "cuda/sm90/backward/apart/shape.cuh"
#include "cuda/sm90/forward/score/blocks.cuh"
#include "cuda/sm90/forward/score/features.cuh"

namespace tessera::cuda::sm90 {

template <int kDim>
using DqShape = ApartShape<kDim, kRowsOfBox, Work, PackedOrder, kDim == 128>;

template <typename Element, int kDim>
struct BackwardDq : DqShape<kDim> {
  using Shape = DqShape<kDim>;
  using Shape::give_turn;
  using Shape::kTileM;
  using Shape::kTileN;
  using Shape::take_turn;
  using typename Shape::Shared;
  using typename Shape::SharedStorage;
  using typename Shape::Tile;
  using typename Shape::Work;
  // What schedule() asks of a kernel.
  static constexpr uint32_t kFeatures = 0;
  static constexpr bool kListsBlocks = false, kAddsByProducts = false;
  using Schedule = sm90::Schedule<kTileM, kTileN>;
  using BlockFeatures = Features<Element, kTileN, 0>;
  using VisibleBits = sm90::VisibleBits<kTileN>;
  static constexpr int kRowsOfStatistics = rows_of_block(kDim);  // of a block

  template <typename Load>
  static __device__ __forceinline__ void for_each_tile(const Work* works, const Shared shared,
                                                       const Load& load) {
    sm90::for_each_tile<BackwardDq>(works, shared, load);
  }

  struct Place {
    int head, batch, row, rows;  // rows: from there to the last one that is to be stored
    Place() = default;
    __device__ __forceinline__ explicit Place(const Work& work)
        : head(work.head),
          batch(work.q.batch),
          row(work.q.first + work.m0),
          rows(work.q.owned_hi - work.m0) {}
  };
  static __device__ __forceinline__ void carry_queries(const DqParams& a, const Work* works,
                                                       const Shared shared) {
    carry<BackwardDq, Place>(
        works, shared,
        [&](const Work& work, int w, int stage, uint32_t barrier) {
          const int row = work.q.first + work.m0 + w * kRowsOfBox;
          Tile::load(shared.kept(w, stage, 0), &a.q, barrier, work.head, row, 0, work.q.batch);
          Tile::load(shared.kept(w, stage, 1), &a.grad_o, barrier, work.head, row, 0, work.q.batch);
        },
        [&](const Place& tile, int w, int stage) {
          const int row = w * kRowsOfBox;
          store_kept<Tile>(&a.o, shared.kept(w, stage, 0), reach_of(a.problem.thd_q, a.problem.sq),
                           a.problem.dqk, tile.head, tile.batch, tile.row + row, tile.rows - row);
        });
  }
  // i: 0 brings the keys, 1 the values; before them 64 rows of o each.
  static __device__ __forceinline__ void stream(const DqParams& a, const Work* works,
                                                const Shared shared, int i) {
    const auto barriers = shared.stream_barriers(i);
    const CUtensorMap* const map = i == 0 ? &a.k : &a.v;
    Ring<Shape::kStages> ring;
    for_each_tile(works, shared, [&](const Work& work) {
      const int begin = work.begin, head = work.head, kv_head = head / a.problem.group;
      barriers.acquire(ring, Tile::kBytes);  // of o
      Tile::load(shared.stream(i, ring.stage), &a.forward_o, barriers.full(ring.stage), head,
                 work.q.first + work.m0 + i * kRowsOfBox, 0, work.q.batch);
      ring.advance();
#pragma unroll 1
      for (int j = work.end - 1; j >= begin; --j) {
        barriers.acquire(ring, Tile::kBytes);
        Shape::load_block(shared.stream(i, ring.stage), map, barriers.full(ring.stage), a.reach_v,
                          work.k, kv_head, j * kTileN);
        ring.advance();
      }
    });
  }

  // ---- consumer: 64 rows of each tile, of which a thread has two, eight apart ----

  // lse and dlse of the thread's rows; of rows that do not exist what an empty row has.
  static __device__ __forceinline__ void load_rows(const DqParams& a, const Work& work, int w,
                                                   int thread_row, float (&lse)[2],
                                                   float (&grad_lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work.m0 + w * kRowsOfBox + thread_row + 8 * r;
      const bool exists = work.exists(row);
      lse[r] = -kInfinity, grad_lse[r] = 0;
      if (exists) {
        lse[r] = static_cast<const float*>(
            a.lse.data)[offset_of(a.lse, work.q.batch, work.head, work.q.first + row)];
      }
      if (exists && a.grad_lse.data) {
        grad_lse[r] = static_cast<const float*>(
            a.grad_lse.data)[offset_of(a.grad_lse, work.q.batch, work.head, work.q.first + row)];
      }
    }
  }
  // Row r's element of the diagonal of dO O^T. Both rows of a thread meet the diagonal in the 16
  // columns of their own warp, where one thread of the quad has the element.
  static __device__ __forceinline__ float diagonal_of(const float (&product)[kTileN / 2], int r,
                                                      int warp, int lane) {
    float diagonal = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = product + 4 * (2 * i + r) + 2 * r;
      if (i == warp) diagonal = lane / 4 % 2 ? pair[1] : pair[0];
    }
    return __shfl_sync(kAllLanes, diagonal, (lane & ~3) | lane / 8);
  }
  // lse2 and delta for the kernel of dk and dv, which loads whole blocks: rows that do not exist
  // get +inf and 0, if their block has one that does.
  static __device__ __forceinline__ void store_rows(const DqParams& a, const Work& work, int w,
                                                    int thread_row, int lane,
                                                    const float (&lse2)[2],
                                                    const float (&delta)[2]) {
    constexpr int kRows = kRowsOfStatistics;
    const int row = work.m0 + w * kRowsOfBox + thread_row;
    if (lane % 4 != 0 || row / kRows * kRows >= work.q.length) return;
    const int first_slot = first_slot_of(a.problem.thd_q, work.n, work.q.first, kRows,
                                         (a.problem.sq + kRows - 1) / kRows);
    const int64_t to = (int64_t{work.head} * a.slots + first_slot) * kRows + row;
#pragma unroll
    for (int r = 0; r < 2; ++r) a.lse2[to + 8 * r] = lse2[r], a.delta[to + 8 * r] = delta[r];
  }

  // S and dP of a block are issued with dQ of the one before. The same holds between two tiles: the
  // last dQ is issued with dO O^T of the next tile, and staged under its first S and dP.
  static __device__ __forceinline__ void consumer(const DqParams& a, const Work* works,
                                                  const Shared shared, const int w) {
    using BlockRing = Ring<Shape::kStages>;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
    const int warp = thread / kWarp, thread_row = warp * 16 + lane / 4;  // and thread_row + 8
    const bool leader = thread == 0;
    const auto kept_barriers = shared.kept_barriers(w);
    const auto k_barriers = shared.stream_barriers(0), v_barriers = shared.stream_barriers(1);
    const auto work_barriers = shared.work_barriers();
    const float c = log2_scale(a.problem);

    float dQ[kDim / 2], S[kTileN / 2], dP[kTileN / 2];
    uint32_t dS[kTileN / 4];
    Ring<Shape::kWorkStages> work_ring;
    Ring<Shape::kKept> kept_ring;
    BlockRing ring;  // of the block whose S and dP are in registers
    // The tile's blocks of keys, and those of them that every row sees whole.
    int begin, end, clean_begin, clean_end;
    // Statistics of the thread's rows: as loaded, for the next tile; as used, in this one. factor:
    // of dQ.
    float lse[2], grad_lse[2];
    float lse2[2], delta[2], factor[2];
    Interval keys[2];

    // ---- tiles ----

    const auto next_tile = [&] {  // false past the last
      work_barriers.wait(work_ring);
      const int4 range = *reinterpret_cast<const int4*>(&works[work_ring.stage].begin);
      begin = uniform(range.x), end = uniform(range.y);
      clean_begin = uniform(range.z), clean_end = uniform(range.w);
      return begin < end;
    };
    const auto load_next_rows = [&] {
      load_rows(a, works[work_ring.stage], w, thread_row, lse, grad_lse);
    };
    const auto start_tile = [&] {  // dO O^T is in S
      const Work& work = works[work_ring.stage];
      const int row_of_tile = w * kRowsOfBox + thread_row;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        keys[r] = keys_of_tile_row<true>(work, row_of_tile + 8 * r);
        const float diagonal = diagonal_of(S, r, warp, lane);
        const bool empty = lse[r] == -kInfinity;  // so are rows that do not exist
        lse2[r] = empty ? kInfinity : lse[r] * kLog2e;
        delta[r] = empty ? 0.f : diagonal - grad_lse[r];
        factor[r] = work.exists(work.m0 + row_of_tile + 8 * r) ? a.problem.softmax_scale : 0.f;
      }
    };
    const auto store_statistics = [&] {
      store_rows(a, works[work_ring.stage], w, thread_row, lane, lse2, delta);
    };

    // ---- blocks, and what is made of them ----

    const auto wait_for_block = [&](const BlockRing& at) {
      k_barriers.wait(at);
      v_barriers.wait(at);
    };
    const auto release_block = [&](const BlockRing& at) {
      if (leader) k_barriers.release(at);
      if (leader) v_barriers.release(at);
    };
    const auto issue_s = [&](const BlockRing& at) {
      issue_scores<Element, Tile, Tile, kDim>(S, Tile::k_major(shared.kept(w, kept_ring.stage, 0)),
                                              Tile::k_major(shared.stream(0, at.stage)));
    };
    const auto issue_dp = [&](const BlockRing& at) {
      issue_scores<Element, Tile, Tile, kDim>(dP, Tile::k_major(shared.kept(w, kept_ring.stage, 1)),
                                              Tile::k_major(shared.stream(1, at.stage)));
    };
    // dO O^T goes to S: registers are short. of_o: where O stands, this consumer's half of it in
    // stream w.
    const auto issue_delta = [&](const BlockRing& of_o) {
      issue_scores<Element, Tile, Tile, kDim>(S, Tile::k_major(shared.kept(w, kept_ring.stage, 1)),
                                              Tile::k_major(shared.stream(w, of_o.stage)));
    };
    const auto issue_dq = [&](const BlockRing& at) {
      issue_sum<Element, Tile, kTileN / kStepK>(dQ, dS, Tile::mn_major(shared.stream(0, at.stage)));
    };
    const auto wait_for_products = [&] {
      wgmma_wait<0>();
      pin(S);
      pin(dP);
    };
    // The first block of a tile, whose delta is known.
    const auto issue_first = [&] {
      wait_for_block(ring);
      take_turn(w);
      issue_s(ring);
      issue_dp(ring);
      give_turn(w);
    };
    // S and dP of block j to dS. cut: the band hides some of it from some row.
    const auto differentiate = [&](int j, bool cut) {
#pragma unroll
      for (int e = 0; e < kTileN / 2; ++e) {
        S[e] = exp2_approx(fmaf(S[e], c, -lse2[e / 2 % 2]));
      }
      if (cut) VisibleBits(keys, j, lane).set_others(0.f, S);
#pragma unroll
      for (int i = 0; i < kTileN / 4; ++i) {
        const float of_row = delta[i % 2];
        dS[i] =
            pack<Element>(S[2 * i] * (dP[2 * i] - of_row), S[2 * i + 1] * (dP[2 * i + 1] - of_row));
      }
    };
    // Block j, which is not the tile's last.
    const auto step = [&](int j, bool cut) {
      const auto next = ring.next();
      differentiate(j, cut);
      wait_for_block(next);
      take_turn(w);
      issue_dq(ring);
      issue_s(next);
      issue_dp(next);
      give_turn(w);
      wait_for_products();
      pin(dQ);
      release_block(ring);
      ring = next;
    };
    const auto is_cut = [&](int j) { return j < clean_begin || j >= clean_end; };

    // ---- the walk ----

    if (!next_tile()) return;
    if (w == Shape::kConsumers - 1) give_turn(w);  // consumer 0 is the first
    wait_for_predecessors();
    load_next_rows();
    kept_barriers.wait(kept_ring);
    wait_for_block(ring);  // O
    take_turn(w);
    issue_delta(ring);
    give_turn(w);
    wgmma_wait<0>();
    pin(S);
    release_block(ring);
    ring.advance();
    start_tile();
    issue_first();
    store_statistics();
    wait_for_products();
    for (bool more = true; more;) {  // a tile; S and dP of its first block are in registers
#pragma unroll
      for (float& x : dQ) x = 0;
      int j = end - 1;
#pragma unroll 1
      for (; j > begin; --j) step(j, is_cut(j));
      differentiate(j, is_cut(j));
      const auto last = ring;
      ring.advance();
      const auto kept = kept_ring;
      const auto done = work_ring;
      const float scale[2] = {factor[0], factor[1]};
      work_ring.advance();
      kept_ring.advance();
      more = next_tile();
      const auto stage = [&] {  // dQ of the finished tile, where its Q was
        pin(dQ);
        stage_results(lane, work_barriers, done, kept_barriers, kept.stage, [&] {
          Output<Element>::template stage<Tile>(shared.kept(w, kept.stage, 0), scale, thread, dQ);
        });
      };
      if (!more) {
        take_turn(w);
        issue_dq(last);
        give_turn(w);
        wgmma_wait<0>();
        stage();
        break;
      }
      load_next_rows();
      kept_barriers.wait(kept_ring);
      wait_for_block(ring);  // O
      take_turn(w);
      issue_dq(last);
      issue_delta(ring);
      give_turn(w);
      wgmma_wait<0>();
      pin(S);
      pin(dQ);
      release_block(last);
      release_block(ring);
      ring.advance();
      start_tile();
      issue_first();
      store_statistics();
      stage();
      wait_for_products();
    }
  }
};

template <typename Element, int kDim>
__global__ void __launch_bounds__(kApartThreads, 1)
    backward_dq(const __grid_constant__ DqParams a) {
  using Kernel = BackwardDq<Element, kDim>;
  extern __shared__ __align__(1024) uint8_t storage[];
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&a.q, &a.k, &a.v, &a.o, &a.grad_o, &a.forward_o}) {
      tma_prefetch(map);
    }
    shared.init();
  }
  __syncthreads();
  auto& in_shared = *reinterpret_cast<typename Kernel::SharedStorage*>(storage);
  const auto* works = in_shared.work;
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / kWarp);
    const bool first_lane = threadIdx.x % kWarp == 0;
    if (warp == 0) {
      // The scheduler of the forward pass holds a tile back while blocks of those before it wait
      // to be loaded. Tiles are short here: it hears that none ever does.
      const volatile int blocks_loaded = INT_MAX;
      schedule<Element, Kernel>(a, in_shared.work, in_shared.extra, blocks_loaded, shared);
    }
    if (warp == 1 && first_lane) {
      // It cannot be earlier: the next kernel reads all inputs, and writes zeros to dk and dv,
      // before it waits for this one. What came before this one has to be done then.
      wait_for_predecessors();
      launch_dependents();
      Kernel::carry_queries(a, works, shared);
    }
    if (warp > 1 && first_lane) Kernel::stream(a, works, shared, warp - 2);
  } else {
    registers_claim<Kernel::kConsumerRegisters>();
    Kernel::consumer(a, works, shared, warpgroup - 1);
  }
}

}  // namespace tessera::cuda::sm90
