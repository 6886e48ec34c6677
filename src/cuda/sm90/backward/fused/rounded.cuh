// SPDX-License-Identifier: Apache-2.0
// The fused backward kernel of 16-bit inputs whose scores and dP are products of E4M3
// (common/quantise/rounded.h). dV, dK and dQ are products of the caller's own q, do and k:
//
//   S^T  = c ks qs (k8 q8^T)      P^T  = exp2(S^T - lse2)        lse2 = log2(e) (lse - scale row)
//   dP^T = vs ds (v8 do8^T)       dS^T = P^T (dP^T - delta)      delta = <ds do8, o> - dlse
//
// ks and vs are scales of the tile, qs and ds of a query. backward_rows writes lse2 and c qs of a
// block side by side, and delta and ds, so that they come by one copy. What is needed late in a step
// has a ring of its own:
//
//   barrier      says
//   q [s]        Q and dO of a block in E4M3, lse2 and c qs have arrived; K and V of E4M3 with block 0
//   grad_o [s]   Q and dO of a block in 16 bits, delta and ds have arrived; K with block 0
//
// At d128 grad_o has two stages: when both owners have dS(i), and so are done with block i - 1, its
// stage takes block i + 1.
//
// dQ would be nearer to exact with K less its mean, which rows of dS, that do not quite sum to 0,
// multiply: K would be changed in shared memory as it has come, before the first dQ.
#pragma once

#include "cuda/common/quantise/rounded.h"
#include "cuda/sm90/backward/fused/lean.cuh"
#include "cuda/sm90/machine/wgmma_fp8.cuh"
#include "cuda/sm90/score/scale.cuh"

namespace tessera::cuda::sm90 {

constexpr int kStepBytes = 32;  // of a row, in a product of E4M3

// S = P of the products S: exp2(f S - lse2), f the tile's scale times the factor of a query. lse2: of
// the block in shared memory, where the factors follow. Both are read as they are needed: there are
// no registers for all of them.
template <int kTileM>
__device__ __forceinline__ void exponentials(float scale, uint32_t lse2, float (&S)[kTileM / 2]) {
  const uint32_t quad = 16 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < kTileM / 16; ++i) {
    const float4 f = load_shared_four(lse2 + kTileM * 4 + quad + 64 * i),
                 l = load_shared_four(lse2 + quad + 64 * i);
    const float factor[4] = {f.x * scale, f.y * scale, f.z * scale, f.w * scale};
    const float reference[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int query = e / 4 * 2 + e % 2;
      float& s = S[8 * i + e];
      s = exp2_approx(fmaf(s, factor[query], -reference[query]));
    }
  }
}
// dS = P (f dP - delta) of the products dP. delta: of the block, as lse2.
template <typename Element, int kTileM>
__device__ __forceinline__ void differentiate(float scale, uint32_t delta,
                                              const float (&P)[kTileM / 2],
                                              const float (&dP)[kTileM / 2],
                                              uint32_t (&dS)[kTileM / 4]) {
  const uint32_t quad = 16 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < kTileM / 16; ++i) {
    const float4 f = load_shared_four(delta + kTileM * 4 + quad + 64 * i),
                 d = load_shared_four(delta + quad + 64 * i);
    const float factor[4] = {f.x * scale, f.y * scale, f.z * scale, f.w * scale};
    const float of_query[4] = {d.x, d.y, d.z, d.w};
    const auto gradient = [&](int e) {
      const int query = e / 4 * 2 + e % 2;
      return P[8 * i + e] * fmaf(dP[8 * i + e], factor[query], -of_query[query]);
    };
#pragma unroll
    for (int e = 0; e < 8; e += 2) dS[4 * i + e / 2] = pack<Element>(gradient(e), gradient(e + 1));
  }
}

// Kernel: a Backward with products of E4M3. Where tiles are is known but for the start of shared
// memory, so that descriptors take three registers.
template <typename Element, GradientKernel Kernel>
class RoundedOperands {
 public:
  using Shared = typename Kernel::Shared;
  using QTile = typename Kernel::QTile;
  using GradOTile = typename Kernel::GradOTile;
  using KTile = typename Kernel::KTile;
  using GradientTile = typename Kernel::GradientTile;
  using Q8Tile = typename Kernel::Q8Tile;
  using K8Tile = typename Kernel::K8Tile;
  using V8Tile = typename Kernel::V8Tile;
  static constexpr int kTileM = Kernel::kTileM, kSteps = kTileM / kStepK;
  static constexpr int kSteps8 = Kernel::kTile.dqk / kStepBytes;  // of dv, too
  // Steps of K and of V that are held in registers: as many as ptxas finds room for. (With 4 of K at
  // d128 it spills in the loop, with 2 it serialises the products.)
  static constexpr int kHeldOfK = Kernel::kTile.dqk <= 64 ? 2 : 3;
  static constexpr int kHeldOfV = Kernel::kTile.dv <= 64 ? 2 : 0;

  __device__ __forceinline__ RoundedOperands(const Shared shared, int w)
      : start_(low(Q8Tile::k_major(shared.base))),
        rows_(low(K8Tile::k_major(shared.base + w * 64 * kChunkRowBytes))),
        columns_(low(KTile::mn_major(shared.base + w * Kernel::kOtherColumns))) {}

  // Called by all lanes, when K and V are there. row: the warp's first one.
  __device__ __forceinline__ void hold_keys(const BackwardParams& a, const KeyTile& tile,
                                            const Shared shared, int row) {
    const Params& p = a.problem;
    const int slot = first_key_slot(p.thd_k, p.sk, tile.k.first, tile.n) + tile.key0 / kKeysOfScale;
    const int64_t at = int64_t{tile.kv_head} * a.key_slots + slot;
    // From the L2: the kernel may have started while the one before it ran, which waits for those
    // that wrote them.
    k_scale_ = uniform_register(__float_as_int(__ldcg(a.k_scale + at)));
    v_scale_ = uniform_register(__float_as_int(__ldcg(a.v_scale + at)));
    hold<K8Tile, kHeldOfK>(shared.k8(), row, keys_);
    hold<V8Tile, kHeldOfV>(shared.v8(), row, values_);
  }
  // The scales of the tile's keys and values.
  __device__ __forceinline__ float k_scale() const { return __int_as_float(k_scale_); }
  __device__ __forceinline__ float v_scale() const { return __int_as_float(v_scale_); }

  __device__ __forceinline__ void issue_s(int stage, float (&S)[kTileM / 2]) const {
    issue<K8Tile, kHeldOfK>(S, keys_, rows_ + at(places().k8()), q8(stage));
  }
  __device__ __forceinline__ void issue_dp(int stage, float (&dP)[kTileM / 2]) const {
    issue<V8Tile, kHeldOfV>(dP, values_, rows_ + at(places().v8()), q8(stage) + at(Q8Tile::kBytes));
  }
  __device__ __forceinline__ void issue_dq(int buffer,
                                           float (&dQ)[Kernel::kColumnsOfDq / 2]) const {
    issue_columns<Element, GradientTile, KTile, kMajorK, Kernel::kTileN / kStepK>(
        dQ, descriptor(start_ + at(places().ds(0)) + buffer * at(GradientTile::kBytes)),
        descriptor(columns_ + at(places().k())));
  }
  __device__ __forceinline__ void issue_dv(int stage, const uint32_t (&P)[kTileM / 4],
                                           float (&dV)[Kernel::kTile.dv / 2]) const {
    issue_sum<Element, GradOTile, kSteps>(
        dV, P,
        descriptor(start_ + at(places().grad_o(0)) + stage * at(GradOTile::kBytes) +
                   rows_of<GradOTile>()));
  }
  __device__ __forceinline__ void issue_dk(int stage, const uint32_t (&dS)[kTileM / 4],
                                           float (&dK)[Kernel::kTile.dqk / 2]) const {
    issue_sum<Element, QTile, kSteps>(
        dK, dS,
        descriptor(start_ + at(places().q(0)) + stage * at(QTile::kBytes) + rows_of<QTile>()));
  }

 private:
  static __device__ __forceinline__ Shared places() { return {0}; }

  // Descriptors count in units of 16 bytes.
  static __device__ __forceinline__ constexpr uint32_t at(uint32_t bytes) { return bytes >> 4; }
  __device__ __forceinline__ uint32_t q8(int stage) const {
    return start_ + at(places().q8(0)) + stage * at(Kernel::kRoundedBytes);
  }
  // D = A B^T. The first kHeld steps of A are in registers.
  template <typename A, int kHeld, int kCount>
  static __device__ __forceinline__ void issue(float (&d)[kTileM / 2],
                                               const uint32_t (&held)[kCount], uint32_t a,
                                               uint32_t b) {
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps8; ++i) {
      const uint64_t to = descriptor(b) + Q8Tile::k_major_step(i);
      if (i < kHeld) {
        WgmmaFp8<kTileM>::rs(d, held + 4 * i, to, i > 0);
      } else {
        WgmmaFp8<kTileM>::ss(d, descriptor(a) + A::k_major_step(i), to, i > 0);
      }
    }
    wgmma_commit();
  }
  // 16 rows of a tile as A registers: four for every 32 bytes.
  template <typename Tile, int kHeld, int kCount>
  static __device__ __forceinline__ void hold(uint32_t tile, int row, uint32_t (&to)[kCount]) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      uint32_t a[4];
      ldmatrix_x4(a, Tile::unit(tile, row + lane % 16, 2 * i + lane / 16));
#pragma unroll
      for (int j = 0; j < 4; ++j) to[4 * i + j] = a[j];
    }
  }

  // Lower words of descriptors: the start of shared memory, and from there on this owner's rows and
  // its columns of a tile.
  uint32_t start_, rows_, columns_;
  int k_scale_ = 0, v_scale_ = 0;  // bits of floats
  uint32_t keys_[4 * kHeldOfK + !kHeldOfK], values_[4 * kHeldOfV + !kHeldOfV];
};

// Four products of E4M3 with 16-bit elements.
template <typename Element>
__device__ __forceinline__ float dot_of_rounded(uint32_t bytes, uint32_t low, uint32_t high) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2 two =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes >> 16 * i), __NV_E4M3);
    const float2 x = __half22float2(two), y = unpack<Element>(i == 0 ? low : high);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
  }
  return sum;
}

// Statistics of a block of queries whose dO is rounded, and its factors, by a warpgroup: a few lanes
// a row, of 16 columns each. Kernel: a Backward with products of E4M3.
template <typename Element, GradientKernel Kernel>
__device__ __forceinline__ void write_rounded_statistics(const BackwardParams& a, const Rows& rows,
                                                         int head, int row0, int64_t slot) {
  constexpr int kColumns = 16, kLanes = Kernel::kTile.dv / kColumns, kRows = kWarp / kLanes;
  constexpr int kRowsOfThisWarp = Kernel::kTileM / (kWarpgroup / kWarp);
  const Params& p = a.problem;
  const int lane = threadIdx.x % kWarp, column = lane % kLanes * kColumns;
  const View &o = p.tensor[TESSERA_O], &lse_view = p.tensor[TESSERA_LSE],
             &dlse = p.tensor[TESSERA_DLSE];
  const int64_t padded = (p.dv + kColumns - 1) / kColumns * kColumns;
#pragma unroll
  for (int first = 0; first < kRowsOfThisWarp; first += kRows) {
    const int i = threadIdx.x / kWarp * kRowsOfThisWarp + first + lane / kLanes, row = row0 + i;
    const bool exists = row < rows.length;
    float sum = 0;
    if (exists && column < p.dv) {
      const int64_t dense = (int64_t{rows.batch} * p.sq + rows.first + row) * p.hq + head;
      const uint4 grad_o =
          *reinterpret_cast<const uint4*>(a.rounded_grad_o + dense * padded + column);
      const Element* const of_o = static_cast<const Element*>(o.data) +
                                  offset_of(o, rows.batch, rows.first + row, head) + column;
      const uint4 low = *reinterpret_cast<const uint4*>(of_o);
      const uint4 high =
          column + 8 < p.dv ? *reinterpret_cast<const uint4*>(of_o + 8) : uint4{0, 0, 0, 0};
      sum = dot_of_rounded<Element>(grad_o.x, low.x, low.y) +
            dot_of_rounded<Element>(grad_o.y, low.z, low.w) +
            (dot_of_rounded<Element>(grad_o.z, high.x, high.y) +
             dot_of_rounded<Element>(grad_o.w, high.z, high.w));
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, lanes);
    }
    if (lane % kLanes != 0) continue;
    // What rows have that do not exist, or see no key.
    float lse2 = kInfinity, delta = 0, of_score = 0, of_gradient = 0;
    if (exists) {
      const int64_t of_row = (int64_t{rows.batch} * p.hq + head) * p.sq + rows.first + row;
      const float lse = static_cast<const float*>(
          lse_view.data)[offset_of(lse_view, rows.batch, head, rows.first + row)];
      of_score = log2_scale(p) * a.q_scale[of_row], of_gradient = a.do_scale[of_row];
      if (lse != -kInfinity) {
        delta = of_gradient * sum;
        if (dlse.data) {
          delta -= static_cast<const float*>(
              dlse.data)[offset_of(dlse, rows.batch, head, rows.first + row)];
        }
        lse2 = kLog2e * lse;
        if (lse2 == -kInfinity) lse2 = kInfinity;  // of a very low sink
        if (a.row) lse2 -= kLog2e * p.softmax_scale * a.row[of_row];
      }
    }
    const int64_t at = slot * 2 * Kernel::kTileM + place_in_quads(i);
    a.lse2[at] = lse2, a.lse2[at + Kernel::kTileM] = of_score;
    a.delta[at] = delta, a.delta[at + Kernel::kTileM] = of_gradient;
  }
}

}  // namespace tessera::cuda::sm90
