// SPDX-License-Identifier: Apache-2.0
// Scores in fp64, a pair of a query and a key at a time. An error of a score is common to a row of
// every result: large problems have so many of them that no one counts, but where a few rows see a
// few keys, one is the error of the whole result. Both passes compute such strips so.
#pragma once

#include "cpu/score_dropout.h"

namespace tessera::cpu {
namespace {

TESSERA_INLINE double dot_exactly(const float* a, const float* b, int64_t n) {
  double sum[8] = {};
  int64_t d = 0;
  for (; d + 8 <= n; d += 8) {
    for (int l = 0; l < 8; ++l) sum[l] += static_cast<double>(a[d + l]) * b[d + l];
  }
  for (; d < n; ++d) sum[d % 8] += static_cast<double>(a[d]) * b[d];
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

// A strip against the block of keys of which visible speaks.
template <typename S>
struct SmallScores {
  static constexpr int W = Tile<S>::kStrip;
  static constexpr double kNone = __builtin_inf();
  const Call& call;
  const CallSequence& sequence;
  const StripRows<S>& rows;
  const Keys<S>& keys;
  const Visible<S>& visible;

  bool sees(int l, int j) const {
    return visible.full || (visible.bits[j / 32][l] >> (j % 32) & 1);
  }
  // keep: of fill_keep_bits, in rows of `step` lanes.
  bool keeps(const uint32_t* keep, int step, int l, int j) const {
    return !call.has_dropout || (keep[j / 32 * step + l] & static_cast<uint32_t>(keep_bit(j))) != 0;
  }
  double sink_of(int l) const {
    return call.sink.data ? load_scalar<S>(at(call.sink, rows.head[l]), call.sink.dtype) : 0.0f;
  }

  // x of lane l and key j from q.k, -inf where its bias hides it; the slope of the softcap.
  double score(int l, int j, double s, float* cap_slope) const {
    double bias = 0;
    if (call.bias.data) {
      bias = load_scalar<S>(rows.bias[l] + (keys.n0 + j) * call.bias.stride[3], call.bias.dtype);
      if (bias == -kNone) return bias;
    }
    double x = call.softmax_scale * (s + (call.bias_pre_scale ? bias : 0));
    if (call.softcap > 0) {
      const double grown = __builtin_cosh(x / call.softcap);
      if (cap_slope) *cap_slope = static_cast<float>(1 / (grown * grown));
      x = call.softcap * __builtin_tanh(x / call.softcap);
    }
    if (!call.bias_pre_scale) x += bias;
    if (call.slopes.data) {
      const double slope =
          load_scalar<S>(at(call.slopes, sequence.n, rows.head[l]), call.slopes.dtype);
      const int64_t apart = rows.token[l] + sequence.band.shift - keys.n0 - j;
      x -= slope * static_cast<double>(apart < 0 ? -apart : apart);
    }
    return x;
  }
};

}  // namespace
}  // namespace tessera::cpu
