// SPDX-License-Identifier: Apache-2.0
#include "conformance/error_rule.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "core/problem/dtype.h"

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kTermAllowance = 4.0 / 16777216.0;   // 4 * 2^-24: fp32 accumulation
constexpr double kFloorAllowance = 2.0 / 16777216.0;  // 2 * 2^-24: what fp32 cannot avoid

std::string text(const char* format, auto... values) {
  char buffer[320];
  std::snprintf(buffer, sizeof buffer, format, values...);
  return buffer;
}

// The first element that is NaN or infinite where the reference is not, or differs from an infinite
// reference; -1 if there is none.
int64_t first_not_finite(std::span<const double> out, std::span<const double> ref) {
  for (size_t i = 0; i < ref.size(); ++i) {
    const bool same = out[i] == ref[i] || (std::isnan(out[i]) && std::isnan(ref[i]));
    if (!same && !(std::isfinite(out[i]) && std::isfinite(ref[i]))) return static_cast<int64_t>(i);
  }
  return -1;
}

struct Distance {
  double max = 0, mean = 0, rms = 0;
  int64_t at = 0;  // of the maximum
};
Distance distance(std::span<const double> a, std::span<const double> ref) {
  Distance d;
  for (size_t i = 0; i < ref.size(); ++i) {
    if (!std::isfinite(ref[i])) continue;
    const double e = std::abs(a[i] - ref[i]);
    if (e > d.max || std::isnan(e)) d.max = e, d.at = static_cast<int64_t>(i);
    d.mean += e;
    d.rms += e * e;
  }
  if (!ref.empty()) {
    d.mean /= static_cast<double>(ref.size());
    d.rms = std::sqrt(d.rms / static_cast<double>(ref.size()));
  }
  return d;
}

}  // namespace

Comparison compare_tensor(const TensorRuleInput& in) {
  Comparison result;
  const bool wide = in.dtype == TESSERA_FP32 || in.dtype == TESSERA_FP64;
  // One sample of the 16-bit roundings of P and dS stands for all of them; an fp32 output has no
  // rounding of its own that would cover for a lucky one.
  const double of_softcap = in.softcap ? 1.5 : 1, c = wide ? 32 : 2;
  const double f = in.ref.size() < 64 ? 10 : (in.widened ? 4 : 2) * of_softcap;
  const double m = wide ? 2 : 1.2, a = wide ? 8 : 1;
  const double u = half_ulp(in.dtype);
  double max_terms = 0;
  for (double terms : in.terms) max_terms = std::max(max_terms, terms);
  double max_floor = 0, mean_floor = 0;
  for (double floor : in.floor) {
    max_floor = std::max(max_floor, floor);
    mean_floor += floor / static_cast<double>(in.floor.size());
  }

  double max_ref = 0, mean_ref = 0;
  for (double x : in.ref) {
    if (!std::isfinite(x)) continue;
    max_ref = std::max(max_ref, std::abs(x));
    mean_ref += std::abs(x) / static_cast<double>(in.ref.size());
  }
  if (first_not_finite(in.low, in.ref) >= 0) {  // no limit: the dtype cannot hold the result
    result.max_limit = result.mean_limit = kInfinity;
    return result;
  }
  const Distance low = distance(in.low, in.ref), out = distance(in.out, in.ref);
  result.max_err = out.max;
  const double of_terms = std::max(kTermAllowance, in.fp8_share) * max_terms;
  const double of_terms_mean = std::max(kTermAllowance, in.fp8_share / 8) * max_terms;
  result.max_limit = f * low.max + c * u * max_ref + of_terms + kFloorAllowance * max_floor;
  result.mean_err = out.mean;
  result.mean_limit =
      in.ref.size() >= 4096 && max_ref > 0
          ? m * low.mean + a * u * mean_ref + of_terms_mean + kFloorAllowance * mean_floor
          : kInfinity;
  if (const int64_t at = first_not_finite(in.out, in.ref); at >= 0) {
    result.max_err = kInfinity;
    result.failure =
        text("element %lld is %g, must be %g", static_cast<long long>(at), in.out[at], in.ref[at]);
  } else if (!(result.max_err <= result.max_limit)) {
    result.failure =
        text("max error %.3g > %.3g at element %lld: is %.9g, must be %.9g", result.max_err,
             result.max_limit, static_cast<long long>(out.at), in.out[out.at], in.ref[out.at]);
  } else if (!(result.mean_err <= result.mean_limit)) {
    result.failure = text("mean error %.3g > %.3g", result.mean_err, result.mean_limit);
  }
  return result;
}

Comparison compare_statistic(std::span<const double> out, std::span<const double> ref,
                             std::span<const double> logits, int32_t input_dtype,
                             double fp8_share) {
  Comparison result;
  result.mean_limit = kInfinity;
  const double constant = input_dtype == TESSERA_FP32 || input_dtype == TESSERA_FP64 ? 1e-5 : 1e-3;
  if (const int64_t at = first_not_finite(out, ref); at >= 0) {
    result.max_err = kInfinity;
    result.failure =
        text("element %lld is %g, must be %g", static_cast<long long>(at), out[at], ref[at]);
    return result;
  }
  double worst = -kInfinity;
  for (size_t i = 0; i < ref.size(); ++i) {
    if (!std::isfinite(ref[i])) continue;
    const double e = std::abs(out[i] - ref[i]);
    const double share = std::max(kTermAllowance, fp8_share);
    const double limit = 1e-6 * std::abs(ref[i]) + share * logits[i] + constant;
    result.mean_err += e / static_cast<double>(ref.size());
    if (e / limit <= worst) continue;
    worst = e / limit;
    result.max_err = e;
    result.max_limit = limit;
    if (e > limit) {
      result.failure = text("error %.3g > %.3g at element %lld: is %.9g, must be %.9g", e, limit,
                            static_cast<long long>(i), out[i], ref[i]);
    }
  }
  return result;
}

Comparison compare_fp8(std::span<const double> out, std::span<const double> ref,
                       std::span<const double> low) {
  Comparison result;
  if (const int64_t at = first_not_finite(out, ref); at >= 0) {
    result.max_err = kInfinity;
    result.failure =
        text("element %lld is %g, must be %g", static_cast<long long>(at), out[at], ref[at]);
    return result;
  }
  const auto [least, most] = std::minmax_element(ref.begin(), ref.end());
  const double range = ref.empty() ? 0 : *most - *least;
  const double rmse = distance(out, ref).rms;
  // max: against the range; mean: against the emulated path.
  result.max_err = result.mean_err = rmse;
  result.max_limit = 0.11 * range;
  result.mean_limit = 1.1 * distance(low, ref).rms;
  if (rmse > 0 && ref.size() > 1 && !(rmse < result.max_limit)) {
    result.failure = text("RMSE %.3g, must be below %.3g", rmse, result.max_limit);
  } else if (!(rmse <= result.mean_limit)) {
    result.failure =
        text("RMSE %.3g, the emulated path times 1.1 has %.3g", rmse, result.mean_limit);
  }
  return result;
}

Comparison compare_rounded(const TensorRuleInput& in, double constant) {
  Comparison result;
  if (first_not_finite(in.low, in.ref) >= 0) {  // no limit: fp32 cannot hold the scores
    result.max_limit = result.mean_limit = kInfinity;
    return result;
  }
  if (const int64_t at = first_not_finite(in.out, in.ref); at >= 0) {
    result.max_err = kInfinity;
    result.failure =
        text("element %lld is %g, must be %g", static_cast<long long>(at), in.out[at], in.ref[at]);
    return result;
  }
  const bool wide = in.dtype == TESSERA_FP32;
  const double most = in.ref.size() < 64 ? 5 : in.ref.size() < 4096 ? 1.5 : 1.1;
  const double u = half_ulp(in.dtype), a = wide ? 8 : 1, c = wide ? 32 : 2;
  double max_terms = 0;
  for (const double terms : in.terms) max_terms = std::max(max_terms, terms);
  const double of_terms = constant + std::max(kTermAllowance, in.fp8_share) * max_terms;
  const double of_terms_mean = constant + std::max(kTermAllowance, in.fp8_share / 8) * max_terms;
  const std::vector<double> nothing(in.ref.size(), 0.0);
  const Distance of_out = distance(in.out, in.ref), of_low = distance(in.low, in.ref),
                 of_ref = distance(nothing, in.ref),
                 of_floor = distance(in.floor.empty() ? nothing : in.floor, nothing);
  result.max_err = of_out.max;
  result.max_limit =
      2 * most * of_low.max + c * u * of_ref.max + of_terms + kFloorAllowance * of_floor.max;
  result.mean_err = of_out.rms;
  result.mean_limit =
      most * of_low.rms + a * u * of_ref.rms + of_terms_mean + kFloorAllowance * of_floor.rms;
  if (!(result.mean_err <= result.mean_limit)) {
    result.failure = text("RMSE %.3g > %.3g", result.mean_err, result.mean_limit);
  } else if (!(result.max_err <= result.max_limit)) {
    const int64_t at = of_out.at;
    result.failure =
        text("max error %.3g > %.3g at element %lld: is %.9g, must be %.9g", result.max_err,
             result.max_limit, static_cast<long long>(at), in.out[at], in.ref[at]);
  }
  return result;
}

}  // namespace tessera
