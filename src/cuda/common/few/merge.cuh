// SPDX-License-Identifier: Apache-2.0
// How few rows come from the parts of a CTA's warps, or teams of them, and of several CTAs.
#pragma once

#include "cuda/common/few/args.h"
#include "cuda/common/finish.cuh"
#include "cuda/common/score/score.cuh"
#include "cuda/common/work/work.cuh"

namespace tessera::cuda {

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

  // kPlain: o is of T and has rows of 16 aligned bytes, and nobody asks for the largest logit.
  template <typename T, bool kPlain = false>
  __device__ __forceinline__ void finish(int row, int column, const RowSum& total) const {
    const int query = rows.query(row), head = rows.head(row);
    if (query < sequence.q.owned_lo || query >= sequence.q.owned_hi) return;
    const bool exists = query >= 0 && query < sequence.q.length;
    const View& max_logit = p.tensor[TESSERA_MAX_LOGIT];
    if (!kPlain && max_logit.data && exists && column == 0 && total.max > -kInfinity) {
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
    if (kPlain ? column < p.dv
               : out.dtype == kDtype && out.vector_bytes >= 8 && column + 4 <= p.dv) {
      *reinterpret_cast<uint2*>(static_cast<T*>(out.data) + at) = {pack<T>(values[0], values[1]),
                                                                   pack<T>(values[2], values[3])};
    } else if (!kPlain) {
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

// The parts of a CTA's teams, of kPartRows rows.
template <int kPartTeams, int kPartRows, int kD>
struct TeamParts {
  static constexpr int kTeams = kPartTeams;
  float o[kTeams][kPartRows][kD + 4];
  float max[kTeams][kPartRows], sum[kTeams][kPartRows];
};

// Four columns of a row from the teams' parts.
template <typename Parts>
__device__ __forceinline__ RowSum sum_of_teams(const Parts& parts, int row, int column) {
  float most = -kInfinity;
#pragma unroll
  for (int t = 0; t < Parts::kTeams; ++t) most = fmaxf(most, parts.max[t][row]);
  RowSum total;
  const float top = total.raise(most);
#pragma unroll
  for (int t = 0; t < Parts::kTeams; ++t) {
    const float weight = exp2_approx(parts.max[t][row] - top);
    total.sum += parts.sum[t][row] * weight;
    total.add(*reinterpret_cast<const float4*>(&parts.o[t][row][column]), weight);
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
__device__ __forceinline__ RowSum sum_of_parts(const PartsArgs& args, const Piece& piece, int row,
                                               int column) {
  constexpr int kLanes = 16;  // of a row, and parts at once
  static_assert(S::kD / 4 % kLanes == 0);
  constexpr int kSlot = S::kRows * S::kD;  // floats
  const int lane = threadIdx.x % 32, own = lane % kLanes, parts = piece.parts;
  const float* const first = args.part_o + int64_t{piece.first_slot} * kSlot + row * S::kD + column;
  const float* next = args.part_o + int64_t{piece.next_slots} * kSlot + row * S::kD + column;
  const int part = piece.slot_step * kSlot;  // floats from part to part
  RowSum total;
#pragma unroll 1
  for (int part0 = 0; part0 < parts; part0 += kLanes, next += kLanes * part) {
    float2 sums{-kInfinity, 0};
    if (part0 + own < parts) {
      sums = __ldcg(args.part_sums + int64_t{piece.slot_of(part0 + own)} * S::kRows + row);
    }
    float4 x[kLanes];
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      x[j] = {0, 0, 0, 0};
      load_if(part0 + j < parts, x[j], j == 0 && part0 == 0 ? first : next + j * part);
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

// ---- who brings the last part of a unit ----
//
// The counter is the word of the unit's first slot: the launch's mark, and below it how many pieces
// are there. The workspace's content is unknown, and a word of another mark counts nothing: each
// piece opens the counter when it begins, while nobody waits, and counts itself at its end. The last
// leaves 0, because a graph launches again with the same mark. Both are called by one thread.

constexpr int kCountBits = 16;

__device__ inline unsigned long long* counter_of(const PartsArgs& args, const Piece& piece) {
  return args.counters + piece.slot_of(0);
}
__device__ inline unsigned long long count_of_none(const PartsArgs& args) {
  return args.mark << kCountBits;
}

__device__ inline void open_count(const PartsArgs& args, const Piece& piece) {
  if (piece.parts == 1) return;
  unsigned long long* const word = counter_of(args, piece);
  const unsigned long long none = count_of_none(args), found = __ldcg(word);
  if (found >> kCountBits != none >> kCountBits) atomicCAS(word, found, none);
}

// Behind a barrier of the CTA; true for the last piece, which then sees what all have written.
__device__ inline bool brings_last(const PartsArgs& args, const Piece& piece) {
  unsigned long long* const word = counter_of(args, piece);
  unsigned long long before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;"
               : "=l"(before)
               : "l"(word)
               : "memory");
  const bool last = before + 1 == count_of_none(args) + piece.parts;
  if (last) *word = 0;
  return last;
}

}  // namespace tessera::cuda
