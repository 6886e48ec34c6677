// SPDX-License-Identifier: Apache-2.0
// How the rows of a tile come from the parts of teams and CTAs.
#pragma once

#include "cuda/sm80/machine/epilogue.cuh"
#include "cuda/sm80/machine/load.cuh"
#include "cuda/sm80/stream/params.h"
#include "cuda/sm80/stream/shape.cuh"

namespace tessera::cuda::sm80 {

// Four columns of a row, summed over parts: each is worth 2^(its max - max).
struct RowSum {
  float max = -kInfinity, sum = 0;
  float4 o{0, 0, 0, 0};

  // Brings what was added to a larger maximum, and answers what to subtract from those of parts.
  __device__ __forceinline__ float raise(float most) {
    most = fmaxf(max, most);
    const float top = most == -kInfinity ? 0 : most, own = exp2_approx(max - top);
    o = {o.x * own, o.y * own, o.z * own, o.w * own};
    sum *= own;
    max = most;
    return top;
  }
  __device__ __forceinline__ void add(const float4& x, float weight) {
    o.x += x.x * weight, o.y += x.y * weight;
    o.z += x.z * weight, o.w += x.w * weight;
  }
};

// One tile of rows: what its results need.
struct FewRows {
  const Params& p;
  const Sequence& sequence;
  TileRows rows;
  int used;  // rows

  template <typename T>
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
    // What nobody sees is 0 whatever was added up.
    const bool any = total.sum != 0;
    const float factor = result.factor * v_scale_of(p, sequence.n, head);
    const float values[4] = {any ? total.o.x * factor : 0, any ? total.o.y * factor : 0,
                             any ? total.o.z * factor : 0, any ? total.o.w * factor : 0};
    const int64_t stored = sequence.q.first + query;
    const View& out = p.tensor[TESSERA_O];
    const int64_t at = offset_of(out, sequence.q.batch, stored, head) + column;
    constexpr int kDtype = __is_same(T, __half) ? TESSERA_FP16 : TESSERA_BF16;
    if (out.dtype == kDtype && out.vector_bytes >= 8 && column + 4 <= p.dv) {
      *reinterpret_cast<uint2*>(static_cast<T*>(out.data) + at) = {pack<T>(values[0], values[1]),
                                                                   pack<T>(values[2], values[3])};
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < p.dv) store_float(out.data, at + i, out.dtype, values[i]);
      }
    }
    const View& lse = p.tensor[TESSERA_LSE];
    if (column == 0 && lse.data) {
      static_cast<float*>(lse.data)[offset_of(lse, sequence.q.batch, head, stored)] = result.lse;
    }
  }
};

// Four columns of a row of a tile from the teams' parts.
template <typename S>
__device__ __forceinline__ RowSum sum_of_teams(const typename S::Storage& smem, int row,
                                               int column) {
  float most = -kInfinity;
#pragma unroll
  for (int t = 0; t < S::kTeams; ++t) most = fmaxf(most, smem.parts.max[t][row]);
  RowSum total;
  const float top = total.raise(most);
#pragma unroll
  for (int t = 0; t < S::kTeams; ++t) {
    const float weight = exp2_approx(smem.parts.max[t][row] - top);
    total.sum += smem.parts.sum[t][row] * weight;
    total.add(*reinterpret_cast<const float4*>(&smem.parts.o[t][row][column]), weight);
  }
  return total;
}

// Four floats from L2, or `x` as it was. In its place: the compiler moves other loads to where they
// are used, one after the other.
__device__ __forceinline__ void load_if(bool exists, float4& x, const float* from) {
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      "setp.ne.b32 exists, %5, 0;\n"
      "@exists ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "l"(from), "r"(static_cast<int>(exists)));
}

// The same from all parts of a unit, by all lanes of a warp together, with many loads in flight: all
// other CTAs may be waiting for this one. Lanes that have a row together divide the sums of its
// parts.
template <typename S>
__device__ __forceinline__ RowSum sum_of_parts(const StreamArgs& args, const Piece& piece, int row,
                                               int column) {
  constexpr int kLanes = 16;  // of a row, and parts at once
  static_assert(S::kD / 4 % kLanes == 0);
  constexpr int kPart = S::kRows * S::kD;  // floats from slot to slot
  const int lane = threadIdx.x % 32, own = lane % kLanes, parts = piece.parts;
  const float* const first = args.part_o + int64_t{piece.first_slot} * kPart + row * S::kD + column;
  const float* next = args.part_o + int64_t{piece.next_slots} * kPart + row * S::kD + column;
  RowSum total;
#pragma unroll 1
  for (int part0 = 0; part0 < parts; part0 += kLanes, next += kLanes * kPart) {
    float2 sums{-kInfinity, 0};
    if (part0 + own < parts) {
      sums = __ldcg(args.part_sums + int64_t{piece.slot_of(part0 + own)} * S::kRows + row);
    }
    float4 x[kLanes];
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      x[j] = {0, 0, 0, 0};
      load_if(part0 + j < parts, x[j], j == 0 && part0 == 0 ? first : next + j * kPart);
    }
    float most = sums.x;
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    }
    const float own_weight = exp2_approx(sums.x - total.raise(most));
    float sum = sums.y * own_weight;
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    total.sum += sum;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      total.add(x[j], __shfl_sync(~0u, own_weight, lane - own + j));
    }
  }
  return total;
}

// Announces a piece of several to the others of its unit, by a warp that comes from a barrier of
// the CTA; true for one of them, which then sees what all of them have written.
//
// A part is announced by the launch's mark in the word of its slot: the workspace's content is
// unknown, and a word that is not the mark announces nothing. Each word is written by one CTA (a
// counter would have all of them queue up), and whoever is last to write sees all others'. If
// several see all, the first to take part 0's word back is the one. All words end as 0, because a
// graph launches again with the same mark.
__device__ inline bool brings_last(const StreamArgs& args, const Piece& piece) {
  const int lane = threadIdx.x % 32;
  const auto word = [&](int part) -> volatile unsigned long long& {
    return args.announced[piece.slot_of(part)];
  };
  if (lane == 0) {
    // What the CTA has written comes before the word.
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    *const_cast<volatile unsigned long long*>(args.announced + piece.slot_of(piece.part)) =
        args.mark;
    __threadfence();  // the word before the looks: one of any two sees the other's
  }
  __syncwarp();
  bool all = true;
#pragma unroll 1
  for (int part = lane; part < piece.parts; part += 32) all &= word(part) == args.mark;
  if (!__all_sync(~0u, all)) return false;
  bool first = false;
  if (lane == 0) {
    first = atomicCAS(args.announced + piece.slot_of(0), args.mark, 0ull) == args.mark;
  }
  if (!__shfl_sync(~0u, first, 0)) return false;
#pragma unroll 1
  for (int part = 1 + lane; part < piece.parts; part += 32) word(part) = 0;
  __threadfence();
  return true;
}
}  // namespace tessera::cuda::sm80
