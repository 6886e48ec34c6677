// SPDX-License-Identifier: Apache-2.0
// Decode of one or two rows: head dims in the lanes. A query that stands alone would leave most
// lanes of an S^T tile idle, so its scores are plain dot products over rows of K (16 keys at a
// time, whose sums are transposed and added at the end) and its output a sum of rows of V. K and V
// are widened as they are loaded, from any storage type; each line is read once, and one of the
// next block is asked for at the same moment. Softmax and everything between are those of
// forward/kernel.h: the scores land in lane r of an S^T tile.
#pragma once

#include "cpu/forward/block.h"

namespace tessera::cpu {
namespace {

// Rows that are decoded so; from three on the tiles of forward/tile.h are faster.
constexpr int64_t kDotRows = 2;

// Floats from one row of O to the next.
constexpr int64_t decode_step(int64_t dv) { return (dv + 31) / 32 * 32; }

// S^T[j][r] = scale-free product of q with key j, for j in [first, last) rounded up to whole
// vectors of keys; the tables have rows up to there. Row 0 fills the other lanes too.
template <typename S, typename T>
__attribute__((noinline)) void dot_keys(const char* const* k_rows, Ahead ahead, const float* q,
                                        int64_t dqk, int r, int first, int last, float* scores) {
  using W = typename S::Wide;
  constexpr int L = W::kLanes;
  constexpr int64_t kRowBytes = L * sizeof(T);  // that a step reads of each of L rows
  for (int j = first; j < last; j += L) {
    typename W::F sum[L];
    TESSERA_UNROLL
    for (int l = 0; l < L; ++l) sum[l] = W::zero();
    int64_t d = 0;
    for (; d + L <= dqk; d += L) {
      const auto x = W::load(q + d);
      TESSERA_UNROLL
      for (int l = 0; l < L; ++l) {
        sum[l] = W::fma(W::load(reinterpret_cast<const T*>(k_rows[j + l]) + d), x, sum[l]);
        if (l * kRowBytes % 64 == 0 && (L * kRowBytes % 64 == 0 || d * kRowBytes % 64 == 0)) {
          ahead.ask();
        }
      }
    }
    if (d < dqk) {
      const int n = static_cast<int>(dqk - d);
      const auto x = W::load_n(q + d, n);
      for (int l = 0; l < L; ++l) {
        sum[l] = W::fma(W::load_n(reinterpret_cast<const T*>(k_rows[j + l]) + d, n), x, sum[l]);
      }
    }
    W::transpose(sum);
    TESSERA_UNROLL
    for (int half = L / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) sum[l] = W::add(sum[l], sum[l + half]);
    }
    alignas(64) float s[L];
    W::store(s, sum[0]);
    for (int l = 0; l < L; ++l) {
      float* to = scores + (j + l) * S::kLanes;
      if (r == 0) {
        S::store(to, S::broadcast(s + l));
      } else {
        to[r] = s[l];
      }
    }
  }
}

// o[d] = alpha o[d] + scale sum_j P^T[j][r] V[j][d] for kVecs vectors of head dims from d on, of
// which the last has n elements.
template <typename S, typename T, int kVecs>
__attribute__((noinline)) void add_values(const char* const* v_rows, Ahead& ahead, const float* p,
                                          float scale, float alpha, int r, int first, int last,
                                          int64_t d, int n, float* o) {
  using W = typename S::Wide;
  constexpr int L = W::kLanes;
  typename W::F sum[kVecs];
  const auto shrink = W::set1(alpha);
  Ahead asking = ahead;  // in registers
  TESSERA_UNROLL
  for (int u = 0; u < kVecs; ++u) sum[u] = W::mul(W::load(o + d + u * L), shrink);
  for (int j = first; j < last; ++j) {
    const T* value = reinterpret_cast<const T*>(v_rows[j]) + d;
    const auto weight = W::set1(p[j * S::kLanes + r] * scale);
    TESSERA_UNROLL
    for (int u = 0; u < kVecs; ++u) {
      const auto x = n < L && u + 1 == kVecs ? W::load_n(value + u * L, n) : W::load(value + u * L);
      sum[u] = W::fma(x, weight, sum[u]);
      if (kVecs > 1 && u * L * sizeof(T) % 64 == 0) asking.ask();
    }
  }
  TESSERA_UNROLL
  for (int u = 0; u < kVecs; ++u) W::store(o + d + u * L, sum[u]);
  ahead = asking;
}

// All head dims of row r.
template <typename S, typename T>
void add_all_values(const Block<S>& block, const float* p, float scale, float alpha, int r,
                    int first, int last, int64_t dv, float* o) {
  constexpr int L = S::Wide::kLanes;
  const auto* rows = block.v_rows;
  Ahead ahead = block.v_ahead();
  int64_t d = 0;
  for (; d + 8 * L <= dv; d += 8 * L) {
    add_values<S, T, 8>(rows, ahead, p, scale, alpha, r, first, last, d, L, o);
  }
  for (; d + 4 * L <= dv; d += 4 * L) {
    add_values<S, T, 4>(rows, ahead, p, scale, alpha, r, first, last, d, L, o);
  }
  for (; d < dv; d += L) {
    const int n = static_cast<int>(smaller<int64_t>(dv - d, L));
    add_values<S, T, 1>(rows, ahead, p, scale, alpha, r, first, last, d, n, o);
  }
}

}  // namespace
}  // namespace tessera::cpu
