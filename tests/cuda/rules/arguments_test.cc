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

TEST(Arguments, TensorsInTheWorkspaceHaveAlignedRows) {
  for (const int32_t dtype : {TESSERA_FP32, TESSERA_BF16}) {
    for (const int64_t columns : {1, 8, 33, 64}) {
      Tensor strided = dense(TESSERA_FP16, {2, 3, 5, columns});
      for (int64_t& stride : strided.stride) stride = 3 * stride + 1;
      const Tensor t = dense_like(strided, dtype);
      alignas(16) static char memory[1];
      EXPECT_EQ(t.dtype, dtype);
      EXPECT_EQ(view_of(t, memory).vector_bytes, 16);
      const int64_t last = offset_of(t, 1, 2, 4, columns - 1);
      EXPECT_GE(bytes_of(t), (last + 1) * size_of(dtype));
      EXPECT_LT(bytes_of(t), (last + 1) * size_of(dtype) + 16);
      EXPECT_EQ(t.stride[3], 1);
      EXPECT_GE(t.stride[2], columns);
      EXPECT_EQ(t.stride[1], 5 * t.stride[2]);
      EXPECT_EQ(t.stride[0], 3 * t.stride[1]);
    }
  }
  EXPECT_EQ(bytes_of(dense_like(dense(TESSERA_BF16, {2, 0, 5, 8}), TESSERA_FP32)), 0);
}

}  // namespace
}  // namespace tessera::cuda
