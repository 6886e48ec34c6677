// SPDX-License-Identifier: Apache-2.0
// precision="fp8": which E4M3 values stand for 16-bit q, k, v and do (docs/fp8.md). The reference
// and the CPU round by these functions, and another quantiser gives their bits: whatever decides a
// rounding is exact or has an order.
//
//   q'_i = H D q_i     k'_j = H D (k_j - kbar) / n     so that  <q'_i, k'_j> = <q_i, k_j - kbar>
//   x_ij = scale (<q^_i, k^_j> + <q_i, kbar>)          where ^ rounds
//
// kbar is the mean of a sequence's keys in a head (TESSERA_SMOOTH_MEAN), H a Hadamard matrix of n
// columns and D signs (TESSERA_SMOOTH_HADAMARD). A row of q or do has a scale of its own, and so
// have kScaledKeys keys of k and of v, counted from the sequence's start.
//
// Rows are fp32, one behind the other, and rounded in place, to stored * scale.
#pragma once

#include <vector>

#include "core/problem/problem.h"

namespace tessera {

inline constexpr int64_t kScaledKeys = 128;  // that share a scale

// H D: columns [i n, (i + 1) n) are turned together, where n is the largest power of two that
// divides their number. Signs are drawn from a fixed key, the same in every head. Turns nothing
// without the flag.
class Rotation {
 public:
  explicit Rotation(const Problem& problem);
  void turn_query(float* row) const { turn(row, 1); }
  void turn_key(float* row) const { turn(row, 1 / static_cast<float>(width_)); }

 private:
  void turn(float* row, float factor) const;

  int64_t width_ = 1;         // n
  std::vector<float> signs_;  // [dqk]; empty: no rotation
};

// Adds a block of keys to a sum of the columns, key by key; what is not finite is left out. kbar is
// the sum of its blocks' sums, block by block from 0, over the number of keys.
void add_keys(const float* rows, int64_t keys, int64_t columns, float* sum);

// A block of keys of k, or of v: then without a mean and a rotation. mean may be null.
void round_keys(float* rows, int64_t keys, int64_t columns, const float* mean,
                const Rotation* rotation);

// A row of q, or of do: then without a mean and a rotation. Returns <row, mean> of the row as it
// was, 0 without a mean.
float round_query(float* row, int64_t columns, const float* mean, const Rotation* rotation);

}  // namespace tessera
