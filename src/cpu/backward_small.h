// SPDX-License-Identifier: Apache-2.0
// P and dX of a call of few rows that see few keys. An error of lse, of o or of a score is common
// to a row of every gradient: large problems have so many of them that no one counts, but here one
// is the error of the whole result, and dP - delta may have cancelled all but that. So these are
// weighed in fp64, and ask of lse and o no more than they can give: where the p of a row add up to
// 1 but for what an lse may be off by, their sum is made 1 and the mean of dP taken from dP itself.
#pragma once

#include "cpu/backward_scratch.h"
#include "cpu/score_dropout.h"

namespace tessera::cpu {
namespace {

// What an lse may be off by: 4 times this, and this times itself.
constexpr double kLseError = 0x1p-20;

TESSERA_INLINE double dot_exactly(const float* a, const float* b, int64_t n) {
  double sum[8] = {};
  int64_t d = 0;
  for (; d + 8 <= n; d += 8) {
    for (int l = 0; l < 8; ++l) sum[l] += static_cast<double>(a[d + l]) * b[d + l];
  }
  for (; d < n; ++d) sum[d % 8] += static_cast<double>(a[d]) * b[d];
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

// Of a sequence of one block of keys, which holds all that a row sees.
template <typename S>
bool is_small(const BackwardArgs& args, const CallSequence& sequence, const StripRows<S>& rows,
              const Keys<S>& keys, const Visible<S>& visible) {
  if (args.small_strip == 0 || sequence.band.len_k > Tile<S>::kBlock) return false;
  if (visible.full) return rows.count * keys.count <= args.small_strip;
  int pairs = 0;
  for (int word = 0; word * 32 < keys.count; ++word) {
    const uint32_t present = bit_range(0, keys.count - word * 32);
    for (int l = 0; l < rows.count; ++l) {
      pairs += __builtin_popcount(visible.bits[word][l] & present);
    }
  }
  return pairs <= args.small_strip;
}

// The strip against the block.
template <typename S>
struct SmallStrip {
  static constexpr int W = Tile<S>::kStrip, B = Tile<S>::kBlock;
  const Call& call;
  const CallSequence& sequence;
  const StripRows<S>& rows;
  const Keys<S>& keys;
  const Visible<S>& visible;
  const uint32_t (*keep)[W];  // bits of dropout, if there is any
  Scratch<S, false>& x;
  int64_t index;  // of the strip
  int place;      // of the strip in the tile

  // Dropped P and dX into the tile, dX into x.dp, the slope of the softcap into x.cap.
  __attribute__((noinline)) void weigh() const {
    for (int j = visible.first; j < pad_to(visible.last, 2); ++j) {
      float* cap = call.softcap > 0 ? x.cap + j * W : x.dp + j * W;
      for (int l = 0; l < W; ++l) *p_of(l, j) = *ds_of(l, j) = x.dp[j * W + l] = cap[l] = 0.0f;
    }
    for (int l = 0; l < rows.count; ++l) weigh_row(l);
  }

 private:
  static constexpr double kNone = __builtin_inf();

  void weigh_row(int l) const {
    const int64_t row = index * W + l;
    const double lse = x.lse[row];
    if (lse == kNone) return;  // p is 0
    const float *q = x.q_rows + row * x.q_rows_step, *d_o = x.do_rows + row * x.do_rows_step;
    double p[B], dp[B], peak = -kNone;
    for (int j = visible.first; j < visible.last; ++j) {
      p[j] = -kNone, dp[j] = 0;
      if (!sees(l, j)) continue;
      p[j] = score(l, j, dot_exactly(q, x.k + j * x.k_step, call.dqk));
      if (p[j] > peak) peak = p[j];
      if (keeps(l, j)) {
        dp[j] = dot_exactly(d_o, x.v + j * x.v_step, call.dv) * call.dropout_scale;
      }
    }
    if (call.has_sink && sink_of(rows.head[l]) > peak) peak = sink_of(rows.head[l]);
    if (peak == -kNone) peak = 0;
    double sum = call.has_sink ? __builtin_exp(sink_of(rows.head[l]) - peak) : 0;
    for (int j = visible.first; j < visible.last; ++j) sum += p[j] = __builtin_exp(p[j] - peak);
    const double given = __builtin_exp(lse - peak);
    const bool whole = __builtin_fabs(sum - given) <= given * kLseError * (4 + __builtin_fabs(lse));
    const double divisor = whole ? sum : given;
    double mean = 0;
    for (int j = visible.first; j < visible.last; ++j) p[j] /= divisor, mean += p[j] * dp[j];
    if (!whole) mean = x.mean[row];
    for (int j = visible.first; j < visible.last; ++j) {
      if (!sees(l, j)) continue;
      if (keeps(l, j)) *p_of(l, j) = static_cast<float>(p[j]);
      *ds_of(l, j) = x.dp[j * W + l] = static_cast<float>(p[j] * (dp[j] - mean + x.dlse[row]));
    }
  }

  // x of lane l and key j from q.k, -inf where its bias hides it; the slope of the softcap.
  double score(int l, int j, double s) const {
    double bias = 0;
    if (call.bias.data) {
      bias = load_scalar<S>(rows.bias[l] + (keys.n0 + j) * call.bias.stride[3], call.bias.dtype);
      if (bias == -kNone) return bias;
    }
    double y = call.softmax_scale * (s + (call.bias_pre_scale ? bias : 0));
    if (call.softcap > 0) {
      const double grown = __builtin_cosh(y / call.softcap);
      x.cap[j * W + l] = static_cast<float>(1 / (grown * grown));
      y = call.softcap * __builtin_tanh(y / call.softcap);
    }
    if (!call.bias_pre_scale) y += bias;
    if (call.slopes.data) {
      const double slope =
          load_scalar<S>(at(call.slopes, sequence.n, rows.head[l]), call.slopes.dtype);
      const int64_t apart = rows.token[l] + sequence.band.shift - keys.n0 - j;
      y -= slope * static_cast<double>(apart < 0 ? -apart : apart);
    }
    return y;
  }

  float* p_of(int l, int j) const { return x.p + j * x.p_step + place * W + l; }
  float* ds_of(int l, int j) const { return x.ds + j * x.p_step + place * W + l; }
  double sink_of(int64_t head) const {
    return call.sink.data ? load_scalar<S>(at(call.sink, head), call.sink.dtype) : 0.0f;
  }
  bool sees(int l, int j) const {
    return visible.full || (visible.bits[j / 32][l] >> (j % 32) & 1);
  }
  bool keeps(int l, int j) const {
    return !call.has_dropout || (keep[j / 32][l] & static_cast<uint32_t>(keep_bit(j))) != 0;
  }
};

}  // namespace
}  // namespace tessera::cpu
