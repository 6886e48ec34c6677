// SPDX-License-Identifier: Apache-2.0
// Decode of up to eight rows over keys in bf16, or in fp8 that decode/widen.h makes bf16, a block at
// a time. Strips of 8 lanes would do (forward/tile.h), but they load a broadcast for every product,
// and V must be brought into pairs of keys first: a third of the time of a core that memory could
// keep busier. Here R is 4 or 8 rows, and the lanes hold
//
//   S = Q K^T   16 / R words of a row of Q each: as many elements of a key are one broadcast (of 64
//               bits for 8 rows), and the lanes of a row are added at the end;
//   O += P V    32 head dims, read as they lie: two rows of V are interleaved in registers, which
//               leaves the head dims in the order of column_of(), and P is broadcast.
//
// Each line of K and V is read once (of K by several loads in a row), and one of the next block is
// asked for at the same moment; of an fp8 cache a line at every second one (`whole` is false), lest
// all be asked for at once. Softmax and everything between are those of forward/kernel.h.
#pragma once

#include "cpu/decode/dot.h"
#include "cpu/decode/widen.h"

namespace tessera::cpu {
namespace {

constexpr int kGroupRows = 8;
constexpr int kGroupColumns = 32;  // head dims of a step of add_group

// Strips of S that are not decoded by dot products are decoded so, in bf16.
template <typename S>
constexpr bool kDecodesGroups = S::kNarrow&& S::kHasBf16Dot;
template <typename S>
constexpr int64_t kDecodeRows = kDecodesGroups<S> ? kGroupRows : kDotRows;

// The place of head dim d of a row of O: the first four of each 8 are in one vector of sums, the
// others in the next.
constexpr int64_t column_of(int64_t d) {
  return d / kGroupColumns * kGroupColumns + d / 4 % 2 * 16 + d / 8 % 4 * 4 + d % 4;
}

// Elements of a row of Q, and of a key, that a vector holds beside those of the other rows.
template <int R>
constexpr int kGroupDepth = 32 / R;

// Q as [ceil(dqk / E)][R][E] for E = kGroupDepth<R>, with zeros past dqk.
template <typename S, int R>
void pack_group(const Call& call, const CallSequence& sequence, const StripRows<S>& rows, Bf16* q) {
  constexpr int E = kGroupDepth<R>;
  for (int l = 0; l < R; ++l) {
    const char* row = call.q.data + sequence.batch_q * call.q.batch +
                      (sequence.first_q + rows.token[l]) * call.q.row + rows.head[l] * call.q.head;
    for (int64_t d = 0; d < call.dqk; d += E) {
      Bf16 some[E] = {};
      const size_t n = static_cast<size_t>(smaller<int64_t>(call.dqk - d, E));
      memcpy(some, row + d * 2, n == E ? sizeof some : n * 2);
      memcpy(q + d * R + l * E, some, sizeof some);
    }
  }
}

// E elements of a key, in all rows' places.
template <typename W, int E>
TESSERA_INLINE auto broadcast_key(const Bf16* key) {
  if constexpr (E == 4) return W::broadcast_four(key);
  if constexpr (E == 8) return W::broadcast_eight(key);
}

// Scores of 16 / R keys from their sums, as rows of 8 lanes; 4 rows fill them twice. Returns their
// maximum by lanes.
template <typename W, int R>
TESSERA_INLINE typename W::F store_scores(const typename W::F* sum, typename W::F scale,
                                          float* to) {
  if constexpr (R == 8) {
    const auto s = W::mul(W::add_neighbours(sum[0], sum[1]), scale);
    W::store(to, s);
    return s;
  } else {
    typename W::F low, high;
    const auto s =
        W::add_neighbours(W::add_neighbours(sum[0], sum[1]), W::add_neighbours(sum[2], sum[3]));
    W::repeat_fours(W::mul(s, scale), low, high);
    W::store(to, low), W::store(to + 2 * kGroupRows, high);
    return W::max(low, high);
  }
}

// S^T[j][row], times scale, of keys [first, last), rounded up to whole tiles of 8; maximum as in
// multiply_keys.
template <typename S, int R, bool kMax>
__attribute__((noinline)) void multiply_group(const char* const* k_rows, Ahead ahead, bool whole,
                                              const Bf16* q, float scale, int64_t dqk, int first,
                                              int last, float* scores, float* maximum) {
  using W = typename S::Wide;
  constexpr int kKeys = 8, E = kGroupDepth<R>;
  const auto factor = W::set1(scale);
  auto top = W::set1(-kInfinity);
  for (int j = first; j < last; j += kKeys) {
    const Bf16* k[kKeys];
    typename W::F sum[kKeys];
    TESSERA_UNROLL
    for (int r = 0; r < kKeys; ++r) {
      k[r] = reinterpret_cast<const Bf16*>(k_rows[j + r]), sum[r] = W::zero();
    }
    const auto* x = reinterpret_cast<const uint32_t*>(q);
    int64_t d = 0;
    const auto step = [&](int at) {
      const auto words = W::load_pairs(x + at / 2 * R);
      TESSERA_UNROLL
      for (int r = 0; r < kKeys; ++r) {
        sum[r] = W::dot(sum[r], broadcast_key<W, E>(k[r] + d + at), words);
      }
    };
    for (; d + 32 <= dqk; d += 32, x += 16 * R) {  // a line of each key
      TESSERA_UNROLL
      for (int at = 0; at < 32; at += E) {
        if (E == 8 || whole || at % 8 == 0) ahead.ask();
        if (E == 8 && whole) ahead.ask();
        step(at);
      }
    }
    for (; d + E <= dqk; d += E, x += E / 2 * R) step(0);
    if (d < dqk) {
      const int n = static_cast<int>(dqk - d);
      const auto words = W::load_pairs(x);
      for (int r = 0; r < kKeys; ++r) {
        Bf16 some[E] = {};
        memcpy(some, k[r] + d, static_cast<size_t>(n) * 2);
        sum[r] = W::dot(sum[r], broadcast_key<W, E>(some), words);
      }
    }
    TESSERA_UNROLL
    for (int r = 0; r < kKeys; r += 16 / R) {
      const auto s = store_scores<W, R>(sum + r, factor, scores + (j + r) * kGroupRows);
      if (kMax) top = W::max(s, top);
    }
  }
  if (kMax) {
    alignas(64) float halves[2 * kGroupRows];
    W::store(halves, top);
    S::store(maximum, S::max(S::load(halves), S::load(halves + kGroupRows)));
  }
}

// o[row][column_of(d)] = alpha[row] o[row][...] + sum of P V over the pairs of keys [first, last).
template <typename S, int R>
__attribute__((noinline)) void add_group(const char* const* v_rows, Ahead ahead, bool whole,
                                         const uint32_t* p, const float* alpha, int64_t dv,
                                         int first, int last, float* o) {
  using W = typename S::Wide;
  const int64_t step = decode_step(dv);
  for (int64_t d = 0; d < dv; d += kGroupColumns) {
    typename W::F sum[R][2];
    TESSERA_UNROLL
    for (int i = 0; i < R; ++i) {
      const auto shrink = W::broadcast(alpha + i);
      TESSERA_UNROLL
      for (int v = 0; v < 2; ++v) sum[i][v] = W::mul(shrink, W::load(o + i * step + d + v * 16));
    }
    const auto add = [&](auto load) {
      for (int j = first; j < last; ++j) {
        const auto even = load(reinterpret_cast<const Bf16*>(v_rows[2 * j]) + d);
        const auto odd = load(reinterpret_cast<const Bf16*>(v_rows[2 * j + 1]) + d);
        ahead.ask();
        if (whole) ahead.ask();
        typename W::Pairs low, high;
        W::interleave_fours(even, odd, low, high);
        TESSERA_UNROLL
        for (int i = 0; i < R; ++i) {
          const auto weight = W::broadcast_word(p + j * kGroupRows + i);
          sum[i][0] = W::dot(sum[i][0], low, weight);
          sum[i][1] = W::dot(sum[i][1], high, weight);
        }
      }
    };
    const int n = static_cast<int>(smaller<int64_t>(dv - d, kGroupColumns));
    if (n == kGroupColumns) {
      add([](const Bf16* row) { return W::load_row(row); });
    } else {
      add([n](const Bf16* row) { return W::load_row_n(row, n); });
    }
    TESSERA_UNROLL
    for (int i = 0; i < R; ++i) {
      TESSERA_UNROLL
      for (int v = 0; v < 2; ++v) W::store(o + i * step + d + v * 16, sum[i][v]);
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
