// SPDX-License-Identifier: Apache-2.0
// C = A B and C += A B on matrix tiles (amx.h), and the copies that make their operands.
#pragma once

#include "cpu/simd/types.h"

namespace tessera::cpu {
namespace {

// A matrix in memory: words (fp32, or two bf16), rows `step` words apart.
template <typename Word>
struct Matrix {
  Word* data;
  int64_t step;
  __attribute__((always_inline)) Word* at(int64_t row, int64_t column) const {
    return data + row * step + column;
  }
  __attribute__((always_inline)) int64_t bytes() const { return step * 4; }
};

// One block of C, 16 kRows x 16 kColumns; depth in words, a multiple of 16. kAdd: to what C holds.
template <typename S, int kRows, int kColumns, bool kAdd>
__attribute__((noinline)) void multiply_block(int64_t depth, Matrix<const uint32_t> a,
                                              Matrix<const uint32_t> b, Matrix<float> c) {
  constexpr int T = S::kTile;
  if constexpr (kAdd) {
    S::template load_tile<0>(c.at(0, 0), c.bytes());
    if (kColumns == 2) S::template load_tile<1>(c.at(0, T), c.bytes());
    if (kRows == 2) S::template load_tile<2>(c.at(T, 0), c.bytes());
    if (kRows == 2 && kColumns == 2) S::template load_tile<3>(c.at(T, T), c.bytes());
  } else {
    S::template zero_tile<0>();
    if (kColumns == 2) S::template zero_tile<1>();
    if (kRows == 2) S::template zero_tile<2>();
    if (kRows == 2 && kColumns == 2) S::template zero_tile<3>();
  }
  for (int64_t k = 0; k < depth; k += T) {
    S::template load_tile<4>(a.at(0, k), a.bytes());
    S::template load_tile<6>(b.at(k, 0), b.bytes());
    S::template multiply_tiles<0, 4, 6>();
    if constexpr (kColumns == 2) {
      S::template load_tile<7>(b.at(k, T), b.bytes());
      S::template multiply_tiles<1, 4, 7>();
    }
    if constexpr (kRows == 2) {
      S::template load_tile<5>(a.at(T, k), a.bytes());
      S::template multiply_tiles<2, 5, 6>();
      if constexpr (kColumns == 2) S::template multiply_tiles<3, 5, 7>();
    }
  }
  S::template store_tile<0>(c.at(0, 0), c.bytes());
  if (kColumns == 2) S::template store_tile<1>(c.at(0, T), c.bytes());
  if (kRows == 2) S::template store_tile<2>(c.at(T, 0), c.bytes());
  if (kRows == 2 && kColumns == 2) S::template store_tile<3>(c.at(T, T), c.bytes());
}

// rows x columns of C, both multiples of 16, in blocks of up to 32 x 32.
template <typename S, bool kAdd>
TESSERA_INLINE void multiply_matrices(int64_t rows, int64_t columns, int64_t depth,
                                      Matrix<const uint32_t> a, Matrix<const uint32_t> b,
                                      Matrix<float> c) {
  constexpr int T = S::kTile;
  const auto row_of_blocks = [&](auto* both, auto* last, int64_t i) {
    int64_t j = 0;
    for (; j + 2 * T <= columns; j += 2 * T) {
      both(depth, {a.at(i, 0), a.step}, {b.at(0, j), b.step}, {c.at(i, j), c.step});
    }
    if (j < columns) last(depth, {a.at(i, 0), a.step}, {b.at(0, j), b.step}, {c.at(i, j), c.step});
  };
  int64_t i = 0;
  for (; i + 2 * T <= rows; i += 2 * T) {
    row_of_blocks(multiply_block<S, 2, 2, kAdd>, multiply_block<S, 2, 1, kAdd>, i);
  }
  if (i < rows) row_of_blocks(multiply_block<S, 1, 2, kAdd>, multiply_block<S, 1, 1, kAdd>, i);
}

// out[d][j / 2] = (row(j)[d], row(j + 1)[d]) for even j: rows of bf16, turned over, as the left
// operand of a product that sums over them. count is a multiple of 32. out has dim rows, rounded up
// to 32, of which those from dim on become 0.
template <typename S, typename Row>
TESSERA_INLINE void turn_pairs(Row row, int64_t count, int64_t dim, Matrix<uint32_t> out) {
  constexpr int T = S::kTile;
  for (int64_t j = 0; j < count; j += S::kDepth) {
    for (int64_t d = 0; d < dim; d += 2 * T) {
      const int n = static_cast<int>(dim - d < 2 * T ? dim - d : 2 * T);
      typename S::Pairs low[T], high[T];  // the first four of each 8 head dims, and the others
      for (int r = 0; r < T; ++r) {
        S::interleave_fours(S::load_row_n(row(j + 2 * r) + d, n),
                            S::load_row_n(row(j + 2 * r + 1) + d, n), low[r], high[r]);
      }
      const auto turn = [&](const typename S::Pairs* pairs, int from) {
        typename S::F x[T];
        TESSERA_UNROLL
        for (int r = 0; r < T; ++r) x[r] = S::as_float(pairs[r]);
        S::transpose(x);
        TESSERA_UNROLL
        for (int c = 0; c < T; ++c) {
          S::store_pairs(out.at(d + c / 4 * 8 + c % 4 + from, j / 2), S::as_int(x[c]));
        }
      };
      turn(low, 0);
      turn(high, 4);
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
