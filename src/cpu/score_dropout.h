// SPDX-License-Identifier: Apache-2.0
// The dropout mask of core/philox.h for a strip of queries and a block of keys, as bits. One Philox
// call a vector of patch rows decides four columns for a row in each half of its 16-row patches, so
// a strip of consecutive rows that begins on a patch needs half the calls of any other.
#pragma once

#include "cpu/score.h"

namespace tessera::cpu {
namespace {

// Four vectors of random words: those of philox4x32_7 for the counters (c0, c1, c2, c3) a lane.
template <typename S>
TESSERA_INLINE void philox(const Dropout& dropout, typename S::I head, typename S::I patch_row,
                           uint32_t patch_column, typename S::I (&word)[4]) {
  const auto set = [](uint32_t x) { return S::set1i(static_cast<int32_t>(x)); };
  const auto m0 = set(0xD2511F53u), m1 = set(0xCD9E8D57u);
  auto c0 = set(dropout.counter0), c1 = head, c2 = patch_row, c3 = set(patch_column);
  uint32_t key0 = dropout.key0, key1 = dropout.key1;
  for (int round = 0; round < 7; ++round) {
    typename S::I high0, low0, high1, low1;
    S::mul_wide(c0, m0, high0, low0);
    S::mul_wide(c2, m1, high1, low1);
    c0 = S::xor3(high1, c1, set(key0));
    c2 = S::xor3(high0, c3, set(key1));
    c1 = low1, c3 = low0;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

// keep: bit j % 32 of keep[j / 32][lane] for the keys of whole 16-key patches over [first, last).
template <typename S, int N>
__attribute__((noinline)) void fill_keep_bits(const Call& call, const CallSequence& sequence,
                                              const StripRows<S>& rows, const Keys<S>& keys,
                                              int first, int last,
                                              uint32_t (*keep)[Tile<S>::kStrip]) {
  constexpr int L = S::kLanes;
  using I = typename S::I;
  const Dropout& dropout = call.dropout;
  const I threshold = S::set1i(static_cast<int32_t>(dropout.threshold)), none = S::set1i(0);
  const I low_half = S::set1i(0xFFFF);
  const bool shared = L >= 8 && N == 2 && rows.one_head && rows.consecutive &&
                      rows.token[0] % 16 == 0;

  I head[N], patch_row[N], lower[N];
  for (int v = 0; v < N; ++v) {
    alignas(64) int32_t h[L], r[L], first_half[L];
    for (int l = 0; l < L; ++l) {
      const int lane = v * L + l;
      const int64_t i = rows.token[lane];
      h[l] = static_cast<int32_t>(static_cast<uint32_t>(sequence.n * call.hq + rows.head[lane]));
      r[l] = static_cast<int32_t>(i / 16 * 8 + i % 8);
      first_half[l] = i % 16 < 8;
    }
    head[v] = S::load(h), patch_row[v] = S::load(r), lower[v] = S::load(first_half);
  }
  if (shared) {
    const auto base = static_cast<int32_t>(rows.token[0] / 2);
    patch_row[0] = S::add(S::set1i(base), S::iota());
  }

  for (int word = first / 32; word * 32 < last; ++word) {
    I bits[N];
    for (int v = 0; v < N; ++v) bits[v] = none;
    const int begin = larger(first - word * 32, 0) / 16 * 4;
    const int end = (smaller(last - word * 32, 32) + 15) / 16 * 4;
    for (int c = begin; c < end; ++c) {
      const auto column = static_cast<uint32_t>((keys.n0 + word * 32) / 4 + c);
      const int j = c / 4 * 16 + c % 4 * 2;  // and j + 1, j + 8, j + 9
      I near[N], far[N];  // the words of columns j, j + 1 and j + 8, j + 9
      I random[4];
      if (shared) {
        philox<S>(dropout, head[0], patch_row[0], column, random);
        S::interleave_halves(random[0], random[2], near[0], near[N - 1]);
        S::interleave_halves(random[1], random[3], far[0], far[N - 1]);
      } else {
        for (int v = 0; v < N; ++v) {
          philox<S>(dropout, head[v], patch_row[v], column, random);
          const auto in_lower = S::equal(lower[v], S::set1i(1));
          near[v] = S::select(in_lower, random[0], random[2]);
          far[v] = S::select(in_lower, random[1], random[3]);
        }
      }
      const auto bit = [](int k) { return S::set1i(static_cast<int32_t>(uint32_t{1} << k)); };
      for (int v = 0; v < N; ++v) {
        const auto decide = [&](I field, int k) {
          bits[v] = S::bit_or(bits[v], S::select(S::less(field, threshold), none, bit(k)));
        };
        decide(S::bit_and(near[v], low_half), j);
        decide(S::template shift_right<16>(near[v]), j + 1);
        decide(S::bit_and(far[v], low_half), j + 8);
        decide(S::template shift_right<16>(far[v]), j + 9);
      }
    }
    for (int v = 0; v < N; ++v) {
      S::store(reinterpret_cast<int32_t*>(keep[word] + v * L), bits[v]);
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
