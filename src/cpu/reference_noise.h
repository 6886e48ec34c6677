// SPDX-License-Identifier: Apache-2.0
// The rounding noise of fp32 behind the reference's results: to first order, in units of one
// rounding (2^-24), every rounding independent of the others. The error rule measures kernels
// against one fp32 computation; where a result hangs on a few roundings (one visible key, one row,
// a difference that all but cancels), that one may be right by luck, and this is what it would
// otherwise be expected to be off by.
//
//   a . b               |a| |b|                  norms: the growth of its partial sums included
//   p = exp(x - lse)    p X       X = 1 + x' scale (|q| |k| + |pre-scale bias|) + |capped x|
//                                     + |post-scale bias| + |slope distance|
//   dx                  E = p (|do| (kept dropout_scale |v| + |o|) + |dlse|) + X |dx|
//   dy = x' dx          x' E + C |dy|      C = 1 + 2 scale (|q| |k| + |pre-scale bias|) / cap
//
// with x' the slope of the soft cap; without one x' = 1 and C = 0. A row of a result is a sum of
// such terms times a row of head_dim elements, of which one counts as the row's root mean square.
#pragma once

#include <cmath>

namespace tessera::cpu {

// Of one score: X and C above.
struct ScoreNoise {
  double weight, cap_slope;
};

inline double squared(double x) { return x * x; }

// Of one row: |q|, |do|, |o| and dlse.
struct RowNoise {
  double q, d_o, o, dlse;

  // E above. v: |v| as dropout left it, 0 for a sink.
  double of_dx(const ScoreNoise& score, double p, double dx, double v) const {
    return p * (d_o * (v + o) + std::abs(dlse)) + score.weight * std::abs(dx);
  }
};

}  // namespace tessera::cpu
