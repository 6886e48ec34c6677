// SPDX-License-Identifier: Apache-2.0
// dQ inside the pass over keys: five products instead of seven, for the price of a sum in no fixed
// order.
//
//     dQ[tile of queries] += dS K      by atomic additions to fp32 sums, then dq = scale sums
//
// The warps cut the dQ of a step into pieces of 32 rows, and keep a piece of the sums as its
// fragments lie in registers: a warp's addition is a run of neighbouring addresses.
#pragma once

#include "cuda/common/blocks.cuh"
#include "cuda/sm80/gradient.cuh"

namespace tessera::cuda::sm80 {

// The piece of a warp: 32 rows by kColumns columns.
template <int kD, int kWarps, int kTileM>
struct DqPiece {
  static constexpr int kGroups = kTileM / 32, kColumns = kD * kGroups / kWarps;
  static constexpr int kFloats = kTileM * kD;  // of a tile
  static_assert(kTileM % 32 == 0 && kWarps % kGroups == 0 && kColumns % 16 == 0);

  __device__ static int row(int warp) { return warp % kGroups * 32; }
  __device__ static int column(int warp) { return warp / kGroups * kColumns; }
  // Of the four floats e .. e + 3 of row tile r.
  __device__ static int at(int warp, int r, int e) {
    return ((warp * 2 + r) * kColumns / 2 + e) * 32 + threadIdx.x % 32 * 4;
  }
};

__device__ inline void add_to_memory(float* to, const float* four) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four[0]),
               "f"(four[1]), "f"(four[2]), "f"(four[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + i), "f"(four[i]) : "memory");
  }
#endif
}

// By all warps: ds is [kTileN][kTileM], k is [kTileN][kD].
template <typename T, int kD, int kWarps, int kTileM, int kTileN>
__device__ __forceinline__ void add_dq(const DkdvArgs& args, int head, int slot, const T* ds,
                                       const T* k) {
  using Piece = DqPiece<kD, kWarps, kTileM>;
  constexpr int kStep = Mma<T>::kK;
  const int warp = threadIdx.x / 32, row = Piece::row(warp), column = Piece::column(warp);
  float dq[2][Piece::kColumns / 2] = {};
#pragma unroll
  for (int key = 0; key < kTileN; key += kStep) {
    const float factor = Mma<T>::scale_of(ds, kSmemStride<T, kTileM>, key) *
                         Mma<T>::scale_of(k, kSmemStride<T, kD>, key);
    typename Mma<T>::A a[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      a[r] = Mma<T>::load_a_transposed(ds, kSmemStride<T, kTileM>, key, row + 16 * r);
    }
#pragma unroll
    for (int c = 0; c < Piece::kColumns; c += 16) {
      const auto b = Mma<T>::load_b_transposed(k, kSmemStride<T, kD>, key, column + c);
#pragma unroll
      for (int r = 0; r < 2; ++r) Mma<T>::multiply(dq[r] + c / 2, a[r], b, factor);
    }
  }
  float* sums = args.dq_sums + (int64_t{head} * args.dq_slots + slot) * Piece::kFloats;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int e = 0; e < Piece::kColumns / 2; e += 4)
      add_to_memory(sums + Piece::at(warp, r, e), dq[r] + e);
  }
}

// dq from its sums; zeros where no row of the sequence stands. grid: (tiles of queries, heads).
template <typename T, int kD, int kWarps, int kTileM>
__global__ void __launch_bounds__(32 * kWarps)
    finish_dq_kernel(const __grid_constant__ DkdvArgs args) {
  using Piece = DqPiece<kD, kWarps, kTileM>;
  const Params& p = args.b.params;
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, blockIdx.x, kTileM);
  const Rows rows = rows_of<SideOfQueries>(p, tile.n);
  if (tile.begin >= rows.owned_hi) return;
  const int head = blockIdx.y, warp = threadIdx.x / 32;
  const int slot = slot_of_block<SideOfQueries>(p, tile.n, rows.first, kTileM, tile.begin / kTileM);
  const bool summed = tile.begin >= 0 && tile.begin < rows.length;
  const float* sums = args.dq_sums + (int64_t{head} * args.dq_slots + slot) * Piece::kFloats;
  const View& out = p.tensor[TESSERA_DQ];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float dq[Piece::kColumns / 2];
#pragma unroll
    for (int e = 0; e < Piece::kColumns / 2; e += 4) {
      const float4 four = summed ? *reinterpret_cast<const float4*>(sums + Piece::at(warp, r, e))
                                 : float4{0, 0, 0, 0};
      dq[e] = four.x, dq[e + 1] = four.y, dq[e + 2] = four.z, dq[e + 3] = four.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = tile.begin + Piece::row(warp) + 16 * r + 8 * half + lane_major();
      if (query < rows.owned_lo || query >= rows.owned_hi) continue;
      const int column = Piece::column(warp);
      const int64_t at = offset_of(out, rows.batch, rows.first + query, head, column);
      store_row<T, Piece::kColumns>(out.data, at, out.dtype, out.vector_bytes, dq, half,
                                    query < rows.length ? p.softmax_scale : 0.f, p.dqk - column);
    }
  }
}

}  // namespace tessera::cuda::sm80
