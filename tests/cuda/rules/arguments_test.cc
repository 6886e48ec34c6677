// SPDX-License-Identifier: Apache-2.0
// What kernels are told of a problem (cuda/common/rules/arguments.h). Needs neither GPU nor CUDA.
#include "cuda/common/rules/arguments.h"

#include <gtest/gtest.h>

#include "core/problems.h"

namespace tessera::cuda {
namespace {

using tessera::testing::dense;

// Two sequences in 9 query and 11 key tokens that start somewhere, under a mask.
Params params_with(int index, const Tensor& tensor) {
  Problem p = tessera::testing::packed();
  p.tensor[TESSERA_Q_START] = p.tensor[TESSERA_K_START] = dense(TESSERA_INT32, {2});
  p.tensor[index] = tensor;
  return params_of(p, nominal_buffers(p));
}

TEST(Arguments, SequencesMayStartBehindTheTokensOfTheCall) {
  const Params p = params_with(TESSERA_MASK, dense(TESSERA_BOOL, {2, 4, 20, 30}));
  EXPECT_EQ(p.longest_q, 20);
  EXPECT_EQ(p.longest_k, 30);
}

TEST(Arguments, DenseTensorsBoundWhatTheyReach) {
  const Params p = params_with(TESSERA_BIAS, dense(TESSERA_FP32, {2, 4, 5, 6}));
  EXPECT_EQ(p.longest_q, 5);
  EXPECT_EQ(p.longest_k, 6);
}

TEST(Arguments, BroadcastAxesBoundNothing) {
  const Params p = params_with(TESSERA_MASK, dense(TESSERA_BOOL, {2, 1, 1, 30}));
  EXPECT_EQ(p.longest_q, 9);
  EXPECT_EQ(p.longest_k, 30);
}

}  // namespace
}  // namespace tessera::cuda
