// SPDX-License-Identifier: Apache-2.0
// A warpgroup of the fused backward kernel that owns 64 keys (backward/fused/shape.cuh). dK and dV
// of its keys stay in registers while the blocks of queries that see them pass by; of each block's
// dQ it makes half, from the dS of both owners.
//
// A block i is one of four steps:
//
//   lean_step    no features, or ALiBi alone: products take from registers what fits there
//   rich_step    features
//   wide_step    192 columns of keys: registers for one fragment of scores at a time
//   hidden_step  no query of the block sees one of this owner's 64 keys
//
// Each writes dS(i) to shared memory and makes dQ(i - 1), which is added to global memory while the
// products of dV(i) and dK(i) run.
//
// An owner is one function, whose steps are lambdas over the registers of all: 240 are just enough,
// and ptxas finds them so. Methods of a class with the same members spilled 556 bytes at 192/128
// and serialised the products (C7512).
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/sm90/backward/edges.cuh"
#include "cuda/sm90/backward/fused/shape.cuh"
#include "cuda/sm90/backward/products.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// What a kernel does not have costs nothing.
struct Nothing {
  template <typename... Args>
  __device__ __forceinline__ explicit Nothing(const Args&...) {}
};

template <typename Element, typename Row>
struct BackwardOwner {
  using Kernel = Backward<Element, Row>;
  using Shared = typename Kernel::Shared;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using QTile = typename Kernel::QTile;
  using GradOTile = typename Kernel::GradOTile;
  using GradientTile = typename Kernel::GradientTile;
  using Order = typename Kernel::Order;
  using Features = typename Kernel::Features;
  static constexpr int kTileM = Kernel::kTileM, kTileN = Kernel::kTileN;
  static constexpr int kDqk = Kernel::kTile.dqk, kDv = Kernel::kTile.dv;
  static constexpr int kStages = Kernel::kStages, kGradOStages = Kernel::kGradOStages,
                       kGradientBuffers = Kernel::kGradientBuffers;
  static constexpr bool kLean = Kernel::kLean, kShapes = Kernel::kShapes, kWide = Kernel::kWide,
                        kSplitsRows = Kernel::kSplitsRows, kWaitsForEmpty = Kernel::kWaitsForEmpty,
                        kOfSegments = Kernel::kOfSegments, kLeavesOut = Kernel::kLeavesOut;
  static constexpr int kColumnsOfDq = Kernel::kColumnsOfDq, kHalfColumns = Kernel::kHalfColumns;
  static constexpr bool kOfFp8 = Kernel::kOfFp8;
  using Operands =
      std::conditional_t<kOfFp8, RoundedOperands<Element, Kernel>,
                         std::conditional_t<kLean, LeanOperands<Element, Kernel>, Nothing>>;
  using BiasSums = std::conditional_t<kSumsBias<Row>, BiasGradient<Element>, Nothing>;

  // w: 0 or 1, which owner of the tile.
  static __device__ __forceinline__ void run(const typename Kernel::Args& a, const KeyTile& tile,
                                             const Shared shared, const int w) {
    const Params& p = a.problem;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp, quad = lane % 4;
    const int warp_row = w * 64 + thread / kWarp * 16;  // of the tile
    const int key = tile.key0 + warp_row + lane / 4;    // and key + 8
    const auto ds_barriers = shared.ds_barriers();
    const int begin = uniform_register(tile.begin), end = uniform_register(tile.end);
    const int walk_first = uniform_register(Kernel::walk_of(tile).x),
              walk_step = uniform_register(Kernel::walk_of(tile).y);
    const int clean_begin = uniform_register(tile.clean_begin),
              clean_end = uniform_register(tile.clean_end);
    const uint32_t ds_row =
        kLean ? GradientTile::unit(0, lane / 16 * 8 + lane % 8, warp_row / 8 + lane / 8 % 2)
              : GradientTile::unit(0, warp_row + lane % 16, lane / 16);
    const float c = log2_scale(p);
    const uint64_t k = KTile::k_major(shared.k() + w * 64 * kChunkRowBytes);
    const uint64_t v = VTile::k_major(shared.v() + w * 64 * kChunkRowBytes);
    [[maybe_unused]] Operands operands(shared, w);

    float dK[kDqk / 2], dV[kDv / 2];
#pragma unroll
    for (float& x : dK) x = 0;
#pragma unroll
    for (float& x : dV) x = 0;
    Ring<kStages> ring;
    Ring<kGradOStages> own_ring;
    const auto& grad_o_ring = own_or_shared(ring, own_ring);
    // A phase that nobody waits for comes before the first block.
    Ring<kGradientBuffers> ds_ring, previous_ring{kGradientBuffers - 1, 1};
    int previous_slot = -1, previous_block = 0;  // of the block whose dQ is next
    const auto advance = [&](int block, int slot) {
      previous_slot = slot;
      previous_block = block;
      previous_ring = ds_ring;
      ds_ring.advance();
      ring.advance();
      if constexpr (kGradOStages != kStages) own_ring.advance();
    };

    // ---- dQ of the block before ----

    float* const sums =
        a.dq_sums ? a.dq_sums + (kWide ? 2 * w : w) * Kernel::kPartOfDq + 4 * thread : nullptr;
    const auto turns = shared.turns();
    const int2 first = kInTurn<Row> && !kLeavesOut ? Order::first_of(tile) : int2{0, 0};
    const int first_lo = uniform_register(first.x), first_hi = uniform_register(first.y);
    const auto accumulate = [&](float* part, const auto& dQ) {
      bool stores = previous_block >= first_lo && previous_block < first_hi;
      if constexpr (kLeavesOut && kInTurn<Row>) stores = turns.is_first(previous_ring);
      add_dq<kInTurn<Row>, kDqk>(part + int64_t{previous_slot} * Kernel::kBlockOfDq, w, dQ, stores);
    };
    const auto finish_turn = [&] {
      if constexpr (kInTurn<Row>) turns.done(previous_ring, previous_slot >= 0);
    };
    const auto accumulate_previous = [&](const float(&dQ)[kColumnsOfDq / 2]) {
      if constexpr (kInTurn<Row>) turns.wait(previous_ring, previous_slot >= 0);
      if (sums && previous_slot >= 0) accumulate(sums, dQ);
      if constexpr (!kWide) finish_turn();
    };
    // Wide: this owner's half of the middle chunk.
    const auto accumulate_half = [&](const float(&dQ)[kHalfColumns / 2]) {
      if (sums && previous_slot >= 0) {
        accumulate(sums + (1 - 2 * w) * Kernel::kPartOfDq + w * kHalfColumns / 2 * kWarpgroup, dQ);
      }
      finish_turn();
    };
    // The first time there is no block before, and what came out is thrown away.
    const auto finish_previous = [&](float(&dQ)[kColumnsOfDq / 2]) {
      pin(dQ);
      if (kWaitsForEmpty && lane == 0 && previous_slot >= 0) ds_barriers.release(previous_ring);
      accumulate_previous(dQ);
    };

    // ---- dS in shared memory ----

    [[maybe_unused]] BiasSums bias_sums(shared.bias_staging().of(w));
    const auto store_ds = [&](const uint32_t(&dS)[kTileM / 4]) {
      store_gradient_of_scores(shared.ds(ds_ring.stage) + ds_row, dS);
    };
    const auto signal_ds = [&] {
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(ds_barriers.full(ds_ring.stage));
        if constexpr (kSumsBias<Row>) bias_sums.signal_staged();
      }
    };
    const auto write_ds = [&](const uint32_t(&dS)[kTileM / 4]) {
      mbarrier_wait(ds_barriers.empty(ds_ring.stage), ds_ring.phase ^ 1);
      store_ds(dS);
      signal_ds();
    };
    // The next one of three buffers of dS is free when the other owner has written dS(i - 1): it is
    // done with block i - 2, and so with dQ(i - 3).
    const auto acquire_ds = [&] {
      if (kWaitsForEmpty) mbarrier_wait(ds_barriers.empty(ds_ring.stage), ds_ring.phase ^ 1);
      ds_barriers.wait(previous_ring);
    };

    // ---- the steps: of a block whose Q has arrived; slot: of the workspace ----

    Features features(a, tile, tile.key0 + warp_row);
    constexpr uint32_t kPitch = GradientTile::kChunkBytes;  // between pieces of a staged bias
    int head = tile.kv_head * p.group + tile.member;
    const int last_head = head + tile.members - 1;
    // The bias of the block after `block`, to where its dS will be.
    const auto fetch_bias = [&](int block, const Ring<kGradientBuffers>& next) {
      mbarrier_wait(ds_barriers.empty(next.stage), next.phase ^ 1);
      const bool last = block == walk_first + (end - begin - 1) * walk_step;
      if (last && head == last_head) return;
      features.fetch_bias(head + last, last ? walk_first : block + walk_step,
                          shared.ds(next.stage) + warp_row * kChunkRowBytes, kPitch);
    };

    // cut: the band hides some score; mask: of BlockMask.
    const auto rich_step = [&](int block, int slot, bool cut, int mask) {
      float S[kTileM / 2], dP[kTileM / 2], dQ[kColumnsOfDq / 2];
      uint32_t P[kTileM / 4], dS[kTileM / 4];
      const uint64_t q = QTile::k_major(shared.q(ring.stage));
      issue_scores<Element, KTile, QTile, kDqk>(S, k, q);
      mbarrier_wait(shared.grad_o_barrier(grad_o_ring.stage), grad_o_ring.phase);
      const uint64_t grad_o = GradOTile::k_major(shared.grad_o(grad_o_ring.stage));
      issue_scores<Element, VTile, GradOTile, kDv>(dP, v, grad_o);
      const uint32_t lse2 = shared.lse2(ring.stage) + 8 * quad,
                     delta = shared.delta(grad_o_ring.stage) + 8 * quad;
      const uint32_t warp_ds = shared.ds(ds_ring.stage) + warp_row * kChunkRowBytes;
      features.look(block, cut, mask, shared.mask(ring.stage) + warp_row / 16 * kWarp * 4,
                    Kernel::kMaskBytes / Kernel::kPieces,
                    shared.spans() + 8 * (warp_row + lane / 4));
      if constexpr (!Features::kFetchesBias) {
        mbarrier_wait(ds_barriers.empty(ds_ring.stage), ds_ring.phase ^ 1);
        if (features.stages_bias()) features.stage_bias(block, warp_ds, kPitch);
      }
      wgmma_wait<1>();
      pin(S);

      features.softmax(block, warp_ds, kPitch, lse2, S, P);
      if constexpr (Features::kFetchesBias) fetch_bias(block, ds_ring.next());
      wgmma_wait<0>();
      pin(dP);
      pin(S);  // P is not packed earlier than this: it would take registers of its own
      features.differentiate(block, warp_ds, kPitch, lse2, delta, S, dP);
#pragma unroll
      for (int g = 0; g < kTileM / 8; ++g) {
        const float* s = S + 4 * g;
        const float* dp = dP + 4 * g;
        if constexpr (!Features::kKeepsP) {
          P[2 * g] = pack<Element>(s[0], s[1]), P[2 * g + 1] = pack<Element>(s[2], s[3]);
        }
        dS[2 * g] = pack<Element>(dp[0], dp[1]), dS[2 * g + 1] = pack<Element>(dp[2], dp[3]);
      }

      if constexpr (kSumsBias<Row>) bias_sums.stage(dS);
      store_ds(dS);
      if constexpr (!Kernel::kFencesLate) signal_ds();
      // The first time there is no block before: what comes out is thrown away.
      ds_barriers.wait(previous_ring);
      issue_dq(shared, previous_ring.stage, w, dQ);
      if constexpr (Kernel::kFencesLate) signal_ds();
      const uint64_t grad_o_rows = GradOTile::mn_major(shared.grad_o(grad_o_ring.stage));
      issue_sum<Element, GradOTile, kTileM / kStepK>(dV, P, grad_o_rows);
      const uint64_t q_rows = QTile::mn_major(shared.q(ring.stage));
      issue_sum<Element, QTile, kTileM / kStepK>(dK, dS, q_rows);
      wgmma_wait<2>();
      pin(dQ);
      if (lane == 0 && previous_slot >= 0) ds_barriers.release(previous_ring);
      accumulate_previous(dQ);
      wgmma_wait<0>();
      pin(dV);
      pin(dK);
      advance(block, slot);
    };

    // masked: the band, or with segments what the producer has found, hides some score; spanned:
    // an interval of queries for each key says which.
    [[maybe_unused]] const auto lean_step = [&](int block, int slot, bool masked,
                                                [[maybe_unused]] bool spanned = false) {
      if constexpr (kLean) {
        float S[kTileM / 2], dP[kTileM / 2], dQ[kColumnsOfDq / 2];
        uint32_t P[kTileM / 4], dS[kTileM / 4];
        Statistics<kTileM> lse2(shared.lse2(ring.stage)), delta(shared.delta(ring.stage));
        operands.issue_s(ring.stage, S);
        if constexpr (!kOfFp8) lse2.load_first();
        if constexpr (!kOfFp8) mbarrier_wait(shared.grad_o_barrier(ring.stage), ring.phase);
        operands.issue_dp(ring.stage, dP);
        if constexpr (kShapes) features.look(block, masked, 0, 0, 0, 0);
        wgmma_wait<1>();
        pin(S);
        if constexpr (!kOfFp8) lse2.load_others();
        if constexpr (kOfFp8) {
          exponentials<kTileM>(operands.k_scale(), shared.lse2(ring.stage), S);
        } else if constexpr (kShapes) {
          features.softmax_with_distances(block, lse2, S);
        } else {
          exponentials<kTileM>(c, lse2, S);
        }
        if constexpr (kOfSegments) {
          const uint32_t spans = shared.spans() + 8 * (warp_row + lane / 4);
          if (masked) mask_segments<kTileM>(a, tile, key, block, spanned, spans, S);
        } else if constexpr (!kShapes) {
          if (masked) mask_band<kTileM>(tile, key, block, S);
        }
        if constexpr (!kOfFp8) delta.load_first();
        if constexpr (!kSplitsRows) pack_all<Element>(S, P);
        if constexpr (!kWaitsForEmpty) acquire_ds();
        wgmma_wait<0>();
        pin(dP);
        pin(S);
        if constexpr (kOfFp8) {
          const int stage = wait_late(shared, ring, own_ring);
          differentiate<Element, kTileM>(operands.v_scale(), shared.delta(stage), S, dP, dS);
        } else {
          delta.load_others();
          differentiate<Element, kTileM>(S, delta, dP, dS);
        }
        if constexpr (kSplitsRows) pack_all<Element>(S, P);
        if constexpr (kWaitsForEmpty) acquire_ds();
        store_ds(dS);
        operands.issue_dq(previous_ring.stage, dQ);
        signal_ds();  // a fence takes 100 clocks and more: under dQ, which reads older ones
        operands.issue_dv(late(ring.stage, own_ring.stage), P, dV);
        operands.issue_dk(late(ring.stage, own_ring.stage), dS, dK);
        wgmma_wait<2>();
        finish_previous(dQ);
        wgmma_wait<0>();
        pin(dV);
        pin(dK);
        advance(block, slot);
      }
    };
    [[maybe_unused]] const auto hidden_step = [&](int block, int slot) {
      if constexpr (kLean) {
        float dQ[kColumnsOfDq / 2];
        wait_late(shared, ring, own_ring);
        acquire_ds();
        store_ds({});
        operands.issue_dq(previous_ring.stage, dQ);
        signal_ds();
        wgmma_wait<0>();
        finish_previous(dQ);
        advance(block, slot);
      }
    };

    // dV before dS, dQ after both: S, dP and dQ are never in registers together.
    const auto wide_step = [&](int block, int slot, bool masked) {
      float S[kTileM / 2], dP[kTileM / 2];
      uint32_t P[kTileM / 4], dS[kTileM / 4];
      float dQ[kColumnsOfDq / 2], half[kHalfColumns / 2];
      issue_scores<Element, KTile, QTile, kDqk>(S, k, QTile::k_major(shared.q(ring.stage)));
      mbarrier_wait(shared.grad_o_barrier(grad_o_ring.stage), grad_o_ring.phase);
      const uint32_t grad_o = shared.grad_o(grad_o_ring.stage);
      wgmma_wait<0>();
      pin(S);
      exponentials<kTileM>(c, PairsOfQueries{shared.lse2(ring.stage) + 8 * quad}, S);
      if (masked) mask_band<kTileM>(tile, key, block, S);
#pragma unroll
      for (int i = 0; i < kTileM / 4; ++i) P[i] = pack<Element>(S[2 * i], S[2 * i + 1]);
      issue_scores<Element, VTile, GradOTile, kDv>(dP, v, GradOTile::k_major(grad_o));
      issue_sum<Element, GradOTile, kTileM / kStepK>(dV, P, GradOTile::mn_major(grad_o));
      wgmma_wait<0>();
      pin(dP);
      pin(dV);
      differentiate_packed(shared.delta(grad_o_ring.stage) + 8 * quad, P, dP, dS);
      write_ds(dS);
      wgmma_wait<0>();
      pin(dV);
      ds_barriers.wait(previous_ring);
      issue_dq(shared, previous_ring.stage, w, dQ);
      issue_sum<Element, QTile, kTileM / kStepK>(dK, dS, QTile::mn_major(shared.q(ring.stage)));
      wgmma_wait<1>();
      pin(dQ);
      accumulate_previous(dQ);
      issue_half_of_dq(shared, previous_ring.stage, w, half);
      wgmma_wait<0>();
      pin(dK);
      pin(half);
      if (lane == 0 && previous_slot >= 0) ds_barriers.release(previous_ring);
      accumulate_half(half);
      advance(block, slot);
    };

    // ---- the blocks of the tile: the producer says which, or the band does ----

    if (!Kernel::kStartsEarly && begin < end) mbarrier_wait(shared.kv_barrier(), 0);
    [[maybe_unused]] const auto hold_keys = [&] {
      if constexpr (kLean) {
        if (Kernel::kStartsEarly && begin < end) mbarrier_wait(shared.q_barrier(0), 0);
        if (begin < end) operands.hold_keys(a, tile, shared, warp_row);
      }
    };
    const int first_slot =
        uniform_register(tile.kv_head) * p.group * a.slots + uniform_register(tile.first_slot);
    if constexpr (Kernel::kRich) {
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
        const int block = staged >> Kernel::kStagedBits,
                  slot = first_slot + member * a.slots + block;
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
      const int first_member = Kernel::kShares ? uniform_register(tile.member) : 0;
      const auto step = [&](int i, int block) {
        const int member = first_member + i;
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
      };
      for_each_block<Kernel::kInnerLoop>(a, uniform_register(tile.members), begin, end, walk_first,
                                         walk_step, step);
    }

    // ---- the end of the tile: dQ of its last block, dK and dV ----

    const int first_key = tile.key0 + warp_row;
    const bool by_tma = kLean && p.tensor[TESSERA_DK].data && p.tensor[TESSERA_DV].data &&
                        rows_by_tma(p, tile, first_key);
    float dQ[kColumnsOfDq / 2];
    const bool is_shared = Kernel::kShares && uniform_register(tile.parts) > 1;
    ds_barriers.wait(previous_ring);
    issue_dq(shared, previous_ring.stage, w, dQ);
    if (is_shared) {
      SharedSums<Kernel>(a, tile, warp_row / 16).leave(dK, dV);
    } else if (by_tma) {  // in place of this warp's rows of V, which no other reads
      send_gradient<Element, VTile>(&a.grad_v, tile, first_key, 1.f,
                                    shared.v() + warp_row * kChunkRowBytes, dV);
    }
    SumsOfOthers<Element, Kernel> others;  // in place of dV
    if (!is_shared) others.load(a, tile, w, shared.sums_barrier());
    wgmma_wait<0>();
    pin(dQ);
    accumulate_previous(dQ);
    if constexpr (kWide) {
      float half[kHalfColumns / 2];
      issue_half_of_dq(shared, previous_ring.stage, w, half);
      wgmma_wait<0>();
      pin(half);
      accumulate_half(half);
    }
    others.signal_added(shared.added_barrier());
    bool is_complete = true;
    if (is_shared) {
      is_complete = SharedSums<Kernel>(a, tile, warp_row / 16).collect(dK, dV);
      if (is_complete && by_tma) {
        send_gradient<Element, VTile>(&a.grad_v, tile, first_key, 1.f,
                                      shared.v() + warp_row * kChunkRowBytes, dV);
      }
    }
    if (is_complete && by_tma) {
      // The other owner may still read K. The next stage is free: both are done with its block.
      const int stage = late(ring.stage, own_ring.stage);
      send_gradient<Element, SmemTile<64, kDqk>>(
          &a.grad_k, tile, first_key, p.softmax_scale,
          (w == 0 ? shared.q(stage) : shared.grad_o(stage)) + warp_row % 64 * kChunkRowBytes, dK);
    } else if (is_complete) {
      store_gradient<Element>(p, TESSERA_DK, tile, key, p.softmax_scale, p.dqk, dK);
      store_gradient<Element>(p, TESSERA_DV, tile, key, 1.f, p.dv, dV);
    }
    if (is_shared) others.load(a, tile, w, shared.sums_barrier());
    others.convert(a, tile, w);
    if (by_tma && lane == 0) bulk_wait_read();
  }

 private:
  // The stage, or the phase, of dO, and with products of E4M3 of Q in 16 bits, for dV and dK.
  template <typename T>
  static __device__ __forceinline__ T late(T shared, T own) {
    return kGradOStages == kStages ? shared : own;
  }
  static __device__ __forceinline__ int wait_late(const Shared shared, const Ring<kStages>& ring,
                                                  const Ring<kGradOStages>& own) {
    const int stage = late(ring.stage, own.stage);
    mbarrier_wait(shared.grad_o_barrier(stage), late(ring.phase, own.phase));
    return stage;
  }
  // dS of a warp. ds: where its lanes have their rows.
  static __device__ __forceinline__ void store_gradient_of_scores(
      uint32_t ds, const uint32_t (&dS)[kTileM / 4]) {
#pragma unroll
    for (int i = 0; i < kTileM / kStepK; ++i) {
      if constexpr (kLean) {
        stmatrix_x4_transposed(ds + i * kStepK * kChunkRowBytes, dS + 4 * i);
      } else {  // unit 2 i + lane / 16 of the row
        stmatrix_x4((ds + i / 4 * GradientTile::kChunkBytes) ^ i % 4 << 5, dS + 4 * i);
      }
    }
  }
  // dS = P (dP - delta), from packed P. delta: of the thread's first two queries.
  static __device__ __forceinline__ void differentiate_packed(uint32_t delta,
                                                              const uint32_t (&P)[kTileM / 4],
                                                              const float (&dP)[kTileM / 2],
                                                              uint32_t (&dS)[kTileM / 4]) {
#pragma unroll
    for (int g = 0; g < kTileM / 8; ++g) {
      const float2 of_query = load_shared_pair(delta + 32 * g);
      const float* dp = dP + 4 * g;
      const float2 p0 = unpack<Element>(P[2 * g]), p1 = unpack<Element>(P[2 * g + 1]);
      dS[2 * g] = pack<Element>(p0.x * (dp[0] - of_query.x), p0.y * (dp[1] - of_query.y));
      dS[2 * g + 1] = pack<Element>(p1.x * (dp[2] - of_query.x), p1.y * (dp[3] - of_query.y));
    }
  }
  static __device__ __forceinline__ void issue_dq(const Shared shared, int buffer, int w,
                                                  float (&dQ)[kColumnsOfDq / 2]) {
    const uint64_t ds = gradient(shared.ds(buffer), kSplitsRows ? w : 0);
    issue_columns(dQ, ds,
                  KTile::mn_major(shared.k() + (kSplitsRows ? 0 : w * Kernel::kOtherColumns)));
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
