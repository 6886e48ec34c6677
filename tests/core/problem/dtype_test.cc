// SPDX-License-Identifier: Apache-2.0
#include "core/problem/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace tessera {
namespace {

struct Format {
  int32_t dtype;
  int exponent_bits, mantissa_bits;
  bool has_infinity;
};
constexpr Format kFormats[] = {{TESSERA_BF16, 8, 7, true},
                               {TESSERA_FP16, 5, 10, true},
                               {TESSERA_E4M3, 4, 3, false},
                               {TESSERA_E5M2, 5, 2, true}};

// The definition of a binary float, without tricks.
double value_of(const Format& f, uint32_t bits) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const uint32_t sign = bits >> (f.exponent_bits + f.mantissa_bits);
  const int exponent = static_cast<int>(bits >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const double mantissa = bits & ((1u << f.mantissa_bits) - 1);
  const double one = sign ? -1.0 : 1.0, unit = std::ldexp(1.0, -f.mantissa_bits);
  if (exponent == (1 << f.exponent_bits) - 1) {
    const bool all_ones = mantissa == (1 << f.mantissa_bits) - 1;
    if (f.has_infinity && mantissa == 0) return one * std::numeric_limits<double>::infinity();
    if (f.has_infinity || all_ones) return std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return one * mantissa * unit * std::ldexp(1.0, 1 - bias);
  return one * (1 + mantissa * unit) * std::ldexp(1.0, exponent - bias);
}

uint32_t count_of(const Format& f) { return 1u << (1 + f.exponent_bits + f.mantissa_bits); }

uint32_t stored(const Format& f, double value) {
  uint16_t bits = 0;
  store_element(&bits, 0, f.dtype, value);
  return bits;
}

TEST(Dtype, EveryPatternLoadsAndStores) {
  for (const Format& f : kFormats) {
    for (uint32_t bits = 0; bits < count_of(f); ++bits) {
      const auto pattern = static_cast<uint16_t>(bits);
      const double expected = value_of(f, bits), got = load_element(&pattern, 0, f.dtype);
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(got)) << dtype_name(f.dtype) << " " << bits;
        EXPECT_TRUE(std::isnan(value_of(f, stored(f, got)))) << dtype_name(f.dtype) << " " << bits;
        continue;
      }
      ASSERT_EQ(got, expected) << dtype_name(f.dtype) << " " << bits;
      if (!f.has_infinity && std::isinf(got)) continue;
      ASSERT_EQ(stored(f, got), bits) << dtype_name(f.dtype) << " " << bits;
    }
  }
}

TEST(Dtype, StoringRoundsToNearestEven) {
  for (const Format& f : kFormats) {
    const uint32_t half = count_of(f) / 2;
    for (uint32_t bits = 0; bits + 1 < half; ++bits) {
      const double a = value_of(f, bits), b = value_of(f, bits + 1);
      if (!std::isfinite(a) || !std::isfinite(b)) continue;
      const double middle = (a + b) / 2;
      const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
      ASSERT_EQ(stored(f, middle), even) << dtype_name(f.dtype) << " " << bits;
      ASSERT_EQ(stored(f, std::nextafter(middle, a)), bits) << dtype_name(f.dtype) << " " << bits;
      ASSERT_EQ(stored(f, std::nextafter(middle, b)), bits + 1) << dtype_name(f.dtype);
      ASSERT_EQ(stored(f, -middle), even | half) << dtype_name(f.dtype) << " " << bits;
    }
  }
}

TEST(Dtype, OverflowBecomesInfinityOrNan) {
  EXPECT_EQ(stored(kFormats[1], 65519.999), 0x7BFFu);
  EXPECT_EQ(stored(kFormats[1], 65520.0), 0x7C00u);
  EXPECT_EQ(stored(kFormats[1], -1e30), 0xFC00u);
  EXPECT_EQ(stored(kFormats[2], 464.0), 0x7Eu);  // the tie of 448 and 480 goes to the even 448
  EXPECT_EQ(stored(kFormats[2], 465.0), 0x7Fu);
  EXPECT_EQ(stored(kFormats[2], -std::numeric_limits<double>::infinity()), 0xFFu);
  EXPECT_EQ(stored(kFormats[0], 1e300), 0x7F80u);
}

TEST(Dtype, NamesAndSizes) {
  for (int32_t dtype = TESSERA_FP32; dtype <= TESSERA_INT64; ++dtype) {
    EXPECT_EQ(parse_dtype(dtype_name(dtype)), dtype);
    EXPECT_GT(size_of(dtype), 0);
  }
  EXPECT_EQ(dtype_name(77), "unknown");
  EXPECT_EQ(dtype_name(-1), "unknown");
  EXPECT_EQ(parse_dtype("float"), TESSERA_NONE);
  EXPECT_EQ(parse_dtype("none"), TESSERA_NONE);
}

TEST(Dtype, LargestFiniteIsTheLastBeforeInfinity) {
  for (const Format& f : kFormats) {
    const double largest = largest_finite(f.dtype);
    const uint32_t bits = stored(f, largest);
    EXPECT_EQ(value_of(f, bits), largest) << dtype_name(f.dtype);
    EXPECT_FALSE(std::isfinite(value_of(f, bits + 1))) << dtype_name(f.dtype);
  }
  EXPECT_EQ(largest_finite(TESSERA_FP32), std::numeric_limits<float>::max());
  EXPECT_EQ(largest_finite(TESSERA_FP64), std::numeric_limits<double>::max());
}

TEST(Dtype, HalfUlpIsHalfTheStepAtOne) {
  for (const Format& f : kFormats) {
    const uint32_t one = stored(f, 1.0);
    EXPECT_EQ(half_ulp(f.dtype), (value_of(f, one + 1) - 1.0) / 2) << dtype_name(f.dtype);
  }
  EXPECT_EQ(half_ulp(TESSERA_FP32), std::numeric_limits<float>::epsilon() / 2);
  EXPECT_EQ(half_ulp(TESSERA_FP64), std::numeric_limits<double>::epsilon() / 2);
}

}  // namespace
}  // namespace tessera
