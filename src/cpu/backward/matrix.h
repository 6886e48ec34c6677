// SPDX-License-Identifier: Apache-2.0
// The products of the backward pass on matrix tiles, instead of the register tiles of tile.h: 16 keys
// at multiples of 16 are rows of S^T, dP^T, dV and dK, and dQ^T sums 32 keys at multiples of 32.
#pragma once

#include "cpu/backward/scratch.h"
#include "cpu/simd/products.h"

namespace tessera::cpu {
namespace {

// S^T and dP^T of the strip's keys, and of the others of their tiles.
template <typename S>
void multiply_key_tiles(const Scratch<S, true>& x, const Visible<S>& visible, const uint32_t* q_t,
                        const uint32_t* do_t) {
  constexpr int L = S::kLanes, W = Tile<S>::kStrip;
  const int64_t j = visible.first / L * L, keys = pad_to(visible.last - j, L);
  multiply_matrices<S, false>(keys, W, x.qk_depth, {x.k + j * x.k_step, x.k_step}, {q_t, W},
                              {x.s + j * W, W});
  multiply_matrices<S, false>(keys, W, x.v_depth, {x.v + j * x.v_step, x.v_step}, {do_t, W},
                              {x.dp + j * W, W});
}

// dQ^T += K^T dS^T of strip t of the tile; if not begun, the first time.
template <typename S>
void add_dq_tiles(const Scratch<S, true>& x, const Visible<S>& visible, int t, int64_t dqk,
                  bool begun, float* dq) {
  constexpr int L = S::kLanes, W = Tile<S>::kStrip;
  const int first = visible.first / S::kDepth * L;  // in pairs of keys, like the next
  const auto last = static_cast<int>(pad_to(visible.last, S::kDepth) / 2);
  const auto clear_pairs = [&](int j) {
    uint32_t* row = x.ds_pairs + j * x.ds_pairs_step + t * W;
    for (int v = 0; v < kVectors; ++v) S::store_pairs(row + v * L, S::zero_pairs());
  };
  for (int j = first; j < visible.first / 2; ++j) clear_pairs(j);
  for (int j = (visible.last + 1) / 2; j < last; ++j) clear_pairs(j);
  auto* multiply = begun ? multiply_matrices<S, true> : multiply_matrices<S, false>;
  multiply(pad_to(dqk, L), W, last - first, {x.k_t + first, x.k_t_step},
           {x.ds_pairs + first * x.ds_pairs_step + t * W, x.ds_pairs_step}, {dq, W});
}

// Vectors of the strips between the first and the last that see any of 16 keys from j on; span: of
// each register tile of keys.
template <typename S>
TESSERA_INLINE Span span_of_tile(const Span* span, int j) {
  constexpr int R = S::kRows;
  static_assert(2 * R == S::kTile);
  const Span &a = span[j / R], &b = span[j / R + 1];
  Span both{smaller(a.begin, b.begin), larger(a.end, b.end)};
  if (a.begin >= a.end) both = b;
  if (b.begin >= b.end) both = a;
  return {both.begin / kVectors * kVectors, static_cast<int>(pad_to(both.end, kVectors))};
}

// sum[key][d] += sum_q weight[key][q] row[q][d] for keys [first, last), as many tiles at a time as
// have the same to do; without what sum held where nothing has begun.
template <typename S>
void add_outer_tiles(const Scratch<S, true>& x, const uint32_t* weight, Matrix<const uint32_t> row,
                     const Span* span, const bool* begun, int first, int last, int64_t dim,
                     Matrix<float> sum) {
  constexpr int L = S::kLanes, R = S::kRows, kWords = L / 2;  // of a vector of queries
  for (int j = first, next; j < last; j = next) {
    const Span sees = span_of_tile<S>(span, j);
    next = j + L;
    if (sees.begin >= sees.end) continue;
    const auto is_same = [&](int i) {
      const Span other = span_of_tile<S>(span, i);
      return begun[i / R] == begun[j / R] && other.begin == sees.begin && other.end == sees.end;
    };
    while (next < last && is_same(next)) next += L;
    auto* multiply = begun[j / R] ? multiply_matrices<S, true> : multiply_matrices<S, false>;
    multiply(next - j, pad_to(dim, L), (sees.end - sees.begin) * kWords,
             {weight + j * x.p_step + sees.begin * kWords, x.p_step},
             {row.at(sees.begin * kWords, 0), row.step}, {sum.at(j, 0), sum.step});
  }
}

// What the sums of dV and dK hold after add_outer_tiles(), of each register tile of keys.
template <typename S>
void mark_begun(const Span* span, int first, int last, bool* begun) {
  constexpr int L = S::kLanes, R = S::kRows;
  for (int j = first; j < last; j += L) {
    const Span sees = span_of_tile<S>(span, j);
    if (sees.begin < sees.end) begun[j / R] = begun[j / R + 1] = true;
  }
}

}  // namespace
}  // namespace tessera::cpu
