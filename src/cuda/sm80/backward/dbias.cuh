// SPDX-License-Identifier: Apache-2.0
// dbias of every broadcast, without atomics, and so deterministic.
//
//     dbias = sum over broadcast axes of dX   (post-scale)   or   dS softmax_scale   (pre-scale)
//
// A CTA owns a tile of the bias: 16 x warps queries by kTileN keys where those axes are not
// broadcast, all of them where they are. It walks every (sequence, head, query tile, key tile) that
// lands on its tile, adds in registers, and at the end sums rows or columns that share an element.
#pragma once

#include "cuda/sm80/backward/gradient.cuh"
#include "cuda/sm80/kernels.h"

namespace tessera::cuda::sm80 {

template <typename T, int kD, int kWarps, int kTileN>
struct DbiasStorage {
  static constexpr int kTileM = 16 * kWarps;
  T q[kTileM * kSmemStride<T, kD>];
  T grad_o[kTileM * kSmemStride<T, kD>];
  T k[kTileN * kSmemStride<T, kD>];
  T v[kTileN * kSmemStride<T, kD>];
  float columns[kWarps][kTileN];  // sums over the rows of a warp
};

// The range of tiles of one axis: those of one coordinate, or all of `count` where it is broadcast.
struct Span {
  int begin, end;
};
__device__ inline Span span_of(int extent, int coordinate, int count) {
  return extent > 1 ? Span{coordinate, coordinate + 1} : Span{0, count};
}

template <typename T, int kD, int kWarps, int kTileN>
__device__ __forceinline__ void accumulate_dbias(const DbiasArgs& args,
                                                 DbiasStorage<T, kD, kWarps, kTileN>& smem, int n,
                                                 int head, Span tiles_m, Span tiles_n,
                                                 bool of_logit, float (&sum)[kTileN / 2]) {
  constexpr int kThreads = 32 * kWarps, kTileM = 16 * kWarps;
  const Params& p = args.b.params;
  const Sequence sequence = sequence_of(p, n);
  const int warp_row = threadIdx.x / 32 * 16;
  const int64_t statistics = statistics_at(p, sequence, head);
  const KeyRows k_rows = key_rows(p, TESSERA_K, sequence, head, 1);
  const KeyRows v_rows = key_rows(p, TESSERA_V, sequence, head, 1);
  // Tiles are those of the bias, of which row and key 0 of the sequence may stand anywhere.
  const int first_row = dense_start<SideOfQueries>(p, n, sequence.q.length);
  const int first_key = dense_start<SideOfKeys>(p, n, sequence.k.length);
  for (int m = max(tiles_m.begin, first_row / kTileM);
       m < tiles_m.end && m * kTileM < first_row + sequence.q.length; ++m) {
    const int query0 = m * kTileM - first_row;
    const Interval keys = sequence.band.keys(query0, query0 + kTileM);
    const int begin = max(tiles_n.begin, (first_key + keys.lo) / kTileN);
    const int end =
        keys.empty() ? 0 : min(tiles_n.end, (first_key + keys.hi + kTileN - 1) / kTileN);
    if (begin >= end) continue;
    __syncthreads();  // the buffers are free
    load_queries<T, kTileM, kD, kThreads, true>(smem.q, p, TESSERA_Q, sequence, head, query0,
                                                p.dqk);
    load_queries<T, kTileM, kD, kThreads, true>(smem.grad_o, p, TESSERA_DO, sequence, head, query0,
                                                p.dv);
    RowStatistics rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] =
          statistics_of(args.b, sequence, statistics, query0 + warp_row + lane_major() + 8 * half);
    }
    for (int j = begin; j < end; ++j) {
      const int key0 = j * kTileN - first_key;
      if (j > begin) __syncthreads();
      load_keys<T, kTileN, kD, kThreads, true>(smem.k, k_rows, key0, p.dqk, p.tensor[TESSERA_K]);
      load_keys<T, kTileN, kD, kThreads, true>(smem.v, v_rows, key0, p.dv, p.tensor[TESSERA_V]);
      commit_copies();
      wait_for_copies<0>();
      if constexpr (kSplits<T>) {
        if (j == begin) {
          __syncthreads();
          split_tile<T, kTileM, kD, kWarps>(smem.q, threadIdx.x / 32);
          split_tile<T, kTileM, kD, kWarps>(smem.grad_o, threadIdx.x / 32);
        }
      }
      meet_and_split<T, kD, kWarps, kTileN, kTileN>(smem.k, smem.v);

      float s[kTileN / 2] = {}, dp[kTileN / 2] = {}, slope[2] = {};
      multiply_nt<T, kTileN, kD, kSkipsBlocks<kD>, false, kSkipsBlocks<kD>>(s, smem.q, warp_row,
                                                                            smem.k, p.dqk);
      multiply_nt<T, kTileN, kD>(dp, smem.grad_o, warp_row, smem.v, p.dv);
      score_gradient<T, kTileN, Major::kQueries, true>(
          s, dp, p, sequence, TileRows{query0, head, 1}, warp_row, key0, false, false,
          [&](int half) { return rows[half]; }, slope, of_logit);
#pragma unroll
      for (int e = 0; e < kTileN / 2; ++e) sum[e] += dp[e];
    }
  }
}

template <typename T, int kD, int kWarps, int kTileN>
__global__ void __launch_bounds__(32 * kWarps)
    backward_dbias_kernel(const __grid_constant__ DbiasArgs args) {
  using Storage = DbiasStorage<T, kD, kWarps, kTileN>;
  constexpr int kTileM = Storage::kTileM;
  extern __shared__ __align__(16) char shared[];
  Storage& smem = *reinterpret_cast<Storage*>(shared);
  const Params& p = args.b.params;
  const auto& extent = args.extent;

  const int tiles_along_n = (extent[3] + kTileN - 1) / kTileN;
  const int tile_n = blockIdx.x % tiles_along_n, tile_m = blockIdx.y;
  const int bias_row = blockIdx.x / tiles_along_n;
  const int bias_n = bias_row / extent[1], bias_head = bias_row % extent[1];
  const Span sequences = span_of(extent[0], bias_n, p.batch);
  const Span heads = span_of(extent[1], bias_head, p.hq);
  const Span tiles_m = span_of(extent[2], tile_m, 1 << 30),
             tiles_n = span_of(extent[3], tile_n, 1 << 30);

  float sum[kTileN / 2];
#pragma unroll
  for (int e = 0; e < kTileN / 2; ++e) sum[e] = 0;
  const bool pre_scale = (p.flags & TESSERA_BIAS_PRE_SCALE) != 0;
  for (int n = sequences.begin; n < sequences.end; ++n) {
    for (int head = heads.begin; head < heads.end; ++head) {
      accumulate_dbias(args, smem, n, head, tiles_m, tiles_n, !pre_scale, sum);
    }
  }
  const float factor = pre_scale ? p.softmax_scale : 1.f;

  // ---- sums along broadcast axes, then the store ----
  const bool one_row = extent[2] == 1, one_column = extent[3] == 1;
  const int warp = threadIdx.x / 32;
  if (one_column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_sum = 0;
#pragma unroll
      for (int i = 0; i < kTileN / 4; ++i) row_sum += sum[4 * (i / 2) + 2 * half + i % 2];
      row_sum += __shfl_xor_sync(~0u, row_sum, 1);
      row_sum += __shfl_xor_sync(~0u, row_sum, 2);
      sum[2 * half] = row_sum;
    }
  }
  if (one_row) {
#pragma unroll
    for (int i = 0; i < kTileN / 4; ++i) {
      const int e = 4 * (i / 2) + i % 2;
      float column_sum = sum[e] + sum[e + 2];
#pragma unroll
      for (int lane = 4; lane < 32; lane *= 2) column_sum += __shfl_xor_sync(~0u, column_sum, lane);
      if (lane_major() == 0) smem.columns[warp][lane_minor() + 8 * (i / 2) + i % 2] = column_sum;
    }
    __syncthreads();
  }
  const View& out = p.tensor[TESSERA_DBIAS];
  const int64_t base = offset_of(out, bias_n, bias_head);
  const bool adds = (p.flags & TESSERA_ACCUMULATE) != 0;
  const auto store = [&](int64_t at, float value) {
    if (adds) value += load_float(out.data, at, out.dtype);
    store_float(out.data, at, out.dtype, value);
  };
  if (one_row) {
    for (int c = threadIdx.x; c < (one_column ? 1 : kTileN); c += 32 * kWarps) {
      const int key = tile_n * kTileN + c;
      float total = 0;
      for (int w = 0; w < kWarps; ++w) total += smem.columns[w][c];
      if (key < extent[3]) store(base + key * out.stride[3], total * factor);
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = tile_m * kTileM + warp * 16 + lane_major() + 8 * half;
    if (query >= extent[2]) continue;
    const int64_t row = base + query * out.stride[2];
    if (one_column) {
      if (threadIdx.x % 4 == 0) store(row, sum[2 * half] * factor);
      continue;
    }
    if (adds) {
#pragma unroll
      for (int i = 0; i < kTileN / 4; ++i) {
        const int key = tile_n * kTileN + lane_minor() + 8 * (i / 2) + i % 2;
        if (key < extent[3]) store(row + key, sum[4 * (i / 2) + 2 * half + i % 2] * factor);
      }
      continue;
    }
    store_row<T, kTileN>(out.data, row + tile_n * kTileN, out.dtype, out.vector_bytes, sum, half,
                         factor, extent[3] - tile_n * kTileN);
  }
}

template <typename T, typename Row>
Code make_dbias() {
  constexpr Tile kTile = Row::kTile;
  static_assert(Row::kFeatures == kGeneral && kTile.row_tiles == 1);
  static_assert(holds<DbiasStorage<T, kTile.bucket, kTile.warps, kTile.step>>(kTile));
  return {reinterpret_cast<const void*>(
      &backward_dbias_kernel<T, kTile.bucket, kTile.warps, kTile.step>)};
}

}  // namespace tessera::cuda::sm80
