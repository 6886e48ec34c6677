// SPDX-License-Identifier: Apache-2.0
// The gradients of what is added to the scores, from a strip's dX (keys in rows, queries in lanes).
#pragma once

#include "cpu/score.h"

namespace tessera::cpu {
namespace {

// sum[v] -= dX |i + shift - j|, the factor of an ALiBi slope. A block's terms, which all but cancel,
// are summed by themselves first.
template <typename S>
__attribute__((noinline)) void add_slopes(const CallSequence& sequence, const StripRows<S>& rows,
                                          const Keys<S>& keys, const Visible<S>& visible,
                                          const float* dx, typename S::F (&sum)[kVectors]) {
  constexpr int L = S::kLanes;
  for (int v = 0; v < kVectors; ++v) {
    float distance[L];  // of key n0
    for (int l = 0; l < L; ++l) {
      distance[l] = static_cast<float>(rows.token[v * L + l] + sequence.band.shift - keys.n0);
    }
    const auto position = S::load(distance);
    auto total = S::zero();
    for (int j = visible.first; j < visible.last; ++j) {
      const auto apart = S::abs(S::sub(position, S::set1(static_cast<float>(j))));
      total = S::fma(S::load(dx + (j * kVectors + v) * L), apart, total);
    }
    sum[v] = S::sub(sum[v], total);
  }
}

// sum[j][lane] += scale dX, over the strip's two vectors.
template <typename S>
__attribute__((noinline)) void add_bias_keys(const Visible<S>& visible, const float* dx,
                                             float scale, float* sum) {
  constexpr int L = S::kLanes;
  for (int j = visible.first; j < visible.last; ++j) {
    const auto both = S::add(S::load(dx + j * kVectors * L), S::load(dx + (j * kVectors + 1) * L));
    S::store(sum + j * L, S::fma(both, S::set1(scale), S::load(sum + j * L)));
  }
}

// sum[lane] += scale dX, over the keys.
template <typename S>
__attribute__((noinline)) void add_bias_rows(const Visible<S>& visible, const float* dx,
                                             float scale, float* sum) {
  constexpr int L = S::kLanes;
  for (int v = 0; v < kVectors; ++v) {
    auto total = S::zero();
    for (int j = visible.first; j < visible.last; ++j) {
      total = S::add(total, S::load(dx + (j * kVectors + v) * L));
    }
    S::store(sum + v * L, S::fma(total, S::set1(scale), S::load(sum + v * L)));
  }
}

template <typename S, bool kAdd, typename To>
TESSERA_INLINE void put_bias_row(To* to, typename S::F x, int n) {
  if constexpr (kAdd) x = S::add(S::load_n(to, n), x);
  S::store_n(to, x, n);
}

// scale dX, transposed, to the rows of a plane: row_of(i) is where query i has key n0.
template <typename S, bool kAdd, typename RowOf>
__attribute__((noinline)) void store_bias(const StripRows<S>& rows, const Visible<S>& visible,
                                          const float* dx, float scale, int32_t dtype,
                                          const RowOf& row_of) {
  constexpr int L = S::kLanes;
  for (int v = 0; v < kVectors && v * L < rows.count; ++v) {
    const int lanes = smaller(L, rows.count - v * L);
    for (int j = visible.first; j < visible.last; j += L) {
      const int n = smaller(L, visible.last - j);
      typename S::F x[L];
      for (int k = 0; k < L; ++k) {
        x[k] = k < n ? S::load(dx + ((j + k) * kVectors + v) * L) : S::zero();
        x[k] = S::mul(x[k], S::set1(scale));
      }
      S::transpose(x);
      for (int l = 0; l < lanes; ++l) {
        char* row = row_of(rows.token[v * L + l]);
        switch (dtype) {
          case TESSERA_FP32: {
            put_bias_row<S, kAdd>(reinterpret_cast<float*>(row) + j, x[l], n);
            break;
          }
          case TESSERA_BF16: {
            put_bias_row<S, kAdd>(reinterpret_cast<Bf16*>(row) + j, x[l], n);
            break;
          }
          default:
            put_bias_row<S, kAdd>(reinterpret_cast<Fp16*>(row) + j, x[l], n);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
