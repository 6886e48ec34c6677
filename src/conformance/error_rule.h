// SPDX-License-Identifier: Apache-2.0
// The error rule: the one function that decides whether a result is right ("Precision" of
// docs/semantics.md). Every test of every backend and front end ends here.
#pragma once

#include <span>
#include <string>

#include "tessera.h"

namespace tessera {

struct Comparison {
  double max_err = 0, max_limit = 0;
  double mean_err = 0, mean_limit = 0;  // mean_limit is +inf where the rule has none
  std::string failure;                  // "" = right
  bool ok() const { return failure.empty(); }
};

// o or a gradient, dense and in one order. dtype is the output's. terms: the sums of |terms| of a
// gradient that is a sum over rows, heads or a broadcast axis; otherwise none.
//   max|e|  <= F max|low - ref| + c u max|ref|   + 4 2^-24 max terms + 2 2^-24 max floor
//   mean|e| <= M mean|low - ref| + a u mean|ref| + 4 2^-24 max terms + 2 2^-24 mean floor
// with the mean from 4096 elements on, ref not 0; without a limit where low is infinite or NaN and
// ref is not. floor: of each element what it moves by when the numbers behind it move by one of
// their units, of reference_floor; a caller may leave it out, and ask again with it where the
// limits fail.
struct TensorRuleInput {
  std::span<const double> out, ref, low;
  int32_t dtype;
  bool softcap = false;
  std::span<const double> terms = {};
  std::span<const double> floor = {};
  bool widened = false;  // fp32 beside 16-bit or fp8 inputs
  // dq and dk of products in fp8: what share of max terms dP may be off by, d 2^-15, as Hopper keeps 13
  // fraction bits of its products and of their sum. All of it joins the maximum's limit, an eighth
  // the mean's.
  double fp8_share = 0;
};
Comparison compare_tensor(const TensorRuleInput& input);

// lse or max_logit. logits: of each element, the largest
// scale * (sum |q||k| + |pre-scale bias|) + |post-scale bias| + |slope * distance| behind it.
//   |e| <= 1e-6 |ref| + 4 2^-24 logits + (1e-3 for 16-bit inputs, 1e-5 for fp32); -inf exactly
// fp8_share, d 2^-15 beside fp8 q, takes the place of 4 2^-24.
Comparison compare_statistic(std::span<const double> out, std::span<const double> ref,
                             std::span<const double> logits, int32_t input_dtype,
                             double fp8_share = 0);

// Attention with fp8 k and v beside 16-bit q: RMSE < 0.11 range of the reference (one element has
// none), and at most 1.1 times the RMSE of the emulated path (low).
Comparison compare_fp8(std::span<const double> out, std::span<const double> ref,
                       std::span<const double> low);

// precision="fp8": o, a gradient or a statistic against exact arithmetic on the caller's values.
//   RMSE   <= G RMSE of low + a u rms(ref) + 4 2^-24 max terms + 2 2^-24 rms(floor) + constant
//   max|e| <= 2 G max|low - ref| + c u max|ref| + 4 2^-24 max terms + 2 2^-24 max floor + constant
// with G = 1.1 from 4096 elements on, 1.5 below and 5 under 64, where few samples of rounding stand
// for all; a, c, u, the floor and fp8_share as above; constant: 1e-3 of lse and max_logit.
Comparison compare_rounded(const TensorRuleInput& input, double constant = 0);

}  // namespace tessera
