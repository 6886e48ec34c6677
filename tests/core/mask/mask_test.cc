// SPDX-License-Identifier: Apache-2.0
// Band against an element rule of its own, written from docs/semantics.md, for all small cases.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/mask/narrow.h"

namespace tessera {
namespace {

// A band with the rule that it is made of.
struct RuledBand : Band {
  BandRule rule;
};

// visible(i, j): i < len_q, j < len_k, and i + shift - left <= j <= i + shift + right.
bool visible(const RuledBand& band, int64_t i, int64_t j) {
  const BandRule& rule = band.rule;
  if (i < 0 || i >= band.len_q || j < 0 || j >= band.len_k) return false;
  const int64_t under = i + (rule.bottom_right ? band.len_k - band.len_q : rule.shift);
  if (rule.window.left != -1 && j < under - rule.window.left) return false;
  if (rule.window.right != -1 && j > under + rule.window.right) return false;
  return true;
}

std::string text(const RuledBand& b) {
  return "len_q=" + std::to_string(b.len_q) + " len_k=" + std::to_string(b.len_k) +
         " bottom_right=" + std::to_string(b.rule.bottom_right) +
         " shift=" + std::to_string(b.rule.shift) + " left=" + std::to_string(b.rule.window.left) +
         " right=" + std::to_string(b.rule.window.right);
}

// bottom_right, and the shift where that is 0.
std::vector<std::pair<int64_t, int64_t>> diagonals(int64_t largest) {
  return {{1, 0}, {0, 0}, {0, 2}, {0, -1}, {0, largest + 2}, {0, -largest - 2}};
}

template <typename Check>
void for_all_bands(int64_t largest, Check check) {
  for (int64_t len_q = 0; len_q <= largest; ++len_q) {
    for (int64_t len_k = 0; len_k <= largest; ++len_k) {
      for (const auto& [bottom_right, shift] : diagonals(largest)) {
        for (int64_t left = -1; left <= 2 * largest + 1; ++left) {
          for (int64_t right = -1; right <= 2 * largest + 1; ++right) {
            const BandRule rule{
                .bottom_right = bottom_right, .window = {left, right}, .shift = shift};
            check(RuledBand{Band::of(rule, len_q, len_k), rule});
            if (::testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Band, NarrowedShowsTheSameKeys) {
  constexpr int64_t kFar = int64_t{3} << 60, kShift = kMostShift;
  const std::vector<int64_t> near{-70, -9, -1, 0, 1, 8, 70};
  std::vector<int64_t> shifts, sides{-1, INT64_MAX, INT64_MAX - 5};
  for (const int64_t x : near) {
    for (const int64_t far : {int64_t{0}, kShift, -kShift, int64_t{1} << 40, kFar, -kFar}) {
      shifts.push_back(far + x);
      if (far + x >= 0) sides.push_back(far + x);
    }
  }
  for (const int64_t shift : shifts) {
    for (const int64_t left : sides) {
      for (const int64_t right : sides) {
        const BandRule rule{.bottom_right = 0, .window = {left, right}, .shift = 0};
        const Band wide = Band::of(rule, 9, 7, shift);
        const BasicBand<int32_t> band = narrowed(wide);
        ASSERT_GE(band.window.left, 0);
        ASSERT_GE(band.window.right, 0);
        for (int32_t i = -1; i <= 9; ++i) {
          const Interval keys = wide.row(i);
          const BasicInterval<int32_t> narrow = band.row(i);
          for (int32_t j = -1; j <= 7; ++j) {
            ASSERT_EQ(narrow.contains(j), keys.contains(j))
                << "shift=" << shift << " left=" << left << " right=" << right << " i=" << i
                << " j=" << j;
          }
          ASSERT_EQ(band.rows(i, i + 1).empty(), wide.rows(i, i + 1).empty());
          ASSERT_EQ(band.keys_of_all(i, i + 2).empty(), wide.keys_of_all(i, i + 2).empty());
        }
      }
    }
  }
  // The longest sequences: no sum leaves 32 bits.
  for (const int64_t shift : {-kFar, -kShift, int64_t{0}, kShift, kFar}) {
    const BandRule rule{.bottom_right = 0, .window = {5, 0}, .shift = 0};
    const Band wide = Band::of(rule, kShift, kShift, shift);
    const BasicBand<int32_t> band = narrowed(wide);
    for (const int32_t i : {0, 7, kMostShift - 1}) {
      EXPECT_EQ(band.row(i).empty(), wide.row(i).empty()) << shift << " " << i;
      EXPECT_EQ(band.rows(i, i + 1).empty(), wide.rows(i, i + 1).empty()) << shift << " " << i;
    }
  }
}

TEST(Band, RowIsExactlyTheVisibleKeys) {
  for_all_bands(6, [](const RuledBand& band) {
    for (int64_t i = -1; i <= band.len_q; ++i) {
      const Interval keys = band.row(i);
      for (int64_t j = -1; j <= band.len_k; ++j) {
        ASSERT_EQ(keys.contains(j), visible(band, i, j)) << text(band) << " i=" << i << " j=" << j;
      }
    }
  });
}

TEST(Band, RowNeverDecreases) {
  for_all_bands(6, [](const RuledBand& band) {
    for (int64_t i = 1; i < band.len_q; ++i) {
      ASSERT_LE(band.row(i - 1).lo, band.row(i).lo) << text(band) << " i=" << i;
      ASSERT_LE(band.row(i - 1).hi, band.row(i).hi) << text(band) << " i=" << i;
    }
  });
}

TEST(Band, KeysIsTheHullOfItsRows) {
  for_all_bands(5, [](const RuledBand& band) {
    for (int64_t m0 = 0; m0 <= band.len_q; ++m0) {
      for (int64_t m1 = m0; m1 <= band.len_q + 2; ++m1) {
        int64_t first = -1, last = -1;
        for (int64_t j = 0; j < band.len_k; ++j) {
          for (int64_t i = m0; i < m1; ++i) {
            if (!visible(band, i, j)) continue;
            if (first < 0) first = j;
            last = j;
          }
        }
        const Interval keys = band.keys(m0, m1);
        ASSERT_EQ(keys.empty(), first < 0) << text(band) << " rows " << m0 << ".." << m1;
        if (first < 0) continue;
        ASSERT_EQ(keys.lo, first) << text(band) << " rows " << m0 << ".." << m1;
        ASSERT_EQ(keys.hi, last + 1) << text(band) << " rows " << m0 << ".." << m1;
      }
    }
  });
}

TEST(Band, RowsIsTheHullOfItsKeys) {
  for_all_bands(5, [](const RuledBand& band) {
    for (int64_t n0 = 0; n0 <= band.len_k; ++n0) {
      for (int64_t n1 = n0; n1 <= band.len_k + 2; ++n1) {
        int64_t first = -1, last = -1;
        for (int64_t i = 0; i < band.len_q; ++i) {
          for (int64_t j = n0; j < n1; ++j) {
            if (!visible(band, i, j)) continue;
            if (first < 0) first = i;
            last = i;
          }
        }
        const Interval rows = band.rows(n0, n1);
        ASSERT_EQ(rows.empty(), first < 0) << text(band) << " keys " << n0 << ".." << n1;
        if (first < 0) continue;
        ASSERT_EQ(rows.lo, first) << text(band) << " keys " << n0 << ".." << n1;
        ASSERT_EQ(rows.hi, last + 1) << text(band) << " keys " << n0 << ".." << n1;
      }
    }
  });
}

TEST(Band, FullMeansEveryPairIsVisible) {
  for_all_bands(4, [](const RuledBand& band) {
    for (int64_t m0 = 0; m0 < band.len_q; ++m0) {
      for (int64_t m1 = m0 + 1; m1 <= band.len_q + 1; ++m1) {
        for (int64_t n0 = 0; n0 < band.len_k; ++n0) {
          for (int64_t n1 = n0 + 1; n1 <= band.len_k + 1; ++n1) {
            bool all = true;
            for (int64_t i = m0; i < m1; ++i) {
              for (int64_t j = n0; j < n1; ++j) all &= visible(band, i, j);
            }
            ASSERT_EQ(band.full(m0, m1, n0, n1), all)
                << text(band) << " tile " << m0 << ".." << m1 << " x " << n0 << ".." << n1;
          }
        }
      }
    }
  });
}

// Asks for all queries that see all of some keys, and the other way round.
TEST(Band, WhatAllSeeIsExact) {
  for_all_bands(4, [](const RuledBand& band) {
    for (int64_t n0 = 0; n0 < band.len_k; ++n0) {
      for (int64_t n1 = n0 + 1; n1 <= band.len_k + 1; ++n1) {
        const Interval rows = band.rows_of_all(n0, n1);
        for (int64_t i = 0; i < band.len_q; ++i) {
          bool all = true;
          for (int64_t j = n0; j < n1; ++j) all &= visible(band, i, j);
          ASSERT_EQ(rows.contains(i), all)
              << text(band) << " i=" << i << " keys " << n0 << ".." << n1;
        }
      }
    }
    for (int64_t m0 = 0; m0 < band.len_q; ++m0) {
      for (int64_t m1 = m0 + 1; m1 <= band.len_q + 1; ++m1) {
        const Interval keys = band.keys_of_all(m0, m1);
        for (int64_t j = 0; j < band.len_k; ++j) {
          bool all = true;
          for (int64_t i = m0; i < m1; ++i) all &= visible(band, i, j);
          ASSERT_EQ(keys.contains(j), all)
              << text(band) << " j=" << j << " rows " << m0 << ".." << m1;
        }
      }
    }
  });
}

// The inverses agree with what they are inverses of, one by one and in 32 bits too.
TEST(Band, EveryKeyKnowsItsRows) {
  for_all_bands(6, [](const RuledBand& band) {
    const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
    const BandRule& rule = band.rule;
    const auto small = BasicBand<int32_t>::of(
        {narrow(rule.bottom_right), rule.window.as<int32_t>(), narrow(rule.shift)},
        narrow(band.len_q), narrow(band.len_k));
    for (int64_t j = 0; j < band.len_k; ++j) {
      ASSERT_EQ(small.first(narrow(j)), band.first(j)) << text(band) << " j=" << j;
      ASSERT_EQ(small.end(narrow(j)), band.end(j)) << text(band) << " j=" << j;
      for (int64_t i = 0; i < band.len_q; ++i) {
        ASSERT_EQ(band.first(j) <= i && i < band.end(j), visible(band, i, j))
            << text(band) << " i=" << i << " j=" << j;
      }
    }
  });
}

TEST(Band, LongSequencesDoNotOverflow) {
  for (const int64_t window : {int64_t{-1}, INT64_MAX, int64_t{1} << 60}) {
    for (const int64_t bottom_right : {0, 1}) {
      const int64_t huge = int64_t{1} << 60;
      const Band band = Band::of({bottom_right, {window, window}}, huge, huge);
      EXPECT_EQ(band.row(huge - 1).lo, 0);
      EXPECT_EQ(band.row(huge - 1).hi, huge);
      EXPECT_TRUE(band.full(0, huge, 0, huge));
    }
    // A diagonal as far away as any: with a window nobody sees anything, without all do.
    for (const int64_t shift : {-3 * (int64_t{1} << 60), 3 * (int64_t{1} << 60)}) {
      EXPECT_TRUE(Band::of({0, {5, 5}, shift}, 100, 100).keys(0, 100).empty());
      EXPECT_TRUE(Band::of({0, {}, 0}, 100, 100, shift).full(0, 100, 0, 100));
    }
    const int32_t large = (1 << 30) - 1;
    const auto narrow = static_cast<int32_t>(window < large ? window : large);
    const auto band = BasicBand<int32_t>::of({1, {narrow, narrow}}, large, large);
    EXPECT_TRUE(band.full(0, large, 0, large));
    EXPECT_EQ(band.rows(large - 1, large).lo, 0);
    EXPECT_EQ(band.rows(0, 1).hi, large);
  }
}

}  // namespace
}  // namespace tessera
