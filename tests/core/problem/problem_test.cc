// SPDX-License-Identifier: Apache-2.0
#include "core/problem/problem.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "core/mask/sequence.h"
#include "core/problems.h"

namespace tessera {
namespace {

using testing::dense;

TEST(Problem, TheTableIsInOrder) {
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    EXPECT_EQ(tensor_rule(i).index, i);
    EXPECT_GE(tensor_rule(i).rank, 1);
    EXPECT_LE(tensor_rule(i).rank, 4);
  }
  EXPECT_STREQ(tensor_rule(TESSERA_DALIBI_SLOPES).name, "dalibi_slopes");
}

TEST(Problem, Sizes) {
  const Sizes padded = sizes_of(testing::forward());
  EXPECT_EQ(padded.batch, 2);
  EXPECT_EQ(padded.sq, 5);
  EXPECT_EQ(padded.sk, 7);
  EXPECT_EQ(padded.group(), 2);
  EXPECT_EQ(padded.dqk, 8);
  EXPECT_EQ(padded.dv, 16);
  const Sizes packed = sizes_of(testing::packed());
  EXPECT_EQ(packed.batch, 2);
  EXPECT_EQ(packed.sq, 9);
  EXPECT_EQ(packed.sk, 11);
  EXPECT_EQ(sizes_of(testing::paged()).sk, 12);
}

TEST(Problem, StartingProblemsAreLegal) {
  for (const Problem& p :
       {testing::forward(), testing::forward(TESSERA_FP64), testing::packed(), testing::paged(),
        testing::backward(), testing::backward(TESSERA_BF16)}) {
    EXPECT_TRUE(validate(p).ok()) << validate(p).message();
  }
}

// Edits that mean nothing; normalised() must not see them.
TEST(Problem, EqualProblemsAreEqualBytes) {
  const Problem p = testing::forward();
  const auto expect_same = [&](const Problem& edited, const char* what) {
    ASSERT_TRUE(validate(edited).ok()) << what << ": " << validate(edited).message();
    EXPECT_TRUE(same(normalised(p), normalised(edited))) << what;
    EXPECT_EQ(hash_of(normalised(p)), hash_of(normalised(edited))) << what;
  };
  Problem edited = p;
  edited.tensor[TESSERA_BIAS].extent[2] = 99;  // of a tensor that is not given
  expect_same(edited, "not given");
  edited = p;
  edited.tensor[TESSERA_LSE].extent[3] = 5;
  edited.tensor[TESSERA_LSE].stride[3] = -5;
  expect_same(edited, "beyond the rank");
  edited = p;
  edited.window_left = 3;
  edited.max_seqlen_k = 12;
  expect_same(edited, "without their flags");
  edited = p;
  edited.flags |= TESSERA_WINDOW;
  edited.window_left = edited.window_right = -1;
  expect_same(edited, "an unbounded window");
  edited.window_left = int64_t{1} << 62;
  edited.window_right = 7;
  edited.align = TESSERA_ALIGN_TOP_LEFT;
  expect_same(edited, "a window beyond the extent");
  edited = p;
  edited.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  expect_same(edited, "an alignment of nothing");
  edited = p;
  std::strcpy(edited.backend, "");
  edited.backend[3] = 'x';  // after the NUL
  expect_same(edited, "after the name's end");
}

TEST(Problem, MaxSeqlenIsAtMostTheTokens) {
  Problem p = testing::packed();
  p.flags |= TESSERA_MAX_SEQLEN_Q | TESSERA_MAX_SEQLEN_K;
  p.max_seqlen_q = INT64_MAX;
  p.max_seqlen_k = 20;
  p.tensor[TESSERA_MASK] = dense(TESSERA_BOOL, {1, 1, 1, 20});
  ASSERT_TRUE(validate(p).ok()) << validate(p).message();
  EXPECT_EQ(normalised(p).max_seqlen_q, 9);
  EXPECT_EQ(normalised(p).max_seqlen_k, 20);  // an extent of the mask
}

TEST(Problem, CausalIsAWindow) {
  Problem causal = testing::forward();
  causal.flags |= TESSERA_CAUSAL;
  causal.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  Problem window = causal;
  window.flags = TESSERA_WINDOW;
  window.window_left = -1;
  window.window_right = 0;
  EXPECT_TRUE(same(normalised(causal), normalised(window)));
  EXPECT_TRUE(has_band(normalised(causal)));
  window.flags |= TESSERA_CAUSAL;
  window.window_right = -1;
  EXPECT_TRUE(same(normalised(causal), normalised(window)));
}

TEST(Problem, AlignmentsOfEqualLengthsAreOne) {
  Problem a = testing::forward();
  a.flags |= TESSERA_CAUSAL;
  a.tensor[TESSERA_K].extent[1] = a.tensor[TESSERA_V].extent[1] = 5;
  Problem b = a, c = a;
  b.align = TESSERA_ALIGN_TOP_LEFT;
  c.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  EXPECT_TRUE(same(normalised(a), normalised(b)));
  EXPECT_TRUE(same(normalised(a), normalised(c)));
  b.tensor[TESSERA_SEQLENS_Q] = c.tensor[TESSERA_SEQLENS_Q] = dense(TESSERA_INT32, {2});
  EXPECT_FALSE(same(normalised(b), normalised(c)));
}

TEST(Problem, StridesOfSingleAxesAreIgnored) {
  Problem a = testing::forward();
  for (const int i : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O, TESSERA_LSE}) {
    a.tensor[i].extent[0] = 1;
  }
  Problem b = a;
  b.tensor[TESSERA_Q].stride[0] = -7;
  ASSERT_TRUE(validate(b).ok());
  EXPECT_TRUE(same(normalised(a), normalised(b)));
}

TEST(Problem, NormalisedIsIdempotent) {
  for (Problem p : {testing::forward(), testing::packed(), testing::paged()}) {
    p.flags |= TESSERA_CAUSAL;
    p.align = TESSERA_ALIGN_BOTTOM_RIGHT;
    EXPECT_TRUE(same(normalised(p), normalised(normalised(p))));
    EXPECT_TRUE(validate(normalised(p)).ok());
  }
}

TEST(Problem, HashSeesEveryGivenField) {
  const Problem p = testing::forward();
  Problem edited = p;
  edited.tensor[TESSERA_V].stride[1] += 1;
  EXPECT_NE(hash_of(p), hash_of(edited));
  edited = p;
  edited.tensor[TESSERA_BIAS] = dense(TESSERA_FP32, {2, 4, 5, 7});
  Problem mask = p;
  mask.tensor[TESSERA_MASK] = edited.tensor[TESSERA_BIAS];
  EXPECT_NE(hash_of(p), hash_of(edited));
  EXPECT_NE(hash_of(edited), hash_of(mask));
}

// ---- structs of other versions ----

TEST(ImportProblem, TheSameSizeIsUsedAsItIs) {
  const Problem p = testing::forward();
  Problem storage;
  EXPECT_EQ(import_problem(&p, storage).value(), &p);
}

TEST(ImportProblem, AShorterStructIsFilledUp) {
  Problem p = testing::forward(), storage;
  std::memset(&p.tensor[TESSERA_DO], 0xAB, sizeof(Tensor) * (TESSERA_NUM_TENSORS - TESSERA_DO));
  std::memset(&storage, 0xCD, sizeof storage);
  p.struct_size = offsetof(Problem, tensor) + TESSERA_DO * sizeof(Tensor);
  const auto imported = import_problem(&p, storage);
  ASSERT_TRUE(imported.ok()) << imported.status().message();
  EXPECT_TRUE(same(*imported.value(), testing::forward()));
}

TEST(ImportProblem, ALongerStructMayHoldZeros) {
  std::vector<int64_t> words(sizeof(Problem) / 8 + 10);
  Problem p = testing::forward(), storage;
  p.struct_size = static_cast<uint32_t>(words.size() * 8);
  std::memcpy(words.data(), &p, sizeof p);
  const auto* caller = reinterpret_cast<const tessera_problem*>(words.data());
  ASSERT_TRUE(import_problem(caller, storage).ok());
  EXPECT_TRUE(same(storage, testing::forward()));
  words.back() = 1;
  const auto refused = import_problem(caller, storage);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), TESSERA_INVALID);
  EXPECT_NE(refused.status().message().find("struct_size"), std::string::npos);
}

TEST(ImportProblem, NonsenseIsRefused) {
  Problem p = testing::forward(), storage;
  EXPECT_FALSE(import_problem(nullptr, storage).ok());
  for (const uint32_t size : {0u, 4u, static_cast<uint32_t>(offsetof(Problem, tensor)) - 1,
                              (1u << 16) + 1, 0xffffffffu}) {
    p.struct_size = size;
    EXPECT_FALSE(import_problem(&p, storage).ok()) << size;
  }
}

TEST(ImportBuffers, NothingMeansDefaults) {
  Buffers storage, shorter{};
  const auto defaults = import_buffers(nullptr, storage);
  ASSERT_TRUE(defaults.ok());
  EXPECT_EQ(defaults.value()->struct_size, sizeof(Buffers));
  EXPECT_EQ(defaults.value()->stream, nullptr);
  shorter.struct_size = 8;
  EXPECT_FALSE(import_buffers(&shorter, storage).ok());
}

}  // namespace
}  // namespace tessera
