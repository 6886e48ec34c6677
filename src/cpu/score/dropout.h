// SPDX-License-Identifier: Apache-2.0
// The dropout mask of core/mask/philox.h for a strip of queries and a block of keys, as bits. One
// Philox call a vector of patch rows decides four columns for a row in each half of its 16-row
// patches, so a strip of consecutive rows that begins on a patch needs half the calls of any other.
#pragma once

#include "cpu/score/score.h"

namespace tessera::cpu {
namespace {

// The bit of key j of a block in its word of 32 keys: even keys are in the lower half, odd ones in
// the upper, as the random words have them.
TESSERA_INLINE int32_t keep_bit(int j) {
  return static_cast<int32_t>(uint32_t{1} << ((j % 32) / 2 + (j % 2) * 16));
}

// Philox-4x32-7 for a lane's head and patch row, column by column. What a column shares with the
// next one, two of the seven rounds but for an exclusive or, is computed once.
template <typename S>
class Philox {
 public:
  using I = typename S::I;

  void set_rows(const Dropout& dropout, I head, I patch_row) {
    uint32_t key0 = dropout.key0, key1 = dropout.key1;
    for (int round = 0; round < 7; ++round) {
      key0_[round] = key0, key1_[round] = key1;
      key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    // Round 0: c0 and c3 are the same in every lane, c1 = head, c2 = patch_row.
    const uint64_t product = uint64_t{kM0} * dropout.counter0;
    high0_ = static_cast<uint32_t>(product >> 32), low0_ = static_cast<uint32_t>(product);
    I high, low;
    S::mul_wide(patch_row, set(kM1), high, low);
    const I c0 = S::xor3(high, head, set(key0_[0]));
    // Round 1: the half of it that the column does not enter.
    S::mul_wide(c0, set(kM0), high, low3_);
    high2_ = S::xor3(high, set(low0_), set(key1_[1]));
    low1_ = S::xor3(low, set(key0_[1]), S::set1i(0));
  }

  inline __attribute__((always_inline)) void draw(uint32_t patch_column, I (&word)[4]) const {
    const uint32_t c2_uniform = high0_ ^ patch_column ^ key1_[0];  // after round 0
    const uint64_t product = uint64_t{kM1} * c2_uniform;
    I c0 = S::xor3(low1_, set(static_cast<uint32_t>(product >> 32)), S::set1i(0));
    I c1 = set(static_cast<uint32_t>(product));
    I c2 = high2_, c3 = low3_;
    TESSERA_UNROLL
    for (int round = 2; round < 7; ++round) {
      I high0, low0, high1, low1;
      S::mul_wide(c0, set(kM0), high0, low0);
      S::mul_wide(c2, set(kM1), high1, low1);
      c0 = S::xor3(high1, c1, set(key0_[round]));
      c2 = S::xor3(high0, c3, set(key1_[round]));
      c1 = low1, c3 = low0;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
  }

 private:
  static constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u;
  TESSERA_INLINE I set(uint32_t x) { return S::set1i(static_cast<int32_t>(x)); }

  uint32_t key0_[7], key1_[7];
  uint32_t high0_, low0_;
  I low1_, high2_, low3_;
};

// keep: keep_bit(j) of keep[j / 32][lane] for the keys of whole 16-key patches over [first, last),
// where key 0 has a position n0 that is a multiple of 16.
template <typename S, int N>
__attribute__((noinline)) void draw_keep_bits(const Call& call, const CallSequence& sequence,
                                              const StripRows<S>& rows, int64_t n0, int first,
                                              int last, uint32_t (*keep)[Tile<S>::kStrip]) {
  constexpr int L = S::kLanes;
  using I = typename S::I;
  const auto position = [&](int l) { return sequence.q_start + rows.token[l]; };
  const bool shared =
      L >= 8 && N == 2 && rows.one_head && rows.consecutive && position(0) % 16 == 0;
  const I threshold = S::set1i(static_cast<int32_t>(call.dropout.threshold * 0x10001u));

  Philox<S> philox[N];
  I in_lower[N];  // 1: row i % 16 < 8
  for (int v = 0; v < N; ++v) {
    alignas(64) int32_t head[L], patch_row[L], lower[L];
    for (int l = 0; l < L; ++l) {
      const int64_t i = shared ? position(0) + l % 8 + l / 8 * 16 : position(v * L + l);
      const uint32_t index = call.dropout_heads.index(sequence.n, rows.head[v * L + l]);
      head[l] = static_cast<int32_t>(index);
      patch_row[l] = static_cast<int32_t>(i / 16 * 8 + i % 8);
      lower[l] = i % 16 < 8;
    }
    philox[v].set_rows(call.dropout, S::load(head), S::load(patch_row));
    in_lower[v] = S::load(lower);
  }

  for (int word = first / 32; word * 32 < last; ++word) {
    I bits[N];
    for (int v = 0; v < N; ++v) bits[v] = S::set1i(0);
    const int begin = larger(first - word * 32, 0) / 16 * 4;
    const int end = (smaller(last - word * 32, 32) + 15) / 16 * 4;
    for (int c = begin; c < end; ++c) {
      const auto column = static_cast<uint32_t>((n0 + word * 32) / 4 + c);
      I near[N], far[N];  // the words of columns j, j + 1 and of j + 8, j + 9
      I random[4];
      if (shared) {
        philox[0].draw(column, random);
        S::interleave_halves(random[0], random[2], near[0], near[N - 1]);
        S::interleave_halves(random[1], random[3], far[0], far[N - 1]);
      } else {
        for (int v = 0; v < N; ++v) {
          philox[v].draw(column, random);
          const auto lower = S::equal(in_lower[v], S::set1i(1));
          near[v] = S::select(lower, random[0], random[2]);
          far[v] = S::select(lower, random[1], random[3]);
        }
      }
      const int j = c / 4 * 16 + c % 4 * 2;
      const I near_bits = S::set1i(keep_bit(j) | keep_bit(j + 1));
      const I far_bits = S::set1i(keep_bit(j + 8) | keep_bit(j + 9));
      for (int v = 0; v < N; ++v) {
        bits[v] = S::add_where_not_less(bits[v], near[v], threshold, near_bits);
        bits[v] = S::add_where_not_less(bits[v], far[v], threshold, far_bits);
      }
    }
    for (int v = 0; v < N; ++v) {
      S::store(reinterpret_cast<int32_t*>(keep[word] + v * L), bits[v]);
    }
  }
}

// The words of keys that begin `by` < 16 keys after those of this word and the next one. What one
// half has, of even or odd keys, moves by half as many bits, and odd distances change the halves.
TESSERA_INLINE uint32_t keep_from(uint32_t word, uint32_t next, int by) {
  const auto half = [](uint32_t low, uint32_t high, int bits) {
    return ((low & 0xFFFFu) | high << 16) >> bits & 0xFFFFu;
  };
  const uint32_t even =
      by % 2 == 0 ? half(word, next, by / 2) : half(word >> 16, next >> 16, by / 2);
  const uint32_t odd =
      by % 2 == 0 ? half(word >> 16, next >> 16, by / 2) : half(word, next, by / 2 + 1);
  return even | odd << 16;
}

// keep: keep_bit(j) of keep[j / 32][lane] for keys over [first, last) of the block.
template <typename S, int N>
void fill_keep_bits(const Call& call, const CallSequence& sequence, const StripRows<S>& rows,
                    const Keys<S>& keys, int first, int last, uint32_t (*keep)[Tile<S>::kStrip]) {
  constexpr int kWords = Tile<S>::kBlock / 32;
  const int64_t n0 = sequence.k_start + keys.n0;
  const int into_patch = static_cast<int>(n0 % 16);
  if (into_patch == 0) return draw_keep_bits<S, N>(call, sequence, rows, n0, first, last, keep);
  alignas(64) uint32_t drawn[kWords + 1][Tile<S>::kStrip];
  draw_keep_bits<S, N>(call, sequence, rows, n0 - into_patch, first, last + into_patch, drawn);
  for (int word = first / 32; word * 32 < last; ++word) {
    for (int l = 0; l < N * S::kLanes; ++l) {
      keep[word][l] = keep_from(drawn[word][l], drawn[word + 1][l], into_patch);
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
