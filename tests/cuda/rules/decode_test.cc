// SPDX-License-Identifier: Apache-2.0
// How Hopper's decoding is laid out over CTAs (sm90/decode/choice.h). Needs neither GPU nor CUDA.
#include <gtest/gtest.h>

#include "core/problems.h"
#include "cuda/sm90/decode/choice.h"

namespace tessera::cuda::sm90 {
namespace {

using tessera::testing::dense;

constexpr int kMultiprocessors = 132;

// One query for each of `batch` sequences of `keys` keys, of `hq` heads on `hk` of 128.
Problem decoding(int64_t batch, int64_t keys, int64_t hq = 32, int64_t hk = 8,
                 int32_t cache = TESSERA_BF16) {
  Problem p = tessera::testing::forward(TESSERA_BF16);
  p.tensor[TESSERA_Q] = p.tensor[TESSERA_O] = dense(TESSERA_BF16, {batch, 1, hq, 128});
  p.tensor[TESSERA_K] = p.tensor[TESSERA_V] = dense(cache, {batch, keys, hk, 128});
  p.tensor[TESSERA_LSE] = dense(TESSERA_FP32, {batch, hq, 1});
  return p;
}
int cluster_of(const Problem& p) { return decode_cluster_of(p, kMultiprocessors); }

TEST(DecodeClusters, ShareUnitsOfFewBytes) {
  EXPECT_EQ(cluster_of(decoding(1, 1024)), 8);
  EXPECT_EQ(cluster_of(decoding(1, 2048)), 8);
  EXPECT_EQ(cluster_of(decoding(1, 4096, 32, 4)), 8);
  EXPECT_EQ(cluster_of(decoding(1, 4096, 32, 8, TESSERA_E4M3)), 8);
  // A block of keys for each of a CTA's two teams.
  EXPECT_EQ(cluster_of(decoding(1, 512)), 4);
  EXPECT_EQ(cluster_of(decoding(1, 256)), 2);
  EXPECT_EQ(cluster_of(decoding(1, 128)), 1);
  // Half of the multiprocessors.
  EXPECT_EQ(cluster_of(decoding(2, 1024)), 4);
  EXPECT_EQ(cluster_of(decoding(4, 512)), 2);
  EXPECT_EQ(cluster_of(decoding(8, 256)), 1);
}

TEST(DecodeClusters, ArePairsThatFillTheGpu) {
  for (const int64_t keys : {1024, 8192, 131072}) EXPECT_EQ(cluster_of(decoding(8, keys)), 2);
  EXPECT_EQ(cluster_of(decoding(1, 8192)), 1);
  EXPECT_EQ(cluster_of(decoding(7, 8192)), 1);  // 112 CTAs
  EXPECT_EQ(cluster_of(decoding(9, 8192)), 1);  // 144
}

TEST(DecodeClusters, AreOfUnitsAlike) {
  Problem p = decoding(8, 8192);
  p.tensor[TESSERA_SEQLENS_K] = dense(TESSERA_INT32, {8});
  EXPECT_EQ(cluster_of(p), 1);
  p = decoding(1, 1024);
  p.tensor[TESSERA_SEQLENS_K] = dense(TESSERA_INT32, {1});
  EXPECT_EQ(cluster_of(p), 8);
  p.flags |= TESSERA_BATCH_INVARIANT;
  EXPECT_EQ(cluster_of(p), 1);
}

TEST(DecodeTile, HasHeadsThatLieBesideEachOther) {
  for (const auto& [hk, beside] : {std::pair{1, 1}, {2, 2}, {3, 1}, {8, 8}, {12, 4}, {32, 8}}) {
    const Problem problem = decoding(2, 1024, 2 * hk, hk);
    EXPECT_EQ(decode_tile_of(problem, decode_kernel_of(problem)).beside, beside) << hk;
  }
}

}  // namespace
}  // namespace tessera::cuda::sm90
