// SPDX-License-Identifier: Apache-2.0
// The order in which tiles of packed keys start (sm90/backward/schedule/slot_order.cuh), on the
// host: every phase thread by thread. Needs no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <vector>

using std::max;
using std::min;  // as in device code

template <typename T>
T __ldg(const T* from) {
  return *from;
}

#include "cuda/sm90/backward/schedule/slot_order.cuh"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kBlock = 64, kTile = 128;
using Schedule = KeySchedule<kBlock, kTile>;

struct Entry {
  int n, key0;
  auto operator<=>(const Entry&) const = default;
};

// Packed sequences of these lengths, gaps behind them, and what order_tiles() makes of them.
struct Packed {
  BackwardParams a{};
  std::vector<int32_t> cu{0}, padded;

  Packed(const std::vector<int>& lengths, bool causal, int last_slots, int before = 0,
         int gap = 0) {
    padded.push_back(before);
    for (const int length : lengths) {
      cu.push_back(cu.back() + length);
      padded.push_back(padded.back() + length + gap);
    }
    Params& p = a.problem;
    p.batch = static_cast<int>(lengths.size());
    p.thd_q = p.thd_k = 1;
    p.sq = p.sk = p.longest_q = p.longest_k = padded.back() + gap;
    p.hq = p.hk = p.group = 1;
    p.window = {-1, causal ? 0 : -1};
    const auto give = [&](int index, std::vector<int32_t>& from) {
      p.tensor[index] = {from.data(), {1, 0, 0, 0}, TESSERA_INT32, 4};
    };
    give(TESSERA_CU_SEQLENS_Q, cu), give(TESSERA_CU_SEQLENS_K, cu);
    give(TESSERA_CU_SEQLENS_Q_PADDED, padded), give(TESSERA_CU_SEQLENS_K_PADDED, padded);
    a.ordered_slots = num_tile_slots(true, p.sk, p.batch, kTile);
    a.last_slots = last_slots;
  }
  Packed(const Packed&) = delete;

  int slots() const { return a.ordered_slots; }
  int last() const { return (max(slots() - a.last_slots, 0) + 3) & ~3; }

  std::vector<Entry> order() {
    std::vector<int2> table(slots(), int2{-1, -1});
    a.key_tiles = table.data();
    const auto sort = std::make_unique<SlotOrder>();
    sort->write<Schedule>(a, [](const auto& body) {
      for (int thread = kSlotClasses - 1; thread >= 0; --thread) body(thread);
    });
    std::vector<Entry> entries;
    for (const int2& at : table) entries.push_back({at.x, at.y});
    return entries;
  }
  std::vector<Entry> order_of_storage() const {
    std::vector<Entry> entries;
    for (int i = 0; i < slots(); ++i) {
      const TileOfRows tile = tile_of_packed_slot(a.problem, slots() - 1 - i, kTile);
      entries.push_back({tile.n, tile.begin});
    }
    return entries;
  }
  int blocks(const Entry& entry) const {
    const Params& p = a.problem;
    KeyTile tile;
    Schedule::set_sequence(p, entry.n, rows_of<SideOfQueries>(p, entry.n),
                           rows_of<SideOfKeys>(p, entry.n), tile);
    tile.key0 = entry.key0;
    Schedule::set_blocks(p, tile);
    return max(tile.end - tile.begin, 0);
  }
};

std::vector<int> draw(unsigned seed, int sequences, int longest) {
  std::mt19937 random(seed);
  std::vector<int> lengths(sequences);
  for (int& length : lengths) length = static_cast<int>(random() % (longest + 1));
  return lengths;
}

TEST(SlotOrder, ClassesFallWithBlocks) {
  EXPECT_EQ(class_of_blocks(0), kSlotClasses - 1);
  EXPECT_EQ(class_of_blocks(1 << 20), 0);
  for (int blocks = 1; blocks < 5000; ++blocks) {
    const int its = class_of_blocks(blocks);
    ASSERT_GE(its, 0);
    ASSERT_LT(its, kSlotClasses - 1);
    ASSERT_LE(its, class_of_blocks(blocks - 1));
    // Two tiles of a class differ by less than a sixteenth of their blocks.
    if (blocks < 2048) {
      ASSERT_LT(its, class_of_blocks(blocks - blocks / 16 - 1)) << blocks;
    }
  }
}

TEST(SlotOrder, EverySlotStartsOnceLongestFirst) {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    const int sequences = 2 + static_cast<int>(seed * 7 % 60), longest = seed % 3 ? 612 : 1900;
    const int last_slots = static_cast<int>(seed * 5 % 70), gap = seed % 4 ? 0 : 200;
    Packed packed(draw(seed, sequences, longest), seed % 5, last_slots, seed % 6 ? 0 : 300, gap);
    const std::vector<Entry> order = packed.order(), stored = packed.order_of_storage();
    ASSERT_TRUE(std::is_permutation(order.begin(), order.end(), stored.begin(), stored.end()));
    ASSERT_EQ(order, packed.order());

    std::map<Entry, int> rank;  // in storage
    for (size_t i = 0; i < stored.size(); ++i) rank[stored[i]] = static_cast<int>(i);
    const auto of_sequence = [&](const Entry& at) {
      return packed.blocks(at) > 0 ? class_of_blocks(packed.blocks({at.n, 0})) : kSlotClasses - 1;
    };
    const auto of_tile = [&](const Entry& at) { return class_of_blocks(packed.blocks(at)); };
    for (int i = 1; i < packed.slots(); ++i) {
      const Entry &one = order[i - 1], &next = order[i];
      if (i < packed.last()) {
        ASSERT_LE(of_sequence(one), of_sequence(next)) << seed << ", " << i;
        ASSERT_TRUE(of_sequence(one) < of_sequence(next) || rank[one] < rank[next]);
      } else if (i > packed.last()) {
        ASSERT_LE(of_tile(one), of_tile(next)) << seed << ", " << i;
      }
    }
    if (HasFatalFailure()) FAIL() << "seed " << seed;
  }
}

// The first and last of the tables that there are, and tiles without work at the end of each.
TEST(SlotOrder, TablesOfAnySize) {
  for (const int sequences : {2, 3, 125, 500, 900}) {
    Packed packed(draw(3, sequences, 10), true, 66);
    ASSERT_LE(packed.slots(), kMostOrderedSlots);
    const std::vector<Entry> order = packed.order(), stored = packed.order_of_storage();
    EXPECT_TRUE(std::is_permutation(order.begin(), order.end(), stored.begin(), stored.end()));
    EXPECT_TRUE(std::ranges::is_sorted(
        order, {}, [&](const Entry& at) { return -std::min(packed.blocks(at), 1); }));
  }
}

// Steps until the last CTA ends, as in schedule_length(): the ends of a tile take 2.5.
double length_of(const Packed& packed, const std::vector<Entry>& order, int heads, int group) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int i = 0; i < 132; ++i) free_at.push(0);
  double end = 0;
  for (const Entry& entry : order) {
    for (int head = 0; head < heads; ++head) {
      const int blocks = packed.blocks(entry);
      const double ends = free_at.top() + (blocks > 0 ? blocks * group + 2.5 : 0);
      free_at.pop();
      free_at.push(ends);
      end = std::max(end, ends);
    }
  }
  return end;
}

TEST(SlotOrder, CallsEndEarlier) {
  constexpr int kHeads = 4, kGroup = 7, kLast = 2 * 132 / kHeads;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    Packed packed(draw(seed, 47, 612), true, kLast);
    const double before = length_of(packed, packed.order_of_storage(), kHeads, kGroup),
                 after = length_of(packed, packed.order(), kHeads, kGroup);
    EXPECT_LT(after, 0.95 * before) << seed;
  }
  Packed equal(std::vector<int>(16, 300), true, kLast);
  EXPECT_LT(length_of(equal, equal.order(), kHeads, kGroup),
            0.7 * length_of(equal, equal.order_of_storage(), kHeads, kGroup));
}

}  // namespace
}  // namespace tessera::cuda::sm90
