// SPDX-License-Identifier: Apache-2.0
// How the rows of a tile come from the parts of teams and CTAs.
#pragma once

#include "cuda/sm80/machine/epilogue.cuh"
#include "cuda/sm80/machine/load.cuh"
#include "cuda/sm80/stream/shape.cuh"

namespace tessera::cuda::sm80 {

// Four columns of a row, summed over parts: each is worth 2^(its max - max).
struct RowSum {
  float max = -kInfinity, sum = 0;
  float4 o{0, 0, 0, 0};

  __device__ __forceinline__ void add(float part_max, float part_sum, const float4& x) {
    const float most = fmaxf(max, part_max), top = most == -kInfinity ? 0 : most;
    const float own = exp2_approx(max - top), other = exp2_approx(part_max - top);
    o = {o.x * own + x.x * other, o.y * own + x.y * other, o.z * own + x.z * other,
         o.w * own + x.w * other};
    sum = sum * own + part_sum * other;
    max = most;
  }
};

// One tile of rows: what its results need.
struct FewRows {
  const Params& p;
  const Sequence& sequence;
  TileRows rows;
  int used;  // rows

  __device__ __forceinline__ void finish(int row, int column, const RowSum& total) const {
    const int query = rows.query(row), head = rows.head(row);
    if (query < sequence.q.owned_lo || query >= sequence.q.owned_hi) return;
    const bool exists = query >= 0 && query < sequence.q.length;
    const View& max_logit = p.tensor[TESSERA_MAX_LOGIT];
    if (max_logit.data && exists && column == 0 && total.max > -kInfinity) {
      atomic_max(static_cast<float*>(max_logit.data) + head * max_logit.stride[0],
                 total.max * kLn2);
    }
    const RowResult result = finish_row(p, head, total.max, total.sum, exists);
    const float factor = result.factor * v_scale_of(p, sequence.n, head);
    const int64_t stored = sequence.q.first + query;
    const View& out = p.tensor[TESSERA_O];
    const int64_t at = offset_of(out, sequence.q.batch, stored, head) + column;
    const bool any = total.sum != 0;
    const float values[4] = {any ? total.o.x * factor : 0, any ? total.o.y * factor : 0,
                             any ? total.o.z * factor : 0, any ? total.o.w * factor : 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i < p.dv) store_float(out.data, at + i, out.dtype, values[i]);
    }
    const View& lse = p.tensor[TESSERA_LSE];
    if (column == 0 && lse.data) {
      static_cast<float*>(lse.data)[offset_of(lse, sequence.q.batch, head, stored)] = result.lse;
    }
  }
};

// The rows of a unit, from all of its parts. First the weights of the parts, a warp a row; then the
// columns, with many loads in flight, because all other CTAs may be waiting for this one.
template <typename S>
__device__ __forceinline__ void merge_parts(typename S::Storage& smem, const StreamArgs& args,
                                            const Piece& piece, const FewRows& tile) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < tile.used; row += S::kWarps) {
    float max = -kInfinity, sum = 0;
    for (int part = lane; part < piece.parts; part += 32) {
      const float2 sums = __ldcg(args.part_sums + int64_t{piece.slot_of(part)} * S::kRows + row);
      smem.merge.weights.max[part][row] = sums.x;
      const float most = fmaxf(max, sums.x), top = most == -kInfinity ? 0 : most;
      sum = sum * exp2_approx(max - top) + sums.y * exp2_approx(sums.x - top);
      max = most;
    }
    float most = max;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    sum *= exp2_approx(max - (most == -kInfinity ? 0 : most));
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane == 0) smem.merge.weights.total[row] = {most, sum};
  }
  __syncthreads();
  constexpr int kQuads = S::kD / 4, kAtOnce = S::kCopies > 0 ? S::kCopies : 16;
  for (int i = threadIdx.x; i < tile.used * kQuads; i += S::kThreads) {
    const int row = i / kQuads, column = i % kQuads * 4;
    RowSum total;
    total.max = smem.merge.weights.total[row].x, total.sum = smem.merge.weights.total[row].y;
    const float top = total.max == -kInfinity ? 0 : total.max;
    const auto quad_of = [&](int part) {
      const int64_t slot = piece.slot_of(min(part, piece.parts - 1));
      return reinterpret_cast<const float4*>(args.part_o + (slot * S::kRows + row) * S::kD +
                                             column);
    };
    const auto add = [&](int part, const float4& x) {
      const float weight = exp2_approx(smem.merge.weights.max[part][row] - top);
      total.o.x += x.x * weight, total.o.y += x.y * weight;
      total.o.z += x.z * weight, total.o.w += x.w * weight;
    };
    for (int part0 = 0; part0 < piece.parts; part0 += kAtOnce) {
      if constexpr (S::kCopies > 0) {
        // To a place of the thread's own: it waits for nobody else.
        const int count = min(kAtOnce, piece.parts - part0);
        const auto copy = [&](int j) { return &smem.merge.copies.of[j][threadIdx.x]; };
#pragma unroll 8
        for (int j = 0; j < count; ++j) copy_async<16>(copy(j), quad_of(part0 + j), 16);
        commit_copies();
        wait_for_copies<0>();
#pragma unroll 4
        for (int j = 0; j < count; ++j) add(part0 + j, *copy(j));
      } else {
        float4 x[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) x[j] = __ldcg(quad_of(part0 + j));
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (part0 + j < piece.parts) add(part0 + j, x[j]);
        }
      }
    }
    tile.finish(row, column, total);
  }
}

}  // namespace tessera::cuda::sm80
