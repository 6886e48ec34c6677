// SPDX-License-Identifier: Apache-2.0
// Where ragged tensor maps lie: every row of a sequence is at its own address, rows behind it are
// outside the map, and no map begins below the address space. Needs neither GPU nor CUDA.
#include "cuda/sm90/machine/ragged.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/sm90/machine/readable.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int64_t kMost = int64_t{1} << 24;  // rows
constexpr uint64_t kMostCoordinate = uint64_t{1} << 32, kMostStrideBytes = uint64_t{1} << 40;

std::vector<uint64_t> addresses() {
  std::vector<uint64_t> all{16, 4096};
  for (int bits = 20; bits < 57; ++bits) {
    const uint64_t power = uint64_t{1} << bits;
    all.insert(all.end(), {power - 16, power, power + 16, power + power / 2});
  }
  all.push_back(0x302000000);  // where CUDA 12 reserves first
  return all;
}
std::vector<int64_t> lengths() { return {1, 2, 63, 64, 150, 2048, 8000, kMost - 1, kMost}; }
std::vector<int64_t> strides() {
  return {16, 128, 768, 3456, 8192, int64_t{1} << 20, (int64_t{1} << 40) - 16};
}

// The address that TMA finds at a place, or 0 outside of the map. In 64 bits, as it is there.
uint64_t address_at(const RowAxes& axes, const MapRow& at) {
  const auto inside = [](int c, uint64_t extent) {
    return c >= 0 && static_cast<uint64_t>(c) < extent;
  };
  if (!inside(at.c2, axes.extent[0]) || !inside(at.c3, axes.extent[1])) return 0;
  return axes.base + static_cast<uint64_t>(at.c2) * axes.stride[0] +
         static_cast<uint64_t>(at.c3) * axes.stride[1];
}

// Every sequence of a side of `rows` rows that begins or ends at an edge, by its rows at the edges.
void expect_rows(uint64_t address, int64_t rows, int64_t stride) {
  const int reach = reach_of(true, static_cast<int>(rows));
  const RowAxes axes = row_axes(address, rows, stride, reach);
  for (const int64_t first : {int64_t{0}, rows / 3, rows - 1}) {
    for (const int64_t length : {int64_t{1}, (rows - first + 1) / 2, rows - first}) {
      const auto place = [&](int64_t i) {
        return map_row(reach, static_cast<int>(first), static_cast<int>(length),
                       static_cast<int>(i));
      };
      for (const int64_t i : {int64_t{0}, length / 2, length - 1}) {
        ASSERT_EQ(address_at(axes, place(i)), address + static_cast<uint64_t>((first + i) * stride))
            << "row " << i << " of " << length << " from " << first << " of " << rows;
      }
      for (const int64_t behind : {0, 1, 63, 255}) {
        ASSERT_EQ(address_at(axes, place(length + behind)), 0u) << behind << " rows behind";
      }
    }
  }
}

TEST(Ragged, EveryRowIsAtItsAddressAndNoneBehind) {
  int mapped = 0, declined = 0;
  for (const uint64_t address : addresses()) {
    for (const int64_t rows : lengths()) {
      for (const int64_t stride : strides()) {
        const auto bytes = static_cast<unsigned __int128>(rows) * static_cast<uint64_t>(stride);
        const bool above = address > bytes;
        ASSERT_EQ(in_address_space(address, stride, rows), above)
            << address << " " << rows << " " << stride;
        ++(above ? mapped : declined);
        if (!above) continue;
        const RowAxes axes = row_axes(address, rows, stride, rows);
        ASSERT_GT(axes.base, 0u);
        ASSERT_LT(axes.base, address);
        ASSERT_EQ(axes.base % 16, 0u);
        for (int axis = 0; axis < 2; ++axis) {
          ASSERT_LE(axes.extent[axis], kMostCoordinate);
          ASSERT_LT(axes.stride[axis], kMostStrideBytes);
        }
        ASSERT_NO_FATAL_FAILURE(expect_rows(address, rows, stride));
      }
    }
  }
  EXPECT_GT(mapped, 1000);
  EXPECT_GT(declined, 500);
}

// The last row that the map has at all is the tensor's last: it asks for nothing above.
TEST(Ragged, TheMapEndsWhereTheTensorDoes) {
  for (const int64_t rows : lengths()) {
    const uint64_t address = uint64_t{1} << 47;
    const int64_t stride = 8192;
    const RowAxes axes = row_axes(address, rows, stride, rows);
    const uint64_t last =
        axes.base + (axes.extent[0] - 1) * axes.stride[0] + (axes.extent[1] - 1) * axes.stride[1];
    EXPECT_EQ(last, address + static_cast<uint64_t>((rows - 1) * stride));
  }
}

TEST(Ragged, APlainMapIsTheTensor) {
  const RowAxes axes = row_axes(4096, 100, 256, 0);
  EXPECT_EQ(axes.base, 4096u);
  EXPECT_EQ(axes.extent[0], 100u);
  EXPECT_EQ(axes.extent[1], 1u);
  const MapRow at = map_row(0, 30, 20, 7);
  EXPECT_EQ(address_at(axes, at), 4096u + 37 * 256);
  EXPECT_TRUE(in_address_space(16, 256, 0));
}

// Shapes of ordinary calls, whose maps would begin below 0 if they were moved back by 2^24 rows.
TEST(Ragged, TensorsInReservedSegmentsAreMapped) {
  constexpr uint64_t kFirstReserved = 0x302000000;
  struct Case {
    int64_t rows, stride;
  };
  for (const Case& c :
       {Case{8000, 32 * 128 * 2}, {8000, 8 * 128 * 2}, {150, 4 * 256 * 2}, {2048, 6 * 64 * 2}}) {
    EXPECT_TRUE(in_address_space(kFirstReserved, c.stride, c.rows));
  }
  EXPECT_FALSE(in_address_space(kFirstReserved, 6 * 64 * 2, kMost + (1 << 23)));
}

class Addressable : public testing::Test {
 protected:
  static constexpr int kTensors[] = {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O};
  static constexpr int64_t kRows = 2048, kHeads = 6, kDim = 64;
  static constexpr uint64_t kBytes = kRows * kHeads * kDim * 2;  // of a sequence

  void SetUp() override {
    for (const int index : kTensors) {
      Tensor& t = problem_.tensor[index];
      t.dtype = TESSERA_BF16;
      const int64_t extent[] = {2, kRows, kHeads, kDim};
      const int64_t stride[] = {kRows * kHeads * kDim, kHeads * kDim, kDim, 1};
      std::copy(extent, extent + 4, t.extent);
      std::copy(stride, stride + 4, t.stride);
      put(index, kBytes + 16);
    }
  }
  void give_lengths(int index) {
    Tensor& t = problem_.tensor[index];
    t.dtype = TESSERA_INT32;
    t.extent[0] = 2;
    t.stride[0] = t.extent[1] = t.extent[2] = t.extent[3] = 1;
  }
  void put(int index, uint64_t address) {
    buffers_.data[index] = reinterpret_cast<void*>(static_cast<uintptr_t>(address));
  }
  std::string refused() const {
    const Unaddressable first = first_unaddressable(problem_, buffers_, kTensors);
    return first.rule ? first.name + std::string(": ") + first.rule : "";
  }

  Problem problem_{};
  Buffers buffers_{};
};

TEST_F(Addressable, OnlySidesWithLengthsNeedRoomBelow) {
  for (const int index : kTensors) put(index, 4096);
  EXPECT_EQ(refused(), "");
  give_lengths(TESSERA_SEQLENS_K);
  EXPECT_EQ(refused(),
            "k: with lengths, must be greater than seqlen times the bytes from row to row");
  put(TESSERA_K, kBytes + 16);
  put(TESSERA_V, kBytes + 16);
  EXPECT_EQ(refused(), "");
  give_lengths(TESSERA_SEQLENS_Q);
  EXPECT_EQ(refused().substr(0, 2), "q:");
}

TEST_F(Addressable, TheLowestAddressIsOneAboveItsRows) {
  give_lengths(TESSERA_SEQLENS_Q);
  give_lengths(TESSERA_SEQLENS_K);
  EXPECT_EQ(refused(), "");
  put(TESSERA_V, kBytes);
  EXPECT_EQ(refused().substr(0, 2), "v:");
}

TEST_F(Addressable, AddressesAreMultiplesOf16) {
  put(TESSERA_O, (uint64_t{1} << 40) + 8);
  EXPECT_EQ(refused(), "o: must be a multiple of 16");
}

}  // namespace
}  // namespace tessera::cuda::sm90
