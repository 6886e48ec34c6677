// SPDX-License-Identifier: Apache-2.0
// The register tiles of the forward pass. Both read one matrix by broadcasts from rows that lie
// where the caller put them (a table of row pointers: pages, strides and tails cost nothing) and
// the other as vectors of queries. Each keeps 16 sums in registers; head dims and keys are loop
// bounds at run time, so one instance serves all shapes. They are not inlined: the sums must not
// spill.
//
// Strips of S::kNarrow decode and wait for memory. Each of their iterations reads one line's worth
// of K or V, and asks for one line of the next block, by way of `ahead`.
#pragma once

#include "cpu/simd/types.h"
#include "cpu/tiles.h"

namespace tessera::cpu {
namespace {

// What is multiplied: elements as fp32, or pairs of bf16 with two products a lane. Word is what a
// lane of the query side takes in memory, kDepth the elements in it.
template <typename S>
struct Fp32Product {
  using Element = float;
  using Word = float;
  static constexpr int kDepth = 1;
  TESSERA_INLINE auto load(const Word* p) { return S::load(p); }
  TESSERA_INLINE auto broadcast(const Element* p) { return S::broadcast(p); }
  TESSERA_INLINE auto add(typename S::F sum, typename S::F a, typename S::F b) {
    return S::fma(a, b, sum);
  }
};
template <typename S>
struct Bf16Product {
  using Element = Bf16;
  using Word = uint32_t;
  static constexpr int kDepth = 2;
  TESSERA_INLINE auto load(const Word* p) { return S::load_pairs(p); }
  TESSERA_INLINE auto broadcast(const Element* p) { return S::broadcast_pair(p); }
  TESSERA_INLINE auto broadcast_last(const Element* p) { return S::broadcast_half(p); }
  template <typename Pairs>
  TESSERA_INLINE auto add(typename S::F sum, Pairs a, Pairs b) {
    return S::dot(sum, a, b);
  }
};

// Asks for the lines of `count` rows of memory, for as many as its reader reads of another block at
// the same moment: by turns in kStreams places that are far from each other, and in each of them in
// order. That is what the prefetcher of L2 follows, and page walks overlap: a third faster than all
// lines in order.
class Ahead {
 public:
  Ahead(const char* const* rows, int count, int64_t bytes_of_row)
      : first_(rows), row_(rows), end_(rows + count), bytes_(bytes_of_row) {
    constexpr int kStreams = 16;
    step_ = count < kStreams ? 1 : count / kStreams;
  }
  __attribute__((always_inline)) void ask() {
    prefetch(*row_ + at_);
    row_ += step_;
    if (row_ < end_) return;
    at_ += 64;
    if (at_ >= bytes_) at_ = 0, first_ += first_ + 1 < end_;
    row_ = first_;
  }

 private:
  const char *const *first_, *const *row_, *const *end_;
  int64_t bytes_, at_ = 0;
  int step_;
};

// S^T[j][lane] = sum_d K[j][d] Q^T[d][lane] for j in [first, last), rounded up to whole tiles: the
// tables have valid rows up to there. maximum, if kMax: of each lane over the rows, which then must
// be whole tiles; NaN is passed over. N vectors of a strip of kOf.
template <typename S, typename Product, int N, int kOf, bool kMax>
__attribute__((noinline)) void multiply_keys(const char* const* k_rows, Ahead ahead,
                                             const typename Product::Word* q_t, int64_t dqk,
                                             int first, int last, float* scores, float* maximum) {
  using Element = typename Product::Element;
  using F = typename S::F;
  constexpr int R = S::kRows, L = S::kLanes, kDepth = Product::kDepth;
  // Half the lanes are multiplied at twice the rate, which needs twice the independent sums.
  constexpr int kSums = S::kNarrow ? 2 : 1;
  F top[N];
  for (int v = 0; v < N; ++v) top[v] = S::set1(-__builtin_inff());
  for (int j = first; j < last; j += R) {
    const Element* k[R];
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) k[r] = reinterpret_cast<const Element*>(k_rows[j + r]);
    F sum[kSums][R][N];
    for (int u = 0; u < kSums; ++u) {
      TESSERA_UNROLL
      for (int r = 0; r < R; ++r) {
        for (int v = 0; v < N; ++v) sum[u][r][v] = S::zero();
      }
    }
    const typename Product::Word* q = q_t;
    int64_t d = 0;
    const auto step = [&](int u, auto broadcast) {
      decltype(Product::load(q)) x[N];
      for (int v = 0; v < N; ++v) x[v] = Product::load(q + v * L);
      TESSERA_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto y = broadcast(k[r] + d);
        for (int v = 0; v < N; ++v) sum[u][r][v] = Product::add(sum[u][r][v], y, x[v]);
      }
      d += kDepth, q += kOf * L;
    };
    const auto whole = [](const Element* p) { return Product::broadcast(p); };
    if constexpr (S::kNarrow) {
      while (d + 2 * kDepth <= dqk) {
        ahead.ask();
        step(0, whole);
        step(1, whole);
      }
    }
    while (d + kDepth <= dqk) step(0, whole);
    if constexpr (kDepth == 2) {
      if (d < dqk) step(0, [](const Element* p) { return Product::broadcast_last(p); });
    }
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < N; ++v) {
        const F s = kSums == 2 ? S::add(sum[0][r][v], sum[kSums - 1][r][v]) : sum[0][r][v];
        S::store(scores + ((j + r) * kOf + v) * L, s);
        if (kMax) top[v] = S::max(s, top[v]);
      }
    }
  }
  if (kMax) {
    for (int v = 0; v < N; ++v) S::store(maximum + v * L, top[v]);
  }
}

// Rows of V for accumulate_values: as they lie, or as pairs of keys, Word (V[j][d], V[j + 1][d]).
struct ValueRows {
  const char* const* rows;
  const float* operator()(int j) const { return reinterpret_cast<const float*>(rows[j]); }
};
struct ValuePairs {
  const uint32_t* pairs;
  int64_t stride;
  const Bf16* operator()(int j) const { return reinterpret_cast<const Bf16*>(pairs + j * stride); }
};

// O^T[d][lane] = alpha[lane] O^T[d][lane] + sum_j V[j][d] P^T[j][lane] for R head dims from d on.
// [first, last) counts keys, or pairs of them. N vectors of a strip of kOf.
template <typename S, typename Product, int R, int N, int kOf, typename Values>
__attribute__((noinline)) void accumulate_values(Values values, Ahead& ahead, int64_t d,
                                                 const typename Product::Word* p, int first,
                                                 int last, const float* alpha, float* o_t) {
  using F = typename S::F;
  constexpr int L = S::kLanes, kDepth = Product::kDepth;
  F sum[R][N];
  o_t += d * kOf * L;
  TESSERA_UNROLL
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) {
      sum[r][v] = S::mul(S::load(o_t + (r * kOf + v) * L), S::load(alpha + v * L));
    }
  }
  Ahead asking = ahead;  // in registers
  for (int j = first; j < last; ++j) {
    const auto* value = values(j) + d * kDepth;
    if constexpr (S::kNarrow) asking.ask();
    decltype(Product::load(p)) x[N];
    for (int v = 0; v < N; ++v) x[v] = Product::load(p + (j * kOf + v) * L);
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto y = Product::broadcast(value + r * kDepth);
      for (int v = 0; v < N; ++v) sum[r][v] = Product::add(sum[r][v], y, x[v]);
    }
  }
  TESSERA_UNROLL
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) S::store(o_t + (r * kOf + v) * L, sum[r][v]);
  }
  if constexpr (S::kNarrow) ahead = asking;
}

}  // namespace
}  // namespace tessera::cpu
