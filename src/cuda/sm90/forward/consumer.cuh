// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the forward kernel: 64 rows of a tile at a time, with S, P and O in
// registers. forward/kernel.cuh has the equations and the schedule.
//
// One function. Its parts are lambdas over the registers and rings that they share: turns,
// products, softmax, what a tile's rows see; then comes the loop over tiles, with step() for each
// block of keys and the seam between two tiles.
#pragma once

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/score/score.cuh"
#include "cuda/sm90/forward/output.cuh"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/forward/score/alibi.cuh"
#include "cuda/sm90/forward/score/blocks.cuh"
#include "cuda/sm90/forward/score/dropout.cuh"
#include "cuda/sm90/forward/shape.cuh"
#include "cuda/sm90/forward/softmax.cuh"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"
#include "cuda/sm90/machine/wgmma.cuh"
#include "cuda/sm90/score/softcap.cuh"

namespace tessera::cuda::sm90 {

// Stands for the state of a feature that the kernel does not have.
struct Absent {
  template <typename Any>
  __device__ explicit Absent(const Any&) {}
};

// Waits for a block of keys or values; one that lanes have written is there for wgmma after a fence.
template <typename Kernel, int kStages>
__device__ __forceinline__ void await_block(const ForwardParams& a,
                                            const StageBarriers<kStages>& barriers,
                                            const Ring<kStages>& ring) {
  barriers.wait(ring);
  if constexpr (Kernel::kTile.pages) {
    using Arguments = typename Kernel::Arguments;
    if (Kernel::kTile.e4m3 || static_cast<const Arguments&>(a).box_keys == 0) async_proxy_fence();
  }
}

template <typename Element, typename Row>
__device__ __forceinline__ void Forward<Element, Row>::consumer(const ForwardParams& a,
                                                                const Work* works,
                                                                const Shared shared, const int w) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
  const int first_row = thread / kWarp * 16;  // of the warp's, in the consumer
  const int thread_row = row_of<Forward>(0, first_row) + lane / 4;  // and thread_row + 8
  const bool leader = thread == 0;
  const auto q_barriers = shared.q_barriers(w);
  const auto k_barriers = shared.k_barriers();
  const auto v_barriers = shared.v_barriers();
  const float c_of_problem = BlockFeatures::exponent_scale(a.problem);
  float c = c_of_problem;

  float O[kTile.dv / 2], S[kTileN / 2];
  uint32_t P[kTileN / 4], Q[kTile.q_in_registers ? kTile.dqk / 4 : 1];
  // State of the thread's two rows. l is the thread's own part of the sum, cm = c m.
  float m[2] = {}, l[2] = {}, cm[2];
  [[maybe_unused]] float most[2];  // of LateSoftcap: a limit for sums beside kMostSum
  const bool shapes = BlockFeatures::shapes(a.problem), lists = BlockFeatures::lists(a);
  // max_logit is asked for: all blocks are done the second way, which makes m the maximum.
  const bool needs_maximum = a.problem.tensor[TESSERA_MAX_LOGIT].data;
  std::conditional_t<kDrawsEarly, EarlyDropout<kTileN>, Absent> dropout(a.problem);
  std::conditional_t<kCapsLate, LateSoftcap, Absent> softcap(a.problem);
  BiasStage<kTileN> bias = shared.bias(w);
  Ring<kWorkStages> work_ring;
  Ring<kTile.q_stages> q_ring;
  Ring<kTile.k_stages> k_ring;  // of the block whose S is in registers
  constexpr bool kOneRing = kTile.k_stages == kTile.v_stages;
  Ring<kTile.v_stages> v_own;  // used where V has fewer stages than K
  const auto v_ring = [&] {    // of the block whose P is in registers
    if constexpr (kOneRing) {
      return k_ring;
    } else {
      return v_own;
    }
  };

  // ---- turns on the tensor cores ----

  const auto take_turn = [&] {
    if (kConsumers > 1) named_barrier_sync(turn_barrier(w), 2 * kWarpgroup);
  };
  const auto give_turn = [&] {
    if (kConsumers == 1) return;
    named_barrier_arrive(turn_barrier((w + 1) % kConsumers), 2 * kWarpgroup);
  };

  // ---- queries and products ----

  const auto release_q = [&] {
    __syncwarp();
    if (lane == 0) q_barriers.release(q_ring);
  };
  // Queries are done with when they are in registers, after the tile's last QK, or when o has been
  // put in their place.
  constexpr bool kReleasesAfterLastQk = !kTile.q_in_registers && !kTile.o_by_tma;
  const auto load_q = [&] {
    q_barriers.wait(q_ring);
    if constexpr (kTile.q_in_registers) {
      QTile::load_a(shared.q(w, q_ring.stage), 0, thread, Q);
      release_q();
      q_ring.advance();
    }
  };
  // S = Q K^T of the keys in `stage`, and ALiBi's part of it where the block is linear.
  const auto issue_qk = [&](int stage, const Shared shared, Kind kind) {
    const uint64_t k = KTile::k_major(shared.k(stage));
    const uint64_t q = QTile::k_major(shared.q(w, q_ring.stage));
    pin(S);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile.dqk / kStepK; ++step) {
      if constexpr (kTile.q_in_registers) {
        Wgmma<Element, kTileN>::template rs<kMajorK>(S, Q + 4 * step, k + KTile::k_major_step(step),
                                                     step > 0);
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
  // O += P V, or O = P V of a tile's first block. next: the block whose S is under way, for which
  // dropout is drawn between the products.
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

  // ---- softmax ----

  // m becomes the largest score so far where a row moves; alpha: what O and l are to be multiplied
  // by. vote: see LateSoftcap.
  const auto update_m = [&](const bool(&moves)[2], [[maybe_unused]] const bool(&vote)[2],
                            float(&alpha)[2]) {
    float largest[2];
    row_maxima(S, largest);
    if constexpr (kCapsLate) softcap.cap_maxima(vote, largest, S);
    update_maxima<(kFeatures & kBias) != 0>(moves, c, largest, m, cm, alpha);
    if constexpr (kCapsLate) most[0] = softcap.most(m[0]), most[1] = softcap.most(m[1]);
  };
  const auto exponent = [&](float s, int r) {
    if constexpr (kCapsLate) return softcap.exponent(s, cm[r]);
    return fmaf(s, c, -cm[r]);
  };

  // ---- tiles ----

  const auto work_barriers = shared.work_barriers();
  TileBlocks blocks;
  const auto next_tile = [&] {  // false past the last
    work_barriers.wait(work_ring);
    blocks = TileBlocks::of(works[work_ring.stage]);
    return blocks.begin < blocks.end;
  };
  // What the thread's rows see. Found while products run, like everything that can be.
  Interval keys[2];
  VisibleBits first_visible;  // in the tile's first block, where `keys` decide alone
  bool first_is_partial;      // data masks may hide some of its scores
  bool is_spanned = false;    // a tile of SpannedWork whose rows see an interval each
  MaskData<kTileN> mask_data;
  const auto start_tile = [&] {
    const Work& work = works[work_ring.stage];
    const int row_of_tile = row_of<Forward>(w) + thread_row, row = work.m0 + row_of_tile;
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

  // ---- the first tile's first QK, which has no PV beside it ----

  if (!next_tile()) return;
  if (w == kConsumers - 1) give_turn();  // consumer 0 has the first one
  load_q();
  await_block<Forward>(a, k_barriers, k_ring);
  take_turn();
  issue_qk(k_ring.stage, shared, {});
  give_turn();
  if (kLooksAhead) start_tile();
  wgmma_wait<0>();
  pin(S);
  if (leader) k_barriers.release(k_ring);

  for (bool more = true; more;) {  // a tile; S of its first block is in registers
    // ---- the tile's first block, whose maxima become m ----

    if (!kLooksAhead) start_tile();
    m[0] = m[1] = -kInfinity;
    if (kReleasesAfterLastQk && blocks.end - blocks.begin == 1) release_q();
    const Work& work = works[work_ring.stage];
    if constexpr (kTile.e4m3) c = c_of_problem * work.k_scale;
    const int row = work.m0 + row_of<Forward>(w) + thread_row;
    const BlockFeatures features(a, work, row, lane);
    const auto is_cut = [&](int j) { return j < blocks.clean_begin || j >= blocks.clean_end; };
    // Features and masks, from S = Q K^T to what is exponentiated.
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
    const auto apply_dropout = [&](int j) {
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
    float alpha[2];  // of no use: there are no O and l yet
    update_m({true, true}, {work.exists(row), work.exists(row + 8)}, alpha);
    softmax_of_block<Element>(S, exponent, P, l);
    if constexpr (kCapsLate) softcap.end_block();
    apply_dropout(blocks.end - 1);

    // ---- its other blocks ----

    [[maybe_unused]] BlockWalkIf<kMasksEarly> list(work);
    int last_block = blocks.begin;  // in the order in which they come
    if constexpr (kAddsByProducts) last_block = uniform(work.last_block());
    int accumulate = 0;
    // Block j: its QK and the PV of the block before in this consumer's turn, then its softmax.
    const auto step = [&](int j, Kind kind) {
      const auto here = k_ring.next();
      if (kMasksEarly && !kind.dense) features.load_masks(j, kind.partial, mask_data);
      await_block<Forward>(a, k_barriers, here);
      take_turn();
      issue_qk(here.stage, shared, kind);
      await_block<Forward>(a, v_barriers, v_ring());
      issue_pv(v_ring().stage, accumulate, j);
      accumulate = 1;
      give_turn();
      if (kind.listed) list.look_ahead(j);
      wgmma_wait<1>();  // for S; PV still runs, and reads P
      pin(S);
      if (kReleasesAfterLastQk && j == last_block) release_q();
      if (!kind.linear) finish_scores(j, kind.cut, kind.partial, kind.dense);
      // What ALiBi adds to all of a row's scores in the block, where products have added the rest.
      [[maybe_unused]] float base[2] = {};
      if constexpr (kAddsByProducts) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (kind.linear) base[r] = work.base(j * kTileN, kind.right, row + 8 * r);
          // m is -inf where a row has seen nothing: no sum fits, and the block is done again.
          cm[r] = (m[r] - base[r]) * c;
        }
      }
      float sum[2] = {}, early[kEarlyGroups][4];
#pragma unroll
      for (int g = 0; g < kEarlyGroups; ++g) softmax_of_group(g, S, exponent, early[g], sum);
      // PV reads P until it is waited for, here: sooner, the wait would stall.
      const bool done = kTile.early_groups == 0 || is_computed(sum[0] + sum[1]);
      if (leader && done) k_barriers.release(here);
      wgmma_wait<0>();
      pin(O);
      if (leader) v_barriers.release(v_ring());
      // The words of the next dense block, into the registers of those that are used up by now.
      if (kind.dense) features.load_words(list.next(), mask_data);
#pragma unroll
      for (int g = 0; g < kEarlyGroups; ++g) round_group<Element>(g, early[g], P);
#pragma unroll
      for (int g = kEarlyGroups; g < kGroups; ++g) {
        float p[4];
        softmax_of_group(g, S, exponent, p, sum);
        round_group<Element>(g, p, P);
      }
      const auto fits = [&](int r) {
        bool fits = !needs_maximum && sum[r] <= kMostSum && m[r] > -kInfinity;
        if constexpr (kCapsLate) fits = fits && sum[r] <= most[r];
        return fits;
      };
      if (!__all_sync(kAllLanes, fits(0) && fits(1))) {
        // Again from S. Those of the warp's rows that fit, which may hold anything where they do
        // not exist, come out of this with the bits that they had.
        const bool moves[2] = {any_of_quad(!fits(0), lane), any_of_quad(!fits(1), lane)};
        if (kind.dense) features.hide_exactly(j, list.next(), mask_data, S);
        if (kind.linear) {
#pragma unroll
          for (int e = 0; e < kTileN / 2; ++e) S[e] += base[e / 2 % 2];
        }
        float alpha[2];
        update_m(moves, {moves[0] && work.exists(row), moves[1] && work.exists(row + 8)}, alpha);
        softmax_of_block<Element>(S, exponent, P, sum);
        if constexpr (kCapsLate) softcap.end_block();
        l[0] *= alpha[0], l[1] *= alpha[1];
#pragma unroll
        for (int e = 0; e < kTile.dv / 2; ++e) O[e] *= alpha[e / 2 % 2];
      }
      l[0] += sum[0], l[1] += sum[1];
      apply_dropout(j);
      k_ring = here;
      if (!kOneRing) v_own.advance();
    };
    // Walks from right to left: blocks that the band cuts, clean ones, and cut ones again.
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

    // ---- the seam: this tile's last PV, and the next one's first QK with it ----

    m[0] -= features.row_offset(0), m[1] -= features.row_offset(1);
    if (!kTile.q_in_registers) q_ring.advance();
    const auto done = work_ring;
    work_ring.advance();
    more = next_tile();
    const auto here = k_ring.next();
    const Output<Result> output{a.problem, works[done.stage], head_of<Forward>(w, first_row)};
    typename Output<Result>::Rows rows;
    const auto finish = [&] {
      rows = output.finish(row_of<Forward>(w) + thread_row, lane, c, m, l);
      if constexpr (kTile.e4m3) rows.scale_by(works[done.stage].v_scale);
    };
    if (more) {
      if (kFeatures == 0 && kLooksAhead) start_tile();
      load_q();
      await_block<Forward>(a, k_barriers, here);
      // A single stage of queries has the same descriptors in each tile. The compiler must not
      // see that: it would keep those of the first tile, in local memory.
      const Shared unknown{kTile.q_stages == 1 ? uint32_t(uniform(shared.base)) : shared.base};
      take_turn();
      issue_qk(here.stage, unknown, {});
      await_block<Forward>(a, v_barriers, v_ring());
      issue_pv(v_ring().stage, accumulate, 0);
      give_turn();
      finish();
      if (kFeatures && kLooksAhead) start_tile();
      const bool factors_done = is_computed(rows.factor[0] + rows.factor[1]);
      __syncwarp();
      if (kFeatures == 0 && lane == 0 && factors_done) work_barriers.release(done);
      wgmma_wait<0>();
      pin(S);
      if (leader) k_barriers.release(here);
    } else {
      take_turn();
      await_block<Forward>(a, v_barriers, v_ring());
      issue_pv(v_ring().stage, accumulate, 0);
      give_turn();
      finish();
      wgmma_wait<0>();
    }
    pin(O);
    if (leader) v_barriers.release(v_ring());
    k_ring = here;
    if (!kOneRing) v_own.advance();

    // ---- o = O / l ----

    if constexpr (kTile.o_by_tma) {
      const int stage = q_ring.stage ^ 1;  // of this tile's queries: the ring is one ahead
      Output<Result>::template stage<QTile>(shared.q(w, stage), rows.factor, thread, O);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(q_barriers.empty(stage));
    }
    __syncwarp();
    if (kFeatures && lane == 0) work_barriers.release(done);
    if constexpr (!kTile.o_by_tma) output.store(rows, lane, O);
  }
}

}  // namespace tessera::cuda::sm90
