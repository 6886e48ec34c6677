// SPDX-License-Identifier: Apache-2.0
// dQ, one half of the backward pass on mma.sync, without atomics, and so deterministic.
//
//     S = Q K^T    dP = dO V^T    P = e^(x(S) - lse)    dS = P (dP - delta)    dQ = dS K scale
//
// A CTA owns a tile of queries of one head: q and do stay in shared memory, k and v stream past. K,
// which is needed until the end of a step, has two buffers, V has one:
//
//     copies    K(j+1) ............ V(j+1) ...........
//     warps     wait | S(j), dP(j) | meet | dS | dQ += dS K(j) | wait ...
#pragma once

#include "cuda/common/score/blocks.cuh"
#include "cuda/sm80/backward/gradient.cuh"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/machine/place.cuh"

namespace tessera::cuda::sm80 {

template <typename T, int kD, int kWarps, int kTileN>
struct DqStorage {
  static constexpr int kTileM = 16 * kWarps;
  static constexpr int kBuffers = sizeof(T) == 4 && kD > 256 ? 1 : 2;  // 163 KB of an sm80
  T q[kTileM * kSmemStride<T, kD>];
  T grad_o[kTileM * kSmemStride<T, kD>];
  T k[kBuffers][kTileN * kSmemStride<T, kD>];
  T v[kTileN * kSmemStride<T, kD>];
};

// kOfLow: makes the tiles alone that hold a row whose lse is below args.below.
template <typename T, int kD, int kOut, int kWarps, int kTileN, bool kOfLow = false>
__global__ void __launch_bounds__(32 * kWarps)
    backward_dq_kernel(const __grid_constant__ DqArgs args) {
  using Storage = DqStorage<T, kD, kWarps, kTileN>;
  constexpr int kThreads = 32 * kWarps, kTileM = Storage::kTileM;
  constexpr bool kSkip = kSkipsBlocks<kD>;
  extern __shared__ __align__(16) char shared[];
  Storage& smem = *reinterpret_cast<Storage*>(shared);
  const Params& p = args.b.params;

  const Place place =
      place_of(blockIdx.y * gridDim.x + blockIdx.x, gridDim.x, gridDim.y, args.section);
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, place.slot, kTileM);
  const Sequence sequence = sequence_of(p, tile.n);
  if (tile.begin >= sequence.q.owned_hi) return;
  const int head = place.head, first = blockIdx.z * kOut;
  if constexpr (kOfLow) {
    if (!holds_row_below<kTileM>(p, sequence, head, tile.begin, args.below)) return;
  }
  const Interval visible = sequence.band.keys(tile.begin, tile.begin + kTileM);
  const int key_begin = visible.lo / kTileN * kTileN;
  const int key_end = visible.empty() ? key_begin : visible.hi;
  const Interval clean = sequence.band.keys_of_all(tile.begin, tile.begin + kTileM);

  const KeyRows k_rows = key_rows(p, TESSERA_K, sequence, head, 1);
  const KeyRows v_rows = key_rows(p, TESSERA_V, sequence, head, 1);
  const auto load_k = [&](int key0, int buffer) {
    load_keys<T, kTileN, kD, kThreads, true>(smem.k[buffer], k_rows, key0, p.dqk,
                                             p.tensor[TESSERA_K]);
    commit_copies();
  };
  const auto load_v = [&](int key0) {
    load_keys<T, kTileN, kD, kThreads, true>(smem.v, v_rows, key0, p.dv, p.tensor[TESSERA_V]);
    commit_copies();
  };

  // ---- the rows of this thread ----
  const int warp_row = threadIdx.x / 32 * 16;
  const int64_t statistics = statistics_at(p, sequence, head);
  RowStatistics rows[2];
  float slope[2] = {};
  float dq[kOut / 2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = tile.begin + warp_row + 8 * half + lane_major();
    rows[half] = statistics_of(args.b, sequence, statistics, query);
  }
#pragma unroll
  for (float& x : dq) x = 0;

  // ---- the loop over keys ----
  const TileRows tile_rows{tile.begin, head, 1};
  const int steps = max(key_end - key_begin + kTileN - 1, 0) / kTileN;
  const auto key_of = [&](int step) { return key_begin + (steps - 1 - step) * kTileN; };
  __shared__ KeyBlocks blocks;
  if (threadIdx.x < 32) {
    blocks = KeyBlocks::of(args.blocks, p, sequence, head, 1, tile.begin, kTileM);
  }
  __syncthreads();
  const auto view_of = [&](int step) { return blocks(key_of(step) / kTileN); };
  BlockWalk<true> walk(steps);
  int next = walk.next(view_of), buffer = 0;
  if (next < steps) {
    load_tile<T, kTileM, kD, kThreads>(
        smem.q, query_rows(p, TESSERA_Q, sequence, head, tile.begin, 1, kTileM), p.dqk,
        p.tensor[TESSERA_Q]);
    load_tile<T, kTileM, kD, kThreads>(
        smem.grad_o, query_rows(p, TESSERA_DO, sequence, head, tile.begin, 1, kTileM), p.dv,
        p.tensor[TESSERA_DO]);
    load_k(key_of(next), 0);
    load_v(key_of(next));
    if constexpr (kSplits<T>) {
      wait_for_copies<0>();
      __syncthreads();
      split_tile<T, kTileM, kD, kWarps>(smem.q, threadIdx.x / 32);
      split_tile<T, kTileM, kD, kWarps>(smem.grad_o, threadIdx.x / 32);
    }
  }
  while (next < steps) {
    const int key0 = key_of(next);
    const bool shown = walk.full(next);
    next = walk.next(view_of);
    const bool more = next < steps;
    wait_for_copies<0>();
    // K(j) and V(j) are there, and K(j - 1) has been used
    meet_and_split<T, kD, kWarps, kTileN, kTileN>(smem.k[buffer], smem.v);
    if (Storage::kBuffers == 2 && more) load_k(key_of(next), buffer ^ 1);

    // S = Q K^T, dP = dO V^T
    float s[kTileN / 2], dp[kTileN / 2];
#pragma unroll
    for (int e = 0; e < kTileN / 2; ++e) s[e] = dp[e] = 0;
    multiply_nt<T, kTileN, kD, kSkip, false, kSkip>(s, smem.q, warp_row, smem.k[buffer], p.dqk);
    multiply_nt<T, kTileN, kD, kSkip>(dp, smem.grad_o, warp_row, smem.v, p.dv);
    __syncthreads();  // V's buffer is free
    if (more) load_v(key_of(next));

    // dS = P (dP - delta)
    score_gradient<T, kTileN, Major::kQueries, true>(
        s, dp, p, sequence, tile_rows, warp_row, key0,
        key0 >= clean.lo && key0 + kTileN <= clean.hi, shown, [&](int half) { return rows[half]; },
        slope);

    // dQ += dS K
    multiply_nn<T, kOut, kTileN, kD, kSkip>(dq, dp, smem.k[buffer], first, p.dqk);
    if constexpr (Storage::kBuffers == 2) {
      buffer ^= 1;
    } else if (more) {
      __syncthreads();  // K's only buffer is free
      load_k(key_of(next), 0);
    }
  }

  // ---- epilogue ----
  const View& out = p.tensor[TESSERA_DQ];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = tile.begin + warp_row + 8 * half + lane_major();
    float row_slope = slope[half];
    row_slope += __shfl_xor_sync(~0u, row_slope, 1);
    row_slope += __shfl_xor_sync(~0u, row_slope, 2);
    if (query < sequence.q.owned_lo || query >= sequence.q.owned_hi) continue;
    if (args.b.slope_rows && blockIdx.z == 0 && threadIdx.x % 4 == 0) {
      args.b.slope_rows[statistics + query] = row_slope;
    }
    if (!out.data) continue;
    if (query >= sequence.q.length) clear_row(dq, half);
    const int64_t at = offset_of(out, sequence.q.batch, sequence.q.first + query, head, first);
    store_row<T, kOut>(out.data, at, out.dtype, out.vector_bytes, dq, half, p.softmax_scale,
                       p.dqk - first);
  }
}

template <typename T, typename Row>
Code make_dq() {
  constexpr Tile kTile = Row::kTile;
  static_assert(Row::kFeatures == kGeneral && kTile.row_tiles == 1);
  static_assert(holds<DqStorage<T, kTile.bucket, kTile.warps, kTile.step>>(kTile));
  constexpr int kOut = output_columns(kTile.bucket);
  Code code{reinterpret_cast<const void*>(
      &backward_dq_kernel<T, kTile.bucket, kOut, kTile.warps, kTile.step>)};
  if constexpr (sizeof(T) == 2 && kTile.bucket <= 256) {
    static_assert(kTile.rows() == kRowsOfStatistics);
    code.of_low = reinterpret_cast<const void*>(
        &backward_dq_kernel<T, kTile.bucket, kOut, kTile.warps, kTile.step, true>);
  }
  return code;
}

}  // namespace tessera::cuda::sm80
