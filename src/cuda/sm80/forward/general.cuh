// SPDX-License-Identifier: Apache-2.0
// Forward pass on mma.sync and cp.async.
//
//     S = Q K^T            x = pipeline(S)            P = e^(x - m)
//     O = sum P V          m, l: running maximum and sum     o = O / l,  lse = m ln 2 + log l
//
// A CTA owns a tile of queries of one head (or of `pack` heads that share keys, interleaved by
// rows) and walks the keys that band and data masks leave, right to left: partial tiles come first.
// K and V have one buffer each. V(j) arrives under S(j), K(j+1) under the softmax and P V:
//
//     copies    V(j) ........... K(j+1) ..........
//     warps     wait K | S(j) | wait V | softmax | O += P V | wait K ...
//
// Each warp owns 16 rows from S to O; warps meet only at the two waits.
#pragma once

#include "cuda/common/score/blocks.cuh"
#include "cuda/sm80/forward/tile.cuh"
#include "cuda/sm80/kernels.h"

namespace tessera::cuda::sm80 {

template <typename T, int kD, int kDv, int kWarps, int kTileN>
struct ForwardStorage {
  static constexpr int kTileM = 16 * kWarps;
  T q[kTileM * kSmemStride<T, kD>];
  T k[kTileN * kSmemStride<T, kD>];
  T v[kTileN * kSmemStride<T, kDv>];
};

// Dropped probabilities become 0; what is kept is scaled in the epilogue. Heads are not packed.
template <int kN>
__device__ __forceinline__ void drop(float (&s)[kN / 2], const Params& p, int n, int head,
                                     int query0, int key0) {
  uint32_t kept[(kN + 63) / 64];
  dropout_bits<kN, Major::kQueries>(dropout_of(p), head_index_of(p, n, head), query0, key0, kept,
                                    dropout_origin(p, n));
#pragma unroll
  for (int e = 0; e < kN / 2; ++e) s[e] = kept[e / 32] >> (e % 32) & 1 ? s[e] : 0.f;
}

// CTAs of a multiprocessor that registers must leave room for: narrow warps live on their number.
// A third one at d128 costs the features more in spills than it gives. fp32 without features is
// worth a few spills for a second one.
constexpr int min_ctas(int bytes, int bucket, int warps, bool rich) {
  if (bytes == 4) return !rich && bucket <= 64 && warps <= 8 ? 2 : 1;
  return bucket <= 64 && warps <= 4 ? 3 : 1;
}

template <typename T, int kD, int kDv, int kWarps, int kTileN, bool kRich>
__global__ void __launch_bounds__(32 * kWarps, min_ctas(sizeof(T), kD, kWarps, kRich))
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Storage = ForwardStorage<T, kD, kDv, kWarps, kTileN>;
  constexpr int kThreads = 32 * kWarps, kTileM = Storage::kTileM;
  constexpr bool kSkip = kRich && kSkipsBlocks<kD>;
  constexpr bool kHoldsK = kRich, kHoldsV = kRich && kD > 64;  // three narrow CTAs share registers
  extern __shared__ __align__(16) char shared[];
  Storage& smem = *reinterpret_cast<Storage*>(shared);
  const Params& p = args.params;

  const ForwardTile tile = forward_tile<kTileM, kTileN, kDv>(args);
  if (!tile.exists()) return;
  const Sequence& sequence = tile.sequence;
  const TileRows& rows = tile.rows;
  const int head0 = rows.head0;
  // Held where they are much to make, made for each tile where registers are dearer.
  const auto key_rows_of = [&](int tensor) {
    KeyRows rows = key_rows(p, tensor, sequence, head0, args.pack);
    if (tensor == TESSERA_V) rows.base += tile.dv_first * element_bytes(p.tensor[tensor].dtype);
    return rows;
  };
  const KeyRows k_held = key_rows_of(TESSERA_K), v_held = key_rows_of(TESSERA_V);
  const auto load_k = [&](int key0) {
    load_keys<T, kTileN, kD, kThreads, kRich, true>(
        smem.k, kHoldsK ? k_held : key_rows_of(TESSERA_K), key0, p.dqk, p.tensor[TESSERA_K]);
    commit_copies();
  };
  const auto load_v = [&](int key0) {
    load_keys<T, kTileN, kDv, kThreads, kRich, true>(
        smem.v, kHoldsV ? v_held : key_rows_of(TESSERA_V), key0, tile.dv_here, p.tensor[TESSERA_V]);
    commit_copies();
  };

  const int warp_row = threadIdx.x / 32 * 16;
  const Interval clean_keys = sequence.band.keys_of_all(rows.origin, rows.origin + tile.queries);

  SoftmaxRows softmax[1];
  float o[1][kDv / 2];
#pragma unroll
  for (float& x : o[0]) x = 0;

  // ---- the loop over keys ----
  const float scale = kRich ? kToLog2<T> : logit_scale<T>(p) * kToLog2<T>;
  const int steps = tile.steps(kTileN);
  const auto key_of = [&](int step) { return tile.key_begin + (steps - 1 - step) * kTileN; };
  __shared__ KeyBlocks blocks;
  if constexpr (kRich) {
    if (threadIdx.x < 32) {
      blocks = KeyBlocks::of(args.blocks, p, sequence, head0, args.pack, rows.origin, tile.queries);
    }
    __syncthreads();
  }
  const auto view_of = [&](int step) { return blocks(key_of(step) / kTileN); };
  BlockWalk<kRich> walk(steps);
  int next = walk.next(view_of);
  if (next < steps) {
    load_query_tile<T, kTileM, kD, kThreads>(smem.q, p, tile);
    load_k(key_of(next));
    if constexpr (kSplits<T>) {
      wait_for_copies<0>();
      __syncthreads();
      split_tile<T, kTileM, kD, kWarps>(smem.q, threadIdx.x / 32);
    }
  }
  while (next < steps) {
    const int key0 = key_of(next);
    const bool shown = walk.full(next);
    next = walk.next(view_of);
    wait_for_copies<0>();
    meet_and_split<T, kD, kWarps, kTileN>(smem.k);  // K(j) is there, and V's buffer is free
    load_v(key0);

    // S = Q K^T
    float s[kTileN / 2];
#pragma unroll
    for (float& x : s) x = 0;
    multiply_nt<T, kTileN, kD, kSkip>(s, smem.q, warp_row, smem.k, p.dqk);

    wait_for_copies<0>();
    meet_and_split<T, kDv, kWarps, kTileN>(smem.v);  // V(j) is there, and K's buffer is free
    if (next < steps) load_k(key_of(next));

    // P = 2^(x - m)
    const bool clean = key0 >= clean_keys.lo && key0 + kTileN <= clean_keys.hi;
    if constexpr (kRich) {
      shape_scores<T, kTileN, Major::kQueries>(s, nullptr, p, sequence, rows, warp_row, key0, clean,
                                               shown);
    } else if (!clean) {
      apply_band<kTileN, Major::kQueries>(s, sequence.band, rows, warp_row, key0);
    }
    float rescale[2];
    softmax[0].template update<kTileN, !kRich && !kSplits<T>, kRich>(s, scale, rescale);
#pragma unroll
    for (int e = 0; e < kDv / 2; ++e) o[0][e] *= rescale[e / 2 % 2];
    if constexpr (kRich) {
      if (p.flags & TESSERA_DROPOUT) {
        drop<kTileN>(s, p, sequence.n, head0, rows.origin + warp_row, key0);
      }
    }

    // O += P V
    multiply_nn<T, kDv, kTileN, kDv, kSkip>(o[0], s, smem.v, 0, tile.dv_here);
  }

  const float v_scale = kRich ? v_scale_of(p, sequence.n, head0) : 1.f;
  write_results<T, kD, kDv, 1>(args, tile, softmax, scale, v_scale, o, warp_row, smem.q);
}

template <typename T, typename Row>
Code make_general() {
  constexpr Tile kTile = Row::kTile;
  constexpr int kDv = output_columns(kTile.bucket);
  static_assert(kTile.row_tiles == 1);
  static_assert(holds<ForwardStorage<T, kTile.bucket, kDv, kTile.warps, kTile.step>>(kTile));
  return {reinterpret_cast<const void*>(
      &forward_kernel<T, kTile.bucket, kDv, kTile.warps, kTile.step, Row::kFeatures == kGeneral>)};
}

}  // namespace tessera::cuda::sm80
