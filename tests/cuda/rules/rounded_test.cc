// SPDX-License-Identifier: Apache-2.0
// Which problems have a backward pass by products of E4M3 on Hopper (sm90/backward/choice.h). Needs
// neither GPU nor CUDA.
#include <gtest/gtest.h>

#include <string>

#include "core/problems.h"
#include "cuda/sm90/backward/choice.h"

namespace tessera::cuda::sm90 {
namespace {

using tessera::testing::dense;

Problem backward(int64_t dqk, int64_t dv, int32_t dtype = TESSERA_BF16) {
  Problem p = tessera::testing::backward(dtype);
  for (const int index : {TESSERA_Q, TESSERA_DQ}) p.tensor[index] = dense(dtype, {2, 5, 4, dqk});
  for (const int index : {TESSERA_K, TESSERA_DK}) p.tensor[index] = dense(dtype, {2, 7, 2, dqk});
  for (const int index : {TESSERA_V, TESSERA_DV}) p.tensor[index] = dense(dtype, {2, 7, 2, dv});
  for (const int index : {TESSERA_O, TESSERA_DO}) p.tensor[index] = dense(dtype, {2, 5, 4, dv});
  return p;
}

std::string row_of(const Problem& p) {
  return has_rounded_backward(p) ? rounded_backward_kernel(p).name : "";
}

TEST(RoundedBackward, HoldsHeadDims) {
  for (const int32_t dtype : {TESSERA_BF16, TESSERA_FP16}) {
    EXPECT_EQ(row_of(backward(64, 64, dtype)), "sm90/backward/d64_fp8");
    EXPECT_EQ(row_of(backward(128, 128, dtype)), "sm90/backward/d128_fp8");
    EXPECT_EQ(row_of(backward(96, 40, dtype)), "sm90/backward/d128_fp8");
    EXPECT_EQ(row_of(backward(136, 128, dtype)), "");
  }
}

TEST(RoundedBackward, LengthsAskForTheLastColumns) {
  for (const int64_t dv : {64, 72}) {
    Problem p = backward(96, dv);
    p.tensor[TESSERA_SEQLENS_K] = dense(TESSERA_INT32, {2});
    EXPECT_EQ(has_rounded_backward(p), dv > 64);
  }
}

TEST(RoundedBackward, HasNeitherFeaturesNorAnOrder) {
  Problem p = backward(64, 64);
  p.flags |= TESSERA_DETERMINISTIC;
  EXPECT_FALSE(has_rounded_backward(p));
  p = backward(64, 64);
  p.flags |= TESSERA_SOFTCAP;
  EXPECT_FALSE(has_rounded_backward(p));
  p = backward(64, 64);
  p.tensor[TESSERA_MASK] = dense(TESSERA_BOOL, {2, 4, 5, 7});
  EXPECT_FALSE(has_rounded_backward(p));
}

TEST(RoundedBackward, IsOfOneDtype) {
  Problem p = backward(64, 64);
  p.tensor[TESSERA_DO].dtype = TESSERA_E4M3;
  EXPECT_FALSE(has_rounded_backward(p));
  EXPECT_FALSE(has_rounded_backward(backward(64, 64, TESSERA_FP32)));
  EXPECT_FALSE(has_rounded_backward(tessera::testing::forward(TESSERA_BF16)));
}

TEST(RoundedBackward, OtherProblemsKeepTheirRows) {
  EXPECT_STREQ(choose_backward_kernel(backward(64, 64)).name, "sm90/backward/d64_lean");
  EXPECT_STREQ(choose_backward_kernel(backward(128, 128)).name, "sm90/backward/d128_lean");
}

}  // namespace
}  // namespace tessera::cuda::sm90
