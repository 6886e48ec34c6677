// SPDX-License-Identifier: Apache-2.0
// The register tile of the backward pass, and the copies that it reads.
//
// All five products are C[r][lane] += sum_k A[r][k] B[k][lane], with A read by broadcasts, B and C
// as vectors, and kRows x 1 or 2 vectors of C in registers:
//
//               r         lane      k         A             B
//   S^T         key       query     head dim  K             Q^T
//   dP^T        key       query     head dim  V             dO^T
//   dV          key       head dim  query     P^T           dO
//   dK          key       head dim  query     dS^T          Q
//   dQ^T        head dim  query     key       K             dS^T
//
// A Word is an fp32 element, or two bf16 neighbours in k, which one instruction multiplies and
// adds. Operands are copies in the worker's scratch: converted, padded with zeros to whole tiles
// (so that tails cost nothing and nothing outside the problem is read), in rows that are an odd
// number of cache lines apart (at a power of two, 64 rows fall on 16 of the 64 sets of L1).
#pragma once

#include "cpu/score/score.h"
#include "cpu/simd/products.h"

namespace tessera::cpu {
namespace {

// Vectors [begin, end) of a tile's strips.
struct Span {
  int begin, end;
};

TESSERA_INLINE int64_t pad_to(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Words of a row of at least n words: whole cache lines of 16, an odd number of them.
TESSERA_INLINE int64_t odd_lines(int64_t n) { return ((n + 15) / 16 | 1) * 16; }

template <typename S>
TESSERA_INLINE typename S::F load_words(const float* p) {
  return S::load(p);
}
template <typename S>
TESSERA_INLINE auto load_words(const uint32_t* p) {
  return S::load_pairs(p);
}
template <typename S>
TESSERA_INLINE typename S::F multiply_add(const float* a, typename S::F b, typename S::F sum) {
  return S::fma(S::broadcast(a), b, sum);
}
template <typename S, typename Pairs>
TESSERA_INLINE typename S::F multiply_add(const uint32_t* a, Pairs b, typename S::F sum) {
  return S::dot(sum, S::broadcast_pair(reinterpret_cast<const Bf16*>(a)), b);
}

// The same without a broadcast: a lane's own words.
template <typename S>
TESSERA_INLINE typename S::F multiply_lanes(const float* a, const float* b, typename S::F sum) {
  return S::fma(S::load(a), S::load(b), sum);
}
template <typename S>
TESSERA_INLINE typename S::F multiply_lanes(const uint32_t* a, const uint32_t* b,
                                            typename S::F sum) {
  return S::dot(sum, S::load_pairs(a), S::load_pairs(b));
}

// One tile of C. kAcross: rows of A are neighbours in memory and k steps by a_step (dQ^T, whose A
// is K read along its rows); otherwise k runs through neighbours and rows are a_step apart. The sum
// over k begins at 0 and is added to C as a whole: fewer roundings at the size of C.
template <typename S, int kVec, bool kAcross, bool kAdd, typename Word>
__attribute__((noinline)) void multiply_tile(int64_t depth, const Word* a, int64_t a_step,
                                             const Word* b, int64_t b_step, float* c,
                                             int64_t c_step) {
  constexpr int R = S::kRows, L = S::kLanes;
  typename S::F sum[R][kVec];
  const Word* row[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    row[r] = kAcross ? a + r : a + r * a_step;
    for (int v = 0; v < kVec; ++v) sum[r][v] = S::zero();
  }
  for (int64_t k = 0; k < depth; ++k, b += b_step) {
    decltype(load_words<S>(b)) x[kVec];
    for (int v = 0; v < kVec; ++v) x[v] = load_words<S>(b + v * L);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Word* y = kAcross ? a + r : row[r] + k;
      for (int v = 0; v < kVec; ++v) sum[r][v] = multiply_add<S>(y, x[v], sum[r][v]);
    }
    if (kAcross) a += a_step;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVec; ++v) {
      float* to = c + r * c_step + v * L;
      S::store(to, kAdd ? S::add(S::load(to), sum[r][v]) : sum[r][v]);
    }
  }
}

// S^T or dP^T of one register tile, for kVec vectors of a strip: the sum over head dims, a piece at
// a time for the same reason.
template <typename S, int kVec, typename Word>
TESSERA_INLINE void multiply_rows(int64_t depth, int64_t piece, const Word* a, int64_t a_step,
                                  const Word* b, float* c) {
  constexpr int W = kVectors * S::kLanes;
  multiply_tile<S, kVec, false, false>(smaller(depth, piece), a, a_step, b, W, c, W);
  for (int64_t k = piece; k < depth; k += piece) {
    multiply_tile<S, kVec, false, true>(smaller(depth - k, piece), a + k, a_step, b + k * W, W, c,
                                        W);
  }
}

// ---- copies ----

// Rows of a table to ask for before they are read: they lie a head's or a page's distance apart,
// which hardware does not guess. 2.5 KiB on their way cover the latency of memory.
TESSERA_INLINE int rows_ahead(int64_t bytes) {
  return static_cast<int>(larger<int64_t>(2560 / larger<int64_t>(bytes, 64), 6));
}
TESSERA_INLINE void prefetch_row(const char* const* rows, int r, int count, int64_t bytes) {
  if (r >= count) return;
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows[r] + at);
}

template <typename S>
TESSERA_INLINE void clear(float* p, int64_t n) {  // n a multiple of kLanes
  for (int64_t i = 0; i < n; i += S::kLanes) S::store(p + i, S::zero());
}

// out[r][d] = rows[r][d] as fp32 for d < dim, 0 up to whole vectors.
template <typename S, typename T>
__attribute__((noinline)) void widen_rows(const char* const* rows, int count, int64_t dim,
                                          float* out, int64_t step) {
  constexpr int L = S::kLanes;
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(T));
  const int ahead = rows_ahead(bytes);
  for (int r = 0; r < ahead; ++r) prefetch_row(rows, r, count, bytes);
  for (int r = 0; r < count; ++r) {
    prefetch_row(rows, r + ahead, count, bytes);
    const T* row = reinterpret_cast<const T*>(rows[r]);
    float* to = out + r * step;
    int64_t d = 0;
    for (; d + L <= dim; d += L) S::store(to + d, S::load(row + d));
    if (d < dim) S::store(to + d, S::load_n(row + d, static_cast<int>(dim - d)));
  }
}

// out[k][lane] = words[lane][k] for k < depth, a strip of rows.
template <typename S, typename Word>
__attribute__((noinline)) void transpose_rows(const Word* words, int64_t step, int64_t depth,
                                              Word* columns) {
  constexpr int L = S::kLanes;
  const float* in = reinterpret_cast<const float*>(words);  // moved, not computed with
  float* out = reinterpret_cast<float*>(columns);
  for (int v = 0; v < kVectors; ++v) {
    for (int64_t k = 0; k < depth; k += L) {
      typename S::F x[L];
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) x[l] = S::load(in + (v * L + l) * step + k);
      S::transpose(x);
      const int n = static_cast<int>(smaller<int64_t>(L, depth - k));
      float* to = out + k * kVectors * L + v * L;
      for (int i = 0; i < n; ++i) S::store(to + i * kVectors * L, x[i]);
    }
  }
}

// out[r][k] = (rows[r][2k], rows[r][2k + 1]): a row as it lies, 0 from dim up to whole vectors.
template <typename S>
__attribute__((noinline)) void copy_pairs(const char* const* rows, int count, int64_t dim,
                                          uint32_t* out, int64_t step) {
  constexpr int L = S::kLanes;
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(Bf16));
  const int ahead = rows_ahead(bytes);
  for (int r = 0; r < ahead; ++r) prefetch_row(rows, r, count, bytes);
  for (int r = 0; r < count; ++r) {
    prefetch_row(rows, r + ahead, count, bytes);
    const Bf16* row = reinterpret_cast<const Bf16*>(rows[r]);
    for (int64_t d = 0; d < dim; d += 2 * L) {
      const int n = static_cast<int>(smaller<int64_t>(2 * L, dim - d));
      S::store_pairs(out + r * step + d / 2, S::load_row_n(row + d, n));
    }
  }
}

// out[r / 2][d] = (in[r][d], in[r + 1][d]) for even r: rows of bf16, read as whole vectors.
template <typename S>
__attribute__((noinline)) void interleave_pairs(const uint32_t* in, int64_t in_step, int count,
                                                int64_t dim, uint32_t* out, int64_t step) {
  for (int r = 0; r < count; r += 2, in += 2 * in_step, out += step) {
    const Bf16* a = reinterpret_cast<const Bf16*>(in);
    const Bf16* b = reinterpret_cast<const Bf16*>(in + in_step);
    for (int64_t d = 0; d < dim; d += S::kLanes) {
      S::store_pairs(out + d, S::interleave_rows(a + d, b + d));
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
