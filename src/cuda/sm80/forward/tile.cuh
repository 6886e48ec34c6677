// SPDX-License-Identifier: Apache-2.0
// What the forward kernels share: which queries and keys a CTA has, and how its results leave.
#pragma once

#include "cuda/sm80/args.h"
#include "cuda/sm80/machine/epilogue.cuh"
#include "cuda/sm80/machine/place.cuh"
#include "cuda/sm80/softmax.cuh"

namespace tessera::cuda::sm80 {

// The tile of queries of a CTA, of one head or of `pack` heads that share keys, interleaved by
// rows; and its part of the keys that the band shows, from a multiple of the step on.
struct ForwardTile {
  Sequence sequence;
  TileRows rows;
  int queries;            // of the tile
  int dv_first, dv_here;  // columns of o
  int split;
  int key_begin, key_end;

  __device__ bool exists() const { return rows.origin < sequence.q.owned_hi; }
  __device__ int used_rows() const { return queries * rows.pack; }
  __device__ int steps(int step) const { return max(key_end - key_begin + step - 1, 0) / step; }
};

template <int kTileM, int kTileN, int kDv>
__device__ ForwardTile forward_tile(const ForwardArgs& args) {
  const Params& p = args.params;
  ForwardTile t;
  t.queries = kTileM / args.pack;
  const Place place =
      place_of(blockIdx.y * gridDim.x + blockIdx.x, gridDim.x, gridDim.y, args.section);
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, place.slot, t.queries);
  t.sequence = sequence_of(p, tile.n);
  t.rows = {tile.begin, place.head * args.pack, args.pack};
  t.dv_first = blockIdx.z % args.dv_pieces * kDv;
  t.dv_here = min(p.dv - t.dv_first, kDv);
  t.split = blockIdx.z / args.dv_pieces;
  const Interval visible = t.sequence.band.keys(tile.begin, tile.begin + t.queries);
  t.key_begin = visible.lo / kTileN * kTileN;
  t.key_end = visible.empty() ? t.key_begin : visible.hi;
  if (args.splits > 1) {
    const int steps_a_split = (t.steps(kTileN) + args.splits - 1) / args.splits;
    t.key_begin += t.split * steps_a_split * kTileN;
    t.key_end = min(t.key_end, t.key_begin + steps_a_split * kTileN);
  }
  return t;
}

// The queries of the tile, to shared memory; commit and wait are the caller's.
template <typename T, int kTileM, int kD, int kThreads>
__device__ __forceinline__ void load_query_tile(T* to, const Params& p, const ForwardTile& t) {
  if (t.rows.pack == 1) {
    load_queries<T, kTileM, kD, kThreads, true>(to, p, TESSERA_Q, t.sequence, t.rows.head0,
                                                t.rows.origin, p.dqk);
  } else {
    load_tile<T, kTileM, kD, kThreads>(to,
                                       query_rows(p, TESSERA_Q, t.sequence, t.rows.head0,
                                                  t.rows.origin, t.rows.pack, t.used_rows()),
                                       p.dqk, p.tensor[TESSERA_Q]);
  }
}

// The greatest logit of a row, combined over the warp where its rows are of one head.
__device__ inline void report_max_logit(const View& max_logit, int pack, int head, float value) {
  if (pack == 1) {
#pragma unroll
    for (int lane = 4; lane < 32; lane *= 2) {
      value = fmaxf(value, __shfl_xor_sync(~0u, value, lane));
    }
  }
  if (threadIdx.x % (pack == 1 ? 32 : 4) == 0 && value > -kInfinity) {
    atomic_max(static_cast<float*>(max_logit.data) + head * max_logit.stride[0], value);
  }
}

// o, lse and max_logit of a warp's rows from warp_row on, or its part of them where the keys are
// split. scale: of the softmax's maxima, to units of log2. staged: a tile of kD columns in shared
// memory whose rows from warp_row on only this warp reads: whole 16-byte pieces leave from there.
template <typename T, int kD, int kDv, int kRowTiles>
__device__ __forceinline__ void write_results(const ForwardArgs& args, const ForwardTile t,
                                              const SoftmaxRows (&softmax)[kRowTiles], float scale,
                                              float v_scale, float (&o)[kRowTiles][kDv / 2],
                                              int warp_row, T* staged) {
  constexpr int kStride = kSmemStride<T, kD>;
  const Params& p = args.params;
  const View& out = p.tensor[TESSERA_O];
  const View& lse_view = p.tensor[TESSERA_LSE];
  const Rows& stored_rows = t.sequence.q;
  const bool wide = sizeof(T) == 2 && args.splits == 1 && out.dtype != TESSERA_FP32 &&
                    out.vector_bytes == 16 && t.dv_here % 8 == 0;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * r + 8 * half + lane_major();
      const int query = t.rows.query(row), head = t.rows.head(row);
      const bool mine =
          row < t.used_rows() && query >= stored_rows.owned_lo && query < stored_rows.owned_hi;
      const bool exists = query >= 0 && query < stored_rows.length;
      const float sum = softmax[r].total(half), max = softmax[r].max[half] * scale;
      if (p.tensor[TESSERA_MAX_LOGIT].data && t.dv_first == 0) {
        report_max_logit(p.tensor[TESSERA_MAX_LOGIT], t.rows.pack, head,
                         mine && exists && sum != 0 ? max * kLn2 : -kInfinity);
      }
      const RowResult result = finish_row(p, head, max, sum, t.split == 0 && exists);
      const float factor = result.factor * v_scale;
      if (sum == 0) clear_row(o[r], half);
      const int64_t stored = stored_rows.first + query;
      if (wide) {
        if constexpr (sizeof(T) == 2) {
          T* to = staged + row * kStride + lane_minor();
#pragma unroll
          for (int e = 2 * half; e < kDv / 2; e += 4) {
            *reinterpret_cast<uint32_t*>(to + 2 * (e - 2 * half)) =
                pack<T>(o[r][e] * factor, o[r][e + 1] * factor);
          }
        }
      }
      if (!mine) continue;
      const bool has_lse = t.dv_first == 0 && threadIdx.x % 4 == 0;
      if (args.splits == 1) {
        if (!wide) {
          const int64_t at = offset_of(out, stored_rows.batch, stored, head, t.dv_first);
          store_row<T, kDv>(out.data, at, out.dtype, out.vector_bytes, o[r], half, factor,
                            t.dv_here);
        }
        if (lse_view.data && has_lse) {
          static_cast<float*>(lse_view.data)[offset_of(lse_view, stored_rows.batch, head, stored)] =
              result.lse;
        }
      } else {
        const int64_t at =
            (t.split * args.rows + int64_t{stored_rows.batch} * p.sq + stored) * p.hq + head;
        if (result.lse != -kInfinity) {
          store_row<T, kDv>(args.partial_o, at * p.dv + t.dv_first, TESSERA_FP32,
                            p.dv % 2 == 0 ? 8 : 4, o[r], half, factor, t.dv_here);
        }
        if (has_lse) args.partial_lse[at] = result.lse;
      }
    }
  }
  if (!wide) return;
  __syncwarp();
  constexpr int kChunks = kDv / 8, kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // of a row
  constexpr int kRowsAtOnce = 32 / kLanes;
  const int column = threadIdx.x % kLanes * 8, row0 = warp_row + threadIdx.x % 32 / kLanes;
  if (column >= t.dv_here) return;
  const T* from = staged + row0 * kStride + column;
  const auto copy = [&](T* to, int i, bool mine) {
    if (mine) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + i * kStride);
  };
  if (t.rows.pack == 1) {
    int query = t.rows.origin + row0;
    T* to = static_cast<T*>(out.data) + offset_of(out, stored_rows.batch, stored_rows.first + query,
                                                  t.rows.head0, t.dv_first + column);
#pragma unroll
    for (int i = 0; i < 16 * kRowTiles; i += kRowsAtOnce) {
      copy(to, i, query >= stored_rows.owned_lo && query < stored_rows.owned_hi);
      query += kRowsAtOnce;
      to += kRowsAtOnce * out.stride[1];
    }
  } else {
    for (int i = 0; i < 16 * kRowTiles; i += kRowsAtOnce) {
      const int row = row0 + i, query = t.rows.query(row);
      copy(static_cast<T*>(out.data) + offset_of(out, stored_rows.batch, stored_rows.first + query,
                                                 t.rows.head(row), t.dv_first + column),
           i, row < t.used_rows() && query >= stored_rows.owned_lo && query < stored_rows.owned_hi);
    }
  }
}

}  // namespace tessera::cuda::sm80
