// SPDX-License-Identifier: Apache-2.0
// A consumer of mla/kernel.cuh: a warpgroup that has half of the columns of O for all rows of its
// CTA, and the softmax of every other block.
#pragma once

#include "cuda/common/few/operands.cuh"
#include "cuda/sm90/forward/softmax.cuh"
#include "cuda/sm90/mla/rows.cuh"
#include "cuda/sm90/mla/shape.cuh"

namespace tessera::cuda::sm90 {

template <typename Kernel>
class MlaConsumer {
 public:
  using Element = typename Kernel::Element;
  using Shared = typename Kernel::Shared;
  using Storage = typename Kernel::SharedStorage;

  // w: 0 has the left half of O and the first block of a pair, 1 the others.
  __device__ MlaConsumer(const MlaArgs& args, Storage& storage, const Shared& shared, int rank,
                         int w)
      : args_(args),
        storage_(storage),
        shared_(shared),
        rank_(rank),
        w_(w),
        thread_(threadIdx.x % kWarpgroup),
        lane_(threadIdx.x % kWarp),
        row_(thread_ / kWarp * 16 + lane_ / 4),
        c_(fmaxf(args.params.softmax_scale * kLog2e, kZeroScale)) {}

  __device__ __forceinline__ void run() {
    uint32_t turn = 0;  // of this consumer's buffer
    for (int count = 0;; ++count) {
      mbarrier_wait(shared_.q_full(), count % 2);
      const MlaWork& work = storage_.work[count % 2];
      if (uniform(work.last)) return;
      begin(work);
      const int blocks = uniform(work.blocks);
      const int first_block = uniform(work.piece.key_begin) / kKeys;
#pragma unroll 1
      for (int i = 0; i < blocks; i += 2) {
        const bool two = i + 1 < blocks, last = i + 2 >= blocks;
        if (w_ == 0) {
          first_of_pair(first_block + i, turn, two, last);
        } else {
          second_of_pair(first_block + i + 1, turn, two, last);
        }
        if (w_ == 0 || two) turn ^= 1;
      }
      finish(work);
    }
  }

 private:
  static constexpr int kKeys = Kernel::kKeys;
  static constexpr int kBothConsumers = Kernel::kConsumers * kWarpgroup;
  static constexpr float kHeadroom = 8;  // by which scores may pass the reference, in units of log2
  using QTile = typename Kernel::QTile;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using PTile = typename Kernel::PTile;

  __device__ __forceinline__ void begin(const MlaWork& work) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = rank_ * Kernel::kRows + row_ + 8 * r;
      keys_[r] = work.sequence.band.row(work.piece.row0 + (row >> args_.pack_shift));
      reference_[r] = -kInfinity;
      sum_[r] = 0;
    }
    visible_ = {uniform(work.visible.lo), uniform(work.visible.hi)};
    clean_ = {uniform(work.clean.lo), uniform(work.clean.hi)};
    if constexpr (Kernel::kFp8) {
      c_ = fmaxf(args_.params.softmax_scale * kLog2e, kZeroScale) *
           k_scale_of(args_.params, work.sequence.n, work.kv_head);
    }
#pragma unroll
    for (float& x : O) x = 0;
  }

  // S0 and P0, which the other one reads too; O += P0 V0 + P1 V1 of the left columns.
  __device__ __forceinline__ void first_of_pair(int block, uint32_t turn, bool two, bool last) {
    float moved[2];
    issue_scores(turn);
    wgmma_wait<0>();
    pin(S);
    if (last) release(shared_.q_empty());
    softmax(block, moved);
    publish(moved, kFirstWeights);
    rescale(moved);
    issue_own();
    accumulate_sums();
    wgmma_wait<0>();
    pin(O);
    release_keys(shared_.k_empty(0, 0));
    if (!two) return;
    follow(kSecondWeights, 1);
    issue_others(1);
    wgmma_wait<0>();
    pin(O);
    release_keys(shared_.k_empty(1, 0));
    release_keys(shared_.k_empty(1, 1));  // where P1 lies
  }

  // S1 and P1, with P0 V0 of the right columns under its softmax; then P1 V1.
  __device__ __forceinline__ void second_of_pair(int block, uint32_t turn, bool two, bool last) {
    if (last && !two) release(shared_.q_empty());
    if (two) {
      issue_scores(turn);
      if constexpr (Kernel::kSharers > 1) {
        if (thread_ == 0)
          mbarrier_arrive_in_cluster_relaxed(address_in(rank_ ^ 1, shared_.k_sent()));
      }
      wgmma_wait<0>();
      pin(S);
      if (last) release(shared_.q_empty());
    }
    follow(kFirstWeights, 0);
    issue_others(0);
    float moved[2];
    if (two) {
      softmax(block, moved);
      if constexpr (Kernel::kSharers > 1) mbarrier_wait(shared_.k_sent(), turn);
      publish(moved, kSecondWeights);
    }
    wgmma_wait<0>();
    pin(O);
    release_keys(shared_.k_empty(0, 1));
    if (!two) return;
    rescale(moved);
    accumulate_sums();
    issue_own();
    wgmma_wait<0>();
    pin(O);
    release_keys(shared_.k_empty(1, 1));
  }

  // S = Q K^T of this consumer's block, chunk by chunk as they arrive.
  __device__ __forceinline__ void issue_scores(uint32_t turn) {
    const uint64_t q = QTile::k_major(shared_.q()), k = KTile::k_major(shared_.k(w_));
    pin(S);
#pragma unroll
    for (int chunk = 0; chunk < Kernel::kChunks; ++chunk) {
      mbarrier_wait(shared_.k_full(w_, chunk), turn);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < KTile::kStepsPerChunk; ++i) {
        const int step = chunk * KTile::kStepsPerChunk + i;
        Wgmma<Element, kKeys>::template ss<kMajorK, kMajorK>(
            S, q + QTile::k_major_step(step), k + KTile::k_major_step(step), step != 0);
      }
    }
    wgmma_commit();
  }

  // P of a block, in P_ and as fp32 in S, by a reference that follows the largest score where it is
  // far beyond it: `moved`.
  __device__ __forceinline__ void softmax(int block, float (&moved)[2]) {
    const int key0 = block * kKeys;
    if (key0 < clean_.lo || key0 + kKeys > clean_.hi) {
      VisibleBits<kKeys>(keys_, block, lane_).set_others(-kInfinity, S);
      if (key0 < visible_.lo || key0 + kKeys > visible_.hi) clear_values(key0);
    }
    float largest[2], top[2];
    row_maxima(S, largest);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float score = largest[r] * c_;
      moved[r] = score > reference_[r] + kHeadroom ? score : reference_[r];
      top[r] = moved[r] == -kInfinity ? 0 : moved[r];
    }
#pragma unroll
    for (int e = 0; e < kKeys / 2; ++e) S[e] = exp2_approx(fmaf(S[e], c_, -top[e / 2 % 2]));
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) P_[i] = pack<Element>(S[2 * i], S[2 * i + 1]);
  }

  // Rows of V that no row of the unit sees may hold anything, and a weight of 0 is no protection.
  __device__ __forceinline__ void clear_values(int key0) {
    constexpr int kUnits = VTile::kChunks * 8;  // of 16 bytes, of a row
#pragma unroll 1
    for (int i = thread_; i < kKeys * kUnits; i += kWarpgroup) {
      const int key = i / kUnits;
      if (visible_.contains(key0 + key)) continue;
      store_shared(VTile::unit(shared_.k(w_), key, i % kUnits), uint4{0, 0, 0, 0});
    }
    async_proxy_fence();
    named_barrier_sync(cleared_barrier(w_), kWarpgroup);
  }

  // P and the reference that it has, for the other consumer.
  __device__ __forceinline__ void publish(const float (&moved)[2], NamedBarrier barrier) {
    const uint32_t p = shared_.p(w_);
    const int row = thread_ / kWarp * 16 + lane_ % 16;
#pragma unroll
    for (int step = 0; step < kKeys / kStepK; ++step) {
      stmatrix_x4(PTile::unit(p, row, 2 * step + lane_ / 16), P_ + 4 * step);
    }
    if (lane_ % 4 == 0) {
      storage_.reference[w_][row_] = moved[0];
      storage_.reference[w_][row_ + 8] = moved[1];
    }
    async_proxy_fence();
    named_barrier_arrive(barrier, kBothConsumers);
  }

  // Waits for the other one's P, and takes its reference.
  __device__ __forceinline__ void follow(NamedBarrier barrier, int other) {
    named_barrier_sync(barrier, kBothConsumers);
    rescale({storage_.reference[other][row_], storage_.reference[other][row_ + 8]});
  }

  __device__ __forceinline__ void rescale(const float (&moved)[2]) {
    if (!__any_sync(kAllLanes, moved[0] != reference_[0] || moved[1] != reference_[1])) return;
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Equal ones may be infinite.
      alpha[r] = moved[r] == reference_[r] ? 1.f : exp2_approx(reference_[r] - moved[r]);
      reference_[r] = moved[r];
      sum_[r] *= alpha[r];
    }
#pragma unroll
    for (int e = 0; e < Kernel::kColumns / 2; ++e) O[e] *= alpha[e / 2 % 2];
  }

  __device__ __forceinline__ void accumulate_sums() {
#pragma unroll
    for (int e = 0; e < kKeys / 2; ++e) sum_[e / 2 % 2] += S[e];
  }

  __device__ __forceinline__ uint64_t values(int buffer) const {
    return VTile::mn_major(shared_.k(buffer) + w_ * Kernel::kLeftChunks * VTile::kChunkBytes);
  }

  // O += P V of this consumer's block, issued.
  __device__ __forceinline__ void issue_own() {
    const uint64_t v = values(w_);
    pin(O);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / kStepK; ++step) {
      Wgmma<Element, Kernel::kColumns>::template rs<kMajorMN>(O, P_ + 4 * step,
                                                              v + VTile::mn_major_step(step), 1);
    }
    wgmma_commit();
  }
  // The same of the other one's block.
  __device__ __forceinline__ void issue_others(int buffer) {
    const uint64_t p = PTile::k_major(shared_.p(buffer)), v = values(buffer);
    pin(O);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / kStepK; ++step) {
      Wgmma<Element, Kernel::kColumns>::template ss<kMajorK, kMajorMN>(
          O, p + PTile::k_major_step(step), v + VTile::mn_major_step(step), 1);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void release(uint32_t barrier) {
    if (thread_ == 0) mbarrier_arrive(barrier);
  }
  // To all that bring keys here.
  __device__ __forceinline__ void release_keys(uint32_t barrier) {
    if constexpr (Kernel::kSharers == 1) {
      release(barrier);
    } else if (thread_ < Kernel::kSharers) {
      mbarrier_arrive_in_cluster_relaxed(address_in(thread_, barrier));
    }
  }

  // The sums of both, then the rows, or the part of them.
  __device__ __forceinline__ void finish(const MlaWork& work) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] += __shfl_xor_sync(kAllLanes, sum_[r], 1);
      sum_[r] += __shfl_xor_sync(kAllLanes, sum_[r], 2);
      if (lane_ % 4 == 0) storage_.sum[w_][row_ + 8 * r] = sum_[r];
    }
    // What the producer may overwrite when both have asked for the next piece is read before.
    const int parts = uniform(work.piece.parts), part = uniform(work.piece.part);
    const int n = uniform(work.sequence.n);
    const int slot = uniform(work.piece.slot_of(part)), unit = uniform(work.piece.unit);
    const int row0 = uniform(work.piece.row0), head0 = uniform(work.head0);
    const Rows rows = work.sequence.q;
    if (w_ == 0 && thread_ == 0 && part == 0 && rank_ == 0) {
      args_.cut[unit] = {args_.mark,      parts, work.piece.first_slot, work.piece.next_slots,
                         work.sequence.n, row0,  work.piece.pack};
    }
    named_barrier_sync(kBothSums, kBothConsumers);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] = storage_.sum[0][row_ + 8 * r] + storage_.sum[1][row_ + 8 * r];
    }
    named_barrier_sync(kBothSums, kBothConsumers);
    if (parts > 1) {
      store_part(slot, rows, row0, head0);
    } else {
      store_rows(n, rows, row0, head0);
    }
  }

  // The rows of the part that somebody stores, their columns as column_of_part() says.
  __device__ __forceinline__ void store_part(int slot, const Rows& rows, int row0, int head0) {
    const int columns = Kernel::kTile.dv, quad = lane_ % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row_of = rank_ * Kernel::kRows + row_ + 8 * r;
      if (!row_of_unit(args_, rows, row0, head0, row_of).owned) continue;
      const int64_t row = int64_t{slot} * Kernel::kUnitRows + row_of;
      if (w_ == 0 && quad == 0) args_.part_sums[row] = {reference_[r], sum_[r]};
      float* const to = args_.part_o + row * columns + w_ * Kernel::kColumns + 4 * quad;
#pragma unroll
      for (int g = 0; g < Kernel::kColumns / 16; ++g) {
        const float* const o = O + 8 * g + 2 * r;
        *reinterpret_cast<float4*>(to + 16 * g) = {o[0], o[1], o[4], o[5]};
      }
    }
  }

  __device__ __forceinline__ void store_rows(int n, const Rows& rows, int row0, int head0) {
    Element* o[2];
    float factor[2];
    bool owned[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const MlaRow row =
          row_of_unit(args_, rows, row0, head0, rank_ * Kernel::kRows + row_ + 8 * r);
      factor[r] = finish_row(args_.params, row, reference_[r], sum_[r], w_ == 0 && lane_ % 4 == 0);
      if constexpr (Kernel::kFp8) factor[r] *= v_scale_of(args_.params, n, row.head);
      owned[r] = row.owned;
      o[r] = static_cast<Element*>(args_.params.tensor[TESSERA_O].data) + row.o +
             w_ * Kernel::kColumns + first_traded_column(lane_);
    }
    keep_rows(factor[0] != 0, factor[1] != 0, O);
    store_traded(o, factor, lane_, O, [&](int r, int) { return owned[r]; });
  }

  const MlaArgs& args_;
  Storage& storage_;
  const Shared shared_;
  const int rank_, w_, thread_, lane_,
      row_;  // row_: of the CTA; the thread has the one 8 below too
  float c_;  // from scores to units of log2
  Interval keys_[2], visible_, clean_;
  float reference_[2], sum_[2];
  float O[Kernel::kColumns / 2], S[kKeys / 2];
  uint32_t P_[kKeys / 4];
};

}  // namespace tessera::cuda::sm90
