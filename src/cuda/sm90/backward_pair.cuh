// SPDX-License-Identifier: Apache-2.0
// Attention backward for head dims up to 256: the five products of backward.cuh by a cluster of two
// CTAs, because dK and dV of 64 keys do not fit in the registers of a warpgroup together.
//
// The pair owns 128 keys of one key head, 64 a CTA, and walks the blocks of 64 queries that see
// them. In a CTA the products are split by role:
//
//   warpgroup 0  producer   one thread
//   warpgroup 1  scores     S^T = K Q^T -> P^T -> dV += P^T dO
//   warpgroup 2  gradients  dP^T = V dO^T, dS^T = P^T (dP^T - delta) -> dK += dS^T Q
//
// P goes from one to the other in fp32, through shared memory. dS goes to the other CTA too: with
// the dS of all 128 keys a CTA makes half of dQ's columns, so that dQ is added to memory once for
// 128 keys; it needs those columns of the other's K. dQ of block i - 1 is made after dS of block i,
// so that what travels between the CTAs has a whole step. Each CTA loads Q and dO for itself:
// shared by multicast, a stage is free only when both have used it, and one waits for the other at
// every block.
//
// In the deterministic form each CTA of the pair has counters of its own for its columns of dQ
// (backward_turns.cuh); both take the same ticket.
//
//   barrier          arrivals                  says
//   kv               1 + bytes                 K, V and the other's half of K have arrived
//   q.full[s]        1 + bytes                 a block and its lse2 have arrived; so grad_o, delta
//   q.empty[s]       8 (warps)                 the block has been used
//   weights.full     4                         P of the block is in shared memory
//   weights.empty    4                         and has been read
//   ds.full[b]       4 + bytes                 dS of both CTAs is there
//   ds.empty[b]      16                        both CTAs have used it
#pragma once

#include <cstddef>

#include "cuda/common/element.cuh"
#include "cuda/sm90/backward_blocks.cuh"
#include "cuda/sm90/backward_edges.cuh"
#include "cuda/sm90/backward_kernels.h"
#include "cuda/sm90/backward_products.cuh"
#include "cuda/sm90/backward_turns.cuh"
#include "cuda/sm90/output.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/smem_tile.cuh"

namespace tessera::cuda::sm90 {

template <typename Element, typename Row>
struct BackwardPair {
  static constexpr BackwardTile kTile = Row::kTile;
  static constexpr int kTileM = 64, kTileN = 128, kKeys = 64;  // of a pair; of a CTA
  static constexpr int kQStages = kTile.grad_o_stages == 1 ? 2 : 3;
  static constexpr int kGradOStages = kTile.grad_o_stages, kBuffers = 2;
  static constexpr int kWarps = 4, kCtas = 2;
  static constexpr int kProducerRegisters = 24, kOwnerRegisters = 240;
  // Element 4 i + j of a thread's accumulators of dQ lies at 4 (128 i + thread) + j of the part
  // that belongs to its chunk of 64 columns.
  static constexpr int kPartOfDq = 64 * 64, kPartsOfDq = kTile.parts_of_dq(),
                       kBlockOfDq = kPartsOfDq * kPartOfDq;
  static constexpr bool kSplitsRows = false;
  static constexpr int kColumnsOfDq = 64;
  static_assert(kTile.tile_m == kTileM && kTile.ds_buffers == kBuffers &&
                (Row::kFeatures & ~kDeterministic) == 0);
  static_assert(kTile.dqk == 4 * kChunkColumns && kTile.dv % kChunkColumns == 0);

  using Order = Turns<kTileM, kTileN, 2 * kWarps, false>;
  using Schedule = KeySchedule<kTileM, kTileN>;
  using Blocks = QueryBlocks<kTileM, kTileN>;
  using QTile = SmemTile<kTileM, kTile.dqk>;
  using GradOTile = SmemTile<kTileM, kTile.dv>;
  using KTile = SmemTile<kKeys, kTile.dqk>;
  using VTile = SmemTile<kKeys, kTile.dv>;
  using OtherTile = SmemTile<kKeys, 2 * kChunkColumns>;
  using GradientTile = SmemTile<kTileN, kTileM>;  // dS^T

  struct alignas(1024) SharedStorage {
    uint8_t k[KTile::kBytes], v[VTile::kBytes], k_other[OtherTile::kBytes];
    uint8_t q[kQStages][QTile::kBytes];
    uint8_t grad_o[kGradOStages][GradOTile::kBytes];
    uint8_t ds[kBuffers][GradientTile::kBytes];
    float4 weights[kTileM / 8][kWarpgroup];  // P in the order of accumulators
    float lse2[kQStages][kTileM], delta[kGradOStages][kTileM];
    uint64_t kv_barrier, q_barriers[2 * kQStages], grad_o_barriers[2 * kGradOStages];
    uint64_t weight_barriers[2], ds_barriers[2 * kBuffers];
    uint64_t turn_barriers[Order::kBarriers];
    int ticket;
    KeyTile tile;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);

  struct Shared {
    uint32_t base;

    __device__ __forceinline__ uint32_t k() const { return base + offsetof(SharedStorage, k); }
    __device__ __forceinline__ uint32_t v() const { return base + offsetof(SharedStorage, v); }
    __device__ __forceinline__ uint32_t k_other() const {
      return base + offsetof(SharedStorage, k_other);
    }
    __device__ __forceinline__ uint32_t q(int stage) const {
      return base + offsetof(SharedStorage, q) + stage * QTile::kBytes;
    }
    __device__ __forceinline__ uint32_t grad_o(int stage) const {
      return base + offsetof(SharedStorage, grad_o) + stage * GradOTile::kBytes;
    }
    __device__ __forceinline__ uint32_t ds(int buffer) const {
      return base + offsetof(SharedStorage, ds) + buffer * GradientTile::kBytes;
    }
    // A thread's four weights of queries 8 i .. 8 i + 7.
    __device__ __forceinline__ uint32_t weights(int thread, int i) const {
      return base + offsetof(SharedStorage, weights) + (i * kWarpgroup + thread) * 16;
    }
    __device__ __forceinline__ uint32_t lse2(int stage) const {
      return base + offsetof(SharedStorage, lse2) + stage * kTileM * 4;
    }
    __device__ __forceinline__ uint32_t delta(int stage) const {
      return base + offsetof(SharedStorage, delta) + stage * kTileM * 4;
    }
    __device__ __forceinline__ uint32_t kv_barrier() const {
      return base + offsetof(SharedStorage, kv_barrier);
    }
    __device__ __forceinline__ StageBarriers<kQStages> q_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, q_barriers))};
    }
    __device__ __forceinline__ StageBarriers<kGradOStages> grad_o_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, grad_o_barriers))};
    }
    __device__ __forceinline__ StageBarriers<1> weight_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, weight_barriers))};
    }
    __device__ __forceinline__ StageBarriers<kBuffers> ds_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, ds_barriers))};
    }

    __device__ __forceinline__ Order turns(int rank) const {
      return Order(base + uint32_t(offsetof(SharedStorage, turn_barriers)), 0, rank);
    }
    __device__ __forceinline__ uint32_t ticket() const {
      return base + offsetof(SharedStorage, ticket);
    }

    __device__ __forceinline__ void init() const {
      if constexpr (kInTurn<Row>) turns(0).init();
      mbarrier_init(kv_barrier(), 1);
      const auto init_stages = [](const auto& barriers, int stages, int full, int empty) {
        for (int stage = 0; stage < stages; ++stage) {
          mbarrier_init(barriers.full(stage), full);
          mbarrier_init(barriers.empty(stage), empty);
        }
      };
      init_stages(q_barriers(), kQStages, 1, 2 * kWarps);
      init_stages(grad_o_barriers(), kGradOStages, 1, 2 * kWarps);
      init_stages(weight_barriers(), 1, kWarps, kWarps);
      init_stages(ds_barriers(), kBuffers, kWarps, 2 * kCtas * kWarps);
      mbarrier_init_fence();
    }
  };

  // This warp has used the stage: says so to both CTAs. By one lane.
  template <int kStages>
  static __device__ __forceinline__ void release(const StageBarriers<kStages>& barriers,
                                                 int stage) {
#pragma unroll
    for (int cta = 0; cta < kCtas; ++cta) {
      mbarrier_arrive_in_cluster(address_in(cta, barriers.empty(stage)));
    }
  }

  // ---- producer: one thread of each CTA ----

  // A block by the boxes of half its rows.
  template <typename Tile>
  static __device__ __forceinline__ void load_block(uint32_t tile, const CUtensorMap* map,
                                                    uint32_t barrier, int head, const Rows& rows,
                                                    bool ragged, int block) {
#pragma unroll
    for (int half = 0; half < kTileM; half += kTileM / 2) {
      const MapRow row = existing_row(ragged, rows, block * kTileM + half);
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        tma_load(tile + chunk * Tile::kChunkBytes + half * kChunkRowBytes, map, barrier,
                 chunk * kChunkColumns, head, row.c2, row.c3, rows.batch);
      }
    }
  }

  static __device__ __forceinline__ void producer(const BackwardParams& a, const KeyTile& tile,
                                                  const Shared shared, int rank) {
    const int begin = tile.begin, end = tile.end, group = a.problem.group;
    const int2 walk = walk_of<Row, Order>(tile);
    if (begin < end) {
      const MapRow mine = existing_row(a.ragged_k, tile.k, tile.key0 + rank * kKeys),
                   other = existing_row(a.ragged_k, tile.k, tile.key0 + (1 - rank) * kKeys);
      const uint32_t barrier = shared.kv_barrier();
      mbarrier_arrive_expect(barrier, KTile::kBytes + VTile::kBytes + OtherTile::kBytes);
      KTile::load(shared.k(), &a.k, barrier, tile.kv_head, mine.c2, mine.c3, tile.k.batch);
      VTile::load(shared.v(), &a.v, barrier, tile.kv_head, mine.c2, mine.c3, tile.k.batch);
#pragma unroll
      for (int chunk = 0; chunk < OtherTile::kChunks; ++chunk) {
        tma_load(shared.k_other() + chunk * OtherTile::kChunkBytes, &a.k, barrier,
                 (first_chunk_of_dq(rank) + chunk) * kChunkColumns, tile.kv_head, other.c2,
                 other.c3, tile.k.batch);
      }
    }
    wait_for_predecessors();
    const auto q_barriers = shared.q_barriers();
    const auto grad_o_barriers = shared.grad_o_barriers();
    Ring<kQStages> q_ring;
    Ring<kGradOStages> grad_o_ring;
    const auto acquire = [](const auto& barriers, const auto& ring, int bytes) {
      mbarrier_wait_for_cluster(barriers.empty(ring.stage), ring.phase ^ 1);
      mbarrier_arrive_expect(barriers.full(ring.stage), bytes);
      return barriers.full(ring.stage);
    };
#pragma unroll 1
    for (int head = tile.kv_head * group; head < (tile.kv_head + 1) * group; ++head) {
#pragma unroll 1
      for (int i = begin, block = walk.x; i < end; ++i, block += walk.y) {
        const int64_t row = (int64_t{head} * a.slots + tile.first_slot + block) * kTileM;
        const uint32_t q = acquire(q_barriers, q_ring, QTile::kBytes + kTileM * 4);
        load_block<QTile>(shared.q(q_ring.stage), &a.q_half, q, head, tile.q, a.ragged_q, block);
        bulk_load(shared.lse2(q_ring.stage), a.lse2 + row, kTileM * 4, q);
        q_ring.advance();
        const uint32_t grad_o =
            acquire(grad_o_barriers, grad_o_ring, GradOTile::kBytes + kTileM * 4);
        load_block<GradOTile>(shared.grad_o(grad_o_ring.stage), &a.grad_o_half, grad_o, head,
                              tile.q, a.ragged_q, block);
        bulk_load(shared.delta(grad_o_ring.stage), a.delta + row, kTileM * 4, grad_o);
        grad_o_ring.advance();
      }
    }
  }

  // ---- dQ: both roles, a chunk of 64 columns each ----

  static __device__ __forceinline__ int first_chunk_of_dq(int rank) { return 2 * rank; }

  struct PartOfDq {
    const int rank, role;
    float* const sums;  // null: no dq
    const Order turns;
    int first_lo = 0, first_hi = 0;  // blocks that this tile is the first to add to
    Ring<Order::kRing> ring;

    __device__ __forceinline__ PartOfDq(const BackwardParams& a, const KeyTile& tile,
                                        const Shared shared, int rank, int role)
        : rank(rank), role(role), sums(a.dq_sums), turns(shared.turns(rank)) {
      if constexpr (kInTurn<Row>) {
        const int2 first = Order::first_of(tile);
        first_lo = uniform_register(first.x), first_hi = uniform_register(first.y);
      }
    }
    __device__ __forceinline__ int chunk() const { return first_chunk_of_dq(rank) + role; }

    __device__ __forceinline__ void issue(const Shared shared, int buffer,
                                          float (&dQ)[kColumnsOfDq / 2]) const {
      const uint64_t ds = GradientTile::mn_major(shared.ds(buffer));
      const uint64_t mine = KTile::mn_major(shared.k() + chunk() * KTile::kChunkBytes);
      const uint64_t other = OtherTile::mn_major(shared.k_other() + role * OtherTile::kChunkBytes);
      constexpr int kSteps = kKeys / kStepK;
      pin(dQ);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        Wgmma<Element, kColumnsOfDq>::template ss<kMajorMN, kMajorMN>(
            dQ, ds + GradientTile::mn_major_step(rank * kSteps + i), mine + KTile::mn_major_step(i),
            i > 0);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        Wgmma<Element, kColumnsOfDq>::template ss<kMajorMN, kMajorMN>(
            dQ, ds + GradientTile::mn_major_step((1 - rank) * kSteps + i),
            other + OtherTile::mn_major_step(i), 1);
      }
      wgmma_commit();
    }
    // Of block after block.
    __device__ __forceinline__ void add(int slot, int block, int thread,
                                        const float (&dQ)[kColumnsOfDq / 2]) {
      if (!sums) return;
      if constexpr (kInTurn<Row>) turns.wait(ring);
      const bool stores = block >= first_lo && block < first_hi;
      float* part = sums + int64_t{slot} * kBlockOfDq + chunk() * kPartOfDq + 4 * thread;
#pragma unroll
      for (int i = 0; i < kColumnsOfDq / 8; ++i) {
        float* const to = part + 4 * kWarpgroup * i;
        if constexpr (kInTurn<Row>) {
          store_or_add_to_global(stores, to, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2],
                                 dQ[4 * i + 3]);
        } else {
          add_to_global(to, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
        }
      }
      if constexpr (kInTurn<Row>) {
        turns.done(ring);
        ring.advance();
      }
    }
  };

  // ---- the two roles ----

  // Walks the blocks of every query head: step(block, slot, masked).
  template <typename Step>
  static __device__ __forceinline__ void for_each_block(const BackwardParams& a,
                                                        const KeyTile& tile, const Step& step) {
    const int begin = uniform_register(tile.begin), end = uniform_register(tile.end);
    const int2 walk = walk_of<Row, Order>(tile);
    const int first = uniform_register(walk.x), next = kInTurn<Row> ? uniform_register(walk.y) : 1;
    const int clean_begin = uniform_register(tile.clean_begin),
              clean_end = uniform_register(tile.clean_end);
    int slot = uniform_register(tile.kv_head) * a.problem.group * a.slots +
               uniform_register(tile.first_slot);
#pragma unroll 1
    for (int member = 0; member < a.problem.group; ++member, slot += a.slots) {
#pragma unroll 1
      for (int i = begin, block = first; i < end; ++i, block += next) {
        step(block, slot + block, block < clean_begin || block >= clean_end);
      }
    }
  }

  static __device__ __forceinline__ void scores(const BackwardParams& a, const KeyTile& tile,
                                                const Shared shared, int rank) {
    const Params& p = a.problem;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp, quad = lane % 4;
    const int key = tile.key0 + rank * kKeys + thread / kWarp * 16 + lane / 4;  // and key + 8
    const auto q_barriers = shared.q_barriers();
    const auto grad_o_barriers = shared.grad_o_barriers();
    const auto weight_barriers = shared.weight_barriers();
    const auto ds_barriers = shared.ds_barriers();
    PartOfDq part(a, tile, shared, rank, 0);
    const float c = log2_scale(p);
    const uint64_t k = KTile::k_major(shared.k());

    float dV[kTile.dv / 2], dQ[kColumnsOfDq / 2];
#pragma unroll
    for (float& x : dV) x = 0;
    Ring<kQStages> q_ring;
    Ring<kGradOStages> grad_o_ring;
    Ring<1> weight_ring;
    Ring<kBuffers> ds_ring;
    int previous_slot = -1, previous_block = 0;  // of the block whose dQ is next
    if (tile.begin < tile.end) mbarrier_wait(shared.kv_barrier(), 0);

    for_each_block(a, tile, [&](int block, int slot, bool masked) {
      float S[kTileM / 2];
      uint32_t P[kTileM / 4];
      q_barriers.wait(q_ring);
      const uint64_t q = QTile::k_major(shared.q(q_ring.stage));
      issue_scores<Element, KTile, QTile, kTile.dqk>(S, k, q);
      wgmma_wait<0>();
      pin(S);

      exponentials<kTileM>(c, shared.lse2(q_ring.stage) + 8 * quad, S);
      if (masked) hide<kTileM>(tile, key, block, S);
      mbarrier_wait(weight_barriers.empty(0), weight_ring.phase ^ 1);
#pragma unroll
      for (int g = 0; g < kTileM / 8; ++g) {
        const float* s = S + 4 * g;
        store_shared(shared.weights(thread, g),
                     uint4{__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]),
                           __float_as_uint(s[3])});
        P[2 * g] = pack<Element>(s[0], s[1]), P[2 * g + 1] = pack<Element>(s[2], s[3]);
      }
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(weight_barriers.full(0));
        mbarrier_arrive(q_barriers.empty(q_ring.stage));
      }
      grad_o_barriers.wait(grad_o_ring);
      const uint64_t grad_o = GradOTile::mn_major(shared.grad_o(grad_o_ring.stage));
      issue_sum<Element, GradOTile, kTileM / kStepK>(dV, P, grad_o);
      // The first time there is no block before: what comes out is thrown away.
      if (previous_slot >= 0) ds_barriers.wait(ds_ring);
      part.issue(shared, ds_ring.stage, dQ);
      wgmma_wait<1>();
      pin(dV);
      if (lane == 0) mbarrier_arrive(grad_o_barriers.empty(grad_o_ring.stage));
      wgmma_wait<0>();
      pin(dQ);
      if (previous_slot >= 0) {
        if (lane == 0) release(ds_barriers, ds_ring.stage);
        part.add(previous_slot, previous_block, thread, dQ);
        ds_ring.advance();
      }
      previous_slot = slot;
      previous_block = block;
      q_ring.advance();
      grad_o_ring.advance();
      weight_ring.advance();
    });
    finish_dq(shared, part, ds_ring, previous_slot, previous_block, thread, dQ);
    store_gradient<Element>(p, TESSERA_DV, tile, key, 1.f, p.dv, dV);
  }

  static __device__ __forceinline__ void gradients(const BackwardParams& a, const KeyTile& tile,
                                                   const Shared shared, int rank) {
    const Params& p = a.problem;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp, quad = lane % 4;
    const int warp_row = rank * kKeys + thread / kWarp * 16;  // of the pair's tile
    const int key = tile.key0 + warp_row + lane / 4;          // and key + 8
    const auto q_barriers = shared.q_barriers();
    const auto grad_o_barriers = shared.grad_o_barriers();
    const auto weight_barriers = shared.weight_barriers();
    const auto ds_barriers = shared.ds_barriers();
    PartOfDq part(a, tile, shared, rank, 1);
    const uint32_t ds_row = GradientTile::unit(0, warp_row + lane % 16, lane / 16);
    const uint64_t v = VTile::k_major(shared.v());

    float dK[kTile.dqk / 2], dQ[kColumnsOfDq / 2];
#pragma unroll
    for (float& x : dK) x = 0;
    Ring<kQStages> q_ring;
    Ring<kGradOStages> grad_o_ring;
    Ring<1> weight_ring;
    Ring<kBuffers> ds_ring, previous_ring;
    int previous_slot = -1, previous_block = 0;
    if (tile.begin < tile.end) mbarrier_wait(shared.kv_barrier(), 0);

    for_each_block(a, tile, [&](int block, int slot, bool) {
      float dP[kTileM / 2];
      uint32_t dS[kTileM / 4];
      grad_o_barriers.wait(grad_o_ring);
      const uint64_t grad_o = GradOTile::k_major(shared.grad_o(grad_o_ring.stage));
      issue_scores<Element, VTile, GradOTile, kTile.dv>(dP, v, grad_o);
      wgmma_wait<0>();
      pin(dP);

      weight_barriers.wait(weight_ring);
      const uint32_t delta = shared.delta(grad_o_ring.stage) + 8 * quad;
#pragma unroll
      for (int g = 0; g < kTileM / 8; ++g) {
        const float2 of_query = load_shared_pair(delta + 32 * g);
        const float4 w = load_shared_four(shared.weights(thread, g));
        const float* dp = dP + 4 * g;
        dS[2 * g] = pack<Element>(w.x * (dp[0] - of_query.x), w.y * (dp[1] - of_query.y));
        dS[2 * g + 1] = pack<Element>(w.z * (dp[2] - of_query.x), w.w * (dp[3] - of_query.y));
      }
      __syncwarp();
      if (lane == 0) {
        weight_barriers.release(weight_ring);
        mbarrier_arrive(grad_o_barriers.empty(grad_o_ring.stage));
      }
      mbarrier_wait_for_cluster(ds_barriers.empty(ds_ring.stage), ds_ring.phase ^ 1);
      const uint32_t ds = shared.ds(ds_ring.stage);
#pragma unroll
      for (int i = 0; i < kTileM / kStepK; ++i) {  // unit 2 i + lane / 16 of the row
        stmatrix_x4((ds + ds_row) ^ i << 5, dS + 4 * i);
      }
      async_proxy_fence();
      __syncwarp();
      if (lane == 0)
        send(shared, ds_barriers.full(ds_ring.stage), ds + warp_row * kChunkRowBytes, thread == 0,
             1 - rank);
      q_barriers.wait(q_ring);
      const uint64_t q = QTile::mn_major(shared.q(q_ring.stage));
      issue_sum<Element, QTile, kTileM / kStepK>(dK, dS, q);
      if (previous_slot >= 0) ds_barriers.wait(previous_ring);
      part.issue(shared, previous_ring.stage, dQ);
      wgmma_wait<1>();
      pin(dK);
      if (lane == 0) mbarrier_arrive(q_barriers.empty(q_ring.stage));
      wgmma_wait<0>();
      pin(dQ);
      if (previous_slot >= 0) {
        if (lane == 0) release(ds_barriers, previous_ring.stage);
        part.add(previous_slot, previous_block, thread, dQ);
        previous_ring.advance();
      }
      previous_slot = slot;
      previous_block = block;
      q_ring.advance();
      grad_o_ring.advance();
      weight_ring.advance();
      ds_ring.advance();
    });
    finish_dq(shared, part, previous_ring, previous_slot, previous_block, thread, dQ);
    store_gradient<Element>(p, TESSERA_DK, tile, key, p.softmax_scale, p.dqk, dK);
  }

  // A warp's rows of dS are there: says so here, and copies them to the other CTA. By one lane; one
  // warp also says what comes from there.
  static __device__ __forceinline__ void send(const Shared shared, uint32_t barrier, uint32_t rows,
                                              bool expects, int other) {
    constexpr int kBytesOfWarp = 16 * kChunkRowBytes;
    if (expects) {
      mbarrier_arrive_expect(barrier, kWarps * kBytesOfWarp);
    } else {
      mbarrier_arrive(barrier);
    }
    copy_to_cta(address_in(other, rows), rows, kBytesOfWarp, address_in(other, barrier));
  }

  static __device__ __forceinline__ void finish_dq(const Shared shared, PartOfDq& part,
                                                   const Ring<kBuffers>& ring, int slot, int block,
                                                   int thread, float (&dQ)[kColumnsOfDq / 2]) {
    if (slot < 0) return;
    shared.ds_barriers().wait(ring);
    part.issue(shared, ring.stage, dQ);
    wgmma_wait<0>();
    pin(dQ);
    part.add(slot, block, thread, dQ);
  }
};

template <typename Element, typename Row>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(BackwardTile::kThreads, 1)
    backward_pair(const __grid_constant__ BackwardParams a) {
  using Kernel = BackwardPair<Element, Row>;
  extern __shared__ __align__(1024) uint8_t storage[];
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  const int warpgroup = uniform_register(threadIdx.x / kWarpgroup), rank = blockIdx.x % 2;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&a.q_half, &a.k, &a.v, &a.grad_o_half}) tma_prefetch(map);
    shared.init();
  }
  auto& in_shared = *reinterpret_cast<typename Kernel::SharedStorage*>(storage);
  KeyTile& tile = in_shared.tile;
  int index = blockIdx.x / 2;
  if constexpr (kInTurn<Row>) {
    cluster_sync();  // the other CTA has begun
    if (rank == 0 && threadIdx.x == kWarp) {
      wait_for_predecessors();
      index = atomicAdd(&a.order->ticket, 1);
      for (int cta = 0; cta < Kernel::kCtas; ++cta) {
        store_in_cluster(address_in(cta, shared.ticket()), index);
      }
    }
    cluster_sync();
    index = in_shared.ticket;
  }
  if (threadIdx.x == kWarp) tile = Kernel::Schedule::decode(a, index);
  cluster_sync();
  launch_dependents();
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    if (threadIdx.x == 0) Kernel::producer(a, tile, shared, rank);
    if constexpr (kInTurn<Row>) shared.turns(rank).serve(a, tile);
  } else {
    registers_claim<Kernel::kOwnerRegisters>();
    if (warpgroup == 1) {
      Kernel::scores(a, tile, shared, rank);
    } else {
      Kernel::gradients(a, tile, shared, rank);
    }
  }
  cluster_sync();  // the other CTA may still write here
}

}  // namespace tessera::cuda::sm90
