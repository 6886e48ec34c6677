// SPDX-License-Identifier: Apache-2.0
// P and dX of a call of few pairs, from scores in fp64: see score_small.h. dP - delta may have
// cancelled all but the errors of lse and o, so these are asked for no more than they can give:
// where the p of a row add up to 1 but for what an lse may be off by, their sum is made 1 and the
// mean of dP taken from dP itself.
#pragma once

#include "cpu/backward_scratch.h"
#include "cpu/score_small.h"

namespace tessera::cpu {
namespace {

// What an lse may be off by: 4 times this, and this times itself.
constexpr double kLseError = 0x1p-20;

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
  const SmallScores<S> scores;
  const uint32_t (*keep)[W];  // bits of dropout, if there is any
  Scratch<S, false>& x;
  int64_t index;  // of the strip
  int place;      // of the strip in the tile

  // Dropped P and dX into the tile, dX into x.dp, the slope of the softcap into x.cap.
  __attribute__((noinline)) void weigh() const {
    const Call& call = scores.call;
    const Visible<S>& visible = scores.visible;
    for (int j = visible.first; j < pad_to(visible.last, 2); ++j) {
      float* cap = call.softcap > 0 ? x.cap + j * W : x.dp + j * W;
      for (int l = 0; l < W; ++l) *p_of(l, j) = *ds_of(l, j) = x.dp[j * W + l] = cap[l] = 0.0f;
    }
    for (int l = 0; l < scores.rows.count; ++l) weigh_row(l);
  }

 private:
  static constexpr double kNone = SmallScores<S>::kNone;

  void weigh_row(int l) const {
    const Call& call = scores.call;
    const Visible<S>& visible = scores.visible;
    const int64_t row = index * W + l;
    const double lse = x.lse[row];
    if (lse == kNone) return;  // p is 0
    const float *q = x.q_rows + row * x.q_rows_step, *d_o = x.do_rows + row * x.do_rows_step;
    double p[B], dp[B], peak = -kNone;
    for (int j = visible.first; j < visible.last; ++j) {
      p[j] = -kNone, dp[j] = 0;
      if (!scores.sees(l, j)) continue;
      p[j] = scores.score(l, j, dot_exactly(q, x.k + j * x.k_step, call.dqk),
                          call.softcap > 0 ? x.cap + j * W + l : nullptr);
      if (p[j] > peak) peak = p[j];
      if (keeps(l, j)) {
        dp[j] = dot_exactly(d_o, x.v + j * x.v_step, call.dv) * call.dropout_scale;
      }
    }
    if (call.has_sink && scores.sink_of(l) > peak) peak = scores.sink_of(l);
    if (peak == -kNone) peak = 0;
    double sum = call.has_sink ? __builtin_exp(scores.sink_of(l) - peak) : 0;
    for (int j = visible.first; j < visible.last; ++j) sum += p[j] = __builtin_exp(p[j] - peak);
    const double given = __builtin_exp(lse - peak);
    const bool whole = __builtin_fabs(sum - given) <= given * kLseError * (4 + __builtin_fabs(lse));
    const double divisor = whole ? sum : given;
    double mean = 0;
    for (int j = visible.first; j < visible.last; ++j) p[j] /= divisor, mean += p[j] * dp[j];
    if (!whole) mean = x.mean[row];
    for (int j = visible.first; j < visible.last; ++j) {
      if (!scores.sees(l, j)) continue;
      if (keeps(l, j)) *p_of(l, j) = static_cast<float>(p[j]);
      *ds_of(l, j) = x.dp[j * W + l] = static_cast<float>(p[j] * (dp[j] - mean + x.dlse[row]));
    }
  }

  float* p_of(int l, int j) const { return x.p + j * x.p_step + place * W + l; }
  float* ds_of(int l, int j) const { return x.ds + j * x.p_step + place * W + l; }
  bool keeps(int l, int j) const { return scores.keeps(keep[0], W, l, j); }
};

}  // namespace
}  // namespace tessera::cpu
