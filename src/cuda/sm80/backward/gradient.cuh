// SPDX-License-Identifier: Apache-2.0
// The score pipeline backwards, for one fragment: from raw scores and dP = dO V^T to P and dS.
//
//     P = e^(x - lse)       P~ = P keep      dX = P (dP keep * dropout_scale - delta)
//     dS = dX * softcap'    (softmax_scale joins dQ, dK and a pre-scale dbias as they leave)
#pragma once

#include "cuda/sm80/args.h"
#include "cuda/sm80/machine/epilogue.cuh"

namespace tessera::cuda::sm80 {

// What the gradient needs to know of a query.
struct RowStatistics {
  float lse, delta;  // lse in the units of logits
};

// Where the statistics of a head of a sequence begin, one a row.
__device__ inline int64_t statistics_at(const Params& p, const Sequence& sequence, int head) {
  return (int64_t{sequence.q.batch} * p.hq + head) * p.sq + sequence.q.first;
}

__device__ inline RowStatistics statistics_of(const BackwardArgs& b, const Sequence& sequence,
                                              int64_t at, int query) {
  if (query < 0 || query >= sequence.q.length) return {0, 0};
  return {b.lse[at + query], b.delta[at + query]};
}

// True, in all threads of the CTA, if one of kRows rows has an lse, as the caller stores it, below
// `below`; rows that see no key do not count. kRows: at most the threads of the CTA.
template <int kRows>
__device__ inline bool holds_row_below(const Params& p, const Sequence& sequence, int head,
                                       int begin, float below) {
  const View& lse = p.tensor[TESSERA_LSE];
  const int query = begin + static_cast<int>(threadIdx.x);
  float value = 0;
  if (threadIdx.x < kRows && query >= 0 && query < sequence.q.length) {
    value = static_cast<const float*>(
        lse.data)[offset_of(lse, sequence.q.batch, head, sequence.q.first + query)];
  }
  return __syncthreads_or(value < below && value != -kInfinity) != 0;
}

// e^x for x in the units of logits.
template <typename T>
__device__ __forceinline__ float weight_of(float x) {
  return exp2_approx(x * kToLog2<T>);
}

// Turns s into P~ and dp into dS (into dX if of_logit). rows: head and origin of the tile, with
// pack = 1. statistics(i): those of the fragment's query i, which is of half i in S and of column i
// of kN / 4 in S^T. slope[half] collects dX times what ALiBi multiplies, in S alone. clean: the
// band hides nothing here; shown: the data masks hide nothing either.
template <typename T, int kN, Major kMajor, bool kRich, typename Statistics>
__device__ __forceinline__ void score_gradient(float (&s)[kN / 2], float (&dp)[kN / 2],
                                               const Params& p, const Sequence& sequence,
                                               const TileRows& rows, int major0, int minor0,
                                               bool clean, bool shown, const Statistics& statistics,
                                               float (&slope)[2], bool of_logit = false) {
  const auto row_of = [&](int e) {
    return statistics(kMajor == Major::kQueries ? e / 2 % 2 : e / 4 * 2 + e % 2);
  };
  if constexpr (!kRich) {
    if (!clean) apply_band<kN, kMajor>(s, sequence.band, rows, major0, minor0);
    const float scale = logit_scale<T>(p);
#pragma unroll
    for (int e = 0; e < kN / 2; ++e) {
      const RowStatistics row = row_of(e);
      s[e] = weight_of<T>(s[e] * scale - row.lse);
      dp[e] = s[e] * (dp[e] - row.delta);
    }
  } else {
    float cap_slope[kN / 2];
    shape_scores<T, kN, kMajor>(s, &cap_slope, p, sequence, rows, major0, minor0, clean, shown);
    uint32_t kept[(kN + 63) / 64];
    if (p.flags & TESSERA_DROPOUT) {
      const int row0 = rows.origin + (kMajor == Major::kQueries ? major0 : minor0);
      dropout_bits<kN, kMajor>(dropout_of(p), head_index_of(p, sequence.n, rows.head0),
                               kMajor == Major::kQueries ? row0 : major0,
                               kMajor == Major::kQueries ? minor0 : row0, kept,
                               dropout_origin(p, sequence.n));
    } else {
#pragma unroll
      for (uint32_t& word : kept) word = ~0u;
    }
#pragma unroll
    for (int e = 0; e < kN / 2; ++e) {
      const RowStatistics row = row_of(e);
      const bool keep = kept[e / 32] >> (e % 32) & 1;
      const float probability = weight_of<T>(s[e] - row.lse);
      const float gradient = keep ? dp[e] * p.dropout_scale : 0.f;
      dp[e] = s[e] == -kInfinity ? 0.f : probability * (gradient - row.delta);
      s[e] = keep ? probability : 0.f;
    }
    if (kMajor == Major::kQueries && p.tensor[TESSERA_ALIBI_SLOPES].data) {
      float tile_sum[2] = {};  // apart, since the terms of a tile all but cancel
      for_each_distance<kN, kMajor>(
          sequence, rows, major0, minor0,
          [&](int e, int, float distance) { tile_sum[e / 2 % 2] += dp[e] * distance; });
      slope[0] -= tile_sum[0];
      slope[1] -= tile_sum[1];
    }
    if (!of_logit && (p.flags & TESSERA_SOFTCAP)) {
#pragma unroll
      for (int e = 0; e < kN / 2; ++e) dp[e] *= cap_slope[e];
    }
  }
}

}  // namespace tessera::cuda::sm80
