// SPDX-License-Identifier: Apache-2.0
// The two products of the forward pass on matrix tiles, instead of the register tiles of tile.h.
//
//               rows        columns     k           A           B
//   S^T         key         query       head dim    k_tiles     q_t
//   O^T         head dim    query       key         v_tiles     p_pairs
//
// A block of K is copied, padded with zeros to whole tiles, and one of V turned over, once for all
// strips. k of O^T goes by 32 keys at multiples of 32, of which a vector may see a few: the weights
// of the others are 0.
#pragma once

#include "cpu/forward/scratch.h"

namespace tessera::cpu {
namespace {

// K[j][d] and V^T[d][j] of the block's keys, up to a multiple of 32.
template <typename S>
__attribute__((noinline)) void pack_tiles(const Call& call, Block<S>& block) {
  constexpr int T = S::kTile;
  const auto row_of = [](const char* const* rows, int64_t j) {
    return reinterpret_cast<const Bf16*>(rows[j]);
  };
  const int keys = static_cast<int>(round_up(block.keys.count, S::kDepth));
  for (int j = 0; j < keys; ++j) {
    for (int64_t d = 0; d < call.dqk; d += 2 * T) {
      const int n = static_cast<int>(smaller<int64_t>(2 * T, call.dqk - d));
      S::store_pairs(block.k_tiles.at(j, d / 2), S::load_row_n(row_of(block.k_rows, j) + d, n));
    }
  }
  turn_pairs<S>([&](int64_t j) { return row_of(block.v_rows, j); }, keys, call.dv, block.v_tiles);
}

// S^T of the keys that the strip sees, and of the others of their tiles.
template <typename S, int N>
void multiply_key_tiles(const Block<S>& block, const float* q_t, int first, int last,
                        float* scores) {
  constexpr int kRow = N * S::kLanes;
  const int64_t begin = first / S::kDepth * S::kDepth;
  multiply_matrices<S, false>(round_up(last - begin, S::kTile), kRow, block.k_tiles.step,
                              {block.k_tiles.at(begin, 0), block.k_tiles.step},
                              {reinterpret_cast<const uint32_t*>(q_t), kRow},
                              {scores + begin * kRow, kRow});
}

// The largest of rows [first, last) of S^T, in lanes; NaN is passed over.
template <typename S, int N>
void find_maximum(const float* scores, int first, int last, float* maximum) {
  typename S::F top[N];
  for (int v = 0; v < N; ++v) top[v] = S::set1(-kInfinity);
  for (int j = first; j < last; ++j) {
    for (int v = 0; v < N; ++v) top[v] = S::max(S::load(scores + (j * N + v) * S::kLanes), top[v]);
  }
  for (int v = 0; v < N; ++v) S::store(maximum + v * S::kLanes, top[v]);
}

// Weights of 0 where the tiles have keys that a vector does not see.
template <typename S, int N>
void clear_weights(const Visible<S>& visible, int begin, int end, uint32_t* pairs) {
  for (int v = 0; v < N; ++v) {
    const bool sees = visible.begin[v] < visible.end[v];
    const int from = sees ? visible.begin[v] / 2 : end / 2,
              to = sees ? (visible.end[v] + 1) / 2 : end / 2;
    const auto clear = [&](int j) {
      S::store_pairs(pairs + (j * N + v) * S::kLanes, S::zero_pairs());
    };
    for (int j = begin / 2; j < from; ++j) clear(j);
    for (int j = to; j < end / 2; ++j) clear(j);
  }
}

// O^T = alpha O^T + V^T P^T over the strip's keys.
template <typename S, int N>
void accumulate_tiles(const Block<S>& block, const Visible<S>& visible, int64_t dv, uint32_t* pairs,
                      const float* alpha, float* o_t) {
  constexpr int L = S::kLanes, kRow = N * L;
  const int first = visible.first / S::kDepth * S::kDepth;
  const int last = static_cast<int>(round_up(visible.last, S::kDepth));
  const int64_t rows = round_up(dv, S::kTile);
  clear_weights<S, N>(visible, first, last, pairs);
  // Times 1 changes no bit.
  bool keeps = true;
  for (int v = 0; v < N; ++v) keeps &= S::all_of(S::equal(S::load(alpha + v * L), S::set1(1.0f)));
  for (int64_t at = 0; at < rows * kRow && !keeps; at += kRow) {
    for (int v = 0; v < N; ++v) {
      float* o = o_t + at + v * L;
      S::store(o, S::mul(S::load(o), S::load(alpha + v * L)));
    }
  }
  multiply_matrices<S, true>(rows, kRow, (last - first) / 2,
                             {block.v_tiles.at(0, first / 2), block.v_tiles.step},
                             {pairs + first / 2 * kRow, kRow}, {o_t, kRow});
}

}  // namespace
}  // namespace tessera::cpu
