// SPDX-License-Identifier: Apache-2.0
// Attention forward on Hopper.
//
//   S = Q K^T                  64 queries a warpgroup x tile_n keys, fp32 accumulators
//   m = rowmax S               of the first block alone; visible keys only
//   P = exp2(c S - c m)        c = softmax_scale * log2(e)
//   l = l + rowsum P
//   O = O + P V                P rounded to 16 bits and kept in registers
//   o = O / l,  lse = (c m + log2 l) / log2(e)
//
// m is a reference, not the maximum: any m that keeps P in range gives the same o. A block whose
// sums show that it does not is done again with its true maximum, and O and l are scaled to that.
// So a block costs one exponential, one fused multiply-add and one sum a score.
//
// q [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv], o [b, sq, hq, dv], lse [b, hq, sq];
// any strides. A CTA is persistent and computes row tiles of tile_m queries of one head:
//
//   warpgroup 0  scheduler   one warp: the tiles
//                loaders     a thread each for Q, K(j) and V(j), by TMA, j from right to left
//   warpgroup 1  consumer 0  |QK(j) PV(j-1)|   softmax(j)    |QK(j+1) PV(j)| ...
//   warpgroup 2  consumer 1     softmax(j-1) |QK(j) PV(j-1)|   softmax(j)   | ...
//
// The consumers take turns on the tensor cores: issuing a step's products takes about as long as
// executing them, so what overlaps with a softmax are the products of the other warpgroup. Keys run
// right to left, so that masked blocks come first and the steady loop has no mask code. At the end
// of a tile the first product of the next one is issued with the last of this one, so that the
// tensor cores do not see where tiles end; o leaves from registers, or by TMA through the shared
// memory of its own queries. A CTA with one consumer shares its SM with others, and there are no
// turns.
//
//   barrier               arrivals                       says
//   q[w].full[s]          1 + bytes                      64 queries of consumer w have arrived
//   q[w].empty[s]         4 (a warp each)                consumer w has read them; o_by_tma: and
//                                                        has put o in their place
//   k.full[s], v.full[s]  1 + bytes                      a block has arrived
//   k.empty, v.empty[s]   1 of each consumer             a block has been used
//   turn(w)               256: consumer w and the one    consumer w may issue products
//                         before it
#pragma once

#include <cmath>
#include <cstddef>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/score.cuh"
#include "cuda/sm90/alibi.cuh"
#include "cuda/sm90/blocks.cuh"
#include "cuda/sm90/dropout.cuh"
#include "cuda/sm90/features.cuh"
#include "cuda/sm90/forward_roles.cuh"
#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/output.cuh"
#include "cuda/sm90/params.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/ragged.h"
#include "cuda/sm90/schedule.cuh"
#include "cuda/sm90/smem_tile.cuh"
#include "cuda/sm90/tiles.h"
#include "cuda/sm90/wgmma.cuh"

namespace tessera::cuda::sm90 {

// Stands where a kernel has no such thing.
struct Absent {
  template <typename Any>
  __device__ explicit Absent(const Any&) {}
};

// Row: one row of the table in tiles.h, as a type with the constants kTile and kFeatures.
template <typename Element, typename Row>
struct Forward : Feature {
  static constexpr ForwardTile kTile = Row::kTile;
  static constexpr uint32_t kFeatures = Row::kFeatures;
  static constexpr bool kListsBlocks = kFeatures & kMasks;  // not all between first and last
  // Kernels of one feature have registers to draw a block's dropout, or load its masks, before its
  // products; that of softcap caps scores within their exponents, that of ALiBi lets products add.
  static constexpr bool kDrawsEarly = kFeatures == kDropout, kMasksEarly = kFeatures == kMasks,
                        kCapsLate = kFeatures == kSoftcap, kAddsByProducts = kFeatures == kAlibi;
  static constexpr int kTileM = kTile.tile_m(), kTileN = kTile.tile_n;
  static constexpr int kConsumers = kTile.consumers;
  static constexpr int kLoaders = 3;
  static constexpr int kRows = 64;  // of a consumer
  static constexpr int kGroups = kTileN / 8;
  static constexpr int kFirstTurnBarrier = 1;  // 0 is __syncthreads
  static constexpr int kProducerRegisters = kTile.producer_registers(),
                       kConsumerRegisters = kTile.consumer_registers();

  // At the masks of the tile after this one. Other kernels have no registers left for it.
  static constexpr bool kLooksAhead = !(kFeatures & ~(kMasks | kAlibi)) && kTile.dv < 256;

  // A loop for each kind of block, cut or not. That of bias gains nothing by it.
  static constexpr bool kSplitsLoop = kFeatures == 0 || kCapsLate || kDrawsEarly;
  // One loop with a body for each, where registers allow and mixtures gain by it.
  static constexpr bool kSplitsBody =
      kListsBlocks && (kFeatures & kBias ? kTile.dqk == 128 : kTile.dqk == 64);

  static constexpr int kWorkStages = kListsBlocks && kFeatures & kBiasTiles ? 2 : 3;  // what fits
  static constexpr int kBiasBytes = kFeatures & kBiasTiles ? kRows * kTileN * 2 : 0;  // a consumer
  // The weights of these groups wait in registers of their own until O is there.
  static constexpr int kEarlyGroups = kTile.early_groups > 0 ? kTile.early_groups : 2;
  static constexpr int kMinusOne = 0xbf800000;  // -1.f
  // What a thread's weights of a row and block may add up to before m is moved: all are finite in
  // 16 bits then.
  static constexpr float kMostSum = 32768;

  using BlockFeatures = Features<Element, kTileN, kFeatures>;
  using Progression = sm90::Progression<Element, kTileM, kTileN>;
  using Schedule = sm90::Schedule<kTileM, kTileN>;
  using PlainWork = std::conditional_t<kAddsByProducts, PivotedWork, sm90::Work>;
  using Work = std::conditional_t<kMasksEarly, SpannedWork,
                                  std::conditional_t<kListsBlocks, ListedWork, PlainWork>>;
  using VisibleBits = sm90::VisibleBits<kTileN>;
  using QTile = SmemTile<kRows, kTile.dqk>;
  using KTile = SmemTile<kTileN, kTile.dqk>;
  using VTile = SmemTile<kTileN, kTile.dv>;

  struct alignas(1024) SharedStorage {
    uint8_t q[kConsumers][kTile.q_stages][QTile::kBytes];
    uint8_t k[kTile.k_stages][KTile::kBytes];
    uint8_t v[kTile.v_stages][VTile::kBytes];
    uint8_t bias[kBiasBytes > 0 ? kConsumers* kBiasBytes : 8];
    alignas(16) uint8_t indices[kAddsByProducts ? Progression::kIndexBytes : 8];
    alignas(16) uint8_t slopes[kAddsByProducts ? kWorkStages * Progression::kSlopeBytes : 8];
    uint64_t q_barriers[kConsumers][2 * kTile.q_stages];
    uint64_t k_barriers[2 * kTile.k_stages], v_barriers[2 * kTile.v_stages];
    uint64_t bias_barriers[kConsumers][2], work_barriers[2 * kWorkStages];
    Work work[kWorkStages];
    PackedOrder order;
    int blocks_loaded;  // of K, by load_keys()
  };
  static_assert(kTile.dqk % kStepK == 0 && kTile.dv % 32 == 0 && kTileN % kStepK == 0);
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
  // The queries of the next tile must not wait for o.
  static_assert(!kTile.o_by_tma || (kTile.q_stages == 2 && !kTile.q_in_registers &&
                                    QTile::kBytes == kRows * kTile.dv * 2));

  // Addresses in shared memory, all from one uniform base (see uniform()).
  struct Shared {
    uint32_t base;

    __device__ __forceinline__ uint32_t q(int consumer, int stage) const {
      return base + offsetof(SharedStorage, q) +
             (consumer * kTile.q_stages + stage) * QTile::kBytes;
    }
    __device__ __forceinline__ uint32_t k(int stage) const {
      return base + offsetof(SharedStorage, k) + stage * KTile::kBytes;
    }
    __device__ __forceinline__ uint32_t v(int stage) const {
      return base + offsetof(SharedStorage, v) + stage * VTile::kBytes;
    }
    __device__ __forceinline__ BiasStage<kTileN> bias(int consumer) const {
      return {base + uint32_t(offsetof(SharedStorage, bias)) + consumer * kBiasBytes,
              {base + uint32_t(offsetof(SharedStorage, bias_barriers)) + consumer * 16},
              {}};
    }
    __device__ __forceinline__ uint32_t indices() const {
      return base + offsetof(SharedStorage, indices);
    }
    __device__ __forceinline__ uint32_t slopes(int stage) const {
      return base + offsetof(SharedStorage, slopes) + stage * Progression::kSlopeBytes;
    }
    __device__ __forceinline__ StageBarriers<kTile.q_stages> q_barriers(int consumer) const {
      return {base + uint32_t(offsetof(SharedStorage, q_barriers)) +
              consumer * 16 * kTile.q_stages};
    }
    __device__ __forceinline__ StageBarriers<kTile.k_stages> k_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, k_barriers))};
    }
    __device__ __forceinline__ StageBarriers<kTile.v_stages> v_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, v_barriers))};
    }
    __device__ __forceinline__ StageBarriers<kWorkStages> work_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, work_barriers))};
    }
  };

  // ---- consumer ----

  // A block, as far as the loops over blocks know it when compiled.
  struct Kind {
    bool cut = false;                    // by the band
    bool partial = false;                // by data masks
    bool listed = false;                 // the tile has a list of its blocks
    bool dense = false;                  // and a dense mask is all that cuts this one
    bool linear = false, right = false;  // ALiBi is left to the products; right of the diagonal
  };

  static __device__ __forceinline__ void consumer(const ForwardParams& a, const Work* works,
                                                  const Shared shared, const int w) {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
    const int thread_row = thread / kWarp * 16 + lane / 4;  // and thread_row + 8
    const bool leader = thread == 0;
    const auto q_barriers = shared.q_barriers(w);
    const auto k_barriers = shared.k_barriers();
    const auto v_barriers = shared.v_barriers();
    const float c = BlockFeatures::exponent_scale(a.problem);

    float O[kTile.dv / 2], S[kTileN / 2];
    uint32_t P[kTileN / 4], Q[kTile.q_in_registers ? kTile.dqk / 4 : 1];
    float m[2] = {}, l[2] = {}, cm[2];  // of the thread's two rows; cm = c m
    [[maybe_unused]] float most[2];  // what a block's weights may add up to, if less than kMostSum
    const bool shapes = BlockFeatures::shapes(a.problem), lists = BlockFeatures::lists(a);
    const bool needs_maximum = a.problem.tensor[TESSERA_MAX_LOGIT].data;
    std::conditional_t<kDrawsEarly, EarlyDropout<kTileN>, Absent> dropout(a.problem);
    std::conditional_t<kCapsLate, LateSoftcap, Absent> softcap(a.problem);
    BiasStage<kTileN> bias = shared.bias(w);
    Ring<kWorkStages> work_ring;
    Ring<kTile.q_stages> q_ring;
    Ring<kTile.k_stages> k_ring;  // of the block whose S is in registers
    constexpr bool kOneRing = kTile.k_stages == kTile.v_stages;
    Ring<kTile.v_stages> v_own;
    const auto v_ring = [&] {  // of the block whose P is
      if constexpr (kOneRing) {
        return k_ring;
      } else {
        return v_own;
      }
    };

    const auto take_turn = [&] {
      if (kConsumers > 1) named_barrier_sync(kFirstTurnBarrier + w, 2 * kWarpgroup);
    };
    const auto give_turn = [&] {
      if (kConsumers == 1) return;
      named_barrier_arrive(kFirstTurnBarrier + (w + 1) % kConsumers, 2 * kWarpgroup);
    };
    const auto release_q = [&] {
      __syncwarp();
      if (lane == 0) q_barriers.release(q_ring);
    };
    constexpr bool kReleasesAfterLastQk = !kTile.q_in_registers && !kTile.o_by_tma;
    const auto load_q = [&] {
      q_barriers.wait(q_ring);
      if constexpr (kTile.q_in_registers) {
        QTile::load_a(shared.q(w, q_ring.stage), 0, thread, Q);
        release_q();
        q_ring.advance();
      }
    };
    const auto issue_qk = [&](int stage, const Shared shared, Kind kind) {  // S = Q K^T
      const uint64_t k = KTile::k_major(shared.k(stage));
      const uint64_t q = QTile::k_major(shared.q(w, q_ring.stage));
      pin(S);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTile.dqk / kStepK; ++step) {
        if constexpr (kTile.q_in_registers) {
          Wgmma<Element, kTileN>::template rs<kMajorK>(S, Q + 4 * step,
                                                       k + KTile::k_major_step(step), step > 0);
        } else {
          Wgmma<Element, kTileN>::template ss<kMajorK, kMajorK>(
              S, q + QTile::k_major_step(step), k + KTile::k_major_step(step), step > 0);
        }
      }
      if constexpr (kAddsByProducts) {
        if (kind.linear) {
          Wgmma<Element, kTileN>::template ss<kMajorK, kMajorK>(
              S, Progression::slope(shared.slopes(work_ring.stage), kind.right),
              Progression::indices(shared.indices()), 1);
        }
      }
      wgmma_commit();
    };
    // O += P V; next: the block whose S is under way.
    const auto issue_pv = [&](int stage, int accumulate, [[maybe_unused]] int next) {
      const uint64_t v = VTile::mn_major(shared.v(stage));
      pin(O);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTileN / kStepK; ++step) {
        Wgmma<Element, kTile.dv>::template rs<kMajorMN>(
            O, P + 4 * step, v + VTile::mn_major_step(step), step > 0 ? 1 : accumulate);
        if constexpr (kDrawsEarly) dropout.draw(next, step);
      }
      wgmma_commit();
    };
    // m' and what the old terms shrink by; both rows side by side. A row that does not move keeps
    // m.
    const auto row_max = [&](const bool(&moves)[2], [[maybe_unused]] const bool(&vote)[2],
                             float(&alpha)[2]) {
      float a0 = S[0], b0 = S[1], a1 = S[2], b1 = S[3];
#pragma unroll
      for (int g = 1; g < kGroups; ++g) {
        a0 = fmaxf(a0, S[4 * g]), b0 = fmaxf(b0, S[4 * g + 1]);
        a1 = fmaxf(a1, S[4 * g + 2]), b1 = fmaxf(b1, S[4 * g + 3]);
      }
      float row[2] = {fmaxf(a0, b0), fmaxf(a1, b1)};
      row[0] = fmaxf(row[0], __shfl_xor_sync(kAllLanes, row[0], 2));
      row[1] = fmaxf(row[1], __shfl_xor_sync(kAllLanes, row[1], 2));
      row[0] = fmaxf(row[0], __shfl_xor_sync(kAllLanes, row[0], 1));
      row[1] = fmaxf(row[1], __shfl_xor_sync(kAllLanes, row[1], 1));
      if constexpr (kCapsLate) softcap.cap_maxima(vote, row, S);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row[r] = moves[r] ? fmaxf(m[r], row[r]) : m[r];
        // A row that has seen nothing has m = -inf; any finite stand-in makes its exponentials 0.
        cm[r] = row[r] == -kInfinity ? 0.f : row[r] * c;
        alpha[r] = moves[r] ? exp2_approx(fmaf(m[r], c, -cm[r])) : 1.f;
        m[r] = row[r];
      }
      if constexpr (kCapsLate) most[0] = softcap.most(m[0]), most[1] = softcap.most(m[1]);
    };
    // p = exp2(c S - c m) of 8 keys, and what they add to the row sums.
    const auto weights = [&](int g, float(&p)[4], float(&sum)[2]) {
      const float* s = S + 4 * g;
      const auto exponent = [&](float x, int r) {
        if constexpr (kCapsLate) return softcap.exponent(x, cm[r]);
        return fmaf(x, c, -cm[r]);
      };
      p[0] = exp2_approx(exponent(s[0], 0)), p[2] = exp2_approx(exponent(s[2], 1));
      p[1] = exp2_approx(exponent(s[1], 0)), p[3] = exp2_approx(exponent(s[3], 1));
      sum[0] += p[0], sum[1] += p[2], sum[0] += p[1], sum[1] += p[3];
    };
    const auto round_p = [&](int g, const float(&p)[4]) {
      P[2 * g] = pack<Element>(p[0], p[1]);
      P[2 * g + 1] = pack<Element>(p[2], p[3]);
    };
    const auto all_weights = [&](float(&sum)[2]) {
      sum[0] = sum[1] = 0.f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float p[4];
        weights(g, p, sum);
        round_p(g, p);
      }
      if constexpr (kCapsLate) softcap.end_block();
    };

    const auto work_barriers = shared.work_barriers();
    // What the loops need of a tile; the rest stays in shared memory.
    struct Blocks {
      int begin, end, clean_begin, clean_end;
    };
    Blocks blocks;
    const auto next_tile = [&] {  // false past the last
      work_barriers.wait(work_ring);
      const int4 range = *reinterpret_cast<const int4*>(&works[work_ring.stage].begin);
      blocks = {uniform(range.x), uniform(range.y), uniform(range.z), uniform(range.w)};
      return blocks.begin < blocks.end;
    };
    // What the thread's rows see of the tile: under products, like everything that can be.
    KeyInterval keys[2];
    VisibleBits first_visible;  // in the first block
    bool first_is_partial, is_spanned = false;
    MaskData<kTileN> mask_data;
    const auto start_tile = [&] {
      const Work& work = works[work_ring.stage];
      const int row_of_tile = w * kRows + thread_row, row = work.m0 + row_of_tile;
      keys[0] = keys_of_tile_row<kFeatures == 0>(work, row_of_tile);
      keys[1] = keys_of_tile_row<kFeatures == 0>(work, row_of_tile + 8);
      if constexpr (kMasksEarly) is_spanned = uniform(work.spanned);
      if (kFeatures == 0 || is_spanned) {
        first_visible = VisibleBits(keys, blocks.end - 1, lane);
        return;
      }
      first_is_partial = uniform(is_partial(work, blocks.end - 1));
      if constexpr (kMasksEarly) {
        const BlockFeatures features(a, work, row, lane);
        features.find_masks(mask_data);
        features.load_masks(blocks.end - 1, first_is_partial, mask_data);
      }
    };
    if (!next_tile()) return;
    if (w == kConsumers - 1) give_turn();
    load_q();
    k_barriers.wait(k_ring);
    take_turn();
    issue_qk(k_ring.stage, shared, {});
    give_turn();
    if (kLooksAhead) start_tile();
    wgmma_wait<0>();
    pin(S);
    if (leader) k_barriers.release(k_ring);
    for (bool more = true; more;) {  // a tile; S of its first block is in registers
      if (!kLooksAhead) start_tile();
      m[0] = m[1] = -kInfinity;
      if (kReleasesAfterLastQk && blocks.end - blocks.begin == 1) release_q();
      const Work& work = works[work_ring.stage];
      const int row = work.m0 + w * kRows + thread_row;
      const BlockFeatures features(a, work, row, lane);
      const auto is_cut = [&](int j) { return j < blocks.clean_begin || j >= blocks.clean_end; };
      const auto finish_scores = [&](int j, bool cut, bool partial, bool dense = false) {
        if (dense) return hide_others<kTileN>(mask_data.words, S);
        VisibleBits visible;
        const bool masked = cut || partial;
        if constexpr (kListsBlocks) {
          if constexpr (!kMasksEarly) features.load_masks(j, partial, mask_data);
          if (masked) visible = features.visible(j, cut, keys, partial, mask_data);
        } else {
          if (masked) visible = VisibleBits(keys, j, lane);
        }
        if constexpr (BlockFeatures::kShapes) {
          if (shapes) features.shape(j, thread, bias, masked, visible, S);
        }
        if (masked) visible.set_others(-kInfinity, S);
      };
      const auto drop = [&](int j) {
        if constexpr (kDrawsEarly) {
          dropout.apply(P);
        } else if constexpr (kFeatures & kDropout) {
          if (a.problem.flags & TESSERA_DROPOUT) {
            DropoutRows(a.problem, work, row, lane % 4).apply(j * (kTileN / 16), P);
          }
        }
      };
      if constexpr (kDrawsEarly) {
        dropout.start_tile(a.problem, work, row, lane % 4, blocks.end - 1);
      }
      if (kFeatures == 0 || is_spanned) {
        if (is_cut(blocks.end - 1)) first_visible.set_others(-kInfinity, S);
      } else {
        const int first = uniform(block_at(work, blocks.end - 1));
        finish_scores(first, is_cut(first), first_is_partial);
      }
      float alpha[2];
      row_max({true, true}, {work.exists(row), work.exists(row + 8)}, alpha);
      all_weights(l);
      drop(blocks.end - 1);

      [[maybe_unused]] BlockWalkIf<kMasksEarly> list(work);
      int last_block = blocks.begin;
      if constexpr (kAddsByProducts) last_block = uniform(work.last_block());
      int accumulate = 0;
      const auto step = [&](int j, Kind kind) {
        const auto here = k_ring.next();
        if (kMasksEarly && !kind.dense) features.load_masks(j, kind.partial, mask_data);
        k_barriers.wait(here);
        take_turn();
        issue_qk(here.stage, shared, kind);
        v_barriers.wait(v_ring());
        issue_pv(v_ring().stage, accumulate, j);
        accumulate = 1;
        give_turn();
        if (kind.listed) list.look_ahead(j);
        wgmma_wait<1>();
        pin(S);
        if (kReleasesAfterLastQk && j == last_block) release_q();
        if (!kind.linear) finish_scores(j, kind.cut, kind.partial, kind.dense);
        [[maybe_unused]] float base[2] = {};  // of scores to which products have added
        if constexpr (kAddsByProducts) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (kind.linear) base[r] = work.base(j * kTileN, kind.right, row + 8 * r);
            // Of a row that has seen nothing -inf, which sends its block the second way.
            cm[r] = (m[r] - base[r]) * c;
          }
        }
        float sum[2] = {}, early[kEarlyGroups][4];
#pragma unroll
        for (int g = 0; g < kEarlyGroups; ++g) weights(g, early[g], sum);
        // ptxas moves a wait up over arithmetic that does not depend on it, or leaves more before
        // it. Where this release depends on the first exponentials (their sum is never negative,
        // but ptxas does not look at its bits), the wait below stays behind them, late enough not
        // to stall. P is being read until then.
        const bool done = kTile.early_groups == 0 || __float_as_int(sum[0] + sum[1]) != kMinusOne;
        if (leader && done) k_barriers.release(here);
        wgmma_wait<0>();
        pin(O);
        if (leader) v_barriers.release(v_ring());
        // Into the registers of words that are used up by now.
        if (kind.dense) features.load_words(list.next(), mask_data);
#pragma unroll
        for (int g = 0; g < kEarlyGroups; ++g) round_p(g, early[g]);
#pragma unroll
        for (int g = kEarlyGroups; g < kGroups; ++g) {
          float p[4];
          weights(g, p, sum);
          round_p(g, p);
        }
        const auto fits = [&](int r) {
          bool fits = !needs_maximum && sum[r] <= kMostSum && m[r] > -kInfinity;
          if constexpr (kCapsLate) fits = fits && sum[r] <= most[r];
          return fits;
        };
        if (!__all_sync(kAllLanes, fits(0) && fits(1))) {
          // The others of the warp's rows, which may hold anything where they do not exist, come
          // out of this with the bits that they had.
          const uint32_t quad = 0xfu << (lane & ~3);
          const bool moves[2] = {(__ballot_sync(kAllLanes, !fits(0)) & quad) != 0,
                                 (__ballot_sync(kAllLanes, !fits(1)) & quad) != 0};
          if (kind.dense) features.hide_exactly(j, list.next(), mask_data, S);
          if (kind.linear) {
#pragma unroll
            for (int e = 0; e < kTileN / 2; ++e) S[e] += base[e / 2 % 2];
          }
          float alpha[2];
          row_max(moves, {moves[0] && work.exists(row), moves[1] && work.exists(row + 8)}, alpha);
          all_weights(sum);
          l[0] *= alpha[0], l[1] *= alpha[1];
#pragma unroll
          for (int e = 0; e < kTile.dv / 2; ++e) O[e] *= alpha[e / 2 % 2];
        }
        l[0] += sum[0], l[1] += sum[1];
        drop(j);
        k_ring = here;
        if (!kOneRing) v_own.advance();
      };
      // From right to left: blocks that the band cuts, others, and cut ones again.
      [[maybe_unused]] const auto walk_band = [&] {
        int j = blocks.end - 2;
#pragma unroll 1
        for (; j >= blocks.clean_end; --j) step(j, {.cut = true});
#pragma unroll 1
        for (; j >= blocks.clean_begin; --j) step(j, {});
#pragma unroll 1
        for (; j >= blocks.begin; --j) step(j, {.cut = true});
      };
      if constexpr (kSplitsLoop) {
        walk_band();
      } else if constexpr (kAddsByProducts) {
        Progression::walk(work, blocks, [&](int j, bool linear, bool right) {
          step(j, {.cut = !linear && is_cut(j), .linear = linear, .right = right});
        });
      } else if constexpr (kMasksEarly) {
        if (is_spanned) {
          walk_band();
        } else {
          list.walk(
              blocks.end - 1, features.has_dense_mask_alone(),
              [&](int j) { features.load_words(j, mask_data); },
              [&](int j, bool cut, bool partial, bool dense) {
                step(j, {.cut = cut, .partial = partial, .listed = true, .dense = dense});
              });
        }
      } else {
        const auto before = [&](int j) { return lists ? uniform(block_before(work, j)) : j - 1; };
#pragma unroll 1
        for (int j = before(blocks.end - 1); j >= blocks.begin; j = before(j)) {
          const bool cut = is_cut(j), partial = lists && uniform(is_partial(work, j)) != 0;
          if (kSplitsBody && !cut && !partial) {
            step(j, {});
          } else {
            step(j, {.cut = cut, .partial = partial});
          }
        }
      }
      m[0] -= features.row_offset(0), m[1] -= features.row_offset(1);
      if (!kTile.q_in_registers) q_ring.advance();
      const auto done = work_ring;
      work_ring.advance();
      more = next_tile();
      const auto here = k_ring.next();
      const Output<Element> output{a.problem, works[done.stage]};
      typename Output<Element>::Rows rows;
      if (more) {
        if (kFeatures == 0 && kLooksAhead) start_tile();
        load_q();
        k_barriers.wait(here);
        // The only stage of queries always has the same descriptors. The compiler shall not see it:
        // it would keep those of the first tile, in local memory.
        const Shared same{kTile.q_stages == 1 ? uint32_t(uniform(shared.base)) : shared.base};
        take_turn();
        issue_qk(here.stage, same, {});
        v_barriers.wait(v_ring());
        issue_pv(v_ring().stage, accumulate, 0);
        give_turn();
        rows = output.finish(w * kRows + thread_row, lane, c, m, l);
        if (kFeatures && kLooksAhead) start_tile();
        // Holds the wait behind the factors, which are never negative (see step).
        const bool done_with = __float_as_int(rows.factor[0] + rows.factor[1]) != kMinusOne;
        __syncwarp();
        if (kFeatures == 0 && lane == 0 && done_with) work_barriers.release(done);
        wgmma_wait<0>();
        pin(S);
        if (leader) k_barriers.release(here);
      } else {
        take_turn();
        v_barriers.wait(v_ring());
        issue_pv(v_ring().stage, accumulate, 0);
        give_turn();
        rows = output.finish(w * kRows + thread_row, lane, c, m, l);
        wgmma_wait<0>();
      }
      pin(O);
      if (leader) v_barriers.release(v_ring());
      k_ring = here;
      if (!kOneRing) v_own.advance();
      if constexpr (kTile.o_by_tma) {
        const int stage = q_ring.stage ^ 1;  // of the queries before
        Output<Element>::template stage<QTile>(shared.q(w, stage), rows.factor, thread, O);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(q_barriers.empty(stage));
      }
      __syncwarp();
      if (kFeatures && lane == 0) work_barriers.release(done);
      if constexpr (!kTile.o_by_tma) output.store(rows, lane, O);
    }
  }
};

template <typename Element, typename Row>
Kernel make_forward(int dtype) {
  return {dtype, Row::kFeatures, Row::kTile,
          static_cast<int>(sizeof(typename Forward<Element, Row>::SharedStorage)),
          reinterpret_cast<const void*>(&forward<Element, Row>)};
}

}  // namespace tessera::cuda::sm90
