// SPDX-License-Identifier: Apache-2.0
// The register tiles of the forward pass. Both read one matrix by broadcasts from rows that lie
// where the caller put them (a table of row pointers: pages, strides and tails cost nothing) and
// the other as vectors of queries. Each keeps kRows x N sums in registers; head dims and keys are
// loop bounds at run time, so one instance serves all shapes. Not inlined: the sums must not spill.
#pragma once

#include "cpu/simd/types.h"
#include "cpu/tiles.h"

namespace tessera::cpu {
namespace {

// S^T[j][lane] = sum_d K[j][d] Q^T[d][lane] for j in [first, last), rounded up to whole tiles: the
// table has valid rows up to there. maximum, if kMax: of each lane over the rows, which then must
// be whole tiles; NaN is passed over.
template <typename S, int N, bool kMax>
__attribute__((noinline)) void multiply_keys(const char* const* k_rows, const float* q_t,
                                             int64_t dqk, int first, int last, float* scores,
                                             float* maximum) {
  constexpr int R = S::kRows, L = S::kLanes;
  using F = typename S::F;
  F top[N];
  for (int v = 0; v < N; ++v) top[v] = S::set1(-__builtin_inff());
  for (int j = first; j < last; j += R) {
    const float* k[R];
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) k[r] = reinterpret_cast<const float*>(k_rows[j + r]);
    F sum[R][N];
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < N; ++v) sum[r][v] = S::zero();
    }
    const float* q = q_t;
    for (int64_t d = 0; d < dqk; ++d, q += N * L) {
      F x[N];
      for (int v = 0; v < N; ++v) x[v] = S::load(q + v * L);
      TESSERA_UNROLL
      for (int r = 0; r < R; ++r) {
        const F y = S::broadcast(k[r] + d);
        for (int v = 0; v < N; ++v) sum[r][v] = S::fma(y, x[v], sum[r][v]);
      }
    }
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < N; ++v) {
        S::store(scores + ((j + r) * N + v) * L, sum[r][v]);
        if (kMax) top[v] = S::max(sum[r][v], top[v]);
      }
    }
  }
  if (kMax) {
    for (int v = 0; v < N; ++v) S::store(maximum + v * L, top[v]);
  }
}

// The same for bf16: q_t holds pairs of head dims, a lane a word.
template <typename S, int N, bool kMax>
__attribute__((noinline)) void multiply_keys_bf16(const char* const* k_rows, const uint32_t* q_t,
                                                  int64_t dqk, int first, int last, float* scores,
                                                  float* maximum) {
  constexpr int R = S::kRows, L = S::kLanes;
  using F = typename S::F;
  F top[N];
  for (int v = 0; v < N; ++v) top[v] = S::set1(-__builtin_inff());
  for (int j = first; j < last; j += R) {
    const Bf16* k[R];
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) k[r] = reinterpret_cast<const Bf16*>(k_rows[j + r]);
    F sum[R][N];
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < N; ++v) sum[r][v] = S::zero();
    }
    const uint32_t* q = q_t;
    int64_t d = 0;
    for (; d + 2 <= dqk; d += 2, q += N * L) {
      typename S::Pairs x[N];
      for (int v = 0; v < N; ++v) x[v] = S::load_pairs(q + v * L);
      TESSERA_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto y = S::broadcast_pair(k[r] + d);
        for (int v = 0; v < N; ++v) sum[r][v] = S::dot(sum[r][v], y, x[v]);
      }
    }
    if (d < dqk) {  // the last of an odd head dim
      TESSERA_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto y = S::broadcast_half(k[r] + d);
        for (int v = 0; v < N; ++v) sum[r][v] = S::dot(sum[r][v], y, S::load_pairs(q + v * L));
      }
    }
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < N; ++v) {
        S::store(scores + ((j + r) * N + v) * L, sum[r][v]);
        if (kMax) top[v] = S::max(sum[r][v], top[v]);
      }
    }
  }
  if (kMax) {
    for (int v = 0; v < N; ++v) S::store(maximum + v * L, top[v]);
  }
}

// O^T[d][lane] = alpha[lane] O^T[d][lane] + sum_j V[j][d] P^T[j][lane] for R head dims from d on.
template <typename S, int R, int N>
__attribute__((noinline)) void accumulate_values(const char* const* v_rows, int64_t d,
                                                 const float* p, int first, int last,
                                                 const float* alpha, float* o_t) {
  constexpr int L = S::kLanes;
  using F = typename S::F;
  F sum[R][N];
  o_t += d * N * L;
  TESSERA_UNROLL
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) {
      sum[r][v] = S::mul(S::load(o_t + (r * N + v) * L), S::load(alpha + v * L));
    }
  }
  for (int j = first; j < last; ++j) {
    const float* value = reinterpret_cast<const float*>(v_rows[j]) + d;
    F x[N];
    for (int v = 0; v < N; ++v) x[v] = S::load(p + (j * N + v) * L);
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) {
      const F y = S::broadcast(value + r);
      for (int v = 0; v < N; ++v) sum[r][v] = S::fma(y, x[v], sum[r][v]);
    }
  }
  TESSERA_UNROLL
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) S::store(o_t + (r * N + v) * L, sum[r][v]);
  }
}

// The same for bf16: v_pairs[j / 2][d] = (V[j][d], V[j + 1][d]), rows of stride words; p likewise a
// word for two keys. first is even; an odd last counts one key of weight 0.
template <typename S, int R, int N>
__attribute__((noinline)) void accumulate_values_bf16(const uint32_t* v_pairs, int64_t stride,
                                                      int64_t d, const uint32_t* p, int first,
                                                      int last, const float* alpha, float* o_t) {
  constexpr int L = S::kLanes;
  using F = typename S::F;
  F sum[R][N];
  o_t += d * N * L;
  TESSERA_UNROLL
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) {
      sum[r][v] = S::mul(S::load(o_t + (r * N + v) * L), S::load(alpha + v * L));
    }
  }
  const uint32_t* value = v_pairs + first / 2 * stride + d;
  for (int j = first / 2; j < (last + 1) / 2; ++j, value += stride) {
    typename S::Pairs x[N];
    for (int v = 0; v < N; ++v) x[v] = S::load_pairs(p + (j * N + v) * L);
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto y = S::broadcast_pair(reinterpret_cast<const Bf16*>(value + r));
      for (int v = 0; v < N; ++v) sum[r][v] = S::dot(sum[r][v], y, x[v]);
    }
  }
  TESSERA_UNROLL
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) S::store(o_t + (r * N + v) * L, sum[r][v]);
  }
}

}  // namespace
}  // namespace tessera::cpu
