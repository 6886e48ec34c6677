// SPDX-License-Identifier: Apache-2.0
#include "core/mask/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tessera {
namespace {

void expect_words(const Philox4& got, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  EXPECT_EQ(got.word[0], w0);
  EXPECT_EQ(got.word[1], w1);
  EXPECT_EQ(got.word[2], w2);
  EXPECT_EQ(got.word[3], w3);
}

// The known answers that Random123 publishes for philox4x32 with 7 rounds.
TEST(Philox, KnownAnswers) {
  expect_words(philox4x32_7(0, 0, 0, 0, 0, 0), 0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48);
  const uint32_t ones = 0xffffffff;
  expect_words(philox4x32_7(ones, ones, ones, ones, ones, ones), 0x5207ddc2, 0x45165e59, 0x4d8ee751,
               0x8c52f662);
  expect_words(philox4x32_7(0xa4093822, 0x299f31d0, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
               0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a);
}

// The formula of docs/semantics.md, spelled out once more.
bool keep_by_formula(int64_t seed, int64_t offset, uint32_t head, int64_t i, int64_t j,
                     uint32_t threshold) {
  const auto s = static_cast<uint64_t>(seed), o = static_cast<uint64_t>(offset);
  const auto row = static_cast<uint32_t>((i / 16) * 8 + i % 8);
  const auto column = static_cast<uint32_t>((j / 16) * 4 + (j % 8) / 2);
  const Philox4 out = philox4x32_7(static_cast<uint32_t>(s),
                                   static_cast<uint32_t>(s >> 32) ^ static_cast<uint32_t>(o >> 32),
                                   static_cast<uint32_t>(o), head, row, column);
  const int f = (i % 16 >= 8 ? 4 : 0) + (j % 16 >= 8 ? 2 : 0) + static_cast<int>(j % 2);
  const uint32_t word = out.word[f / 2];
  const uint32_t field = f % 2 == 0 ? word & 0xffff : word >> 16;
  return field >= threshold;
}

TEST(Dropout, FollowsTheFormula) {
  const int64_t seed = -0x123456789abcdef, offset = 0x7fffffff00000003;
  const Dropout dropout = Dropout::make(seed, offset, 20000);
  for (const uint32_t head : {0u, 5u, 0xffffffffu}) {
    for (int64_t i = 0; i < 40; ++i) {
      for (int64_t j = 0; j < 40; ++j) {
        ASSERT_EQ(dropout.keep(head, i, j), keep_by_formula(seed, offset, head, i, j, 20000))
            << "i=" << i << " j=" << j;
      }
    }
  }
}

TEST(Dropout, HeadsOfAPartAreThoseOfTheWhole) {
  const int64_t words[8] = {7, 0, 3, 0, -5, 0, int64_t{1} << 32 | 6,
                            0};  // 2 apart; low words count
  EXPECT_EQ(DropoutHeads::of(words, 2, 2, 4).index(3, 2), 14u);
  EXPECT_EQ(DropoutHeads::of(words, 2, 4, 4).index(3, 2), 15u);
  EXPECT_EQ(DropoutHeads::of(words, 2, 4, 4).index(0, 0), 0xfffffffbu);
}

TEST(Dropout, KeepsAboutOneMinusP) {
  const uint32_t threshold = dropout_threshold(0.25);
  const Dropout dropout = Dropout::make(7, 0, threshold);
  int64_t kept = 0;
  const int64_t n = 512;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) kept += dropout.keep(3, i, j);
  }
  const double count = static_cast<double>(n * n), expected = 0.75 * count;
  EXPECT_NEAR(static_cast<double>(kept), expected, 5 * std::sqrt(count * 0.75 * 0.25));
  EXPECT_DOUBLE_EQ(dropout.scale(), 65536.0 / (65536.0 - threshold));
}

TEST(Dropout, EntriesOfAPatchDiffer) {
  // Two entries that shared a field would agree at every threshold.
  const int64_t n = 16;
  for (int64_t a = 0; a < n * n; ++a) {
    for (int64_t b = 0; b < a; ++b) {
      bool differ = false;
      for (uint32_t t = 8192; t < 65536 && !differ; t += 8192) {
        for (uint32_t head = 0; head < 64 && !differ; ++head) {
          const Dropout d = Dropout::make(11, 0, t);
          differ = d.keep(head, a / n, a % n) != d.keep(head, b / n, b % n);
        }
      }
      ASSERT_TRUE(differ) << a << " and " << b;
    }
  }
}

TEST(Dropout, Threshold) {
  EXPECT_EQ(dropout_threshold(0.5), 32768u);
  EXPECT_EQ(dropout_threshold(0.1), 6554u);  // 6553.6
  EXPECT_EQ(dropout_threshold(1.0 / 65536), 1u);
  EXPECT_EQ(dropout_threshold(0.5 / 65536), 1u);  // rounds half up
  EXPECT_EQ(dropout_threshold(65535.0 / 65536), 65535u);
  for (const double p :
       {0.0, 0.49 / 65536, 65535.5 / 65536, 1.0, 2.0, -0.1, 1e300, -1e300,
        std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(dropout_threshold(p), 0u) << p;
  }
}

}  // namespace
}  // namespace tessera
