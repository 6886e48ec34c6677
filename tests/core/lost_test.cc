// SPDX-License-Identifier: Apache-2.0
#include "core/cache/lost.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "core/problems.h"

namespace tessera {
namespace {

using testing::dense;

// A call over a cache of 3 sequences x 10 places, or of 9 pages of 4 with room for 12.
struct Call {
  std::vector<int32_t> starts{0, 3, 8}, counts{}, cu{}, table{};
  int64_t tokens = 2, rows_of_cos = 0;
  AppendArgs args{};

  AppendLists lists() {
    args = {};
    args.struct_size = sizeof args;
    const bool paged = !table.empty();
    set(TESSERA_APPEND_K, dense(TESSERA_FP32, {cu.empty() ? 3 : 1, tokens, 1, 8}), nullptr);
    set(TESSERA_APPEND_K_CACHE, dense(TESSERA_FP32, {paged ? 9 : 3, paged ? 4 : 10, 1, 8}),
        nullptr);
    set(TESSERA_APPEND_SEQLENS, dense(TESSERA_INT32, {3}), starts.data());
    if (paged) set(TESSERA_APPEND_PAGE_TABLE, dense(TESSERA_INT32, {3, 3}), table.data());
    if (!counts.empty()) set(TESSERA_APPEND_SEQLENS_Q, dense(TESSERA_INT32, {3}), counts.data());
    if (!cu.empty()) {
      args.format = TESSERA_THD;
      set(TESSERA_APPEND_CU_SEQLENS, dense(TESSERA_INT32, {4}), cu.data());
    }
    if (rows_of_cos) {
      set(TESSERA_APPEND_COS, dense(TESSERA_FP32, {rows_of_cos, 4}), nullptr);
      set(TESSERA_APPEND_SIN, dense(TESSERA_FP32, {rows_of_cos, 4}), nullptr);
    }
    return AppendLists(args);
  }

  void set(int index, const Tensor& tensor, void* data) {
    args.tensor[index] = tensor;
    args.data[index] = data;
  }
};

// What is said of the first item that breaks a rule; empty if none does.
std::string said_of(Call call) {
  const AppendLists lists = call.lists();
  LostTokens lost{};
  for (int64_t item = 0; item < lists.items; ++item) {
    if (breaks(lists, item, &lost)) return refuse(lists, lost).message() + "; " + fate_of(lost);
  }
  return "";
}

bool says(const Call& call, const std::string& refusal, const std::string& fate) {
  const std::string said = said_of(call);
  const bool right = said.rfind(refusal, 0) == 0 && said.ends_with("; " + fate);
  if (!right) ADD_FAILURE() << "said: " << said;
  return right;
}

TEST(LostTokens, AreNamed) {
  EXPECT_EQ(said_of({}), "");
  EXPECT_TRUE(says({.starts = {0, 9, 8}}, "seqlens_k[1]=9: with 2 new tokens must be from 0 to 10",
                   "token 1 of sequence 1 is dropped"));
  EXPECT_TRUE(says({.starts = {0, 3, -1}}, "seqlens_k[2]=-1: with 2 new tokens",
                   "tokens 0 to 1 of sequence 2 are dropped"));
  EXPECT_TRUE(
      says({.counts = {0, 2, 3}}, "seqlens_q[2]=3: must be from 0 to 2", "no token is dropped"));
  EXPECT_TRUE(says({.cu = {0, 1, 3, 2}, .tokens = 3}, "cu_seqlens[3]=2: must begin with 0",
                   "rows of no sequence are dropped"));
  const std::vector<int32_t> table{0, -1, 9, 3, 4, -1, 6, 7, 9};
  EXPECT_TRUE(says({.table = table}, "page_table[2, 2]=9: must be from 0 to below 9",
                   "tokens 0 to 1 of sequence 2 are dropped"));
  EXPECT_TRUE(says({.starts = {3, 0, 0}, .table = table, .tokens = 6},
                   "page_table[0, 1]=-1: must be", "tokens 1 to 4 of sequence 0 are dropped"));
  EXPECT_TRUE(says({.rows_of_cos = 9}, "cos.shape=[9, ...]: sequence 2 comes to position 9",
                   "token 1 of sequence 2 is turned to NaN"));
}

// An item breaks a rule exactly if a walk over its tokens finds one without a place, and the first
// of those that are named is the first that the walk finds.
TEST(LostTokens, AreThoseOfAWalkOverTokens) {
  std::mt19937 random(0);
  const auto pick = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  int broken = 0;
  for (int round = 0; round < 2000; ++round) {
    Call call;
    call.tokens = pick(1, 7);
    for (int32_t& start : call.starts) start = pick(0, 13);
    const bool paged = pick(0, 1) == 1;
    for (int i = 0; paged && i < 9; ++i) call.table.push_back(pick(-1, 40) % 10);
    const AppendLists lists = call.lists();
    for (int64_t n = 0; n < 3; ++n) {
      const auto has_place = [&](int64_t i) {
        const int64_t p = call.starts[static_cast<size_t>(n)] + i;
        if (p >= (paged ? 12 : 10)) return false;
        const int32_t page = paged ? call.table[static_cast<size_t>(n * 3 + p / 4)] : 0;
        return page >= 0 && page < 9;
      };
      LostTokens lost{};
      const bool breaks_rule = breaks(lists, n, &lost);
      int64_t first = 0;
      while (first < call.tokens && has_place(first)) ++first;
      ASSERT_EQ(breaks_rule, first < call.tokens);
      if (!breaks_rule) continue;
      ++broken;
      if (lost.kind == LostTokens::kPage) {
        ASSERT_EQ(lost.first, first);
      }
      for (int64_t i = lost.first; i <= lost.last; ++i) ASSERT_FALSE(has_place(i));
    }
  }
  EXPECT_GT(broken, 1000);
}

}  // namespace
}  // namespace tessera
