// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the fp8 forward kernel: 64 rows of a tile at a time, with S, P, O and the
// product of the block before in registers. fp8/kernel.cuh has the equations and the schedule.
#pragma once

#include "cuda/sm90/forward/score/blocks.cuh"
#include "cuda/sm90/fp8/shape.cuh"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/wgmma_fp8.cuh"

namespace tessera::cuda::sm90 {

template <typename Element, typename Row>
__device__ __forceinline__ void Fp8Forward<Element, Row>::consumer(const Fp8Params& a,
                                                                   const Work* works,
                                                                   const Shared shared,
                                                                   const int w) {
  const Params& p = a.problem;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
  const int thread_row = thread / kWarp * 16 + lane / 4;  // and thread_row + 8
  const bool leader = thread == 0;
  const auto q_barriers = shared.q_barriers(w);
  const auto k_barriers = shared.k_barriers();
  const auto v_barriers = shared.v_barriers();
  const auto work_barriers = shared.work_barriers();

  // T = P V of a block, O = A O + T: the tensor cores' sums are short (machine/wgmma_fp8.cuh).
  float S[kTileN / 2], T[kAccumulators], O[kTile.dv / 2];
  uint32_t P[kTileN / 8];
  // A thread has two rows. c takes scores to exponents of 2; it and the reference are in Weights'
  // unit. l is the thread's own part of the sum, A what O is behind since its reference moved.
  float c[2] = {}, reference[2], l[2] = {}, A[2];
  // With scales of blocks, k_unit is the one of the keys whose S is in registers, and c contains it.
  // v_unit is the scale of the block of V that O has got last: O counts in it. B is A times the
  // change of that unit, which so costs O nothing. keys: where the scales of the tile's blocks begin.
  float B[2], k_unit = 1, v_unit = 1;
  int keys = 0;
  Ring<kWorkStages> work_ring;
  Ring<kTile.q_stages> q_ring;
  Ring<kTile.k_stages> ring;  // of the block whose S is in registers, and of V

  // ---- products ----

  const auto issue_qk = [&](int stage) {
    const uint64_t q = QTile::k_major(shared.q(w, q_ring.stage));
    const uint64_t k = KTile::k_major(shared.k(stage));
    pin(S);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile.dqk / kStepBytes; ++step) {
      WgmmaFp8<kTileN>::ss(S, q + QTile::k_major_step(step), k + KTile::k_major_step(step),
                           step > 0);
    }
    wgmma_commit();
  };
  const auto issue_pv = [&](int stage) {
    const uint64_t v = VTile::k_major(shared.v(stage));
    pin(T);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileN / kStepBytes; ++step) {
      WgmmaFp8<kColumns>::rs(T, P + 4 * step, v + VTile::k_major_step(step), step > 0);
    }
    wgmma_commit();
  };
  const auto promote = [&] {
#pragma unroll
    for (int e = 0; e < kTile.dv / 2; ++e) {
      O[e] = fmaf(O[e], kByBlocks ? B[e / 2 % 2] : A[e / 2 % 2], T[e]);
    }
    if constexpr (kSumRows > 0) {  // their first column; the others are 0
      l[0] = fmaf(l[0], A[0], T[kTile.dv / 2]), l[1] = fmaf(l[1], A[1], T[kTile.dv / 2 + 2]);
    }
  };

  // ---- softmax ----

  // The scales of block j, which are asked for before they are needed; then c with that of K.
  const auto load_scale = [&](const float* scales, int j) -> float {
    if constexpr (!kByBlocks) return 1;
    return __ldg(scales + keys + j);
  };
  const auto scale_keys = [&](float scale) {
    if constexpr (kByBlocks) {
      const float units = ratio_of_powers(scale, k_unit);
      k_unit = scale;
#pragma unroll
      for (int r = 0; r < 2; ++r) c[r] = fmaxf(c[r] * units, kZeroScale);
    }
  };
  // References move to the rows' largest scores; alpha: what O and l are to be multiplied by, NaN
  // where a score is.
  const auto update_maxima = [&](bool masked, float(&alpha)[2]) {
    float largest[2];
    if (masked || kTile.exact_sum) {
      largest_scores(S, largest);
    } else {
      largest_scores_by_integers(S, largest);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float moved =
          max_or_nan(reference[r], fmaf(largest[r], c[r], -kLog2OfTop / Weights::kUnit));
      alpha[r] = exp2_approx((reference[r] - moved) * Weights::kUnit);
      reference[r] = moved;
    }
  };
  // The weights of groups g and g + 1, in the place of their scores.
  const auto softmax = [&](const Weights& weights, int g, float(&sum)[2]) {
#pragma unroll
    for (int e = 4 * g; e < 4 * g + 8; ++e) S[e] = weights.weight(S[e], e / 2 % 2);
    if constexpr (kTile.exact_sum) {
#pragma unroll
      for (int e = 4 * g; e < 4 * g + 8; ++e) sum[e / 2 % 2] += S[e];
    }
  };
  const auto round = [&](int g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* s = S + 4 * g + 2 * r;
      P[g + r] = Weights::pack(s[0], s[1], s[4], s[5]);
    }
  };

  // ---- tiles ----

  TileBlocks blocks;
  const auto next_tile = [&] {  // false past the last
    work_barriers.wait(work_ring);
    blocks = TileBlocks::of(works[work_ring.stage]);
    return blocks.begin < blocks.end;
  };
  // The place in [b, hq, sq] of the thread's row r; that of some other row where it does not exist.
  const auto stored_row = [&](const Work& work, int r) {
    const int row = work.q.first + work.m0 + w * kRows + thread_row + 8 * r;
    return (int64_t{work.q.batch} * p.hq + work.head) * p.sq + min(max(row, 0), p.sq - 1);
  };
  const auto start_tile = [&] {
    const Work& work = works[work_ring.stage];
    const int kv_head = work.head / p.group;
    if constexpr (kByBlocks) {
      keys = kv_head * a.rounded.key_slots + first_key_slot(p.thd_k, p.sk, work.k.first, work.n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float of_row = a.rounded.q_scale[stored_row(work, r)];
        c[r] = log2_scale(p) / Weights::kUnit * of_row;
      }
    } else {
      const float of_head = log2_scale(p) * scale_of(a.k_scale, work.n, kv_head) / Weights::kUnit;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = max(work.m0 + w * kRows + thread_row + 8 * r, 0);
        const int block = a.q_scale_block > 0 ? min(row / a.q_scale_block, a.last_q_block) : 0;
        c[r] = fmaxf(of_head * scale_of(a.q_scale, work.n, work.head, block), kZeroScale);
      }
    }
  };
  // What the thread's rows see is looked up for each block that the band cuts: there are few, and
  // the loop over the others has no registers left.
  const auto mask = [&](int j) {
    const Work& work = works[work_ring.stage];
    const int row = w * kRows + thread_row;
    const Interval keys[2] = {keys_of_tile_row<true>(work, row),
                              keys_of_tile_row<true>(work, row + 8)};
    VisibleBits<kTileN>(keys, j, lane).set_others(-kInfinity, S);
  };
  const auto release_q = [&] {
    __syncwarp();
    if (lane == 0) q_barriers.release(q_ring);
  };

  // ---- the first tile's first QK, which has no PV beside it ----

  if (!next_tile()) return;
  q_barriers.wait(q_ring);
  k_barriers.wait(ring);
  issue_qk(ring.stage);
  start_tile();
  wgmma_wait<0>();
  pin(S);
  if (leader) k_barriers.release(ring);
#pragma unroll
  for (int e = 0; e < kAccumulators; ++e) T[e] = 0;

  for (bool more = true; more;) {  // a tile; S of its first block is in registers
    // ---- the tile's first block ----

    if (blocks.end - 1 < blocks.clean_begin || blocks.end - 1 >= blocks.clean_end) {
      mask(blocks.end - 1);
    }
    reference[0] = reference[1] = kSeenNothing;
    l[0] = l[1] = 0;
    k_unit = 1;  // start_tile()
    scale_keys(load_scale(a.rounded.k_scale, blocks.end - 1));
    v_unit = load_scale(a.rounded.v_scale, blocks.end - 1);
    update_maxima(true, A);
    B[0] = A[0], B[1] = A[1];
    {
      const Weights weights(c, reference);
#pragma unroll
      for (int g = 0; g < kGroups; g += 2) softmax(weights, g, l), round(g);
    }
#pragma unroll
    for (int e = 0; e < kTile.dv / 2; ++e) O[e] = 0;

    // ---- its other blocks ----

    // Block j: its QK and the PV of the block before, then its softmax.
    const auto step = [&](int j, bool cut) {
      const auto here = ring.next();
      const float k_scale = load_scale(a.rounded.k_scale, j);
      k_barriers.wait(here);
      v_barriers.wait(ring);
      issue_qk(here.stage);
      issue_pv(ring.stage);
      scale_keys(k_scale);
      wgmma_wait<1>();  // for S; PV still runs, and reads P
      pin(S);
      if (cut) mask(j);
      float alpha[2], sum[2] = {};
      update_maxima(cut, alpha);
      const Weights weights(c, reference);
#pragma unroll
      for (int g = 0; g < kEarlyGroups; g += 2) softmax(weights, g, sum);
      const bool done = is_computed(kTile.exact_sum ? sum[0] + sum[1] : S[4 * kEarlyGroups - 1]);
      if (leader && done) k_barriers.release(here);
      wgmma_wait<0>();
      pin(T);
      if (leader) v_barriers.release(ring);
#pragma unroll
      for (int g = 0; g < kEarlyGroups; g += 2) round(g);
      promote();
      A[0] = alpha[0], A[1] = alpha[1];
      if constexpr (kByBlocks) {
        const float scale = load_scale(a.rounded.v_scale, j);
        const float units = ratio_of_powers(v_unit, scale);
        v_unit = scale;
        B[0] = alpha[0] * units, B[1] = alpha[1] * units;
      }
#pragma unroll
      for (int g = kEarlyGroups; g < kGroups; g += 2) softmax(weights, g, sum), round(g);
      if constexpr (kTile.exact_sum) {
        l[0] = fmaf(l[0], alpha[0], sum[0]), l[1] = fmaf(l[1], alpha[1], sum[1]);
      }
      ring = here;
    };
    int j = blocks.end - 2;
#pragma unroll 1
    for (; j >= blocks.clean_end; --j) step(j, true);
#pragma unroll 1
    for (; j >= blocks.clean_begin; --j) step(j, false);
#pragma unroll 1
    for (; j >= blocks.begin; --j) step(j, true);

    // ---- the seam: this tile's last PV, and the next one's first QK with it ----

    release_q();
    q_ring.advance();
    const auto done = work_ring;
    work_ring.advance();
    more = next_tile();
    const auto here = ring.next();
    const Work& work = works[done.stage];
    const auto load_v_scale = [&] {
      return kByBlocks ? v_unit : scale_of(a.v_scale, work.n, work.head / p.group);
    };
    // What the logits of a row lack, in exponents of 2.
    float of_mean[2] = {};
    if (kByBlocks && a.rounded.row) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        of_mean[r] = log2_scale(p) * a.rounded.row[stored_row(work, r)];
      }
    }
    if (more) {
      q_barriers.wait(q_ring);
      k_barriers.wait(here);
      v_barriers.wait(ring);
      issue_qk(here.stage);
      issue_pv(ring.stage);
      start_tile();
      wgmma_wait<0>();
      pin(S);
      if (leader) k_barriers.release(here);
    } else {
      v_barriers.wait(ring);
      issue_pv(ring.stage);
      wgmma_wait<0>();
    }
    pin(T);
    if (leader) v_barriers.release(ring);
    ring = here;

    // ---- o = O / l ----

    promote();
    const Output<Element> output{p, work};
    float most[2];  // of the rows' logits, in exponents of 2
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = reference[r] * Weights::kUnit + kLog2OfTop + of_mean[r];
      if (reference[r] <= kSeenNothing) most[r] = -kInfinity;
      l[r] *= 1 / kTop;
    }
    auto rows = output.finish(w * kRows + thread_row, lane, 1, most, l);
    const float v_scale = load_v_scale();
    rows.factor[0] *= v_scale / kTop, rows.factor[1] *= v_scale / kTop;
    __syncwarp();
    if (lane == 0) work_barriers.release(done);
    if (a.amax_o) raise_amax(rows.factor, O, a.amax_o);
    output.store(rows, lane, O);
  }
}

template <typename Element, typename Row>
__device__ __forceinline__ void Fp8Forward<Element, Row>::load_values(const Fp8Params& a,
                                                                      const Work* works,
                                                                      const Shared shared) {
  const auto barriers = shared.v_barriers();
  Ring<kTile.v_stages> ring;
  for_each_tile<Fp8Forward>(works, shared, [&](const Work& work) {
    const int kv_head = work.head / a.problem.group;
    const int start = transposed_start(a.problem.thd_k, work.k.first, work.n);
#pragma unroll 1
    for (int j = work.end - 1; j >= work.begin; --j) {
      barriers.acquire(ring, VTile::kBytes);
      tma_load(shared.v(ring.stage), &a.v, barriers.full(ring.stage), (start + j * kTileN) / kPair,
               kv_head, 0, 0, work.k.batch);
      ring.advance();
    }
  });
}

}  // namespace tessera::cuda::sm90
