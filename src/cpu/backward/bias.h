// SPDX-License-Identifier: Apache-2.0
// The gradients of what is added to the scores, from a strip's dX (keys in rows, queries in lanes).
#pragma once

#include "cpu/score/score.h"

namespace tessera::cpu {
namespace {

// sum[v] -= dX |i + shift - j|, the factor of an ALiBi slope. A block's terms, which all but
// cancel, are summed by themselves first.
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

// kLanes keys of one vector of a strip, times factor, transposed: x[l] is row l.
template <typename S>
TESSERA_INLINE void load_rows(const float* dx, typename S::F factor,
                              typename S::F (&x)[S::kLanes]) {
  TESSERA_UNROLL
  for (int k = 0; k < S::kLanes; ++k) {
    x[k] = S::mul(S::load(dx + k * kVectors * S::kLanes), factor);
  }
  S::transpose(x);
}

// Keys [j, last) of the strip, as many as whole cache lines hold, past the caches: nobody reads
// them here, and a line that is not filled at once is fetched first. Returns where it stopped.
template <typename S, typename To>
TESSERA_INLINE int stream_rows(const float* dx, typename S::F factor, int j, int last,
                               To* const* row) {
  constexpr int L = S::kLanes, kLine = 64 / static_cast<int>(sizeof(To));
  for (; j + kLine <= last; j += kLine) {
    for (int v = 0; v < kVectors; ++v) {
      typename S::F x[L], y[L];
      load_rows<S>(dx + (j * kVectors + v) * L, factor, x);
      if constexpr (kLine == L) {
        TESSERA_UNROLL
        for (int l = 0; l < L; ++l) S::stream(row[v * L + l] + j, x[l]);
      } else {
        load_rows<S>(dx + ((j + L) * kVectors + v) * L, factor, y);
        TESSERA_UNROLL
        for (int l = 0; l < L; ++l) S::stream(row[v * L + l] + j, x[l], y[l]);
      }
    }
  }
  return j;
}

template <typename S, bool kAdd, typename To, typename RowOf>
__attribute__((noinline)) void store_bias_as(const StripRows<S>& rows, const Visible<S>& visible,
                                             const float* dx, float scale, const RowOf& row_of) {
  constexpr int L = S::kLanes;
  const auto factor = S::set1(scale);
  const int last = visible.last;
  int j = visible.first;
  To* row[kVectors * L];
  uintptr_t places = 0;
  for (int l = 0; l < kVectors * L; ++l) {
    row[l] = reinterpret_cast<To*>(row_of(rows.token[l]));
    places |= reinterpret_cast<uintptr_t>(row[l] + j);
  }
  if constexpr (S::kStreams && !kAdd) {
    const bool whole_lines = places % 64 == 0 && rows.count == kVectors * L;
    if (whole_lines) j = stream_rows<S>(dx, factor, j, last, row);
  }
  for (; j < last; j += L) {
    const int n = smaller(L, last - j);
    for (int v = 0; v < kVectors && v * L < rows.count; ++v) {
      const float* from = dx + (j * kVectors + v) * L;
      typename S::F x[L];
      if (n == L && v * L + L <= rows.count) {
        load_rows<S>(from, factor, x);
        TESSERA_UNROLL
        for (int l = 0; l < L; ++l) {
          To* to = row[v * L + l] + j;
          S::store(to, kAdd ? S::add(S::load(to), x[l]) : x[l]);
        }
      } else {
        for (int k = 0; k < L; ++k) {
          x[k] = k < n ? S::mul(S::load(from + k * kVectors * L), factor) : S::zero();
        }
        S::transpose(x);
        for (int l = 0; l < smaller(L, rows.count - v * L); ++l) {
          To* to = row[v * L + l] + j;
          S::store_n(to, kAdd ? S::add(S::load_n(to, n), x[l]) : x[l], n);
        }
      }
    }
  }
}

// scale dX, transposed, to the rows of a plane: row_of(i) is where query i has key n0.
template <typename S, bool kAdd, typename RowOf>
void store_bias(const StripRows<S>& rows, const Visible<S>& visible, const float* dx, float scale,
                int32_t dtype, const RowOf& row_of) {
  switch (dtype) {
    case TESSERA_FP32:
      return store_bias_as<S, kAdd, float>(rows, visible, dx, scale, row_of);
    case TESSERA_BF16:
      return store_bias_as<S, kAdd, Bf16>(rows, visible, dx, scale, row_of);
    default:
      return store_bias_as<S, kAdd, Fp16>(rows, visible, dx, scale, row_of);
  }
}

}  // namespace
}  // namespace tessera::cpu
