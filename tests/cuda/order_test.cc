// SPDX-License-Identifier: Apache-2.0
// The model of the backward pass's schedule: it says what was measured, and what it chooses covers
// every tile. Needs no GPU.
#include "cuda/sm90/backward/schedule/order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace tessera::cuda::sm90 {
namespace {

constexpr int kTile = 128, kBlock = 64, kWorkers = 132;  // of d128 on an H200

TileWork causal(int tokens, int heads_q, int heads_kv, int batch = 1) {
  TileWork work{};
  for (int key = 0; key < tokens; key += kTile) {
    work.blocks.push_back((tokens + kBlock - 1) / kBlock - key / kBlock);
  }
  const int tiles = static_cast<int>(work.blocks.size());
  work.heads = batch * heads_kv;
  work.group = heads_q / heads_kv;
  work.workers = kWorkers;
  work.can_share = work.in_sections = true;
  work.heads_per_section = std::clamp((kWorkers + tiles / 2) / tiles, 1, work.heads);
  work.bytes_of_head = int64_t{1024} * work.group * tokens;
  work.bytes_of_part = 128 << 10;
  work.most_bytes = std::max<int64_t>(64 << 20, int64_t{256} * tokens * heads_q * batch);
  return work;
}

// Microseconds of a whole call on an H200, drawn at random after the model's constants were fixed;
// not those that they were fitted to. docs/lab/2026-11-23-sm90-backward-tail.md says how.
struct Measured {
  int tokens, heads_q, heads_kv;
  double us;
};
constexpr Measured kMeasured[] = {
    {7015, 40, 8, 2099.4},  {5171, 16, 8, 494.0},   {7266, 16, 4, 1037.3}, {2202, 40, 8, 278.1},
    {5560, 24, 8, 840.9},   {10337, 7, 1, 769.3},   {4187, 8, 2, 179.7},   {10646, 7, 1, 817.8},
    {5314, 48, 16, 1520.6}, {4339, 80, 16, 1745.8}, {5251, 6, 1, 211.2},   {5555, 32, 32, 1119.5},
    {2500, 28, 4, 241.7},   {5555, 24, 8, 789.8},   {2500, 48, 48, 384.6}, {8192, 16, 2, 1123.5},
};
constexpr double kSmallKernels = 10, kStep = 2.2;  // us

TEST(Order, TheModelSaysWhatWasMeasured) {
  for (const Measured& measured : kMeasured) {
    const TileOrder order =
        best_order(causal(measured.tokens, measured.heads_q, measured.heads_kv));
    EXPECT_NEAR((kSmallKernels + kStep * order.steps) / measured.us, 1, 0.15)
        << measured.tokens << " tokens, " << measured.heads_q << "/" << measured.heads_kv;
  }
}

// The work divided by the multiprocessors, with the ends of each tile.
double divided(const TileWork& work) {
  double steps = 0;
  for (const int blocks : work.blocks) steps += blocks * work.group + 2.5;
  return steps * work.heads / work.workers;
}

TEST(Order, LongCallsLeaveLittleIdle) {
  for (int tokens = 2048; tokens <= 12288; tokens += 331) {
    for (const auto& [q, kv] : {std::pair{32, 8}, {16, 16}, {64, 8}, {8, 1}, {40, 8}, {28, 4}}) {
      const TileWork work = causal(tokens, q, kv);
      EXPECT_LT(best_order(work).steps, 1.3 * divided(work) + 20)
          << tokens << " " << q << "/" << kv;
    }
  }
}

TEST(Order, EveryTileAndHeadIsCovered) {
  for (const int tokens : {1, 64, 129, 500, 1000, 2500, 5120, 9000, 33000}) {
    for (const auto& [q, kv] : {std::pair{1, 1}, {7, 1}, {32, 8}, {28, 4}, {48, 48}}) {
      const TileWork work = causal(tokens, q, kv, 2);
      const TileOrder order = best_order(work);
      EXPECT_GE(order.heads_of_last, std::min(order.heads_per_section, work.heads));
      EXPECT_EQ((work.heads - order.heads_of_last) % order.heads_per_section, 0);
      if (order.parts() == 0) continue;
      ASSERT_EQ(order.first_part.size(), work.blocks.size() + 1);
      EXPECT_TRUE(std::is_sorted(order.first_part.begin(), order.first_part.end()));
      std::vector<int> tiles(order.tile_at.begin(), order.tile_at.end()), all(work.blocks.size());
      std::iota(all.begin(), all.end(), 0);
      EXPECT_TRUE(std::is_permutation(tiles.begin(), tiles.end(), all.begin(), all.end()));
      EXPECT_LE(order.stored_parts() * work.heads * work.bytes_of_part, work.most_bytes);
    }
  }
}

TEST(Order, FullTilesOfOneWaveAreLeftAlone) {
  TileWork work = causal(1024, 16, 16);
  std::fill(work.blocks.begin(), work.blocks.end(), 16);
  EXPECT_EQ(best_order(work).parts(), 0);
}

// Causal sequences of packed queries and keys, `tokens` in all, of 28 heads on 4.
BackwardParams packed(int batch, int tokens, BackwardTile tile) {
  BackwardParams a{};
  Params& p = a.problem;
  p.batch = batch;
  p.sq = p.sk = tokens;
  p.hq = 28, p.hk = 4, p.group = 7;
  p.dqk = p.dv = 128;
  p.thd_q = p.thd_k = 1;
  p.window = {-1, 0};
  a.slots = num_slots(true, tokens, batch, tile.tile_m);
  const Problem problem{};
  const BackwardKernel kernel{"d128", 0, kLean, tile, nullptr};
  order_tiles(kernel, problem, tokens, kWorkers, TileOrders(), a);
  return a;
}

TEST(Order, PackedTilesHaveATableWhereItHelps) {
  const BackwardTile tile{.dqk = 128, .dv = 128, .tile_m = kBlock, .ds_buffers = 3};
  const BackwardParams a = packed(47, 14400, tile);
  EXPECT_EQ(a.ordered_slots, a.tiles / 4);
  EXPECT_EQ(a.last_slots, 2 * kWorkers / a.heads_per_section.divisor);
  BackwardTile in_turn = tile;
  in_turn.deterministic = true;
  EXPECT_EQ(packed(47, 14400, in_turn).ordered_slots, 0);
  // Tiles of a sequence walk downwards in step, but those that take turns walk upwards.
  EXPECT_TRUE(a.alternates && a.heads_inner);
  EXPECT_FALSE(packed(47, 14400, in_turn).alternates || packed(47, 14400, in_turn).heads_inner);
  EXPECT_EQ(packed(1, 14400, tile).ordered_slots, 0);     // as they are
  EXPECT_EQ(packed(4, 1000, tile).ordered_slots, 0);      // all start at once
  EXPECT_EQ(packed(3000, 14400, tile).ordered_slots, 0);  // too many to sort
  EXPECT_EQ(packed(10, 300'000, tile).ordered_slots, 0);
  EXPECT_EQ(packed(900, 14400, tile).ordered_slots, 0);  // shorter than a tile
  EXPECT_EQ(packed(4, 8000, tile).ordered_slots, 0);     // long
  EXPECT_FALSE(packed(4, 8000, tile).alternates);
}

TEST(Order, KnownProblemsAreNotModelledAgain) {
  const TileOrders orders;
  const TileWork work = causal(5120, 32, 8);
  const TileOrder first = orders.find(work), again = orders.find(work);
  EXPECT_EQ(first.steps, again.steps);
  EXPECT_EQ(first.first_part, again.first_part);
  for (int tokens = 1000; tokens < 1020; ++tokens) orders.find(causal(tokens, 8, 2));
  EXPECT_EQ(orders.find(work).steps, first.steps);
}

}  // namespace
}  // namespace tessera::cuda::sm90
