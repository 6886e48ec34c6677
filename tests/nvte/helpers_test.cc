// SPDX-License-Identifier: Apache-2.0
// Random state, segments, and copies between packed, padded and paged keys and values.
#include <gtest/gtest.h>

#include <climits>
#include <numeric>

#include "cpu_time.h"
#include "nvte/problems.h"

namespace nvte_test {
namespace {

using Shape = std::vector<size_t>;

TensorWrapper numbers(std::vector<int32_t>& values) {
  return {values.data(), Shape{values.size()}, DType::kInt32};
}

// Tokens whose elements say which token they are: 100 n + i, and the element's number behind the
// point.
std::vector<float> tokens(const std::vector<int32_t>& lens, int64_t rows, int64_t width,
                          bool packed) {
  std::vector<float> data;
  for (size_t n = 0; n < lens.size(); ++n) {
    for (int64_t i = 0; i < (packed ? lens[n] : rows); ++i) {
      for (int64_t e = 0; e < width; ++e) {
        data.push_back(i < lens[n] ? static_cast<float>(100 * n + i) + static_cast<float>(e) / 64
                                   : -1);
      }
    }
  }
  return data;
}

TEST(NvteHelpers, ConvertBetweenPackedAndPadded) {
  for (const size_t width : {3, 8}) {  // pieces of 4 bytes, and of 16
    const std::vector<int32_t> lens{4, 0, 2};
    std::vector<int32_t> cu{0, 4, 4, 6};
    std::vector<float> packed = tokens(lens, 5, width, true), padded(3 * 5 * width, -1);
    const auto cu_seqlens = numbers(cu);
    const TensorWrapper thd(packed.data(), Shape{6, 1, width}, DType::kFloat32),
        bshd(padded.data(), Shape{3, 5, 1, width}, DType::kFloat32);
    nvte_convert_thd_to_bshd(thd.data(), cu_seqlens.data(), bshd.data(), 3, 5, nullptr);
    EXPECT_EQ(padded, tokens(lens, 5, width, false));
    std::fill(packed.begin(), packed.end(), 0.f);
    nvte_convert_bshd_to_thd(bshd.data(), cu_seqlens.data(), thd.data(), 6, nullptr);
    EXPECT_EQ(packed, tokens(lens, 5, width, true));
    cu = {0, 4, 4, 7};
    EXPECT_THROW(nvte_convert_bshd_to_thd(bshd.data(), cu_seqlens.data(), thd.data(), 6, nullptr),
                 std::runtime_error);
    cu = {0, 6, 6, 6};
    EXPECT_THROW(
        nvte_convert_thd_to_bshd(thd.data(), cu_seqlens.data(), bshd.data(), 3, 5, nullptr),
        std::runtime_error);
    std::vector<int64_t> far{INT64_MAX - 1, INT64_MAX, INT64_MIN,
                             INT64_MIN + 1};  // sums would wrap
    const TensorWrapper wide(far.data(), Shape{4}, DType::kInt64);
    EXPECT_THROW(nvte_convert_thd_to_bshd(thd.data(), wide.data(), bshd.data(), 3, 5, nullptr),
                 std::runtime_error);
  }
}

// Three sequences, which hold old tokens and get new ones.
struct Step {
  static constexpr int64_t kB = 3, kMaxNew = 4, kMaxSeq = 12, kHeads = 2, kDk = 3, kDv = 4;
  std::vector<int32_t> old{5, 0, 7}, fresh{2, 4, 1};
  std::vector<int32_t> cu_new{0, 2, 6, 7}, cu_cached{0, 7, 11, 19};
  NVTE_QKV_Format format = NVTE_BSHD;
  int most_new = kMaxNew;  // of a sequence, as the caller bounds them

  // The new tokens of k or v: 1000 + 100 n + i.
  std::vector<float> source(int64_t d) const {
    std::vector<float> data(static_cast<size_t>(kB * kMaxNew * kHeads * d), -7);
    for (int64_t n = 0; n < kB; ++n) {
      for (int64_t i = 0; i < fresh[static_cast<size_t>(n)]; ++i) {
        const int64_t row = format == NVTE_BSHD   ? n * kMaxNew + i
                            : format == NVTE_SBHD ? i * kB + n
                                                  : cu_new[static_cast<size_t>(n)] + i;
        std::fill_n(data.begin() + row * kHeads * d, kHeads * d,
                    static_cast<float>(1000 + 100 * n + i));
      }
    }
    return data;
  }
  Shape shape(size_t d) const {
    if (format == NVTE_THD) return {7, kHeads, d};
    if (format == NVTE_SBHD) return {kMaxNew, kB, kHeads, d};
    return {kB, kMaxNew, kHeads, d};
  }
};

// rows[page or sequence][position] of one element per row of a cache.
void run_step(Step& step, std::vector<int32_t> table, size_t pages, size_t page_size,
              std::vector<float>& k_rows, std::vector<float>& v_rows, bool paged) {
  const auto widen = [](const std::vector<float>& rows, int64_t width) {
    std::vector<float> all;
    for (const float row : rows) all.insert(all.end(), static_cast<size_t>(width), row);
    return all;
  };
  const auto narrow = [](const std::vector<float>& all, std::vector<float>& rows, int64_t width) {
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = all[i * static_cast<size_t>(width)];
      for (int64_t e = 0; e < width; ++e)
        ASSERT_EQ(all[i * static_cast<size_t>(width) + static_cast<size_t>(e)], rows[i]);
    }
  };
  std::vector<float> new_k = step.source(Step::kDk), new_v = step.source(Step::kDv);
  std::vector<float> k = widen(k_rows, Step::kHeads * Step::kDk),
                     v = widen(v_rows, Step::kHeads * Step::kDv);
  const TensorWrapper tk(new_k.data(), step.shape(Step::kDk), DType::kFloat32),
      tv(new_v.data(), step.shape(Step::kDv), DType::kFloat32),
      ck(k.data(), Shape{pages, page_size, Step::kHeads, Step::kDk}, DType::kFloat32),
      cv(v.data(), Shape{pages, page_size, Step::kHeads, Step::kDv}, DType::kFloat32);
  const auto cu_new = numbers(step.cu_new), cu_cached = numbers(step.cu_cached),
             pages_of = numbers(table);
  const auto per_sequence = static_cast<int>(table.size() / Step::kB);
  nvte_copy_to_kv_cache(tk.data(), tv.data(), ck.data(), cv.data(), pages_of.data(), cu_new.data(),
                        cu_cached.data(), step.format, Step::kB, step.most_new, Step::kMaxSeq,
                        per_sequence, !paged, nullptr);
  narrow(k, k_rows, Step::kHeads * Step::kDk);
  narrow(v, v_rows, Step::kHeads * Step::kDv);
}

TEST(NvteHelpers, CopyToPages) {
  for (const NVTE_QKV_Format format : {NVTE_BSHD, NVTE_SBHD, NVTE_THD}) {
    Step step;
    step.format = format;
    const std::vector<int32_t> table{9, 0, 4, 8, 2, 1, 5, 3, 7};  // [3, 3], pages of 4
    std::vector<float> k(40), expected;
    std::iota(k.begin(), k.end(), 0.f);
    expected = k;
    for (int64_t n = 0; n < 3; ++n) {
      for (int64_t i = 0; i < step.fresh[static_cast<size_t>(n)]; ++i) {
        const int64_t at = step.old[static_cast<size_t>(n)] + i;
        const int64_t page = table[static_cast<size_t>(3 * n + at / 4)];
        expected[static_cast<size_t>(4 * page + at % 4)] = static_cast<float>(1000 + 100 * n + i);
      }
    }
    std::vector<float> v = k;
    run_step(step, table, 10, 4, k, v, true);
    EXPECT_EQ(k, expected) << format;
    EXPECT_EQ(v, expected) << format;
  }
}

// A bound of 2^31 new tokens of a sequence is as good as one of as many as there are, and a cache of
// no rows has none that move.
TEST(NvteHelpers, ABoundIsNotWalked) {
  const double start = milliseconds();
  Step step;
  step.most_new = INT_MAX;
  const std::vector<int32_t> table{9, 0, 4, 8, 2, 1, 5, 3, 7};
  std::vector<float> k(40), v(40);
  run_step(step, table, 10, 4, k, v, true);
  EXPECT_EQ(k[1], 1000);  // position 5 of the first sequence: its second page is 0

  std::vector<int32_t> nothing{0, 0}, first{0};
  const auto zeros = numbers(nothing), row = numbers(first);
  const TensorWrapper fresh(nullptr, Shape{1, 0, 2, 4}, DType::kFloat32),
      cache(nullptr, Shape{0, INT_MAX, 2, 4}, DType::kFloat32);
  nvte_copy_to_kv_cache(fresh.data(), fresh.data(), cache.data(), cache.data(), row.data(),
                        zeros.data(), zeros.data(), NVTE_BSHD, 1, 1, INT_MAX, 1, true, nullptr);
  EXPECT_LT(milliseconds() - start, kMostMilliseconds);
}

TEST(NvteHelpers, CopyToRowsMovesThemFirst) {
  Step step;
  // Sequence 0 stays, the second is new in the place of one that ended, the third was in row 3
  // of 4.
  std::vector<float> k(48);
  std::iota(k.begin(), k.end(), 0.f);
  std::vector<float> expected = k, v = k;
  for (size_t i = 0; i < 7; ++i) expected[24 + i] = k[36 + i];
  for (int64_t n = 0; n < 3; ++n) {
    for (int64_t i = 0; i < step.fresh[static_cast<size_t>(n)]; ++i) {
      expected[static_cast<size_t>(12 * n + step.old[static_cast<size_t>(n)] + i)] =
          static_cast<float>(1000 + 100 * n + i);
    }
  }
  run_step(step, {0, 1, 3}, 4, 12, k, v, false);
  EXPECT_EQ(k, expected);
  EXPECT_EQ(v, expected);
}

TEST(NvteHelpers, ATokenWithoutAPlaceIsAnErrorAndNothingIsWritten) {
  std::vector<float> k(48, 1), v(48, 1);
  const std::vector<float> before = k;
  Step full;
  full.cu_cached = {0, 13, 17, 25};
  EXPECT_THROW(run_step(full, {0, 1, 2}, 4, 12, k, v, false), std::runtime_error);
  Step elsewhere;
  EXPECT_THROW(run_step(elsewhere, {0, 1, 2, 3, 4, 5, 6, 99, 8}, 12, 4, k, v, true),
               std::runtime_error);
  for (const int32_t row : {4, 1, -1}) {  // of the third sequence
    Step moved;
    EXPECT_THROW(run_step(moved, {0, 1, row}, 4, 12, k, v, false), std::runtime_error) << row;
  }
  Step unknown;
  unknown.format = NVTE_BHSD;
  EXPECT_THROW(run_step(unknown, {0, 1, 2}, 4, 12, k, v, false), std::runtime_error);
  Step wide;
  wide.cu_new = {0, 5, 9, 10}, wide.cu_cached = {0, 5, 9, 10};
  EXPECT_THROW(run_step(wide, {0, 1, 2}, 4, 12, k, v, false), std::runtime_error);
  EXPECT_EQ(k, before);
  EXPECT_EQ(v, before);
}

TEST(NvteHelpers, RandomState) {
  int64_t seed[2] = {42, 99}, states[2][2]{};
  const TensorWrapper from(seed, Shape{1}, DType::kInt64), words(seed, Shape{4}, DType::kInt32);
  for (int i = 0; i < 2; ++i) {
    const TensorWrapper state(states[i], Shape{2}, DType::kInt64);
    nvte_populate_rng_state_async(state.data(), i ? words.data() : from.data(), 128, 128,
                                  NVTE_F16_arbitrary_seqlen, nullptr);
    EXPECT_EQ(states[i][0], 42);
  }
  EXPECT_NE(states[0][1], states[1][1]);
  const TensorWrapper short_seed(seed, Shape{1}, DType::kInt32),
      state(states[0], Shape{2}, DType::kInt64);
  EXPECT_THROW(nvte_populate_rng_state_async(state.data(), short_seed.data(), 1, 1,
                                             NVTE_F16_arbitrary_seqlen, nullptr),
               std::runtime_error);

  int64_t offset = 1000, got[2];
  nvte_extract_seed_and_offset(got, 0, nullptr, 5, nullptr, 6, 7, nullptr);
  EXPECT_EQ(got[0], 5);
  EXPECT_EQ(got[1], 6);
  nvte_extract_seed_and_offset(got, 1, seed, 5, &offset, 6, 7, nullptr);
  EXPECT_EQ(got[0], 42);
  EXPECT_EQ(got[1], 1007);
  EXPECT_THROW(nvte_extract_seed_and_offset(got, 1, nullptr, 5, &offset, 6, 7, nullptr),
               std::runtime_error);
}

TEST(NvteHelpers, Segments) {
  std::vector<int32_t> cu{0, 3, 5, 9, -1, -1};
  const auto tensor = numbers(cu);
  const TensorWrapper empty;
  EXPECT_EQ(nvte_get_runtime_num_segments(tensor.data(), empty.data(), 6, nullptr), 3u);
  EXPECT_EQ(nvte_get_runtime_num_segments(tensor.data(), empty.data(), 2, nullptr), 1u);
  EXPECT_EQ(nvte_get_runtime_num_segments(tensor.data(), empty.data(), 100, nullptr), 3u);
}

}  // namespace
}  // namespace nvte_test
