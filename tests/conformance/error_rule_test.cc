// SPDX-License-Identifier: Apache-2.0
#include "conformance/error_rule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace tessera {
namespace {

using Values = std::vector<double>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Comparison tensor(const Values& out, const Values& ref, const Values& low, int32_t dtype,
                  bool softcap = false, const Values& terms = {}) {
  return compare_tensor({out, ref, low, dtype, softcap, terms});
}

TEST(ErrorRule, LimitIsLowTimesFAndUlps) {
  const Values ref(100, 1), low(100, 1.001);
  Values out = ref;
  EXPECT_NEAR(tensor(out, ref, low, TESSERA_BF16).max_limit, 2 * 0.001 + 2 / 256.0, 1e-12);
  EXPECT_NEAR(tensor(out, ref, low, TESSERA_FP16).max_limit, 2 * 0.001 + 2 / 2048.0, 1e-12);
  EXPECT_NEAR(tensor(out, ref, low, TESSERA_FP32).max_limit, 2 * 0.001 + 32 * std::ldexp(1, -24),
              1e-12);
  EXPECT_NEAR(tensor(out, ref, low, TESSERA_BF16, true).max_limit, 3 * 0.001 + 2 / 256.0, 1e-12);
  EXPECT_NEAR(tensor(out, ref, low, TESSERA_BF16, false, {1000, 1}).max_limit,
              2 * 0.001 + 2 / 256.0 + 4000 * std::ldexp(1, -24), 1e-12);
  const Values few(63, 1), few_low(63, 1.001);
  EXPECT_NEAR(tensor(few, few, few_low, TESSERA_BF16, true).max_limit, 10 * 0.001 + 2 / 256.0,
              1e-12);
}

TEST(ErrorRule, JustInsidePassesJustOutsideFails) {
  const Values ref(100, 1), low(100, 1.001);
  const double limit = tensor(ref, ref, low, TESSERA_BF16).max_limit;
  Values out = ref;
  out[42] = 1 + 0.999 * limit;
  EXPECT_TRUE(tensor(out, ref, low, TESSERA_BF16).ok());
  out[42] = 1 - 1.001 * limit;
  const Comparison wrong = tensor(out, ref, low, TESSERA_BF16);
  EXPECT_FALSE(wrong.ok());
  EXPECT_NE(wrong.failure.find("element 42"), std::string::npos) << wrong.failure;
}

TEST(ErrorRule, MeanCatchesADriftThatTheMaximumAllows) {
  Values ref(4096, 1), low(4096, 1), out(4096, 1);
  low[0] = 1.1;  // one bad element makes the maximum generous
  for (double& x : out) x += 0.01;
  const Comparison drift = tensor(out, ref, low, TESSERA_FP32);
  EXPECT_LE(drift.max_err, drift.max_limit);
  EXPECT_FALSE(drift.ok());
  EXPECT_NE(drift.failure.find("mean"), std::string::npos);
  ref.pop_back(), low.pop_back(), out.pop_back();
  EXPECT_TRUE(tensor(out, ref, low, TESSERA_FP32).ok());  // small tensors have no mean rule
}

TEST(ErrorRule, ZerosMustBeZero) {
  const Values ref(8192, 0);
  Values out = ref;
  EXPECT_TRUE(tensor(out, ref, ref, TESSERA_BF16).ok());
  out[5] = 1e-30;
  EXPECT_FALSE(tensor(out, ref, ref, TESSERA_BF16).ok());
}

TEST(ErrorRule, TheFloorWidensBothLimits) {
  const Values ref(4096, 1), low = ref;
  Values out = ref, floor(4096, 100);
  floor[7] = 1000;
  const Comparison with = compare_tensor({out, ref, low, TESSERA_FP32, false, {}, floor});
  const Comparison without = tensor(out, ref, low, TESSERA_FP32);
  EXPECT_NEAR(with.max_limit - without.max_limit, 2 * std::ldexp(1000, -24), 1e-15);
  EXPECT_NEAR(with.mean_limit - without.mean_limit, 2 * std::ldexp(100 + 900.0 / 4096, -24), 1e-15);
  out[9] = 1 + 0.999 * with.max_limit;
  EXPECT_FALSE(tensor(out, ref, low, TESSERA_FP32).ok());
  EXPECT_TRUE(compare_tensor({out, ref, low, TESSERA_FP32, false, {}, floor}).ok());
}

TEST(ErrorRule, NanAndInfinityFail) {
  const Values ref(10, 1), low(10, 2);
  for (double bad : {kNan, kInfinity, -kInfinity}) {
    Values out = ref;
    out[3] = bad;
    EXPECT_FALSE(tensor(out, ref, low, TESSERA_FP32).ok()) << bad;
  }
  EXPECT_TRUE(tensor({}, {}, {}, TESSERA_FP32).ok());
}

TEST(ErrorRule, WhatTheDtypeCannotHoldHasNoLimit) {
  const Values ref(10, 1e5), inside(10, 65504);
  Values low = ref;
  low[3] = kInfinity;
  EXPECT_TRUE(tensor(low, ref, low, TESSERA_FP16).ok());
  EXPECT_FALSE(tensor(low, ref, inside, TESSERA_FP16).ok());
}

TEST(ErrorRule, StatisticsMatchMinusInfinityExactly) {
  const Values ref{-kInfinity, 2}, logits{0, 0};
  EXPECT_TRUE(compare_statistic(ref, ref, logits, TESSERA_FP32).ok());
  EXPECT_FALSE(compare_statistic(Values{-1e30, 2}, ref, logits, TESSERA_FP32).ok());
  EXPECT_FALSE(compare_statistic(Values{-kInfinity, -kInfinity}, ref, logits, TESSERA_FP32).ok());
  EXPECT_FALSE(compare_statistic(Values{-kInfinity, kNan}, ref, logits, TESSERA_FP32).ok());
}

TEST(ErrorRule, StatisticsHaveTheirOwnLimit) {
  const Values ref{100}, logits{1 << 20};
  const double limit = 1e-6 * 100 + 4 * (1 << 20) * std::ldexp(1, -24);
  for (const auto& [dtype, constant] :
       {std::pair{TESSERA_FP32, 1e-5}, std::pair{TESSERA_BF16, 1e-3}}) {
    EXPECT_TRUE(
        compare_statistic(Values{100 + 0.999 * (limit + constant)}, ref, logits, dtype).ok());
    EXPECT_FALSE(
        compare_statistic(Values{100 - 1.001 * (limit + constant)}, ref, logits, dtype).ok());
  }
}

TEST(ErrorRule, Fp8IsJudgedByRmse) {
  const Values ref{-1, 1, -1, 1};
  Values low = ref, out = ref;
  for (double& x : low) x += 0.1;
  for (double& x : out) x += 0.105;
  EXPECT_TRUE(compare_fp8(out, ref, low).ok());
  for (double& x : out) x += 0.01;
  EXPECT_FALSE(
      compare_fp8(out, ref, low).ok());  // worse than the emulated path by more than a tenth
  for (double& x : low) x += 1;
  for (double& x : out) x += 0.2;
  EXPECT_FALSE(compare_fp8(out, ref, low).ok());  // 0.11 of the range
}

TEST(RoundedRule, GoesByWhatTheEmulatedPathLoses) {
  constexpr size_t kCount = 5000;
  std::vector<double> ref(kCount), low(kCount), out(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    ref[i] = std::sin(static_cast<double>(i));
    low[i] = ref[i] + (i % 2 ? 0.05 : -0.05);
    out[i] = ref[i] + (i % 3 ? 0.05 : -0.05);
  }
  std::vector<double> floor;
  const auto passes = [&] {
    return compare_rounded(
               {.out = out, .ref = ref, .low = low, .dtype = TESSERA_BF16, .floor = floor})
        .ok();
  };
  EXPECT_TRUE(passes());
  for (size_t i = 0; i < kCount; ++i) out[i] = ref[i] + 0.06;
  EXPECT_FALSE(passes());  // 1.2 times its RMSE, of which 0.055 + 2^-8 / sqrt(2) is allowed
  out = ref;
  EXPECT_TRUE(passes());
  out[77] += 0.2;  // one element, which the RMSE hides
  EXPECT_FALSE(passes());
  out[77] = std::nan("");
  EXPECT_FALSE(passes());
  low[77] = std::nan("");  // no limit
  EXPECT_TRUE(passes());

  low = ref;
  for (size_t i = 0; i < kCount; ++i) out[i] = ref[i] + 0.01;
  EXPECT_FALSE(passes());  // low is exact by luck
  floor.assign(kCount, 0.005 * 16777216);
  EXPECT_TRUE(passes());
}

}  // namespace
}  // namespace tessera
