// SPDX-License-Identifier: Apache-2.0
// dk and dv of short sequences, by tiles of 128 keys: the fused kernel (backward/fused/shape.cuh)
// without dQ.
//
//   S^T = K Q^T    dP^T = V dO^T    P^T = exp2(c S^T - lse2)    dS^T = P^T (dP^T - delta)
//   dV += P^T dO   dK += dS^T Q
//
// A tile keeps K and V; blocks of 64 queries (128 at d64), Q with lse2 and dO with delta, stream
// past, all heads of the group at one block and then the next. A consumer issues dV and dK of a
// block with S and dP of the next, be it of the next tile.
#pragma once

#include "cuda/sm90/backward/apart/shape.cuh"

namespace tessera::cuda::sm90 {

struct KeyWork : KeyTile {
  int last;  // there is no tile: the CTA is done
};

template <int kDim>
struct StatisticsOfBlocks {  // lse2, delta
  static constexpr int kRows = rows_of_block(kDim);
  alignas(16) float value[2][stages_of_stream(kDim, kRows)][kRows];
};
template <int kDim>
using DkdvShape = ApartShape<kDim, rows_of_block(kDim), KeyWork, StatisticsOfBlocks<kDim>, true>;

template <typename Element, int kDim>
struct BackwardDkdv : DkdvShape<kDim> {
  using Shape = DkdvShape<kDim>;
  using Shape::give_turn;
  using Shape::take_turn;
  using typename Shape::Block;
  using typename Shape::Shared;
  using typename Shape::SharedStorage;
  using typename Shape::Tile;
  using typename Shape::Work;
  static constexpr int kKeys = Shape::kTileM, kQueries = Shape::kTileN;
  static constexpr int kStatisticsBytes = kQueries * 4;
  using Schedule = KeySchedule<kQueries, kKeys>;

  static __device__ __forceinline__ uint32_t statistics(const Shared shared, int i, int stage) {
    return shared.extra() + (i * Shape::kStages + stage) * kStatisticsBytes;
  }

  // The scheduler, one warp. Tiles that no query sees are finished here.
  static __device__ __forceinline__ void schedule(const DkdvParams& a, Work* works,
                                                  const Shared shared) {
    const int lane = threadIdx.x % kWarp;
    Dispenser dispenser(a.counter, a.mark);
    if (lane == 0) dispenser.reset();
    const auto barriers = shared.work_barriers();
    for (Ring<Shape::kWorkStages> ring;;) {
      mbarrier_wait(barriers.empty(ring.stage), ring.phase ^ 1);
      Work& work = works[ring.stage];
      const int index = uniform(lane == 0 ? dispenser.next(a.tiles) : 0);
      const bool last = index >= a.tiles;
      if (!last && is_packed(a.problem)) {
        static_cast<KeyTile&>(work) = decode_packed(a, index, lane);  // all lanes write the same
      } else if (!last && lane == 0) {
        static_cast<KeyTile&>(work) = Schedule::decode(a, last_first(a, index));
      }
      if (lane == 0) {
        work.last = last;
        if (last) work.begin = work.end = 0;
      }
      __syncwarp();
      if (!last && work.begin >= work.end) {
        store_zeros(a, TESSERA_DK, work, a.problem.dqk);
        store_zeros(a, TESSERA_DV, work, a.problem.dv);
        __syncwarp();
        continue;
      }
      if (lane == 0) mbarrier_arrive(barriers.full(ring.stage));
      if (last) return;
      ring.advance();
    }
  }
  // The index of a tile with the sections of heads of a padded side from the last to the first:
  // what the kernel before has read last is still in L2.
  static __device__ __forceinline__ int last_first(const DkdvParams& a, int index) {
    if (a.problem.thd_k) return index;
    const int tiles = a.per_section.divisor, section = a.per_section.quotient(index);
    return index + a.tiles - (2 * section + 1) * tiles;
  }
  static __device__ __forceinline__ bool is_packed(const Params& p) {
    return p.thd_q && p.thd_k && p.tensor[SideOfQueries::kCuSeqlens].stride[0] != 0;
  }
  // What Schedule::decode() finds, by all lanes of a warp.
  static __device__ __forceinline__ KeyTile decode_packed(const DkdvParams& a, int index,
                                                          int lane) {
    const Params& p = a.problem;
    KeyTile tile;
    tile.upwards = tile.descends = 0;
    const int round = index / p.hk, slot = a.tiles / p.hk - 1 - round;
    tile.kv_head = index - round * p.hk;
    const int n = sequence_of_slot<SideOfKeys>(p, slot, kKeys, lane);
    const Sequence sequence = packed_sequence(p, n, lane);
    tile.key0 = row_of_slot(p, n, sequence.k, p.sk, slot, kKeys);
    Schedule::set_sequence(p, n, sequence.q, sequence.k, tile);
    Schedule::set_blocks(p, tile);
    return tile;
  }
  static __device__ __forceinline__ void store_zeros(const DkdvParams& a, int index,
                                                     const KeyTile& tile, int columns) {
    constexpr int kColumns = 16 / sizeof(Element);  // of one store
    const View& view = a.problem.tensor[index];
    const int end = min(tile.key0 + kKeys, tile.k.owned_hi);
    for (int key = max(tile.key0, tile.k.owned_lo); key < end; ++key) {
      Element* const row = static_cast<Element*>(view.data) +
                           offset_of(view, tile.k.batch, tile.k.first + key, tile.kv_head);
      for (int column = kColumns * (threadIdx.x % kWarp); column < columns;
           column += kColumns * kWarp) {
        *reinterpret_cast<uint4*>(row + column) = uint4{0, 0, 0, 0};
      }
    }
  }

  // body(tile) for each of them, by one thread.
  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const Work* works, const Shared shared,
                                                       const Body& body) {
    const auto barriers = shared.work_barriers();
    for (Ring<Shape::kWorkStages> ring;; ring.advance()) {
      barriers.wait(ring);
      const Work& work = works[ring.stage];
      if (work.last) return;
      body(work);
      barriers.release(ring);
    }
  }

  struct Place {
    int head, batch, row, rows;
    Place() = default;
    __device__ __forceinline__ explicit Place(const Work& work)
        : head(work.kv_head),
          batch(work.k.batch),
          row(work.k.first + work.key0),
          rows(work.k.owned_hi - work.key0) {}
  };
  static __device__ __forceinline__ void carry_keys(const DkdvParams& a, const Work* works,
                                                    const Shared shared) {
    carry<BackwardDkdv, Place>(
        works, shared,
        [&](const Work& work, int w, int stage, uint32_t barrier) {
          const MapRow row = existing_row(a.reach_k, work.k, work.key0 + w * kRowsOfBox);
          Tile::load(shared.kept(w, stage, 0), &a.k, barrier, work.kv_head, row.c2, row.c3,
                     work.k.batch);
          Tile::load(shared.kept(w, stage, 1), &a.v, barrier, work.kv_head, row.c2, row.c3,
                     work.k.batch);
        },
        [&](const Place& tile, int w, int stage) {
          const int row = w * kRowsOfBox;
          const auto store = [&](const CUtensorMap* map, int i, int columns) {
            store_kept<Tile>(map, shared.kept(w, stage, i), reach_of(a.problem.thd_k, a.problem.sk),
                             columns, tile.head, tile.batch, tile.row + row, tile.rows - row);
          };
          store(&a.grad_k, 0, a.problem.dqk);
          store(&a.grad_v, 1, a.problem.dv);
        });
  }
  // i: 0 brings Q and lse2, 1 dO and delta. The statistics alone are the kernel's before.
  static __device__ __forceinline__ void stream(const DkdvParams& a, const Work* works,
                                                const Shared shared, int i) {
    const auto barriers = shared.stream_barriers(i);
    const CUtensorMap* const map = i == 0 ? &a.q : &a.grad_o;
    const float* const values = i == 0 ? a.lse2 : a.delta;
    const int group = a.problem.group;
    Ring<Shape::kStages> ring;
    bool waited = false;
    for_each_tile(works, shared, [&](const Work& work) {
      const int end = work.end;
#pragma unroll 1
      for (int block = work.begin; block < end; ++block) {
#pragma unroll 1
        for (int member = 0; member < group; ++member) {
          const int head = work.kv_head * group + member;
          const int64_t slot = int64_t{head} * a.slots + work.first_slot + block;
          const uint32_t barrier = barriers.full(ring.stage);
          barriers.acquire(ring, Block::kBytes + kStatisticsBytes);
          Shape::load_block(shared.stream(i, ring.stage), map, barrier, a.reach_q, work.q, head,
                            block * kQueries);
          if (!waited) wait_for_predecessors();
          waited = true;
          bulk_load(statistics(shared, i, ring.stage), values + slot * kQueries, kStatisticsBytes,
                    barrier);
          ring.advance();
        }
      }
    });
    wait_for_predecessors();  // also without work: the next kernel waits for this one alone
  }

  // P from its fp32 values S, and dS = P (dP - delta), as operands of dV and dK. delta: that of the
  // thread's first two queries.
  static __device__ __forceinline__ void differentiate(uint32_t delta,
                                                       const float (&S)[kQueries / 2],
                                                       const float (&dP)[kQueries / 2],
                                                       uint32_t (&P)[kQueries / 4],
                                                       uint32_t (&dS)[kQueries / 4]) {
#pragma unroll
    for (int g = 0; g < kQueries / 8; ++g) {
      const float2 of_query = load_shared_pair(delta + 32 * g);
      const float *s = S + 4 * g, *dp = dP + 4 * g;
      P[2 * g] = pack<Element>(s[0], s[1]), P[2 * g + 1] = pack<Element>(s[2], s[3]);
      dS[2 * g] = pack<Element>(s[0] * (dp[0] - of_query.x), s[1] * (dp[1] - of_query.y));
      dS[2 * g + 1] = pack<Element>(s[2] * (dp[2] - of_query.x), s[3] * (dp[3] - of_query.y));
    }
  }

  static __device__ __forceinline__ void consumer(const DkdvParams& a, const Work* works,
                                                  const Shared shared, const int w) {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp, quad = lane % 4;
    const int warp_row = thread / kWarp * 16;  // of the consumer
    const bool leader = thread == 0;
    const auto kept_barriers = shared.kept_barriers(w);
    const auto q_barriers = shared.stream_barriers(0), grad_o_barriers = shared.stream_barriers(1);
    const auto work_barriers = shared.work_barriers();
    const float c = log2_scale(a.problem);
    const int group = a.problem.group;

    float dK[kDim / 2], dV[kDim / 2], S[kQueries / 2], dP[kQueries / 2];
    uint32_t P[kQueries / 4], dS[kQueries / 4];
    Ring<Shape::kWorkStages> work_ring;
    Ring<Shape::kKept> kept_ring;
    Ring<Shape::kStages> ring;  // of the block whose S and dP are in registers

    // ---- tiles ----

    int begin, end;               // blocks of queries
    const auto next_tile = [&] {  // false past the last
      work_barriers.wait(work_ring);
      begin = uniform_register(works[work_ring.stage].begin);
      end = uniform_register(works[work_ring.stage].end);
      return begin < end;
    };
    // What a thread needs to know of the tile whose S is in registers.
    int key, clean_begin, clean_end;  // and key + 8
    const auto start_tile = [&] {
      const Work& work = works[work_ring.stage];
      key = work.key0 + w * kRowsOfBox + warp_row + lane / 4;
      clean_begin = uniform_register(work.clean_begin);
      clean_end = uniform_register(work.clean_end);
    };

    // ---- blocks, and what is made of them ----

    const auto wait_for_block = [&](const Ring<Shape::kStages>& at) {
      q_barriers.wait(at);
      grad_o_barriers.wait(at);
    };
    const auto issue_s = [&](const Ring<Shape::kStages>& at) {
      issue_scores<Element, Tile, Block, kDim>(S, Tile::k_major(shared.kept(w, kept_ring.stage, 0)),
                                               Block::k_major(shared.stream(0, at.stage)));
    };
    const auto issue_dp = [&](const Ring<Shape::kStages>& at) {
      issue_scores<Element, Tile, Block, kDim>(dP,
                                               Tile::k_major(shared.kept(w, kept_ring.stage, 1)),
                                               Block::k_major(shared.stream(1, at.stage)));
    };
    // One thread speaks for all: products end for the warpgroup, and whoever has read statistics
    // has then met the others in take_turn().
    const auto release_block = [&](const Ring<Shape::kStages>& at) {
      if (leader) q_barriers.release(at);
      if (leader) grad_o_barriers.release(at);
    };
    // S becomes P while dP is being made.
    const auto softmax = [&](int block) {
      wgmma_wait<1>();
      pin(S);
      exponentials<kQueries>(c, PairsOfQueries{statistics(shared, 0, ring.stage) + 8 * quad}, S);
      if (block < clean_begin || block >= clean_end) {
        mask_band<kQueries>(works[work_ring.stage], key, block, S);
      }
      wgmma_wait<0>();
      pin(dP);
      pin(S);
    };
    // The block to dK and dV; issues S and dP of the next one, if there is one. It has arrived.
    const auto accumulate = [&](bool more) {
      differentiate(statistics(shared, 1, ring.stage) + 8 * quad, S, dP, P, dS);
      take_turn(w);
      issue_sum<Element, Block, kQueries / kStepK>(dV, P,
                                                   Block::mn_major(shared.stream(1, ring.stage)));
      issue_sum<Element, Block, kQueries / kStepK>(dK, dS,
                                                   Block::mn_major(shared.stream(0, ring.stage)));
      const auto next = ring.next();
      if (more) {
        issue_s(next);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      pin(dK);
      pin(dV);
      release_block(ring);
      ring = next;
      if (more) issue_dp(next);
      give_turn(w);
    };

    // ---- the walk ----

    if (!next_tile()) return;
    if (w == Shape::kConsumers - 1) give_turn(w);  // consumer 0 is the first
    kept_barriers.wait(kept_ring);
    wait_for_block(ring);
    take_turn(w);
    issue_s(ring);
    issue_dp(ring);
    give_turn(w);
    start_tile();
    softmax(begin);
    for (bool more = true; more;) {  // a tile; P and dP of its first block are in registers
#pragma unroll
      for (float& x : dK) x = 0;
#pragma unroll
      for (float& x : dV) x = 0;
      int block = begin, member = 0;
#pragma unroll 1
      for (int left = (end - begin) * group - 1; left > 0; --left) {
        if (++member == group) member = 0, ++block;
        wait_for_block(ring.next());
        accumulate(true);
        softmax(block);
      }
      const auto kept = kept_ring;
      const auto done = work_ring;
      work_ring.advance();
      kept_ring.advance();
      more = next_tile();
      const auto stage = [&] {  // dK and dV of the finished tile, where its K and V were
        const Work& work = works[done.stage];
        const int keys = work.k.length - work.key0 - (w * kRowsOfBox + warp_row);  // of the warp
        stage_results(lane, work_barriers, done, kept_barriers, kept.stage, [&] {
          keep_rows(lane / 4 < keys, lane / 4 + 8 < keys, dK);
          keep_rows(lane / 4 < keys, lane / 4 + 8 < keys, dV);
          const float scale = a.problem.softmax_scale;
          stage_rows<Element, Tile>(shared.kept(w, kept.stage, 0), warp_row, lane, {scale, scale},
                                    dK);
          stage_rows<Element, Tile>(shared.kept(w, kept.stage, 1), warp_row, lane, {1.f, 1.f}, dV);
        });
      };
      if (!more) {
        accumulate(false);
        stage();
        break;
      }
      kept_barriers.wait(kept_ring);
      wait_for_block(ring.next());
      accumulate(true);
      start_tile();
      stage();
      softmax(begin);
    }
  }
};

template <typename Element, int kDim>
__global__ void __launch_bounds__(kApartThreads, 1)
    backward_dkdv(const __grid_constant__ DkdvParams a) {
  using Kernel = BackwardDkdv<Element, kDim>;
  extern __shared__ __align__(1024) uint8_t storage[];
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&a.q, &a.k, &a.v, &a.grad_o, &a.grad_k, &a.grad_v}) {
      tma_prefetch(map);
    }
    shared.init();
  }
  __syncthreads();
  launch_dependents();
  auto& in_shared = *reinterpret_cast<typename Kernel::SharedStorage*>(storage);
  const auto* works = in_shared.work;
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / kWarp);
    const bool first_lane = threadIdx.x % kWarp == 0;
    if (warp == 0) Kernel::schedule(a, in_shared.work, shared);
    if (warp == 1 && first_lane) Kernel::carry_keys(a, works, shared);
    if (warp > 1 && first_lane) Kernel::stream(a, works, shared, warp - 2);
  } else {
    registers_claim<Kernel::kConsumerRegisters>();
    Kernel::consumer(a, works, shared, warpgroup - 1);
  }
}

}  // namespace tessera::cuda::sm90
