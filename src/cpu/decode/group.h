// SPDX-License-Identifier: Apache-2.0
// Decode of three to eight rows over keys in bf16. Strips of 8 lanes would do (forward/tile.h), but
// they load a broadcast for every product, and V must be brought into pairs of keys first: a third
// of the time of a core that memory could keep busier. Here the lanes hold
//
//   S = Q K^T   two words of a row of Q each: four elements of a key are one broadcast of 64 bits,
//               and lanes 2i and 2i + 1 are added at the end;
//   O += P V    32 head dims, read as they lie: two rows of V are interleaved in registers, which
//               leaves the head dims in the order of column_of(), and P is broadcast.
//
// Each line of K and V is read once (of K by eight loads in a row), and one of the next block is
// asked for at the same moment. Softmax and everything between are those of forward/kernel.h.
#pragma once

#include "cpu/decode/dot.h"

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

// Q as [ceil(dqk / 4)][kGroupRows][4], with zeros past dqk.
template <typename S>
void pack_group(const Call& call, const CallSequence& sequence, const StripRows<S>& rows, Bf16* q) {
  for (int l = 0; l < kGroupRows; ++l) {
    const char* row = call.q.data + sequence.batch_q * call.q.batch +
                      (sequence.first_q + rows.token[l]) * call.q.row + rows.head[l] * call.q.head;
    for (int64_t d = 0; d < call.dqk; d += 4) {
      Bf16 four[4] = {};
      const size_t n = static_cast<size_t>(smaller<int64_t>(call.dqk - d, 4));
      memcpy(four, row + d * 2, n == 4 ? 8 : n * 2);
      memcpy(q + d * kGroupRows + l * 4, four, sizeof four);
    }
  }
}

// S^T[j][row] of keys [first, last), rounded up to whole tiles of 8; maximum as in multiply_keys.
template <typename S, bool kMax>
__attribute__((noinline)) void multiply_group(const char* const* k_rows, Ahead ahead, const Bf16* q,
                                              int64_t dqk, int first, int last, float* scores,
                                              float* maximum) {
  using W = typename S::Wide;
  constexpr int R = 8;
  auto top = W::set1(-kInfinity);
  for (int j = first; j < last; j += R) {
    const Bf16* k[R];
    typename W::F sum[R];
    TESSERA_UNROLL
    for (int r = 0; r < R; ++r) {
      k[r] = reinterpret_cast<const Bf16*>(k_rows[j + r]), sum[r] = W::zero();
    }
    const auto* x = reinterpret_cast<const uint32_t*>(q);
    int64_t d = 0;
    const auto step = [&](int at) {
      const auto words = W::load_pairs(x + at / 4 * 2 * kGroupRows);
      TESSERA_UNROLL
      for (int r = 0; r < R; ++r) sum[r] = W::dot(sum[r], W::broadcast_four(k[r] + d + at), words);
    };
    for (; d + 32 <= dqk; d += 32, x += 16 * kGroupRows) {  // a line of each key
      TESSERA_UNROLL
      for (int at = 0; at < 32; at += 4) {
        ahead.ask();
        step(at);
      }
    }
    for (; d + 4 <= dqk; d += 4, x += 2 * kGroupRows) step(0);
    if (d < dqk) {
      const int n = static_cast<int>(dqk - d);
      const auto words = W::load_pairs(x);
      for (int r = 0; r < R; ++r) {
        Bf16 four[4] = {};
        memcpy(four, k[r] + d, static_cast<size_t>(n) * 2);
        sum[r] = W::dot(sum[r], W::broadcast_four(four), words);
      }
    }
    TESSERA_UNROLL
    for (int r = 0; r < R; r += 2) {
      const auto s = W::add_neighbours(sum[r], sum[r + 1]);
      W::store(scores + (j + r) * kGroupRows, s);
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
template <typename S>
__attribute__((noinline)) void add_group(const char* const* v_rows, Ahead ahead, const uint32_t* p,
                                         const float* alpha, int64_t dv, int first, int last,
                                         float* o) {
  using W = typename S::Wide;
  const int64_t step = decode_step(dv);
  for (int64_t d = 0; d < dv; d += kGroupColumns) {
    typename W::F sum[kGroupRows][2];
    TESSERA_UNROLL
    for (int i = 0; i < kGroupRows; ++i) {
      const auto shrink = W::broadcast(alpha + i);
      TESSERA_UNROLL
      for (int v = 0; v < 2; ++v) sum[i][v] = W::mul(shrink, W::load(o + i * step + d + v * 16));
    }
    const auto add = [&](auto load) {
      for (int j = first; j < last; ++j) {
        const auto even = load(reinterpret_cast<const Bf16*>(v_rows[2 * j]) + d);
        const auto odd = load(reinterpret_cast<const Bf16*>(v_rows[2 * j + 1]) + d);
        ahead.ask();
        ahead.ask();
        typename W::Pairs low, high;
        W::interleave_fours(even, odd, low, high);
        TESSERA_UNROLL
        for (int i = 0; i < kGroupRows; ++i) {
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
    for (int i = 0; i < kGroupRows; ++i) {
      TESSERA_UNROLL
      for (int v = 0; v < 2; ++v) W::store(o + i * step + d + v * 16, sum[i][v]);
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
