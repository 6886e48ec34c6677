// SPDX-License-Identifier: Apache-2.0
// Band against an element rule of its own, written from docs/semantics.md, for all small cases.
#include "core/mask.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

// visible(i, j): i < len_q, j < len_k, and i + shift - left <= j <= i + shift + right.
bool visible(const Band& band, int64_t i, int64_t j) {
  if (i < 0 || i >= band.len_q || j < 0 || j >= band.len_k) return false;
  if (band.left != -1 && j < i + band.shift - band.left) return false;
  if (band.right != -1 && j > i + band.shift + band.right) return false;
  return true;
}

std::string text(const Band& b) {
  return "len_q=" + std::to_string(b.len_q) + " len_k=" + std::to_string(b.len_k) +
         " shift=" + std::to_string(b.shift) + " left=" + std::to_string(b.left) +
         " right=" + std::to_string(b.right);
}

template <typename Check>
void for_all_bands(int64_t largest, Check check) {
  for (int64_t len_q = 0; len_q <= largest; ++len_q) {
    for (int64_t len_k = 0; len_k <= largest; ++len_k) {
      for (int64_t shift = -largest - 1; shift <= largest + 1; ++shift) {
        for (int64_t left = -1; left <= largest + 1; ++left) {
          for (int64_t right = -1; right <= largest + 1; ++right) {
            check(Band{len_q, len_k, shift, left, right});
            if (::testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Band, RowIsExactlyTheVisibleKeys) {
  for_all_bands(6, [](const Band& band) {
    for (int64_t i = -1; i <= band.len_q; ++i) {
      const Interval keys = band.row(i);
      for (int64_t j = -1; j <= band.len_k; ++j) {
        ASSERT_EQ(keys.contains(j), visible(band, i, j)) << text(band) << " i=" << i << " j=" << j;
      }
    }
  });
}

TEST(Band, RowNeverDecreases) {
  for_all_bands(6, [](const Band& band) {
    for (int64_t i = 1; i < band.len_q; ++i) {
      ASSERT_LE(band.row(i - 1).lo, band.row(i).lo) << text(band) << " i=" << i;
      ASSERT_LE(band.row(i - 1).hi, band.row(i).hi) << text(band) << " i=" << i;
    }
  });
}

TEST(Band, KeysIsTheHullOfItsRows) {
  for_all_bands(5, [](const Band& band) {
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
  for_all_bands(5, [](const Band& band) {
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
  for_all_bands(4, [](const Band& band) {
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

TEST(Band, LongSequencesDoNotOverflow) {
  const int64_t huge = int64_t{1} << 60;
  const Band band{huge, huge, 0, 2 * huge, 2 * huge};  // as Sequence clamps them
  EXPECT_EQ(band.row(huge - 1).lo, 0);
  EXPECT_EQ(band.row(huge - 1).hi, huge);
  EXPECT_TRUE(band.full(0, huge, 0, huge));
}

}  // namespace
}  // namespace tessera
