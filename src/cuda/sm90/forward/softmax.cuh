// SPDX-License-Identifier: Apache-2.0
// The softmax of the forward kernel (forward/kernel.cuh), as far as it is arithmetic over what a
// thread holds: two rows of S and P, r = 0 and 1, eight apart (machine/wgmma.cuh). "Groups" are 8
// keys, of which a thread has two; S[4 g], S[4 g + 1] are those of row 0 in group g, S[4 g + 2],
// S[4 g + 3] of row 1.
//
// Functions of their arguments alone: whoever calls them says which block they stand in.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/common/score/score.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// The largest score of each row. Called by all lanes of a warp; both rows go side by side, so that
// one hides the other's latency.
template <int kScores>
__device__ __forceinline__ void row_maxima(const float (&S)[kScores], float (&maximum)[2]) {
  float a0 = S[0], b0 = S[1], a1 = S[2], b1 = S[3];
#pragma unroll
  for (int g = 1; g < kScores / 4; ++g) {
    a0 = fmaxf(a0, S[4 * g]), b0 = fmaxf(b0, S[4 * g + 1]);
    a1 = fmaxf(a1, S[4 * g + 2]), b1 = fmaxf(b1, S[4 * g + 3]);
  }
  maximum[0] = fmaxf(a0, b0), maximum[1] = fmaxf(a1, b1);
  maximum[0] = fmaxf(maximum[0], __shfl_xor_sync(kAllLanes, maximum[0], 2));
  maximum[1] = fmaxf(maximum[1], __shfl_xor_sync(kAllLanes, maximum[1], 2));
  maximum[0] = fmaxf(maximum[0], __shfl_xor_sync(kAllLanes, maximum[0], 1));
  maximum[1] = fmaxf(maximum[1], __shfl_xor_sync(kAllLanes, maximum[1], 1));
}

// The rows that move take the largest score that they have seen as their reference m: the one of
// `largest`, which has the block's maxima, or the m before. alpha: what O and l are to be
// multiplied by; 1, and m as it was, in a row that does not move. cm = c m. Leaves the new m in
// `largest`. kHidesLow: a row whose scores are very low has seen nothing (kLowest).
template <bool kHidesLow>
__device__ __forceinline__ void update_maxima(const bool (&moves)[2], float c, float (&largest)[2],
                                              float (&m)[2], float (&cm)[2], float (&alpha)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = moves[r] ? fmaxf(m[r], largest[r]) : m[r];
    if (kHidesLow && largest[r] * c <= kLowest2) largest[r] = -kInfinity;
    // A row that has seen nothing has m = -inf; any finite stand-in makes its exponentials 0.
    cm[r] = largest[r] == -kInfinity ? 0.f : largest[r] * c;
    alpha[r] = moves[r] ? exp2_approx(fmaf(m[r], c, -cm[r])) : 1.f;
    m[r] = largest[r];
  }
}

// p = exp2 of the exponents of one group's scores, and their sums by row added to `sum`.
// exponent(s, r): of score s in row r.
template <int kScores, typename Exponent>
__device__ __forceinline__ void softmax_of_group(int g, const float (&S)[kScores],
                                                 const Exponent& exponent, float (&p)[4],
                                                 float (&sum)[2]) {
  const float* s = S + 4 * g;
  p[0] = exp2_approx(exponent(s[0], 0)), p[2] = exp2_approx(exponent(s[2], 1));
  p[1] = exp2_approx(exponent(s[1], 0)), p[3] = exp2_approx(exponent(s[3], 1));
  sum[0] += p[0], sum[1] += p[2], sum[0] += p[1], sum[1] += p[3];
}

// P of one group: the A registers of PV.
template <typename Element, int kRegisters>
__device__ __forceinline__ void round_group(int g, const float (&p)[4], uint32_t (&P)[kRegisters]) {
  P[2 * g] = pack<Element>(p[0], p[1]);
  P[2 * g + 1] = pack<Element>(p[2], p[3]);
}

// P of a whole block, and its sums by row.
template <typename Element, int kScores, typename Exponent>
__device__ __forceinline__ void softmax_of_block(const float (&S)[kScores],
                                                 const Exponent& exponent,
                                                 uint32_t (&P)[kScores / 2], float (&sum)[2]) {
  sum[0] = sum[1] = 0.f;
#pragma unroll
  for (int g = 0; g < kScores / 4; ++g) {
    float p[4];
    softmax_of_group(g, S, exponent, p, sum);
    round_group<Element>(g, p, P);
  }
}

}  // namespace tessera::cuda::sm90
