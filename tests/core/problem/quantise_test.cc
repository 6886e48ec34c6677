// SPDX-License-Identifier: Apache-2.0
#include "core/quantise/quantise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/problem/dtype.h"

namespace tessera {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Problem rotated(int64_t columns) {
  Problem p{};
  p.flags = TESSERA_FP8_PRODUCTS | TESSERA_SMOOTH_MEAN | TESSERA_SMOOTH_HADAMARD;
  p.tensor[TESSERA_Q].extent[3] = columns;
  return p;
}

std::vector<float> normal(int64_t count, uint32_t seed, float size = 1) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> draw(0, size);
  std::vector<float> values(count);
  for (float& value : values) value = draw(bits);
  return values;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += double{a[c]} * b[c];
  return sum;
}

TEST(Quantise, RoundsAsE4M3BesideAPowerOfTwo) {
  for (const float size : {1e-30f, 1e-3f, 1.0f, 448.0f, 3e7f, 3e37f}) {
    std::vector<float> row = normal(4096, 1, size);
    for (int64_t i = 0; i < 64; ++i) row[i] *= std::ldexp(1.0f, static_cast<int>(-i / 3));
    const std::vector<float> before = row;
    double largest = 0;
    for (const float x : row) largest = std::max<double>(largest, std::abs(x));
    const double scale = std::exp2(std::ceil(std::log2(largest / 448)));
    EXPECT_EQ(round_query(row.data(), 4096, nullptr, nullptr), 0);
    for (size_t i = 0; i < row.size(); ++i) {
      uint8_t stored = 0;
      store_element(&stored, 0, TESSERA_E4M3, before[i] / scale);
      ASSERT_EQ(row[i], scale * load_element(&stored, 0, TESSERA_E4M3)) << before[i] << " " << size;
    }
  }
}

TEST(Quantise, TheLargestNeverSaturatesAndTiesGoToEven) {
  std::vector<float> row{448, 447.9f, 17, 19, -17};
  round_query(row.data(), 5, nullptr, nullptr);
  EXPECT_EQ(row, (std::vector<float>{448, 448, 16, 20, -16}));
  row = {449, 1};  // scale 2
  round_query(row.data(), 2, nullptr, nullptr);
  EXPECT_EQ(row, (std::vector<float>{448, 1}));
}

TEST(Quantise, WhatIsNotFiniteDoesNotCount) {
  std::vector<float> row{1, NAN, kInfinity, -kInfinity, 0.5f};
  round_query(row.data(), 5, nullptr, nullptr);
  EXPECT_EQ(row[0], 1);
  EXPECT_TRUE(std::isnan(row[1]));
  EXPECT_GT(row[2], 1);
  EXPECT_EQ(row[2], -row[3]);
  EXPECT_EQ(row[4], 0.5f);

  std::vector<float> nothing{0, -0.0f, 1e-35f};
  round_query(nothing.data(), 3, nullptr, nullptr);
  for (const float x : nothing) EXPECT_EQ(x, 0);

  const std::vector<float> keys{1, NAN, 3, kInfinity, 5, 7};
  std::vector<float> sum(2, 0);
  add_keys(keys.data(), 3, 2, sum.data());
  EXPECT_EQ(sum, (std::vector<float>{9, 7}));
}

TEST(Quantise, ABlockOfKeysSharesAScale) {
  std::vector<float> rows{448, 0, 0, 3.3f};
  round_keys(rows.data(), 2, 2, nullptr, nullptr);
  EXPECT_EQ(rows, (std::vector<float>{448, 0, 0, 3.25f}));
}

TEST(Quantise, SmoothingLeavesScores) {
  for (const int64_t d : {1, 8, 33, 64, 96, 128, 192, 256}) {
    const Rotation rotation(rotated(d));
    const std::vector<float> mean = normal(d, 7, 12);
    std::vector<float> q = normal(d, 2), k = normal(d, 3);
    for (int64_t c = 0; c < d; ++c) k[c] += mean[c];
    const double score = dot(q, k);
    std::vector<float> turned = q, key = k;
    rotation.turn_query(turned.data());
    for (int64_t c = 0; c < d; ++c) key[c] -= mean[c];
    rotation.turn_key(key.data());
    const double of_mean = dot(q, mean);
    EXPECT_NEAR(dot(turned, key) + of_mean, score, 1e-4 * std::sqrt(static_cast<double>(d)));

    const std::vector<float> before = q;
    EXPECT_NEAR(round_query(q.data(), d, mean.data(), &rotation), of_mean, 1e-3);
    round_keys(k.data(), 1, d, mean.data(), &rotation);
    if (d >= 64) {
      EXPECT_NEAR(dot(q, k) + of_mean, score, 4);
    }
    EXPECT_NE(q, d > 1 ? before : std::vector<float>{});
  }
}

TEST(Quantise, ARotationSpreadsOneColumn) {
  const Rotation rotation(rotated(96));  // three times 32
  std::vector<float> row(96, 0);
  row[40] = 1;
  rotation.turn_query(row.data());
  for (int64_t c = 0; c < 96; ++c) EXPECT_EQ(std::abs(row[c]), c / 32 == 1 ? 1 : 0) << c;
}

TEST(Quantise, WithoutTheFlagNothingTurns) {
  Problem p = rotated(64);
  p.flags &= ~uint32_t{TESSERA_SMOOTH_HADAMARD};
  std::vector<float> row = normal(64, 5);
  const std::vector<float> before = row;
  Rotation(p).turn_query(row.data());
  Rotation(p).turn_key(row.data());
  EXPECT_EQ(row, before);
}

}  // namespace
}  // namespace tessera
