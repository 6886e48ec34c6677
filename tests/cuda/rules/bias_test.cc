// SPDX-License-Identifier: Apache-2.0
// Which biases Hopper's kernels read a copy of, and which kernels run then (sm90/bias/problem.h).
// Needs neither GPU nor CUDA.
#include <gtest/gtest.h>

#include <string>

#include "core/problems.h"
#include "cuda/common/rules/arguments.h"
#include "cuda/sm90/bias/problem.h"
#include "cuda/sm90/machine/readable.h"
#include "cuda/sm90/rules.h"

namespace tessera::cuda::sm90 {
namespace {

using tessera::testing::dense;

constexpr Device kHopper{TESSERA_CUDA, 0, 90, 0};

// Attention of s tokens, two sequences of four heads, with a bias of its own for each score.
Problem biased(int64_t s, int64_t dim = 64, bool is_backward = false) {
  constexpr int32_t kType = TESSERA_BF16;
  Problem p = tessera::testing::forward(kType);
  for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}) {
    p.tensor[index] = dense(kType, {2, s, 4, dim});
  }
  p.tensor[TESSERA_LSE] = dense(TESSERA_FP32, {2, 4, s});
  p.tensor[TESSERA_BIAS] = dense(kType, {2, 4, s, s});
  if (!is_backward) return p;
  p.pass = TESSERA_BACKWARD;
  for (const int index : {TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV}) {
    p.tensor[index] = p.tensor[TESSERA_Q];
  }
  return p;
}

std::string kernels_of(const Problem& p) {
  const Sm90Rules rules;
  EXPECT_TRUE(static_cast<bool>(rules.supports(p, kHopper)));
  return rules.kernels_for(p, kHopper);
}

TEST(PaddedBias, IsOneWhoseRowsBeginAnywhere) {
  for (const int64_t s : {49, 50, 52, 196, 197}) EXPECT_TRUE(pads_bias(biased(s))) << s;
  for (const int64_t s : {48, 56, 200}) EXPECT_FALSE(pads_bias(biased(s))) << s;
  EXPECT_FALSE(pads_bias(tessera::testing::forward(TESSERA_BF16)));  // no bias
  Problem p = biased(48);
  p.tensor[TESSERA_BIAS].stride[1] += 1;
  EXPECT_TRUE(pads_bias(p));
}

TEST(PaddedBias, HasTheTypeOfQ) {
  Problem p = biased(49);
  p.tensor[TESSERA_BIAS].dtype = TESSERA_FP32;
  EXPECT_FALSE(pads_bias(p));
  EXPECT_TRUE(same(with_padded_bias(p), p));
}

TEST(PaddedBias, HasRowsOfItsOwn) {
  Problem p = biased(49);
  p.tensor[TESSERA_BIAS] = dense(TESSERA_BF16, {2, 4, 1, 49});
  EXPECT_FALSE(pads_bias(p));
  p = biased(49);
  p.tensor[TESSERA_BIAS].stride[2] = 0;
  EXPECT_FALSE(pads_bias(p));
  p.tensor[TESSERA_BIAS] = dense(TESSERA_BF16, {2, 4, 49, 1});
  EXPECT_FALSE(pads_bias(p));
}

TEST(PaddedBias, IsDenseAndSharesWhatTheBiasShares) {
  Problem p = biased(49);
  const Tensor own = with_padded_bias(p).tensor[TESSERA_BIAS];
  EXPECT_EQ(own.stride[2], 56);
  EXPECT_EQ(own.stride[1], 49 * 56);
  EXPECT_EQ(own.stride[0], 4 * 49 * 56);
  EXPECT_EQ(own.extent[3], 49);
  EXPECT_EQ(rows_of_padded(own), 2 * 4 * 49);
  EXPECT_EQ(bytes_of_padded(own), 2 * 2 * 4 * 49 * 56);

  p.tensor[TESSERA_BIAS].stride[0] = 0;  // expanded
  const Tensor shared = with_padded_bias(p).tensor[TESSERA_BIAS];
  EXPECT_EQ(shared.extent[0], 2);
  EXPECT_EQ(shared.stride[0], 0);
  EXPECT_EQ(shared.stride[1], 49 * 56);
  EXPECT_EQ(bytes_of_padded(shared), 2 * 4 * 49 * 56);

  p.tensor[TESSERA_BIAS] = dense(TESSERA_BF16, {2, 1, 49, 49});
  p.tensor[TESSERA_BIAS].stride[1] = 0;
  const Tensor of_heads = with_padded_bias(p).tensor[TESSERA_BIAS];
  EXPECT_EQ(of_heads.stride[1], 0);
  EXPECT_EQ(of_heads.stride[0], 49 * 56);
}

TEST(PaddedBias, IsReadByTma) {
  Problem p = biased(197);
  for (int64_t& stride : p.tensor[TESSERA_BIAS].stride) stride = stride > 1 ? stride + 3 : stride;
  EXPECT_FALSE(maps_bias(p, nullptr));
  EXPECT_TRUE(maps_bias(with_padded_bias(p), nullptr));
  EXPECT_FALSE(pads_bias(with_padded_bias(p)));
}

TEST(PaddedBias, IsBounded) {
  EXPECT_TRUE(pads_bias(biased(2047, 16)));   // just below 64 MiB
  EXPECT_FALSE(pads_bias(biased(2049, 16)));  // just above, and 2 MiB of q, k, v and o
  EXPECT_TRUE(pads_bias(biased(2049, 256)));  // beside 32 MiB
  Problem p = biased(4095, 512);              // just below 256 MiB, beside 128 MiB
  EXPECT_TRUE(pads_bias(p));
  p = biased(4097, 512);
  EXPECT_FALSE(pads_bias(p));
}

TEST(PaddedBias, IsNotOfBatchInvariantProblems) {
  Problem p = biased(49);
  p.flags |= TESSERA_BATCH_INVARIANT;
  EXPECT_FALSE(pads_bias(p));
}

TEST(PaddedBias, RunsInTheKernelsOfAlignedOnes) {
  EXPECT_EQ(kernels_of(biased(49)), kernels_of(biased(56)));
  EXPECT_EQ(kernels_of(biased(49)), "sm90/forward/d64_bias");
  EXPECT_EQ(kernels_of(biased(197, 128)), "sm90/forward/d128_bias");
  EXPECT_EQ(kernels_of(biased(49, 64, true)), "sm90/backward/d64_bias");

  Problem p = biased(49, 128, true);
  p.tensor[TESSERA_DBIAS] = p.tensor[TESSERA_BIAS];
  EXPECT_EQ(kernels_of(p), "sm90/backward/d128_bias, sm90/dbias/d128_plain");
  p.tensor[TESSERA_DBIAS] = with_padded_bias(p).tensor[TESSERA_BIAS];  // rows of 16 bytes
  EXPECT_EQ(kernels_of(p), "sm90/backward/d128_dbias");

  p = biased(49);
  p.tensor[TESSERA_BIAS].dtype = TESSERA_FP32;
  EXPECT_EQ(kernels_of(p), "sm90/forward/d64_rich");
}

}  // namespace
}  // namespace tessera::cuda::sm90
