// SPDX-License-Identifier: Apache-2.0
#include "core/utilities/dropout_mask.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tessera {
namespace {

TEST(DropoutMaskArgs, Rules) {
  const int64_t state[2] = {1, 2};
  std::vector<uint8_t> keep(2 * 3 * 4 * 5);
  const DropoutMaskCall good{2, 3, 4, 5, 0.5, state, 2, nullptr, nullptr, keep.data()};
  const Device cpu{};
  const auto args = dropout_mask_args(good, cpu);
  ASSERT_TRUE(args.ok());
  EXPECT_EQ(args.value().threshold, 32768u);
  const auto with = [&](auto change) {
    DropoutMaskCall call = good;
    change(call);
    return dropout_mask_args(call, cpu);
  };
  EXPECT_EQ(with([](auto& c) { c.dropout_p = 0; }).value().threshold, 0u);
  EXPECT_TRUE(with([](auto& c) { c.b = 0, c.keep = nullptr; }).ok());
  const auto refused = [&](int64_t b, int64_t hq, int64_t sq, int64_t sk, double p) {
    return !with([&](auto& c) { c.b = b, c.hq = hq, c.sq = sq, c.sk = sk, c.dropout_p = p; }).ok();
  };
  EXPECT_TRUE(refused(-1, 3, 4, 5, 0.5));
  EXPECT_TRUE(refused(2, 0, 4, 5, 0.5));
  EXPECT_TRUE(refused(1 << 20, 1 << 20, 1 << 20, 1 << 20, 0.5));
  EXPECT_TRUE(refused(2, 3, 4, 5, 1.0));
  EXPECT_TRUE(refused(2, 3, 4, 5, -0.5));
  EXPECT_TRUE(refused(2, 3, 4, 5, std::nan("")));
  EXPECT_FALSE(with([](auto& c) { c.rng_state = nullptr; }).ok());
  EXPECT_FALSE(with([](auto& c) { c.keep = nullptr; }).ok());
  EXPECT_FALSE(with([](auto& c) { c.rng_words = 3; }).ok());
  for (const int64_t wrong : {int64_t{-1}, INT64_MAX}) {
    const int64_t starts[2] = {5, wrong};
    const Status status = with([&](auto& c) { c.k_start = starts; }).status();
    EXPECT_NE(status.message().find("k_start[1]="), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace tessera
