// SPDX-License-Identifier: Apache-2.0
#include "core/workspace.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Workspace, PiecesFollowEachOtherAligned) {
  alignas(64) char memory[256];
  Workspace workspace(memory);
  EXPECT_EQ(workspace.take<char>(3), memory);
  EXPECT_EQ(static_cast<void*>(workspace.take<float>(5)), memory + 4);
  EXPECT_EQ(static_cast<void*>(workspace.take<int>(1, 64)), memory + 64);
  EXPECT_EQ(workspace.bytes(), 68);
}

TEST(Workspace, APieceOfNothingIsAligned) {
  alignas(64) char memory[256];
  Workspace workspace(memory);
  workspace.take<char>(1);
  EXPECT_EQ(static_cast<void*>(workspace.take<int>(0, 32)), memory + 32);
  EXPECT_EQ(workspace.bytes(), 32);
}

TEST(Workspace, WithoutABaseOnlyBytesCount) {
  Workspace workspace;
  EXPECT_EQ(workspace.take<char>(3), nullptr);
  EXPECT_EQ(workspace.take<double>(2), nullptr);
  EXPECT_EQ(workspace.bytes(), 24);
}

TEST(Workspace, ACopyGoesOnFromTheSamePlace) {
  alignas(64) char memory[256];
  Workspace workspace(memory);
  workspace.take<char>(8);
  Workspace copy = workspace;
  EXPECT_EQ(copy.take<char>(100), workspace.take<char>(1));
  EXPECT_EQ(copy.bytes(), 108);
  EXPECT_EQ(workspace.bytes(), 9);
}

TEST(Count, PiecesHoldAllOfIt) {
  EXPECT_EQ(Count{0}.pieces(64).value(), 0);
  EXPECT_EQ(Count{64}.pieces(64).value(), 1);
  EXPECT_EQ(Count{65}.up_to(64).value(), 128);
  EXPECT_EQ(Count{100}.pieces(7).value(), 15);
}

TEST(Count, PiecesOfTheLargestDoNotWrap) {
  const Count most = Count::kTooMany - 1;
  EXPECT_EQ(most.pieces(1).value(), INT64_MAX - 1);
  EXPECT_EQ(most.pieces(INT64_MAX).value(), 1);
  EXPECT_EQ(most.pieces(64).value(), int64_t{1} << 57);
  EXPECT_FALSE(most.up_to(64).fits());
  EXPECT_FALSE(Count{Count::kTooMany}.pieces(64).fits());
}

}  // namespace
}  // namespace tessera
