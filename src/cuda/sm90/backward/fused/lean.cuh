// SPDX-License-Identifier: Apache-2.0
// What an owner multiplies and looks up where scores have no features, or ALiBi alone
// (backward/fused/shape.cuh).
//
// Shared memory is as busy as the tensor cores: S, dP and dQ read 128 bytes a clock, all that it
// gives, for as long as they run. So some of K stays in registers, and statistics come by 16 bytes,
// before they are needed. Descriptors are one addition to what a register holds.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/sm90/backward/edges.cuh"
#include "cuda/sm90/backward/products.cuh"
#include "cuda/sm90/backward/schedule/schedule.cuh"
#include "cuda/sm90/backward/tile.h"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"
#include "cuda/sm90/machine/wgmma.cuh"

namespace tessera::cuda::sm90 {

// True for a row of backward/table.def without a feature, or with ALiBi in any order at d128, if
// neither dQ nor a tile is cut in three. Others have no registers for it.
template <typename Row>
inline constexpr bool kIsLean = (Row::kFeatures & kEverything
                                     ? Row::kFeatures == kAlibi && Row::kTile.dqk == 128 &&
                                           !Row::kTile.deterministic
                                     : Row::kTile.dqk <= 128) &&
                                !Row::kTile.pair;

// The place of the statistics of query i of a block: in each 16 queries, the four of a thread stand
// side by side.
__device__ __forceinline__ int place_in_quads(int i) {
  return (i & ~15) | (i >> 1 & 3) << 2 | (i >> 3 & 1) << 1 | (i & 1);
}

// lse2 or delta of the queries of a thread, from shared memory in this order.
template <int kTileM>
class Statistics {
 public:
  // address: of the block's.
  __device__ __forceinline__ Statistics(uint32_t address)
      : address_(address + 16 * (threadIdx.x % 4)) {}

  // Loads as many as there are registers for before they are needed; then what is left.
  __device__ __forceinline__ void load_first() { load<0, kFirst>(); }
  __device__ __forceinline__ void load_others() { load<kFirst, kTileM / 16>(); }
  // The statistics of group g of the accumulators: two queries.
  __device__ __forceinline__ float2 of(int g) const {
    const float4& four = four_[g / 2];
    return g % 2 ? float2{four.z, four.w} : float2{four.x, four.y};
  }

 private:
  static constexpr int kFirst = 4;

  template <int kBegin, int kEnd>
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) four_[i] = load_shared_four(address_ + 64 * i);
  }

  uint32_t address_;
  float4 four_[kTileM / 16];
};

template <typename Element, int kCount>
__device__ __forceinline__ void pack_all(const float (&S)[kCount], uint32_t (&P)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    P[i] = pack<Element>(S[2 * i], S[2 * i + 1]);
    asm volatile("" : "+r"(P[i]));
  }
}
// dS = P (dP - delta).
template <typename Element, int kTileM>
__device__ __forceinline__ void differentiate(const float (&P)[kTileM / 2],
                                              const Statistics<kTileM>& delta,
                                              const float (&dP)[kTileM / 2],
                                              uint32_t (&dS)[kTileM / 4]) {
#pragma unroll
  for (int e = 0; e < kTileM / 2; e += 2) {
    const float2 of_query = delta.of(e / 4);
    dS[e / 2] = pack<Element>(P[e] * (dP[e] - of_query.x), P[e + 1] * (dP[e + 1] - of_query.y));
  }
}

// Which blocks of queries see the 64 keys of owner w of a tile.
template <int kTileM>
class OwnBlocks {
 public:
  __device__ __forceinline__ OwnBlocks(const KeyTile& tile, int w) {
    const int first = tile.key0 + 64 * w, end = first + 64;
    const Interval some = tile.band.rows(first, end), all = tile.band.rows_of_all(first, end);
    begin_ = uniform_register(some.lo / kTileM);
    end_ = uniform_register((some.hi + kTileM - 1) / kTileM);
    clean_begin_ = uniform_register((all.lo + kTileM - 1) / kTileM);
    clean_end_ = uniform_register(all.hi >= tile.q.length ? tile.end : max(all.hi, 0) / kTileM);
  }
  // Some query of the block, some key.
  __device__ __forceinline__ bool sees(int block) const { return block >= begin_ && block < end_; }
  // True if the band hides some query or some key.
  __device__ __forceinline__ bool cuts(int block) const {
    return block < clean_begin_ || block >= clean_end_;
  }

 private:
  int begin_, end_, clean_begin_, clean_end_;
};

// The lower word of a descriptor of a tile; their upper words are all the same.
__device__ __forceinline__ uint32_t low(uint64_t descriptor) {
  return uniform_register(static_cast<int>(static_cast<uint32_t>(descriptor)));
}
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  return SmemTile<8, 64>::k_major(0) >> 32 << 32 | low;
}
// Turns a k-major descriptor of a tile into the mn-major one.
template <typename Tile>
__device__ __forceinline__ uint32_t rows_of() {
  return static_cast<uint32_t>(Tile::mn_major(0) - Tile::k_major(0));
}

// Kernel: a Backward.
template <typename Element, GradientKernel Kernel>
class LeanOperands {
 public:
  using Shared = typename Kernel::Shared;
  using QTile = typename Kernel::QTile;
  using GradOTile = typename Kernel::GradOTile;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using GradientTile = typename Kernel::GradientTile;
  static constexpr int kTileM = Kernel::kTileM, kSteps = kTileM / kStepK;
  static constexpr int kKeySteps = Kernel::kKeySteps;  // of K, in registers

  __device__ __forceinline__ LeanOperands(const Shared shared, int w)
      : q_(low(QTile::k_major(shared.q(0)))),
        grad_o_(low(GradOTile::k_major(shared.grad_o(0)))),
        k_(low(KTile::k_major(shared.k() + w * 64 * kChunkRowBytes))),
        v_(low(VTile::k_major(shared.v() + w * 64 * kChunkRowBytes))),
        ds_(low(GradientTile::k_major(shared.ds(0) +
                                      (Kernel::kSplitsRows ? w * 64 * kChunkRowBytes : 0)))),
        k_columns_(low(
            KTile::mn_major(shared.k() + (Kernel::kSplitsRows ? 0 : w * Kernel::kOtherColumns)))) {}

  // Called by all lanes, when K is there. row: the warp's first one.
  __device__ __forceinline__ void hold_keys(const BackwardParams&, const KeyTile&,
                                            const Shared shared, int row) {
    const uint32_t k = shared.k();
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) {
      uint32_t a[4];
      ldmatrix_x4(a, KTile::unit(k, row + lane % 16, 2 * i + lane / 16));
#pragma unroll
      for (int j = 0; j < 4; ++j) keys_[4 * i + j] = a[j];
    }
  }

  __device__ __forceinline__ void issue_s(int stage, float (&S)[kTileM / 2]) const {
    const uint64_t k = descriptor(k_), q = descriptor(q_ + stage * kQBytes);
    pin(S);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Kernel::kTile.dqk / kStepK; ++i) {
      if (i < kKeySteps) {
        Wgmma<Element, kTileM>::template rs<kMajorK>(S, keys_ + 4 * i, q + QTile::k_major_step(i),
                                                     i > 0);
      } else {
        Wgmma<Element, kTileM>::template ss<kMajorK, kMajorK>(S, k + KTile::k_major_step(i),
                                                              q + QTile::k_major_step(i), i > 0);
      }
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_dp(int stage, float (&dP)[kTileM / 2]) const {
    issue_scores<Element, VTile, GradOTile, Kernel::kTile.dv>(
        dP, descriptor(v_), descriptor(grad_o_ + stage * kGradOBytes));
  }
  __device__ __forceinline__ void issue_dq(int buffer,
                                           float (&dQ)[Kernel::kColumnsOfDq / 2]) const {
    issue_columns<Element, GradientTile, KTile, kMajorK, Kernel::kTileN / kStepK>(
        dQ, descriptor(ds_ + buffer * (GradientTile::kBytes >> 4)), descriptor(k_columns_));
  }
  __device__ __forceinline__ void issue_dv(int stage, const uint32_t (&P)[kTileM / 4],
                                           float (&dV)[Kernel::kTile.dv / 2]) const {
    issue_sum<Element, GradOTile, kSteps>(
        dV, P, descriptor(grad_o_ + stage * kGradOBytes + rows_of<GradOTile>()));
  }
  __device__ __forceinline__ void issue_dk(int stage, const uint32_t (&dS)[kTileM / 4],
                                           float (&dK)[Kernel::kTile.dqk / 2]) const {
    issue_sum<Element, QTile, kSteps>(dK, dS, descriptor(q_ + stage * kQBytes + rows_of<QTile>()));
  }

 private:
  // Descriptors count in units of 16 bytes.
  static constexpr uint32_t kQBytes = QTile::kBytes >> 4, kGradOBytes = GradOTile::kBytes >> 4;

  uint32_t q_, grad_o_, k_, v_, ds_, k_columns_;
  uint32_t keys_[4 * kKeySteps + !kKeySteps];
};

}  // namespace tessera::cuda::sm90
