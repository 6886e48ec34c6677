// SPDX-License-Identifier: Apache-2.0
// Overlap against brute force over every byte.
#include "core/validate/overlap.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

#include "core/problems.h"

namespace tessera {
namespace {

// Bytes of the tensor at base, and whether some element came twice.
std::set<int64_t> bytes_of(const Tensor& t, int rank, int64_t base, bool* twice) {
  std::set<int64_t> bytes;
  *twice = false;
  int64_t index[4] = {};
  if (element_count(t, rank) == 0) return bytes;
  for (;;) {
    int64_t offset = 0;
    for (int axis = 0; axis < rank; ++axis) {
      offset += t.extent[axis] > 1 ? index[axis] * t.stride[axis] : 0;
    }
    for (int64_t byte = 0; byte < size_of(t.dtype); ++byte) {
      *twice |= !bytes.insert(base + offset * size_of(t.dtype) + byte).second;
    }
    int axis = rank - 1;
    for (; axis >= 0 && ++index[axis] == t.extent[axis]; --axis) index[axis] = 0;
    if (axis < 0) return bytes;
  }
}

std::string text(const Tensor& t) {
  std::string s = std::string(dtype_name(t.dtype)) + " extent/stride";
  for (int i = 0; i < 4; ++i)
    s += " " + std::to_string(t.extent[i]) + "/" + std::to_string(t.stride[i]);
  return s;
}

class Random {
 public:
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  Tensor tensor(int rank, int64_t least_stride) {
    constexpr int32_t kDtypes[] = {TESSERA_BOOL, TESSERA_BF16, TESSERA_FP32, TESSERA_INT64};
    Tensor t{};
    t.dtype = kDtypes[below(4)];
    for (int axis = 0; axis < rank; ++axis) {
      t.extent[axis] = below(12) == 0 ? 0 : 1 + below(5);
      t.stride[axis] = least_stride + below(24);
    }
    return t;
  }

 private:
  std::mt19937_64 engine_{20240607};
};

TEST(Overlap, ItselfAgreesWithBruteForce) {
  Random random;
  int overlapping = 0;
  for (int round = 0; round < 20000; ++round) {
    const int rank = 1 + static_cast<int>(random.below(4));
    const Tensor t = random.tensor(rank, 1);
    if (element_count(t, rank) == 0) continue;
    bool twice;
    bytes_of(t, rank, 0, &twice);
    overlapping += twice;
    ASSERT_EQ(overlaps_itself(t, rank), twice) << text(t);
  }
  EXPECT_GT(overlapping, 1000);
}

TEST(Overlap, PairsAgreeWithBruteForce) {
  Random random;
  alignas(64) static char buffer[1];
  const auto base = reinterpret_cast<uintptr_t>(buffer);
  int sharing = 0, interleaved = 0;
  for (int round = 0; round < 20000; ++round) {
    const int rank_a = 1 + static_cast<int>(random.below(4));
    const int rank_b = 1 + static_cast<int>(random.below(4));
    const Tensor a = random.tensor(rank_a, 0), b = random.tensor(rank_b, 0);
    const int64_t at_a = random.below(40) * size_of(a.dtype),
                  at_b = random.below(40) * size_of(b.dtype);
    bool ignored;
    const std::set<int64_t> bytes_a = bytes_of(a, rank_a, at_a, &ignored);
    const std::set<int64_t> bytes_b = bytes_of(b, rank_b, at_b, &ignored);
    bool shared = false;
    for (const int64_t byte : bytes_a) shared |= bytes_b.contains(byte);
    const Footprint fa =
        footprint_of(a, rank_a, reinterpret_cast<void*>(base + static_cast<uintptr_t>(at_a)));
    const Footprint fb =
        footprint_of(b, rank_b, reinterpret_cast<void*>(base + static_cast<uintptr_t>(at_b)));
    ASSERT_EQ(share_memory(fa, fb), shared)
        << text(a) << " at " << at_a << ", " << text(b) << " at " << at_b;
    ASSERT_EQ(share_memory(fb, fa), shared);
    sharing += shared;
    interleaved +=
        !shared && fa.begin < fb.end && fb.begin < fa.end && !bytes_a.empty() && !bytes_b.empty();
  }
  EXPECT_GT(sharing, 1000);
  EXPECT_GT(interleaved, 1000);
}

// dq, dk and dv of one [b, s, 3, h, d] buffer, with batch and length of a real model.
TEST(Overlap, InterleavedGradientsOfOneBufferAreDisjoint) {
  const int64_t b = 32, s = 4096, h = 16, d = 64;
  Tensor t{TESSERA_BF16, 0, {b, s, h, d}, {s * 3 * h * d, 3 * h * d, d, 1}};
  auto* base = reinterpret_cast<char*>(uintptr_t{1} << 40);
  const Footprint q = footprint_of(t, 4, base), k = footprint_of(t, 4, base + h * d * 2);
  const Footprint v = footprint_of(t, 4, base + 2 * h * d * 2);
  EXPECT_FALSE(share_memory(q, k));
  EXPECT_FALSE(share_memory(q, v));
  EXPECT_FALSE(share_memory(k, v));
  EXPECT_TRUE(share_memory(q, footprint_of(t, 4, base + (h * d - 1) * 2)));  // one element
}

TEST(Overlap, HugeAndAdversarialStridesEnd) {
  const int64_t n = int64_t{1} << 20;
  const Tensor a{TESSERA_BF16, 0, {n, n, 3, 2}, {1'000'003, 999'983, 7, 1}};
  const Tensor b{TESSERA_BF16, 0, {n, n, 3, 2}, {1'000'033, 999'979, 11, 1}};
  auto* base = reinterpret_cast<char*>(uintptr_t{1} << 40);
  EXPECT_TRUE(share_memory(footprint_of(a, 4, base), footprint_of(b, 4, base + 2)));
  EXPECT_TRUE(overlaps_itself(a, 4));
  const Tensor wide{TESSERA_BOOL, 0, {3, 2, 1, 1}, {int64_t{1} << 61, 1, 0, 0}};
  EXPECT_FALSE(overlaps_itself(wide, 4));
}

}  // namespace
}  // namespace tessera
