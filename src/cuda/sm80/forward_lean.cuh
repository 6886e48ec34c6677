// SPDX-License-Identifier: Apache-2.0
// Forward pass of 16-bit elements where scale and band alone shape the scores: forward.cuh without
// a branch in the loop. Steps that the band cuts, at either end of the walk, run a second copy of
// the loop's body; only the first step may meet the end of the keys.
//
//     copies    V(j) ........... K(j-1) ..........      steps go from the last keys to the first
//     warps     wait K | S(j) | wait V | softmax | O += P V | wait K ...
#pragma once

#include <type_traits>

#include "cuda/sm80/forward_tile.cuh"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/lean.cuh"

namespace tessera::cuda::sm80 {

template <typename T, int kD, int kDv, int kRowTiles, int kWarps, int kTileN>
struct LeanForwardStorage {
  static constexpr int kTileM = 16 * kRowTiles * kWarps;
  T q[kTileM * kSmemStride<T, kD>];
  T k[kTileN * kSmemStride<T, kD>];
  T v[kTileN * kSmemStride<T, kDv>];
  ForwardTile tile;  // up to d128, what the loop does not need waits where it costs no registers
};

// run(step, masked) for every step of a tile's walk from its last keys to its first; masked is
// std::false_type where the band hides nothing.
template <int kTileN, typename Run>
__device__ __forceinline__ void walk_steps(const ForwardTile& tile, int steps, const Run& run) {
  const int last_key0 = tile.key_begin + (steps - 1) * kTileN, first_row = tile.rows.origin;
  const KeyInterval clean =
      keys_of_all_rows(tile.sequence.band, first_row, first_row + tile.queries);
  const int clean_begin = max(last_key0 + 2 * kTileN - 1 - clean.hi, 0) / kTileN;
  const int clean_end = last_key0 < clean.lo ? 0 : min(steps, (last_key0 - clean.lo) / kTileN + 1);
  int step = 0;
  while (step < steps) {
    if (step < clean_begin || step >= clean_end) {
      run(step++, std::true_type{});
    } else {
      do {
        run(step++, std::false_type{});
      } while (step < clean_end);
    }
  }
}

template <typename T, int kD, int kDv, int kRowTiles, int kWarps, int kTileN>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 4 ? 2 : 1)
    forward_lean_kernel(const __grid_constant__ ForwardArgs args) {
  using Storage = LeanForwardStorage<T, kD, kDv, kRowTiles, kWarps, kTileN>;
  constexpr int kThreads = 32 * kWarps, kTileM = Storage::kTileM;
  constexpr bool kHolds = kD <= 128;
  extern __shared__ __align__(16) char shared[];
  Storage& smem = *reinterpret_cast<Storage*>(shared);
  const Params& p = args.params;
  const int warp_row = threadIdx.x / 32 * 16 * kRowTiles;

  SoftmaxRows softmax[kRowTiles];
  float o[kRowTiles][kDv / 2];
  const float scale = logit_scale<T>(p);
  const ForwardTile tile = forward_tile<kTileM, kTileN, kDv>(args);
  if (!tile.exists()) return;
  if (kHolds && threadIdx.x == 0) smem.tile = tile;
  const ForwardTile& held = kHolds ? smem.tile : tile;
  clear(o);
  const int steps = tile.steps(kTileN), last_key0 = tile.key_begin + (steps - 1) * kTileN;
  if (steps > 0) {
    const int head0 = tile.rows.head0;
    load_query_tile<T, kTileM, kD, kThreads>(smem.q, p, tile);
    const KeyRows k_rows = key_rows(p, TESSERA_K, tile.sequence, head0, args.pack);
    const KeyRows v_rows = key_rows(p, TESSERA_V, tile.sequence, head0, args.pack);
    KeyCopies<T, kTileN, kD, kThreads> copy_k(k_rows.base, k_rows.row_bytes, last_key0, p.dqk);
    KeyCopies<T, kTileN, kDv, kThreads> copy_v(v_rows.base + tile.dv_first * sizeof(T),
                                               v_rows.row_bytes, last_key0, tile.dv_here);
    const int valid = min(tile.sequence.k.length - last_key0, kTileN);
    copy_k.first(smem.k, valid);
    copy_v.first(smem.v, valid);

    const auto run = [&](int step, auto masked) {
      if (step == 0) {
        wait_for_copies<1>();
      } else {
        wait_for_copies<0>();
      }
      __syncthreads();  // K(j) is there, and V's buffer is free
      if (step > 0) copy_v.next(smem.v);

      // S = Q K^T
      float s[kRowTiles][kTileN / 2];
      clear(s);
      multiply_rows<T, kRowTiles, kTileN, kD>(s, smem.q, warp_row, smem.k);
      wait_for_copies<0>();
      __syncthreads();  // V(j) is there, and K's buffer is free
      if (step + 1 < steps) copy_k.next(smem.k);

      // P = 2^(x - m), the A operand of the next product
      typename Mma<T>::A weights[kRowTiles][kTileN / 16];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        if constexpr (decltype(masked)::value) {
          apply_band<kTileN, Major::kQueries>(s[r], held.sequence.band, held.rows,
                                              warp_row + 16 * r, last_key0 - step * kTileN);
        }
        float rescale[2];
        softmax[r].template update<kTileN, true>(s[r], scale, rescale);
#pragma unroll
        for (int e = 0; e < kDv / 2; ++e) o[r][e] *= rescale[e / 2 % 2];
#pragma unroll
        for (int k = 0; k < kTileN / 16; ++k) {
          weights[r][k] = Mma<T>::from_accumulator(s[r] + 8 * k, 1);
        }
      }

      // O += P V
#pragma unroll
      for (int k = 0; k < kTileN; k += 16) {
#pragma unroll
        for (int n = 0; n < kDv; n += 16) {
          const auto b = Mma<T>::load_b_transposed(smem.v, kSmemStride<T, kDv>, k, n);
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            Mma<T>::multiply(o[r] + n / 2, weights[r][k / 16], b);
          }
        }
      }
    };

    walk_steps<kTileN>(tile, steps, run);
  }
  if (kHolds) __syncthreads();  // the tile is there
  write_results<T, kD, kDv, kRowTiles>(args, held, softmax, scale, 1.f, o, warp_row, smem.q);
}

template <typename T, int kBucket, int kRowTiles, int kWarps, int kStep, bool kRich>
Kernel make_forward_lean(int dtype) {
  constexpr int kDv = output_columns(kBucket);
  static_assert(sizeof(T) == 2 && !kRich);
  return {Pass::forward,
          false,
          dtype,
          kBucket,
          {kRowTiles, kWarps, kStep},
          sizeof(LeanForwardStorage<T, kBucket, kDv, kRowTiles, kWarps, kStep>),
          reinterpret_cast<const void*>(
              &forward_lean_kernel<T, kBucket, kDv, kRowTiles, kWarps, kStep>)};
}

}  // namespace tessera::cuda::sm80
