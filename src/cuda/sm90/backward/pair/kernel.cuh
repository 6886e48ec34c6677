// SPDX-License-Identifier: Apache-2.0
// Attention backward for head dims up to 256: the five products of backward/fused/shape.cuh by a
// cluster of two CTAs, because dK and dV of 64 keys do not fit in the registers of a warpgroup
// together; with features, which need registers too, also for head dims of 192/128.
//
// The pair owns 128 keys of one key head, 64 a CTA, and walks the blocks of 64 queries that see
// them. The products of a CTA are split by role:
//
//   warpgroup 0  producer   one thread
//   warpgroup 1  scores     S^T = K Q^T -> P^T -> dV += P^T dO
//   warpgroup 2  gradients  dP^T = V dO^T, dS^T = P^T (dP^T - delta) -> dK += dS^T Q
//
// P goes from one to the other through shared memory, in 16 bits as dV takes it; with a softcap
// what goes is P times the cap's slope, and with dropout the bits that it keeps, so that the second
// role knows of no other feature: dS = weight (keep dP - delta). dS goes to the other CTA too: with
// the dS of all 128 keys a CTA makes half of dQ's columns, so that dQ is added to memory once for
// 128 keys; it needs those columns of the other's K. dQ of block i - 1 is made after dS of block i,
// so that what travels between the CTAs has a whole step. Each CTA loads Q and dO for itself:
// shared by multicast, a stage is free only when both have used it, and one waits for the other at
// every block.
//
// Each CTA of a deterministic pair has counters of its own for its columns of dQ
// (backward/fused/turns.cuh); both take the same ticket. Both find the same blocks where masks
// leave some out.
//
//   barrier        arrivals                     says
//   kv             1 + bytes                    K, V and the other's columns of K have arrived
//   q.full[s]      1 + bytes                    Q and lse2 of a block have arrived; with features
//                                               which block it is, and its bits of a packed mask
//   q.empty[s]     8 (warps of both roles)      it has been used
//   grad_o.full[s], empty[s]                    the same of dO and delta
//   weights.full   4 (warps of scores)          weights of the block are in shared memory
//   weights.empty  4 (warps of gradients)       and have been read
//   ds.full[b]     4 (of gradients) + bytes     dS of both CTAs is there: this one's, and a copy of
//                                               the other's
//   ds.empty[b]    16 (both roles, both CTAs)   both CTAs have used it
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/sm90/backward/edges.cuh"
#include "cuda/sm90/backward/fused/turns.cuh"
#include "cuda/sm90/backward/pair/producer.cuh"
#include "cuda/sm90/backward/pair/shared.cuh"
#include "cuda/sm90/backward/products.cuh"
#include "cuda/sm90/backward/score/blocks.cuh"
#include "cuda/sm90/backward/score/features.cuh"
#include "cuda/sm90/backward/tile.h"
#include "cuda/sm90/forward/output.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"

namespace tessera::cuda::sm90 {

template <typename Element, typename Row>
struct BackwardPair {
  static constexpr BackwardTile kTile = Row::kTile;
  static constexpr uint32_t kFeatures = Row::kFeatures;
  static constexpr bool kRich = kFeatures & kEverything, kLeavesOut = kFeatures & kMasks,
                        kPassesTurns = kInTurn<Row>;
  static constexpr int kTileM = 64, kTileN = 128, kKeys = 64;  // of a pair; of a CTA
  static constexpr int kQStages = kTile.grad_o_stages == 1 ? 2 : 3;
  static constexpr int kGradOStages = kTile.grad_o_stages, kBuffers = 2;
  // The ring of dS at the block before the first: a wait for that phase falls through.
  static constexpr Ring<kBuffers> kBeforeFirst{kBuffers - 1, 1};
  static constexpr int kWarps = 4, kCtas = 2;
  // 3 x 168 in all. dV of 256 columns takes half of 240; where masks leave blocks out the producer
  // needs more than 24.
  static constexpr int kProducerRegisters = kLeavesOut && kTile.dv <= 128 ? 56 : 24,
                       kOwnerRegisters = 252 - kProducerRegisters / 2;
  static constexpr int kMaskBytes = kWarps * kWarp * 4;  // of a block's packed mask
  // Element 4 i + j of a thread's accumulators of dQ lies at 4 (128 i + thread) + j of the part
  // that belongs to its chunk of 64 columns.
  static constexpr int kPartOfDq = 64 * 64, kPartsOfDq = kTile.parts_of_dq(),
                       kBlockOfDq = kPartsOfDq * kPartOfDq;
  static constexpr bool kSplitsRows = false;
  static constexpr int kColumnsOfDq = 64;
  static_assert(kTile.tile_m == kTileM && kTile.ds_buffers == kBuffers);
  // A role of a CTA has a chunk of dQ's columns; of three chunks the second roles share the middle.
  static constexpr bool kSharesChunk = kPartsOfDq == 3;
  static_assert((kPartsOfDq == 4 || kSharesChunk) && kTile.dqk == kPartsOfDq * kChunkColumns &&
                kTile.dv % kChunkColumns == 0);

  using Order = Turns<kTileM, kTileN, 2 * kWarps, kLeavesOut, InnerLoop::kBlocks, kBuffers>;
  using Schedule = KeySchedule<kTileM, kTileN>;
  using Blocks = QueryBlocks<kTileM, kTileN>;
  using QTile = SmemTile<kTileM, kTile.dqk>;
  using GradOTile = SmemTile<kTileM, kTile.dv>;
  using KTile = SmemTile<kKeys, kTile.dqk>;
  using VTile = SmemTile<kKeys, kTile.dv>;
  using OtherTile = SmemTile<kKeys, 2 * kChunkColumns>;
  using GradientTile = SmemTile<kTileN, kTileM>;  // dS^T
  using Features = BackwardFeatures<Element, kTileM, kFeatures>;
  static_assert(!Features::kFetchesBias);

  struct alignas(1024) SharedStorage {
    uint8_t k[KTile::kBytes], v[VTile::kBytes], k_other[OtherTile::kBytes];
    uint8_t q[kQStages][QTile::kBytes];
    uint8_t grad_o[kGradOStages][GradOTile::kBytes];
    uint8_t ds[kBuffers][GradientTile::kBytes];
    // Weights of each warp in the order of accumulators; before, the bias of its keys.
    uint8_t weights[kWarps][Features::kPieceBytes];
    float lse2[kQStages][kTileM], delta[kGradOStages][kTileM];
    uint64_t kv_barrier, q_barriers[2 * kQStages], grad_o_barriers[2 * kGradOStages];
    uint64_t weight_barriers[2], ds_barriers[2 * kBuffers];
    uint64_t turn_barriers[Order::kBarriers];
    int turn_stored[Order::kRing];
    int2 blocks[kQStages];                                 // rich: the StagedBlock of each
    uint32_t kept[kFeatures & kDropout ? kWarpgroup : 1];  // of a thread's weights
    alignas(16) uint8_t mask[kQStages][kLeavesOut ? kMaskBytes : 16];  // packed
    Interval spans[kLeavesOut ? kTileN : 1];  // of queries, of each key; see QueryBlocks::span
    int ticket;
    KeyTile tile;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);

  using Shared = PairShared<BackwardPair>;

  // Tells both CTAs that this warp has used the stage. Called by one lane. Relaxed, because nothing
  // is handed over: a release would first wait for what the thread has written, its additions to
  // dQ.
  template <int kStages>
  static __device__ __forceinline__ void release(const StageBarriers<kStages>& barriers,
                                                 int stage) {
#pragma unroll
    for (int cta = 0; cta < kCtas; ++cta) {
      mbarrier_arrive_in_cluster_relaxed(address_in(cta, barriers.empty(stage)));
    }
  }

  static __device__ __forceinline__ int2 walk_of(const KeyTile& tile) {
    return sm90::walk_of<Row, Order>(tile);
  }

  // A block of queries; cut: the band hides some score; mask: of BlockMask.
  struct Block {
    int head, block, slot;
    bool cut;
    int mask;
  };
  // The one whose dQ is next, and where its dS is; slot < 0: there is none before the first.
  struct Previous {
    Ring<kBuffers> ring = kBeforeFirst;
    int slot = -1, block = 0;

    __device__ __forceinline__ void advance(const Block& at) {
      ring.advance();
      slot = at.slot;
      block = at.block;
    }
  };

  // ---- dQ: both roles, a chunk of its columns each ----

  // Four chunks of columns: CTA r has 2 r and 2 r + 1, one a role. Three: its first role has 2 r,
  // and the second roles half of chunk 1 each. first_chunk_of_dq(): of the two whose columns of the
  // other's K it loads.
  static __device__ __forceinline__ int first_chunk_of_dq(int rank) {
    return kSharesChunk ? rank : 2 * rank;
  }

  template <int kRole>
  struct PartOfDq {
    static constexpr bool kHalf = kSharesChunk && kRole == 1;
    static constexpr int kColumns = kHalf ? kChunkColumns / 2 : kChunkColumns;

    const int rank;
    float* const sums;  // of this thread; null: no dq
    const Order turns;
    int first_lo = 0, first_hi = 0;  // blocks that this tile is the first to add to

    __device__ __forceinline__ PartOfDq(const BackwardParams& a, const KeyTile& tile,
                                        const Shared shared, int rank)
        : rank(rank),
          sums(a.dq_sums ? a.dq_sums + chunk() * kPartOfDq + half() * kColumns / 2 * kWarpgroup +
                               4 * (threadIdx.x % kWarpgroup)
                         : nullptr),
          turns(shared.turns(rank)) {
      if constexpr (kInTurn<Row> && !kLeavesOut) {
        const int2 first = Order::first_of(tile);
        first_lo = uniform_register(first.x), first_hi = uniform_register(first.y);
      }
    }
    __device__ __forceinline__ int chunk() const {
      return kSharesChunk && kRole == 1 ? 1 : 2 * rank + kRole;
    }
    __device__ __forceinline__ int half() const { return kHalf ? rank : 0; }

    __device__ __forceinline__ void issue(const Shared shared, int buffer,
                                          float (&dQ)[kColumns / 2]) const {
      const uint64_t ds = GradientTile::mn_major(shared.ds(buffer));
      const uint32_t before = half() * kColumns * sizeof(Element);
      const uint64_t mine = KTile::mn_major(shared.k() + chunk() * KTile::kChunkBytes + before);
      const uint64_t other = OtherTile::mn_major(
          shared.k_other() + (chunk() - first_chunk_of_dq(rank)) * OtherTile::kChunkBytes + before);
      constexpr int kSteps = kKeys / kStepK;
      pin(dQ);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        Wgmma<Element, kColumns>::template ss<kMajorMN, kMajorMN>(
            dQ, ds + GradientTile::mn_major_step(rank * kSteps + i), mine + KTile::mn_major_step(i),
            i > 0);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        Wgmma<Element, kColumns>::template ss<kMajorMN, kMajorMN>(
            dQ, ds + GradientTile::mn_major_step((1 - rank) * kSteps + i),
            other + OtherTile::mn_major_step(i), 1);
      }
      wgmma_commit();
    }
    // Adds block after block; slot < 0: before the first. ring: of the block's dS.
    __device__ __forceinline__ void add(const Ring<kBuffers>& ring, int slot, int block,
                                        const float (&dQ)[kColumns / 2]) const {
      if constexpr (kInTurn<Row>) turns.wait(ring, slot >= 0);
      if (sums && slot >= 0) add_in_turn(ring, slot, block, dQ);
      if constexpr (kInTurn<Row>) turns.done(ring, slot >= 0);
    }
    // The same when it is the tile's turn.
    __device__ __forceinline__ void add_in_turn(const Ring<kBuffers>& ring, int slot, int block,
                                                const float (&dQ)[kColumns / 2]) const {
      bool stores = block >= first_lo && block < first_hi;
      if constexpr (kInTurn<Row> && kLeavesOut) stores = turns.is_first(ring);
      float* part = sums + int64_t{slot} * kBlockOfDq;
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        float* const to = part + 4 * kWarpgroup * i;
        if constexpr (kInTurn<Row>) {
          store_or_add_to_global(stores, to, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2],
                                 dQ[4 * i + 3]);
        } else {
          add_to_global(to, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
        }
      }
    }
    // Waits for dQ of `previous`, issued last, and for the product before it, which made `sum` and
    // after which a stage is free; adds dQ.
    template <int kCount>
    __device__ __forceinline__ void add_previous(const Shared shared, const Previous& previous,
                                                 int lane, uint32_t stage_is_free,
                                                 float (&sum)[kCount],
                                                 float (&dQ)[kColumns / 2]) const {
      wgmma_wait<1>();
      pin(sum);
      if (lane == 0) mbarrier_arrive(stage_is_free);
      wgmma_wait<0>();
      pin(dQ);
      if (lane == 0 && previous.slot >= 0) release(shared.ds_barriers(), previous.ring.stage);
      add(previous.ring, previous.slot, previous.block, dQ);
    }
    // Adds the last block.
    __device__ __forceinline__ void finish(const Shared shared, const Previous& previous) const {
      float dQ[kColumns / 2];
      shared.ds_barriers().wait(previous.ring);
      issue(shared, previous.ring.stage, dQ);
      wgmma_wait<0>();
      pin(dQ);
      add(previous.ring, previous.slot, previous.block, dQ);
    }
  };

  // ---- the two roles ----

  // Walks the blocks of every query head, when their Q has arrived: step(block).
  template <typename Step>
  static __device__ __forceinline__ void for_each_block(const BackwardParams& a,
                                                        const KeyTile& tile, const Shared shared,
                                                        Ring<kQStages>& q_ring, const Step& step) {
    const int clean_begin = uniform_register(tile.clean_begin),
              clean_end = uniform_register(tile.clean_end);
    const int group = a.problem.group;
    const int first_head = uniform_register(tile.kv_head) * group;
    int slot = first_head * a.slots + uniform_register(tile.first_slot);
    const auto q_barriers = shared.q_barriers();
    if constexpr (kRich) {
#pragma unroll 1
      while (true) {
        q_barriers.wait(q_ring);
        const StagedBlock staged = StagedBlock::load(shared.block(q_ring.stage));
        if (staged.member < 0) break;
        const int block = staged.block_and_mask >> 2;
        step(Block{first_head + staged.member, block, slot + staged.member * a.slots + block,
                   block < clean_begin || block >= clean_end, staged.block_and_mask & 3});
        q_ring.advance();
      }
    } else {
      const int begin = uniform_register(tile.begin), end = uniform_register(tile.end);
      const int2 walk = walk_of(tile);
      const int first = uniform_register(walk.x),
                next = kInTurn<Row> ? uniform_register(walk.y) : 1;
#pragma unroll 1
      for (int member = 0; member < group; ++member, slot += a.slots) {
#pragma unroll 1
        for (int i = begin, block = first; i < end; ++i, block += next) {
          q_barriers.wait(q_ring);
          step(Block{0, block, slot + block, block < clean_begin || block >= clean_end, 0});
          q_ring.advance();
        }
      }
    }
  }

  // The place at which a thread of one role leaves four words of weights, of two groups of
  // accumulators, for the same thread of the other. weights: of the warp.
  static __device__ __forceinline__ uint32_t weights_of(uint32_t weights, int i) {
    return weights + (i * kWarp + threadIdx.x % kWarp) * 16;
  }

  static __device__ __forceinline__ void scores(const BackwardParams& a, const KeyTile& tile,
                                                const Shared shared, int rank) {
    const Params& p = a.problem;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp, quad = lane % 4;
    const int warp = thread / kWarp, warp_row = rank * kKeys + warp * 16;  // of the pair's tile
    const int key = tile.key0 + warp_row + lane / 4;                       // and key + 8
    const auto q_barriers = shared.q_barriers();
    const auto grad_o_barriers = shared.grad_o_barriers();
    const auto weight_barriers = shared.weight_barriers();
    const auto ds_barriers = shared.ds_barriers();
    PartOfDq<0> part(a, tile, shared, rank);
    const float c = log2_scale(p);
    const uint64_t k = KTile::k_major(shared.k());
    const uint32_t weights = shared.weights(warp);

    float dV[kTile.dv / 2], dQ[PartOfDq<0>::kColumns / 2];
#pragma unroll
    for (float& x : dV) x = 0;
    Ring<kQStages> q_ring;
    Ring<kGradOStages> grad_o_ring;
    Ring<1> weight_ring;
    Previous previous;
    Features features(a, tile, tile.key0 + warp_row);
    int head = -1;
    if (tile.begin < tile.end) mbarrier_wait(shared.kv_barrier(), 0);

    for_each_block(a, tile, shared, q_ring, [&](const Block& at) {
      float S[kTileM / 2];
      uint32_t P[kTileM / 4], W[kTileM / 4];  // what dV takes, and what dS is made of
      const uint64_t q = QTile::k_major(shared.q(q_ring.stage));
      issue_scores<Element, KTile, QTile, kTile.dqk>(S, k, q);
      const uint32_t lse2 = shared.lse2(q_ring.stage) + 8 * quad;
      if constexpr (kRich) {
        if (head != at.head) features.start_head(head = at.head);
        features.look(at.block, at.cut, at.mask, shared.mask(q_ring.stage) + warp * kWarp * 4, 0,
                      shared.span(warp_row + lane / 4));
        mbarrier_wait(weight_barriers.empty(0), weight_ring.phase ^ 1);
        if (features.stages_bias()) features.stage_bias(at.block, weights, 0);
      }
      wgmma_wait<0>();
      pin(S);

      if constexpr (kRich) {
        features.softmax_apart(at.block, weights, 0, lse2, S, P, W);
        if constexpr (kFeatures & kDropout) {
          store_shared_word(shared.kept(thread), features.kept_bits());
        }
      } else {
        exponentials<kTileM>(c, PairsOfQueries{lse2}, S);
        if (at.cut) mask_band<kTileM>(tile, key, at.block, S);
#pragma unroll
        for (int i = 0; i < kTileM / 4; ++i) W[i] = P[i] = pack<Element>(S[2 * i], S[2 * i + 1]);
        mbarrier_wait(weight_barriers.empty(0), weight_ring.phase ^ 1);
      }
#pragma unroll
      for (int i = 0; i < kTileM / 16; ++i) {
        store_shared(weights_of(weights, i),
                     uint4{W[4 * i], W[4 * i + 1], W[4 * i + 2], W[4 * i + 3]});
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
      ds_barriers.wait(previous.ring);
      part.issue(shared, previous.ring.stage, dQ);
      part.add_previous(shared, previous, lane, grad_o_barriers.empty(grad_o_ring.stage), dV, dQ);
      previous.advance(at);
      grad_o_ring.advance();
      weight_ring.advance();
    });
    part.finish(shared, previous);
    store_gradient<Element>(p, TESSERA_DV, tile, key, 1.f, p.dv, dV);
  }

  // dS = weight (keep dP - delta). weights: of the warp; kept: bit e of dP[e]; delta: that of the
  // thread's first two queries.
  static __device__ __forceinline__ void differentiate(uint32_t weights,
                                                       [[maybe_unused]] uint32_t kept,
                                                       uint32_t delta, float (&dP)[kTileM / 2],
                                                       uint32_t (&dS)[kTileM / 4]) {
#pragma unroll
    for (int i = 0; i < kTileM / 16; ++i) {
      const uint4 of_pair = load_shared_words(weights_of(weights, i));
      const uint32_t W[4] = {of_pair.x, of_pair.y, of_pair.z, of_pair.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 of_query = load_shared_pair(delta + 32 * (2 * i + j / 2));
        const float2 w = unpack<Element>(W[j]);
        const int e = 8 * i + 2 * j;
        if constexpr (kFeatures & kDropout) {
          dP[e] = kept >> e & 1 ? dP[e] : 0.f;
          dP[e + 1] = kept >> (e + 1) & 1 ? dP[e + 1] : 0.f;
        }
        dS[e / 2] = pack<Element>(w.x * (dP[e] - of_query.x), w.y * (dP[e + 1] - of_query.y));
      }
    }
  }

  static __device__ __forceinline__ void gradients(const BackwardParams& a, const KeyTile& tile,
                                                   const Shared shared, int rank) {
    const Params& p = a.problem;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp, quad = lane % 4;
    const int warp = thread / kWarp, warp_row = rank * kKeys + warp * 16;  // of the pair's tile
    const int key = tile.key0 + warp_row + lane / 4;                       // and key + 8
    const auto q_barriers = shared.q_barriers();
    const auto grad_o_barriers = shared.grad_o_barriers();
    const auto weight_barriers = shared.weight_barriers();
    const auto ds_barriers = shared.ds_barriers();
    PartOfDq<1> part(a, tile, shared, rank);
    const uint32_t ds_row = GradientTile::unit(0, warp_row + lane % 16, lane / 16);
    const uint64_t v = VTile::k_major(shared.v());
    const uint32_t weights = shared.weights(warp);

    float dK[kTile.dqk / 2], dQ[PartOfDq<1>::kColumns / 2];
#pragma unroll
    for (float& x : dK) x = 0;
    Ring<kQStages> q_ring;
    Ring<kGradOStages> grad_o_ring;
    Ring<1> weight_ring;
    Ring<kBuffers> ds_ring;
    Previous previous;
    if (tile.begin < tile.end) mbarrier_wait(shared.kv_barrier(), 0);

    for_each_block(a, tile, shared, q_ring, [&](const Block& at) {
      float dP[kTileM / 2];
      uint32_t dS[kTileM / 4];
      grad_o_barriers.wait(grad_o_ring);
      const uint64_t grad_o = GradOTile::k_major(shared.grad_o(grad_o_ring.stage));
      issue_scores<Element, VTile, GradOTile, kTile.dv>(dP, v, grad_o);
      wgmma_wait<0>();
      pin(dP);

      weight_barriers.wait(weight_ring);
      const uint32_t delta = shared.delta(grad_o_ring.stage) + 8 * quad;
      uint32_t kept = ~0u;
      if constexpr (kFeatures & kDropout) kept = load_shared_word(shared.kept(thread));
      differentiate(weights, kept, delta, dP, dS);
      mbarrier_wait(ds_barriers.empty(ds_ring.stage), ds_ring.phase ^ 1);
      const uint32_t ds = shared.ds(ds_ring.stage);
#pragma unroll
      for (int i = 0; i < kTileM / kStepK; ++i) {  // unit 2 i + lane / 16 of the row
        stmatrix_x4((ds + ds_row) ^ i << 5, dS + 4 * i);
      }
      // Behind the stores of dS, which need all that has been loaded: an arrival may overtake loads
      // in flight, which would then read what the other role or TMA writes next.
      __syncwarp();
      if (lane == 0) {
        weight_barriers.release(weight_ring);
        mbarrier_arrive(grad_o_barriers.empty(grad_o_ring.stage));
      }
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
        send(shared, ds_barriers.full(ds_ring.stage), ds + warp_row * kChunkRowBytes, thread == 0,
             1 - rank);
      }
      const uint64_t q = QTile::mn_major(shared.q(q_ring.stage));
      issue_sum<Element, QTile, kTileM / kStepK>(dK, dS, q);
      ds_barriers.wait(previous.ring);
      part.issue(shared, previous.ring.stage, dQ);
      part.add_previous(shared, previous, lane, q_barriers.empty(q_ring.stage), dK, dQ);
      previous.advance(at);
      grad_o_ring.advance();
      weight_ring.advance();
      ds_ring.advance();
    });
    part.finish(shared, previous);
    store_gradient<Element>(p, TESSERA_DK, tile, key, p.softmax_scale, p.dqk, dK);
  }

  // Says here that a warp's rows of dS are there, and copies them to the other CTA. Called by one
  // lane. expects: it also announces the bytes that come from there, for all warps.
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
};

template <typename Element, typename Row>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(BackwardTile::kThreads, 1)
    backward_pair(const __grid_constant__ BackwardParams a) {
  using Kernel = BackwardPair<Element, Row>;
  extern __shared__ __align__(1024) uint8_t storage[];
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  const int warpgroup = uniform_register(threadIdx.x / kWarpgroup), rank = blockIdx.x % 2;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&a.q, &a.k, &a.v, &a.grad_o}) tma_prefetch(map);
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
  if (threadIdx.x == kWarp) {
    if (!kInTurn<Row> && a.ordered_slots > 0) wait_for_predecessors();
    tile = Kernel::Schedule::template decode<!kInTurn<Row>>(a, index);
  }
  cluster_sync();
  launch_dependents();
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    if (threadIdx.x < (Kernel::kLeavesOut ? kWarp : 1)) {
      PairLoader<Kernel>(a, tile, shared).run(in_shared.spans);
    }
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
