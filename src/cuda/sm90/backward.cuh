// SPDX-License-Identifier: Apache-2.0
// Attention backward on Hopper: dQ, dK and dV in one pass over the scores, five products.
//
//   S^T = K Q^T       dP^T = V dO^T       P^T = exp2(c S^T - lse2)       dS^T = P^T (dP^T - delta)
//   dV += P^T dO      dK += dS^T Q        dQ = sum over tiles of dS K
//
// Everything is transposed, so that a thread's P and dS are the A operands of dV and dK as they lie
// in registers. A CTA owns tile_n = 128 keys of one key head and walks the blocks of tile_m queries
// that see them, for every query head of the group: dK and dV stay in registers, GQA needs no
// second sum.
//
//   warpgroup 0     producer  one thread: Q, lse2, dO, delta of each block by TMA
//   warpgroup 1, 2  owners    S, dP -> P, dS -> dV, dK of 64 keys each, and half of dQ
//
// dQ needs the dS of both owners, through shared memory, and is made one block late: an owner
// computes the dQ of block i - 1 together with its dV and dK of block i. So the owners hardly wait
// for each other, and while one computes exponentials the products of the other keep the tensor
// cores busy. dQ is added to fp32 sums in global memory while dV and dK run.
//
//   barrier        arrivals          says
//   kv             1 + bytes         K and V have arrived, where that is not said with block 0
//   q, grad_o [s]  1 + bytes         a block and its lse2 (delta) have arrived; K (V) with block 0
//   ds.full[b]     8 (a warp each)   both owners have written their rows of dS(i), and so are done
//                                    with block i - 1: its stage takes block i + 2
//   ds.empty[b]    8                 both have used them
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/sm90/backward_blocks.cuh"
#include "cuda/sm90/backward_dbias.cuh"
#include "cuda/sm90/backward_edges.cuh"
#include "cuda/sm90/backward_features.cuh"
#include "cuda/sm90/backward_kernels.h"
#include "cuda/sm90/backward_lean.cuh"
#include "cuda/sm90/backward_products.cuh"
#include "cuda/sm90/backward_schedule.cuh"
#include "cuda/sm90/backward_sections.cuh"
#include "cuda/sm90/backward_segments.cuh"
#include "cuda/sm90/backward_shared.cuh"
#include "cuda/sm90/backward_turns.cuh"
#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/output.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/smem_tile.cuh"

namespace tessera::cuda::sm90 {

// Row: one row of the table in backward_tiles.def, as a type with the constants kTile and
// kFeatures.
template <typename Element, typename Row>
struct Backward {
  static constexpr BackwardTile kTile = Row::kTile;
  static constexpr int kFeatures = Row::kFeatures;
  // dK and dV leave by TMA, and dS is k-major for the products of dQ.
  static constexpr bool kLean = kIsLean<Row>;
  static constexpr bool kShapes = kFeatures & kEverything, kRich = kShapes && !kLean,
                        kOfSegments = kIsOfSegments<Row>,
                        kLeavesOut = kOfSegments || kFeatures & kMasks, kPassesTurns = kInTurn<Row>;
  // The producer says of each stage which block it holds, and how that is masked.
  static constexpr bool kIsTold = kRich || kOfSegments;
  static constexpr int kStagedBits = kOfSegments ? int{kRuleBits} : 2;
  static constexpr int kTileM = kTile.tile_m, kTileN = kTile.tile_n();
  static constexpr int kStages = 3, kGradOStages = kTile.grad_o_stages;
  static constexpr int kOwners = BackwardTile::kOwners, kOwnerWarps = 4 * kOwners;
  static constexpr int kGradientBuffers = kTile.ds_buffers;
  // dK and dV leave no room for S beside dP: P is rounded before dP is made, and dQ follows dV.
  static constexpr bool kWide = kTile.dqk > 128;
  // The fence for dS behind the issue of dQ, as in the lean step: others are slower with it.
  static constexpr bool kFencesLate = (kFeatures & kEverything) == kDropout;
  // The thread that finds the tile asks for K, V and the first block at once. In a fixed order that
  // was slower: a ticket comes late as it is. With features registers are short for it.
  static constexpr bool kStartsEarly = !kIsTold && !kInTurn<Row>;
  // Sums are cleared and converted by tiles (backward_sections.cuh).
  static constexpr bool kInSections = is_plain(kTile, kFeatures),
                        kConverts = kInSections && tiles_convert(kTile);
  // k16 steps of K that an owner holds in registers: as many as there are.
  static constexpr int kKeySteps = kShapes              ? 0
                                   : kTile.dqk == 96    ? 6
                                   : kTile.dqk == 128   ? 5
                                   : kTile.tile_m == 64 ? 4
                                                        : 2;
  // What the roles claim is what the CTA was launched with: 3 x 168 registers.
  static constexpr int kProducerRegisters = 24, kOwnerRegisters = 240;
  // An owner makes 64 queries x 64 or 32 columns of a block of dQ: half of its rows or half of its
  // columns. Element 4 i + j of a thread's accumulators lies at 4 (128 i + thread) + j of its part:
  // warps add whole lines.
  static constexpr bool kSplitsRows = kTileM == 128;
  using KTile = SmemTile<kTileN, kTile.dqk>;
  // All heads of a group pass at one block of queries, and not one after the other: what the tiles
  // of a key head read and add to then stays in L2, large as a group is.
  static constexpr bool kHeadsInner = !kIsTold && !kShapes;
  static constexpr int kColumnsOfDq = kTile.columns_of_dq(), kPartsOfDq = kTile.parts_of_dq();
  static constexpr int kPartOfDq = 64 * kColumnsOfDq, kBlockOfDq = kTile.sums_of_dq();
  // Of three chunks of 64 columns an owner makes one, and half of the middle one.
  static constexpr int kHalfColumns = 32;
  // From the columns of K that dQ of one owner is made of to those of the other, in bytes.
  static constexpr uint32_t kOtherColumns = kWide                ? 2 * KTile::kChunkBytes
                                            : kColumnsOfDq == 64 ? KTile::kChunkBytes
                                                                 : kColumnsOfDq * 2;

  static constexpr bool kWaitsForEmpty = kGradientBuffers < 3;
  using Schedule = KeySchedule<kTileM, kTileN>;
  using QTile = SmemTile<kTileM, kTile.dqk>;
  using GradOTile = SmemTile<kTileM, kTile.dv>;
  using VTile = SmemTile<kTileN, kTile.dv>;
  using GradientTile =  // dS or dS^T
      std::conditional_t<kLean, SmemTile<kTileM, kTileN>, SmemTile<kTileN, kTileM>>;
  using Blocks = QueryBlocks<kTileM, kTileN, kOfSegments>;
  using SegmentsOf = Segments<kTileM, kTileN>;
  struct Spans {
    KeyInterval spans[kLeavesOut ? kTileN : 1];  // of queries, of each key; see QueryBlocks::span
  };
  using MasksOfTile = std::conditional_t<kOfSegments, typename SegmentsOf::OfTile, Spans>;
  using Features = BackwardFeatures<Element, kTileM, kFeatures>;
  static constexpr int kPieces = kTileM / kMaskPiece;                   // of a packed mask
  static constexpr int kMaskBytes = kPieces * kOwnerWarps * kWarp * 4;  // of a block
  using Order =
      Turns<kTileM, kTileN, kOwnerWarps, kLeavesOut, kHeadsInner, kGradientBuffers, kOfSegments>;

  // What a row does not do costs nothing.
  struct Nothing {
    template <typename... Args>
    __device__ __forceinline__ explicit Nothing(const Args&...) {}
  };
  static constexpr bool kSendsBias = kSumsBias<Row>;
  using BiasSums = std::conditional_t<kSumsBias<Row>, BiasGradient<Element>, Nothing>;
  static_assert(!Features::kFetchesBias || kGradientBuffers == 3);
  static_assert(!kSumsBias<Row> || kTileM == 64);

  struct alignas(1024) SharedStorage {
    uint8_t k[KTile::kBytes], v[VTile::kBytes];
    uint8_t q[kStages][QTile::kBytes];
    uint8_t grad_o[kGradOStages][GradOTile::kBytes];
    uint8_t ds[kGradientBuffers][GradientTile::kBytes];
    uint8_t bias_sums[kSumsBias<Row> ? kOwners : 1][kSumsBias<Row> ? 64 * kTileM * 2 : 16];
    float lse2[kStages][kTileM], delta[kGradOStages][kTileM];
    uint64_t kv_barrier, q_barriers[kStages], grad_o_barriers[kGradOStages];
    uint64_t ds_barriers[2 * kGradientBuffers];
    uint64_t added_barrier;  // both owners have added all of dQ
    uint64_t sums_barrier;   // of the head that this tile converts a part of are complete
    uint64_t bias_barriers[kOwners][2];        // full and empty, see backward_dbias.cuh
    uint64_t turn_barriers[Order::kBarriers];  // deterministic: see backward_turns.cuh
    int turn_stored[Order::kRing];
    int2 blocks[kStages];  // told: the StagedBlock of each
    alignas(16) uint8_t mask[kStages][kLeavesOut && !kOfSegments ? kMaskBytes : 16];  // packed
    MasksOfTile masks;
    KeyTile tile;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
  static_assert(kSplitsRows ? kTile.dqk == 64 : kTileM == 64 && kTile.dqk <= 192);
  static_assert(kWide ? kTile.dqk == 192 && !kRich : kGradOStages == kStages);
  static_assert(kGradOStages == kStages || kGradOStages == kStages - 1);
  static_assert(kTile.dqk % 32 == 0 && kTile.dv % 32 == 0);

  using Shared = BackwardShared<Backward>;

  // The first block that a tile walks, and the step to the next.
  static __device__ __forceinline__ int2 walk_of(const KeyTile& tile) {
    if constexpr (kInTurn<Row>) return Order::walk_of(tile);
    if constexpr (kLeavesOut) return {tile.begin, 1};
    return tile.descends ? int2{tile.end - 1, -1} : int2{tile.begin, 1};
  }
  // ---- owner: dK and dV of 64 keys ----

  using LeanOf = std::conditional_t<kLean, LeanOperands<Element, Backward>, Nothing>;
  static __device__ __forceinline__ void owner(const BackwardParams& a, const KeyTile& tile,
                                               const Shared shared, const int w) {
    const Params& p = a.problem;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp, quad = lane % 4;
    const int warp_row = w * 64 + thread / kWarp * 16;  // of the tile
    const int key = tile.key0 + warp_row + lane / 4;    // and key + 8
    const auto ds_barriers = shared.ds_barriers();
    const int begin = uniform_register(tile.begin), end = uniform_register(tile.end);
    const int walk_first = uniform_register(walk_of(tile).x),
              walk_step = uniform_register(walk_of(tile).y);
    const int clean_begin = uniform_register(tile.clean_begin),
              clean_end = uniform_register(tile.clean_end);
    const uint32_t ds_row =
        kLean ? GradientTile::unit(0, lane / 16 * 8 + lane % 8, warp_row / 8 + lane / 8 % 2)
              : GradientTile::unit(0, warp_row + lane % 16, lane / 16);
    const float c = log2_scale(p);
    const uint64_t k = KTile::k_major(shared.k() + w * 64 * kChunkRowBytes);
    const uint64_t v = VTile::k_major(shared.v() + w * 64 * kChunkRowBytes);
    [[maybe_unused]] LeanOf operands(shared, w);

    float dK[kTile.dqk / 2], dV[kTile.dv / 2];
#pragma unroll
    for (float& x : dK) x = 0;
#pragma unroll
    for (float& x : dV) x = 0;
    Ring<kStages> ring;
    Ring<kGradOStages> own_ring;
    const auto& grad_o_ring = own_or_shared(ring, own_ring);
    // Before the first block comes a phase that nobody waits for.
    Ring<kGradientBuffers> ds_ring, previous_ring{kGradientBuffers - 1, 1};
    float* const sums =
        a.dq_sums ? a.dq_sums + (kWide ? 2 * w : w) * kPartOfDq + 4 * thread : nullptr;
    int previous_slot = -1, previous_block = 0;  // of the block whose dQ is next
    const auto turns = shared.turns();
    const int2 first = kInTurn<Row> && !kLeavesOut ? Order::first_of(tile) : int2{0, 0};
    const int first_lo = uniform_register(first.x), first_hi = uniform_register(first.y);
    const auto add = [&](float* part, const auto& dQ) {
      bool stores = previous_block >= first_lo && previous_block < first_hi;
      if constexpr (kLeavesOut && kInTurn<Row>) stores = turns.is_first(previous_ring);
      add_dq<kInTurn<Row>, kTile.dqk>(part + int64_t{previous_slot} * kBlockOfDq, w, dQ, stores);
    };
    const auto finish_turn = [&] {
      if constexpr (kInTurn<Row>) turns.done(previous_ring, previous_slot >= 0);
    };
    const auto add_previous = [&](const float(&dQ)[kColumnsOfDq / 2]) {
      if constexpr (kInTurn<Row>) turns.wait(previous_ring, previous_slot >= 0);
      if (sums && previous_slot >= 0) add(sums, dQ);
      if constexpr (!kWide) finish_turn();
    };
    const auto add_half = [&](const float(&dQ)[kHalfColumns / 2]) {
      if (sums && previous_slot >= 0) {
        add(sums + (1 - 2 * w) * kPartOfDq + w * kHalfColumns / 2 * kWarpgroup, dQ);
      }
      finish_turn();
    };
    [[maybe_unused]] BiasSums bias_sums(shared.bias_staging().of(w));
    const auto store_ds = [&](const uint32_t(&dS)[kTileM / 4]) {
      const uint32_t ds = shared.ds(ds_ring.stage) + ds_row;
#pragma unroll
      for (int i = 0; i < kTileM / kStepK; ++i) {
        if constexpr (kLean) {
          stmatrix_x4_transposed(ds + i * kStepK * kChunkRowBytes, dS + 4 * i);
        } else {  // unit 2 i + lane / 16 of the row
          stmatrix_x4((ds + i / 4 * GradientTile::kChunkBytes) ^ i % 4 << 5, dS + 4 * i);
        }
      }
    };
    const auto say_ds = [&] {
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(ds_barriers.full(ds_ring.stage));
        if constexpr (kSumsBias<Row>) bias_sums.say_staged();
      }
    };
    const auto write_ds = [&](const uint32_t(&dS)[kTileM / 4]) {
      mbarrier_wait(ds_barriers.empty(ds_ring.stage), ds_ring.phase ^ 1);
      store_ds(dS);
      say_ds();
    };
    // S becomes P, of the stage, without features.
    const auto weigh = [&](int block, bool masked, float(&S)[kTileM / 2]) {
      exponentials<kTileM>(c, PairsOfQueries{shared.lse2(ring.stage) + 8 * quad}, S);
      if (masked) hide<kTileM>(tile, key, block, S);
    };
    const auto advance = [&](int block, int slot) {
      previous_slot = slot;
      previous_block = block;
      previous_ring = ds_ring;
      ds_ring.advance();
      ring.advance();
      if constexpr (kGradOStages != kStages) own_ring.advance();
    };
    Features features(a, tile, tile.key0 + warp_row);
    constexpr uint32_t kPitch = GradientTile::kChunkBytes;  // between pieces of a staged bias

    int head = tile.kv_head * p.group;
    // The bias of the block after `block`, to where its dS will be.
    const auto fetch_bias = [&](int block, const Ring<kGradientBuffers>& next) {
      mbarrier_wait(ds_barriers.empty(next.stage), next.phase ^ 1);
      const bool last = block == walk_first + (end - begin - 1) * walk_step;
      if (last && head + 1 == (tile.kv_head + 1) * p.group) return;
      features.fetch_bias(head + last, last ? walk_first : block + walk_step,
                          shared.ds(next.stage) + warp_row * kChunkRowBytes, kPitch);
    };

    // Q of the stage has arrived. cut: the band hides some score; mask: of BlockMask.
    const auto rich_step = [&](int block, int slot, bool cut, int mask) {
      float S[kTileM / 2], dP[kTileM / 2], dQ[kColumnsOfDq / 2];
      uint32_t P[kTileM / 4], dS[kTileM / 4];
      const uint64_t q = QTile::k_major(shared.q(ring.stage));
      issue_scores<Element, KTile, QTile, kTile.dqk>(S, k, q);
      mbarrier_wait(shared.grad_o_barrier(grad_o_ring.stage), grad_o_ring.phase);
      const uint64_t grad_o = GradOTile::k_major(shared.grad_o(grad_o_ring.stage));
      issue_scores<Element, VTile, GradOTile, kTile.dv>(dP, v, grad_o);
      const uint32_t lse2 = shared.lse2(ring.stage) + 8 * quad,
                     delta = shared.delta(grad_o_ring.stage) + 8 * quad;
      const uint32_t warp_ds = shared.ds(ds_ring.stage) + warp_row * kChunkRowBytes;
      features.look(block, cut, mask, shared.mask(ring.stage) + warp_row / 16 * kWarp * 4,
                    kMaskBytes / kPieces, shared.spans() + 8 * (warp_row + lane / 4));
      if constexpr (!Features::kFetchesBias) {
        mbarrier_wait(ds_barriers.empty(ds_ring.stage), ds_ring.phase ^ 1);
        if (features.stages_bias()) features.stage_bias(block, warp_ds, kPitch);
      }
      wgmma_wait<1>();
      pin(S);

      features.weigh(block, warp_ds, kPitch, lse2, S, P);
      if constexpr (Features::kFetchesBias) fetch_bias(block, ds_ring.next());
      wgmma_wait<0>();
      pin(dP);
      pin(S);  // P is not packed earlier than this: it would take registers of its own
      features.differentiate(block, warp_ds, kPitch, lse2, delta, S, dP);
#pragma unroll
      for (int g = 0; g < kTileM / 8; ++g) {
        const float* s = S + 4 * g;
        const float* dp = dP + 4 * g;
        if constexpr (!Features::kWeighsAll) {
          P[2 * g] = pack<Element>(s[0], s[1]), P[2 * g + 1] = pack<Element>(s[2], s[3]);
        }
        dS[2 * g] = pack<Element>(dp[0], dp[1]), dS[2 * g + 1] = pack<Element>(dp[2], dp[3]);
      }

      if constexpr (kSumsBias<Row>) bias_sums.stage(dS);
      store_ds(dS);
      if constexpr (!kFencesLate) say_ds();
      // The first time there is no block before: what comes out is thrown away.
      ds_barriers.wait(previous_ring);
      issue_dq(shared, previous_ring.stage, w, dQ);
      if constexpr (kFencesLate) say_ds();
      const uint64_t grad_o_rows = GradOTile::mn_major(shared.grad_o(grad_o_ring.stage));
      issue_sum<Element, GradOTile, kTileM / kStepK>(dV, P, grad_o_rows);
      const uint64_t q_rows = QTile::mn_major(shared.q(ring.stage));
      issue_sum<Element, QTile, kTileM / kStepK>(dK, dS, q_rows);
      wgmma_wait<2>();
      pin(dQ);
      if (lane == 0 && previous_slot >= 0) ds_barriers.release(previous_ring);
      add_previous(dQ);
      wgmma_wait<0>();
      pin(dV);
      pin(dK);
      advance(block, slot);
    };
    // dQ of the block before has been made. The first time there is none, and what came out is
    // thrown away.
    const auto finish_previous = [&](float(&dQ)[kColumnsOfDq / 2]) {
      pin(dQ);
      if (kWaitsForEmpty && lane == 0 && previous_slot >= 0) ds_barriers.release(previous_ring);
      add_previous(dQ);
    };
    // With three buffers of dS the next one is free when the other owner has written dS(i - 1): it
    // is done with block i - 2, and so with dQ(i - 3).
    const auto acquire_ds = [&] {
      if (kWaitsForEmpty) mbarrier_wait(ds_barriers.empty(ds_ring.stage), ds_ring.phase ^ 1);
      ds_barriers.wait(previous_ring);
    };
    [[maybe_unused]] const auto lean_step = [&](int block, int slot, bool masked,
                                                [[maybe_unused]] bool spanned = false) {
      if constexpr (kLean) {
        float S[kTileM / 2], dP[kTileM / 2], dQ[kColumnsOfDq / 2];
        uint32_t P[kTileM / 4], dS[kTileM / 4];
        Statistics<kTileM> lse2(shared.lse2(ring.stage)), delta(shared.delta(ring.stage));
        operands.issue_s(ring.stage, S);
        lse2.load_first();
        mbarrier_wait(shared.grad_o_barrier(ring.stage), ring.phase);
        operands.issue_dp(ring.stage, dP);
        if constexpr (kShapes) features.look(block, masked, 0, 0, 0, 0);
        wgmma_wait<1>();
        pin(S);
        lse2.load_others();
        if constexpr (kShapes) {
          features.weigh_distances(block, lse2, S);
        } else {
          exponentials<kTileM>(c, lse2, S);
        }
        if constexpr (kOfSegments) {
          const uint32_t spans = shared.spans() + 8 * (warp_row + lane / 4);
          if (masked) hide_segments<kTileM>(a, tile, key, block, spanned, spans, S);
        } else if constexpr (!kShapes) {
          if (masked) hide<kTileM>(tile, key, block, S);
        }
        delta.load_first();
        if constexpr (!kSplitsRows) pack_all<Element>(S, P);
        if constexpr (!kWaitsForEmpty) acquire_ds();
        wgmma_wait<0>();
        pin(dP);
        pin(S);
        delta.load_others();
        differentiate<Element, kTileM>(S, delta, dP, dS);
        if constexpr (kSplitsRows) pack_all<Element>(S, P);
        if constexpr (kWaitsForEmpty) acquire_ds();
        store_ds(dS);
        operands.issue_dq(previous_ring.stage, dQ);
        say_ds();  // a fence takes 100 clocks and more: under dQ, which reads older ones
        operands.issue_dv(ring.stage, P, dV);
        operands.issue_dk(ring.stage, dS, dK);
        wgmma_wait<2>();
        finish_previous(dQ);
        wgmma_wait<0>();
        pin(dV);
        pin(dK);
        advance(block, slot);
      }
    };
    // A block that sees none of this owner's keys.
    [[maybe_unused]] const auto hidden_step = [&](int block, int slot) {
      if constexpr (kLean) {
        float dQ[kColumnsOfDq / 2];
        mbarrier_wait(shared.grad_o_barrier(ring.stage), ring.phase);
        acquire_ds();
        store_ds({});
        operands.issue_dq(previous_ring.stage, dQ);
        say_ds();
        wgmma_wait<0>();
        finish_previous(dQ);
        advance(block, slot);
      }
    };
    // The same where registers are short: dV before dS, dQ after both.
    const auto wide_step = [&](int block, int slot, bool masked) {
      float S[kTileM / 2], dP[kTileM / 2];
      uint32_t P[kTileM / 4], dS[kTileM / 4];
      float dQ[kColumnsOfDq / 2], half[kHalfColumns / 2];
      issue_scores<Element, KTile, QTile, kTile.dqk>(S, k, QTile::k_major(shared.q(ring.stage)));
      mbarrier_wait(shared.grad_o_barrier(grad_o_ring.stage), grad_o_ring.phase);
      const uint32_t grad_o = shared.grad_o(grad_o_ring.stage);
      wgmma_wait<0>();
      pin(S);
      weigh(block, masked, S);
#pragma unroll
      for (int i = 0; i < kTileM / 4; ++i) P[i] = pack<Element>(S[2 * i], S[2 * i + 1]);
      issue_scores<Element, VTile, GradOTile, kTile.dv>(dP, v, GradOTile::k_major(grad_o));
      issue_sum<Element, GradOTile, kTileM / kStepK>(dV, P, GradOTile::mn_major(grad_o));
      wgmma_wait<0>();
      pin(dP);
      pin(dV);
      const uint32_t delta = shared.delta(grad_o_ring.stage) + 8 * quad;
#pragma unroll
      for (int g = 0; g < kTileM / 8; ++g) {
        const float2 of_query = load_shared_pair(delta + 32 * g);
        const float* dp = dP + 4 * g;
        const float2 p0 = unpack<Element>(P[2 * g]), p1 = unpack<Element>(P[2 * g + 1]);
        dS[2 * g] = pack<Element>(p0.x * (dp[0] - of_query.x), p0.y * (dp[1] - of_query.y));
        dS[2 * g + 1] = pack<Element>(p1.x * (dp[2] - of_query.x), p1.y * (dp[3] - of_query.y));
      }
      write_ds(dS);
      wgmma_wait<0>();
      pin(dV);
      ds_barriers.wait(previous_ring);
      issue_dq(shared, previous_ring.stage, w, dQ);
      issue_sum<Element, QTile, kTileM / kStepK>(dK, dS, QTile::mn_major(shared.q(ring.stage)));
      wgmma_wait<1>();
      pin(dQ);
      add_previous(dQ);
      issue_half_of_dq(shared, previous_ring.stage, w, half);
      wgmma_wait<0>();
      pin(dK);
      pin(half);
      if (lane == 0 && previous_slot >= 0) ds_barriers.release(previous_ring);
      add_half(half);
      advance(block, slot);
    };

    if (!kStartsEarly && begin < end) mbarrier_wait(shared.kv_barrier(), 0);
    [[maybe_unused]] const auto hold_keys = [&] {
      if constexpr (kLean) {
        if (kStartsEarly && begin < end) mbarrier_wait(shared.q_barrier(0), 0);
        if (begin < end) operands.hold_keys(shared.k(), warp_row);
      }
    };
    const int first_slot =
        uniform_register(tile.kv_head) * p.group * a.slots + uniform_register(tile.first_slot);
    if constexpr (kRich) {
      features.start_head(head);
      if constexpr (Features::kFetchesBias) {
        if (begin < end) {
          features.fetch_bias(head, walk_first, shared.ds(0) + warp_row * kChunkRowBytes, kPitch);
        }
      }
#pragma unroll 1
      while (true) {
        mbarrier_wait(shared.q_barrier(ring.stage), ring.phase);
        const auto [member, block_and_mask] = StagedBlock::load(shared.block(ring.stage));
        if (member < 0) break;
        const int head_of_stage = tile.kv_head * p.group + member;  // heads may be left out
        if (head != head_of_stage) features.start_head(head = head_of_stage);
        const int block = block_and_mask >> 2;
        rich_step(block, first_slot + member * a.slots + block,
                  block < clean_begin || block >= clean_end, block_and_mask & 3);
      }
    } else if constexpr (kOfSegments) {
      hold_keys();
#pragma unroll 1
      while (true) {
        mbarrier_wait(shared.q_barrier(ring.stage), ring.phase);
        const auto [member, staged] = StagedBlock::load(shared.block(ring.stage));
        if (member < 0) break;
        const int block = staged >> kStagedBits, slot = first_slot + member * a.slots + block;
        if (staged & kRuleHidden << w) {
          hidden_step(block, slot);
        } else {
          lean_step(block, slot, staged & kRuleCuts << w, staged & kRuleSpans);
        }
      }
    } else {
      [[maybe_unused]] const OwnBlocks<kTileM> mine(tile, w);
      if constexpr (kShapes) features.start_head(head);
      hold_keys();
      for_each_block<kHeadsInner>(
          uniform_register(p.group), begin, end, walk_first, walk_step, [&](int member, int block) {
            mbarrier_wait(shared.q_barrier(ring.stage), ring.phase);
            const int slot = first_slot + member * a.slots + block;
            const int next = tile.kv_head * p.group + member;
            if (kShapes && head != next) features.start_head(head = next);
            if constexpr (!kLean) {
              wide_step(block, slot, block < clean_begin || block >= clean_end);
            } else if (mine.sees(block)) {
              lean_step(block, slot, mine.cuts(block));
            } else {
              hidden_step(block, slot);
            }
          });
    }
    const int first_key = tile.key0 + warp_row;
    const bool by_tma = kLean && p.tensor[TESSERA_DK].data && p.tensor[TESSERA_DV].data &&
                        rows_by_tma(p, tile, first_key);
    float dQ[kColumnsOfDq / 2];
    ds_barriers.wait(previous_ring);
    issue_dq(shared, previous_ring.stage, w, dQ);
    if (by_tma) {  // in place of this warp's rows of V, which no other reads
      send_gradient<Element, VTile>(&a.grad_v, tile, first_key, 1.f,
                                    shared.v() + warp_row * kChunkRowBytes, dV);
    }
    SumsOfOthers<Element, Backward> others;  // in place of dV
    others.load(a, tile, w, shared.sums_barrier());
    wgmma_wait<0>();
    pin(dQ);
    add_previous(dQ);
    if constexpr (kWide) {
      float half[kHalfColumns / 2];
      issue_half_of_dq(shared, previous_ring.stage, w, half);
      wgmma_wait<0>();
      pin(half);
      add_half(half);
    }
    others.say_added(shared.added_barrier());
    if (by_tma) {
      // The other owner may still read K. The next stage is free: both are done with its block.
      send_gradient<Element, SmemTile<64, kTile.dqk>>(
          &a.grad_k, tile, first_key, p.softmax_scale,
          (w == 0 ? shared.q(ring.stage) : shared.grad_o(ring.stage)) +
              warp_row % 64 * kChunkRowBytes,
          dK);
    } else {
      store_gradient<Element>(p, TESSERA_DK, tile, key, p.softmax_scale, p.dqk, dK);
      store_gradient<Element>(p, TESSERA_DV, tile, key, 1.f, p.dv, dV);
    }
    others.convert(a, tile, w);
    if (by_tma && lane == 0) bulk_wait_read();
  }

  static __device__ __forceinline__ void issue_dq(const Shared shared, int buffer, int w,
                                                  float (&dQ)[kColumnsOfDq / 2]) {
    const uint64_t ds = gradient(shared.ds(buffer), kSplitsRows ? w : 0);
    issue_columns(dQ, ds, KTile::mn_major(shared.k() + (kSplitsRows ? 0 : w * kOtherColumns)));
  }
  // Wide: this owner's half of the middle chunk.
  static __device__ __forceinline__ void issue_half_of_dq(const Shared shared, int buffer, int w,
                                                          float (&dQ)[kHalfColumns / 2]) {
    issue_columns(dQ, gradient(shared.ds(buffer), 0),
                  KTile::mn_major(shared.k() + KTile::kChunkBytes + w * kHalfColumns * 2));
  }
  // 64 queries of dS as the A operand of dQ.
  static __device__ __forceinline__ uint64_t gradient(uint32_t ds, int half) {
    if constexpr (kLean) return GradientTile::k_major(ds + half * 64 * kChunkRowBytes);
    return GradientTile::mn_major(ds + half * GradientTile::kChunkBytes);
  }
  template <int kCount>
  static __device__ __forceinline__ void issue_columns(float (&dQ)[kCount], uint64_t ds,
                                                       uint64_t k) {
    sm90::issue_columns<Element, GradientTile, KTile, kLean ? kMajorK : kMajorMN, kTileN / kStepK>(
        dQ, ds, k);
  }
};

}  // namespace tessera::cuda::sm90
