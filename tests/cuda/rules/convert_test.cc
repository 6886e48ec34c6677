// SPDX-License-Identifier: Apache-2.0
// What the kernels run of a problem with fp8 q (cuda/sm80/convert/problem.h). Needs neither GPU nor
// CUDA.
#include <gtest/gtest.h>

#include "core/problem/scales.h"
#include "core/problems.h"
#include "cuda/common/rules/arguments.h"
#include "cuda/sm80/convert/problem.h"

namespace tessera::cuda::sm80 {
namespace {

using tessera::testing::backward;
using tessera::testing::dense;

// fp8 but for o in bf16 and dv in fp32, with rows of an odd number of elements between heads.
Problem mixed() {
  Problem p = backward(TESSERA_E4M3);
  p.tensor[TESSERA_O].dtype = TESSERA_BF16;
  p.tensor[TESSERA_DO].dtype = TESSERA_E5M2;
  p.tensor[TESSERA_DV].dtype = TESSERA_FP32;
  p.tensor[TESSERA_Q].stride[2] = 9;
  p.tensor[TESSERA_Q_SCALE] = dense(TESSERA_FP32, {2, 4, 5});
  p.tensor[TESSERA_K_SCALE] = dense(TESSERA_FP32, {2, 2, 1});
  p.tensor[TESSERA_DQ_SCALE] = p.tensor[TESSERA_AMAX_DQ] = dense(TESSERA_FP32, {1});
  p.q_scale_block = 1;
  return p;
}

TEST(Convert, KernelsSeeNoScale) {
  const Problem p = problem_of_kernels(mixed());
  for (int i = TESSERA_Q_SCALE; i <= TESSERA_AMAX_DV; ++i) EXPECT_FALSE(given(p, i)) << i;
  EXPECT_FALSE(given(p, TESSERA_K_SCALE));
  EXPECT_EQ(p.q_scale_block, 0);
  EXPECT_EQ(p.pass, TESSERA_BACKWARD);
}

TEST(Convert, CopiesAreInFp32WithAlignedRows) {
  Problem given_problem = mixed();
  for (const int columns : {TESSERA_Q, TESSERA_K}) given_problem.tensor[columns].extent[3] = 7;
  const Problem p = problem_of_kernels(given_problem);
  alignas(16) static char memory[1];
  for (const int index : kScaledTensors) {
    EXPECT_EQ(p.tensor[index].dtype, TESSERA_FP32) << index;
    EXPECT_EQ(has_copy(given_problem, index), index != TESSERA_DV) << index;
    EXPECT_EQ(view_of(p.tensor[index], memory).vector_bytes, 16) << index;
    for (int axis = 0; axis < 4; ++axis) {
      EXPECT_EQ(p.tensor[index].extent[axis], given_problem.tensor[index].extent[axis]);
    }
  }
}

TEST(Convert, ResultsInFp32ArePlainUnlessTheirLargestValueIsAsked) {
  Problem p = mixed();
  EXPECT_FALSE(has_copy(p, TESSERA_DV));
  EXPECT_EQ(problem_of_kernels(p).tensor[TESSERA_DV].stride[1], p.tensor[TESSERA_DV].stride[1]);
  p.tensor[TESSERA_AMAX_DV] = dense(TESSERA_FP32, {1});
  EXPECT_TRUE(has_copy(p, TESSERA_DV));
}

TEST(Convert, OtherProblemsAreLeftAlone) {
  Problem p = backward(TESSERA_BF16);
  EXPECT_TRUE(same(problem_of_kernels(p), p));
  p = tessera::testing::forward(TESSERA_BF16);
  p.tensor[TESSERA_K].dtype = p.tensor[TESSERA_V].dtype = TESSERA_E4M3;  // a cache
  EXPECT_TRUE(same(problem_of_kernels(p), p));
  EXPECT_FALSE(has_copy(p, TESSERA_K));
}

}  // namespace
}  // namespace tessera::cuda::sm80
