// SPDX-License-Identifier: Apache-2.0
// The sizes that the CPU's kernels are built on, with their reasons. Results do not depend on the
// task sizes: a query's lane computes the same bits whatever stands in the other lanes, and blocks
// of keys begin at multiples of kBlock in every task.
#pragma once

#include <cstdint>

namespace tessera::cpu {

// Register tile: S::kRows x kVectors sums. The scores of a strip stand as S^T: a key a row, a query
// a lane; so K and V are read by broadcasts, unpacked, and softmax needs no horizontal operation.
inline constexpr int kVectors = 2;

template <typename S>
struct Tile {
  static constexpr int kStrip = kVectors * S::kLanes;

  // Keys of a block: S^T of a strip (128 x 32 fp32 = 16 KiB) and its P stay in L1 beside a few rows
  // of K, while rescaling of O and the softmax statistics are paid once in 128 keys. A multiple of
  // the register tile's rows and of 32 (a word of visibility bits); 64 costs 5 % more, 256 gains 0.
  // Decode has little of either, and its heads take turns at a block: 64 keys of 4 heads and those
  // that are asked for are 64 pages, as many as the first level of address translation holds.
  static constexpr int kBlock = S::kNarrow ? 64 : S::kRows == 6 ? 96 : 128;
  static_assert(kBlock % S::kRows == 0 && kBlock % 32 == 0);
};

// Queries of a forward task: as many strips as share one prepared block of K and V (converted or
// gathered at about 30 cycles a key, against 256 and more a strip), while Q^T, O^T (4 (dqk + dv)
// bytes a query) and the block stay in a 1 MiB L2.
constexpr int64_t forward_tile_m(int64_t dqk, int64_t dv) {
  const int64_t sum = dqk + dv;
  return sum <= 320 ? 256 : sum <= 640 ? 128 : 64;
}

// Queries of a backward tile: the depth of the products for dK and dV, whose sums are loaded and
// stored once a tile. 64 cost 3 points of peak at d = 64 in fp32. A multiple of every strip.
inline constexpr int kBackwardTile = 128;

// Rows of fp32 K or V that lie a multiple of this apart share the sets of L1 (8 heads of 128: 4
// KiB) and push each other and Q out of it: 8 heads are 4 points of peak slower than 7 or 9. A copy
// wins two of them back where this many strips use it; where 4 do, it costs as much. Rows of bf16
// are shorter, and its V is copied anyway.
inline constexpr int64_t kSpreadBytes = 4096;
inline constexpr int kSpreadStrips = 8;

// A sequence of at most this many queries is decoded: its rows are packed over the heads of a group
// (16 rows fill a vector), and its keys are split.
inline constexpr int64_t kSplitTokens = 16;

// Blocks of keys of a split: 1024 keys are 512 KiB of bf16 K and V at d 128, long enough to hide
// the start of a stream and the merge, short enough for 8 threads to share one head of 8k keys.
inline constexpr int64_t kSplitBlocks = 8;

// A split takes several kv heads, a block of each at a time, where these stand beside each other in
// memory: at most kMostTurns, whose blocks and the next ones are at most kTurnsBytes, half of an
// L2. One head alone would leave most of each page to later, and read memory at half the speed.
inline constexpr int kMostTurns = 8;
inline constexpr int64_t kTurnsBytes = 512 * 1024;

// It takes up to kMostChunks chunks, one after the other: each asks for the beginning of the next,
// and only the first waits for its own.
inline constexpr int64_t kMostChunks = 16;

// Rows of o (all heads) that one task sets to zero outside the sequences.
inline constexpr int64_t kFillRows = 256;

// Calls of fewer multiplications run on the caller's thread alone: about 30 microseconds, in which
// a second thread costs more than it brings, and a host's pool (OpenMP) may cost a time slice.
inline constexpr int64_t kSerialProducts = 2'000'000;

}  // namespace tessera::cpu
